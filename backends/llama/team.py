"""How many threads a step may have while other processes compute, too.

llama.cpp's threads meet several hundred times a step, and whoever is early spins. If something else
computes on a core of the team, one thread waits for its turn there and all others spin meanwhile:
two processes of two threads each on two cores were at 23 tokens/s, where one thread each gave 69
and a process alone 97. A server's own thread that receives large bodies does the same: prompts of
30 tokens took up to 1.4 s beside it, and 50 ms on one thread. So a team has as many threads as
there are free cores, looked up again while it works; one by one they come back when the neighbour
has gone.

The first step behind a pause counts who computes at that moment: beside one busy program on two
cores it took 2.5 to 4.2 s with both threads, for a prompt of 20 tokens.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter

from edgespec.backends.llama.library import ggml_function
from edgespec.memory.device.host import granted_cpus
from edgespec.memory.device.neighbours import Look, Neighbours, of_steps, running_now

_PERIOD_S = 0.25  # between two looks; processors' times are counted in hundredths of a second
_LONGEST_STEP_S = 0.1  # of an answer, on most machines; a part of a prompt may take seconds
_STALE_S = 1.0  # without a step, after which what was seen says nothing


class Teams:
    """The teams of threads of this process, at most one a loaded model.

    A team begins with half of the cores at least: whoever came first would otherwise keep them all.

    Args:
        cores: that this process may use.
        look: at what threads of these native ids took; see `Neighbours`.
        running: threads of others that compute at this moment.
    """

    def __init__(
        self,
        cores: float,
        look: Callable[[Collection[int]], Look],
        running: Callable[[], int] = running_now,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._cores, self._look, self._clock = cores, look, clock
        self._running = running
        self._threads = set[int]()  # that make steps
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)  # a step has, and somebody waits for that
        self._neighbours: Neighbours | None = None
        self._next_look_s = self._last_step_s = 0.0
        self._others = 0.0  # cores that others keep busy
        self._beside = 0  # that this program keeps busy with something else
        self._at_work = self._steps = 0  # steps now, and all that ended

    def enter(self, most: int) -> int:
        """Threads that a step may have now, of at most `most`; `leave` when it has ended."""
        with self._lock:
            self._at_work += 1
            self._threads.add(threading.get_native_id())
            now = self._clock()
            if now >= self._next_look_s:
                self._see(now)
            taken = max(self._others, self._beside)  # a process of ours is one of the others, too
            free = int((self._cores - taken) / self._at_work + 0.5)
        return most if free >= most else max(1, free)

    def leave(self) -> None:
        """A step has ended."""
        with self._lock:
            if self._at_work:  # an interrupt may have come before `enter`
                self._at_work -= 1
                self._steps += 1
                if self._beside:
                    self._ended.notify_all()
            self._last_step_s = self._clock()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """While this program keeps a core busy with something else, in a process of ours or here.

        It is known before anybody looks: in a quarter of a second 30 steps would wait for it. It
        begins when the steps under way have ended, which have all cores: beside it the two threads
        of one shared the other core, and it took 216 and 478 ms where it takes 6.
        """
        with self._lock:
            self._beside += 1
        try:
            with self._lock:
                last = self._steps + self._at_work
                self._ended.wait_for(lambda: self._steps >= last, _LONGEST_STEP_S)
            yield
        finally:
            with self._lock:
                self._beside -= 1

    def _see(self, now: float) -> None:
        is_stale = self._at_work == 1 and now - self._last_step_s > _STALE_S
        try:
            if self._neighbours is None or is_stale:
                self._threads = {threading.get_native_id()}
                self._neighbours = Neighbours(lambda: self._look(self._threads))
                self._others = min(self._running(), self._cores / 2)
            else:
                self._others = self._neighbours.share()
            self._next_look_s = now + _PERIOD_S
        except Exception:  # a system that does not tell has many ways: no step fails for it
            self._others, self._next_look_s = 0.0, float("inf")


TEAMS = Teams(granted_cpus(), of_steps)

_PAUSE_SOFT = 1  # a value of omp_pause_resource_t: what was set stays


def end_team() -> None:
    """Give back the threads that OpenMP keeps for the calling thread; the next step makes new ones.

    libgomp lets waiting threads spin only as long as a process has no more of them than processors,
    those kept for other callers included: steps of a second caller took 2.3 times as long.
    """
    with suppress(AttributeError):  # without OpenMP, or with one that has no such function
        ggml_function("omp_pause_resource_all", ctypes.c_int, ctypes.c_int)(_PAUSE_SOFT)
