"""What all tests share: no test reads or writes the user's cache, and slow tests are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests that take minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="takes minutes; run with --slow"))


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory of this test's own; it is made by whoever writes first."""
    folder = tmp_path / "edgespec-cache"
    monkeypatch.setenv("EDGESPEC_CACHE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def fresh_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are those of a process that holds nothing else, not those of a test runner."""
    if request.node.get_closest_marker("own_memory") is None:
        monkeypatch.setattr("edgespec.memory.plan.plan.resident_bytes", lambda: 0)
        monkeypatch.setattr("edgespec.memory.plan.plan.private_bytes", lambda: 0)


class _WholeTeams:
    def enter(self, most: int) -> int:
        return most

    def leave(self) -> None: ...


@pytest.fixture(autouse=True)
def whole_teams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps have all of their threads, whatever else computes while tests run."""
    monkeypatch.setattr("edgespec.backends.llama.backend.TEAMS", _WholeTeams())
