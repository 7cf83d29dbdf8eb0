"""The engine as its users see it: streams, endings, threads, errors and counters."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from edgespec.backends.base import Logits
from edgespec.backends.fake import ByteTokenizer, FakeBackend
from edgespec.backends.tree import DraftTree
from edgespec.decode.engine import Engine
from edgespec.decode.generation import Chunk, Run, Stream
from edgespec.decode.stats import Counters
from edgespec.drafting.drafters.base import Drafter, Outcome
from edgespec.drafting.drafters.combined import CombinedDrafter
from edgespec.drafting.drafters.recycling import RecyclingDrafter
from edgespec.drafting.drafters.suffix import SuffixDrafter
from edgespec.drafting.proposal import EMPTY, Proposal, Stakes
from edgespec.errors import BackendError, ContextFullError, UnsupportedError
from edgespec.memory.times.curve import CostCurve
from edgespec.sampling.params import SamplingParams

Model = Callable[[tuple[int, ...]], Sequence[float]]
INF = float("inf")
END = 256
VOCAB = 257
PATIENCE_S = 30.0  # a thread that takes longer hangs
_ONE_HOT: list[list[float]] = np.eye(VOCAB).tolist()


def writes(text: bytes, prompt_length: int = 1) -> Model:
    """A model that writes `text` and the end token after any prompt of that length."""
    tokens = [*text, END]

    def next_logits(context: tuple[int, ...]) -> Sequence[float]:
        return _ONE_HOT[tokens[min(max(len(context) - prompt_length, 0), len(text))]]

    return next_logits


class Frozen(CostCurve):
    """Step times that stay as they are, whatever the clock of the test machine says."""

    def observe(
        self, num_nodes: int, depth: int, previous: int, ms: float, round_ms: float | None = None
    ) -> None:
        pass


def flat() -> CostCurve:
    """All sizes cost the same: everything that is proposed is verified."""
    return Frozen([INF, *[1.0] * 32])


class Prophet:
    """Drafts `num_nodes` tokens of what the model will write; keeps what it is told."""

    name = "prophet"
    nbytes = 0

    def __init__(self, model: Model, num_nodes: int) -> None:
        self._model = model
        self._num_nodes = num_nodes
        self.text: list[int] = []
        self.calls: list[str] = []
        self.min_probability = -1.0

    def begin(self, tokens: Sequence[int]) -> None:
        self.calls.append("begin")
        self.text = list(tokens)

    def observe(self, outcome: Outcome) -> None:
        self.calls.append("observe")
        self.text += outcome.emitted

    def propose(self, stakes: Stakes, base: Proposal = EMPTY) -> Proposal:
        self.calls.append("propose")
        self.min_probability = stakes.min_probability
        size = min(self._num_nodes, stakes.max_nodes)
        tokens: list[int] = []
        for _ in range(size):
            tokens.append(int(np.argmax(self._model((*self.text, *tokens)))))
        return Proposal(tokens, range(-1, size - 1), [1.0] * size) if size else EMPTY

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, document: dict[str, Any] | None) -> None:
        pass


def engine_of(model: Model, num_nodes: int = 0, **options: Any) -> Engine:
    """An engine that drafts `num_nodes` right tokens a round; 0 decodes plainly."""
    backend = FakeBackend(model, VOCAB, end=END, **options)
    drafter: Drafter | None = Prophet(model, num_nodes) if num_nodes else None
    return Engine(backend, curve=flat(), drafter=drafter)


# ------------------------------------------------------------------------------ streams

TEXTS = {
    "ascii": "The quick brown fox jumps over the lazy dog.",
    "two bytes": "héllo wörld, ça va été",
    "three bytes": "日本語のテキスト",
    "four bytes": "a😀b😀😀c",
    "combined": "e\u0301 👩\u200d👩\u200d👧 \u202eabc",
}


@pytest.mark.parametrize("num_nodes", [0, 1, 2, 3, 4, 9])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_chunks_add_up_to_the_text_and_hold_whole_characters(text: str, num_nodes: int) -> None:
    """A token is one byte here, so characters lie across tokens, and tokens across rounds."""
    model = writes(text.encode())
    stream = engine_of(model, num_nodes).stream([0])
    chunks = list(stream)
    assert "".join(chunk.text for chunk in chunks) == text == stream.result.text
    assert all("\ufffd" not in chunk.text for chunk in chunks)
    ids = [token for chunk in chunks for token in chunk.token_ids]
    assert ids == [*text.encode(), END] == list(stream.result.token_ids)
    assert stream.result.finish_reason == "stop"
    if num_nodes:
        assert len(chunks[1].token_ids) == num_nodes + 1


def test_each_round_is_given_out_when_it_is_done() -> None:
    """One chunk for the prompt's last logits and one a round; text is shown as soon as it can."""
    stream = engine_of(writes(b"abcdefgh"), 3).stream([0])
    assert list(stream) == [
        Chunk("a", (97,)),
        Chunk("bcde", (98, 99, 100, 101)),
        Chunk("fgh", (102, 103, 104, END)),
    ]


def test_a_chunk_is_given_out_before_the_next_step_is_run() -> None:
    engine = engine_of(writes(b"abc"))
    assert isinstance(engine.backend, FakeBackend)
    steps = [(chunk.text, len(engine.backend.steps)) for chunk in engine.stream([0])]
    assert steps == [("a", 0), ("b", 1), ("c", 2), ("", 3)]


