"""All generations of an engine: who begins, and the steps that they share (continuous batching).

A turn lets others begin and makes a step of all that run. One user is a batch of one. With one
sequence, a thread that waits for a chunk makes the turns itself, for whoever runs: a token costs no
switch of threads. With several, a thread of the scheduler makes them, whether chunks are read or
not: OpenMP keeps a team for each thread that makes steps. It ends with the last answer.

Chunked prefill: prompts are read in the steps of answers, as much as `ChunkedPrefill` allows, first
come, first served. What the first one leaves of a step the next one has. Whoever has a prefix in
common with a prompt that is being read waits until it is there, so that it is read once. Whoever
wants other scales of the model's adapters waits until nobody else runs.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from time import perf_counter
from typing import Any

from edgespec.decode.generation import Chunk, ModelTurn, PartReader, Result, Span, joined_calls
from edgespec.decode.slots import Slots
from edgespec.decode.step import Chunks, Job, Outcome, PromptChunk, make_step
from edgespec.errors import BackendError, EdgespecError, UnsupportedError
from edgespec.memory.times.curve import Chunk as PrefillChunk
from edgespec.memory.times.curve import CostCurve

_PATIENCE_S = 0.05  # between two looks at whether a waiting generation was cancelled


class Scheduler:
    """Runs any number of generations on the sequences of one cache.

    Args:
        curve: step times of the model, where they were measured.
        splits: whether a prompt may be read in chunks of any size; not where logits depend on it.
    """

    def __init__(
        self,
        slots: Slots,
        *,
        curve: CostCurve | None = None,
        splits: bool = True,
    ) -> None:
        # Whether prompts are read in steps of answers; else between these.
        self._mixes, self._splits = slots.shares and splits, splits
        self.chunked_prefill = ChunkedPrefill(apart=not self._mixes, curve=curve)
        self._slots = slots
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        # Tokens that answers are expected to have, which is learned within some ten of them. The
        # first guess is small, since who needs more is promised more.
        self._usual_tokens = 64.0
        self._is_short = False  # of cells: somebody who writes waits for some
        self._clock_s = 0.0  # time of all turns so far; within one, less when it began
        # Guards what follows, who runs and who waits; a turn is made without it.
        self._lock = threading.RLock()
        self._change = threading.Condition(self._lock)
        self.is_closed = False
        self._owner: threading.Thread | None = None  # makes a turn, or works on the cache
        self._guest_until_s = 0.0  # no job is admitted before: `exclusive` waits for the cache

    # -- for readers -----------------------------------------------------------------------

    def chunks(self, job: Job) -> Chunks:
        """Yield what a generation writes; ends early where it is cancelled."""
        has_thread = self._slots.count > 1
        try:
            self._submit(job)
            while True:
                while not has_thread and job.chunks.empty():
                    if job.is_cancelled and self._leave_queue(job):
                        break
                    self._advance(job.chunks.qsize, job)
                if (chunk := job.chunks.get()) is None:
                    break
                yield chunk
            if job.problem is not None:
                raise job.problem
        finally:
            job.was_closed = True
            if not has_thread and self.is_of_this_process:  # the one that may have made steps
                self._slots.release_threads()

    @contextmanager
    def exclusive(self, is_cancelled: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """Work on the cache between two turns, one thread at a time, when a sequence is free.

        Yields False, with nothing free, where `is_cancelled` while it waited. Raises
        UnsupportedError as `check`, and where this thread has the cache already.
        """
        self.check()
        me = threading.current_thread()
        self._refuse_owner("used")
        try:
            try:
                yield self._claim(me, is_cancelled)
            finally:
                self._release(me)
        finally:  # where an interrupt came within the first one
            self._release(me)

    def _claim(self, me: threading.Thread, is_cancelled: Callable[[], bool]) -> bool:
        while not is_cancelled():
            with self._change:
                self.check()
                if self._owner is None and self._slots.has_free:
                    self._guest_until_s, self._owner = 0.0, me
                    return True
                # A free sequence is kept so long for who looks again after `_PATIENCE_S`.
                self._guest_until_s = perf_counter() + 0.5
            self._advance(lambda: self._owner is None and self._slots.has_free)
        self._guest_until_s = 0.0
        return False

    def _release(self, me: threading.Thread, *, wakes: bool = True) -> None:
        """Let the next turn begin, or the next one who wants to work on the cache.

        Who is not woken looks again after a moment: a queue must not wake up with every token.
        """
        if self._owner is me:
            self._owner = None
            if wakes or self.is_closed:
                with self._lock:
                    self._change.notify_all()

    @property
    def is_idle(self) -> bool:
        """Whether nobody is answered, waits, or works on the cache."""
        return not (self._running or self._waiting) and self._owner is None

    def check(self) -> None:
        """Raise UnsupportedError where the engine cannot be used any more, or not from here."""
        if not self.is_of_this_process:
            raise UnsupportedError(
                "the engine was loaded by another process, of which this one is a fork",
                hint="load the model in the process that uses it",
            )
        if self.is_closed:
            raise _closed()

    @property
    def is_of_this_process(self) -> bool:
        """A forked process has the memory, but none of the threads that wait for each step."""
        return self._pid == os.getpid()

    def drop_cancelled(self) -> None:
        """End what was cancelled now, where no step is under way; else that step's thread does."""
        if self.is_of_this_process:
            with self._lock:
                if self._owner is None:
                    self._end_cancelled()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """End all generations, after the step under way, and have the cache for good."""
        me = threading.current_thread()
        with self._change:
            self.is_closed = True
            while self._waiting:
                self._waiting.popleft().finish(_closed())
            for job in self._running:
                job.was_closed = True
            self._change.notify_all()
            self._refuse_owner("closed")
            while self._owner is not None:
                self._change.wait(_PATIENCE_S)
            self._owner = me
        try:
            for job in self._running[:]:
                self._end(job)
            yield
        finally:
            self._release(me)

    def _refuse_owner(self, what: str) -> None:
        if self._owner is threading.current_thread():
            raise UnsupportedError(
                f"the engine cannot be {what} by what runs within its own step, or works on its "
                "cache",
                hint="do it in another thread, or when that has ended",
            )

    def _submit(self, job: Job) -> None:
        self.check()  # before the lock, which somebody may have had when this process forked
        with self._change:
            self.check()
            self._refuse_owner("used")
            self._waiting.append(job)
            if self._slots.count > 1 and self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="edgespec-steps", daemon=True
                )
                self._thread.start()

    def _leave_queue(self, job: Job) -> bool:
        """End a job that was cancelled, if it has not begun."""
        with self._lock:
            if job not in self._waiting:
                return False
            self._waiting.remove(job)
            job.finish()
            return True

    # -- turns -----------------------------------------------------------------------------

    def _advance(self, is_so: Callable[[], object], job: Job | None = None) -> None:
        """Make a turn, or wait a moment for who makes it; neither where something is so already.

        `job` is what the calling thread reads.
        """
        me, is_mine = threading.current_thread(), False
        try:
            with self._lock:
                if is_so():
                    return
                if self._owner is me:
                    self._refuse_owner("waited for")
                if not self._may_turn(me):
                    self._change.wait(_PATIENCE_S)
                    return
                is_mine, self._owner = True, me
                self._clock_s -= perf_counter()
            self._make_turn()
            self._clock_s += perf_counter()
            self._release(me, wakes=self._running != [job])
        except BaseException as problem:  # an interrupt, in the middle of anything
            if is_mine and self._owner is me:
                for one in self._running[:]:
                    with suppress(Exception):
                        self._end(one, BackendError(f"a step was interrupted: {problem!r}"))
                for slot in self._slots:
                    slot.promised = 0
            raise
        finally:
            if is_mine and self._owner is me:
                self._release(me)

    def _may_turn(self, thread: threading.Thread) -> bool:
        """Whether there is something to do, and this thread is the one to do it now."""
        if self._owner is not None or self._thread not in (None, thread):
            return False
        if self._guest_until_s and self._has_guest and self._slots.has_free and not self.is_closed:
            return False
        return bool(self._running or self._waiting)

    @property
    def _has_guest(self) -> bool:
        return self._guest_until_s > 0.0 and perf_counter() < self._guest_until_s

    def _work(self) -> None:
        """In a thread: turns, as long as there is something to do."""
        try:
            while True:
                with self._change:
                    if not (self._running or self._waiting):
                        self._thread = None
                        return
                self._advance(lambda: False)
        except BaseException as problem:  # nobody must wait for a thread that is gone
            with self._change:
                self._thread, self.is_closed = None, True
                for job in self._waiting:
                    job.finish(BackendError(f"the engine failed: {problem!r}"))
                self._change.notify_all()
            raise

    def _now_s(self) -> float:
        """Time that turns have taken, which is what a generation takes."""
        return self._clock_s + perf_counter()

    def _end_cancelled(self) -> None:
        with self._lock:
            for job in [one for one in self._waiting if one.is_cancelled]:
                self._waiting.remove(job)
                job.finish()
        for job in [one for one in self._running if one.is_cancelled]:
            self._end(job)

    def _make_turn(self) -> None:
        """Let others begin, and a step of all that run."""
        jobs = self._running
        if len(jobs) == self._slots.count == 1 and not jobs[0].is_cancelled:
            job = jobs[0]
            if not job.sequence.num_pending:  # mostly: no more is looked at between its steps
                try:
                    self._process(job, make_step((job.sequence,))[0])
                except Exception as problem:
                    self._fail(job, problem)
                return
        self._end_cancelled()
        has_written = False
        while (one := self._admitted()) is not None:
            has_written |= self._begin(one)
        if jobs and not has_written:
            self._turn()

    def _begin(self, job: Job) -> bool:
        """Begin a job; True where it wrote a token at once, as the cache had its whole prompt."""
        try:
            self._slots.adapt(job.scales)
            job.target.begin(job)
        except Exception as problem:
            self._fail(job, problem)
            return False
        if job.state is None:  # it was cancelled meanwhile
            self._end(job)
            return False
        if job.is_reading:
            return False
        self._write_first(job)
        return True

    def _write_first(self, job: Job) -> None:
        """The first token of one whose prompt is in the cache."""
        try:
            outcome: Outcome = job.sequence.first()
        except Exception as problem:
            outcome = problem
        self._process(job, outcome)

    def _admitted(self) -> Job | None:
        """The next job, if there is room and no prefill under way brings more of its prompt."""
        with self._change:
            if not self._waiting or self._has_guest or self._is_short:
                return None
            job = self._waiting[0]
            if self._running and job.scales != self._slots.scales:  # a step has one model for all
                return None
            alike = [one for one in self._running if one.is_reading and one.salt == job.salt]
            coming = [one.prompt for one in alike]
            if coming and job.reuse and self._slots.gains_by_waiting(job.prompt, coming, job.salt):
                return None
            size, usual = len(job.prompt), round(self._usual_tokens)
            need, most = size + min(job.limit, usual), size + job.limit
            slot = self._slots.take(job.prompt, need, job.reuse, job.salt, most=most)
            if slot is None:
                if not self._running:  # where all of the cache is free
                    self._waiting.popleft().finish(self._slots.too_few(job.prompt, job.limit))
                return None
            job.slot, job.began_s = slot, self._now_s()
            self._running.append(job)
            self._waiting.popleft()
            return job

    def _end(self, job: Job, problem: Exception | None = None) -> None:
        """Give back what it has; what fails on the way is told to its reader, if nothing was."""
        assert job.slot is not None
        try:
            if job.state is not None:
                job.state.drop_image()
                job.state.flush()
            job.target.end(job)
        except Exception as caught:
            problem = problem or caught
        except BaseException as caught:
            problem = problem or BackendError(f"the end was interrupted: {caught!r}")
            raise
        finally:
            self._slots.give_back(job.slot)
            self._is_short, job.state = False, None
            if job.is_over and not job.asked.ahead:
                written = job.counters.generated_tokens
                self._usual_tokens += 0.1 * (written - self._usual_tokens)
            job.finish(problem)
            self._running.remove(job)

    def _turn(self) -> None:
        """A step of the answers, with chunks of prompts in it, or else in a run of their own."""
        those, reading = list[Job](), list[Job]()
        for one in self._running:
            (reading if one.is_reading else those).append(one)
        writing = [one for one in those if self._has_room(one)]
        num_short = len(those) - len(writing)
        self._is_short = num_short > 0
        seeing = [one for one in reading if one.sequence.is_at_image]
        # Who came meanwhile is looked for every 20 ms while all wait for their images.
        wait_s = 0.02 if len(seeing) + num_short == len(self._running) else 0.0
        for job in seeing:  # others go on while an image is encoded, or may begin meanwhile
            try:
                if self._slots.count == 1 or job.sequence.is_encoded(wait_s):
                    job.sequence.read_image()
            except Exception as problem:
                self._fail(job, problem)
        if seeing:
            reading = [one for one in self._running if one.is_reading]
            reading = [one for one in reading if not one.sequence.is_at_image]
        most = min((job.target.max_nodes for job in writing), default=1)
        groups = [writing[start : start + most] for start in range(0, len(writing), most)]
        if reading and not (self._mixes and groups and len(groups[-1]) < _most_rows(reading)):
            groups.append([])
        for number, group in enumerate(groups, 1):
            self._step(group, reading if number == len(groups) else [], len(writing))

    def _has_room(self, job: Job) -> bool:
        """Whether there are cells for its next step; else it waits for who ends."""
        sequence = job.state
        assert job.slot is not None and sequence is not None, "it has begun"
        need = sequence.backend.length + sequence.target.max_nodes + 1
        return self._slots.grow(job.slot, need)

    def _step(self, writing: Sequence[Job], reading: Sequence[Job], num_writing: int) -> None:
        """One step; `num_writing` answers go on in this turn."""
        chunks: list[PromptChunk] = []  # of the first ones that read

        def chunks_beside(nodes: int) -> list[PromptChunk]:
            chunks.extend(self._chunks(reading, nodes, num_writing))
            return chunks

        began, depth = perf_counter(), _depth(reading)
        try:
            sequences = [job.sequence for job in writing]
            outcomes = make_step(sequences, chunks_beside if reading else None)
        except Exception as problem:  # of the backend: nobody's step was made
            for job in (*writing, *reading[: len(chunks)]):
                self._fail(job, problem)
            return
        if num_writing and self._slots.count > 1:
            num_read = sum(len(tokens) for _, tokens in chunks)
            num_nodes = max((one.previous - num_read for one in sequences), default=0)
            if num_nodes or num_read:
                self.chunked_prefill.has_stepped(
                    num_nodes, num_read, (perf_counter() - began) * 1e3, depth
                )
        for job, outcome in zip(writing, outcomes, strict=True):
            self._process(job, outcome)
        for job in reading[: len(chunks)]:
            if not job.is_reading:
                self._write_first(job)

    def _chunks(
        self, reading: Sequence[Job], num_nodes: int, num_writing: int
    ) -> list[PromptChunk]:
        """What is prefilled beside so many nodes: all there is room for if no answer waits."""
        chunks: list[PromptChunk] = []
        most = max(1, reading[0].sequence.backend.batch_size - num_nodes)
        if num_writing and self._splits:
            nodes, depth = num_nodes or num_writing, _depth(reading)
            most = self.chunked_prefill.chunk_size(nodes, most, len(reading), depth)
        if self._splits and all(job.asked.ahead for job in reading):
            # Nobody asks about these yet, and who asks meanwhile waits for one such step.
            most = min(most, 64)
        for job in reading[: _most_rows(reading) - num_nodes if self._mixes else 1]:
            if most <= 0:
                break
            sequence = job.sequence
            chunks.append((sequence, sequence.next_chunk(most)))
            most -= len(chunks[-1][1]) + sequence.backend.pending
        return chunks

    def _process(self, job: Job, outcome: Outcome) -> None:
        """Give a reader what a step wrote, and see who writes next, if anybody."""
        try:
            if isinstance(outcome, Exception):
                raise outcome
            if outcome is not None:
                job.add(outcome, self._now_s())
            if job.is_over:
                self._end(job)
            elif outcome is None or job.routing.is_due:
                job.sequence.flush()
                job.target.go_on(job)
        except Exception as problem:
            self._fail(job, problem)

    def _fail(self, job: Job, problem: Exception) -> None:
        """End one whose cells may be in any state, unless another model goes on."""
        try:
            if job.target.survives(job, problem):
                return
        except Exception as another:
            problem = another
        with suppress(EdgespecError):
            if job.slot is not None:
                job.slot.backend.truncate(0)
        if job in self._running:
            self._end(job, problem)


