"""Functions, files and classes stay small enough to be read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("backends", "cli", "edge", "memory", "models", "quantize")
LONGEST_FUNCTION, USUAL_FUNCTION = 60, 25  # lines; the second one of nine in ten functions
LONGEST_FILE = 700  # lines, where it is one subject
MOST_FIELDS = 14  # of a class that is not a plain record
LARGE_CLASSES: list[str] = []  # today; to be shortened
_RECORDS = ("NamedTuple", "TypedDict")


class Module(NamedTuple):
    name: str  # its path in the repository
    num_lines: int
    tree: ast.Module


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    found = []
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            name = path.relative_to(ROOT).as_posix()
            found.append(Module(name, len(text.splitlines()), ast.parse(text)))
    return found


def functions(module: Module) -> Iterator[tuple[str, int]]:
    """Name and lines of every function, its docstring included.

    Of a command only the body counts: its parameters are the options that people read in --help.
    """
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if _is_command(node) else node
            assert node.end_lineno is not None
            yield f"{module.name}: {node.name}", node.end_lineno - first.lineno + 1


def _is_command(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    options = (one.annotation for one in function.args.args if one.annotation is not None)
    return any("typer." in ast.unparse(option) for option in options)


def large_classes(module: Module) -> Iterator[str]:
    """Classes with too many fields.

    A plain record, a dataclass or tuple with more fields than methods, may have any number.
    """
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef) and not _is_record(node):
            if len(_fields(node)) > MOST_FIELDS:
                yield f"{module.name}: {node.name}"


def _is_record(node: ast.ClassDef) -> bool:
    how = [*map(ast.unparse, node.decorator_list), *map(ast.unparse, node.bases)]
    declares = any("dataclass" in text or text in _RECORDS for text in how)
    methods = sum(isinstance(part, ast.FunctionDef) for part in node.body)
    return declares and methods < len(_fields(node))


def _fields(node: ast.ClassDef) -> set[str]:
    """Names that the class declares, and those that its methods assign to `self`."""
    declared = {
        part.target.id
        for part in node.body
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }
    return declared | {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and isinstance(part.ctx, ast.Store)
        and isinstance(part.value, ast.Name)
        and part.value.id == "self"
    }


def test_functions_are_short(modules: list[Module]) -> None:
    sizes = [size for module in modules for size in functions(module)]
    assert [name for name, lines in sizes if lines > LONGEST_FUNCTION] == []
    assert sorted(lines for _, lines in sizes)[len(sizes) * 9 // 10] <= USUAL_FUNCTION


def test_files_are_short(modules: list[Module]) -> None:
    assert [module.name for module in modules if module.num_lines > LONGEST_FILE] == []
    tests = sorted((ROOT / "tests").rglob("*.py"))
    sizes = {path.as_posix(): len(path.read_text(encoding="utf-8").splitlines()) for path in tests}
    assert [name for name, lines in sizes.items() if lines > LONGEST_FILE] == []


def test_classes_have_few_fields(modules: list[Module]) -> None:
    assert [name for module in modules for name in large_classes(module)] == LARGE_CLASSES
