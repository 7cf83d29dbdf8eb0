"""What importing costs, which way imports point, and what `import edgespec` offers."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import edgespec
import edgespec.errors

ROOT = Path(__file__).parent.parent
INFERENCE = {"llama_cpp", "onnxruntime", "torch", "optimum", "transformers", "tokenizers", "gguf"}

# ---------------------------------------------------------------------- cost, in fresh processes


def modules_after(code: str) -> tuple[set[str], str]:
    """Top-level modules a fresh interpreter holds after `code`, and what `code` printed."""
    script = (
        "import atexit, json, sys\n"
        "atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))\n" + code
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = json.loads(done.stderr.splitlines()[-1])
    return {name.partition(".")[0] for name in loaded}, done.stdout


def command(*arguments: str) -> str:
    """Code that runs the command line in a fresh interpreter."""
    return (
        f"sys.argv = ['edgespec', *{list(arguments)!r}]\n"
        "from edgespec.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code in (0, None), end.code\n"
    )


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded, _ = modules_after("import edgespec, edgespec.errors")
    assert "edgespec" in loaded
    assert loaded & (INFERENCE | {"numpy", "jinja2", "typer", "psutil", "platformdirs"}) == set()


@pytest.mark.parametrize("arguments", [("--help",), ("run", "--help"), ("plan", "--help")])
def test_help_imports_no_inference_library_and_no_numpy(arguments: tuple[str, ...]) -> None:
    loaded, printed = modules_after(command(*arguments))
    assert printed.startswith("Usage: edgespec")
    assert "typer" in loaded
    assert loaded & (INFERENCE | {"numpy", "jinja2"}) == set()


@pytest.mark.model
@pytest.mark.parametrize("arguments", [("plan",), ("plan", "--json"), ("models", "show")])
def test_reading_a_file_imports_no_inference_library_and_no_numpy(
    arguments: tuple[str, ...],
) -> None:
    loaded, printed = modules_after(command(*arguments))
    assert "Q4_1" in printed
    assert loaded & (INFERENCE | {"numpy", "jinja2"}) == set()


@pytest.mark.parametrize("first", ["run", "plan", "models"])
def test_one_command_is_read_and_no_other(first: str) -> None:
    script = (
        f"import sys\n{command(first, '--help')}"
        "print(*(name for name in sys.modules if name.startswith('edgespec.cli.')))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    ).stdout.splitlines()[-1]
    assert f"edgespec.cli.{first}" in loaded.split()
    others = {"bench", "chat", "config", "doctor", "draft", "profile", "quantize", "serve"}
    assert not {f"edgespec.cli.{name}" for name in others} & {*loaded.split()}


def test_simulations_begin_without_numpy() -> None:
    loaded, _ = modules_after("import edgespec.backends.llama.simulator")
    assert "edgespec" in loaded
    assert loaded & {"numpy", "llama_cpp"} == set()


# --------------------------------------------------------------------------------- layering

# The folders that are shipped, and the package each is installed as.
FOLDERS = {
    "backends": "edgespec.backends",
    "cli": "edgespec.cli",
    "edge": "edgespec",
    "memory": "edgespec.memory",
    "models": "edgespec.models",
    "quantize": "edgespec.quantize",
}

# The rooms (docs/architecture.md). What a module needs when it runs is in its own room or in one to
# the right of it, whether it is imported at the top of a file or inside a function.
ROOMS = (
    *("cli", "serve", "bench", "files", "exits", "setup", "switching", "decode", "drafting"),
    *("measure", "sampling", "quantize", "backends", "memory", "models"),
)
BASE = tuple(  # everybody's
    f"edgespec.{name}"
    for name in ("annotations", "errors", "log", "option_fields", "paths", "prefix", "progress")
)

# `python -m edgespec`, and what makes an engine without a file.
FACE = {"edgespec.__main__": "cli", "edgespec.testing": "setup"}

# Rooms that know no inference library, and what they may import of the backends; and the library
# of which the quantizer and the values of its types are functions, and how its models are loaded.
NO_LIBRARY = ("switching", "decode", "drafting", "measure", "sampling")
CONTRACT = {"edgespec.backends.base"}
LIBRARY = {
    f"edgespec.backends.llama.{name}"
    for name in ("library", "ggml_values", "kernels", "context", "batch")
}
OF_BACKENDS = {**dict.fromkeys(NO_LIBRARY, CONTRACT), "quantize": LIBRARY}

# What breaks these rules, and why. To be shortened: a line that is no longer needed fails, too.
EXCEPTIONS: dict[tuple[str, str], str] = {}


def package_files() -> Iterator[tuple[str, str, Path]]:
    """(folder, module name, file) of every Python file that is shipped."""
    for folder, package in FOLDERS.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join([package, *(part for part in parts if part != "__init__")])
            yield folder, name, file


MODULES = {name: file for _, name, file in package_files()}


def for_types_alone(tree: ast.Module) -> set[ast.AST]:
    """Everything below `if TYPE_CHECKING:`."""
    blocks = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    return {node for block in blocks for line in block.body for node in ast.walk(line)}


@cache
def imports_of(file: Path, *, types: bool = True) -> list[tuple[int, str]]:
    """Line and absolute name of everything `file` imports, at any depth of the code.

    Without `types`, what is imported for type checkers alone is left out.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    left_out = set() if types else for_types_alone(tree)
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if node in left_out:
            continue
        if isinstance(node, ast.Import):
            found += ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                is_module = f"{module}.{alias.name}" in MODULES
                found.append((node.lineno, f"{module}.{alias.name}" if is_module else module))
    return found


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def room_of(module: str) -> str | None:
    """The room of one of our modules; None for the public face and what is everybody's."""
    if module in FACE:
        return FACE[module]
    return next((room for room in ROOMS if within(module, f"edgespec.{room}")), None)


