"""Which tokens may come next in an answer of a given form, over a llama.cpp vocabulary.

llguidance keeps the state: of JSON schemas, regular expressions and grammars (GBNF, Lark). What it
compiles and what each token may take is bounded by its own counts (`LLGUIDANCE_LIMITS`), and by
those of `_check_multiples` for what it does not count. Regular expressions and grammars are tried
in a process of their own first (`grammar_guest`), where they may end it.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import re
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from decimal import Decimal
from itertools import combinations, groupby, islice
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote

import numpy as np

from edgespec.backends.base import AnswerFormat, Logits
from edgespec.backends.llama.gbnf import with_token_ids
from edgespec.backends.llama.grammar_guest import CONTROL, LLGUIDANCE_LIMITS, MODULE
from edgespec.backends.llama.library import library
from edgespec.errors import EdgespecError, UnsupportedError
from edgespec.memory.bytes.requests import FORM_BYTES
from edgespec.models.processes import Guest, GuestEndedError, GuestLimits

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_MOST_CHARS = 256 << 10  # of a schema or a grammar
_MOST_MULTIPLE = 20_000  # states of a number that is a multiple of it: 20 ms for 10,000
# One layout: that of Python's json.dumps, which models write by themselves.
_LAYOUT: Any = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
}
# Texts of strings, for which masks are computed in advance: two of the library's four take 3/4 of
# its memory, and masks are as fast.
_SLICES = [r'[^"\\\x00-\x1F\x7F]{1,10}', r'[^"\\\x00-\x1F\x7F]+']
_MOST_AHEAD = 64  # forced tokens that are told at once
_AFTER_THOUGHT = r"/\n{0,2}/"  # what models write between a thought and the answer


class Vocabulary(Protocol):
    """What a grammar asks of a tokenizer: see `LlamaTokenizer`."""

    @property
    def vocab_size(self) -> int: ...

    def vocabulary(self) -> AbstractContextManager[Any]: ...

    def encode(self, text: str, *, add_special: bool = True) -> list[int]: ...

    def token_bytes(self, token: int) -> bytes: ...

    def is_end(self, token: int) -> bool: ...


class LlamaGrammar:
    """The state of one answer's form after the tokens accepted so far.

    Raises UnsupportedError for a form that cannot be read, or takes too long; also later, where
    what comes next would take too long to find out.
    """

    def __init__(self, tokenizer: Vocabulary, wanted: AnswerFormat) -> None:
        from llguidance import LLMatcher, LLParserLimits

        self._tokenizer = tokenizer
        self._kind = _NAMES[wanted.kind]
        document = _document(tokenizer, wanted)
        with tokenizer.vocabulary(), _COMPILING[wanted.kind]:  # they tokenize with it
            engine = _engine_of(tokenizer)
            if wanted.think_tags is not None or wanted.free_after:
                document = _with_others(document, wanted, tokenizer, engine)
            limits = LLParserLimits(**LLGUIDANCE_LIMITS)  # type: ignore[arg-type]
            self._matcher = LLMatcher(engine, document, log_level=0, limits=limits)
            # Forces what is left to compile; the engine's thread finds it done.
            self._matcher.compute_bitmask()
        self._sure: deque[int] = deque()  # what is forced, as the tokenizer cuts it
        if self._matcher.is_error():
            raise _unusable(self._kind, self._matcher.get_error())

    def allows(self, token: int) -> bool:
        """Whether `token` may come next; an end token may when the text is complete."""
        if self._matcher.is_stopped():
            return self._tokenizer.is_end(token) and not self._matcher.is_error()
        if self._find_forced():
            return token == self._sure[0]
        return bool(self._matcher.validate_tokens([token]))

    def masked(self, logits_row: Logits) -> Logits:
        """A copy of the row, [V], with minus infinity for every token that may not come next.

        Takes 0.05 to 0.3 ms for 152,000 tokens.
        """
        if self._find_forced():
            row: Logits = np.full_like(logits_row, -np.inf)
            row[self._sure[0]] = logits_row[self._sure[0]]
            return row
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        allowed = np.unpackbits(bits, count=len(logits_row), bitorder="little")
        return np.where(allowed, logits_row, np.float32(-np.inf))

    def accept(self, token: int) -> None:
        """Go on after `token`, which must be allowed."""
        if not self._matcher.is_stopped() and not self._matcher.consume_token(token):
            self._check()
            raise AssertionError("a token the grammar forbids was picked")
        if self._sure:
            self._sure.popleft()

    def forced(self) -> tuple[list[int], int]:
        """Tokens that have to come next, and how many of them no other cut can replace.

        What is forced is cut as the tokenizer does it. Only a last token, which may go on beyond
        what is forced, can be another one.
        """
        self._find_forced()
        sure = list(islice(self._sure, _MOST_AHEAD))
        if len(sure) == _MOST_AHEAD:
            return sure, len(sure)
        size = sum(len(self._tokenizer.token_bytes(token)) for token in sure)
        # An end that is no whole character stays for the next round.
        rest = self._matcher.compute_ff_bytes()[size:].decode("utf-8", errors="ignore")
        return sure + (self._tokenizer.encode(rest, add_special=False) if rest else []), len(sure)

    def _find_forced(self) -> bool:
        """Whether the next token is forced; found out once for each run of forced ones."""
        if not self._sure:
            with self._tokenizer.vocabulary():
                self._sure.extend(self._matcher.compute_ff_tokens())
        return bool(self._sure)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _unusable(f"{self._kind}, from here on,", self._matcher.get_error())


_NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "grammar": "grammar"}


def _unusable(what: str, reason: str) -> UnsupportedError:
    """One sentence out of what llguidance says, which may be many lines."""
    reason = reason.partition("<non-verbose/>")[0]
    _, error, last = reason.rpartition("\nerror: ")  # of a regular expression, which it shows
    reason = " ".join((last.partition("\n")[0] if error else reason).split())
    if reason.startswith("NoExtension"):
        reason = "no text fits it"
    elif reason.startswith("oneOf"):
        reason = "its oneOf has branches that may both fit, as those of anyOf may"
    elif reason.startswith("Unimplemented keys: "):
        keywords = reason.partition("[")[2].replace('"', "").rstrip("]")
        reason = f"unsupported keywords {keywords}"
    return UnsupportedError(
        f"the {what} cannot be used: {reason.rstrip('.')[:300]}",
        hint="docs/serve.md lists what schemas may have",
    )


# -- the engine of a vocabulary ---------------------------------------------------------------

# Built at the first use, in 0.3 to 2 s, and kept as long as the tokenizer is; or why it cannot be.
_ENGINES: weakref.WeakKeyDictionary[Vocabulary, LLTokenizer | str] = weakref.WeakKeyDictionary()
_BUILDING = threading.Lock()
# One form at a time: many at once would take the processors that answers are computed with. No
# schema waits for a grammar, which may take a second.
_GRAMMARS = threading.Lock()
_COMPILING = {"json_schema": threading.Lock(), "regex": _GRAMMARS, "grammar": _GRAMMARS}


def _engine_of(tokenizer: Vocabulary) -> LLTokenizer:
    """What llguidance knows of a vocabulary; called where it is not freed.

    Raises UnsupportedError for one that it cannot use.
    """
    with _BUILDING:
        engine = _ENGINES.get(tokenizer)
        if engine is None:
            try:
                engine = _build(tokenizer)
            except (KeyboardInterrupt, SystemExit, MemoryError, EdgespecError):
                raise
            except BaseException as problem:  # a panic of Rust is one of these
                engine = " ".join(str(problem).split())[:200]
            _ENGINES[tokenizer] = engine
    if isinstance(engine, str):
        raise UnsupportedError(
            f"answers of this model cannot be kept to a form: its vocabulary has what llguidance "
            f"cannot use ({engine})",
            hint="ask for the form in words",
        )
    return engine


def _build(tokenizer: Vocabulary) -> LLTokenizer:
    from llguidance import LLTokenizer

    lib = library()
    with tokenizer.vocabulary() as vocab:
        pieces = list(_pieces(lib, vocab, tokenizer.vocab_size))
        found = (token for token in range(len(pieces)) if lib.llama_vocab_is_eog(vocab, token))
        ends = [token for token in found if tokenizer.is_end(token)]
        function = ctypes.cast(lib._lib.llama_tokenize, ctypes.c_void_p).value
        make: Any = LLTokenizer.from_llamacpp  # type: ignore[attr-defined]
        engine: LLTokenizer = make(
            tokens=pieces,
            vocab_ptr=vocab,
            tokenize_fptr=function,
            eos_token=ends,
            slices=_SLICES,
        )
        return engine


def _pieces(lib: Any, vocab: Any, count: int) -> Iterator[bytes]:
    """The bytes of each token; one that stands for no text begins with 0xFF, its name behind."""
    buffer = ctypes.create_string_buffer(1 << 12)
    for token in range(count):
        length = lib.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, True)
        if length < 0:
            buffer = ctypes.create_string_buffer(-length)
            length = lib.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, True)
        piece = buffer.raw[:length]
        is_text = lib.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, False) > 0
        yield piece if is_text else CONTROL + piece


# -- what llguidance is given ------------------------------------------------------------------


def _document(tokenizer: Vocabulary, wanted: AnswerFormat) -> str:
    """llguidance's document of a form. Raises UnsupportedError."""
    size, name = len(wanted.text), _NAMES[wanted.kind]
    if re.search("[\ud800-\udfff]", wanted.text):
        raise UnsupportedError(f"the {name} has half a character in it")
    if size > _MOST_CHARS:
        raise UnsupportedError(f"the {name} has {size:,} characters, {_MOST_CHARS:,} are the most")
    if wanted.kind == "json_schema":
        return _schema_document(wanted.text)
    return _tried_document(tokenizer, wanted)


