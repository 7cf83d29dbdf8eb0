"""Reads a message into the cache while it is being typed, so that its answer begins at once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from edgespec.errors import EdgespecError

if TYPE_CHECKING:
    from edgespec.cli.chat_loop import Chat

AUTO, ON, OFF = "auto", "on", "off"
# Without a key. Reading ends behind a piece of 64 tokens, which takes 0.17 s on SmolLM2 and 0.6 s
# on a 1.5B (two cores of a Zen 3): with a shorter wait each key would find one under way.
_QUIET_S = 0.3


class ReadAhead:
    """What is read of the next message of a chat, in a thread, until it is sent.

    Args:
        choice: on, off, or auto: not on battery.
    """

    def __init__(self, chat: Chat, choice: str) -> None:
        self._chat, self._choice = chat, choice
        self._timer: threading.Timer | None = None
        self._cancel = threading.Event()
        self._reading = threading.Lock()

    def typed(self, text: str, after_s: float = _QUIET_S) -> None:
        """This is what the line holds now: it is read unless another key follows."""
        from edgespec.memory.device.energy import is_on_battery

        self._end()
        if self._choice == OFF or (self._choice == AUTO and is_on_battery()):
            return
        cancel = self._cancel = threading.Event()
        self._timer = threading.Timer(after_s, self._read, (text, cancel))
        self._timer.daemon = True
        self._timer.start()

    def begins(self, text: str) -> None:
        """A line begins, behind an answer mostly: what stands before a message is read at once."""
        self.typed(text, 0.0)

    def stop(self) -> None:
        """Nothing is read any more; waits for the piece under way."""
        self._end()
        with self._reading:
            pass

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._cancel.set()

    def _read(self, text: str, cancel: threading.Event) -> None:
        from edgespec.cli.chat_loop import ALIASES, COMMANDS, split_command

        chat = self._chat
        with self._reading:
            if cancel.is_set() or chat.next_line.replaces or chat.images:
                return
            name, message = split_command(text, {*COMMANDS, *ALIASES})
            if name:
                return
            if not chat.engine.backend.capabilities.truncate:
                message = ""  # a part of it is no place that it could go back to
            try:
                chat.read_ahead(message, cancel)
            except EdgespecError:
                pass  # who sends it is told
