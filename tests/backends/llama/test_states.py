"""Conversations of models that cannot go back to any token: hybrids and sliding windows.

Newlines begin messages here: these models have no control tokens. Texts that go on from a state are
compared with those of a backend that reads everything.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hybrid_gguf import HYBRIDS, Shape, write_hybrid
from hypothesis import given
from hypothesis import strategies as st
from random_gguf import F32, write_model

import edgespec
from edgespec.backends.base import DraftTree
from edgespec.backends.llama import states
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.context import LlamaContext
from edgespec.backends.llama.recurrent import RecurrentBackend
from edgespec.backends.llama.states import States, _spread
from edgespec.decode.engine import Engine
from edgespec.decode.generation import Result
from edgespec.errors import BackendError, DoesNotFitError
from edgespec.measure.noise import find_divergence
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.plan.plan import Request
from edgespec.models.spec import read_model_spec
from edgespec.setup.planning import make_run_plan

pytestmark = pytest.mark.model

RECURRENT, SLIDING = HYBRIDS[:3], ("gemma3", "gpt-oss")
NEWLINE = ord("\n")
SYSTEM = "You are of use to whoever asks, and call tools by their names.\n" * 5
WORDS = ("where", "is", "the", "file", "that", "I", "wrote", "in", "June")


def write(folder: Path, arch: str) -> Path:
    path = folder / f"{arch}.gguf"
    if arch == "gemma3":
        return write_model(path, arch, F32, reads_bytes=True)
    return write_hybrid(path, Shape(arch), F32)


@pytest.fixture(scope="module", params=[*RECURRENT, *SLIDING])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("states"), request.param)


@pytest.fixture
def num_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Tokens of each step; states are kept at each newline, whatever a copy takes."""
    monkeypatch.setattr(states, "_GAIN", 0.0)
    monkeypatch.setattr(States, "_begins_message", lambda _self, token: token == NEWLINE)
    counts: list[int] = []
    decode = LlamaContext.decode

    def counted(self: LlamaContext, batch: Any, count: int) -> None:
        counts.append(count)
        decode(self, batch, count)

    monkeypatch.setattr(LlamaContext, "decode", counted)
    yield counts


def opened(path: Path, *, snapshots: int = 0, **changes: Any) -> LlamaBackend:
    sizes: dict[str, Any] = {"batch_size": 64, "max_nodes": 1 + snapshots, "gpu_layers": 0}
    settings = RunConfig(2048, snapshots=snapshots, **sizes, **changes)
    if snapshots:
        return RecurrentBackend(path, settings)
    return LlamaBackend(path, settings)


def assert_alike(plain: Engine, prompt: list[int], answer: Result) -> None:
    """The tokens of who reads everything, or others from where that one is undecided.

    Prompts that are read in other pieces are rounded differently, by 0.05 of logits that have a
    standard deviation of 8; a wrong state moves them by more than 1.
    """
    expected = plain.generate(prompt, max_tokens=len(answer.token_ids)).token_ids
    found = find_divergence(plain.backend, prompt, expected, answer.token_ids)
    assert found is None or found.gap <= 0.1, found


def said(number: int) -> str:
    source = random.Random(number)
    return " ".join(source.choices(WORDS, k=12)) + "\n"


@pytest.mark.parametrize(
    ("path", "snapshots"),
    [*((name, 0) for name in (*RECURRENT, *SLIDING)), *((name, 3) for name in RECURRENT)],
    indirect=["path"],
)
def test_ten_turns_with_tool_calls_read_each_token_once(
    path: Path, num_read: list[int], snapshots: int
) -> None:
    """Whatever a template makes of the answers: a thought is left out, a call is written anew."""
    with closing(opened(path, snapshots=snapshots, states=4)) as backend, ExitStack() as opening:
        engine = Engine(backend)
        plain = Engine(opening.enter_context(closing(opened(path, snapshots=snapshots))))
        text, before = SYSTEM, ""
        for turn in range(10):
            new = said(turn) if turn % 2 else f'tool: {{"name": "find", "line": {turn}}}\n'
            prompt = list(f"{text}{new}bot:".encode())
            num_read.clear()
            answer = engine.generate(prompt, max_tokens=6, reuse=True)
            count = sum(num_read)
            called = f'bot:call {{"name": "find", "text": "{turn}"}}\n'
            if turn:
                most = len(f"{before}{new}bot:") + 6 + 12  # and a message's end, twice
                assert count <= most, f"turn {turn} reads {count} tokens, {most} are new"
                assert answer.counters.reused_tokens > len(text) - len(before) - 12
            assert_alike(plain, prompt, answer)
            before, text = called, f"{text}{new}{called}"
        if path.stem not in SLIDING:
            assert len({one.length for one in backend._shared.states._all}) == 4


