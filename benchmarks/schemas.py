"""Schemas: what is kept to, what is refused, and how long that takes. Needs the jsonschema package.

    python benchmarks/schemas.py suite FOLDER [--refused]
    python benchmarks/schemas.py public FOLDER [--sample N] [--seed N] [--refused]
    python benchmarks/schemas.py hostile [N]
    python benchmarks/schemas.py vocabulary [MODEL ...]
    python benchmarks/schemas.py stall [N]

suite: the JSON Schema Test Suite; FOLDER is its `tests/draft2020-12`, which the source package of
jsonschema carries (`json/tests/draft2020-12`). public: files with a schema and documents that fit
it or not, as JSONSchemaBench has them (its `maskbench/data`), or bare schemas. For each schema a
document is also drawn at random, token by token, and validated. hostile: generated patterns,
numbers and schemas; the slowest calls. vocabulary: what is built once, in seconds and MiB. stall:
the longest waits between tokens of an answer, alone and while N hostile forms are compiled and some
tokens of each are written beside it.

A document is written in the one layout, its keys in the order of the schema and whole numbers
without a point, as another order or spelling of the same document is never written. Objects are
closed unless the schema says otherwise: documents that only an open reading allows are counted
apart. Documents that do not fit are held against the schema as it is.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
from jsonschema.validators import Draft202012Validator, validator_for
from shared import Reader

import edgespec
from edgespec.backends.base import AnswerFormat
from edgespec.backends.llama.grammar import LlamaGrammar
from edgespec.backends.llama.json_schemas import closed_schema
from edgespec.backends.llama.tokenizer import VocabularyTokenizer
from edgespec.errors import EdgespecError, UnsupportedError
from edgespec.memory.device.track import resident_bytes
from edgespec.models.embedded import embedded_model

_LONGEST_WALK = 160  # tokens of a document that is drawn
_SLOW_S = 1.0
_ALONE_S = 10.0


class Clock:
    """The slowest call of each kind, in processor seconds of this process."""

    def __init__(self) -> None:
        self.most: dict[str, tuple[float, str]] = {}
        self.all: dict[str, list[float]] = {}

    def timed(self, kind: str, what: str, call: Callable[[], Any]) -> Any:
        began = time.thread_time()
        try:
            return call()
        finally:
            seconds = time.thread_time() - began
            self.all.setdefault(kind, []).append(seconds)
            if seconds > self.most.get(kind, (0.0, ""))[0]:
                self.most[kind] = seconds, what

    def tell(self) -> None:
        for kind, (seconds, what) in self.most.items():
            mean, p999 = np.mean(self.all[kind]), np.quantile(self.all[kind], 0.999)
            print(
                f"{kind:8s} {len(self.all[kind]):9,} calls, mean {mean * 1e3:.3f} ms, 99.9% under "
                f"{p999 * 1e3:.2f} ms, slowest {seconds * 1e3:.1f} ms: {what[:100]}"
            )


class Judge:
    """One vocabulary, and what was found out with it."""

    def __init__(self, tokenizer: VocabularyTokenizer) -> None:
        self.tokenizer = tokenizer
        self.clock = Clock()
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.row = np.zeros(tokenizer.vocab_size, np.float32)
        self.random = random.Random(7)
        LlamaGrammar(tokenizer, AnswerFormat("json_schema", "{}"))  # builds what all share
        self.end = next(t for t in range(tokenizer.vocab_size) if tokenizer.is_end(t))

    def grammar(self, text: str, kind: str = "json_schema") -> LlamaGrammar:
        wanted = AnswerFormat(kind, text)
        made: LlamaGrammar = self.clock.timed(
            "compile", text, lambda: LlamaGrammar(self.tokenizer, wanted)
        )
        return made

    def masked(self, grammar: LlamaGrammar, what: str) -> np.ndarray[Any, Any]:
        row: np.ndarray[Any, Any] = self.clock.timed("mask", what, lambda: grammar.masked(self.row))
        return row

    def schema(self, schema: Any, tests: list[dict[str, Any]], name: str) -> None:
        """Compile a schema, and hold documents against it."""
        text = json.dumps(schema)
        self.counts["schemas"] += 1
        try:
            self.grammar(text)
        except UnsupportedError as problem:
            self.counts["refused"] += 1
            assert "\n" not in str(problem)
            self.reasons[str(problem)[:110]] += 1
            return
        closed = closed_schema(text)
        reads = validator_for(schema, Draft202012Validator)(closed) if schema is not True else None
        for test in tests:
            self.document(text, closed, test, name, reads)
        self.walk(text, schema, name)

    def document(
        self, text: str, closed: dict[str, Any], test: dict[str, Any], name: str, reads: Any
    ) -> None:
        data = _whole(test["data"])
        written = json.dumps(_ordered(data, [closed], closed), ensure_ascii=False)
        taken = self.takes(text, written)
        self.counts["valid" if test["valid"] else "invalid"] += 1
        if not test["valid"] and taken:
            self.counts["invalid accepted"] += 1
            self.wrong.append(f"invalid accepted: {name}: {text[:300]}: {written[:200]}")
        if test["valid"] and not taken:
            is_open = reads is not None and not reads.is_valid(data)
            kind = "valid only where open" if is_open else "valid forbidden"
            self.counts[kind] += 1
            if not is_open:
                self.wrong.append(f"valid forbidden: {name}: {text[:300]}: {written[:200]}")

    def takes(self, schema: str, written: str) -> bool:
        """Whether a document can be written, in whatever tokens."""
        grammar, left = self.grammar(schema), written.encode()
        ids = self.tokenizer.encode(written, add_special=False)[::-1]
        try:
            while left:
                allowed = np.isfinite(self.masked(grammar, schema))
                token = ids.pop() if ids else -1
                if token < 0 or not allowed[token]:
                    token, ids = self.longest(np.flatnonzero(allowed), left), []
                    if token < 0:
                        return False
                self.clock.timed("forced", schema, grammar.forced)
                self.clock.timed("accept", schema, partial(grammar.accept, token))
                left = left[len(self.tokenizer.token_bytes(token)) :]
                if not ids:
                    rest = left.decode(errors="ignore")
                    ids = self.tokenizer.encode(rest, add_special=False)[::-1]
            return bool(grammar.allows(self.end))
        except EdgespecError as problem:
            self.counts["ended by an error"] += 1
            self.reasons[f"while writing: {str(problem)[:90]}"] += 1
            return False

    def longest(self, allowed: np.ndarray[Any, Any], left: bytes) -> int:
        """The longest allowed token that a text begins with; -1 where there is none."""
        pieces = [(len(self.tokenizer.token_bytes(int(t))), int(t)) for t in allowed]
        fit = [(n, t) for n, t in pieces if n and left.startswith(self.tokenizer.token_bytes(t))]
        return max(fit, default=(0, -1))[1]

    def walk(self, text: str, schema: Any, name: str) -> None:
        """Draw a document; what is complete must fit."""
        grammar, written = self.grammar(text), b""
        try:
            for _ in range(_LONGEST_WALK):
                token = self.draw(np.flatnonzero(np.isfinite(self.masked(grammar, text))))
                grammar.accept(token)
                if self.tokenizer.is_end(token):
                    break
                written += self.tokenizer.token_bytes(token)
            else:
                self.counts["drawn, too long"] += 1
                return
            data = json.loads(written.decode())
        except EdgespecError:
            self.counts["drawn, ended by an error"] += 1
            return
        except ValueError:
            self.counts["drawn, no JSON"] += 1
            self.wrong.append(f"no JSON: {name}: {text[:300]}: {written[:200]!r}")
            return
        self.counts["drawn"] += 1
        if not validator_for(schema, Draft202012Validator)(schema).is_valid(data):
            self.counts["drawn, does not fit"] += 1
            self.wrong.append(f"drawn, does not fit: {name}: {text[:300]}: {written[:200]!r}")

    def draw(self, allowed: np.ndarray[Any, Any]) -> int:
        """A token, mostly one that ends something."""
        for _ in range(12):
            token = int(allowed[self.random.randrange(len(allowed))])
            piece = self.tokenizer.token_bytes(token)
            if self.tokenizer.is_end(token) or (len(piece) < 4 and piece[-1:] in b'"]}'):
                return token
        return token

    def tell(self, *, refused: bool) -> None:
        print(json.dumps(self.counts, indent=1))
        self.clock.tell()
        for line in self.wrong:
            print(line)
        if refused:
            for reason, count in self.reasons.most_common():
                print(f"{count:6d} {reason}")


def _whole(value: Any) -> Any:
    """Numbers as they are written: 1, not 1.0."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53:
        return int(value)
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return {k: _whole(v) for k, v in value.items()} if isinstance(value, dict) else value