# -- grammars and regular expressions, which a guest tries -------------------------------------


# Compiled here, a form takes as much as there. A vocabulary as JSON has 11 to 29 bytes a token.
_guest = Guest(MODULE, GuestLimits(FORM_BYTES, seconds=1.0, patience_s=10.0, bytes_per_byte=64))
_MOST_TRIED = 8  # forms that are known, with their documents: at most 4 MiB
_tried: dict[tuple[str, str, str], str] = {}  # by vocabulary, kind and text


def is_untried(tokenizer: Vocabulary, wanted: AnswerFormat) -> bool:
    """Whether a form has to be tried before it is compiled, which `LlamaGrammar` waits for."""
    if wanted.kind == "json_schema" or len(wanted.text) > _MOST_CHARS:
        return False
    return _key_of(tokenizer, wanted) not in _tried


def _tried_document(tokenizer: Vocabulary, wanted: AnswerFormat) -> str:
    """llguidance's document of a form that can be compiled. Raises UnsupportedError."""
    name = _NAMES[wanted.kind]
    key = vocabulary, kind, text = _key_of(tokenizer, wanted)
    if key in _tried:
        return _tried[key]
    question = {"vocabulary": vocabulary, "kind": kind, "text": text}
    try:
        told = _guest.ask(question)
        if "unknown" in told:
            pieces = _all_pieces(tokenizer)
            _guest.ask({"vocabulary": vocabulary, "pieces": pieces, "slices": _SLICES})
            told = _guest.ask(question)
    except GuestEndedError as problem:
        reason = "it is nested too deeply, or takes too much memory"
        raise UnsupportedError(
            f"the {name} cannot be used: {reason if problem.is_crash else problem}",
            hint="make it smaller, with fewer rules within rules",
        ) from problem
    if "unsupported" in told:
        raise UnsupportedError(told["unsupported"], hint=told["hint"])
    if "document" not in told:
        raise _unusable(name, told.get("error", "it could not be tried"))
    _tried[key] = document = str(told["document"])
    while len(_tried) > _MOST_TRIED:
        _tried.pop(next(iter(_tried)), None)
    return document


