"""The parts of the documentation that the program itself knows; a test compares them.

    python docs/generate.py

Rewrites what stands between `<!-- generated: NAME -->` and `<!-- end -->` in docs/*.md and
README.md: the commands and their options, and tables of what `benchmarks/results/` holds.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import click
import typer

import edgespec
from edgespec.bench.summary import interval_text
from edgespec.cli.chat_loop import COMMANDS
from edgespec.cli.command import TITLES, option_name, title_of
from edgespec.cli.main import app
from edgespec.cli.options import OTHERS
from edgespec.option_fields import options_of

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
_WRAPPED: dict[str, Any] = {"subsequent_indent": "  ", "break_on_hyphens": False}
_PAGES = {"Sampling": "sampling.md"}  # where the options of a group are listed
_EVERY_COMMAND = "Log, of every command"
_VALUE = "\0"  # between the text of an option and its default
_OTHER_MEANING = {"grammar", "json_schema", "images"}  # not what the option of this name is
_RECORDED = {"edgespec", "llama_cpp_python", "compiler", "prompts_sha256"}
_MOST_BEHIND = 60
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


def _shared() -> dict[str, list[tuple[str, str]]]:
    """Options that several commands have, by group."""
    commands = _every_command(typer.main.get_command(app), "")
    counts = Counter(chain(*(_option_rows(one) for _, one in commands)))
    shared: dict[str, list[tuple[str, str]]] = {
        title: [] for title in (*TITLES, OTHERS, _EVERY_COMMAND)
    }
    for row, count in counts.items():
        if count == len(commands):
            shared[_EVERY_COMMAND].append(row[1:])
        elif count > (1 if row[1].startswith("`") else 2):
            shared[row[0]].append(row[1:])
    return {title: rows for title, rows in shared.items() if rows}


def _group(title: str) -> str:
    return _list(_shared()[title])


def _options(_rest: str) -> str:
    """Every command with its own options, and in front those that several have, by group."""
    shared = _shared()
    texts = [
        f"**{title}**\n\n{_list(rows)}"
        if title not in _PAGES
        else f"**{title}**: see [{_PAGES[title]}]({_PAGES[title]}).\n"
        for title, rows in shared.items()
    ]
    common = "## Options of several commands\n\n" + "\n".join(texts)
    commands = _every_command(typer.main.get_command(app), "")
    return common + "".join(_command_text(name, one, shared) for name, one in commands)


def _every_command(command: Any, name: str) -> list[tuple[str, Any]]:
    """Commands that do something, by the words that call them."""
    if not hasattr(command, "commands"):
        return [(name, command)]
    found = []
    for word, inner in command.commands.items():
        found += _every_command(inner, f"{name} {word}".strip())
    return found


def _option_rows(command: Any) -> list[tuple[str, str, str]]:
    """The group, the names and the help of each argument and option."""
    rows = []
    for one in command.params:
        if _is_argument(one):
            names, text = one.name.upper(), getattr(one, "help", "") or ""
        else:
            longs_first = sorted(one.opts, key=lambda option: not option.startswith("--"))
            names = ", ".join(f"`{option}`" for option in longs_first)
            text = (one.help or "") + _default(one)
        rows.append((title_of(one), names, _one_line(text)))
    return rows


def _command_text(name: str, command: Any, shared: dict[str, list[tuple[str, str]]]) -> str:
    """What a command does in a sentence, its own options, and the groups of its other ones."""
    rows = _option_rows(command)
    given = "".join(
        f" {one.name.upper()}" if one.required else f" [{one.name.upper()}]"
        for one in command.params
        if _is_argument(one)
    )
    about = _one_line((command.help or "").split("\n\n")[0]).split(" Example: ")[0]
    own, also = [], []
    for title, several in shared.items():
        here = [one for one in several if any(_same(one, row[1:]) for row in rows)]
        also += _also(title, several, here) if title != _EVERY_COMMAND else []
    known = list(chain(*shared.values()))
    for row in rows:
        if not any(_same(one, row[1:]) or _same_argument(one, row[1:]) for one in known):
            own.append(row[1:])
    text = f"\n## edgespec {name}{given}\n\n{textwrap.fill(about, 110, break_on_hyphens=False)}\n"
    text += f"\n{_list(own)}" if own else ""
    return text + ("\n" + textwrap.fill(f"Also: {', '.join(also)}.", 110) + "\n" if also else "")


def _same_argument(shared: tuple[str, str], own: tuple[str, str]) -> bool:
    """Whether an argument says what a shared one says, in a command that takes several."""
    return own[0].isupper() and shared[0].isupper() and own[1] == shared[1]


def _same(shared: tuple[str, str], own: tuple[str, str]) -> bool:
    """Whether an option is the shared one; what may be given several times has no default."""
    return own == shared or (own[0] == shared[0] and shared[1].startswith(own[1] + _VALUE))


def _also(title: str, several: list[tuple[str, str]], here: list[tuple[str, str]]) -> list[str]:
    """A group's name where a command has nearly all of its options, and else their names."""
    missing = [names.split(",")[0] for names, _ in several if (names, _) not in here]
    if not missing and len(several) > 1:
        return [f"*{title}*"]
    if len(missing) * 4 < len(several):
        return [f"*{title}* without {' and '.join(missing)}"]
    return [names.split(",")[0] for names, _ in here]


