"""How commands begin: Ctrl-C, where somebody else has it."""

from __future__ import annotations

import signal

import pytest

from edgespec.cli.start import cancel_on_interrupt


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