def _depth(reading: Sequence[Job]) -> int:
    """Tokens in the cache before the next chunk, most of which is of the first prompt."""
    return len(reading[0].prompt) - reading[0].sequence.num_pending if reading else 0


def _most_rows(reading: Sequence[Job]) -> int:
    """Rows of logits that a step of the whole cache has room for."""
    return reading[0].sequence.target.backend.max_nodes


def _closed() -> UnsupportedError:
    return UnsupportedError("the engine is closed", hint="load the model again")


_FURTHER = 0.5  # of what the first prompt may add, each further one that waits


class ChunkedPrefill:
    """Sizes of chunks of prompts: reading one makes a step at most twice as long for the others.

    Where several prompts wait, answers keep less of their speed: small chunks would keep more
    people waiting, and longer, than they keep others going.

    Args:
        apart: chunks are read in runs of their own between the steps, and not in these.
        curve: step times of the model, where they were measured.
    """

    def __init__(self, *, apart: bool = False, curve: CostCurve | None = None) -> None:
        self._apart = apart
        self._curve = CostCurve.unmeasured() if curve is None else curve.together(1)
        self._since_plain = 0  # steps with chunks

    def chunk_size(self, num_nodes: int, most: int, waiting: int = 1, depth: int = 0) -> int:
        """Tokens of `waiting` prompts to be read with a step over so many nodes, at most `most`.

        The first of them stands behind `depth` others of its text. 0: with the next step.
        """
        plain_ms, error = self._curve.t(num_nodes, 0)
        # Standard error of a plain step from which on one is made that reads nothing. A chunk is
        # then off by a tenth of its step, as far as steps differ anyway. One step in 16 reads
        # nothing: what a chunk adds shows beside it.
        if error > 0.1 or (self._since_plain >= 15 and not self._apart):
            return 0
        times = 1.0 + _FURTHER * (waiting - 1)

        def with_chunk_ms(tokens: int) -> float:
            return self._curve.t(0 if self._apart else num_nodes, 0, PrefillChunk(tokens, depth))[0]

        most_ms = plain_ms * (times + (not self._apart))
        return max(1, bisect_left(range(1, most + 1), most_ms, key=with_chunk_ms))

    def has_stepped(self, num_nodes: int, num_read: int, ms: float, depth: int = 0) -> None:
        """A step that answers waited for took `ms`, over so many nodes and what was read in it.

        That began behind `depth` tokens of its text.
        """
        if num_read:
            self._curve.observe_chunk(PrefillChunk(num_read, depth), num_nodes, ms)
        else:
            self._curve.observe(num_nodes, 0, 0, ms)
        self._since_plain = self._since_plain + 1 if num_read else 0


