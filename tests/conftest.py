"""What all tests share: their caches, which of them run, and which of them may skip."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from allowed_skips import UnknownSkips
from filelock import FileLock
from hypothesis import settings
from shared_folders import shared_folder

if TYPE_CHECKING:
    from edgespec.decode.engine import Engine

# Threads of llama.cpp sleep while they wait for each other: where something else computes, tests
# with two threads take a tenth of the time. Read when the first library with OpenMP is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# To start threads that nothing here needs is a third of importing numpy, in hundreds of processes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Of files that take 12 s of processor time or more, or wait. No long one is left to the end.
LONGEST_FIRST = (
    "backends/llama/test_lossless.py",
    "test_lossless_sampled.py",
    "cli/test_chat.py",
    "serve/test_page.py",
    "serve/test_running.py",
    "backends/llama/test_workers.py",
    "backends/llama/test_head.py",
    "serve/test_tool_servers.py",
    "cli/test_run.py",
    "memory/bytes/test_simulation.py",
    "test_lossless.py",
    "test_gpu_check.py",
    "test_users.py",
    "backends/test_contract.py",
    "test_development_mode.py",
    "test_wheel.py",
    "backends/llama/test_sounds.py",
    "drafting/test_draft_failures.py",
    "quantize/test_fit.py",
    "test_docs_commands.py",
    "test_wiring.py",
    "serve/test_model_file.py",
    "cli/test_images.py",
    "cli/test_quantize.py",
)


# Examples are other ones each time; a failure prints how to see the same one again.
settings.register_profile("new", deadline=None, database=None, print_blob=True)
settings.load_profile("new")

_LONG_S = 900  # that a test of the long run may take


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the slow tests, as CI does")
    parser.addoption("--long", action="store_true", help="also those of `make test-long`")


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("CI") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(UnknownSkips(is_long=config.getoption("--long")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    folder = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        inside = item.path.is_relative_to(folder)
        name = item.path.relative_to(folder).as_posix() if inside else ""
        return places.get(name, len(places))

    items.sort(key=place)
    _look_further(items)
    long = [item for item in items if item.get_closest_marker("long")]
    if config.getoption("--long"):
        for item in long:
            item.add_marker(pytest.mark.timeout(_LONG_S))
        return
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if not item.get_closest_marker("long")]
    if config.getoption("--slow") or os.environ.get("CI"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow; runs in CI and with --slow"))


def pytest_collection_finish() -> None:
    """Thousands of tests are not looked through whenever garbage is collected."""
    gc.collect()
    gc.freeze()


def _look_further(items: list[pytest.Item]) -> None:
    """With EDGESPEC_FUZZ=20, tests by hypothesis try 20 times as many examples."""
    factor = int(os.environ.get("EDGESPEC_FUZZ", "1"))
    for item in items:
        function = getattr(item, "obj", None)
        used = getattr(function, "_hypothesis_internal_use_settings", None)
        if factor > 1 and used is not None:
            more = settings(used, max_examples=factor * used.max_examples)
            _function_of(function)._hypothesis_internal_use_settings = more
        if factor > 1 and (used is not None or item.get_closest_marker("hypothesis")):
            item.add_marker(pytest.mark.timeout(_LONG_S))


def _function_of(method: Any) -> Any:
    return getattr(method, "__func__", method)


_NUMBERS = count()
_PLANS_OF_A_PROCESS = 200  # it keeps the headers of all models that it was asked about


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory of this test's own; it is made by whoever writes first.

    Not in `tmp_path`: pytest looks through the folders of all tests before to make one.
    """
    folder = tmp_path_factory.getbasetemp() / f"cache-{next(_NUMBERS)}"
    monkeypatch.setenv("EDGESPEC_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session", autouse=True)
