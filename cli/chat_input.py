"""Where the messages of a chat come from: a person at a terminal, or the lines of a pipe."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import typer

from edgespec.cli.answer_writer import is_dumb
from edgespec.cli.chat_loop import COMMANDS, Chat
from edgespec.cli.options import set_text
from edgespec.cli.read_ahead import ReadAhead
from edgespec.cli.render import error, note, printable
from edgespec.errors import UnsupportedError
from edgespec.memory.store.cache import cache_directory
from edgespec.models.writing import whole_file
from edgespec.paths import stdin_lines

_PROMPT, _CONTINUATION = "> ", "  "
_HISTORY_BYTES = 256 << 10  # of what was typed, over which half is forgotten
_NOT_UTF8 = re.compile("[\ud800-\udfff]")  # what stands for a byte that is no text
_EDITOR_BYTES = 14 << 20  # prompt_toolkit and asyncio; 9 MiB when they are imported


def interface_bytes() -> int:
    """What reading messages adds to the memory of the process."""
    return _EDITOR_BYTES if _is_typed() and not is_dumb() else 0


def _is_typed() -> bool:
    return sys.stdin.isatty() and (sys.stdout.isatty() or sys.stderr.isatty())


def read_messages(chat: Chat, ahead: ReadAhead) -> Iterator[str]:
    """Messages and commands until there are no more; empty ones are left out.

    What a person types is read `ahead`.

    Raises KeyboardInterrupt when Ctrl-C was typed twice.
    """
    if _is_typed():
        yield from _typed(chat, ahead)
        return
    failed = False
    for line in stdin_lines():
        if isinstance(line, UnsupportedError):
            failed = True
            error(line)
        elif text := line.strip():
            yield text
    if failed:
        raise typer.Exit(1)


def _typed(chat: Chat, ahead: ReadAhead) -> Iterator[str]:
    session = _PlainEditor() if is_dumb() else _prompt_session(chat, ahead)
    note(f"{set_text(chat.session.sampling)}; /params changes it")
    note("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves")
    asked = False
    while True:
        line = chat.next_line
        asked = asked or line.is_after_stop
        line.is_after_stop = False
        draft, line.draft = line.draft, ""
        ahead.begins(draft)
        try:
            text = session.prompt(_PROMPT, default=draft)
        except EOFError:
            return
        except KeyboardInterrupt:
            line.replaces = False
            if session.default_buffer.text:
                asked = False  # it cleared the line
            elif asked:
                raise
            else:
                asked = True
                note("Ctrl-C again leaves")
            continue
        finally:
            ahead.stop()
        asked = False
        if stray := _NOT_UTF8.search(text):
            problem = f"the message is not UTF-8 text: it has the byte 0x{ord(stray[0]) & 0xFF:02x}"
            error(UnsupportedError(problem, hint="set the terminal to UTF-8; the rest is kept"))
            line.draft = _NOT_UTF8.sub("", text)
        elif text.strip():
            yield text
        else:
            line.replaces = False


class _PlainEditor:
    """Reads lines where no editor can be drawn: the terminal itself echoes and corrects them."""

    default_buffer = SimpleNamespace(text="")  # what Ctrl-C takes away is not known

    def prompt(self, prompt: str, default: str = "") -> str:
        """One line. Raises EOFError and KeyboardInterrupt."""
        if default:
            note(f"in place of: {printable(default)}")
        out = sys.stderr if sys.stderr.isatty() else sys.stdout
        out.write(prompt)
        out.flush()
        if line := sys.stdin.buffer.readline():
            return line.decode(errors="surrogateescape").removesuffix("\n")
        raise EOFError


def _prompt_session(chat: Chat, ahead: ReadAhead) -> Any:
    """A line editor with a history and a bottom line, drawn on stderr if that is a terminal."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.output import create_output
    from prompt_toolkit.styles import Style

    output = create_output(stdout=sys.stderr if sys.stderr.isatty() else sys.stdout)
    session: Any = PromptSession(
        history=_history(),
        multiline=True,
        enable_suspend=True,
        key_bindings=_keys(),
        prompt_continuation=lambda _width, _number, _wrapped: _CONTINUATION,
        bottom_toolbar=lambda: chat.status(output.get_size().columns - 1),
        completer=WordCompleter(sorted(COMMANDS), sentence=True),
        complete_while_typing=False,
        style=Style.from_dict({"bottom-toolbar": "noreverse"}),
        output=output,
    )
    session.default_buffer.on_text_changed += lambda buffer: ahead.typed(buffer.text)
    return session


def _keys() -> Any:
    """Enter sends, Alt-Enter or a backslash before Enter begins a line."""
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: Any) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _history() -> Any:
    """What was typed in earlier chats; readable for its owner alone."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    path = cache_directory() / "chat-history"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        if path.stat().st_size > _HISTORY_BYTES:  # all of it is read at each start
            kept = path.read_bytes()[-_HISTORY_BYTES // 2 :]
            with whole_file(path, synced=False, private=True) as made:
                made.write_bytes(kept[kept.find(b"\n\n#") + 1 :])
        return FileHistory(str(path))
    return InMemoryHistory()