def _ordered(value: Any, schemas: list[Any], root: dict[str, Any]) -> Any:
    """A document with its keys in the order that schemas of it name them."""
    parts = _parts(schemas, root, value)
    if isinstance(value, list):
        inner = [one.get("items") for one in parts]
        prefixes = [one.get("prefixItems") or () for one in parts]
        return [
            _ordered(one, [*inner, *(p[i] for p in prefixes if i < len(p))], root)
            for i, one in enumerate(value)
        ]
    if not isinstance(value, dict):
        return value
    literals = [one for part in parts for one in (part.get("const"), *(part.get("enum") or ()))]
    for one in literals:
        if _sorted_text(_whole(one)) == _sorted_text(value):
            return _whole(one)
    named = [name for part in parts for name in part.get("properties") or ()]
    named += [name for part in parts for name in part.get("required") or ()]
    made = {}
    for name in dict.fromkeys([*(n for n in named if n in value), *value]):
        inner = [(part.get("properties") or {}).get(name) for part in parts]
        inner += [part.get("additionalProperties") for part in parts]
        inner += [one for p in parts for one in (p.get("patternProperties") or {}).values()]
        made[name] = _ordered(value[name], inner, root)
    return made


def _is_of_another(branch: dict[str, Any], value: Any) -> bool:
    """Whether a branch cannot be the one that an object fits."""
    if not isinstance(value, dict):
        return False
    named = branch.get("properties") or {}
    is_closed = branch.get("additionalProperties") is False and "patternProperties" not in branch
    consts = {
        n: one["const"] for n, one in named.items() if isinstance(one, dict) and "const" in one
    }
    return (
        (is_closed and not value.keys() <= named.keys())
        or not set(branch.get("required") or ()) <= value.keys()
        or any(value.get(name, one) != one for name, one in consts.items())
    )