def _key_of(tokenizer: Vocabulary, wanted: AnswerFormat) -> tuple[str, str, str]:
    """What decides about a form: a number of the vocabulary, its kind, its text."""
    text = with_token_ids(wanted.text, tokenizer) if wanted.kind == "grammar" else wanted.text
    return _NUMBERS.setdefault(tokenizer, f"{next(_COUNT)}"), wanted.kind, text


def _all_pieces(tokenizer: Vocabulary) -> str:
    """The bytes of all tokens, as JSON; kept, as a guest that was ended needs them anew."""
    if tokenizer not in _PIECES:
        with tokenizer.vocabulary() as vocab:
            pieces = _pieces(library(), vocab, tokenizer.vocab_size)
            _PIECES[tokenizer] = json.dumps([one.decode("latin-1") for one in pieces])
    return _PIECES[tokenizer]


_COUNT = itertools.count()
_NUMBERS: weakref.WeakKeyDictionary[Vocabulary, str] = weakref.WeakKeyDictionary()
_PIECES: weakref.WeakKeyDictionary[Vocabulary, str] = weakref.WeakKeyDictionary()


def _with_others(
    document: str, wanted: AnswerFormat, tokenizer: Vocabulary, engine: LLTokenizer
) -> str:
    """The same form behind a thought, or beside answers of another kind, which are free.

    A thought is free up to its closing tag. Where the opening tag is "" the prompt ended with it;
    else the answer may go without a thought.
    """
    lark = "start: answer\n"
    if wanted.think_tags is not None:
        opening, closing = (_tag(tag, tokenizer, engine) for tag in wanted.think_tags)
        lark = f"start: thought {_AFTER_THOUGHT} answer{' | answer' if opening else ''}\n"
        if closing.startswith("<"):
            lark += f"thought: {opening} TEXT {closing}\nTEXT: /(.|\\n)*/\n"
        else:
            lark += f"thought: {opening} body\nbody[lazy]: /(.|\\n)*/ {closing}\n"
    lark += "answer: @form"
    if wanted.free_after:
        lark += f" | {_tag(wanted.free_after, tokenizer, engine)} any*\nany: <[*]>"
    form = {**json.loads(document)["grammars"][0], "name": "form"}
    return json.dumps({"grammars": [{"name": "all", "lark_grammar": lark}, form]})


