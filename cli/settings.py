"""Where values of options come from besides the command line: variables, and two files.

    ctx = 8192                # every command that has --ctx

    [run]                     # one command
    temperature = 0.7

An option is `--name` on the command line, `EDGESPEC_NAME` in the environment, and `name` in
`edgespec.toml`: in this folder or the nearest one above it that has one, then in the user's
configuration folder. The first of these that says something holds.

The first file is a project's, and whoever wrote the project wrote it: a cloned repository has one.
So it sets sampling and sizes only. What names a file, a host, a key or a model, or does more than
answer, is ignored there, and said to be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from edgespec.errors import UnsupportedError
from edgespec.option_fields import Option
from edgespec.paths import read_text

FILE_NAME = "edgespec.toml"
_MOST_BYTES = 1 << 20  # of a file
_SHOWN = 60  # characters of a name that means nothing
_PREFIX = "EDGESPEC_"
# What a person says once, and what the environment has another meaning for.
_ONCE = (
    *("help", "version", "clear", "yes", "force", "install-completion", "show-completion"),
    "insecure",
)
_TAKEN = (*_ONCE, "data", "cache", "models")
# Who reaches a worker runs code on it, and EDGESPEC_HOST may be meant for a server.
_SAID_ALONE = {"worker": ("host",)}

_PATHS = ("path", "file", "filename", "directory")
_WHOLE, _NUMBERS = ("int", "integer", "int range", "integer range"), ("float", "float range")


class Told(NamedTuple):
    """What files say of a command's options."""

    values: dict[str, tuple[Any, Path]]  # by parameter, and which file
    ignored: dict[Path, list[str]]  # options that a project's file may not set

    def warnings(self) -> Iterator[str]:
        """One line for each file."""
        for path, names in self.ignored.items():
            yield (
                f"{path} sets {', '.join(names)}: ignored, as a project's file may set sampling "
                f"and sizes only; {user_file()} may set all"
            )


def option_name(parameter: Any) -> str:
    """The long name of an option, without its dashes; "" for an argument."""
    longs = [name for name in parameter.opts if name.startswith("--")]
    return longs[0][2:] if longs and parameter.param_type_name == "option" else ""


def variable(parameter: Any, command: str = "") -> str:
    """The environment variable of an option of a command; "" where it has none."""
    name = option_name(parameter)
    if not name or name in _TAKEN or name in _SAID_ALONE.get(command, ()):
        return ""
    return _PREFIX + name.upper().replace("-", "_")


def take_variables(parameters: Sequence[Any], command: str, known: Mapping[str, Option]) -> None:
    """Let every option be given by its variable, too; with what is `known` of each."""
    for parameter in parameters:
        parameter.known = known.get(parameter.name)
        if variable(parameter, command) and not parameter.envvar:
            parameter.envvar, parameter.show_envvar = variable(parameter, command), False


def is_for_projects(parameter: Any) -> bool:
    """Whether a project's file may set an option: sampling and sizes.

    Numbers name nothing, unless it is said of one that it does.
    """
    if parameter.known is not None and parameter.known.for_projects is not None:
        return bool(parameter.known.for_projects)
    return parameter.type.name in (*_WHOLE, *_NUMBERS) and not parameter.count


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


def told_by_files(command: Any, name: str | None, root: Any) -> Told:
    """What files say of a command's options. Raises UnsupportedError for a wrong file."""
    told, user = Told({}, {}), user_file()
    for path in reversed(files()):
        document = _read(path, root)
        own = document.get(name or "", {})
        for values in (document, own):
            for parameter in command.params:
                key = option_name(parameter)
                if key not in values or key not in _option_names(command, name or ""):
                    continue
                value = _checked(path, key, parameter, values[key])
                if path == user or is_for_projects(parameter):
                    told.values[parameter.name] = (value, path)
                elif key not in told.ignored.setdefault(path, []):
                    told.ignored[path].append(key)
    return told


def _checked(path: Path, key: str, parameter: Any, value: Any) -> Any:
    """A value as its option takes it: a list where it takes several. Raises UnsupportedError."""
    several = value if isinstance(value, list) and parameter.multiple else [value]
    kinds, expected = _kinds(parameter)
    for one in several:
        is_kind = isinstance(one, kinds) and isinstance(one, bool) == (bool in kinds)
        is_short = not isinstance(one, int) or -(1 << 63) <= one < 1 << 63
        if not is_kind or not is_short or (isinstance(one, str) and "\0" in one):
            raise UnsupportedError(f"{path} sets {key} to what is no {expected}")
    return several if parameter.multiple else value


def _kinds(parameter: Any) -> tuple[tuple[type, ...], str]:
    """Types of TOML that an option takes, and what they are called."""
    name = parameter.type.name
    if parameter.is_flag:
        return (bool,), "true or false"
    if name in _WHOLE:
        return (int,), "whole number"
    if name in _PATHS:
        return (str,), "text"
    return ((int, float), "number") if name in _NUMBERS else ((str, int, float), "text or number")


def _read(path: Path, root: Any) -> dict[str, Any]:
    """A file whose every line means something."""
    # It joined the standard library with Python 3.11; before, the same module is a package.
    toml: Any = import_module("tomllib" if find_spec("tomllib") else "tomli")
    text = read_text(path, most_bytes=_MOST_BYTES)
    try:
        document: dict[str, Any] = toml.loads(text)
    except (ValueError, RecursionError) as problem:
        raise UnsupportedError(
            f"{path} cannot be read: {problem}", hint="it holds lines such as: ctx = 8192"
        ) from problem
    known = {name: _option_names(one, name) for name, one in commands(root)}
    every = {name for names in known.values() for name in names}
    for key, value in document.items():
        if isinstance(value, dict):
            _check_names(path, value, known.get(key), key)
        elif key not in every:
            _refuse(path, key, every)
    return document


def _check_names(path: Path, values: dict[str, Any], known: set[str] | None, table: str) -> None:
    if known is None:
        raise UnsupportedError(f"{path} has [{table[:_SHOWN]}], and there is no such command")
    for key in values:
        if key in _SAID_ALONE.get(table, ()):
            raise UnsupportedError(f"{path} sets [{table}] {key}, which the command line alone may")
        if key not in known:
            _refuse(path, f"[{table}] {key}", known)


def _refuse(path: Path, key: str, known: set[str]) -> None:
    word = key[:_SHOWN].rpartition(" ")[2].replace("_", "-")
    import difflib  # takes 5 ms, and nearly nobody needs it

    near = difflib.get_close_matches(word, sorted(known), 3)
    raise UnsupportedError(
        f"{path} sets {key[:_SHOWN]}, and no command has such an option",
        hint=f"near it: {', '.join(near)}" if near else "`edgespec COMMAND --help` lists options",
    )


def commands(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every command by its last word."""
    if hasattr(command, "commands"):
        for word, inner in command.commands.items():
            yield from commands(inner, word)
        return
    yield name, command


def _option_names(command: Any, name: str) -> set[str]:
    """Options of a command that files may hold."""
    names = {option_name(parameter) for parameter in command.params}
    return names - {"", *_ONCE, *_SAID_ALONE.get(name, ())}
