"""The `edgespec` command: one sub-command a file, errors without tracebacks.

Exit status: 0 done, 1 the request cannot be met, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer

from edgespec.cli.bench import bench
from edgespec.cli.chat import chat
from edgespec.cli.doctor import doctor
from edgespec.cli.draft import draft_app
from edgespec.cli.models import models_app
from edgespec.cli.plan import plan
from edgespec.cli.profile import profile
from edgespec.cli.quantize import quantize
from edgespec.cli.remembered import remembered
from edgespec.cli.render import error, note, show_warnings
from edgespec.cli.run import run
from edgespec.errors import EdgespecError

app = typer.Typer(
    name="edgespec",
    help="Run quantized language models as fast as this device can produce correct tokens.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(run)
app.command()(chat)
app.command()(plan)
app.command()(profile)
app.command()(bench)
app.command()(quantize)
app.command()(doctor)
app.command()(remembered)
app.add_typer(draft_app, name="draft")
app.add_typer(models_app, name="models")


@app.command()
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
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What a terminal cannot show, and input that is not UTF-8.
            stream.reconfigure(errors="replace")
    show_warnings()
    try:
        app()
    except EdgespecError as problem:
        error(problem)
        sys.exit(1)
    except KeyboardInterrupt:
        note("interrupted")
        sys.exit(130)
    except BrokenPipeError:  # the reader has gone, as with `| head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


if __name__ == "__main__":
    main()
