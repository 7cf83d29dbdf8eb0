"""The `edgespec` command: one sub-command a file, errors without tracebacks.

Exit status: 0 done, 1 the request cannot be met, 2 wrong usage, 130 interrupted, 141 the reader of
a pipe has gone.
"""

from __future__ import annotations

import io
import os
import sys
from importlib import import_module
from typing import Annotated, Any

import typer

from edgespec.cli.command import Commands
from edgespec.cli.log import stop_log
from edgespec.cli.render import NOTES, error, printable_streams, show_warnings
from edgespec.errors import EdgespecError
from edgespec.log import places_of
from edgespec.models.writing import is_full, reason

# Modules of this folder: each has a function of its name, or a group of commands.
_COMMANDS = (
    "run",
    "chat",
    "serve",
    "embed",
    "plan",
    "profile",
    "bench",
    "launch",
    "worker",
    "doctor",
    "remembered",
)
_GROUPS = ("draft", "models", "quantize")


def application(*names: str, is_outline: bool = False) -> typer.Typer:
    """The command line, with these commands and groups, or all: making one takes 5 ms.

    Half of that goes into its options, which an outline leaves out: it is for the help on all.
    """
    app = Commands(
        "Run quantized language models inside a memory budget, faster where text repeats.\n\n"
        "First steps:\n\n\b\nedgespec doctor\nedgespec plan model.gguf\n"
        'edgespec run model.gguf "Hi there."',
        name="edgespec",
        add_completion=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for name in names or (*_COMMANDS, version.__name__, *_GROUPS):
        if name == version.__name__:
            app.add()(version)
            continue
        is_group = name in _GROUPS
        found = getattr(import_module(f"edgespec.cli.{name}"), f"{name}_app" if is_group else name)
        if is_outline:
            app.command(name, help=found.info.help if is_group else found.__doc__)(lambda: None)
        elif is_group:
            app.add_typer(found, name=name)
        else:
            app.add()(found)
    app.callback()(_options)
    return app


def __getattr__(name: str) -> Any:
    """`app`: the whole command line."""
    if name == "app":
        return application()
    raise AttributeError(name)


def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    print(f"edgespec {installed('edgespec')}")


def _version_and_out(is_wanted: bool) -> None:
    if is_wanted:
        version()
        raise typer.Exit


def _options(
    _: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=_version_and_out
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the console script."""
    _open_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # what a terminal cannot show
    show_warnings()
    with printable_streams():
        try:
            _run()
        finally:
            stop_log()


class _ClosedOutput(io.TextIOBase):
    """A stdout that was closed from the start: what is written there is an error."""

    def write(self, _text: str) -> int:
        raise EdgespecError(
            "stdout is closed, so the output has nowhere to go", hint="send it to /dev/null"
        )

    def fileno(self) -> int:
        return 1


def _open_streams() -> None:
    """Put something in place of streams that were closed from the start.

    Else the next file that is opened would have the number of stdout, and be written to.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # has the lowest number that is free
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")
    sys.stdout = sys.stdout or _ClosedOutput()
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")


def _run() -> None:
    try:
        try:
            given = sys.argv[1:]
            needed = {*given[:1]} & {*_COMMANDS, *_GROUPS, version.__name__}
            application(*needed, is_outline=given in (["--help"], ["-h"]))()
        finally:
            sys.stdout.flush()  # a full disk is told here, not by the interpreter at its end
    except EdgespecError as problem:
        error(problem)
        sys.exit(1)
    except BrokenPipeError:  # what was still to be written when the reader had gone
        _drop_output()
        sys.exit(141)
    except OSError as problem:  # of what has no better words for it
        error(_in_a_sentence(problem))
        _drop_output()
        sys.exit(1)
    except Exception as problem:  # a bug: Python prints all of it, the log has no prompt
        NOTES.error("the command failed: %s", places_of(problem))
        raise


def _in_a_sentence(problem: OSError) -> EdgespecError:
    place = "" if problem.filename is None else f" {problem.filename}"
    if is_full(problem):
        return EdgespecError(f"cannot write{place}: {reason(problem)}", hint="make room there")
    return EdgespecError(f"cannot use{place or ' a file'}: {reason(problem)}")


def _drop_output() -> None:
    """What is still to be written would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