def _sorted_text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _parts(schemas: list[Any], root: dict[str, Any], value: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    waiting = [one for one in reversed(schemas) if isinstance(one, dict)]
    while waiting:
        one = waiting.pop()
        if any(one is other for other in found) or _is_of_another(one, value):
            continue
        found.append(one)
        branches = [b for name in ("allOf", "anyOf", "oneOf") for b in one.get(name) or ()]
        target: Any = root
        for name in str(one["$ref"])[1:].split("/")[1:] if "$ref" in one else ():
            name = unquote(name).replace("~1", "/").replace("~0", "~")
            target = target.get(name) if isinstance(target, dict) else None
        branches += [target] if "$ref" in one else []
        waiting += [b for b in reversed(branches) if isinstance(b, dict)]
    return found


def suite(folder: Path, judge: Judge) -> None:
    """Keywords of what cannot be generated are among the refused ones."""
    for path in sorted(folder.glob("*.json")):
        if path.stem == "format":  # which wants formats to mean nothing
            continue
        for group in json.loads(path.read_text(encoding="utf-8")):
            judge.schema(group["schema"], group["tests"], f"{path.stem}: {group['description']}")


def public(folder: Path, judge: Judge, sample: int, seed: int) -> None:
    paths = sorted(folder.rglob("*.json"))
    for path in random.Random(seed).sample(paths, min(sample, len(paths))):
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            continue
        tests = document.get("tests") if "schema" in document else None
        schema = document["schema"] if tests is not None else document
        judge.schema(schema, [one for one in tests or () if "data" in one], path.name)


# -- hostile -----------------------------------------------------------------------------------

_PIECES: tuple[str, ...] = (
    "a",
    "[a-z]",
    ".",
    "\\w",
    "\\d",
    "(a|)",
    "(a|b)",
    "[^x]",
    "\\p{L}",
    "(ab?)",
    "(.*a)",
    "]",
)
_PIECES += (
    "}",
    "(?i:abc)",
    "é",
    "\\s",
    "(a|b|c|)",
    "([a-z]+)",
    "\\/",
    '"',
    "\\\\",
    "(|)",
    "^",
    "$",
)
_COUNTS = ("", "", "*", "+", "?", "{3}", "{0,9}", "{30}", "{300}", "{1000}", "{2,3000}", "{60000}")
_KNOWN: tuple[Any, ...] = (
    *({"pattern": one, "type": "string"} for one in ("^a]$", "^(a|){1000}$", "^(a{1000}){1000}$")),
    {"type": "string", "pattern": "^((a|)(b|)(c|)){300}$"},
    {"type": "string", "pattern": "(a|b)*a(a|b){200}"},
    {"type": "string", "maxLength": 60_000},
    {"type": "integer", "multipleOf": 1_000_003},
    {"allOf": [{"type": "integer", "multipleOf": one} for one in (97, 89, 83, 79)]},
    {"$ref": "#"},
    {"anyOf": [{"$ref": "#"}, {"items": {"$ref": "#"}}]},
    {"enum": [f"value {i} {i * i}" for i in range(5000)]},
    {
        "type": "object",
        "allOf": [
            {"anyOf": [{"properties": {f"{x}{i}": {"type": "string"}}} for x in "ab"]}
            for i in range(10)
        ],
    },
)


def _pattern(draw: random.Random, depth: int = 0) -> str:
    parts = []
    for _ in range(draw.choice((1, 1, 2, 3, 8))):
        part = draw.choice(_PIECES)
        if depth < 4 and draw.random() < 0.4:
            part = f"({_pattern(draw, depth + 1)})"
        parts.append(part + draw.choice(_COUNTS))
    return draw.choice(("", "|")).join(parts)


def _schema(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.randrange(9 if depth < 4 else 4)
    many = draw.choice((1, 2, 3, 12, 40)) if depth < 3 else 2
    inner = [_schema(draw, depth + 1) for _ in range(many)] if kind > 3 else []
    count = draw.choice((0, 1, 7, 100, 3000, 60_000, 10**9))
    number = draw.choice((1, 0.1, 7, 999, 10_007, 2**40, 1e300, -3.7, 0.001))
    return (
        {"type": "string", "pattern": f"^{_pattern(draw)}$"},
        {"type": draw.choice(("integer", "number")), "minimum": number, "multipleOf": abs(number)},
        {"type": "string", "maxLength": count, "minLength": draw.choice((0, count))},
        {"$ref": draw.choice(("#", "#/$defs/a", "#/properties/p0", "#/items"))},
        {"type": "object", "properties": {f"p{i}": one for i, one in enumerate(inner)}},
        {"allOf": inner},
        {draw.choice(("anyOf", "oneOf")): inner, "type": draw.choice(("object", "string"))},
        {"type": "array", "items": (inner or [{}])[0], "minItems": count, "maxItems": count + 9},
        {
            "type": "object",
            "patternProperties": {_pattern(draw): one for one in inner[:8]},
            "additionalProperties": (inner or [{}])[0],
            "$defs": {"a": (inner or [{}])[-1]},
        },
    )[kind]


def _hostile(count: int) -> Iterator[tuple[str, str]]:
    """Kinds of forms and their texts: known ones first, then made ones and damaged ones."""
    draw = random.Random(11)
    for one in _KNOWN:
        yield "json_schema", json.dumps(one)
    for index in range(count - len(_KNOWN)):
        if index % 5 == 0:
            yield "regex", _pattern(draw)
        elif index % 5 == 1:
            rules = " | ".join(f'"{c}" {draw.choice(("root", "b", ""))}' for c in "abc")
            yield "grammar", f"root ::= ({rules}){draw.choice(_COUNTS)}\nb ::= root? [a-z]{{1,999}}"
        else:
            text = json.dumps(_schema(draw))
            if index % 5 == 2:
                place = draw.randrange(len(text))
                text = (
                    text[:place] + draw.choice(('"', "}", "[", "\\u0000", "9", "")) + text[place:]
                )
            yield "json_schema", text


def hostile(count: int, judge: Judge) -> None:
    """Each is compiled; then some tokens of it are drawn."""
    for kind, text in _hostile(count):
        judge.counts["forms"] += 1
        before = resident_bytes()
        try:
            grammar = judge.grammar(text, kind)
            for _ in range(24):
                judge.clock.timed("forced", text, grammar.forced)
                token = judge.draw(np.flatnonzero(np.isfinite(judge.masked(grammar, text))))
                judge.clock.timed("allows", text, partial(grammar.allows, token))
                judge.clock.timed("accept", text, partial(grammar.accept, token))
                if judge.tokenizer.is_end(token):
                    break
        except UnsupportedError as problem:
            judge.counts["refused"] += 1
            judge.reasons[str(problem)[:90]] += 1
        grown = (resident_bytes() - before) >> 20
        judge.counts["most MiB"] = max(judge.counts["most MiB"], grown)
    slow = {kind: most for kind, most in judge.clock.most.items() if most[0] > _SLOW_S}
    judge.tell(refused=False)
    if slow:
        sys.exit(f"over {_SLOW_S} s: {slow}")


def vocabulary(models: list[Path]) -> None:
    """Built once for each vocabulary; in a process of its own, sizes are those of that alone."""
    for path in models or [embedded_model()]:
        tokenizer = VocabularyTokenizer(path)
        before, began = resident_bytes(), time.process_time()
        grammar = LlamaGrammar(tokenizer, AnswerFormat("json_schema", "{}"))
        seconds, grown = time.process_time() - began, resident_bytes() - before
        size = tokenizer.vocab_size
        print(f"{path.name}: {size:,} tokens, {seconds:.2f} s, {grown / 2**20:.1f} MiB", end=", ")
        print(f"{grown / size:.0f} bytes a token")
        del grammar


def stall(count: int) -> None:
    """An answer alone, and beside hostile forms of which some tokens are written."""
    with edgespec.load(context_size=2048, users=2) as engine:
        engine.generate("x", max_tokens=2, json_schema="{}")  # builds what all share
        with Reader(engine) as alone:
            time.sleep(_ALONE_S)
        with Reader(engine) as beside:
            for kind, text in _hostile(count):
                options: Any = {kind: text, "max_tokens": 8}
                with suppress(EdgespecError):
                    engine.generate("x", **options)
    alone.tell("alone")
    beside.tell("beside hostile forms")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("command", choices=("suite", "public", "hostile", "vocabulary", "stall"))
    parser.add_argument("values", nargs="*")
    parser.add_argument("--sample", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--refused", action="store_true")
    arguments = parser.parse_args()
    if arguments.command == "vocabulary":
        return vocabulary([Path(one) for one in arguments.values])
    if arguments.command == "stall":
        return stall(int((arguments.values or ["300"])[0]))
    judge = Judge(VocabularyTokenizer(embedded_model()))
    if arguments.command == "hostile":
        return hostile(int((arguments.values or ["10000"])[0]), judge)
    folder = Path((arguments.values or [""])[0])
    if not arguments.values or not folder.is_dir():
        sys.exit(f"{arguments.command} needs a FOLDER\nhint: --help says where it comes from")
    if arguments.command == "suite":
        suite(folder, judge)
    else:
        public(folder, judge, arguments.sample, arguments.seed)
    judge.tell(refused=arguments.refused)


if __name__ == "__main__":
    main()
