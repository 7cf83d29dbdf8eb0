"""Ctrl-C in a chat: the first one stops an answer, the next one leaves."""

from __future__ import annotations

import signal

import pytest

from edgespec.cli.chat_loop import stoppable


def test_the_second_ctrl_c_interrupts_and_outside_it_is_as_before() -> None:
    signal.signal(signal.SIGINT, before := signal.default_int_handler)  # some shells ignore it
    with pytest.raises(KeyboardInterrupt), stoppable() as cancel:
        assert not cancel.is_set()
        signal.raise_signal(signal.SIGINT)
        assert cancel.is_set()
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_each_answer_is_stopped_by_itself() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with stoppable() as first:
        signal.raise_signal(signal.SIGINT)
    with stoppable() as second:
        assert first.is_set() and not second.is_set()
