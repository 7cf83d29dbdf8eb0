"""Images on the command line: `run --image`, `/image` in a chat, and their place in a plan."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Command, Done
from random_gguf import Q8_0
from sound_gguf import samples, wav, write_hearing
from vision_cases import open_engine
from vision_gguf import images, write_vision

pytestmark = [pytest.mark.model, pytest.mark.slow]
QUESTION = "What is this?"
ONE_THREAD = ("--ctx", "512", "--threads", "1", "--max-tokens", "12")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pictures")
    for number, data in enumerate(images(2)):
        (folder / f"{number}.png").write_bytes(data)
    return [str(folder / f"{number}.png") for number in range(2)]


@pytest.fixture(params=["gemma3", "qwen3vl"])
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


def ask(command: Command, folder: Path, name: str, *more: str) -> Done:
    return command("run", str(folder / f"{name}.gguf"), QUESTION, *ONE_THREAD, *more)


def test_run_shows_images_and_checks_the_answer(
    vision_folder: Path, name: str, pictures: list[str], here: Command
) -> None:
    shown = [part for one in pictures for part in ("--image", one)]
    done = ask(here, vision_folder, name, *shown, "--check", "--json")
    assert done.status == 0, done.err
    found = done.document
    with open_engine(vision_folder, name, context_size=512) as engine:
        expected = engine.generate(QUESTION, images=pictures, max_tokens=12, speculate=False)
    assert found["token_ids"] == list(expected.token_ids)
    assert found["check"]["identical"] and found["check"]["compared_tokens"] == 12
    assert found["plan"]["mmproj"]["value"] == f"mmproj-{name}.gguf"


def test_plan_counts_images(vision_folder: Path, name: str, here: Command) -> None:
    model = str(vision_folder / f"{name}.gguf")
    done = here("plan", model, "--ctx", "512", "--images", "1", "--json")
    assert done.status == 0, done.err
    assert done.document["plan"]["mmproj"]["value"] == f"mmproj-{name}.gguf"
    assert any(key.startswith("projector") for key in done.document["memory"]["components"])


@pytest.mark.parametrize("name", ["gemma3", "qwen3vl"])
def test_exact_answers_behind_an_image_are_plain_decodings(
    tmp_path: Path, name: str, pictures: list[str], here: Command
) -> None:
    """Of a type whose logits do not change with the size of a step, as `--exact` asks for."""
    write_vision(tmp_path, name, weights=Q8_0)
    shown = ("--image", pictures[0], "--exact", "--check", "--json")
    done = ask(here, tmp_path, name, *shown)
    assert done.status == 0 and done.document["check"]["identical"], done.err


def test_run_reads_an_image_from_a_pipe(
    vision_folder: Path, pictures: list[str], here: Command
) -> None:
    arguments = ["run", str(vision_folder / "llava.gguf"), QUESTION, *ONE_THREAD, "--json"]
    by_name = here(*arguments, "--image", pictures[0])
    piped = here(*arguments, "--image", "-", stdin=Path(pictures[0]).read_bytes())
    assert piped.document["token_ids"] == by_name.document["token_ids"]


def test_run_and_chat_play_sounds(tmp_path: Path, here: Command) -> None:
    write_hearing(tmp_path, "ultravox")
    model, sound = str(tmp_path / "ultravox.gguf"), str(tmp_path / "speech.wav")
    Path(sound).write_bytes(wav(samples(1, 31)))
    done = here("run", model, QUESTION, *ONE_THREAD[2:], "--audio", sound, "--check", "--json")
    assert done.status == 0 and done.document["check"]["identical"], done.err
    assert done.document["prompt_tokens"] > 2 * 375
    typed = f"/audio {sound}\n?\n"
    done = here("chat", model, "--ctx", "1024", "--threads", "1", stdin=typed)
    assert done.status == 0 and "with the next message: a sound of 31 seconds" in done.err


REFUSED = [
    (("--image", "nowhere.png"), "cannot read nowhere.png"),
    (("--image", "https://x.org/a.png"), "images are not fetched from addresses"),
    (("--image", "{one}", "--mmproj", "none"), "this model reads text alone"),
    (("--image", "{one}", "--mmproj", "{model}"), "is no projector for images"),
    (("--image", "-", "--image", "-"), "stdin, which - reads, is there once"),
    (("--image", "{one}", "--drafter", "head"), "a head follows texts alone"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_run_refuses(
    vision_folder: Path, pictures: list[str], here: Command, options: tuple[str, ...], words: str
) -> None:
    places = {"one": pictures[0], "model": str(vision_folder / "llava.gguf")}
    given = [one.format(**places) for one in options]
    done = ask(here, vision_folder, "llava", *given)
    assert done.status != 0 and words in " ".join(done.err.replace("│", " ").split())
    assert "Traceback" not in done.err


def test_a_chat_shows_images(vision_folder: Path, pictures: list[str], here: Command) -> None:
    model, file = str(vision_folder / "qwen3vl.gguf"), f"{Path(pictures[0]).parent}/a.session"
    typed = f"/image nowhere.png\n/image {pictures[0]}\n{QUESTION}\nAnd now?\n/save {file}\n"
    done = here("chat", model, *ONE_THREAD[:4], stdin=typed)
    assert done.status == 1, "of the command that failed"
    assert "cannot read nowhere.png" in done.err
    assert "with the next message: an image of" in done.err
    again = f"/load {file}\nAnd then?\n"
    done = here("chat", model, *ONE_THREAD[:4], stdin=again)
    assert done.status == 0 and "error" not in done.err


def test_a_chat_without_a_projector_refuses_at_once(
    vision_folder: Path, pictures: list[str], here: Command
) -> None:
    typed = f"/image {pictures[0]}\nHello\n"
    model = str(vision_folder / "llava.gguf")
    done = here("chat", model, *ONE_THREAD[:4], "--mmproj", "none", stdin=typed)
    assert done.status == 1 and done.err.count("reads text alone") == 1
    assert done.out.strip()
