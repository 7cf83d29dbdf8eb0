"""Teams of threads beside other processes: fewer threads, the same tokens, nothing learned."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from pathlib import Path
from time import monotonic, sleep

import numpy as np
import pytest
from fake_backend import FakeBackend
from random_gguf import Q4_0, write_model
from waiting import PATIENCE_S

from edgespec.backends.base import DraftTree
from edgespec.backends.llama import context as llamacpp
from edgespec.backends.llama import team
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.team import Teams, end_team
from edgespec.decode.engine import Engine
from edgespec.drafting import make_drafter
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.device import neighbours
from edgespec.memory.device.host import granted_cpus
from edgespec.memory.device.neighbours import Look, of_steps
from edgespec.memory.times import CostCurve

INF = float("inf")


class World:
    """A clock, and the seconds that others and we have computed so far."""

    def __init__(self, cores: int) -> None:
        self.now = self.others = self.ours = 0.0
        self.running = 0
        self.looked_at: list[set[int]] = []
        self.teams = Teams(cores, self.look, lambda: self.running, self.time)

    def look(self, threads: Collection[int]) -> Look:
        self.looked_at.append({*threads})
        return self.now, self.others + self.ours, self.ours

    def time(self) -> float:
        return self.now

    def work(self, seconds: float, others: float, most: int = 4) -> list[int]:
        """Steps of 50 ms beside `others` busy cores; the threads of each."""
        used = []
        for _ in range(round(seconds / 0.05)):
            used.append(self.teams.enter(most))
            self.now += 0.05
            self.ours += 0.05 * used[-1]
            self.others += 0.05 * others
            self.teams.leave()
        return used


def test_a_team_that_is_alone_has_all_of_its_threads() -> None:
    assert World(4).work(2.0, others=0.0) == [4] * 40


def test_threads_that_make_steps_are_looked_at() -> None:
    world = World(4)
    world.work(0.3, others=0.0)
    other = threading.Thread(target=world.work, args=(0.6, 0.0))
    other.start()
    number = other.native_id
    other.join()
    assert world.looked_at[-1] == {threading.get_native_id(), number}
    world.now += 5.0
    world.work(0.3, others=0.0)
    assert world.looked_at[-1] == {threading.get_native_id()}, "it may be gone"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells threads apart")
@pytest.mark.skipif(granted_cpus() < 2, reason="needs two cores")
def test_what_this_process_does_beside_steps_takes_a_core() -> None:
    """As a server's thread that receives large bodies does."""
    cores, is_over, data = int(granted_cpus()), threading.Event(), bytes(1 << 20)

    def compute() -> None:
        while not is_over.is_set():
            hashlib.sha256(data)

    beside = threading.Thread(target=compute)
    beside.start()
    try:
        found = []
        for _ in range(8):
            found.append(team.TEAMS.enter(cores))
            team.TEAMS.leave()
            sleep(0.1)
    finally:
        is_over.set()
        beside.join()
    assert min(found) < cores


@pytest.mark.parametrize(("others", "threads"), [(0.3, 4), (1.0, 3), (2.2, 2), (4.0, 1)])
def test_a_team_is_as_large_as_there_are_free_cores(others: float, threads: int) -> None:
    world = World(4)
    assert world.work(0.25, others)[0] == 4, "nothing was seen yet"
    assert set(world.work(2.0, others)) == {threads}
    assert world.work(2.0, 0.0)[-1] == 4, "they come back"


def test_what_this_program_does_besides_has_a_core_at_once() -> None:
    """Two threads of a step on one core wait for each other at each layer, for up to a second."""
    world = World(4)
    assert world.work(0.1, 0.0) == [4, 4]
    with world.teams.beside():
        assert world.work(0.1, others=0.0) == [3, 3]
        assert set(world.work(2.0, others=1.0)) == {3}, "a process of ours is one of the others"
        assert set(world.work(2.0, others=2.0)[10:]) == {2}
    assert world.work(2.0, 0.0)[-1] == 4


def test_what_it_does_besides_begins_behind_the_step_under_way() -> None:
    """Which has all cores. Of a long one nobody waits for the end."""
    world, began = World(4), threading.Event()

    def work() -> None:
        with world.teams.beside():
            began.set()

    assert world.teams.enter(4) == 4
    beside = threading.Thread(target=work)
    beside.start()
    assert not began.wait(team._LONGEST_STEP_S / 4)
    world.teams.leave()
    assert began.wait(PATIENCE_S)
    beside.join()
    assert world.teams.enter(4) == 4
    work()
    assert world.work(0.1, 0.0) == [2, 2], "two steps share the cores"