def _list(rows: list[tuple[str, str]]) -> str:
    """A line each; what a row has as default stands behind the first name."""
    lines = []
    for names, told in rows:
        text, _, value = told.partition(_VALUE)
        first, *others = names.split(", ")
        first = f"{first[:-1]}={value}`" if value else first
        lines.append(f"- {', '.join([first, *others])}: {text}\n")
    return "".join(lines)


def _is_argument(parameter: Any) -> bool:
    return isinstance(parameter, click.Argument) or parameter.param_type_name == "argument"


def _default(parameter: Any) -> str:
    value = parameter.default
    told = "efault" in (parameter.help or "") or getattr(parameter, "count", False)
    if value is None or value is False or callable(value) or told:
        return ""
    return f"{_VALUE}{value}"


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _slash_commands(_rest: str) -> str:
    return _list([(f"`{name}`", _one_line(text)) for name, (_, text) in COMMANDS.items()])


# -- Python --------------------------------------------------------------------------------


def _arguments(name: str) -> str:
    """The arguments of `edgespec.NAME`: those that are options, and the others with a sentence."""
    function = attrgetter(name)(edgespec)
    defaults = inspect.signature(function).parameters
    text = str(inspect.getdoc(function)).split("Args:\n")[1].split("\n\n")[0]
    commands = _every_command(typer.main.get_command(app), "")
    options = {
        option_name(one).replace("-", "_") for _, command in commands for one in command.params
    }
    known = options_of(function)
    as_there, rows = [], []
    for part in re.split(r"\n {4}(?=\w)", "\n" + text)[1:]:
        argument, _, about = part.partition(": ")
        default = defaults[argument].default
        shown = "" if default in (None, inspect.Parameter.empty) else f"={default!r}"
        if argument in known and known[argument].called:
            name = known[argument].names(argument)[0]
            more = " ".join(about.split()).partition(" More: ")[2].rstrip(".")
            rows.append(f"- `{argument}{shown}`: as `{name}`{more and ', ' + more}")
        elif argument in options - _OTHER_MEANING:
            as_there.append(f"`{argument}{shown}`")
        else:
            first = " ".join(about.split()).split(". ")[0].rstrip(".")
            rows.append(f"- `{argument}{shown}`: {first}")
    rows.insert(0, f"- as [options](commands.md) of these names: {', '.join(as_there)}")
    return "".join(f"{textwrap.fill(row, 118, **_WRAPPED)}\n" for row in rows)


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
        cells = [f"{speeds[name]:.0f}" if name in speeds else "-" for name in names]
        cells += map(_ratio, (found["over_own_plain"]["overall"], best))
        place = f"{found['model'].removesuffix('.gguf')} | {_processor(file, found)}"
        rows.append(f"| {place} | {' | '.join(cells)} |\n")
    return "".join(rows) + _made("peers.py", files.split())


def _processor(file: str, found: dict[str, Any]) -> str:
    """Where results were measured: virtual processors do not say their generation, a name may."""
    known = {
        "zen3": "EPYC (Zen 3)",
        "zen4": "EPYC (Zen 4)",
        "zen5": "EPYC (Zen 5)",
        "xeon": "Xeon (Emerald Rapids)",
    }
    return known.get(file.removesuffix(".json").rsplit("-", 1)[-1], str(found["machine"]))


def _made(script: str, files: Sequence[str]) -> str:
    """Which script measured results and when, at which commit, by which compiler.

    Those that kernels and drafting have left behind say so. Raises ValueError for a file that does
    not even say when, or that has a commit and lacks what is recorded with it.
    """
    same: dict[str, list[str]] = {}
    for file in files:
        made = json.loads((RESULTS / file).read_text()).get("made", {})
        if "date" not in made:
            raise ValueError(f"{file} does not say when it was measured")
        said = f"{made['date']}, commit and compiler not recorded"
        if "edgespec" in made:
            if missing := _RECORDED - made.keys():
                raise ValueError(f"{file} does not say {', '.join(sorted(missing))}")
            said = f"{made['date']} at {made['edgespec']}, llama-cpp-python "
            said += f"{made['llama_cpp_python']}, {made['compiler']}"
        if _commits_behind(file, made) > _MOST_BEHIND:
            said += f"; more than {_MOST_BEHIND} commits before kernels or drafting last changed"
        same.setdefault(said, []).append(f"`{file}`")
    lines = [f"{', '.join(names)} ({said})" for said, names in same.items()]
    by = f"By `{script}`, in `benchmarks/results`:"
    if len(lines) == 1:
        return f"\n{textwrap.fill(f'{by} {lines[0]}', 118, break_on_hyphens=False)}\n"
    listed = (textwrap.fill(f"- {one}", 118, **_WRAPPED) for one in lines)
    return f"\n{by}\n\n" + "".join(f"{one}\n" for one in listed)


