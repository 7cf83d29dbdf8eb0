"""The `edgespec` command: one sub-command a file, errors without tracebacks.

Exit status: 0 done, 1 the request cannot be met, 2 wrong usage, 130 interrupted, 141 the reader of
a pipe has gone.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer

from edgespec.cli.bench import bench
from edgespec.cli.chat import chat
from edgespec.cli.command import Command, Group
from edgespec.cli.config import config_app
from edgespec.cli.doctor import doctor
from edgespec.cli.draft import draft_app
from edgespec.cli.models import models_app
from edgespec.cli.plan import plan
from edgespec.cli.profile import profile
from edgespec.cli.quantize import quantize_app
from edgespec.cli.remembered import remembered
from edgespec.cli.render import error, printable_streams, show_warnings
from edgespec.cli.run import run
from edgespec.cli.serve import serve
from edgespec.cli.worker import worker
from edgespec.errors import EdgespecError
from edgespec.models.writing import is_full, reason

app = typer.Typer(
    name="edgespec",
    cls=Group,
    help="Run quantized language models inside a memory budget, faster where text repeats.\n\n"
    "First steps:\n\n\b\nedgespec doctor\nedgespec plan model.gguf\n"
    'edgespec run model.gguf "Hi there."',
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=Command)(run)
app.command(cls=Command)(chat)
app.command(cls=Command)(serve)
app.command(cls=Command)(plan)
app.command(cls=Command)(profile)
app.command(cls=Command)(bench)
app.command(cls=Command)(worker)
app.command(cls=Command)(doctor)
app.command(cls=Command)(remembered)
app.add_typer(config_app, name="config")
app.add_typer(draft_app, name="draft")
app.add_typer(models_app, name="models")
app.add_typer(quantize_app, name="quantize")


@app.command(cls=Command)
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    print(f"edgespec {installed('edgespec')}")


def _version_and_out(is_wanted: bool) -> None:
    if is_wanted:
        version()
        raise typer.Exit


@app.callback()
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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # what a terminal cannot show
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # closed from the start
    show_warnings()
    with printable_streams():
        _run()


def _run() -> None:
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:  # closed from the start
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
