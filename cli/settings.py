"""Where values of options come from besides the command line: variables, and two files.

    ctx = 8192                # every command that has --ctx

    [run]                     # one command
    temperature = 0.7

An option is `--name` on the command line, `EDGESPEC_NAME` in the environment, and `name` in
`edgespec.toml`: in this folder or the nearest one above it that has one, then in the user's
configuration folder. The first of these that says something holds.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edgespec.errors import UnsupportedError

FILE_NAME = "edgespec.toml"
_PREFIX = "EDGESPEC_"
# What a person says once, and what the environment has another meaning for.
_ONCE = ("help", "version", "clear", "yes", "force", "install-completion", "show-completion")
_TAKEN = (*_ONCE, "data", "cache", "models")


def option_name(parameter: Any) -> str:
    """The long name of an option, without its dashes; "" for an argument."""
    longs = [name for name in parameter.opts if name.startswith("--")]
    return longs[0][2:] if longs and parameter.param_type_name == "option" else ""


def variable(parameter: Any) -> str:
    """The environment variable of an option; "" where it has none."""
    name = option_name(parameter)
    return "" if not name or name in _TAKEN else _PREFIX + name.upper().replace("-", "_")


def take_variables(parameters: Sequence[Any]) -> None:
    """Let every option be given by its variable, too."""
    for parameter in parameters:
        if variable(parameter) and not parameter.envvar:
            parameter.envvar, parameter.show_envvar = variable(parameter), False


def project_file() -> Path | None:
    """The nearest file of this folder and those above it."""
    try:
        here = Path.cwd()
    except OSError:  # the folder is gone
        return None
    places = (folder / FILE_NAME for folder in (here, *here.parents))
    return next((place for place in places if place.is_file()), None)


def user_file() -> Path:
    """The file of the user's configuration folder, whether there is one or not."""
    import platformdirs

    return Path(platformdirs.user_config_dir("edgespec", appauthor=False)) / FILE_NAME


def files() -> list[Path]:
    """The files that hold, the one that decides first."""
    user = user_file()
    found = [project_file(), user if user.is_file() else None]
    return list(dict.fromkeys(path for path in found if path is not None))


def from_files(command: Any, name: str | None, parent: Any) -> dict[str, Any]:
    """Values of a command's options by parameter. Raises UnsupportedError for a wrong file."""
    root = parent.find_root().command if parent is not None else command
    return {
        parameter: value for parameter, (value, _) in told_by_files(command, name, root).items()
    }


def told_by_files(command: Any, name: str | None, root: Any) -> dict[str, tuple[Any, Path]]:
    """Values of a command's options by parameter, and the file that says so."""
    found: dict[str, tuple[Any, Path]] = {}
    for path in reversed(files()):
        document = _read(path, root)
        own = document.get(name or "", {})
        for values in (document, own):
            for parameter in command.params:
                key = option_name(parameter)
                if key and key not in _ONCE and key in values:
                    value = values[key]
                    is_one_of_many = parameter.multiple and not isinstance(value, list)
                    found[parameter.name] = ([value] if is_one_of_many else value, path)
    return found


def _read(path: Path, root: Any) -> dict[str, Any]:
    """A file whose every line means something."""
    # It joined the standard library with Python 3.11; before, the same module is a package.
    toml: Any = import_module("tomllib" if find_spec("tomllib") else "tomli")
    try:
        document: dict[str, Any] = toml.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise UnsupportedError(
            f"{path} cannot be read: {problem}", hint="it holds lines such as: ctx = 8192"
        ) from problem
    known = {name: _option_names(one) for name, one in commands(root)}
    every = {name for names in known.values() for name in names}
    for key, value in document.items():
        if isinstance(value, dict):
            _check_names(path, value, known.get(key), f"[{key}]")
        elif key not in every:
            _refuse(path, key, every)
    return document


def _check_names(path: Path, values: dict[str, Any], known: set[str] | None, table: str) -> None:
    if known is None:
        raise UnsupportedError(f"{path} has {table}, and there is no such command")
    for key in values:
        if key not in known:
            _refuse(path, f"{table} {key}", known)


def _refuse(path: Path, key: str, known: set[str]) -> None:
    near = difflib.get_close_matches(key.split()[-1].replace("_", "-"), sorted(known), 3)
    raise UnsupportedError(
        f"{path} sets {key}, and no command has such an option",
        hint=f"near it: {', '.join(near)}" if near else "`edgespec COMMAND --help` lists options",
    )


def commands(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every command by its last word."""
    if hasattr(command, "commands"):
        for word, inner in command.commands.items():
            yield from commands(inner, word)
        return
    yield name, command


def _option_names(command: Any) -> set[str]:
    return {option_name(parameter) for parameter in command.params} - {"", *_ONCE}