def _tag(tag: str, tokenizer: Vocabulary, engine: LLTokenizer) -> str:
    """How Lark's notation names a tag: its control tokens by their ids, the rest as text."""
    ids = tokenizer.encode(tag, add_special=False) if tag else []
    if not any(map(engine.is_special_token, ids)):
        return json.dumps(tag) if tag else ""
    parts = []
    for is_special, run in groupby(ids, engine.is_special_token):
        if is_special:
            parts += [f"<[{token}]>" for token in run]
        else:
            text = b"".join(map(tokenizer.token_bytes, run)).decode(errors="replace")
            parts.append(json.dumps(text))
    return " ".join(parts)


# -- JSON schemas ------------------------------------------------------------------------------

_IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref")  # what else the same value has to fit
_CHOICES = ("anyOf", "oneOf")
_SAYS_OTHERWISE = (
    *("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"),
    *("minProperties", "$dynamicRef", "$recursiveRef", "not", "if", "dependentSchemas"),
)
_OF_ANY_NAME = ("patternProperties", "additionalProperties")  # which named ones may have, too
_OF_ITEMS = ("items", "additionalItems", "prefixItems")
_MOST_STEPS = 200_000
_DEEPEST_PROOF = 4  # levels at which it is looked for what tells branches apart
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_LITERAL = ("const", "enum", "default", "examples")
_MAPPINGS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# Formats that llguidance has, and one that it refuses by name. JSON Schema lets a reader pass over
# all others.
_FORMATS = {
    *("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"),
    "regex",
}
# What is written for formats that it lacks: texts of ASCII that are all of the format.
_ALIKE = {"idn-email": "email", "idn-hostname": "hostname", "iri": "uri"}
# A number of words, as (?:\S+\s+){0,49}\S+ says it. \S+(?:\s+\S+){0,49} are the same texts, and a
# mask of it takes a quarter of the time where the length is bounded, too.
_PART = r"(?:\\[dDsSwW]|\[[^\]\\]*\]|[\w ,.-])[*+?]?"
_WORDS = re.compile(rf"(?<!\\)\((\?:)?({_PART})({_PART})\)(\{{\d+(?:,\d*)?\}}|[*+?])\2(?![*+?{{])")
_NO_CONSTRAINT = (
    *("$defs", "definitions", "title", "description", "default", "examples", "$id", "$schema"),
    *("$comment", "deprecated", "readOnly", "writeOnly"),
)


