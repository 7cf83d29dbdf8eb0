"""All generations of an engine: who begins, and the steps that they share (continuous batching).

A turn lets others begin and makes a step of all that run. One user is a batch of one. With one
sequence, a thread that waits for a chunk makes the turns itself, for whoever runs: a token costs no
switch of threads. With several, a thread of the scheduler makes them, whether chunks are read or
not: OpenMP keeps a team for each thread that makes steps. It ends with the last answer.

Chunked prefill: prompts are read in the steps of answers, as much as `ChunkedPrefill` allows, first
come, first served. What the first one leaves of a step the next one has. Whoever has a prefix in
common with a prompt that is being read waits until it is there, so that it is read once. Whoever
wants other scales of the model's adapters waits until nobody else runs.

Cells: whoever begins is promised those for its prompt and what answers take as a rule, and more
while it writes. Who cannot have more waits, with its sequence kept. Nobody begins or goes on where
not all of them could write their longest answers one after the other (the banker's algorithm:
Dijkstra, EWD 108): so one can always go on, and nobody's answer ends because of another's. Texts of
answers that have ended stay in the cache as long as their cells are not needed, least recently used
first; who begins with the same tokens, under the same salt, shares those cells.
"""

from __future__ import annotations

import itertools
import os
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import perf_counter

from edgespec.backends.base import (
    Adapts,
    Backend,
    HoldsSequences,
    ReleasesThreads,
    sequences_of,
)
from edgespec.decode.generation import Chunks
from edgespec.decode.step import Job, Outcome, Parts, PromptChunk, Slot, make_step
from edgespec.errors import BackendError, ContextFullError, EdgespecError, UnsupportedError
from edgespec.memory.times import Chunk as PrefillChunk
from edgespec.memory.times import CostCurve
from edgespec.prefix import common_prefix_length

_PATIENCE_S = 0.05  # between two looks at whether a waiting generation was cancelled