def test_a_system_prompt_is_read_once_for_all_users(path: Path, num_read: list[int]) -> None:
    users = 3 if path.stem in SLIDING else 1  # as many as a model with a recurrent state serves
    with (
        closing(opened(path, states=8, users=users)) as backend,
        closing(opened(path)) as other,
    ):
        engine, plain = Engine(backend), Engine(other)
        for user in "abcab":
            prompt = list(f"{SYSTEM}{user} asks: {said(ord(user))}bot:".encode())
            num_read.clear()
            answer = engine.generate(prompt, max_tokens=6, reuse=True)
            count, is_first = sum(num_read), not answer.counters.reused_tokens
            assert is_first == (count > len(SYSTEM)) and (user == "a" or not is_first)
            assert count <= len(prompt) + 6 - (0 if is_first else len(SYSTEM) - 2)
            assert_alike(plain, prompt, answer)


def test_two_users_in_turns_read_their_new_tokens_alone(
    num_read: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies within the long message that both begin with is given up before their last ones."""
    monkeypatch.setattr(states, "_FAR", 64)
    path, system = write(tmp_path, "gemma3"), SYSTEM.replace("\n", " ") * 2 + "\n"
    with closing(opened(path, states=3, users=2)) as backend:
        engine, texts = Engine(backend), {"a": system, "b": system}
        for turn in range(4):
            for user in texts:
                texts[user] += said(ord(user) + turn)
                num_read.clear()
                engine.generate(list(f"{texts[user]}bot:".encode()), max_tokens=6, reuse=True)
                if turn:
                    assert sum(num_read) <= len(said(ord(user) + turn)) + 2 * len("bot:") + 6 + 8
                texts[user] += f"bot:{turn}\n"


def test_users_that_answer_at_once_keep_their_own_states(
    num_read: list[int], tmp_path: Path
) -> None:
    """Texts of a sliding window in shared steps, each twice: the second time they come back."""
    path = write(tmp_path, "gemma3")
    with closing(opened(path, states=8, users=3)) as backend, closing(opened(path)) as other:
        engine, plain = Engine(backend), Engine(other)
        prompts = [list(f"{SYSTEM}{user}{said(ord(user))}bot:".encode()) for user in "abc"]
        expected = [list(plain.generate(one, max_tokens=9).token_ids) for one in prompts]
        for turn in range(2):
            streams = [engine.stream(one, max_tokens=9, reuse=True) for one in prompts]
            iterators = [iter(one) for one in streams]
            for one in iterators * 12:
                next(one, None)
            assert [list(one.result.token_ids) for one in streams] == expected
            if turn:
                assert all(one.result.counters.reused_tokens > len(SYSTEM) for one in streams)


def test_states_go_to_a_file_and_back(path: Path, num_read: list[int]) -> None:
    """A saved conversation goes on from any of them, as it does from its cells."""
    asked = [f"{SYSTEM}{said(one)}bot:".encode() for one in range(2)]
    saved = str(path.with_suffix(".saved"))
    with closing(opened(path, states=4)) as backend:
        engine = Engine(backend, cache_key="key")
        engine.generate(list(asked[0]), max_tokens=6, reuse=True)
        expected = list(engine.generate(list(asked[1]), max_tokens=6, reuse=True).token_ids)
        engine.generate(list(asked[0]), max_tokens=6, reuse=True)
        tokens = list(backend.tokens[: backend.length - backend.pending])
        assert len(tokens) > len(SYSTEM)
        backend.save_cache(saved)
    with closing(opened(path, states=4)) as backend:
        engine = Engine(backend, cache_key="key")
        backend.load_cache(saved, tokens)
        answer = engine.generate(list(asked[1]), max_tokens=6, reuse=True)
        assert answer.counters.reused_tokens >= len(SYSTEM) - 1
        assert list(answer.token_ids) == expected
    with closing(opened(path, states=4)) as backend:
        backend.prefill(asked[0][:20])
        file = path.with_suffix(".cache")
        backend.save_cache(str(file))
        whole = file.read_bytes()
        cells = whole[: whole.index(b"edgstate")]
        for damage in (b"", b"\xff\xff\xff\xff", b"\2\0\0\0" + b"\7" * 40):
            file.write_bytes(cells + b"edgstate" * bool(damage) + damage)
            backend.load_cache(str(file), list(asked[0][:20]))
            assert backend.length == 20 and not backend._shared.states._all


@pytest.mark.parametrize("path", RECURRENT[:1], indirect=True)
def test_a_cache_that_was_lost_has_no_copies_for_the_next_text(path: Path) -> None:
    text = list(SYSTEM.encode())
    with closing(opened(path, snapshots=3, states=4)) as backend:
        backend.prefill(text[:20])
        backend._shared.states.keep(0, 20)
        backend.verify(DraftTree.chain((1, 2)))
        with pytest.raises(BackendError, match="before the last step"):
            backend.prefill(text[20:22])
        backend.prefill(text[::-1][:30])
        assert backend.truncate(25) == 0


def test_what_is_lost_is_said_in_the_log(
    path: Path, num_read: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "edgespec.llama")
    with closing(opened(path)) as backend:
        for piece in range(0, 640, 64):
            backend.prefill(list(range(64)) if piece else list(range(1, 65)))
        assert backend.truncate(100) == 0
    assert "100 of 100 tokens that the cache had are read again" in caplog.text


@pytest.mark.long
def test_states_take_what_the_plan_says(
    path: Path, num_read: list[int], cache_folder: Path
) -> None:
    """Fewer are kept where memory is tight; no model is refused because of them."""
    spec = read_model_spec(path)
    request = Request(context_size=2048, users=1, drafter="none")
    plan = make_run_plan(spec, request)
    assert plan.states >= 2
    with edgespec.load(path, context_size=2048, users=1, drafter="none") as engine:
        for turn in range(12):
            text = SYSTEM + "".join(map(said, range(turn)))
            engine.generate(list(text.encode()), max_tokens=1, reuse=True)
        held = engine.memory_bytes()["states"]
    ceiling = plan.component_bytes["states"]
    assert 0.8 * ceiling < held <= ceiling
    counts, budget = list[int](), plan.predicted_peak_bytes
    with suppress(DoesNotFitError):
        while True:
            fewer = make_run_plan(spec, replace(request, budget_bytes=budget))
            assert fewer.predicted_peak_bytes <= budget and fewer.context_size == 2048
            counts.append(fewer.states)
            budget -= max(1000, ceiling // plan.states // 2)
    assert max(counts) == counts[0] == plan.states and min(counts) == counts[-1] == 0
    exact = make_run_plan(spec, replace(request, exact=True))
    assert (exact.states == 0) == (path.stem in SLIDING)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=30), st.integers(1, 12))
def test_kept_places_are_spread_and_the_last_one_stays(places: list[int], most: int) -> None:
    kept = _spread(places, most)
    assert set(kept) <= set(places) and kept == sorted(kept) and max(places) in kept
    assert len(kept) == min(most, len(set(places))) and (most == 1 or min(places) in kept)


class _Vocabulary:
    def token_bytes(self, token: int) -> bytes:
        return b"" if token in (1, 2) else b"a"

    def is_end(self, token: int) -> bool:
        return token == 2


class _Nothing:
    tokenizer = _Vocabulary()


def stops(text: Sequence[int], start: int = 0, **price: Any) -> list[int]:
    made = States(_Nothing(), 8)  # type: ignore[arg-type]
    for name, value in price.items():
        setattr(made, name, value)
    return made.stops(0, text, start)


def test_reading_stops_where_messages_begin() -> None:
    """At control tokens that end no answer; near ones are not worth a copy, the last always is."""
    message = [1, *[5] * 50, 2]
    text = message * 3 + [1, 5, 5]
    assert stops(text) == [52, 104, 156]
    assert stops(text, start=104) == [156]
    assert stops([7, *text]) == [1, 53, 105, 157][1:], "no state before the first word"
    assert stops([5] * 500) == [499], "no message begins: the next one may go on from here"
    assert stops(text, _copy_s=0.02, _token_s=0.004) == [52, 104, 156]
    assert stops(text, _copy_s=0.04, _token_s=0.004) == [156], "100 tokens are read meanwhile"
    assert stops([5]) == [] == stops([5, 5], start=1)
    long = [1, *[5] * 5000, 1, 5]
    assert stops(long) == [2048, 4096, 5001]
    image = range(-3000, 0)
    seen = [1, *[5] * 1000, *image, *[5] * 3000, 1, 5]
    assert stops(seen) == [4096, 6144, 7001], "2048 lies within an image, which is read whole"
    system = [5] * 9000 + text
    assert stops(system) == [2048, 4096, 6144, 8192, 9000, 9052, 9104, 9156]
    assert stops(system, most=3) == [9000, 9104, 9156], "ends of messages come first"
