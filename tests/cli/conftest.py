"""Runs the command line in this process, and shares what it measured."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import Command, Done
from hub_server import empty_home
from random_gguf import Q8_0, write_model

from edgespec.cli.main import main
from edgespec.memory.device import host


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Command]:
    """Runs the command line in this process."""

    def call(*arguments: str, stdin: str | bytes = "") -> Done:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "argv", ["edgespec", *arguments])
        # Under `python -m pytest` click would name that module as the program.
        monkeypatch.setattr(sys.modules["__main__"], "__package__", "")
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        status: Any = 0
        try:
            main()
        except SystemExit as end:
            status = end.code or 0
        return Done(status, *capsys.readouterr())

    monkeypatch.setenv("COLUMNS", "100")
    before = signal.getsignal(signal.SIGINT)
    yield call
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def measured(measured_cache: Path) -> str:
    """One cache folder for all processes, so that steps are timed once."""
    return str(measured_cache)


@pytest.fixture
def here(command: Command, measured: str, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs the command line in this process, with what others measured: a second less each time."""
    monkeypatch.setenv("EDGESPEC_CACHE", measured)
    return command


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of random weights that reads any text, where words do not matter.

    Its process takes a second less than one of the embedded model.
    """
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    return str(write_model(path, "llama", Q8_0, reads_bytes=True, template=template))


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 GiB are free whenever it is asked, and nobody measures bandwidth: 20 GB/s."""
    monkeypatch.setattr(host, "available_bytes", lambda: 8 << 30)
    monkeypatch.setattr("edgespec.setup.planning.memory_bandwidth", lambda _: 20e9)


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> Command:
    """Runs the command in an empty folder."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setenv("COLUMNS", "200")
    return command


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return empty_home(tmp_path / "home", monkeypatch)


@pytest.fixture
def at_home(home: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> Command:
    """Runs the command in an empty folder, in a wide terminal."""
    monkeypatch.chdir(home)
    monkeypatch.setenv("COLUMNS", "200")
    return command