def test_threads_beyond_the_team_are_nobodys_loss() -> None:
    """Two threads on eight cores do not mind that three others are busy."""
    world = World(8)
    assert set(world.work(2.0, others=3.0, most=2)) == {2}


def test_after_a_pause_a_team_begins_anew() -> None:
    """Two programs that begin at the same time each find half of the cores, not 7 and 1."""
    world = World(8)
    world.work(1.0, others=7.0)
    world.now += 60.0
    world.others += 7 * 60.0
    assert world.work(0.2, others=7.0, most=8) == [8] * 4


@pytest.mark.parametrize(("running", "threads"), [(0, 8), (1, 7), (3, 5), (7, 4), (100, 4)])
def test_the_first_steps_leave_cores_to_whoever_computes_now(running: int, threads: int) -> None:
    """Half of them are taken where all are busy: two programs would else stay at 7 and 1."""
    world = World(8)
    for _ in range(2):
        world.running = running
        assert world.work(0.25, others=float(running), most=8) == [threads] * 5
        world.running = 99
        assert world.work(1.0, others=0.0, most=8)[-1] == 8, "what is seen later counts"
        world.now += 60.0


@pytest.mark.skipif(granted_cpus() < 2, reason="needs two cores")
def test_a_program_that_computes_is_seen_by_the_very_first_step() -> None:
    cores = int(granted_cpus())
    beside = [
        subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=-1)
        for _ in range(2)  # one may lose its processor to another test for a moment
    ]
    try:
        for one in beside:
            assert one.stdout is not None
            one.stdout.readline()
        is_seen = Teams(cores, of_steps).enter(cores) < cores
        assert is_seen == (neighbours._runnable() > 0), "a part of a machine is not told"
    finally:
        for one in beside:
            one.kill()
            one.communicate()


def test_a_long_step_is_no_pause() -> None:
    world = World(2)
    used = []
    for _ in range(4):
        used.append(world.teams.enter(2))
        world.now += 3.0
        world.ours += 3.0
        world.others += 3.0
        world.teams.leave()
    assert used == [2, 1, 1, 1]


@pytest.mark.parametrize(
    "problem", [PermissionError("/proc/stat"), NotImplementedError()], ids=repr
)
@pytest.mark.parametrize("after", [0, 1])
def test_where_the_system_does_not_tell_a_team_keeps_its_threads(
    problem: Exception, after: int
) -> None:
    """As in a sandbox without /proc/stat; it is not asked again and again."""
    now, asked = [0.0], [0]

    def look(_threads: Collection[int]) -> Look:
        asked[0] += 1
        if asked[0] > after:
            raise problem
        return (now[0], 0.0, 0.0)

    teams = Teams(4, look, lambda: 0, lambda: now[0])
    for _ in range(20):
        assert teams.enter(4) == 4
        now[0] += 0.2
        teams.leave()
    assert asked[0] == after + 1


def test_two_teams_of_one_process_share_its_cores() -> None:
    teams = World(4).teams
    assert teams.enter(4) == 4
    assert teams.enter(4) == 2
    teams.leave()
    assert teams.enter(4) == 2
    teams.leave()
    teams.leave()
    assert teams.enter(4) == 4


def test_an_interrupt_before_a_team_began_takes_no_thread_for_good() -> None:
    teams = World(4).teams
    teams.leave()
    for _ in range(3):
        assert teams.enter(4) == 4
        teams.leave()


class Contended(FakeBackend):
    """Has half of its threads from its tenth step on."""

    def verify(self, tree: DraftTree) -> np.ndarray:
        rows = super().verify(tree)
        self.contention = 2.0 if len(self.steps) >= 10 else 1.0
        return rows


def repeating(context: tuple[int, ...]) -> list[float]:
    """Counts to seven, again and again."""
    return [float(token == (context[-1] + 1) % 7) for token in range(16)]


class Watched(CostCurve):
    """Counts the steps that it was told of, and what it made of them."""

    steps = 0
    learned: tuple[float, ...] = ()

    def observe(
        self, num_nodes: int, depth: int, previous: int, ms: float, round_ms: float | None = None
    ) -> None:
        Watched.steps += 1
        super().observe(num_nodes, depth, previous, ms, round_ms)
        Watched.learned = tuple(self.base)