class Scheduler:
    """Runs any number of generations on the sequences of one cache.

    Args:
        curve: step times of the model, where they were measured.
        splits: whether a prompt may be read in chunks of any size; not where logits depend on it.
    """

    def __init__(
        self, slots: Slots, *, curve: CostCurve | None = None, splits: bool = True
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
                    if job.state is None and job.is_cancelled and self._leave_queue(job):
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

        Threads that are not woken look again after `_PATIENCE_S`: to wake all that wait with every
        token would cost steps their time.
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
        """Make a turn, or wait a moment for the thread that makes one; return at once if `is_so`.

        `job` is what the calling thread reads.
        """
        me, is_mine = threading.current_thread(), False
        try:
            with self._lock:
                if is_so():
                    return
                if self._owner is me:
                    self._refuse_owner("waited for")
                if (
                    self._owner is not None
                    or self._thread not in (None, me)
                    or not (self._running or self._waiting)
                    or (self._has_guest and self._slots.has_free and not self.is_closed)
                ):
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
            job, sequence = jobs[0], jobs[0].sequence
            if not sequence.num_pending:  # mostly: no more is looked at between its steps
                try:
                    self._process(job, make_step((sequence,))[0])
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


# -- where they run: the sequences of a cache, its cells, and the prefixes it keeps --------


class Slots:
    """All sequences of a backend's cache."""

    def __init__(self, whole: Backend) -> None:
        self._whole = whole
        self._slots = [Slot(number, one) for number, one in enumerate(sequences_of(whole))]
        self.count = len(self._slots)
        self._cells, self.shares = whole.context_size, False
        if isinstance(whole, HoldsSequences):
            # Whether sequences with the same beginning hold it in the same cells.
            self._cells, self.shares = whole.cells, whole.shares_cells
        self._numbers = itertools.count(1)
        # Of the model's adapters, in the next step; empty where there are none.
        self.scales = tuple(whole.scales) if isinstance(whole, Adapts) else ()

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    @property
    def has_free(self) -> bool:
        """Whether there is a sequence that nobody has."""
        return any(slot.is_free for slot in self._slots)

    def adapt(self, scales: tuple[float, ...]) -> None:
        """Let the next steps have these scales of the model's adapters."""
        if isinstance(self._whole, Adapts) and scales != self.scales:
            self._whole.adapt(scales)
            self.scales = scales

    def release_threads(self) -> None:
        """The calling thread, which made steps, makes none soon."""
        if isinstance(self._whole, ReleasesThreads):
            self._whole.release_threads()

    def take(
        self,
        text: Sequence[int],
        need: int,
        reuse: bool,
        salt: str = "",
        *,
        most: int | None = None,
    ) -> Slot | None:
        """A slot for a text that grows to `need` tokens or up to `most`; None until there is room.

        With `reuse` the sequence holds what the cache has of the text under the same salt.
        """
        free = [slot for slot in self._slots if slot.is_free]
        if not free:
            return None
        slot, source, known = self._place(free, text, reuse, salt)
        shared = source.parts(known) if self.shares or source is slot else []
        own, left = need - sum(length for _, length in shared), (most or need) - need
        if not self._is_safe((left, [*shared, (-1, own)])):
            return None
        if slot.salt != salt:
            slot.backend.truncate(0)
            slot.salt = salt
        if source is not slot:
            assert isinstance(self._whole, HoldsSequences), "sequences of one cache"
            self._whole.share(source.number, slot.number, known)
        slot.shared, slot.own, slot.promised = shared, next(self._numbers), need
        slot.most = most or need
        slot.prompt = len(text)
        self._make_room()
        slot.last_used = next(self._numbers)
        return slot

    def grow(self, slot: Slot, need: int) -> bool:
        """Promise a slot the cells of `need` tokens, at most all it may need; False: it waits."""
        if min(need, slot.most) <= slot.promised:
            return True
        before = slot.promised
        for promised in (need + 64, need):  # more than it needs, so that steps come between looks
            slot.promised = min(promised, slot.most)
            if self._is_safe():
                self._make_room()
                return True
        slot.promised = before
        return False

    def _is_safe(self, *others: tuple[int, Parts]) -> bool:
        """Whether all texts, and others, could be written to their ends, one after the other.

        Each may need so many cells more, and has some parts now.
        """
        running = [(one.most - one.promised, one.held()) for one in self._slots if not one.is_free]
        texts = sorted([*running, *others], key=lambda text: text[0])
        left = [parts for _, parts in texts]
        for more, _ in texts:
            if _count(part for parts in left for part in parts) + more > self._cells:
                return False
            del left[0]
        return True

    def too_few(self, text: Sequence[int], limit: int) -> ContextFullError:
        """The error where a text never fits."""
        return ContextFullError(
            f"the prompt has {len(text)} tokens and its answer up to {limit}, and the cache has "
            f"room for {self._cells}",
            hint="lower max_tokens, raise --ctx, or shorten the prompt",
        )

    def gains_by_waiting(
        self, text: Sequence[int], coming: Iterable[Sequence[int]], salt: str = ""
    ) -> bool:
        """Whether waiting saves prefill.

        A prompt `coming`, which is being prefilled, shares more of `text` than any cached one.
        """
        known = max(slot.common(text[:-1], salt) for slot in self._slots)
        return any(common_prefix_length(other, text[:-1], known) > known for other in coming)

    def hold(self, slot: Slot, count: int) -> bool:
        """Promise a slot `count` cells that no other one has; False, as before, without room."""
        before = slot.shared, slot.promised, slot.most
        slot.shared, slot.promised, slot.most = [], max(slot.promised, count), max(slot.most, count)
        if not self._is_safe():
            slot.shared, slot.promised, slot.most = before
            return False
        self._make_room()
        return True

    def give_back(self, slot: Slot) -> None:
        """Its answer has ended; what its cells hold stays, while there is room."""
        slot.promised = 0
        slot.last_used = next(self._numbers)

    def spare(self, count: int, salt: str = "") -> Backend | None:
        """A sequence that nobody has, emptied, and cells for `count` tokens; None without room."""
        slot = self.take((), count, reuse=False, salt=salt)
        if slot is None:
            return None
        slot.backend.truncate(0)
        self.give_back(slot)
        return slot.backend

    def _place(
        self, free: Sequence[Slot], text: Sequence[int], reuse: bool, salt: str
    ) -> tuple[Slot, Slot, int]:
        """A free slot, the one that has most of the text, and how many tokens of it.

        The free one has most itself where the text goes on from there; else it is the one that was
        used least recently, and so far another conversation stays where it is.
        """
        oldest = min(free, key=lambda slot: (len(slot.backend.tokens) > 0, slot.last_used))
        if not reuse:
            return oldest, oldest, 0
        text = text[:-1]  # the last token's logits are wanted
        known = {slot: slot.reach(text, salt) for slot in self._slots}
        best = max(free, key=lambda slot: known[slot])
        # A text is another's continuation where eight times more is kept than lost, and all of its
        # prompt but what opens the answer: conversations may have a long system prompt in common.
        is_kept = known[best] >= max(1, 8 * (len(best.backend.tokens) - known[best]))
        if is_kept and best.common(text, salt) >= best.prompt - 16:
            return best, best, known[best]
        if self.count == 1 or not oldest.goes_back:
            return oldest, oldest, known[oldest]
        for slot in self._slots:
            if slot is not oldest:
                known[slot] = slot.reach(text, salt, shared=True)
        source = max(self._slots, key=lambda slot: (known[slot], slot is oldest))
        return oldest, source, known[source]

    def _make_room(self) -> None:
        """Empty free slots until nobody who was promised cells can miss them."""
        for slot in sorted(self._slots, key=lambda one: one.last_used):
            if _count(part for one in self._slots for part in one.held()) <= self._cells:
                return
            if slot.is_free:
                slot.backend.truncate(0)
                slot.shared = []


def _count(parts: Iterable[tuple[int, int]]) -> int:
    """Cells of some parts, each counted once."""
    longest: dict[int, int] = {}
    for number, length in parts:
        longest[number] = max(length, longest.get(number, 0))
    return sum(longest.values())
