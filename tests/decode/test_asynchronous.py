"""Asynchronous streams in each of their states: cancelled, closed, and without their loop.

A stream is before its first chunk, waits for its turn, is between two chunks, or has its last one
read. A gate holds the model there, so that nothing depends on the clock.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

import pytest
from decoding_cases import VOCAB, echo_model
from fake_backend import FakeBackend
from waiting import PATIENCE_S

from edgespec.backends.base import DraftTree, Logits
from edgespec.decode.engine import Engine
from edgespec.decode.generation import Chunk
from edgespec.errors import UnsupportedError

PROMPT = list(b"xabc")


class Gated(FakeBackend):
    """Repeats the prompt's last three tokens; stops at a length until it is let on."""

    def __init__(self, length: int) -> None:
        super().__init__(echo_model, VOCAB)
        self._stop = length
        self.reached, self.opened = threading.Event(), threading.Event()

    def prefill(self, tokens: Sequence[int]) -> Logits:
        return self._held(super().prefill(tokens), self.length)

    def verify(self, tree: DraftTree) -> Logits:
        return self._held(super().verify(tree), self.length + len(tree))

    def close(self) -> None:
        assert self.opened.is_set() or not self.reached.is_set(), "freed in the middle of a step"
        super().close()

    def _held(self, logits: Logits, length: int) -> Logits:
        if length == self._stop and not self.opened.is_set():
            self.reached.set()
            assert self.opened.wait(PATIENCE_S)
        assert not self.closed, "used after it was freed"
        return logits


@pytest.fixture(autouse=True)
def no_thread_fails(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    problems: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", problems.append)
    yield
    for thread in threading.enumerate():
        if thread.name == "edgespec-stream":
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
    assert not problems


async def reached(backend: Gated) -> None:
    assert await asyncio.to_thread(backend.reached.wait, PATIENCE_S)


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.001)


def shall_stop(engine: Engine) -> bool:
    """Whether the generation in progress was told to."""
    return engine.scheduler.is_closed


def within_time(main: Callable[[], AsyncGenerator[None, None]]) -> None:
    """Run `main` up to its end."""

    async def run() -> None:
        async for _ in main():
            pass

    async def bounded() -> None:
        await asyncio.wait_for(run(), PATIENCE_S)

    asyncio.run(bounded())


STATES = {"first": 4, "between": 6, "last": 10}


@pytest.mark.parametrize("state", STATES)
def test_cancelling_gives_the_engine_back(state: str) -> None:
    """Within the step of the prompt, of a chunk, or of the last one."""

    async def main() -> AsyncGenerator[None, None]:
        backend = Gated(STATES[state])
        engine = Engine(backend)
        task = asyncio.ensure_future(engine.agenerate(PROMPT, max_tokens=7))
        await reached(backend)
        task.cancel()
        yield
        assert not task.done()  # it waits for the step under way
        backend.opened.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert state != "between" or backend.length == STATES[state]  # there was no other step
        assert (await engine.agenerate(PROMPT, max_tokens=7)).text == "abcabca"
        engine.close()

    within_time(main)


@pytest.mark.parametrize("state", STATES)
def test_closing_the_engine_ends_the_stream(state: str) -> None:
    async def main() -> AsyncGenerator[None, None]:
        backend = Gated(STATES[state])
        engine = Engine(backend)
        task = asyncio.ensure_future(engine.agenerate(PROMPT, max_tokens=7))
        await reached(backend)
        closing = asyncio.ensure_future(asyncio.to_thread(engine.close))
        await until(lambda: shall_stop(engine))
        yield
        assert not backend.closed
        backend.opened.set()
        await closing
        result = await task
        written = STATES[state] - 3
        assert backend.closed
        assert result.text == "abcabca"[:written]
        assert result.finish_reason == ("length" if state == "last" else "cancelled")

    within_time(main)


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_a_stream_that_waits_for_its_turn_ends(how: str) -> None:
    async def main() -> AsyncGenerator[None, None]:
        backend = Gated(6)
        engine = Engine(backend)
        holder = asyncio.ensure_future(engine.agenerate(PROMPT, max_tokens=7))
        await reached(backend)
        waiting = asyncio.ensure_future(engine.agenerate(PROMPT, max_tokens=7))
        yield
        if how == "cancel":
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            backend.opened.set()
            assert (await holder).text == "abcabca"
        else:
            closing = asyncio.ensure_future(asyncio.to_thread(engine.close))
            with pytest.raises(UnsupportedError, match="closed"):
                await waiting
            await until(lambda: shall_stop(engine))
            backend.opened.set()
            await closing
            assert (await holder).text == "abc"

    within_time(main)


def test_a_stream_that_nobody_reads_on_ends_with_the_engine() -> None:
    """Its thread has read it to the end or not: what came is still there."""

    async def main() -> AsyncGenerator[None, None]:
        backend = Gated(6)
        engine = Engine(backend)
        stream = engine.astream(PROMPT, max_tokens=7)
        texts = [(await anext(stream)).text]
        await reached(backend)
        backend.opened.set()
        await asyncio.to_thread(engine.close)
        yield
        texts += [chunk.text async for chunk in stream]
        assert "abcabca".startswith("".join(texts))

    within_time(main)


def test_closing_the_event_loop_ends_the_stream() -> None:
    """As a program does that leaves in the middle of an answer; nothing is printed."""
    backend = Gated(6)
    engine = Engine(backend)
    loop = asyncio.new_event_loop()
    stream = engine.astream(PROMPT, max_tokens=10**3)

    async def first_chunk() -> Chunk:
        return await anext(stream)

    assert loop.run_until_complete(first_chunk()).text == "a"
    assert backend.reached.wait(PATIENCE_S)
    loop.close()
    backend.opened.set()
    assert engine.generate(PROMPT, max_tokens=7).text == "abcabca"
    assert backend.length < 100
    engine.close()


def test_a_stream_that_was_never_begun_holds_nothing() -> None:
    async def main() -> AsyncGenerator[None, None]:
        engine = Engine(Gated(-1))
        stream = engine.astream(PROMPT)
        yield
        await stream.aclose()
        assert (await engine.agenerate(PROMPT, max_tokens=3)).text == "abc"

    within_time(main)
