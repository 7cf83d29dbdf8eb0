"""Several generations at once: a thread that admits them, reads their prompts and makes the steps.

Between two steps of the answers that are being written, a piece of one prompt is read. Prompts are
read one after the other, in the order in which they came, so that a prefix that several share is
read once. The thread runs while there is something to do and ends with the last answer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from time import perf_counter

from edgespec.backends.base import Backend
from edgespec.decode.decoding import Decoding
from edgespec.decode.generation import Rounds, Run, Written
from edgespec.decode.pace import Pace
from edgespec.decode.seats import Seat, Seats
from edgespec.decode.step import Outcome, make_step
from edgespec.errors import BackendError, EdgespecError, UnsupportedError

_PATIENCE_S = 0.05  # between two looks at whether a waiting generation was cancelled


class _Job:
    """A generation from its submission to its end."""

    def __init__(self, text: list[int], run: Run) -> None:
        self.text, self.run = text, run
        self.written: SimpleQueue[Outcome] = SimpleQueue()  # None: it has ended
        self.decoding: Decoding | None = None
        self.seat: Seat | None = None
        self._began_s = self._first_s = 0.0

    def begin(self, seat: Seat) -> None:
        self.seat, self._began_s = seat, perf_counter()
        self.decoding = Decoding(seat.model, self.run, self.text, self.run.reuse)

    def put(self, written: Written) -> None:
        """Hand a round over to who reads it; never waits."""
        now, counters = perf_counter(), self.run.counters
        if counters.rounds == 0:
            self._first_s = now
            counters.time_to_first_token_s = now - self._began_s
        counters.decode_s = now - self._first_s
        self.written.put(written)

    @property
    def is_reading(self) -> bool:
        return self.decoding is not None and self.decoding.num_unread > 0


class Scheduler:
    """Runs any number of generations on the sequences of one cache.

    Args:
        latency: as of `Pace`.
        splits: whether a prompt may be read in pieces of any size; not where logits depend on it.
    """

    def __init__(self, seats: Seats, *, latency: float = 1.0, splits: bool = True) -> None:
        self.pace = Pace(latency)
        self._seats, self._splits = seats, splits
        self._waiting: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._change = threading.Condition()
        self._guests = 0  # that wait for a moment between two turns, or have it
        self._is_in_turn = False
        self._is_closed = False
        self._thread: threading.Thread | None = None

    @property
    def num_running(self) -> int:
        """Generations that have a sequence."""
        return len(self._running)

    def rounds(self, text: list[int], run: Run) -> Rounds:
        """Yield what each round of a generation writes; ends early where it is cancelled."""
        job = _Job(text, run)
        self._submit(job)
        try:
            while (written := job.written.get()) is not None:
                if isinstance(written, Exception):
                    raise written
                yield written
        finally:
            run.cancel.set()

    @contextmanager
    def between(self) -> Iterator[None]:
        """Keep the thread from computing, to work on the cache."""
        with self._change:
            self._guests += 1
            self._change.wait_for(lambda: not self._is_in_turn)
        try:
            yield
        finally:
            with self._change:
                self._guests -= 1
                self._change.notify_all()

    def spare(self, count: int) -> Backend | None:
        """As `Seats.spare`, for who is `between` two turns."""
        return self._seats.spare(count)

    def close(self) -> None:
        """End all generations, after the step under way; those that wait raise."""
        with self._change:
            self._is_closed = True
            thread = self._thread
            self._change.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _submit(self, job: _Job) -> None:
        with self._change:
            if self._is_closed:
                raise _closed()
            self._waiting.append(job)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="edgespec-steps", daemon=True
                )
                self._thread.start()

    # -- in the thread ---------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while self._begin_turn():
                self._turn()
                with self._change:
                    self._is_in_turn = False
                    self._change.notify_all()
        except BaseException as problem:  # nobody must wait for a thread that is gone
            with self._change:
                self._is_in_turn, self._thread = False, None
                for job in [*self._running, *self._waiting]:
                    job.written.put(BackendError(f"the engine failed: {problem!r}"))
                self._is_closed = True
                self._change.notify_all()
            raise

    def _begin_turn(self) -> bool:
        """Wait for guests, let others begin; False where there is nothing to do."""
        with self._change:
            while self._guests and not self._is_closed:
                self._change.wait(_PATIENCE_S)
            if self._is_closed:
                self._end_all()
            self._drop_cancelled()
            self._admit()
            self._is_in_turn = bool(self._running)
            if not self._running:
                self._thread = None
            return self._is_in_turn

    def _end_all(self) -> None:
        for job in self._waiting:
            job.written.put(_closed())
        self._waiting.clear()
        for job in self._running[:]:
            self._end(job)

    def _drop_cancelled(self) -> None:
        for job in [job for job in self._waiting if job.run.cancel.is_set()]:
            self._waiting.remove(job)
            job.written.put(None)
        for job in [job for job in self._running if job.run.cancel.is_set()]:
            self._end(job)

    def _admit(self) -> None:
        """Let the first one begin, if there is room and no prompt is being read."""
        while self._waiting and not any(job.is_reading for job in self._running):
            job = self._waiting[0]
            seat = self._seats.take(job.text, len(job.text) + job.run.limit, job.run.reuse)
            if seat is None:
                return
            self._waiting.popleft()
            job.begin(seat)
            self._running.append(job)

    def _end(self, job: _Job, problem: Exception | None = None) -> None:
        self._running.remove(job)
        assert job.seat is not None
        self._seats.give_back(job.seat)
        job.written.put(problem)

    def _turn(self) -> None:
        """A piece of a prompt, and a step of the answers."""
        reading = [job for job in self._running if job.is_reading]
        writing = [job for job in self._running if not job.is_reading]
        for job in reading[:1]:
            self._read(job, whole=not writing)
        for group in _groups(writing):
            self._step(group)

    def _read(self, job: _Job, *, whole: bool) -> None:
        """A piece of a prompt, as large as can be where nobody waits for it."""
        decoding = job.decoding
        assert decoding is not None
        most, unread, began = decoding.backend.batch_size, decoding.num_unread, perf_counter()
        try:
            decoding.read(most if whole or not self._splits else self.pace.piece(most))
            self.pace.has_read(unread - decoding.num_unread, (perf_counter() - began) * 1e3)
            if not decoding.num_unread:
                self._hand_over(job, decoding.first())
        except Exception as problem:
            self._fail(job, problem)

    def _step(self, jobs: Sequence[_Job]) -> None:
        began = perf_counter()
        try:
            outcomes = make_step([job.decoding for job in jobs if job.decoding is not None])
        except Exception as problem:  # of the backend: nobody's step was made
            for job in jobs:
                self._fail(job, problem)
            return
        self.pace.has_stepped((perf_counter() - began) * 1e3)
        for job, outcome in zip(jobs, outcomes, strict=True):
            self._hand_over(job, outcome)

    def _hand_over(self, job: _Job, outcome: Outcome) -> None:
        assert job.decoding is not None
        if isinstance(outcome, Exception):
            self._fail(job, outcome)
            return
        if outcome is not None:
            job.put(outcome)
        if outcome is None or job.decoding.has_ended:
            self._end(job)

    def _fail(self, job: _Job, problem: Exception) -> None:
        """End one whose cells may be in any state."""
        assert job.seat is not None
        with suppress(EdgespecError):
            job.seat.model.backend.truncate(0)
        self._end(job, problem)


def _groups(jobs: Sequence[_Job]) -> Iterator[Sequence[_Job]]:
    """As many at a time as a step has room for."""
    most = min((job.seat.model.max_nodes for job in jobs if job.seat is not None), default=1)
    for start in range(0, len(jobs), most):
        yield jobs[start : start + most]


def _closed() -> UnsupportedError:
    return UnsupportedError("the engine is closed", hint="load the model again")