# -- the reader's side: chunks as they come, and the result behind them -------------------


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
        self.prompt_ids = tuple(job.prompt)
        self.seed = job.sampler.seed  # that it draws with; repeat it to get the same tokens
        self._job, self._chunks, self._drop_cancelled = job, chunks, drop_cancelled
        self._reader, self._is_finished = reader, False
        self._read: list[Chunk] = []

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
            joined_calls(call for chunk in chunks for call in chunk.tool_calls),
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
            tool_calls=tuple(call for one in found for call in one.calls),
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
    """The turns of the first `count` tokens; the last turn may have written more."""
    if not turns:
        return ()
    *ended, (model, _) = turns
    rest = count - sum(tokens for _, tokens in ended)
    return (*ended, (model, rest)) if rest > 0 else tuple(ended)


async def chunks_of(stream: Any) -> AsyncGenerator[Chunk, None]:
    """The chunks of a `Stream` or a `Turn`, without blocking the event loop.

    Leaving the iteration early, or cancelling the task, stops the generation after the step under
    way and waits for that; so does closing the event loop, which waits for nothing. Raises what the
    stream raises.
    """
    import asyncio  # costs 40 ms, which commands do not need

    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[Chunk | BaseException | None] = asyncio.Queue()

    def put(item: Chunk | BaseException | None) -> bool:
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
        put(problem)  # None where it has ended well

    threading.Thread(target=read, name="edgespec-stream", daemon=True).start()
    item: Chunk | BaseException | None = None
    has_ended = False
    try:
        while isinstance(item := await queue.get(), Chunk):
            yield item
        has_ended = True
    finally:
        if not has_ended:
            stream.close()
            while isinstance(await queue.get(), Chunk):
                pass
    if item is not None:
        raise item
