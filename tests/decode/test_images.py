"""Answers to prompts with images: tokens of plain libmtmd, drafts, caches, users, sessions."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fake_backend import FakeBackend
from vision_cases import (
    PLACES,
    Reference,
    forget_embeddings,
    held_encoder,
    open_engine,
    parts_with,
    shown,
    text_of,
)
from vision_gguf import KINDS, images, picture, png

from edgespec.backends.llama.backend import LlamaSequence
from edgespec.decode.engine import Engine
from edgespec.decode.generation import Result
from edgespec.decode.options import GenerationOptions
from edgespec.decode.scheduler import Scheduler
from edgespec.decode.session import Session, _are_cells
from edgespec.errors import UnsupportedError
from edgespec.models.chat import ChatMessage
from edgespec.models.images import Image

COUNT = 12  # tokens of an answer
OFTEN = ("gemma3", "qwen3vl", "llava")
SELDOM = [pytest.param(kind, marks=pytest.mark.long) for kind in KINDS if kind not in OFTEN]


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest, vision_folder: Path) -> Iterator[Engine]:
    with open_engine(vision_folder, request.param, drafts=True) as made:
        yield made


@pytest.fixture(params=OFTEN)
def pair(request: pytest.FixtureRequest, vision_folder: Path) -> Iterator[Engine]:
    """An engine of two users."""
    with open_engine(vision_folder, request.param, drafts=True, users=2, cells=1024) as made:
        yield made


def asked(question: str, *several: Image) -> list[ChatMessage]:
    parts = [{"type": "image", "image": one} for one in several]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


@pytest.mark.parametrize("count", [2, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 5))])
@pytest.mark.parametrize("place", PLACES)
def test_tokens_are_those_of_plain_libmtmd(engine: Engine, count: int, place: str) -> None:
    """With drafts, and without them; from the second time on there is a text to draft from."""
    parts = parts_with(place, count)
    several = [one for one in parts if isinstance(one, Image)]
    ids = engine.shown("", several).encode(text_of(parts))
    options = GenerationOptions(max_tokens=COUNT, images=several)
    plain = engine.generate(ids, options, speculate=False)
    drafted = [engine.generate(ids, options) for _ in range(2)]
    assert [one.token_ids for one in drafted] == [plain.token_ids] * 2
    assert drafted[1].counters.accepted_tokens > 0
    expected = Reference(engine.backend).greedy(parts, COUNT)  # type: ignore[arg-type]
    assert expected is None or list(plain.token_ids) == expected


def test_messages_have_images_in_any_form(engine: Engine, tmp_path: Path) -> None:
    import base64

    data = images(1)[0]
    (tmp_path / "one.png").write_bytes(data)
    text = base64.b64encode(data).decode()
    forms: list[dict[str, Any]] = [
        {"type": "image", "image": data},
        {"type": "image", "image": tmp_path / "one.png"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}},
        {"type": "input_image", "image_url": f"data:image/png;base64,{text}"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": text}},
    ]
    question = {"type": "text", "text": "What is this?"}
    found = [engine.encode([{"role": "user", "content": [form, question]}]) for form in forms]
    assert all(ids == found[0] for ids in found) and min(found[0]) < 0
    stream = engine.stream("What is this?", images=[tmp_path / "one.png"], max_tokens=1)
    assert list(stream.prompt_ids) == found[0]
    assert (
        engine.stream("What is this?", images=[data], max_tokens=1).prompt_ids == stream.prompt_ids
    )


def test_a_prefix_with_the_same_image_is_not_computed_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = shown(2)
    first = engine.generate(asked("What is this?", one), max_tokens=4, reuse=True)
    backend: Any = engine.backend
    if backend.capabilities.truncate:
        monkeypatch.setattr(backend._context.vision, "embeddings", None)
    again = engine.generate(asked("What is this?", one), max_tokens=4, reuse=True)
    assert again.token_ids == first.token_ids
    monkeypatch.undo()
    of_other = engine.generate(asked("What is this?", other), max_tokens=4, reuse=True)
    fresh = engine.generate(asked("What is this?", other), max_tokens=4)
    assert of_other.token_ids == fresh.token_ids


@pytest.mark.parametrize("engine", [*OFTEN, *SELDOM], indirect=True)
def test_a_session_keeps_its_images(engine: Engine, tmp_path: Path) -> None:
    """Each turn reads what is new; a file has the images and, with their cells, the cache."""
    engine.cache_key = "tiny"
    session = Session(engine, max_tokens=6)
    session.send(asked("What is this?", *shown(1))[0]["content"])
    turn = session.stream("And again?")
    assert len(list(turn)) > 0
    reused = turn.num_read[1]
    assert reused > len(engine.encode(asked("", *shown(1)))) - 20
    fresh = engine.generate(turn.prompt_ids, max_tokens=6, images=shown(1))
    assert fresh.token_ids == turn.result.token_ids
    session.send("And now?")
    session.save(tmp_path / "saved")
    follow_up = session.send("Once more?")
    engine.generate("Something else", max_tokens=2)
    loaded = Session.load(engine, tmp_path / "saved")
    assert loaded.messages == session.messages[:-2]
    turn = loaded.stream("Once more?")
    assert "".join(chunk.text for chunk in turn) == follow_up.text
    assert turn.num_read[1] == follow_up.counters.reused_tokens > reused
    content = session.messages[0]["content"]
    assert content[0] == {"type": "image", "image": shown(1)[0]}
    Session(engine, messages=session.messages).send("?")


@pytest.mark.parametrize(
    "images",
    [
        *([], [[0, 4, 4]], [[1, 4]], [["1", 4, 4]], [[1, 4, 5]], [[1, 4, 0]], [[2, 4, 4]]),
        *([[1, 4, 4], [5, 1, 1]], [[1, 1 << 40, 4]], [[1, 1 << 40, 4], [1, 4 - (1 << 40), 4]]),
    ],
)
def test_images_of_a_damaged_session_are_not_taken(images: list[Any]) -> None:
    ids = [5, -1, -2, -3, -4, 6]
    assert _are_cells([[1, 4, 2]], ids) and _are_cells([[1, 2, 2], [3, 2, 1]], ids)
    assert not _are_cells(images, ids)


def test_two_users_see_their_own_images(pair: Engine) -> None:
    """The same question at once, again and again, about two images, and about none."""
    one, other = shown(2)
    prompts = [asked("What is this?", one), asked("What is this?", other), asked("What is this?")]
    expected = [pair.generate(prompt, max_tokens=COUNT, speculate=False) for prompt in prompts]
    assert len({result.token_ids for result in expected}) == 3
    options = GenerationOptions(max_tokens=COUNT, reuse=True)
    with ThreadPoolExecutor(6) as pool:
        made = [pool.submit(pair.generate, prompt, options) for _ in range(4) for prompt in prompts]
        found = [one.result(100).token_ids for one in made]
    assert found == [result.token_ids for result in expected] * 4


def test_an_answer_under_way_survives_anothers_image(pair: Engine) -> None:
    writing = pair.stream(asked("Tell me more."), max_tokens=30)
    next(writing)
    seen = pair.generate(asked("What is this?", *shown(3)), max_tokens=4)
    for _ in writing:
        pass
    assert len(seen.token_ids) > 0
    alone = pair.generate(asked("Tell me more."), max_tokens=30, speculate=False)
    assert writing.result.token_ids == alone.token_ids


def test_others_write_and_begin_while_an_image_is_encoded(pair: Engine) -> None:
    question = asked("What is this?", *shown(1, first=21))
    expected = pair.generate(question, max_tokens=4, speculate=False)
    forget_embeddings(pair)
    writing = pair.stream(asked("Tell me more."), max_tokens=30)
    next(writing)
    with held_encoder(pair) as held, ThreadPoolExecutor(1) as pool:
        seen = pool.submit(pair.generate, question, max_tokens=4)
        held.wait()
        assert sum(len(chunk.token_ids) for chunk in writing) > 20
        assert pair.generate(asked("Another."), max_tokens=8).token_ids
        assert not seen.done()
        held.go_on.set()
        assert seen.result(60).token_ids == expected.token_ids
    assert held.count == 1


def _assert_same_but_for_rounding(found: Result, alone: Result) -> None:
    """Attention sums in another order over a cache that others write to.

    It moves log probabilities of these random weights by up to 0.042 (AVX2); a token may change
    only where the best two are as near.
    """
    noise = 0.1
    for one, other in zip(found.logprobs, alone.logprobs, strict=False):
        if one.token != other.token:
            (_, best), (_, second) = other.best
            assert best - second < 2 * noise
            return
        assert one.logprob == pytest.approx(other.logprob, abs=noise)
    assert found.token_ids == alone.token_ids


@pytest.mark.parametrize("name", ["llava", "qwen3vl"])
def test_others_write_between_the_parts_of_an_image(
    vision_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """One that is cancelled there is taken back, and its cells are read anew."""
    read_rows, step, events = LlamaSequence._read_rows, Scheduler._step, list[str]()
    cancel = threading.Event()

    def watched_rows(sequence: LlamaSequence, *given: Any) -> None:
        read_rows(sequence, *given)
        events.append("part")
        cancel.set()

    def watched_step(scheduler: Scheduler, writing: Any, *given: Any) -> None:
        step(scheduler, writing, *given)
        events.extend(["step"] * bool(writing))

    question = asked("What is this?", *shown(1))
    with open_engine(vision_folder, name, users=2, cells=1024, batch_size=4) as engine:
        expected = engine.generate(question, max_tokens=COUNT, logprobs=2)
        alone = engine.generate(asked("Tell me more."), max_tokens=90, logprobs=2)
        monkeypatch.setattr(LlamaSequence, "_read_rows", watched_rows)
        monkeypatch.setattr(Scheduler, "_step", watched_step)
        for options in (
            GenerationOptions(max_tokens=COUNT, reuse=True, logprobs=2, cancel=cancel),
            GenerationOptions(max_tokens=COUNT, reuse=True, logprobs=2),
        ):
            events.clear()
            writing = engine.stream(asked("Tell me more."), max_tokens=90, logprobs=2)
            next(writing)
            found = engine.generate(question, options)
            for _ in writing:
                pass
            _assert_same_but_for_rounding(writing.result, alone)
            parts = [place for place, what in enumerate(events) if what == "part"]
            if options.cancel is not None:
                assert found.finish_reason == "cancelled" and len(parts) == 1
            else:
                _assert_same_but_for_rounding(found, expected)
                assert len(parts) > 1
                assert all("step" in events[one:other] for one, other in pairwise(parts))


def test_a_cancelled_image_keeps_nobody_waiting(pair: Engine) -> None:
    """One that is being encoded ends by itself; one that waits for it never begins."""
    one, other = shown(2, first=31)
    with held_encoder(pair) as held, ThreadPoolExecutor(2) as pool:
        events = threading.Event(), threading.Event()
        answers = []
        for image, event in zip((one, other), events, strict=True):
            options = GenerationOptions(max_tokens=4, cancel=event)
            answers.append(pool.submit(pair.generate, asked("What is this?", image), options))
            if image is one:
                held.wait()
        for event, answer in zip(reversed(events), reversed(answers), strict=True):
            event.set()
            assert answer.result(60).finish_reason == "cancelled"
        assert pair.generate(asked("Another."), max_tokens=8).token_ids
        held.go_on.set()
        assert pair.generate(asked("What is this?", one), max_tokens=4).token_ids
    assert held.count == 1


def test_an_engine_is_closed_while_it_encodes(vision_folder: Path) -> None:
    """Its projector is freed behind that; nobody hangs, and what waits never begins."""
    engine = open_engine(vision_folder, "llava", users=2, cells=1024)
    with held_encoder(engine) as held, ThreadPoolExecutor(3) as pool:
        asking = [asked("What is this?", image) for image in shown(2, first=41)]
        answers = [pool.submit(engine.generate, one, max_tokens=4) for one in asking]
        held.wait()
        closing = pool.submit(engine.close)
        for answer in answers:
            with suppress(UnsupportedError):
                assert answer.result(60).finish_reason == "cancelled"
        assert not closing.done()
        held.go_on.set()
        closing.result(60)
    assert held.count == 1
    with pytest.raises(UnsupportedError, match="is closed"):
        engine.generate(asked("Another."))


def test_penalties_and_grammars_work_behind_an_image(engine: Engine) -> None:
    from edgespec.sampling.params import SamplingParams

    sampling = SamplingParams(
        repetition_penalty=1.2, presence_penalty=0.1, dry_multiplier=0.8, temperature=0.5, seed=3
    )
    result = engine.generate(
        asked("What?", *shown(1)), sampling=sampling, regex="[ab]{3}", max_tokens=8
    )
    assert set(result.text[:3]) <= set("ab") and len(result.token_ids) == 4


# -- what is refused -----------------------------------------------------------------------


def test_a_model_without_a_projector_refuses_images() -> None:
    fake = FakeBackend(lambda _: [0.0] * 300, 300)
    engine = Engine(fake, chat_template="{{ messages[0].content }}")
    with pytest.raises(UnsupportedError, match="reads text alone") as problem:
        engine.generate(asked("What?", *shown(1)))
    assert "--mmproj" in problem.value.hint


def test_an_image_that_is_not_shown_is_refused(pair: Engine) -> None:
    with pytest.raises(UnsupportedError, match="an image was given that the prompt does not show"):
        pair.generate([{"role": "user", "content": "Hi"}], images=shown(1))
    with pytest.raises(UnsupportedError, match="token id -5 is not in the vocabulary"):
        pair.generate([1, -5, 2])


def test_a_broken_image_fails_before_its_turn(pair: Engine) -> None:
    data = png(picture(1))
    cut = data[:60] + bytes(20) + data[80:]
    with pytest.raises(UnsupportedError, match="is broken"):
        pair.stream("What?", images=[cut])
    with pytest.raises(UnsupportedError, match="cannot read nowhere"):
        pair.stream("What?", images=["nowhere.png"])
    with pytest.raises(UnsupportedError, match="not fetched from addresses, such as 'https:"):
        pair.stream("What?", images=["https://x.org/a.png"])


def test_a_failing_encoder_ends_one_answer(pair: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgespec.errors import BackendError

    def fail(*_: Any) -> None:
        raise BackendError("no memory")

    backend: Any = pair.backend
    monkeypatch.setattr(backend._context.vision, "_encoded", fail)
    with pytest.raises(BackendError, match="no memory"):
        pair.generate(asked("What?", *shown(1, first=9)))
    monkeypatch.undo()
    assert pair.generate(asked("What?", *shown(1, first=9)), max_tokens=2).token_ids