def closed_schema(text: str) -> dict[str, Any]:
    """A JSON schema as answers keep to it. Raises UnsupportedError for what is none."""
    try:
        schema = json.loads(text, parse_float=_number)
        schema = {} if schema is True else schema
        if not isinstance(schema, dict):
            raise ValueError(f"it is an object, not {text.strip()[:40]}")
        schema.pop("x-guidance", None)  # llguidance's options: there is one layout here
        _check_multiples(schema, text)
        for one in _schemas(schema):
            _tell_format(one)
            if isinstance(one.get("pattern"), str):
                one["pattern"] = _WORDS.sub(r"\2(?:\3\2)\4", one["pattern"])
        references = _References(schema)
        _Closing(references).close(schema)
        for one in list(_schemas(schema)):
            references.coerce_one_of(one)
    except (ValueError, RecursionError) as problem:
        reason = "it is nested too deeply" if isinstance(problem, RecursionError) else str(problem)
        raise _unusable("JSON schema", reason) from None
    return schema


def _number(digits: str) -> float:
    """Numbers that are equal, alike: 2 for 2.0, which llguidance takes for no length."""
    value = float(digits)
    return int(value) if value.is_integer() and abs(value) <= 2**53 else value


def _tell_format(schema: dict[str, Any]) -> None:
    """Say a format in words that llguidance knows, or not at all."""
    name = schema.get("format")
    if isinstance(name, str) and name not in _FORMATS:
        del schema["format"]
        if name in _ALIKE:
            schema["format"] = _ALIKE[name]


def _schema_document(text: str) -> str:
    """llguidance's document of a JSON schema. Raises UnsupportedError for what is none."""
    from llguidance import LLMatcher

    schema = closed_schema(text)
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_LAYOUT)
    except ValueError as problem:
        raise _unusable("JSON schema", str(problem)) from None


def _check_multiples(schema: dict[str, Any], text: str) -> None:
    """Refuse multiples of large numbers: llguidance has a state for each remainder."""
    found = [abs(one["multipleOf"]) for one in _schemas(schema) if _is_number(one, "multipleOf")]
    coefficients = {_coefficient(number) for number in found}
    merges = any(f'"{name}"' in text for name in ("allOf", "$ref"))
    most = math.lcm(*coefficients) if merges else max(coefficients, default=0)
    if most > _MOST_MULTIPLE:
        raise ValueError(
            f"multipleOf {max(found)} has {most:,} remainders, {_MOST_MULTIPLE:,} are the most"
        )


def _is_number(schema: dict[str, Any], name: str) -> bool:
    value = schema.get(name)
    return isinstance(value, int | float) and math.isfinite(value)


def _coefficient(number: float) -> int:
    """The digits of a number, without its point: 25 of 2.5. At least 1."""
    digits = Decimal(repr(number)).normalize()
    exponent = digits.as_tuple().exponent
    assert isinstance(exponent, int)
    if exponent > 18:
        return 10**18  # large enough to be refused
    return max(1, int(digits.scaleb(-min(exponent, 0))))


