"""The log: where it goes, and what is never in it."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import Command, run

from edgespec.cli.log import start_log, stop_log
from edgespec.cli.options import ModelOptions

QUESTION = "What is a quokka made of?"
SHORT = ("--max-tokens", "8", "--ctx", "256")
SERVE = logging.getLogger("edgespec.serve")


@pytest.fixture(autouse=True)
def ended() -> Any:
    """Nothing of a test's log is left."""
    yield
    stop_log()


def said(capsys: pytest.CaptureFixture[str], verbose: int = 0) -> str:
    """What stderr has of one line of each level."""
    start_log(verbose, None)
    SERVE.warning("w")
    SERVE.info("i")
    SERVE.debug("d")
    out, err = capsys.readouterr()
    assert out == ""
    return "".join(line.rpartition(": ")[2] for line in err.splitlines())


@pytest.mark.parametrize(("verbose", "told"), [(0, "w"), (1, "wi"), (2, "wid"), (3, "wid")])
def test_v_and_vv_say_more(capsys: pytest.CaptureFixture[str], verbose: int, told: str) -> None:
    assert said(capsys, verbose) == told


def test_a_file_has_what_v_shows_and_is_appended_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    for _ in range(2):
        start_log(0, str(path))
        SERVE.info("one\x1b[2J")
    assert capsys.readouterr() == ("", "")
    line = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO edgespec\.serve: one\[2J\n"
    assert re.fullmatch(line * 2, path.read_text(encoding="utf-8"))


def test_a_file_that_was_moved_away_is_made_anew(tmp_path: Path) -> None:
    start_log(0, str(tmp_path / "log"))
    SERVE.info("one")
    (tmp_path / "log").rename(tmp_path / "log.1")
    SERVE.info("two")
    assert "two" in (tmp_path / "log").read_text(encoding="utf-8")


@pytest.mark.parametrize("command_name", ["doctor", "plan", "version", "models list"])
def test_every_command_takes_them(command: Command, command_name: str, tmp_path: Path) -> None:
    missing = tmp_path / "no" / "log"
    status, out, err = command(*command_name.split(), "-vv", "--log-file", str(missing))
    assert (status, out) == (1, "")
    assert err == f"error: cannot write the log {missing}: No such file or directory\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    start_log(0, "/dev/full")
    SERVE.info("one")
    SERVE.info("two")
    told = "warning: cannot write the log /dev/full: No space left on device\n"
    assert capsys.readouterr().err == told


def test_a_bug_leaves_its_place_and_no_text(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Messages of exceptions may quote a prompt."""

    def fail(model: ModelOptions, *_more: object) -> None:
        raise KeyError(model.name)

    monkeypatch.setattr(ModelOptions, "path", fail)
    with pytest.raises(KeyError):
        command("plan", "private text", "--log-file", str(tmp_path / "log"))
    told = (tmp_path / "log").read_text(encoding="utf-8")
    assert "the command failed: KeyError" in told and "in fail" in told
    assert "private text" not in told


@pytest.mark.model
def test_an_answer_leaves_no_words_in_the_log(measured: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    done = run("run", "embedded", QUESTION, *SHORT, "-vv", "--log-file", str(path), cache=measured)
    assert done.status == 0
    log = path.read_text(encoding="utf-8")
    assert "edgespec.llama: " in log and "edgespec.setup: loading " in log
    assert "quokka" not in log + done.err
    assert done.out and done.out.strip() not in log


def test_python_prints_nothing_where_nobody_asked(capfd: pytest.CaptureFixture[str]) -> None:
    """Its last resort is stderr."""
    import subprocess

    code = "import edgespec.log, logging; logging.getLogger('edgespec.serve').warning('told')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