def test_text_that_may_begin_a_stop_string_is_held_back_and_given_out_at_the_end() -> None:
    stream = engine_of(writes(b"one <sto")).stream([0], stop=["<stop>"])
    texts = [chunk.text for chunk in stream]
    assert texts == ["o", "n", "e", " ", "", "", "", "", "", "<sto"]
    assert stream.result.text == "one <sto"


@pytest.mark.parametrize("num_nodes", [0, 1, 2, 5, 20])
def test_a_stop_string_across_tokens_and_rounds(num_nodes: int) -> None:
    """What follows it in the same round is not part of the answer, nor are its tokens."""
    stream = engine_of(writes("käse STOP käse".encode()), num_nodes).stream([0], stop=["STOP"])
    chunks = list(stream)
    assert "".join(chunk.text for chunk in chunks) == "käse " == stream.result.text
    assert bytes(stream.result.token_ids) == "käse STOP".encode()
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == stream.result.token_ids
    assert stream.result.finish_reason == "stop"
    assert stream.result.stop_string == "STOP"


def test_a_result_may_be_read_at_any_time() -> None:
    stream = engine_of(writes(b"abcdef")).stream([0])
    assert (stream.result.text, stream.result.token_ids) == ("", ())
    seen = []
    for _ in stream:
        result = stream.result
        seen.append((result.text, result.finish_reason))
    assert seen[:2] == [("a", "cancelled"), ("ab", "cancelled")]
    assert (stream.result.text, stream.result.finish_reason) == ("abcdef", "stop")


def test_a_stream_is_over_when_it_is_over() -> None:
    stream = engine_of(writes(b"abc")).stream([0])
    assert "".join(chunk.text for chunk in stream) == "abc"
    assert list(stream) == []
    assert stream.result.text == "abc"


@pytest.mark.parametrize("num_nodes", [0, 3])
def test_leaving_a_stream_early_leaves_the_engine_usable(num_nodes: int) -> None:
    engine = engine_of(writes(b"abcdefghijkl"), num_nodes)
    for count in (1, 2, 3):
        stream = engine.stream([0])
        for _ in itertools.islice(stream, count):
            pass
        assert stream.result.finish_reason == "cancelled"
        assert stream.result.text == "abcdefghijkl"[: 1 + (count - 1) * (num_nodes + 1)]
        assert engine.generate([0]).text == "abcdefghijkl"
    engine.stream([0])  # never iterated
    assert engine.generate([0]).text == "abcdefghijkl"


# ------------------------------------------------------------------------------ prompts


def echo_model(context: tuple[int, ...]) -> Sequence[float]:
    """Writes the prompt's last three tokens again and again."""
    return _ONE_HOT[context[-3]]


def test_a_prompt_is_text_or_token_ids() -> None:
    engine = engine_of(echo_model)
    assert engine.generate("xabc", max_tokens=6).text == "abcabc"
    assert engine.generate(list(b"xabc"), max_tokens=6).text == "abcabc"
    assert engine.generate(tuple(b"xabc"), max_tokens=6).text == "abcabc"


def test_text_is_one_user_message_where_the_model_has_a_chat_format() -> None:
    template = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{{ bos_token }}"
    backend = FakeBackend(echo_model, VOCAB)
    backend.tokenizer.bos_text, backend.tokenizer.eos_text = "<s>", "</s>"
    engine = Engine(backend, chat_template=template)
    assert engine.encode("hi") == list(b"[user:hi]<s>")
    assert engine.encode("hi", raw=True) == list(b"hi")
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "go"}]
    assert engine.encode(messages) == list(b"[system:be][user:go]<s>")
    assert engine.generate("hi", max_tokens=3).text == "<s>"


