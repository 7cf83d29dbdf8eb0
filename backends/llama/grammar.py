"""Which tokens may come next in an answer of a given form, over a llama.cpp vocabulary.

llguidance keeps the state: of JSON schemas, regular expressions and grammars (GBNF, Lark). What it
compiles and what each token may take is bounded by its own counts (`LLGUIDANCE_LIMITS`), and by
those of `json_schemas` for what it does not count. Regular expressions and grammars are tried
in a process of their own first (`grammar_guest`), where they may end it.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import re
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from edgespec.backends.base import AnswerFormat, Logits, Tokenizer
from edgespec.backends.llama.gbnf import with_token_ids
from edgespec.backends.llama.grammar_guest import (
    CONTROL,
    LLGUIDANCE_LIMITS,
    MODULE,
    MOST_FORCED,
)
from edgespec.backends.llama.json_schemas import schema_document, unusable, unusable_place
from edgespec.backends.llama.library import library, quick_function
from edgespec.backends.llama.team import TEAMS
from edgespec.errors import EdgespecError, UnsupportedError
from edgespec.memory.bytes.requests import FORM_BYTES
from edgespec.models.processes import Guest, GuestEndedError, GuestLimits

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_MOST_CHARS = 256 << 10  # of a schema or a grammar
# Texts of strings, for which masks are computed in advance: two of the library's four take 3/4 of
# its memory, and masks are as fast.
_SLICES = [r'[^"\\\x00-\x1F\x7F]{1,10}', r'[^"\\\x00-\x1F\x7F]+']
_MOST_AHEAD = 64  # forced tokens that are told at once
_AFTER_THOUGHT = r"/\n{0,2}/"  # what models write between a thought and the answer


class Vocabulary(Tokenizer, Protocol):
    """What a grammar asks of a tokenizer besides: see `LlamaTokenizer`."""

    def vocabulary(self) -> AbstractContextManager[Any]: ...

    def all_bytes(self) -> list[bytes]: ...

    def piece(self, vocab: Any, token: int, *, special: bool = False) -> bytes: ...


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
        # They tokenize with the vocabulary.
        with tokenizer.vocabulary(), _COMPILING[wanted.kind], TEAMS.beside():
            engine = _engine_of(tokenizer)
            if wanted.think_tags is not None or wanted.free_after:
                document = _with_others(document, wanted, tokenizer, engine)
            limits = LLParserLimits(**LLGUIDANCE_LIMITS)  # type: ignore[arg-type]
            self._matcher = LLMatcher(engine, document, log_level=0, limits=limits)
            # Forces what is left to compile, which other threads go on beside; what is forced is
            # found without them. The engine's thread finds both done.
            self._matcher.compute_bitmask()
        if self._matcher.is_error():
            place = unusable_place(wanted.text) if wanted.kind == "json_schema" else ""
            raise unusable(self._kind, self._matcher.get_error(), place)
        self._sure: deque[int] = deque()  # what is forced, as the tokenizer cuts it
        self._find_forced()

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
            if (size := len(self._matcher.compute_ff_bytes())) > MOST_FORCED:
                raise UnsupportedError(
                    f"the {self._kind} forces {size:,} bytes of an answer at once, "
                    f"{MOST_FORCED:,} are the most"
                )
            with self._tokenizer.vocabulary():
                self._sure.extend(self._matcher.compute_ff_tokens())
        return bool(self._sure)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise unusable(f"{self._kind}, from here on,", self._matcher.get_error())


_NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "grammar": "grammar"}


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
        pieces = _pieces(tokenizer)
        is_end = quick_function(
            "llama_vocab_is_eog", ctypes.c_bool, ctypes.c_void_p, ctypes.c_int32
        )
        found = (token for token in range(len(pieces)) if is_end(vocab, token))
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


def _pieces(tokenizer: Vocabulary) -> list[bytes]:
    """The bytes of each token; one that stands for no text begins with 0xFF, its name behind."""
    pieces = tokenizer.all_bytes()
    with tokenizer.vocabulary() as vocab:
        for token in [token for token, piece in enumerate(pieces) if not piece]:
            pieces[token] = CONTROL + tokenizer.piece(vocab, token, special=True)
    return pieces


# -- what llguidance is given ------------------------------------------------------------------


def _document(tokenizer: Vocabulary, wanted: AnswerFormat) -> str:
    """llguidance's document of a form. Raises UnsupportedError."""
    size, name = len(wanted.text), _NAMES[wanted.kind]
    if re.search("[\ud800-\udfff]", wanted.text):
        raise UnsupportedError(f"the {name} has half a character in it")
    if size > _MOST_CHARS:
        raise UnsupportedError(f"the {name} has {size:,} characters, {_MOST_CHARS:,} are the most")
    if wanted.kind == "json_schema":
        return schema_document(wanted.text)
    return _tried_document(tokenizer, wanted)


# -- grammars and regular expressions, which a guest tries -------------------------------------


# Compiled here, a form takes as much as there. A vocabulary as JSON has 11 to 29 bytes a token.
_guest = Guest(MODULE, GuestLimits(FORM_BYTES, seconds=1.0, patience_s=10.0, bytes_per_byte=64))
_MOST_TRIED = 8  # forms that are known, with their documents: at most 4 MiB
_tried: dict[tuple[str, str, str], str] = {}  # by vocabulary, kind and text


def trial(tokenizer: Vocabulary, wanted: AnswerFormat) -> Callable[[], object] | None:
    """What tries a form in the guest, which `LlamaGrammar` waits for; None where it need not."""
    if wanted.kind == "json_schema" or len(wanted.text) > _MOST_CHARS:
        return None
    is_known = _key_of(tokenizer, wanted) in _tried
    return None if is_known else lambda: _document(tokenizer, wanted)


def _tried_document(tokenizer: Vocabulary, wanted: AnswerFormat) -> str:
    """llguidance's document of a form that can be compiled. Raises UnsupportedError."""
    name = _NAMES[wanted.kind]
    key = vocabulary, kind, text = _key_of(tokenizer, wanted)
    if key in _tried:
        return _tried[key]
    question = {"vocabulary": vocabulary, "kind": kind, "text": text}
    try:
        with TEAMS.beside():
            told = _guest.ask(question)
            if "unknown" in told:
                if tokenizer not in _PIECES:  # a guest that was ended needs them anew
                    names = [one.decode("latin-1") for one in _pieces(tokenizer)]
                    _PIECES[tokenizer] = json.dumps(names)
                known = {"pieces": _PIECES[tokenizer], "slices": _SLICES}
                _guest.ask({"vocabulary": vocabulary, **known})
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
        raise unusable(name, told.get("error", "it could not be tried"))
    _tried[key] = document = str(told["document"])
    while len(_tried) > _MOST_TRIED:
        _tried.pop(next(iter(_tried)), None)
    return document


def _key_of(tokenizer: Vocabulary, wanted: AnswerFormat) -> tuple[str, str, str]:
    """What decides about a form: a number of the vocabulary, its kind, its text."""
    text = with_token_ids(wanted.text, tokenizer) if wanted.kind == "grammar" else wanted.text
    return _NUMBERS.setdefault(tokenizer, f"{next(_COUNT)}"), wanted.kind, text


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
