"""Several generations at once: a thread that admits them, reads their prompts and makes the steps.

Prompts are read in the steps of the answers that are being written, as much of them as `Pace`
allows, first come, first served: what the first one leaves of a step the next one has. Whoever has
a prefix in common with a prompt that is being read waits until it is there, so that it is read
once. The thread runs while there is something to do and ends with the last answer.
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
from edgespec.decode.step import Outcome, Piece, make_step
from edgespec.errors import BackendError, EdgespecError, UnsupportedError
from edgespec.memory.times.curve import CostCurve

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
        self.decoding.begin()

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

    @property
    def most_rows(self) -> int:
        """Rows of logits that a step of the whole cache has room for."""
        assert self.seat is not None
        model = self.seat.model
        return (model.whole or model.backend).max_nodes


class Scheduler:
    """Runs any number of generations on the sequences of one cache.

    Args:
        latency, curve: as of `Pace`.
        splits: whether a prompt may be read in pieces of any size; not where logits depend on it.
        mixes: whether it may be read in a step of answers; else between these.
    """

    def __init__(
        self,
        seats: Seats,
        *,
        latency: float = 1.0,
        curve: CostCurve | None = None,
        splits: bool = True,
        mixes: bool = True,
    ) -> None:
        self._mixes = mixes and splits
        self.pace = Pace(latency, apart=not self._mixes, curve=curve)
        self._seats, self._splits = seats, splits
        self._waiting: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._change = threading.Condition()
        self._guest = threading.Lock()  # of who works on the cache between two turns
        self._has_guest = False  # who waits for that moment, or has it
        self._is_in_turn = False
        self._is_closed = False
        self._thread: threading.Thread | None = None

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
        """Work on the cache between two turns, one thread at a time.

        Raises UnsupportedError where the engine was closed meanwhile.
        """
        with self._guest:
            try:
                with self._change:
                    self._has_guest = True
                    self._change.wait_for(lambda: not self._is_in_turn)
                    if self._is_closed:
                        raise _closed()
                yield
            finally:
                with self._change:
                    self._has_guest = False
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
        with self._guest:  # the model is freed next: whoever works on its cache ends first
            pass

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
            while self._has_guest and not self._is_closed:
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
        """Let them begin, as far as there is room and nothing of their text is about to come."""
        while self._waiting:
            job = self._waiting[0]
            coming = [other.text for other in self._running if other.is_reading]
            if coming and job.run.reuse and self._seats.gains_by_waiting(job.text, coming):
                return
            seat = self._seats.take(job.text, len(job.text) + job.run.limit, job.run.reuse)
            if seat is None:
                return
            self._running.append(self._waiting.popleft())
            try:
                job.begin(seat)
            except Exception as problem:
                self._fail(job, problem)

    def _end(self, job: _Job, problem: Exception | None = None) -> None:
        self._running.remove(job)
        assert job.seat is not None
        if job.decoding is not None:
            job.decoding.tell()
        self._seats.give_back(job.seat)
        job.written.put(problem)

    def _turn(self) -> None:
        """A step of the answers, with pieces of prompts in it, or else in a run of their own."""
        reading = [job for job in self._running if job.is_reading]
        writing = [job for job in self._running if not job.is_reading]
        groups = list(_groups(writing))
        if reading and not (self._mixes and groups and len(groups[-1]) < reading[0].most_rows):
            groups.append([])
        for number, group in enumerate(groups, 1):
            self._step(group, reading if number == len(groups) else [], len(writing))

    def _step(self, writing: Sequence[_Job], reading: Sequence[_Job], num_writing: int) -> None:
        """One step; `num_writing` answers go on in this turn."""
        pieces: dict[_Job, Piece] = {}

        def read_beside(nodes: int) -> list[Piece]:
            nonlocal pieces
            pieces = self._pieces(reading, nodes, num_writing)
            return list(pieces.values())

        began, depth = perf_counter(), _depth(reading)
        try:
            decodings = [_decoding_of(job) for job in writing]
            outcomes = make_step(decodings, read_beside if reading else None)
        except Exception as problem:  # of the backend: nobody's step was made
            for job in (*writing, *pieces):
                self._fail(job, problem)
            return
        num_read = sum(len(piece.tokens) for piece in pieces.values())
        num_nodes = max((one.previous - num_read for one in decodings), default=0)
        if num_writing and (num_nodes or num_read):
            self.pace.has_stepped(num_nodes, num_read, (perf_counter() - began) * 1e3, depth)
        for job, outcome in zip(writing, outcomes, strict=True):
            self._hand_over(job, outcome)
        for job in pieces:
            if not job.is_reading:
                self._hand_over_first(job)

    def _pieces(
        self, reading: Sequence[_Job], num_nodes: int, num_writing: int
    ) -> dict[_Job, Piece]:
        """What is read in a step over so many nodes: as much as can be where no answer waits."""
        if not reading:
            return {}
        pieces: dict[_Job, Piece] = {}
        most = max(1, _decoding_of(reading[0]).backend.batch_size - num_nodes)
        if num_writing and self._splits:
            nodes, depth = num_nodes or num_writing, _depth(reading)
            most = self.pace.piece(nodes, most, len(reading), depth)
        for job in reading[: reading[0].most_rows - num_nodes if self._mixes else 1]:
            if most <= 0:
                break
            decoding = _decoding_of(job)
            pieces[job] = Piece(decoding, decoding.next_piece(most))
            most -= len(pieces[job].tokens) + decoding.backend.pending
        return pieces

    def _hand_over_first(self, job: _Job) -> None:
        try:
            self._hand_over(job, _decoding_of(job).first())
        except Exception as problem:
            self._fail(job, problem)

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


def _decoding_of(job: _Job) -> Decoding:
    assert job.decoding is not None, "it has begun"
    return job.decoding


def _depth(reading: Sequence[_Job]) -> int:
    """Tokens before what is read next: most of a step's pieces are of the first prompt."""
    return len(reading[0].text) - _decoding_of(reading[0]).num_unread if reading else 0


def _groups(jobs: Sequence[_Job]) -> Iterator[Sequence[_Job]]:
    """As many at a time as a step has room for."""
    most = min((job.seat.model.max_nodes for job in jobs if job.seat is not None), default=1)
    for start in range(0, len(jobs), most):
        yield jobs[start : start + most]


def _closed() -> UnsupportedError:
    return UnsupportedError("the engine is closed", hint="load the model again")