def test_steps_of_a_smaller_team_are_not_learned_and_change_no_token() -> None:
    curve = Watched([INF, *(5.0 + 0.2 * n for n in range(1, 33))])
    Watched.steps = 0
    backend = Contended(repeating, 16)
    with Engine(backend, curve=curve, drafter=make_drafter("suffix")) as engine:
        result = engine.generate([1, 2, 3], max_tokens=400)
        plain = engine.generate([1, 2, 3], max_tokens=400, speculate=False)
    assert result.token_ids == plain.token_ids
    assert result.counters.contended_rounds == result.counters.rounds - 9
    assert Watched.steps == 9, "the steps before, and no other"
    assert Watched.learned == tuple(curve.base)


def test_drafts_cost_more_on_fewer_threads() -> None:
    """What further tokens add is arithmetic; the first one's time is memory's."""
    curve = CostCurve([INF, 8.0, 10.0, INF, 14.0], depth_ms=0.01, depth_node_ms=0.001)
    contended = curve.contended(2.0)
    assert contended.base == [INF, 8.0, 12.0, INF, 20.0]
    assert (contended.depth_ms, contended.depth_node_ms) == (0.01, 0.002)
    assert contended.contended(0.5) == curve


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Let teams have so many threads."""

    class Fixed:
        threads = 2

        def enter(self, most: int) -> int:
            return min(most, self.threads)

        def leave(self) -> None: ...

    fixed = Fixed()
    monkeypatch.setattr(llamacpp, "TEAMS", fixed)
    yield lambda threads: setattr(fixed, "threads", threads)


@pytest.mark.model
@pytest.mark.parametrize(
    ("kind", "depth"), [("f16", 200), pytest.param("bf16", 530, marks=pytest.mark.long)]
)
def test_rows_do_not_depend_on_the_threads(
    one_thread: Callable[[int], None], tmp_path: Path, kind: str, depth: int
) -> None:
    """f16 while the cache has 256 cells, and the cache of --exact beyond."""
    settings = RunConfig(context_size=1024, threads=2, kv_type_k=kind)
    tokens = [i * 7 % 250 for i in range(depth)]
    rows = {}
    backend = LlamaBackend(write_model(tmp_path / "model.gguf", "llama", Q4_0), settings)
    try:
        for threads in (2, 1):
            one_thread(threads)
            backend.truncate(0)
            for start in range(0, depth, backend.batch_size):
                backend.prefill(tokens[start : start + backend.batch_size])
            assert backend.contention == 2 / threads
            for size in (1, 4):
                tree = DraftTree.chain(tokens[:size])
                rows[threads, size] = backend.verify(tree).copy()
                backend.truncate(depth)
    finally:
        backend.close()
    for size in (1, 4):
        assert np.array_equal(rows[1, size], rows[2, size])


@pytest.mark.model
def test_a_step_that_fails_leaves_its_team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teams = Teams(2, of_steps)
    monkeypatch.setattr(llamacpp, "TEAMS", teams)
    path = write_model(tmp_path / "model.gguf", "llama", Q4_0)
    backend = LlamaBackend(path, RunConfig(context_size=256, threads=2))
    try:
        monkeypatch.setattr(
            backend._context.lib,
            "llama_decode",
            lambda *_: (_ for _ in ()).throw(KeyboardInterrupt),
        )
        with pytest.raises(KeyboardInterrupt):
            backend.prefill([1, 2])
    finally:
        monkeypatch.undo()
        backend.close()
    done = threading.Event()

    def work() -> None:
        teams.enter(2)
        done.set()

    threading.Thread(target=work).start()
    assert done.wait(5) and teams.enter(2) == 1, "one at work"


@pytest.mark.model
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_threads_are_given_back(tmp_path: Path) -> None:
    """Those that OpenMP keeps for one caller would slow the steps of all others."""

    def count() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    path = write_model(tmp_path / "model.gguf", "llama", Q4_0)
    settings = RunConfig(context_size=64, batch_size=16, max_nodes=4, threads=2)
    with closing(LlamaBackend(path, settings)) as backend:
        end_team()  # itself: threads that loading left would hide one that ends nothing
        before = 0
        while (now := count()) != before:  # threads of other tests end, too
            before = now
            sleep(0.2)
        backend.prefill([1, 2, 3])
        if count() == before:
            pytest.skip("this llama.cpp keeps no threads of OpenMP")
        backend.release_threads()
        deadline = monotonic() + 10.0
        while count() > before and monotonic() < deadline:
            sleep(0.01)
        assert count() == before
        assert backend.prefill([4, 5]).shape == (backend.tokenizer.vocab_size,)
