"""How large the program is: `make size`. Numbers to look at; no test holds them.

Files that a token passes are modules of edgespec of which a function ran, from the fifth chunk to
the tenth of an answer of the embedded model. Constants in decisions are numbers that a module of
`DECISIONS` names in capitals.
"""

from __future__ import annotations

import argparse
import ast
import sys
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGES = ("backends", "cli", "edge", "memory", "models", "quantize")
DECISIONS = (
    "edge/decode",
    "edge/drafting",
    "edge/measure",
    "edge/setup",
    "edge/switching",
    "memory",
)


def files(folder: str, *suffixes: str) -> list[Path]:
    found = (path for suffix in suffixes for path in (ROOT / folder).rglob(f"*{suffix}"))
    return sorted(path for path in found if path.is_file())


def num_lines(paths: list[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def functions(path: Path) -> list[tuple[int, str]]:
    """Lines and name of each."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree_of(path)) if isinstance(node, kinds)]
    name = path.relative_to(ROOT).as_posix()
    return [
        ((node.end_lineno or node.lineno) - node.lineno + 1, f"{name}: {node.name}")
        for node in nodes
    ]


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def num_constants(path: Path) -> int:
    """Numbers with a name in capitals."""
    return sum(
        target.id.isupper()
        and any(
            isinstance(part, ast.Constant) and type(part.value) in (int, float)
            for part in ast.walk(node.value)
        )
        for node in tree_of(path).body
        if isinstance(node, ast.Assign)
        for name in node.targets
        for target in ast.walk(name)
        if isinstance(target, ast.Name)
    )


def files_of_a_token() -> set[str]:
    """Modules that make the tokens between two chunks of an answer."""
    import edgespec

    seen: set[str] = set()

    def called(frame: FrameType, event: str, _: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("edgespec"):
            seen.add(module)

    with edgespec.load() as engine:
        for at, _ in enumerate(engine.stream("Write about the sea.", max_tokens=60)):
            if at == 5:
                sys.setprofile(called)
            if at == 10:
                sys.setprofile(None)
                break
    return seen


def _table(title: str, found: list[tuple[int, str]]) -> None:
    print(f"{title}:", *(f"  {lines:>4} {name}" for lines, name in found[:-6:-1]), sep="\n")


def main() -> None:
    """Print the numbers."""
    argparse.ArgumentParser(description=__doc__.split("\n", 1)[0]).parse_args()
    source = [path for folder in PACKAGES for path in files(folder, ".py")]
    longest = sorted((num_lines([path]), path.relative_to(ROOT).as_posix()) for path in source)
    sizes = sorted(size for path in source for size in functions(path))
    decisions = [path for folder in DECISIONS for path in files(folder, ".py")]
    words = sum(len(path.read_text("utf-8").split()) for path in files("docs", ".md"))
    print(f"source         {num_lines(source):>7,} lines of Python in {len(source)} files")
    for folder in PACKAGES:
        print(f"  {folder:<12} {num_lines(files(folder, '.py')):>7,}")
    print(f"kernels        {num_lines(files('backends', '.cpp', '.h')):>7,} lines of C++")
    print(f"tests          {num_lines(files('tests', '.py')):>7,}")
    print(f"benchmarks     {num_lines(files('benchmarks', '.py')):>7,}")
    print(f"documents      {words:>7,} words")
    print(f"constants      {sum(map(num_constants, decisions)):>7,} numbers that decide something")
    if find_spec("edgespec") is None:
        print("a token passes       - files: they are counted where edgespec is installed")
    else:
        print(f"a token passes {len(files_of_a_token()):>7,} files")
    _table("longest files", longest)
    _table("longest functions", sizes)
    print(f"half of the functions have up to {sizes[len(sizes) // 2][0]} lines,", end=" ")
    print(f"nine in ten up to {sizes[len(sizes) * 9 // 10][0]}")


if __name__ == "__main__":
    main()
