"""The reader's side of a generation: its chunks as they come, and the result behind them."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from edgespec.decode.generation import Chunk, ModelTurn, PartReader, Result, Span, ToolCall
from edgespec.decode.sequence import Chunks, Job


class Stream:
    """Chunks of one generation; `result` is complete when the iteration has ended.

    Iterating goes on where the last iteration was left. With an engine of one user the model writes
    on when a chunk is waited for, of this or of another generation: one that is started meanwhile
    comes after this one. An engine of several users writes on whether chunks are read or not.
    """

    def __init__(
        self,
        job: Job,
        chunks: Chunks,
        drop_cancelled: Callable[[], None],
        reader: PartReader | None = None,
    ) -> None:
        self._job, self._chunks, self._drop_cancelled = job, chunks, drop_cancelled
        self._reader, self._is_finished = reader, False
        self._read: list[Chunk] = []

    @property
    def seed(self) -> int | None:
        """Seed the sampler draws with; repeat it to get the same tokens."""
        return self._job.sampler.seed

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt."""
        return tuple(self._job.prompt)

    @property
    def written(self) -> str:
        """What was written so far, thoughts and calls included."""
        return self._job.text.text

    @property
    def num_read(self) -> tuple[int, int]:
        """Tokens of the prompt that are in the cache, and how many were there before."""
        return self._job.num_read, self._job.num_reused

    @property
    def result(self) -> Result:
        """The generation so far; its finish reason is "cancelled" while it is not complete."""
        job, chunks = self._job, tuple(self._read)
        reason = job.finish_reason  # which is set behind the last chunk
        is_read = len(chunks) >= job.num_chunks
        ids = tuple(token for chunk in chunks for token in chunk.token_ids)
        return Result(
            "".join(chunk.text for chunk in chunks),
            ids,
            reason if is_read else "cancelled",
            replace(job.counters, generated_tokens=len(ids)),
            _spans(chunks),
            _turns(job.routing.turns, len(ids)),
            tuple(one for chunk in chunks for one in chunk.logprobs),
            job.text.stop_string if is_read else None,
            "".join(chunk.reasoning for chunk in chunks),
            _joined(call for chunk in chunks for call in chunk.tool_calls),
        )

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        try:
            chunk = self._with_parts(next(self._chunks))
        except StopIteration:
            job = self._job
            # What may have begun a stop string has not, now that no more comes.
            is_read = len(self._read) >= job.num_chunks
            rest = job.text.finish() if job.has_ended and is_read else ""
            chunk = self._with_parts(Chunk(rest, ()), is_last=job.has_ended and is_read)
            if not (chunk.text or chunk.reasoning or chunk.tool_calls):
                raise
        self._read.append(chunk)
        return chunk

    def _with_parts(self, chunk: Chunk, *, is_last: bool = False) -> Chunk:
        """A chunk with thoughts and calls taken out of its text, where tools were offered."""
        if self._reader is None or self._is_finished:
            return chunk
        found = [self._reader.push(chunk.text)]
        if is_last:
            self._is_finished = True
            found.append(self._reader.finish())
        return replace(
            chunk,
            text="".join(one.content for one in found),
            drafted_chars=0,
            sources=(),
            reasoning="".join(one.reasoning for one in found),
            tool_calls=tuple(
                ToolCall(call.identity, call.name, call.arguments, call.is_whole)
                for one in found
                for call in one.calls
            ),
        )

    def close(self) -> None:
        """Stop and give the engine back; what was read stays in `result`.

        From another thread than the reading one this cancels: the step under way is finished.
        """
        self._job.was_closed = True
        with suppress(ValueError):  # it is being read
            self._chunks.close()
        self._drop_cancelled()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _joined(parts: Iterable[ToolCall]) -> tuple[ToolCall, ...]:
    """Calls with their parts put together."""
    found: dict[str, ToolCall] = {}
    for part in parts:
        before = found[part.id].arguments if part.id in found else ""
        found[part.id] = replace(part, arguments=before + part.arguments)
    return tuple(found.values())


def _spans(chunks: Iterable[Chunk]) -> tuple[Span, ...]:
    """Who wrote what, where there are two models."""
    spans: list[Span] = []
    end = 0
    for chunk in chunks:
        start, end = end, end + len(chunk.token_ids)
        if spans and spans[-1].model == chunk.model:
            start = spans.pop().start
        if chunk.model:
            spans.append(Span(chunk.model, start, end))
    return tuple(spans)


def _turns(turns: Sequence[ModelTurn], count: int) -> tuple[ModelTurn, ...]:
    """Of so many tokens; the last turn may have had more."""
    if not turns:
        return ()
    *ended, (model, _) = turns
    rest = count - sum(tokens for _, tokens in ended)
    return (*ended, (model, rest)) if rest > 0 else tuple(ended)


class Closable(Protocol):
    """A stream or a turn."""

    def __iter__(self) -> Iterator[Chunk]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _End:
    """What comes after the last chunk."""

    problem: BaseException | None


async def chunks_of(stream: Closable) -> AsyncGenerator[Chunk, None]:
    """The chunks of `stream`, without blocking the event loop.

    Leaving the iteration early, or cancelling the task, stops the generation after the step under
    way and waits for that; so does closing the event loop, which waits for nothing. Raises what the
    stream raises.
    """
    import asyncio  # costs 40 ms, which commands do not need

    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[Chunk | _End] = asyncio.Queue()

    def put(item: Chunk | _End) -> bool:
        """False where nobody can wait for it any more: the event loop is closed."""
        try:
            loop.call_soon_threadsafe(queue.put_nowait, item)
        except RuntimeError:
            if not loop.is_closed():
                raise
            return False
        return True

    def read() -> None:
        problem: BaseException | None = None
        try:
            for chunk in stream:
                if not put(chunk):
                    stream.close()
                    break
        except BaseException as caught:
            problem = caught
        put(_End(problem))

    threading.Thread(target=read, name="edgespec-stream", daemon=True).start()
    end: _End | None = None
    try:
        while end is None:
            item = await queue.get()
            if isinstance(item, _End):
                end = item
            else:
                yield item
    finally:
        if end is None:
            stream.close()
            while not isinstance(await queue.get(), _End):
                pass
    if end.problem is not None:
        raise end.problem
