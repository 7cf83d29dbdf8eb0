"""`edgespec config`: which values of options hold, and who says so."""

from __future__ import annotations

import json
import os
from typing import Any

import typer

from edgespec.cli import options, settings
from edgespec.cli.command import Commands
from edgespec.cli.render import note, printable, table
from edgespec.option_fields import argument

_SECRET, _HIDDEN = ("api-key",), "(set)"  # not for a screen

config_app = Commands("Show settings that come from files and variables.")


@config_app.add()
def show(
    context: typer.Context,
    command: str = argument("Whose options: run, chat, tune, and so on.", default="run"),
    as_json: options.JsonOption = False,
) -> None:
    """Show the options of a command and who set them. Example: edgespec config show chat"""
    root: Any = context.find_root().command
    name = command.split(" ")[-1]  # `quantize tune` and `tune` are the same
    chosen = dict(settings.commands(root)).get(name)
    if chosen is None:
        raise typer.BadParameter(f"there is no command {command}")
    told = settings.told_by_files(chosen, name, root)
    for warning in told.warnings():
        note(warning)
    rows = [_row(name, told, one) for one in chosen.params if settings.variable(one, name)]
    if as_json:
        print(
            json.dumps([dict(zip(("option", "value", "from"), row, strict=True)) for row in rows])
        )
        return
    head = ("option", "value", "from")
    shown = [(f"--{name}", _text(value), told) for name, value, told in rows]
    print(printable(table([head, *shown])))
    _say_files()


def _row(name: str, told: settings.Told, parameter: Any) -> tuple[str, Any, str]:
    option, value, source = _held(name, told, parameter)
    return option, _HIDDEN if value and option in _SECRET else value, source


def _held(name: str, told: settings.Told, parameter: Any) -> tuple[str, Any, str]:
    option, variable = settings.option_name(parameter), settings.variable(parameter, name)
    if (value := os.environ.get(variable)) is not None:
        return option, value, variable
    if parameter.name in told.values:
        value, path = told.values[parameter.name]
        return option, value, str(path)
    return option, parameter.default, "default"


def _text(value: Any) -> str:
    return "-" if value is None else str(value)


def _say_files() -> None:
    user, found = settings.user_file(), settings.files()
    for path in found:
        note(f"read: {path}")
    if user not in found:
        note(f"not there: {user}")
