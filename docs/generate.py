"""The parts of the documentation that the program itself knows; a test compares them.

    python docs/generate.py

Rewrites what stands between `<!-- generated: NAME -->` and `<!-- end -->` in docs/*.md and
README.md: the commands and their options, and tables of what `benchmarks/results/` holds.
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections import Counter
from collections.abc import Callable
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import click
import typer

import edgespec
from edgespec.bench.ratios import interval_text
from edgespec.cli.chat_commands import COMMANDS
from edgespec.cli.command import summary
from edgespec.cli.main import app

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
_PART = re.compile(r"(<!-- generated: ([\w./ -]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    """The files that may have generated parts."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def renewed(text: str) -> str:
    """`text` with its generated parts as they should be. Raises KeyError for an unknown one."""
    return _PART.sub(lambda match: match[1] + _part(match[2]) + match[3], text)


def _part(name: str) -> str:
    kind, _, rest = name.partition(" ")
    return _KINDS[kind](rest)


# -- commands ------------------------------------------------------------------------------


def _commands(_rest: str) -> str:
    rows = [
        f"| [`edgespec {name}`](commands.md#edgespec-{name.replace(' ', '-')}) "
        f"| {_one_line(summary(one))} |\n"
        for name, one in _every_command(typer.main.get_command(app), "")
    ]
    return "| command | what it does |\n| --- | --- |\n" + "".join(rows)


def _options(_rest: str) -> str:
    """Every command with its own options, and in front a table of those that several have."""
    commands = _every_command(typer.main.get_command(app), "")
    rows = {name: _option_rows(one) for name, one in commands}
    shared = {row for row, count in Counter(chain(*rows.values())).items() if count > 2}
    ordered = [row for row in dict.fromkeys(chain(*rows.values())) if row in shared]
    common = _table("option", ordered)
    texts = [_command_text(name, one, rows[name], shared) for name, one in commands]
    return f"## Options of several commands\n\n{common}\n" + "\n".join(texts)


def _every_command(command: Any, name: str) -> list[tuple[str, Any]]:
    """Commands that do something, by the words that call them."""
    if not hasattr(command, "commands"):
        return [(name, command)]
    found = []
    for word, inner in command.commands.items():
        found += _every_command(inner, f"{name} {word}".strip())
    return found


def _option_rows(command: Any) -> list[tuple[str, str]]:
    """The names and the help of each option."""
    rows = []
    for parameter in command.params:
        if not _is_argument(parameter):
            longs_first = sorted(parameter.opts, key=lambda option: not option.startswith("--"))
            names = ", ".join(f"`{option}`" for option in longs_first)
            rows.append((names, _one_line((parameter.help or "") + _default(parameter))))
    return rows


def _command_text(
    name: str, command: Any, options: list[tuple[str, str]], shared: set[tuple[str, str]]
) -> str:
    given = [one for one in command.params if _is_argument(one)]
    call = " ".join([f"edgespec {name}", *(f"[{one.name.upper()}]" for one in given), "[OPTIONS]"])
    rows = [(one.name.upper(), _one_line(getattr(one, "help", "") or "")) for one in given]
    own = [row for row in options if row not in shared]
    about = "\n\n".join(
        textwrap.fill(_one_line(part), 110, break_on_hyphens=False)
        for part in (command.help or "").split("\n\n")
    )
    text = f"## edgespec {name}\n\n    {call}\n\n{about}\n\n"
    text += _table("argument or option", rows + own)
    also = ", ".join(names.split(",")[0] for names, help in options if (names, help) in shared)
    if also:
        text += "\n" + textwrap.fill(f"Also: {also}.", 110, break_on_hyphens=False) + "\n"
    return text


def _is_argument(parameter: Any) -> bool:
    return isinstance(parameter, click.Argument) or parameter.param_type_name == "argument"


def _table(head: str, rows: list[tuple[str, str]]) -> str:
    if not rows:
        return ""
    text = "".join(f"| {left} | {right} |\n" for left, right in rows)
    return f"| {head} | |\n| --- | --- |\n{text}"


def _default(parameter: Any) -> str:
    value = parameter.default
    if value is None or value is False or callable(value) or "efault" in (parameter.help or ""):
        return ""
    return f" Default: {value}."


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _slash_commands(_rest: str) -> str:
    rows = [f"| `{name}` | {_one_line(text)} |\n" for name, (_, text) in COMMANDS.items()]
    return "| in a chat | |\n| --- | --- |\n" + "".join(rows)


# -- Python --------------------------------------------------------------------------------


def _arguments(name: str) -> str:
    """What a docstring says about the arguments of `edgespec.NAME`, and their defaults."""
    function = attrgetter(name)(edgespec)
    defaults = inspect.signature(function).parameters
    text = str(inspect.getdoc(function)).split("Args:\n")[1].split("\n\n")[0]
    rows = []
    for part in re.split(r"\n {4}(?=\w)", "\n" + text)[1:]:
        argument, _, about = part.partition(": ")
        default = defaults[argument].default
        shown = "" if default is inspect.Parameter.empty else f"`{default!r}`"
        rows.append(f"| `{argument}` | {shown} | {_one_line(about)} |\n")
    return "| argument | default | |\n| --- | --- | --- |\n" + "".join(rows)


# -- results -------------------------------------------------------------------------------


