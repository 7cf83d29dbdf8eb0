"""Hostile grammars and chat templates beside somebody's answer: what they take, and what it feels.

    python benchmarks/guests.py grammars [N] [--first N] [--seconds S] [--alone]
    python benchmarks/guests.py templates [N] [--first N] [--seconds S] [--alone]
    python benchmarks/guests.py held [MODEL...]
    python benchmarks/guests.py first [MODEL...]

grammars: chains of rules, nestings, unions, repeats and terminals of up to 256 KiB, in GBNF, Lark's
notation and regular expressions; of those that are compiled some tokens are drawn. templates: every
filter and method of Jinja's with sizes up to the limit, values that double, loops and macros.

Both print how many were taken and why others were not, the longest of them by the clock and by the
processor of this process, what this process held, and, but for `--alone`, the longest waits of an
answer that is written meanwhile, with those of the same answer alone. Number N is the same one in
every run, so that many can be tried in pieces. It fails where one of them took longer than anybody
waits for a guest.

held: what the guests have of their own, in MiB, after templates and conversations of several sizes
and with the vocabulary of each model, beside what plans of servers have for them.

first: milliseconds that the first prompt after a load is rendered in, as a guest does it and as
this process does.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
from jinja2.filters import FILTERS
from shared import Reader

import edgespec
from edgespec.backends.base import AnswerFormat
from edgespec.backends.llama import grammar as grammars
from edgespec.backends.llama.tokenizer import VocabularyTokenizer
from edgespec.decode.engine import Engine
from edgespec.errors import EdgespecError
from edgespec.memory.bytes.requests import FORM_BYTES, FORM_TOKEN_BYTES
from edgespec.memory.device.track import peak_resident_bytes, resident_bytes
from edgespec.models import chat
from edgespec.models.chat import TEMPLATE_LIMITS, render_chat
from edgespec.models.embedded import embedded_model
from edgespec.models.spec import read_model_spec
from edgespec.models.template_sandbox import compiled, render
from edgespec.sampling.sampling import make_grammar
from edgespec.serve.running import SWITCH_S

_MOST_CHARS = 256 << 10
_TOKENS = 12  # drawn of a grammar
_ALONE_S = 10.0
_MESSAGES = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "<b>é</b>"}]

# -- grammars ------------------------------------------------------------------------------

_ATOMS = ('"x"', '"é"', "[a-z]", '[^"]', '"abc"', "[0-9a-fA-F]", '""', '"\\n"')
_COUNTS = ("", "", "", "*", "+", "?", "{%d}", "{0,%d}", "{2,%d}", "{%d,}")
_MOST_TIMES = 60_000
_LINKS = (
    "{}",
    '"x" {}',
    '{} "x"',
    "{0} {0}",
    '{0} {0} | "x"',
    "{}?",
    "{}*",
    '{} | "x"',
    "({}){{2}}",
)


def _size(draw: random.Random, most: int) -> int:
    """As often of any order of magnitude: most are small, as most of what is tried should be."""
    return int(2 ** draw.uniform(0, np.log2(most)))


def _count(draw: random.Random) -> str:
    count = draw.choice(_COUNTS)
    return count % max(2, _size(draw, _MOST_TIMES)) if "%" in count else count


def _rule(draw: random.Random, depth: int = 0) -> str:
    parts = []
    for _ in range(draw.choice((1, 1, 2, 3, 8))):
        is_inner = depth < 6 and draw.random() < 0.4
        part = f"({_rule(draw, depth + 1)})" if is_inner else draw.choice((*_ATOMS, "root", "b"))
        parts.append(part + _count(draw))
    return draw.choice((" ", " | ")).join(parts)


def _grammar(draw: random.Random) -> tuple[str, str]:
    kind, size = draw.randrange(8), _size(draw, 16_000)
    link, atom, count = draw.choice(_LINKS), draw.choice(_ATOMS), _count(draw)
    is_lark = draw.random() < 0.4
    root, is_, name = ("start", ":", "a") if is_lark else ("root", "::=", "a")
    if kind == 0:  # a chain
        name = draw.choice("aA") if is_lark else "a"
        rules = [f"{name}{i} {is_} {link.format(f'{name}{i + 1}')}" for i in range(size)]
        lines = [f"{root} {is_} {name}0", *rules, f"{name}{size} {is_} {atom}"]
    elif kind == 1:  # nested
        lines = [f"{root} {is_} {'(' * size}{atom}{f'){count}' * size}"]
    elif kind == 2:  # a union
        lines = [f"{root} {is_} " + " | ".join(f'"w{i}"{count}' for i in range(size))]
    elif kind == 3:  # a union of rules
        parts = [f"r{i} {is_} {atom}{count} {draw.choice(('', root))}" for i in range(size)]
        lines = [f"{root} {is_} " + " | ".join(f"r{i}" for i in range(size)), *parts]
    elif kind == 4:  # a terminal
        text = draw.choice(("x", "é", "ab", '\\"')) * _size(draw, _MOST_CHARS)
        lines = [f'{root} {is_} "{text}"{count}']
    elif kind == 5:
        lines = [f"{root} {is_} {_rule(draw)}", f"b {is_} {_rule(draw)}"]
    elif kind == 6:
        atoms = [f"{draw.choice('ab.')}{_count(draw)}" for _ in range(min(size, 3000))]
        return "regex", draw.choice(("", "|")).join(atoms)
    else:
        size = min(size, 4000)
        return "regex", "(" * size + "a" + f"|b){draw.choice(('', '*', '{3}'))}" * size
    return "grammar", "\n".join(lines)[:_MOST_CHARS]


def _try_grammar(engine: Engine, draw: random.Random) -> None:
    kind, text = _grammar(draw)
    tokenizer = engine.backend.tokenizer
    grammar = make_grammar(tokenizer, AnswerFormat(kind, text))
    assert grammar is not None
    row = np.zeros(engine.vocab_size, np.float32)
    for _ in range(_TOKENS):
        grammar.forced()
        allowed = np.flatnonzero(np.isfinite(grammar.masked(row)))
        token = int(draw.choice(allowed))
        if tokenizer.is_end(token):
            break
        grammar.accept(token)


# -- templates -----------------------------------------------------------------------------

_VALUES = (
    "t",
    "l",
    "d",
    "n",
    "ns.x",
    "ns.l",
    "messages",
    "messages[0].content",
    "'x'",
    "7",
    "none",
)
_METHODS = [
    f"{value}.{name}"
    for value, kind in (("t", str), ("l", list), ("d", dict))
    for name in dir(kind)
    if not name.startswith("_")
]
_NUMBERS = (0, 1, 7, 999, 10**5, 10**7, 10**9, 2**61 - 1)
_OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "and")


def _expression(draw: random.Random, depth: int = 0) -> str:
    kind = draw.randrange(7) if depth < 4 else 0
    inner = [_expression(draw, depth + 1) for _ in range(2)] if kind else []
    if kind == 1:
        return f"({inner[0]} | {draw.choice(sorted(FILTERS))}{_arguments(draw)})"
    if kind == 2:
        return f"{draw.choice(_METHODS)}{_arguments(draw) or '()'}"
    if kind == 3:
        return f"({inner[0]} {draw.choice(_OPERATORS)} {inner[1]})"
    if kind == 4:
        return draw.choice(("[{}, {}]", "({}, {})", "{{{}: {}}}", "dict(a={}, b={})")).format(
            *inner
        )
    if kind == 5:
        return f"'%{draw.choice(('s', '(a)', '*', ''))}{draw.choice(_NUMBERS)}d' % {inner[0]}"
    if kind == 6:
        return f"{inner[0]}[{draw.choice(('0', '::-1', '1:', inner[1]))}]"
    return draw.choice((*_VALUES, str(draw.choice(_NUMBERS)), f"range({draw.choice(_NUMBERS)})"))


def _arguments(draw: random.Random) -> str:
    given = [draw.choice((str(draw.choice(_NUMBERS)), "t", "'a'", "l", "-1", "'e'"))] * 2
    return draw.choice(("", f"({given[0]})", f"({given[0]}, {given[1]})", "(attribute='a')"))


def _statement(draw: random.Random, depth: int = 0) -> str:
    kind = draw.randrange(8) if depth < 3 else draw.randrange(4)
    value = _expression(draw)
    if kind < 2:
        return f"{{{{ {value} }}}}"
    if kind == 2:
        return f"{{% set ns.{draw.choice('xl')} = {value} %}}"
    if kind == 3:
        return draw.choice(("{% set ns.x = ns.x ~ ns.x %}", "{% set ns.l = [ns.l, ns.l] %}"))
    inner = "".join(_statement(draw, depth + 1) for _ in range(draw.choice((1, 2, 3))))
    if kind == 4:
        return f"{{% for i in {value} %}}{inner}{{% endfor %}}"
    if kind == 5:
        return f"{{% for i in range({draw.choice((3, 60, 99999))}) %}}{inner}{{% endfor %}}"
    if kind == 6:
        return f"{{% if {value} %}}{inner}{{% else %}}x{{% endif %}}"
    recursion = draw.choice(("", "{{ m(a) }}", "{{ m(a) }}{{ m(a) }}"))
    return f"{{% macro m(a) %}}{inner}{recursion}{{% endmacro %}}{{{{ m({value}) }}}}"


def _template(draw: random.Random) -> str:
    size = _size(draw, 100_000)
    head = (
        f"{{% set n = {draw.choice(_NUMBERS)} %}}{{% set t = 'ab <c> ' * {size} %}}"
        f"{{% set l = range({size}) | list %}}{{% set d = dict(a=t, b=l) %}}"
        "{% set ns = namespace(x='ab', l=[1]) %}"
    )
    text = head + "".join(_statement(draw) for _ in range(draw.choice((1, 2, 4))))
    return text * (_size(draw, 2000) if draw.random() < 0.05 else 1)


def _try_template(_engine: Engine, draw: random.Random) -> None:
    render_chat(_template(draw), _MESSAGES)


# -- all of them -----------------------------------------------------------------------------


def _each(arguments: argparse.Namespace) -> Iterator[tuple[str, float, float]]:
    """For each: why it was refused or "", seconds by the clock, seconds of this thread."""
    attempt: Callable[[Engine, random.Random], None]
    attempt = _try_grammar if arguments.what == "grammars" else _try_template
    end_s = time.monotonic() + arguments.seconds
    sys.setswitchinterval(SWITCH_S)  # as a server's threads have it
    with edgespec.load(context_size=2048, users=2, drafter="none") as engine:
        engine.generate("x", max_tokens=2, regex="a")  # builds what all share
        if not arguments.alone:
            with Reader(engine) as alone:
                time.sleep(_ALONE_S)
            alone.tell("an answer alone")
        with nullcontext() if arguments.alone else Reader(engine) as beside:
            for number in range(arguments.first, arguments.first + arguments.count):
                if time.monotonic() > end_s:
                    break
                began_s, spent_s = time.perf_counter(), time.thread_time()
                why = ""
                try:
                    attempt(engine, random.Random(f"1 {number}"))
                except EdgespecError as problem:
                    why = str(problem)
                yield why, time.perf_counter() - began_s, time.thread_time() - spent_s
        if beside is not None:
            beside.tell("beside them")


def _try_all(arguments: argparse.Namespace) -> None:
    reasons: Counter[str] = Counter()
    longest, most_spent, held = 0.0, 0.0, list[int]()
    for number, (why, clock_s, spent_s) in enumerate(_each(arguments)):
        reasons[why.partition(": ")[2][:60]] += 1
        longest, most_spent = max(longest, clock_s), max(most_spent, spent_s)
        if number % 100 == 0:
            held.append(resident_bytes() >> 20)
            print(f"{number} done", file=sys.stderr, flush=True)
    print(f"{reasons.total()} {arguments.what}, {reasons.pop('', 0)} taken")
    for reason, count in reasons.most_common(12):
        print(f"{count:6d} {reason}")
    print(
        f"longest {longest:.2f} s, of which this process computed {most_spent * 1e3:.0f} ms at most"
    )
    print(f"resident MiB: {held[:: max(1, len(held) // 10)]}, peak {peak_resident_bytes() >> 20}")
    # A grammar is told, its vocabulary is, and it is told again; a template is tried in 7 forms.
    if longest > 3 * TEMPLATE_LIMITS.patience_s:
        sys.exit("one of them took longer than anybody waits for a guest")


# -- what they hold --------------------------------------------------------------------------


def _line(what: str, pid: int | None, most_bytes: int) -> None:
    """Of a process: what only it has, and what its limit counts."""
    found = psutil.Process(pid)
    data = found.memory_info().data
    parts = (found.memory_full_info().uss, data, most_bytes)
    own, data, most = (round(part / 2**20) for part in parts)
    print(f"{what}: {own} MiB of its own, {data} of {most} that it may write to")


def _render(what: str, template: str, messages: list[dict[str, str]]) -> None:
    chat._guest.end()
    render_chat(template, messages)
    size = sum(len(one["content"].encode()) for one in messages) + len(template)
    peak = chat._guest.pid and _peak_bytes(chat._guest.pid)
    _line(
        f"{what}, peak {(peak or 0) >> 20} MiB", chat._guest.pid, TEMPLATE_LIMITS.most_bytes(size)
    )


def _peak_bytes(pid: int) -> int:
    """Most that a process ever had resident, its share of libraries included. Linux."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def _held(models: list[Path]) -> None:
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}{% endfor %}"
    _render("a template", plain, _MESSAGES)
    _render("one of 50 KB", plain * (50_000 // len(plain)), _MESSAGES[:1])
    for letter in ("", "\U0001f600"):
        said = "word " * 200 + letter
        many = [{"role": role, "content": said} for role in ("user", "assistant") * 2000][:-1]
        _render(f"4 MiB of conversation, {'wide' if letter else 'plain'}", plain, many)
    for path in models or [embedded_model()]:
        tokenizer = VocabularyTokenizer(path)
        make_grammar(tokenizer, AnswerFormat("regex", "[a-z]{3}"))
        size = tokenizer.vocab_size
        peak = grammars._guest.pid and _peak_bytes(grammars._guest.pid)
        most = FORM_BYTES + FORM_TOKEN_BYTES * size
        what = f"grammars of {path.name}, {size:,} tokens, peak {(peak or 0) >> 20} MiB"
        _line(what, grammars._guest.pid, most)
        tokenizer.close()
        grammars._guest.end()


def _first(models: list[Path]) -> None:
    for path in models or [embedded_model()]:
        template = read_model_spec(path).chat_template or ""
        found: list[list[float]] = []
        for _ in range(5):
            chat._guest.end()
            compiled.cache_clear()
            with edgespec.load(path, context_size=512, drafter="none") as engine:
                _ = engine.backend.tokenizer.control_texts  # which any first prompt looks for
                marks = [time.perf_counter()]
                engine.prompt_text(_MESSAGES[:1])
                marks.append(time.perf_counter())
                engine.prompt_text(_MESSAGES[:1])
                marks.append(time.perf_counter())
            compiled(template)
            marks.append(time.perf_counter())
            render(template, {"messages": _MESSAGES[:1], "add_generation_prompt": True})
            marks.append(time.perf_counter())
            found.append([(b - a) * 1e3 for a, b in pairwise(marks)])
        first, second, _compiled, inside = (sorted(each) for each in zip(*found, strict=True))
        print(
            f"{path.name}: first prompt median {first[2]:.2f} ms, longest {first[-1]:.2f}; ", end=""
        )
        print(f"second {second[2]:.2f}; in this process, compiled before, {inside[2]:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True)
    for name in ("grammars", "templates"):
        one = commands.add_parser(name)
        one.add_argument("count", nargs="?", type=int, default=10_000)
        one.add_argument("--first", type=int, default=0)
        one.add_argument("--seconds", type=float, default=1e9)
        one.add_argument("--alone", action="store_true")
    for name in ("held", "first"):
        commands.add_parser(name).add_argument("models", nargs="*", type=Path)
    arguments = parser.parse_args()
    if arguments.what in ("held", "first"):
        {"held": _held, "first": _first}[arguments.what](arguments.models)
    else:
        _try_all(arguments)


if __name__ == "__main__":
    main()
