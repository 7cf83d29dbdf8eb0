"""Who may use an engine: one generation at a time, in one process, until it is closed."""

from __future__ import annotations

import linecache
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any

import pytest
from decoding_cases import VOCAB, Gate, Mortal, echo_model, engine_of
from fake_backend import FakeBackend
from waiting import PATIENCE_S, in_thread, join, until

from edgespec.decode.engine import Engine
from edgespec.decode.generation import Chunk
from edgespec.errors import UnsupportedError
from edgespec.testing import ByteTokenizer


def until_it_shall_stop(engine: Engine) -> None:
    """The generation in progress was told to stop."""
    until(lambda: engine.scheduler.is_closed)


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


def test_a_stream_that_begins_after_closing_says_so() -> None:
    engine = Engine(Mortal(echo_model, VOCAB))
    stream = engine.stream("abc", max_tokens=9)
    engine.close()
    with pytest.raises(UnsupportedError, match="closed"):
        list(stream)
    called: Any = {"role": "tool", "content": "of a tool that nobody knows"}
    with pytest.raises(UnsupportedError, match="closed"):  # whatever its prompt would need
        engine.stream([called])


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


def test_what_runs_has_ended_before_the_model_is_gone() -> None:
    """An end may have to tell the cache, or a draft model, what was written last."""
    running = []

    class Watching(FakeBackend):
        def close(self) -> None:
            running.append([*engine.scheduler._running])
            super().close()

    engine = Engine(Watching(lambda _: [0.0] * 9, 9))
    stream = engine.stream([1, 2], max_tokens=9)
    next(stream)
    assert len(engine.scheduler._running) == 1
    engine.close()
    assert running == [[]]


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
        with engine.scheduler.exclusive():
            try:
                engine.close()
            except UnsupportedError as problem:
                return str(problem)
        return "closed"

    thread, results = in_thread(close)
    join(thread)
    assert "cannot be closed" in results[0]
    engine.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_a_fork_ends_its_streams_whoever_was_inside() -> None:
    """No thread of the fork gives back what another one had when the process forked."""
    engine = engine_of(echo_model)
    begun, other = engine.stream("abc", max_tokens=9), engine.stream("abc", max_tokens=9)
    next(begun)
    inside, may_leave = threading.Event(), threading.Event()

    def stay_inside() -> None:
        with engine.scheduler._lock:
            inside.set()
            assert may_leave.wait(PATIENCE_S)

    thread, _ = in_thread(stay_inside)
    assert inside.wait(PATIENCE_S)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            begun.close()
            next(other)
        except UnsupportedError:
            os._exit(7)
        finally:
            os._exit(1)
    until(lambda: os.waitpid(child, os.WNOHANG) == (child, 7 << 8))
    may_leave.set()
    join(thread)
    assert "".join(chunk.text for chunk in begun) == "bcabcabc"


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


# ------------------------------------------------------------------------------ one at a time


def test_a_second_stream_comes_after_the_first_and_is_no_deadlock() -> None:
    """Also in the same thread: who waits makes the steps of whoever runs."""
    engine = engine_of(echo_model)
    reading = iter(engine.stream("abc", max_tokens=9))
    next(reading)
    assert engine.generate("wxyz", max_tokens=3).text == "xyz"
    assert "".join(chunk.text for chunk in reading) == "bcabcabc"


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
    gate = Gate(echo_model, length=7)
    engine = engine_of(gate)
    running, first = in_thread(lambda: engine.generate("abcd", max_tokens=9))
    assert gate.reached.wait(PATIENCE_S)
    cancel = threading.Event()
    thread, results = in_thread(lambda: engine.generate("wxyz", cancel=cancel))
    thread.join(0.02)
    assert thread.is_alive()
    cancel.set()
    join(thread)
    assert (results[0].text, results[0].finish_reason) == ("", "cancelled")
    gate.opened.set()
    join(running)
    assert first[0].text == "bcdbcdbcd"


def test_who_works_on_the_cache_waits_for_a_sequence_and_has_it_alone() -> None:
    """An answer under way ends first, also one of this thread, and keeps what it wrote."""
    engine = engine_of(echo_model)
    stream = engine.stream("abc", max_tokens=9)
    next(iter(stream))
    with engine.scheduler.exclusive():
        assert engine.slots.spare(10) is engine.backend and engine.backend.length == 0
        with pytest.raises(UnsupportedError, match="works on its cache"):
            engine.generate("wxyz", max_tokens=3)
        with (
            pytest.raises(UnsupportedError, match=r"cannot be used by .* works on its cache"),
            engine.scheduler.exclusive(),
        ):
            pass
        waiting, texts = in_thread(lambda: engine.generate("wxyz", max_tokens=3).text)
        waiting.join(0.02)
        assert waiting.is_alive()
    join(waiting)
    assert texts == ["xyz"]
    assert "".join(chunk.text for chunk in stream) == "bcabcabc"


def test_an_interrupt_at_any_line_leaves_nobody_inside() -> None:
    """As Ctrl-C comes: between any two lines of what runs generations."""
    lines = 1
    while is_interrupted_at(lines):
        lines += 1
    assert lines > 50


def is_interrupted_at(count: int) -> bool:
    """Whether so many lines are run at all; the engine can be used afterwards."""
    engine, left = engine_of(echo_model), count

    def interrupt(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith("scheduler.py"):
            return None
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        # No signal is looked at between the last line of a `with` block and its end.
        left -= event == "line" and not text.startswith("with ")
        if left == 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return interrupt

    was_interrupted = False
    sys.settrace(interrupt)
    try:
        with engine.scheduler.exclusive():
            pass
        engine.generate("abc", max_tokens=3)
    except KeyboardInterrupt:
        was_interrupted = True
    finally:
        sys.settrace(None)
    thread, results = in_thread(lambda: engine.generate("wxyz", max_tokens=3).text)
    thread.join(PATIENCE_S)
    assert results == ["xyz"], f"after line {count}"
    with engine.scheduler.exclusive():
        pass
    engine.close()
    return was_interrupted