def _beside(files: str) -> str:
    """One line for each file: the best of each peer, and edgespec against it."""
    rows = [
        "| file | processor | llama-server | its best drafts | edgespec, llama.cpp's kernels | "
        "edgespec, no drafts | edgespec | over its plain [95%] | over llama-server's best |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
    ]
    for file in files.split():
        found = json.loads((RESULTS / file).read_text())
        speeds = {one["name"]: one["decode"]["tokens_per_s"] for one in found["contenders"]}
        best = found["best_of_peers"]["server"]["overall"]
        drafts = found["best_drafts"]["server"]
        names = ("server", drafts, "edgespec kernels off", "edgespec plain", "edgespec")
        cells = [f"{speeds[name]:.0f}" for name in names]
        cells += map(_ratio, (found["over_own_plain"]["overall"], best))
        place = f"{found['model'].removesuffix('.gguf')} | {_processor(file, found)}"
        rows.append(f"| {place} | {' | '.join(cells)} |\n")
    return "".join(rows)


def _processor(file: str, found: dict[str, Any]) -> str:
    """Where results were measured: virtual processors do not say their generation, a name may."""
    known = {"zen4": "EPYC (Zen 4)", "zen5": "EPYC (Zen 5)", "xeon": "Xeon"}
    return known.get(file.removesuffix(".json").rsplit("-", 1)[-1], str(found["machine"]))


def _peers(file: str) -> str:
    """Every contender over all prompts."""
    found = json.loads((RESULTS / file).read_text())
    rows = [
        "| | decode tokens/s | over {0} [95%] | whole answer tokens/s | over {0} [95%] |\n".format(
            found["baseline"]
        ),
        "| --- | --- | --- | --- | --- |\n",
    ]
    for one in found["contenders"]:
        decode, whole = one["decode"], one["end_to_end"]
        rows.append(
            f"| {one['name']} | {decode['tokens_per_s']:.1f} | {_ratio(decode)} | "
            f"{whole['tokens_per_s']:.1f} | {_ratio(whole)} |\n"
        )
    return "".join(rows)


def _categories(files: str) -> str:
    """edgespec over the best setting of llama-server, by category: a column for each file."""
    found = [(file, json.loads((RESULTS / file).read_text())) for file in files.split()]
    heads = [
        f"{one['model'].removesuffix('.gguf')}, {_processor(file, one)}" for file, one in found
    ]
    columns = [one["best_of_peers"]["server"] for _, one in found]
    text = f"| category | {' | '.join(heads)} |\n| --- |{' --- |' * len(heads)}\n"
    for task in columns[0]:
        text += f"| {task} | {' | '.join(_ratio(column[task]) for column in columns)} |\n"
    return text


def _serving(_rest: str) -> str:
    """Several users of one server: each file that `benchmarks/serving.py` has written."""
    text = ""
    for file in sorted(RESULTS.glob("serving-*.json")):
        found = json.loads(file.read_text())
        repeats = f", the median of {found['repeats']} runs" if found["repeats"] > 1 else ""
        rows = {(row["server"], row["users"]): row for row in found["rows"]}
        servers = sorted({server for server, _ in rows})
        text += (
            f"{found['model'].removesuffix('.gguf')}, {_processor(file.name, found)}: "
            f"{found['answers']} answers of at most {found['tokens']} tokens for each user{repeats}"
            f".\n\n| users | | {' | '.join(servers)} |\n| --- | --- {'| --- ' * len(servers)}|\n"
        )
        for users in sorted({users for _, users in rows}):
            several = [rows[server, users] for server in servers]
            for label, cell in _SERVED.items():
                text += f"| {users} | {label} | {' | '.join(map(cell, several))} |\n"
        text += "\n"
    return text


def _served_speed(row: dict[str, Any]) -> str:
    text = f"{row['tokens_per_s']:.0f}"
    if row.get("tokens_per_s_low", row["tokens_per_s"]) < row["tokens_per_s"]:
        text += f" ({row['tokens_per_s_low']:.0f} to {row['tokens_per_s_high']:.0f})"
    return text


def _median_and_most(row: dict[str, Any], name: str, unit: float, digits: int) -> str:
    median, most = row[f"{name}_ms"] / unit, row[f"{name}_p95_ms"] / unit
    return f"{median:.{digits}f} ({most:.{digits}f})"


# What the tables of several users show of each server.
_SERVED: dict[str, Callable[[dict[str, Any]], str]] = {
    "tokens/s of all": _served_speed,
    "first token, s (95%)": lambda row: (
        f"{row['first_ms'] / 1e3:.2f} ({row['first_p95_ms'] / 1e3:.2f})"
    ),
    "between two events, ms (95%)": lambda row: _median_and_most(row, "gap", 1, 0),
    "slowest answer over the mean": lambda row: f"{row['slowest_over_mean']:.2f}",
}


def _ratio(one: dict[str, Any]) -> str:
    return f"{one['ratio']:.2f}x {interval_text(one['low'], one['high'])}"


_KINDS: dict[str, Callable[[str], str]] = {
    "commands": _commands,
    "options": _options,
    "chat": _slash_commands,
    "arguments": _arguments,
    "beside": _beside,
    "peers": _peers,
    "categories": _categories,
    "serving": _serving,
}


def main() -> None:
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := renewed(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(f"rewritten: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