def test_messages_need_a_chat_format() -> None:
    with pytest.raises(UnsupportedError, match="no chat template"):
        engine_of(echo_model).generate([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_refused(prompt: str | list[int]) -> None:
    engine = engine_of(echo_model)
    with pytest.raises(UnsupportedError, match="prompt is empty"):
        engine.generate(prompt)
    with pytest.raises(UnsupportedError, match="prompt is empty"):
        engine.generate(prompt, raw=True)


@pytest.mark.parametrize("token", [-1, VOCAB, 10**9])
def test_token_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(UnsupportedError, match=f"token id {token} "):
        engine_of(echo_model).generate([1, 2, token])


@pytest.mark.parametrize("max_tokens", [0, -3])
def test_nothing_to_generate_is_refused(max_tokens: int) -> None:
    with pytest.raises(UnsupportedError, match=f"not {max_tokens}"):
        engine_of(echo_model).generate("abc", max_tokens=max_tokens)


def test_an_empty_stop_string_is_refused_and_the_engine_stays_usable() -> None:
    engine = engine_of(echo_model)
    with pytest.raises(UnsupportedError, match="stop string"):
        engine.generate("abc", stop=[""])
    assert engine.generate("abc", max_tokens=3).text == "abc"


@pytest.mark.parametrize("length", [20, 21, 500])
def test_a_prompt_that_fills_the_context_is_refused_before_any_step(length: int) -> None:
    class Untouched(FakeBackend):
        def prefill(self, tokens: Sequence[int]) -> Logits:
            raise AssertionError("the prompt was sent to the model")

        def truncate(self, length: int) -> int:
            raise AssertionError("the cache was touched")

    engine = Engine(Untouched(echo_model, VOCAB, context_size=20))
    with pytest.raises(ContextFullError, match=f"{length} tokens and the context 20") as caught:
        engine.generate([97] * length)
    assert caught.value.hint


@pytest.mark.parametrize("num_nodes", [0, 4])
@pytest.mark.parametrize("length", [17, 18, 19])
def test_a_prompt_that_nearly_fills_the_context_leaves_room_for_the_rest(
    length: int, num_nodes: int
) -> None:
    engine = engine_of(echo_model, num_nodes, context_size=20)
    result = engine.generate(list(b"abc" * 6 + b"a")[-length:])
    assert result.text == ("bca" * 2)[: 20 - length]
    assert result.finish_reason == "context_full"


# ------------------------------------------------------------------------------ endings


@pytest.mark.parametrize("num_nodes", [0, 1, 3, 9])
def test_finish_reasons(num_nodes: int) -> None:
    """The end token wins over a limit that is reached with it."""
    engine = engine_of(writes(b"abcdef"), num_nodes, context_size=8)
    assert engine.generate([0]).finish_reason == "stop"
    assert engine.generate([0], max_tokens=7).finish_reason == "stop"
    assert engine.generate([0], max_tokens=6).finish_reason == "length"
    assert engine.generate([0], max_tokens=1).finish_reason == "length"
    assert engine.generate([0], stop=["cd"]).finish_reason == "stop"
    assert engine.generate([0], stop=["ef"], max_tokens=6).finish_reason == "stop"
    small = engine_of(writes(b"abcdef"), num_nodes, context_size=5)
    assert small.generate([0]).finish_reason == "context_full"
    assert small.generate([0], max_tokens=4).finish_reason == "length"
    cancel = threading.Event()
    cancel.set()
    assert engine.generate([0], cancel=cancel).finish_reason == "cancelled"


def test_the_end_token_may_come_first() -> None:
    result = engine_of(writes(b""), 3).generate([0])
    assert (result.text, result.token_ids, result.finish_reason) == ("", (END,), "stop")
    assert result.counters.rounds == 0


def test_a_generation_that_was_cancelled_before_it_began_computes_nothing() -> None:
    engine = engine_of(writes(b"abc"), 3)
    cancel = threading.Event()
    cancel.set()
    result = engine.generate([0] * 100, cancel=cancel)
    assert (result.text, result.token_ids) == ("", ())
    assert engine.backend.length == 0


def test_cancelling_stops_between_the_batches_of_a_prompt() -> None:
    """A prompt of 30 tokens in batches of 8, cancelled while the second one is computed."""
    cancel = threading.Event()
    batches = itertools.count(1)

    class Slow(FakeBackend):
        def prefill(self, tokens: Sequence[int]) -> Logits:
            if next(batches) == 2:
                cancel.set()
            return super().prefill(tokens)

    backend = Slow(writes(b"abc", 30), VOCAB, batch_size=8)
    result = Engine(backend).generate([0] * 30, cancel=cancel)
    assert (result.finish_reason, backend.length) == ("cancelled", 16)


class Gate:
    """Holds a model at one context length until it is opened from another thread."""

    def __init__(self, model: Model, length: int) -> None:
        self._model = model
        self._length = length
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, context: tuple[int, ...]) -> Sequence[float]:
        if len(context) == self._length and not self.opened.is_set():
            self.reached.set()
            assert self.opened.wait(PATIENCE_S)
        return self._model(context)


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run `work` in a thread; the list has its result when it has ended."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    return thread, results


def join(thread: threading.Thread) -> None:
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def until(is_so: Callable[[], bool]) -> None:
    for _ in range(int(PATIENCE_S * 1e3)):
        if is_so():
            return
        time.sleep(1e-3)
    raise AssertionError("it did not come to that")


def until_it_shall_stop(engine: Engine) -> None:
    """The generation in progress was told to stop."""
    until(lambda: isinstance(run := engine._access.user, Run) and run.cancel.is_set())


def test_cancelling_from_another_thread_keeps_what_was_generated() -> None:
    """The step under way (the fourth) is finished, and no other one is begun."""
    gate = Gate(writes(b"abcdefgh"), length=5)
    engine = engine_of(gate)
    cancel = threading.Event()
    thread, results = in_thread(lambda: engine.generate([0], cancel=cancel))
    assert gate.reached.wait(PATIENCE_S)
    cancel.set()
    gate.opened.set()
    join(thread)
    assert (results[0].text, results[0].finish_reason) == ("abcde", "cancelled")
    assert engine.generate([0]).text == "abcdefgh"


# ------------------------------------------------------------------------------ threads


def test_two_generations_at_once_do_not_mix() -> None:
    """Four threads take turns on one engine; each has the answer to its own prompt."""
    engine = engine_of(echo_model, 2, batch_size=3)
    prompts = [bytes(range(start, start + 5)) for start in (65, 75, 97, 107)]
    barrier = threading.Barrier(len(prompts))

    def ask(prompt: bytes) -> list[str]:
        barrier.wait(PATIENCE_S)
        return [engine.generate(list(prompt), max_tokens=20).text for _ in range(5)]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        running = [in_thread(partial(ask, prompt)) for prompt in prompts]
        for thread, _ in running:
            join(thread)
    finally:
        sys.setswitchinterval(interval)
    for (_, results), prompt in zip(running, prompts, strict=True):
        assert results == [[(prompt[-3:] * 7)[:20].decode()] * 5]


def test_a_second_generation_waits_for_the_first() -> None:
    gate = Gate(echo_model, length=7)
    engine = engine_of(gate)
    first, first_results = in_thread(lambda: engine.generate("abcd", max_tokens=9))
    assert gate.reached.wait(PATIENCE_S)
    second, second_results = in_thread(lambda: engine.generate("wxyz", max_tokens=9))
    second.join(0.05)
    assert second.is_alive() and not second_results
    gate.opened.set()
    join(first)
    join(second)
    assert first_results[0].text == "bcdbcdbcd"
    assert second_results[0].text == "xyzxyzxyz"


# ------------------------------------------------------------------------------ closing


def test_closing_twice_is_closing_once() -> None:
    order: list[str] = []

    class Closing(FakeBackend):
        def close(self) -> None:
            order.append("backend")

    engine = Engine(Closing(echo_model, VOCAB), on_close=lambda: order.append("on_close"))
    engine.close()
    engine.close()
    assert order == ["on_close", "backend"]


@pytest.mark.parametrize("problem", [OSError("disk full"), KeyboardInterrupt()])
def test_what_fails_while_closing_is_raised_and_the_model_freed(problem: BaseException) -> None:
    def fail() -> None:
        raise problem

    backend = FakeBackend(echo_model, VOCAB)
    engine = Engine(backend, on_close=fail)
    with pytest.raises(type(problem)) as caught:
        engine.close()
    assert caught.value is problem
    assert backend.closed
    engine.close()


def test_a_model_that_could_not_be_freed_is_freed_by_the_next_close() -> None:
    """As where a signal handler closes in the middle of a call; what was learned is kept once."""
    calls: list[str] = []

    class Busy(FakeBackend):
        def close(self) -> None:
            calls.append("free")
            if len(calls) == 2:
                raise UnsupportedError("busy")
            super().close()

    backend = Busy(echo_model, VOCAB)
    engine = Engine(backend, on_close=lambda: calls.append("keep"))
    with pytest.raises(UnsupportedError, match="busy"):
        engine.close()
    engine.close()
    engine.close()
    assert backend.closed
    assert calls == ["keep", "free", "free"]


def test_leaving_the_with_block_closes_also_after_an_error() -> None:
    engine = engine_of(echo_model)
    assert isinstance(engine.backend, FakeBackend)
    with pytest.raises(KeyError), engine as entered:
        assert entered is engine
        for _ in engine.stream("abc", max_tokens=9):
            raise KeyError
    assert engine.backend.closed


def test_a_closed_engine_says_so() -> None:
    engine = engine_of(echo_model)
    engine.close()
    with pytest.raises(UnsupportedError, match="closed"):
        engine.generate("abc")
    with pytest.raises(UnsupportedError, match="closed"):
        engine.stream("abc")


class Mortal(FakeBackend):
    """A backend whose library would crash when it is used after it was freed."""

    def prefill(self, tokens: Sequence[int]) -> Logits:
        assert not self.closed, "the model was used after it had been freed"
        return super().prefill(tokens)

    def verify(self, tree: DraftTree) -> Logits:
        assert not self.closed, "the model was used after it had been freed"
        return super().verify(tree)

    def truncate(self, length: int) -> int:
        assert not self.closed, "the model was used after it had been freed"
        return super().truncate(length)


def test_a_stream_that_begins_after_closing_says_so() -> None:
    engine = Engine(Mortal(echo_model, VOCAB))
    stream = engine.stream("abc", max_tokens=9)
    engine.close()
    with pytest.raises(UnsupportedError, match="closed"):
        list(stream)


def test_closing_ends_a_stream_after_the_step_under_way() -> None:
    gate = Gate(echo_model, length=7)
    engine = Engine(Mortal(gate, VOCAB))
    running, results = in_thread(lambda: engine.generate("abcd", max_tokens=9))
    assert gate.reached.wait(PATIENCE_S)
    closing, _ = in_thread(engine.close)
    until_it_shall_stop(engine)
    assert closing.is_alive()
    gate.opened.set()
    join(running)
    join(closing)
    assert (results[0].text, results[0].finish_reason) == ("bcdb", "cancelled")
    assert isinstance(engine.backend, Mortal)
    assert engine.backend.closed


@pytest.mark.parametrize("stop", [(), ("bcdz",)])
def test_closing_ends_a_stream_that_another_thread_does_not_read_on(stop: Sequence[str]) -> None:
    """What is held back, because a stop string may have begun, still comes."""
    engine = Engine(Mortal(echo_model, VOCAB))
    suspended, read_on = threading.Event(), threading.Event()

    def read() -> tuple[str, str, str]:
        stream = engine.stream("abcd", max_tokens=9, stop=stop)
        reading = iter(stream)
        texts = [next(reading).text, next(reading).text]
        suspended.set()
        assert read_on.wait(PATIENCE_S)
        texts += [chunk.text for chunk in reading]
        return "".join(texts), stream.result.text, stream.result.finish_reason

    reader, results = in_thread(read)
    assert suspended.wait(PATIENCE_S)
    closing, _ = in_thread(engine.close)
    join(closing)
    assert isinstance(engine.backend, Mortal) and engine.backend.closed
    read_on.set()
    join(reader)
    assert results == [("bc", "bc", "cancelled")]


def test_closing_waits_for_the_text_of_a_chunk() -> None:
    """Tokens are turned into text by the model's vocabulary, which must be there."""
    backend = FakeBackend(echo_model, VOCAB)
    entered, go_on = threading.Event(), threading.Event()

    class Slow(ByteTokenizer):
        def token_bytes(self, token: int) -> bytes:
            entered.set()
            assert go_on.wait(PATIENCE_S)
            return b"gone" if backend.closed else super().token_bytes(token)

    backend.tokenizer = Slow(VOCAB)
    engine = Engine(backend)
    reader, results = in_thread(lambda: engine.generate("abcd", max_tokens=9))
    assert entered.wait(PATIENCE_S)
    closing, _ = in_thread(engine.close)
    until_it_shall_stop(engine)
    assert not backend.closed
    go_on.set()
    join(closing)
    join(reader)
    assert backend.closed
    assert (results[0].text, results[0].finish_reason) == ("b", "cancelled")


def test_a_stream_that_waits_for_its_turn_hears_that_the_engine_was_closed() -> None:
    gate = Gate(echo_model, length=7)
    engine = Engine(Mortal(gate, VOCAB))
    running, results = in_thread(lambda: engine.generate("abcd", max_tokens=9))
    assert gate.reached.wait(PATIENCE_S)
    began = threading.Event()

    def wait() -> str:
        stream = engine.stream("wxyz", max_tokens=9)
        began.set()
        try:
            return "".join(chunk.text for chunk in stream)
        except UnsupportedError as problem:
            return str(problem)

    waiting, answers = in_thread(wait)
    assert began.wait(PATIENCE_S)
    closing, _ = in_thread(engine.close)
    join(waiting)  # and not only when the step under way has ended
    assert closing.is_alive()
    until_it_shall_stop(engine)
    gate.opened.set()
    join(closing)
    join(running)
    assert answers == ["the engine is closed"]
    assert results[0].text == "bcdb"


def test_closing_in_two_threads_frees_once() -> None:
    freed: list[str] = []
    gate = Gate(echo_model, length=7)
    engine = Engine(Mortal(gate, VOCAB), on_close=lambda: freed.append("once"))
    running, _ = in_thread(lambda: engine.generate("abcd", max_tokens=9))
    assert gate.reached.wait(PATIENCE_S)
    closing = [in_thread(engine.close)[0] for _ in range(3)]
    gate.opened.set()
    for thread in (*closing, running):
        join(thread)
    assert freed == ["once"]


def test_closing_within_a_step_is_an_error_and_not_a_deadlock() -> None:
    """As a signal handler does that runs in the middle of one."""
    problems: list[str] = []

    def model(context: tuple[int, ...]) -> Sequence[float]:
        if len(context) == 6:
            try:
                engine.close()
            except UnsupportedError as problem:
                problems.append(str(problem))
        return echo_model(context)

    engine = Engine(Mortal(model, VOCAB))
    thread, results = in_thread(lambda: engine.generate("abcd", max_tokens=9))
    join(thread)
    assert len(problems) == 1 and "within its own step" in problems[0]
    assert (results[0].text, results[0].finish_reason) == ("bcd", "cancelled")
    engine.close()
    assert isinstance(engine.backend, Mortal) and engine.backend.closed


def test_closing_by_whoever_has_the_engine_to_itself_is_an_error_and_not_a_deadlock() -> None:
    engine = engine_of(echo_model)

    def close() -> str:
        with engine.exclusive():
            try:
                engine.close()
            except UnsupportedError as problem:
                return str(problem)
        return "closed"

    thread, results = in_thread(close)
    join(thread)
    assert "cannot be closed" in results[0]
    engine.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_fork_cannot_use_the_engine_and_leaves_it_to_its_owner() -> None:
    """The library's threads are not in it: a step would wait for them for ever."""
    kept: list[str] = []
    engine = Engine(FakeBackend(echo_model, VOCAB), on_close=lambda: kept.append("what it learned"))
    said, tell = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other tests have left threads
        child = os.fork()
    if child == 0:
        try:
            engine.generate("abc", max_tokens=3)
        except UnsupportedError as problem:
            engine.close()
            os.write(tell, f"{problem}; {kept}".encode())
        finally:
            os._exit(0)
    os.close(tell)
    os.waitpid(child, 0)
    with open(said, "rb") as file:
        assert file.read().decode().endswith("of which this one is a fork; []")
    assert engine.generate("abc", max_tokens=3).text == "abc"
    engine.close()
    assert kept == ["what it learned"]


def test_a_result_can_be_read_when_the_engine_is_closed() -> None:
    class Strict(ByteTokenizer):
        def is_end(self, token: int) -> bool:
            assert not backend.closed
            return super().is_end(token)

    backend = FakeBackend(writes(b"abc"), VOCAB)
    backend.tokenizer = Strict(VOCAB, END)
    engine = Engine(backend)
    part, whole = engine.stream([0]), engine.stream([0])
    list(whole)
    next(iter(part))
    engine.close()
    assert (part.result.text, part.result.finish_reason) == ("a", "cancelled")
    assert (whole.result.text, whole.result.finish_reason) == ("abc", "stop")


def test_closing_a_stream_leaves_its_users_event_alone() -> None:
    """It may be that of other streams, too."""
    gate, cancel = Gate(echo_model, length=7), threading.Event()
    engine = engine_of(gate)
    stream = engine.stream("abcd", max_tokens=9, cancel=cancel)
    running, _ = in_thread(lambda: list(stream))
    assert gate.reached.wait(PATIENCE_S)
    stream.close()
    gate.opened.set()
    join(running)
    assert (stream.result.text, stream.result.finish_reason) == ("bcdb", "cancelled")
    assert not cancel.is_set()
    assert engine.generate("abcd", max_tokens=9, cancel=cancel).text == "bcdbcdbcd"


class Asked(threading.Event):
    """Knows that somebody who waits has asked whether it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.was_asked = False

    def is_set(self) -> bool:
        self.was_asked = True
        return super().is_set()


def test_a_thread_with_the_number_of_a_dead_one_waits_for_its_stream() -> None:
    """Systems give numbers of threads again, at once where they can."""
    engine = engine_of(echo_model)

    def begin() -> tuple[Iterator[Chunk], int]:
        reading = iter(engine.stream("abc", max_tokens=9))
        next(reading)
        return reading, threading.get_ident()

    for _ in range(20):
        thread, begun = in_thread(begin)
        join(thread)
        reading, number = begun[0]
        cancel = Asked()
        generate = partial(engine.generate, "wxyz", max_tokens=3, cancel=cancel)
        second, found = in_thread(generate)
        again = second.ident == number
        while second.is_alive() and not cancel.was_asked:
            time.sleep(1e-3)
        assert "".join(chunk.text for chunk in reading) == "bcabcabc"
        join(second)
        assert [result.text for result in found] == ["xyz"]
        if again:
            return
    pytest.skip("numbers are not given again here")


def test_a_stream_may_be_read_by_threads_in_turns() -> None:
    """As a web server's pool does; the engine is that one's who read last."""
    engine = engine_of(echo_model)
    reading = iter(engine.stream("abc", max_tokens=9))
    assert next(reading).text == "a"
    thread, results = in_thread(lambda: next(reading).text)
    join(thread)
    waiting, texts = in_thread(lambda: engine.generate("wxyz", max_tokens=3).text)
    results += [chunk.text for chunk in reading]
    join(waiting)
    assert ("".join(results), texts) == ("bcabcabc", ["xyz"])


# ------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("where", ["prefill", "verify", "commit"])
def test_an_error_of_the_library_leaves_the_engine_usable(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(writes(b"abcdefgh"), 2)

    def fail(*_: object) -> None:
        raise BackendError("llama_decode failed with -3")

    with monkeypatch.context() as patched:
        patched.setattr(engine.backend, where, fail)
        stream = engine.stream([0])
        with pytest.raises(BackendError, match="-3"):
            list(stream)
        assert stream.result.text == ("" if where == "prefill" else "a")
    assert engine.generate([0]).text == "abcdefgh"


def test_logits_that_are_no_numbers_are_an_error_and_not_a_token() -> None:
    def broken(context: tuple[int, ...]) -> Sequence[float]:
        return [float("nan")] * VOCAB if len(context) == 4 else _ONE_HOT[97]

    stream = engine_of(broken).stream([0])
    with pytest.raises(BackendError, match="nan"):
        list(stream)
    assert stream.result.text == "aaa"


# ------------------------------------------------------------------------------ counters


@pytest.mark.parametrize("num_nodes", [0, 1, 4, 9])
@pytest.mark.parametrize("max_tokens", [1, 2, 7, 30])
def test_counters_add_up(num_nodes: int, max_tokens: int) -> None:
    engine = engine_of(echo_model, num_nodes)
    result = engine.generate("xabc", max_tokens=max_tokens)
    counters = result.counters
    assert isinstance(engine.backend, FakeBackend)
    assert counters.prompt_tokens == 4
    assert counters.generated_tokens == len(result.token_ids) == max_tokens
    assert counters.rounds == len(engine.backend.steps)
    assert counters.accepted_tokens + counters.rounds == max_tokens - 1
    assert counters.drafted_tokens == sum(engine.backend.steps) - counters.rounds
    assert counters.drafted_tokens >= counters.accepted_tokens
    assert counters.time_to_first_token_s > 0.0
    assert 0.0 <= counters.host_share <= 1.0
    assert counters.decode_s >= counters.step_s + counters.host_s - 1e-3
    if counters.rounds:
        assert counters.acceptance_length == (max_tokens - 1) / counters.rounds


@pytest.mark.parametrize("max_tokens", [2, 30, 61])
def test_counters_by_drafter_add_up(max_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each drafter drafted and what was accepted of it; a cut answer counts what was kept."""
    monkeypatch.setattr("edgespec.drafting.drafters.combined.perf_counter", lambda: 0.0)
    text = b"the cat sat on the mat and the cat sat on the hat. the cat sat."
    drafter = CombinedDrafter([Prophet(writes(text), 2), RecyclingDrafter()])
    engine = Engine(FakeBackend(writes(text), VOCAB, end=END), curve=flat(), drafter=drafter)
    counters = engine.generate([0], max_tokens=max_tokens).counters
    drafted, accepted = counters.drafted_by, counters.accepted_by
    assert sum(drafted.values()) == counters.drafted_tokens
    assert sum(accepted.values()) == counters.accepted_tokens
    assert all(accepted[name] <= drafted[name] for name in accepted)
    assert set(drafted) <= {"prophet", "recycling"}
    if max_tokens > 2:
        assert 0 < accepted["prophet"] <= drafted["prophet"]
        assert drafted["recycling"] > 0


def test_counters_of_an_answer_that_a_stop_string_cut() -> None:
    """Tokens after the stop string were computed, but are not part of what was generated."""
    result = engine_of(writes(b"abcdefghij"), 6).generate([0], stop=["c"])
    assert bytes(result.token_ids) == b"abc"
    assert result.counters.generated_tokens == 3


def test_rates_by_hand() -> None:
    counters = Counters(generated_tokens=1)
    assert (counters.acceptance_length, counters.tokens_per_s, counters.host_share) == (1, 0, 0)
    first = DraftTree((1, 2, 3, 4, 5), (-1, 0, 1, 2, 2), ("", "a", "b", "b", "a"))
    counters.add_round(first, (0, 1, 2), step_s=0.3, draft_s=0.05, round_s=0.45)
    counters.add_round(DraftTree.chain((3, 4, 5)), (0,), step_s=0.2, draft_s=0.0, round_s=0.3)
    assert (counters.drafted_by, counters.accepted_by) == ({"a": 2, "b": 2}, {"a": 1, "b": 1})
    counters.decode_s = 0.8
    assert (counters.rounds, counters.drafted_tokens, counters.accepted_tokens) == (2, 6, 2)
    assert counters.generated_tokens == 5
    assert counters.acceptance_length == 2.0
    assert counters.tokens_per_s == pytest.approx(4 / 0.8)
    assert counters.host_share == pytest.approx(1 - 0.55 / 0.8)


# ------------------------------------------------------------------------------ speculation


def test_speculation_can_be_left_out_and_the_drafter_does_not_notice() -> None:
    engine = engine_of(echo_model, 4)
    assert isinstance(engine.drafter, Prophet) and isinstance(engine.backend, FakeBackend)
    assert engine.generate("xabc", max_tokens=9, speculate=False).text == "abcabcabc"
    assert engine.drafter.calls == []
    assert engine.drafter.text == []
    assert engine.backend.steps == [1] * 8
    assert engine.generate("xabc", max_tokens=9).text == "abcabcabc"
    assert engine.drafter.calls == ["begin", "propose", "observe", "propose", "observe"]
    assert engine.drafter.text == list(b"xabcabcabcabc")


def test_the_drafter_hears_every_token_once_and_in_order() -> None:
    engine = engine_of(writes(b"abcdefgh"), 2)
    assert isinstance(engine.drafter, Prophet)
    for _ in range(2):
        engine.generate([0])
        assert engine.drafter.text == [0, *b"abcdefgh", END]


def test_the_drafter_is_told_how_likely_a_node_must_be_to_pay() -> None:
    """A step of two takes a fifth more than one of one: a node must be worth half of that."""
    drafter = Prophet(echo_model, 2)
    engine = Engine(
        FakeBackend(echo_model, VOCAB), curve=Frozen([INF, 10.0, 12.0, 15.0]), drafter=drafter
    )
    engine.generate("xabc", max_tokens=9)
    assert drafter.min_probability == pytest.approx(0.1)


def test_without_rollback_there_is_no_drafter() -> None:
    backend = FakeBackend(echo_model, VOCAB, rollback=False)
    engine = Engine(backend, curve=flat(), drafter=SuffixDrafter())
    assert engine.drafter is None
    assert engine.generate("abcabc", max_tokens=6).text == "abcabc"


class Diary(CostCurve):
    """Keeps the steps it is shown."""

    def observe(
        self, num_nodes: int, depth: int, previous: int, ms: float, round_ms: float | None = None
    ) -> None:
        diary.append((num_nodes, depth, previous, ms))


diary: list[tuple[int, int, int, float]] = []


@pytest.fixture
def steps() -> Iterator[list[tuple[int, int, int, float]]]:
    diary.clear()
    yield diary
    diary.clear()


def test_the_curve_is_shown_every_step(steps: list[tuple[int, int, int, float]]) -> None:
    """Its size, the tokens in the cache, and the size before (0: there was none)."""
    backend = FakeBackend(echo_model, VOCAB)
    engine = Engine(backend, curve=Diary([INF, *[1.0] * 32]), drafter=Prophet(echo_model, 3))
    result = engine.generate("xabc", max_tokens=11)
    assert [step[:3] for step in steps] == [(4, 4, 0), (4, 8, 4), (2, 12, 4)]
    total_ms = sum(step[3] for step in steps)
    assert total_ms == pytest.approx(1e3 * result.counters.step_s)


def test_tokens_that_are_fed_again_are_part_of_a_step(
    steps: list[tuple[int, int, int, float]],
) -> None:
    """Two pending tokens: a step of four is two drafted nodes, and is timed as a step of five."""

    class Pending(FakeBackend):
        def verify(self, tree: DraftTree) -> Logits:
            self.pending = 0
            return super().verify(tree)

        def commit(self, path: Sequence[int]) -> None:
            super().commit(path)
            self.pending = 2

    backend = Pending(echo_model, VOCAB)
    # Only steps of five tokens are cheap; without pending tokens that means four drafted ones.
    curve = Diary([INF, 10.0, 20.0, 20.0, 20.0, 10.0, *[40.0] * 8])
    engine = Engine(backend, curve=curve, drafter=Prophet(echo_model, 6))
    engine.generate("xabc", max_tokens=20)
    assert backend.steps[:3] == [5, 3, 3]
    assert [step[0] for step in steps[:3]] == [5, 5, 5]


def test_streams_know_their_seed() -> None:
    engine = engine_of(echo_model)
    stream = engine.stream("abc", sampling=SamplingParams(temperature=1.0, seed=12))
    assert isinstance(stream, Stream)
    assert stream.seed == 12


# ------------------------------------------------------------------------------ one at a time


def test_a_second_stream_in_the_same_thread_is_an_error_and_not_a_deadlock() -> None:
    engine = engine_of(echo_model)
    reading = iter(engine.stream("abc", max_tokens=9))
    next(reading)
    with pytest.raises(UnsupportedError, match="unfinished in this thread") as caught:
        engine.generate("wxyz", max_tokens=3)
    assert caught.value.hint
    assert "".join(chunk.text for chunk in reading) == "bcabcabc"
    assert engine.generate("wxyz", max_tokens=3).text == "xyz"


def test_a_stream_that_is_closed_gives_the_engine_back() -> None:
    engine = engine_of(echo_model)
    with engine.stream("abc", max_tokens=9) as stream:
        reading = iter(stream)
        next(reading)
    assert engine.generate("wxyz", max_tokens=3).text == "xyz"
    assert list(reading) == []
    assert (stream.result.text, stream.result.finish_reason) == ("a", "cancelled")


def test_closing_an_engine_ends_the_stream_of_this_thread() -> None:
    engine = engine_of(echo_model)
    with engine:
        reading = iter(engine.stream("abc", max_tokens=9))
        next(reading)
    assert isinstance(engine.backend, FakeBackend) and engine.backend.closed
    assert list(reading) == []


def test_a_generation_that_waits_can_be_cancelled() -> None:
    engine = engine_of(echo_model)
    reading = iter(engine.stream("abc", max_tokens=9))
    next(reading)
    cancel = threading.Event()
    thread, results = in_thread(lambda: engine.generate("wxyz", cancel=cancel))
    thread.join(0.02)
    assert thread.is_alive()
    cancel.set()
    join(thread)
    assert (results[0].text, results[0].finish_reason) == ("", "cancelled")


def test_only_the_engine_is_timed_and_not_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    hours = [0.0]
    monkeypatch.setattr("edgespec.decode.engine.perf_counter", lambda: next(clock) + hours[0])
    counters = engine_of(writes(b"abcdef")).generate([0]).counters
    clock = itertools.count()
    stream = engine_of(writes(b"abcdef")).stream([0])
    for _ in stream:
        hours[0] += 3600.0
    assert stream.result.counters.decode_s == counters.decode_s > 0
    assert stream.result.counters.time_to_first_token_s == counters.time_to_first_token_s > 0


def test_chunks_say_what_came_from_drafts() -> None:
    chunks = list(engine_of(writes(b"abcdefgh"), 3).stream([0]))
    assert [(c.num_drafted, c.text[: c.drafted_chars]) for c in chunks] == [
        (0, ""),
        (3, "bcd"),
        (3, "fgh"),
    ]


def test_a_prompt_may_start_from_what_the_cache_holds() -> None:
    engine = engine_of(echo_model, 2)
    engine.generate("abcabc", max_tokens=5)
    held = len(engine.backend.tokens)
    longer = [*engine.backend.tokens, 97]
    result = engine.generate(longer, max_tokens=5, reuse=True)
    assert result.counters.reused_tokens == held
    again = engine.generate(longer, max_tokens=5)
    assert (again.counters.reused_tokens, again.token_ids) == (0, result.token_ids)


class Slow(SuffixDrafter):
    """Takes its time to read a prompt."""

    begun = False

    def begin(self, tokens: Sequence[int]) -> None:
        self.begun = True
        super().begin(tokens)


def test_the_first_token_does_not_wait_for_the_drafter() -> None:
    drafter = Slow()
    backend = FakeBackend(writes(b"abcabcabcabc"), VOCAB, end=END)
    with Engine(backend, curve=flat(), drafter=drafter) as engine:
        chunks = iter(engine.stream([1], max_tokens=12))
        assert next(chunks).token_ids == (ord("a"),)
        assert not drafter.begun
        rest = [token for chunk in chunks for token in chunk.token_ids]
    assert bytes(rest) == b"bcabcabcabc"
    assert drafter.begun