@cache
def has_history() -> bool:
    """Whether git knows here when kernels and drafting changed."""
    return _git("rev-parse", "--is-shallow-repository") == "false"


def _commits_behind(file: str, made: dict[str, str]) -> int:
    """Commits from the one that was measured to the last one that changed kernels or drafting.

    Of a file that names none, from the last one of its day. Raises ValueError for an unknown one.
    """
    if not has_history():
        return 0
    last = _git("rev-list", "-1", "HEAD", "--", "backends/kernels", "edge/drafting")
    of_day = _git("rev-list", "-1", f"--before={made['date']} 23:59", "HEAD")
    known = made.get("edgespec", "").removesuffix("-dirty") or of_day
    count = _git("rev-list", "--count", f"{known}..{last}" if known else last)
    if not count:
        raise ValueError(f"{file} was measured at {known}, which is no commit of this checkout")
    return int(count)


def _git(*arguments: str) -> str:
    """What git says about this checkout; nothing where it cannot."""
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()
    except FileNotFoundError:
        return ""


def _peers(file: str) -> str:
    """Every contender over all prompts."""
    found = json.loads((RESULTS / file).read_text())
    over = f"over {found['baseline']} [95%]"
    text = f"| | decode tokens/s | {over} | whole answers {over} |\n| --- | --- | --- | --- |\n"
    for one in found["contenders"]:
        decode, whole = _ratio(one["decode"]), _ratio(one["end_to_end"])
        text += f"| {one['name']} | {one['decode']['tokens_per_s']:.1f} | {decode} | {whole} |\n"
    return text + _made("peers.py", [file])


def _categories(files: str) -> str:
    """edgespec over the best setting of llama-server, by category: a column for each file."""
    found = [(file, json.loads((RESULTS / file).read_text())) for file in files.split()]
    heads = [
        f"{one['model'].removesuffix('.gguf')}, {_processor(file, one)}" for file, one in found
    ]
    columns = [one["best_of_peers"]["server"] for _, one in found]
    text = f"| category | {' | '.join(heads)} |\n| --- |{' --- |' * len(heads)}\n"
    for task in columns[0]:
        cells = (column[task] for column in columns)
        shown = (_ratio(one) if task == "overall" else f"{one['ratio']:.2f}x" for one in cells)
        text += f"| {task} | {' | '.join(shown)} |\n"
    return text + _made("peers.py", files.split())


def _serving(_rest: str) -> str:
    """Several users of one server: each file that `benchmarks/serving.py` has written."""
    found = [
        (file.name, json.loads(file.read_text())) for file in sorted(RESULTS.glob("serving-*.json"))
    ]
    if not found:
        return ""
    users = sorted({row["users"] for _, one in found for row in one["rows"]})
    tables = "\n".join(_served(title, cell, users, found) for title, cell in _SERVED.items())
    return tables + _made("serving.py compare", [file for file, _ in found])


def _served(
    title: str, cell: Callable[[dict[str, Any]], str], users: list[int], found: list[Any]
) -> str:
    """A table: a line for each file and a column for each number of users."""
    heads = " | ".join(f"{number} user{'s' * (number > 1)}" for number in users)
    text = f"{title}:\n\n| | {heads} |\n| --- |{' --- |' * len(users)}\n"
    for name, one in found:
        rows = {(row["server"], row["users"]): row for row in one["rows"]}
        cells = []
        for number in users:
            servers = {server: row for (server, count), row in rows.items() if count == number}
            cells.append(cell(servers))
        place = f"{one['model'].removesuffix('.gguf')}, {_processor(name, one)}"
        text += f"| {place} | {' | '.join(cells)} |\n"
    return text


def _best_of_others(servers: dict[str, Any]) -> dict[str, Any]:
    others = [row for name, row in servers.items() if not name.startswith("edgespec")]
    return max(others, key=lambda row: float(row["tokens_per_s"]))


def _speeds(servers: dict[str, Any]) -> str:
    rows = [servers["edgespec"], servers["edgespec plain"], _best_of_others(servers)]
    return " / ".join(f"{row['tokens_per_s']:.0f}" for row in rows)


def _first_tokens(servers: dict[str, Any]) -> str:
    rows = [servers["edgespec"], _best_of_others(servers)]
    return " / ".join(f"{row['first_ms'] / 1e3:.2f}" for row in rows)


_SERVED: dict[str, Callable[[dict[str, Any]], str]] = {
    "Tokens per second of all answers, edgespec / without drafts / llama-server's better setting": (
        _speeds
    ),
    "Seconds to the first token, edgespec / llama-server": _first_tokens,
}


def _ratio(one: dict[str, Any]) -> str:
    return f"{one['ratio']:.2f}x {interval_text(one['low'], one['high'])}"


_KINDS: dict[str, Callable[[str], str]] = {
    "options": _options,
    "group": _group,
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