def seen_once() -> Iterator[None]:
    """What is the same for all tests is looked at by the first one that asks.

    The system's certificates, which clients of httpx read for 50 ms each time, the tree of
    commands, and how fast memory is, for which each plan in a new cache would copy 100 MiB.
    """
    from httpx import create_ssl_context
    from typer.main import get_command

    from edgespec.memory.device import bandwidth

    built = cache(get_command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx._transports.default.create_ssl_context", cache(create_ssl_context))
        for place in ("main.get_command", "testing._get_command"):
            patch.setattr(f"typer.{place}", built)
        patch.setattr(bandwidth, "_measure", cache(bandwidth._measure))
        yield


@pytest.fixture(scope="session", autouse=True)
def one_simulator() -> Iterator[None]:
    """One process tells what llama.cpp would allocate for the plans of many tests.

    In a program it is gone after each plan, and takes a third of a second to start.
    """
    from edgespec.memory.bytes.simulation import _simulator

    end, plans = _simulator._end, count(1)

    def end_at_times() -> None:
        if next(plans) % _PLANS_OF_A_PROCESS == 0:
            end()
        elif _simulator._folder is not None:
            _simulator._folder.cleanup()
            _simulator._folder = None
        _simulator._store()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_simulator, "_end", end_at_times)
        yield
    end()


@pytest.fixture(autouse=True)
def fresh_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are those of a process that holds nothing else, not those of a test runner."""
    if request.node.get_closest_marker("own_memory") is None:
        monkeypatch.setattr("edgespec.memory.plan.machine.resident_bytes", lambda: 0)
        monkeypatch.setattr("edgespec.memory.plan.machine.private_bytes", lambda: 0)


@pytest.fixture(scope="session")
def measured_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache directory for tests that need measurements, but not to make them themselves."""
    return shared_folder(tmp_path_factory, "measured-cache")


@pytest.fixture(scope="session")
def vision_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and projector of each of `vision_gguf.KINDS`."""
    from vision_gguf import KINDS, write_vision

    folder = shared_folder(tmp_path_factory, "vision")
    with FileLock(folder / ".lock"):
        for name in KINDS:
            if not (folder / f"{name}.gguf").exists():
                write_vision(folder, name)
    return folder


@pytest.fixture(scope="session")
def exact_engine(measured_cache: Path) -> Iterator[Engine]:
    """The embedded model with exact settings, 256 tokens of context and suffix drafts of up to 7.

    One thread: a second one waits in a busy loop, which is slow wherever something else runs.
    No early exit, wherever it was measured to pay: its drafts are drawn, and with a seed they
    change the text. Drafts are made whatever steps over them take here.
    """
    from frozen_times import let_drafts_pay

    import edgespec

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGESPEC_CACHE", str(measured_cache))
        patch.setattr("edgespec.backends.llama.context.TEAMS", _WholeTeams())
        with patch.context() as of_load:  # other tests see what a load measures
            of_load.setattr("edgespec.measure.timing._LOOK_SECONDS", 0.0)
            of_load.setattr("edgespec.measure.noise._NUM_TOKENS", 16)
            engine = edgespec.load(
                context_size=256, threads=1, draft_max=7, exact=True, drafter="suffix"
            )
        with engine:
            let_drafts_pay(engine)
            yield engine


class _WholeTeams:
    def enter(self, most: int) -> int:
        return most

    def leave(self) -> None: ...


@pytest.fixture(autouse=True)
def whole_teams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps have all of their threads, whatever else computes while tests run: nobody looks."""
    monkeypatch.setattr("edgespec.backends.llama.context.TEAMS", _WholeTeams())
    monkeypatch.setattr("edgespec.measure.timing._LOOK_SECONDS", 0.0)


@pytest.fixture(autouse=True)
def quick_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load times steps for a tenth of its time: only their own tests see how exact that is."""
    monkeypatch.setattr("edgespec.setup.loading._CURVE_SECONDS", 0.1)


@pytest.fixture
def frozen_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds take no time: which drafters are asked, and for how much, is always the same."""
    for module in ("decode.step", "drafting.combined", "drafting.model"):
        monkeypatch.setattr(f"edgespec.{module}.perf_counter", lambda: 0.0)
