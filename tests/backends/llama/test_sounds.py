"""Sounds in llama.cpp: the same tokens as libmtmd's own path, and mutated files without a crash.

More of them: EDGESPEC_FUZZ=20 pytest tests/backends/llama/test_sounds.py --slow
"""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import with_imports
from sound_gguf import HEARING, flac, mp3, samples, wav, write_hearing
from vision_cases import (
    Reference,
    forget_embeddings,
    held_encoder,
    open_backend,
    open_engine,
    prompt,
    read,
    text_of,
)
from vision_gguf import images, mutated

from edgespec.backends.base import ImageRun
from edgespec.decode.session import Session
from edgespec.errors import UnsupportedError
from edgespec.memory.bytes.projector import estimated_bytes, projector_parts
from edgespec.models.chat import ChatMessage
from edgespec.models.images import Image, Sound, read_image
from edgespec.models.projector import read_projector

pytestmark = pytest.mark.model
COUNT = 24 * int(os.environ.get("EDGESPEC_FUZZ", "1"))
SOUNDS = tuple(
    read_image(data)
    for data in (wav(samples(1)), wav(samples(2, 0.5, 44100), 44100, 2), flac(samples(3)), mp3())
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hearing")
    for name in HEARING:
        write_hearing(made, name)
    return made


def parts(*several: Image) -> list[str | Image]:
    return ["Listen:", *several, "What is this?"]


@pytest.mark.parametrize("name", HEARING)
@pytest.mark.parametrize("heard", [SOUNDS[:1], SOUNDS[1:3], SOUNDS[3:]])
def test_logits_are_those_of_libmtmd(folder: Path, name: str, heard: tuple[Image, ...]) -> None:
    backend = open_backend(folder, name, context_size=2048)
    found = read(backend, prompt(backend, parts(*heard)))
    expected, _ = Reference(backend).read(parts(*heard))
    assert np.isfinite(found).all() and np.array_equal(found, expected)
    backend.truncate(0)
    other = read(backend, prompt(backend, parts(*reversed(SOUNDS[: len(heard)]))))
    assert (heard == SOUNDS[:1]) == np.array_equal(found, other)
    backend.close()


@pytest.mark.parametrize("name", HEARING)
def test_drafts_and_the_cache_change_no_token(folder: Path, name: str) -> None:
    """The same sound again is found in the cache."""
    texts = [text_of(parts(one)) for one in SOUNDS[:2]]
    with open_engine(folder, name, drafts=True, context_size=2048) as engine:
        answers = []
        for text, sound in zip(texts * 2, SOUNDS[:2] * 2, strict=True):
            asked: Any = {"images": [sound], "max_tokens": 24, "raw": True}
            ids = engine.encode(text, raw=True, images=[sound])
            plain = engine.generate(ids, speculate=False, **asked)
            again = engine.generate(ids, reuse=True, **asked)
            assert plain.token_ids == again.token_ids
            answers.append(plain.token_ids)
    assert answers[:2] == answers[2:]


def test_a_sound_stands_where_an_image_may(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "speech.wav"
    path.write_bytes(SOUNDS[0].data)
    message: ChatMessage = {
        "role": "user",
        "content": [{"type": "audio", "audio": path}, {"type": "text", "text": "?"}],
    }
    with open_engine(folder, "qwen2a", context_size=2048) as engine:
        one = engine.generate([message], max_tokens=8)
        other = engine.generate("?", images=[path], max_tokens=8)
        session = Session(engine)
        session.send(
            [{"type": "audio", "audio": path}, {"type": "text", "text": "?"}], max_tokens=8
        )
        session.save(tmp_path / "kept.json")
        again = Session.load(engine, tmp_path / "kept.json")
        assert again.messages == session.messages
        assert session.messages[0]["content"][0]["type"] == "audio"
    assert one.token_ids == other.token_ids


def test_others_write_while_a_sound_is_encoded(folder: Path) -> None:
    asked: Any = {"images": [SOUNDS[0]], "max_tokens": 8}
    with open_engine(folder, "qwen2a", context_size=1024, users=2, cells=2048) as engine:
        expected = engine.generate("What is said?", **asked)
        forget_embeddings(engine)
        with held_encoder(engine) as held, ThreadPoolExecutor(1) as pool:
            heard = pool.submit(engine.generate, "What is said?", **asked)
            held.wait()
            assert engine.generate("Tell me more.", max_tokens=8).token_ids
            assert not heard.done()
            held.go_on.set()
            assert heard.result(60).token_ids == expected.token_ids


def test_who_hears_alone_sees_nothing(folder: Path, vision_folder: Path) -> None:
    picture = read_image(images(1)[0])
    for where, name, what, said in (
        (folder, "ultravox", picture, "hears alone, and the prompt has an image of"),
        (vision_folder, "llava", SOUNDS[0], "sees alone, and the prompt has a sound of 1 seconds"),
    ):
        backend = open_backend(where, name)
        with pytest.raises(UnsupportedError, match=f"mmproj-{name}.gguf {said}"):
            backend.image_pieces(what)
        backend.close()


@pytest.mark.parametrize(("width", "stack", "count"), [(1280, 8, 187), (64, 8, 0)])
def test_sizes_that_would_end_the_process_are_refused(
    tmp_path: Path, width: int, stack: int, count: int
) -> None:
    """Those of Ultravox are not."""
    write_hearing(tmp_path, "ultravox", width=width, stack=stack)
    if not count:
        with pytest.raises(UnsupportedError, match="sizes for sounds that llama"):
            read_projector(tmp_path / "mmproj-ultravox.gguf")
        return
    backend = open_backend(tmp_path, "ultravox")
    (run,) = backend.image_pieces(SOUNDS[0])
    assert isinstance(run, ImageRun) and len(run.ids) == count
    assert np.isfinite(backend.read_image(run)).all()
    backend.close()


@pytest.mark.parametrize("name", HEARING)
def test_cells_and_bytes_are_planned(folder: Path, name: str) -> None:
    backend = open_backend(folder, name, context_size=2048)
    projector = read_projector(folder / f"mmproj-{name}.gguf")
    for seconds in (0.1, 1, 29, 31, 61):
        sound = read_image(wav(samples(1, seconds)))
        assert isinstance(sound, Sound)
        pieces = backend.image_pieces(sound)
        cells = sum(len(one.ids if isinstance(one, ImageRun) else one) for one in pieces)
        assert cells <= projector.sound_cells(sound.seconds) <= cells + 40
    told = backend.memory_bytes()
    planned = {one.name: one.nbytes for one in projector_parts(projector, None, on_gpu=False)}
    assert told["projector"] == planned["projector"]
    assert told["projector_compute"] == planned["projector_compute"]
    assert told["projector_compute"] <= estimated_bytes(projector, projector.patches(None))
    backend.close()


def listen_to_all(folder: Path, count: int, seed: int) -> dict[str, int]:
    """How many of some mutated sounds were refused by their header, by the decoder, or read."""
    source, found = random.Random(seed), {"refused": 0, "broken": 0, "read": 0}
    backend = open_backend(folder, "ultravox")
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    for number in range(count):
        try:
            sound = read_image(mutated(SOUNDS[number % len(SOUNDS)].data, source))
        except UnsupportedError:
            found["refused"] += 1
            continue
        try:
            backend.image_pieces(sound)
            found["read"] += 1
        except UnsupportedError:
            found["broken"] += 1
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - used
    assert more < 240 << 20, f"{more >> 20} MiB"  # which a plan has for it
    backend.close()
    return found


def test_mutated_sounds_are_read_or_refused(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, __file__, str(folder), str(COUNT)],
        capture_output=True,
        text=True,
        timeout=120 + COUNT,
        env=with_imports(),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    counts = dict(part.split("=") for part in done.stdout.split())
    assert sum(map(int, counts.values())) == COUNT
    assert min(map(int, counts.values())) > 0, counts


if __name__ == "__main__":
    told = listen_to_all(Path(sys.argv[1]), int(sys.argv[2]), 11)
    print(*(f"{name}={count}" for name, count in told.items()))