def allowed(module: str, target: str) -> bool:
    """Whether `module` may import `target`, both ours."""
    room, other = room_of(module), room_of(target)
    if other is None:
        return True
    if room is None or ROOMS.index(other) < ROOMS.index(room):
        return False
    if other == "backends" and room in OF_BACKENDS:
        return target in OF_BACKENDS[room]
    return True


def test_every_module_is_in_a_room() -> None:
    outside = {name for name in MODULES if room_of(name) is None}
    assert outside == {"edgespec", *BASE}
    assert {room_of(name) for name in MODULES} == {None, *ROOMS}


def test_imports_point_one_way() -> None:
    broken = {
        (name, target)
        for _, name, file in package_files()
        for _, target in imports_of(file, types=False)
        if target in MODULES and not allowed(name, target)
    }
    new = broken - set(EXCEPTIONS)
    assert new == set(), "a room imports from its left, or a library that it must not know"
    mended = set(EXCEPTIONS) - broken
    assert mended == set(), "these exceptions are no longer needed"


def test_imports_for_types_are_what_is_left_out() -> None:
    tree = MODULES["edgespec.drafting.proposal"]
    assert "edgespec.sampling.sampling" in {target for _, target in imports_of(tree)}
    assert "edgespec.sampling.sampling" not in {
        target for _, target in imports_of(tree, types=False)
    }


def test_imports_are_absolute_and_name_the_file_that_defines() -> None:
    """No relative imports, no source folders as packages, no names through the package root."""
    wrong = [
        f"{folder}/{file.name}:{line} imports {target}"
        for folder, _, file in package_files()
        for line, target in imports_of(file)
        if target.startswith(".") or target.partition(".")[0] in FOLDERS or target == "edgespec"
    ]
    assert wrong == []


def test_imports_of_ours_exist() -> None:
    missing = [
        f"{file.name}:{line} imports {target}"
        for _, _, file in package_files()
        for line, target in imports_of(file)
        if within(target, "edgespec") and target not in MODULES
    ]
    assert missing == []


def test_imports_have_no_cycle() -> None:
    edges = {
        name: {target for _, target in imports_of(file) if target in MODULES}
        for name, file in MODULES.items()
        if name != "edgespec"  # resolves names on first use
    }
    done: set[str] = set()
    while ready := {name for name in edges if name not in done and edges[name] <= done}:
        done |= ready
    assert sorted(set(edges) - done) == []


def test_inference_libraries_are_imported_inside_functions() -> None:
    """So that `edgespec.backends.llama.backend` can be imported where llama.cpp is missing."""
    at_top = [
        f"{file.name}:{node.lineno}"
        for _, _, file in package_files()
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
        )
        if name.partition(".")[0] in INFERENCE
    ]
    assert at_top == []


def test_models_are_loaded_once_the_kernels_are_known() -> None:
    """Else the first model of a process keeps them out, and tests of kernels skip from then on."""
    files = [*MODULES.values(), *(ROOT / "tests").rglob("*.py")]
    loads = re.compile(r"\.llama_model_load_from_\w+\(")
    texts = {file: text for file in files if loads.search(text := file.read_text(encoding="utf-8"))}
    assert len(texts) > 3
    for file, text in texts.items():
        assert "model_params()" in text or "vocab_only=True" in text, file


# ------------------------------------------------------------------------------- public names


@pytest.mark.parametrize("name", edgespec.__all__)
def test_public_names_resolve_to_the_object_that_is_defined(name: str) -> None:
    found = getattr(edgespec, name)
    assert found.__name__ == name
    assert getattr(sys.modules[found.__module__], name) is found
    assert found.__module__ in MODULES


def test_all_is_sorted_and_complete() -> None:
    assert list(edgespec.__all__) == sorted(set(edgespec.__all__))
    errors = {name for name, value in vars(edgespec.errors).items() if isinstance(value, type)}
    assert errors <= set(edgespec.__all__)


def test_public_names_are_listed_by_dir_before_they_are_used() -> None:
    """For completion in a shell; a fresh process, because use could add the names."""
    _, printed = modules_after("import edgespec; print(*dir(edgespec))")
    assert set(edgespec.__all__) <= set(printed.split())


@pytest.mark.parametrize("name", ["nothing", "Load", "_MODULE", "__path_of__"])
def test_unknown_names_are_attribute_errors(name: str) -> None:
    with pytest.raises(AttributeError, match=f"^module 'edgespec' has no attribute '{name}'$"):
        getattr(edgespec, name)
    assert not hasattr(edgespec, name)


def test_star_import_brings_the_public_names() -> None:
    _, printed = modules_after(
        "space = {}\nexec('from edgespec import *', space)\nprint(*sorted(space))"
    )
    assert printed.split() == sorted(["__builtins__", *edgespec.__all__])