def _schemas(root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All schemas in one; not what stands for a value itself."""
    waiting = [root]
    while waiting:
        schema = waiting.pop()
        yield schema
        for name, value in schema.items():
            if name in _LITERAL:
                continue
            inner = value.values() if name in _MAPPINGS and isinstance(value, dict) else [value]
            for one in inner:
                waiting += [
                    x for x in (one if isinstance(one, list) else [one]) if isinstance(x, dict)
                ]


class _References:
    """What the schemas of a document say in place of each other.

    Its work is bounded: ValueError where parts refer to each other too often.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root
        self._steps = 0

    def step(self, count: int = 1) -> None:
        """Count work."""
        self._steps += count
        if self._steps > _MOST_STEPS:
            raise ValueError("its parts refer to each other too often")

    def target(self, reference: Any) -> Any:
        """What a reference within the document names; None for others, which are not followed."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found: Any = self.root
        for name in filter(None, unquote(reference[1:]).split("/")):
            name = name.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, dict) else None
        return found

    def coerce_one_of(self, schema: dict[str, Any]) -> None:
        """Say `anyOf` where no value fits two branches; llguidance sees less of that."""
        pairs = combinations(_list(schema, "oneOf"), 2)
        if (
            "oneOf" not in schema
            or "anyOf" in schema
            or not all(self._differ(one, other, schema.get("type")) for one, other in pairs)
        ):
            return
        renamed = {("anyOf" if name == "oneOf" else name): value for name, value in schema.items()}
        schema.clear()
        schema.update(renamed)

    def _differ(self, one: Any, other: Any, outer: Any = None, depth: int = 0) -> bool:
        """Whether it can be shown that no value fits both; `outer` is the type of both."""
        self.step()
        one, other = self._resolved(one), self._resolved(other)
        if one is False or other is False:
            return True
        if depth > _DEEPEST_PROOF or not isinstance(one, dict) or not isinstance(other, dict):
            return False
        types, values = [_types(x) for x in (one, other)], [_values(x) for x in (one, other)]
        if types[0].isdisjoint(types[1]):
            return True
        if values[0] is not None and values[1] is not None:
            return values[0].isdisjoint(values[1])
        if {"object"} not in (*types, _types({"type": outer})):
            return False
        names = {*_required(one), *_required(other)}
        properties = {name: (_property(one, name), _property(other, name)) for name in names}
        # A document of one branch does not have what the other one requires, and the other way.
        if any(properties[name][0] is False for name in _required(other)) and any(
            properties[name][1] is False for name in _required(one)
        ):
            return True
        return any(
            False not in pair and self._differ(*pair, None, depth + 1)
            for pair in properties.values()
        )

    def _resolved(self, schema: Any) -> Any:
        """What a schema that is a reference alone stands for."""
        for _ in range(_DEEPEST_PROOF):
            if not isinstance(schema, dict) or set(schema) - set(_NO_CONSTRAINT) != {"$ref"}:
                break
            schema = self.target(schema["$ref"])
        return schema


def _types(schema: dict[str, Any]) -> set[str]:
    """The types that its values may have."""
    values = _values(schema)
    if values is not None:
        return {_type_of(json.loads(value)) for value in values}
    named = schema.get("type")
    found = {named} if isinstance(named, str) else set(filter(_is_text, _list(schema, "type")))
    return found | {"integer"} if "number" in found else found or set(_TYPES)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _type_of(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    kinds = {int: "integer", float: "integer", str: "string", list: "array", dict: "object"}
    return kinds[type(value)]


def _values(schema: dict[str, Any]) -> set[str] | None:
    """The texts of its values, where they are listed."""
    found = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(found, list):
        return None
    return {json.dumps(value, sort_keys=True) for value in found}


def _property(schema: dict[str, Any], name: str) -> Any:
    """The schema of a property: True for any value, False for one that it may not have."""
    if "patternProperties" in schema:
        return True
    return _mapping(schema, "properties").get(name, schema.get("additionalProperties", True))


class _Closing:
    """Closes objects that name properties and say nothing of others.

    What several schemas say of the same value is put together first: no branch of an `allOf` may
    forbid what the other one names. Definitions that are used in such places stay as they are, and
    so do values that two branches describe.
    """

    def __init__(self, references: _References) -> None:
        self._references = references
        self._done: set[int] = set()
        beside = [
            one
            for schema in _schemas(references.root)
            if _merges(schema)
            for one in self._direct(schema)
        ]
        self._merged = {id(part) for part in self._with_branches(beside)}

    def close(self, schema: Any) -> None:
        """Close a schema that stands alone for a value, and those of the values within."""
        if not isinstance(schema, dict) or id(schema) in self._done:
            return
        self._done.add(id(schema))
        if any(name in schema for name in _IN_PLACE) and not _merges(schema):
            for branch in self._direct(schema):
                if id(branch) not in self._merged:
                    self.close(branch)
            return
        parts = self._with_branches([schema])
        values = [pair for part in parts for pair in _values_within(part)]
        self._close_one(schema, parts)
        self._done.update(map(id, parts))
        places = Counter(place for place, _ in values)
        is_open = len(places) > 1 and any(place in places for place in _OF_ANY_NAME)
        for place, value in values:
            if places[place] == 1 and not (is_open and place not in _OF_ITEMS):
                self.close(value)

    def _close_one(self, schema: dict[str, Any], parts: list[dict[str, Any]]) -> None:
        says_otherwise = any(name in part for part in parts for name in _SAYS_OTHERWISE)
        if says_otherwise or not any("properties" in part for part in parts):
            return
        own = _mapping(schema, "properties")
        names = [
            name for part in parts for name in (*_mapping(part, "properties"), *_required(part))
        ]
        own = {**own, **{name: True for name in names if name not in own}}
        rest = {name: value for name, value in schema.items() if name != "properties"}
        schema.clear()  # what comes first says in which order properties are written
        schema.update({"properties": own, **rest, "additionalProperties": False})

    def _with_branches(self, schemas: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Schemas, and all that is said of the same value by what they have in place."""
        found, seen, waiting = [], set[int](), schemas[::-1]
        while waiting:
            one = waiting.pop()
            if id(one) not in seen:
                seen.add(id(one))
                found.append(one)
                waiting += self._direct(one)[::-1]
        self._references.step(len(found))
        return found

    def _direct(self, schema: dict[str, Any]) -> list[dict[str, Any]]:
        """The schemas that another one has in place."""
        found = [one for name in ("allOf", *_CHOICES) for one in _list(schema, name)]
        if "$ref" in schema:
            found.append(self._references.target(schema["$ref"]))
        return [one for one in found if isinstance(one, dict)]


def _merges(schema: dict[str, Any]) -> bool:
    """Whether it says something of a value, and other schemas in place of it do, too."""
    constraints = [name for name in schema if name not in _NO_CONSTRAINT]
    return len(constraints) > 1 or len(_list(schema, "allOf")) > 1


def _mapping(schema: dict[str, Any], name: str) -> dict[str, Any]:
    value = schema.get(name)
    return value if isinstance(value, dict) else {}


def _list(schema: dict[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


def _required(schema: dict[str, Any]) -> list[str]:
    return [name for name in _list(schema, "required") if isinstance(name, str)]


def _values_within(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Schemas of the values within a value, with their places."""
    for name, value in _mapping(schema, "properties").items():
        yield f"properties {name}", value
    for value in _mapping(schema, "patternProperties").values():
        yield "patternProperties", value
    for value in _list(schema, "prefixItems") + _list(schema, "items"):
        yield "prefixItems", value
    for name in ("items", "additionalItems", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            yield name, schema[name]
