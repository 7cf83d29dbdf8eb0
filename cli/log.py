"""Where the log goes: `-v`, `-vv` and `--log-file` of every command.

stderr has warnings and failures, with `-v` what is done and what llama.cpp says, with `-vv`
everything. A file has what `-v` shows, and what a person is told. See `edgespec.log` for who says
what. stdout has none of it.
"""

from __future__ import annotations

import contextlib
import logging
import sys

from typer.core import TyperOption

from edgespec.cli.options import LOG
from edgespec.cli.render import NOTES, printable
from edgespec.errors import UnsupportedError
from edgespec.log import PROMPTS
from edgespec.models.writing import reason

_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)  # by the number of -v
_ROOT = logging.getLogger("edgespec")


def log_options() -> list[TyperOption]:
    """What every command takes."""
    return [
        TyperOption(
            param_decls=["verbose", "--verbose", "-v"],
            count=True,
            default=0,
            help="Log on stderr what is done and what llama.cpp says; -vv: more of it.",
            rich_help_panel=LOG,
        ),
        TyperOption(
            param_decls=["log_file", "--log-file"],
            type=str,
            metavar="FILE",
            help="Append the log to this file. It has no prompts and no answers.",
            rich_help_panel=LOG,
        ),
    ]


def start_log(verbose: int, log_file: str | None) -> None:
    """From now on the log goes where the options say, until `stop_log`.

    Raises UnsupportedError for a file that cannot be written.
    """
    stop_log()
    level = _LEVELS[min(verbose, len(_LEVELS) - 1)]
    handlers: list[logging.Handler] = [_ToStderr(level)]
    if log_file is not None:
        handlers.append(_to_file(log_file, min(level, logging.INFO)))
    _ROOT.setLevel(min(one.level for one in handlers))
    NOTES.setLevel(logging.INFO)
    for one in handlers:
        one.setFormatter(_TextLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        _ROOT.addHandler(one)


def stop_log() -> None:
    """As before `start_log`."""
    for one in [*_ROOT.handlers]:
        if not isinstance(one, logging.NullHandler):
            _ROOT.removeHandler(one)
            with contextlib.suppress(OSError):  # what a full disk did not take was told
                one.close()
    _ROOT.setLevel(logging.NOTSET)
    NOTES.setLevel(logging.NOTSET)
    PROMPTS.setLevel(logging.CRITICAL)


class _ToStderr(logging.Handler):
    """Writes to what stderr is at that time. Notes are printed already."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != NOTES.name:
            print(self.format(record), file=sys.stderr, flush=True)


def _to_file(path: str, level: int) -> logging.Handler:
    """Appends; a file that was moved away by a program that rotates logs is made anew."""
    from logging.handlers import WatchedFileHandler

    class _ToFile(WatchedFileHandler):
        def handleError(self, record: logging.LogRecord) -> None:
            """Once: a full disk ends no answer."""
            problem = sys.exc_info()[1]
            why = reason(problem) if isinstance(problem, OSError) else problem
            self.setLevel(logging.CRITICAL + 1)
            print(f"warning: cannot write the log {path}: {why}", file=sys.stderr, flush=True)

    try:
        handler = _ToFile(path, encoding="utf-8")
    except OSError as problem:
        raise UnsupportedError(f"cannot write the log {path}: {reason(problem)}") from problem
    handler.setLevel(level)
    return handler


class _TextLine(logging.Formatter):
    """Lines without what could steer the terminal of who reads them."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
