"""How commands begin: Ctrl-C, where somebody else has it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edgespec.cli import start
from edgespec.cli.start import cancel_on_interrupt, load_engine
from edgespec.setup import loading


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine does not end the tests."""
    monkeypatch.setattr(start, "_NATIVE_S", 600.0)


@pytest.mark.model
def test_ctrl_c_is_ignored_where_it_was_before() -> None:
    """As in `edgespec run ... &` of a script, whose Ctrl-C is meant for others."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        cancel = cancel_on_interrupt()
        signal.raise_signal(signal.SIGINT)
        assert not cancel.is_set()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("step", ["plan_to_load", "load_plan"])
def test_ctrl_c_ends_a_load_at_its_next_report(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the model is there, seconds later."""
    cancel, seen = threading.Event(), list[float]()

    def load(*arguments: Any, progress: Callable[[str, float], None] | None = None) -> None:
        report = progress or arguments[-1]
        report("loading", 0.1)
        cancel.set()
        report("loading", 0.2)
        seen.append(0.2)

    monkeypatch.setattr(loading, "plan_to_load", lambda *_: None)
    monkeypatch.setattr(loading, step, load)
    anything: Any = None
    with pytest.raises(KeyboardInterrupt):
        load_engine(anything, anything, cancel, quiet=True)
    assert not seen


def test_it_is_said_where_a_model_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine: Any = SimpleNamespace(
        backend=SimpleNamespace(capabilities=SimpleNamespace(place="GPU0"))
    )
    monkeypatch.setattr(loading, "plan_to_load", lambda *_: None)
    monkeypatch.setattr(loading, "load_plan", lambda *_, **__: engine)
    monkeypatch.setattr(start, "headline", lambda *_: "a model")
    anything: Any = None
    assert load_engine(anything, anything, threading.Event(), quiet=False)[1] is engine
    assert "runs on GPU0" in capsys.readouterr().err


def test_ctrl_c_before_a_load_begins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """While modules are imported: the plan reports nothing, and loading does seconds later."""
    monkeypatch.setattr(loading, "plan_to_load", lambda *_: pytest.fail("it went on"))
    cancel, anything = threading.Event(), cast("Any", None)
    cancel.set()
    with pytest.raises(KeyboardInterrupt):
        load_engine(anything, anything, cancel, quiet=True)


@pytest.mark.parametrize("step", ["plan_to_load", "load_plan"])
def test_ctrl_c_ends_what_reports_nothing(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are timed, headers are read, steps are measured: seconds, once for a device."""
    seen = list[str]()

    def work(*_: Any, **__: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        seen.append(step)

    monkeypatch.setattr(loading, "plan_to_load", lambda *_: None)
    monkeypatch.setattr(loading, step, work)
    anything: Any = None
    before = signal.getsignal(signal.SIGINT)
    try:
        cancel = cancel_on_interrupt()
        handler = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            load_engine(anything, anything, cancel, quiet=True)
        assert cancel.is_set() and not seen
        assert signal.getsignal(signal.SIGINT) is handler, "an answer is cancelled, not interrupted"
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows wakes nobody for Ctrl-C")
@pytest.mark.parametrize("step", ["plan_to_load", "load_plan"])
def test_ctrl_c_ends_a_load_whose_library_does_not_return(step: str) -> None:
    """Python would hear of it minutes later."""
    code = (
        "import hashlib, os, signal, threading\n"
        "from edgespec.cli.start import cancel_on_interrupt, load_engine\n"
        "from edgespec.setup import loading\n"
        "def work(*_, **__):\n"
        "    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "    hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)\n"
        "loading.plan_to_load = lambda *_: None\n"
        f"loading.{step} = work\n"
        "load_engine(None, None, cancel_on_interrupt(), quiet=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert done.returncode == 130
