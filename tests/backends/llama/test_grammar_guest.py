"""Grammars that end, fill or hold up the process that tries them, and what this one keeps of them.

Without the guest most of these end the process of the tests.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from edgespec.backends.base import AnswerFormat
from edgespec.backends.llama import grammar as module
from edgespec.backends.llama import grammar_guest
from edgespec.backends.llama.grammar import LlamaGrammar
from edgespec.backends.llama.team import TEAMS
from edgespec.backends.llama.tokenizer import VocabularyTokenizer
from edgespec.errors import UnsupportedError
from edgespec.memory.bytes.requests import FORM_BYTES, FORM_TOKEN_BYTES
from edgespec.memory.device.track import peak_resident_bytes
from edgespec.models.embedded import embedded_model

pytestmark = pytest.mark.model
_MOST_GROWN = 96 << 20  # bytes: what a grammar may take in its guest, it may take here


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[VocabularyTokenizer]:
    found = VocabularyTokenizer(embedded_model())
    LlamaGrammar(found, AnswerFormat("json_schema", "{}"))  # builds what all share
    yield found
    found.close()


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_tried", {})


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no end is ended soon."""
    monkeypatch.setattr(module._guest, "_limits", module._guest._limits._replace(seconds=0.4))


def chained(rule: str, count: int, *, lark: bool = False) -> str:
    """So many rules, in each of which "{}" is the next one."""
    is_, root, name = (":", "start", "a") if lark else ("::=", "root", "a")
    rules = [f"{name}{i} {is_} {rule.format(f'{name}{i + 1}')}" for i in range(count)]
    return "\n".join([f"{root} {is_} {name}0", *rules, f'{name}{count} {is_} "x"'])


# Kinds of chains, and how many rules of each ended a server or took seconds of it.
CHAINS = [
    ("{}", 12_000),
    ('{0} {0} | "x"', 5000),
    *(
        pytest.param(rule, count, marks=pytest.mark.long)
        for rule, count in (
            ("{}", 4000),
            ('"x" {}', 4000),
            ('"x" {}', 9000),
            ("{}?", 9000),
            ("{}*", 4000),
            ('{} | "x"', 4000),
        )
    ),
]


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(("rule", "count"), CHAINS)
def test_a_long_chain_of_rules_is_a_sentence(
    tokenizer: VocabularyTokenizer, rule: str, count: int
) -> None:
    before = peak_resident_bytes()
    with pytest.raises(UnsupportedError, match="the grammar cannot be used: it ") as caught:
        LlamaGrammar(tokenizer, AnswerFormat("grammar", chained(rule, count)))
    assert "fewer rules within rules" in caught.value.hint
    assert peak_resident_bytes() - before < 8 << 20  # nothing was compiled here


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("count", [1000, 4000])
def test_terminals_within_terminals_are_a_sentence(
    tokenizer: VocabularyTokenizer, count: int
) -> None:
    text = chained('{} "y"?', count, lark=True).replace("a", "A").replace("stArt", "start")
    with pytest.raises(UnsupportedError, match="the grammar cannot be used: it "):
        LlamaGrammar(tokenizer, AnswerFormat("grammar", text))
    text = chained("{}", 12_000, lark=True)
    with pytest.raises(UnsupportedError, match="the grammar cannot be used: it "):
        LlamaGrammar(tokenizer, AnswerFormat("grammar", text))


@pytest.mark.parametrize("text", ['"' + '\\"' * 130_000, "[" * 260_000, '"\\' * 130_000])
def test_a_text_without_an_end_is_looked_at_once(tokenizer: VocabularyTokenizer, text: str) -> None:
    """Each quote in it was tried as the first one of a text before: an hour for 256 KB."""
    with pytest.raises(UnsupportedError, match="the grammar cannot be "):
        LlamaGrammar(tokenizer, AnswerFormat("grammar", f"root ::= {text}"))


@pytest.mark.parametrize("rule", ["{}", '"x" {}', '{0} {0} | "x"', "{}?"])
def test_rules_within_300_rules_are_compiled(tokenizer: VocabularyTokenizer, rule: str) -> None:
    """Far more than anybody writes."""
    grammar = LlamaGrammar(tokenizer, AnswerFormat("grammar", chained(rule, 300)))
    assert np.isfinite(grammar.masked(np.zeros(tokenizer.vocab_size, np.float32))).any()


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ('root ::= "yes"', "yes"),
        ('start: <|im_end|> "a"', "<|im_end|>"),
        ('start: <[2]> "a"', "<|im_end|>"),
        ('start: "a" <[*]>', "a"),
    ],
)
def test_control_tokens_are_those_of_the_vocabulary(
    tokenizer: VocabularyTokenizer, text: str, first: str
) -> None:
    grammar = LlamaGrammar(tokenizer, AnswerFormat("grammar", text))
    assert grammar.allows(tokenizer.encode(first, add_special=False)[0])


def test_an_unknown_control_token_is_told_with_those_there_are(
    tokenizer: VocabularyTokenizer,
) -> None:
    with pytest.raises(UnsupportedError, match=r"unknown special token.*<file_sep>"):
        LlamaGrammar(tokenizer, AnswerFormat("grammar", 'start: <|nope|> "a"'))


def test_a_form_is_tried_once(
    tokenizer: VocabularyTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = AnswerFormat("regex", "[a-z]{3}")
    trial = tokenizer.trial(wanted)
    assert trial is not None
    trial()
    assert tokenizer.trial(wanted) is None
    monkeypatch.setattr(module._guest, "ask", lambda _question: pytest.fail("it is known"))
    LlamaGrammar(tokenizer, wanted)
    assert tokenizer.trial(AnswerFormat("json_schema", "{}")) is None


@pytest.mark.usefixtures("hurried")
def test_what_takes_long_with_all_tokens_alone_is_refused(tokenizer: VocabularyTokenizer) -> None:
    """Compiled in no time, and 16 s of the first token: it is tried with the whole vocabulary."""
    rules = [f'r{i} ::= "\\n"* root' for i in range(1000)]
    text = "\n".join(["root ::= " + " | ".join(f"r{i}" for i in range(1000)), *rules])
    with pytest.raises(UnsupportedError, match="the grammar cannot be used: "):
        LlamaGrammar(tokenizer, AnswerFormat("grammar", text))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits memory")
@pytest.mark.parametrize(
    "text", ['root ::= "' + '\\"' * 10 + '"{60000}', 'root ::= "' + "ab c " * 50_000 + '"']
)
def test_where_no_memory_is_left_nobody_waits_for_it(
    tokenizer: VocabularyTokenizer, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llguidance waits for itself then, without an end, or Python has a word for it."""
    monkeypatch.setattr(module._guest, "_limits", module._guest._limits._replace(patience_s=60.0))
    with pytest.raises(UnsupportedError, match=r"it takes more than \d+ MiB"):
        LlamaGrammar(tokenizer, AnswerFormat("grammar", text))


@pytest.mark.parametrize("size", [8192, 8193])
@pytest.mark.parametrize("kind", ["grammar", "json_schema"])
def test_no_text_is_forced_that_takes_everybodys_time(
    tokenizer: VocabularyTokenizer, kind: str, size: int
) -> None:
    """It is cut into tokens while no other thread of Python's goes on."""
    text = "ab c " * size
    text = f'root ::= "{text[:size]}"' if kind == "grammar" else json.dumps(text[: size - 2])
    wanted = AnswerFormat(kind, text if kind == "grammar" else f'{{"const": {text}}}')
    if size == 8192:
        assert LlamaGrammar(tokenizer, wanted).forced()[0]
    else:
        refused = "the grammar cannot be used: it " if kind == "grammar" else "the JSON schema "
        with pytest.raises(UnsupportedError, match=f"{refused}forces 8,193 bytes of an answer"):
            LlamaGrammar(tokenizer, wanted)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits memory")
def test_it_may_take_what_plans_of_servers_have(tokenizer: VocabularyTokenizer) -> None:
    LlamaGrammar(tokenizer, AnswerFormat("regex", "[a-z]{4}"))
    limits = Path(f"/proc/{module._guest.pid}/limits").read_text()
    most, *_ = re.search(r"Max data size +(\d+)", limits).groups()  # type: ignore[union-attr]
    assert int(most) == FORM_BYTES + tokenizer.vocab_size * FORM_TOKEN_BYTES


def watched(call: str, before: Callable[[], None]) -> type:
    """llguidance's class, with something done before one of its calls."""

    class Watched:
        def __init__(self, *arguments: Any, **named: Any) -> None:
            self._matcher = LLMatcher(*arguments, **named)

        def __getattr__(self, name: str) -> Any:
            if name == call:
                before()
            return getattr(self._matcher, name)

    return Watched


@pytest.mark.parametrize("call", ["compute_ff_tokens", "consume_token"])
def test_a_token_that_keeps_the_interpreter_is_refused(
    tokenizer: VocabularyTokenizer, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In these calls no other thread of the engine's process would go on."""
    document = grammar_guest._document("grammar", 'root ::= [a-z]+ "x"')
    engine = module._engine_of(tokenizer)
    assert grammar_guest._tried(document, engine) == ""

    def slow() -> None:
        end_s = time.thread_time() + 2 * grammar_guest._SLOW_HELD_S
        while time.thread_time() < end_s:
            pass

    monkeypatch.setattr("llguidance.LLMatcher", watched(call, slow))
    assert "a token of an answer takes" in grammar_guest._tried(document, engine)


def test_steps_leave_a_core_to_a_form_that_is_tried_and_compiled(
    tokenizer: VocabularyTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores, ask = list[int](), module._guest.ask

    def asked(question: Any) -> Any:
        cores.append(TEAMS._beside)
        return ask(question)

    monkeypatch.setattr(module._guest, "ask", asked)
    seen = watched("compute_bitmask", lambda: cores.append(TEAMS._beside))
    monkeypatch.setattr("llguidance.LLMatcher", seen)
    LlamaGrammar(tokenizer, AnswerFormat("regex", "[a-z]{5}"))
    assert cores[0] == cores[-1] == 1 and TEAMS._beside == 0


def test_few_forms_are_kept(tokenizer: VocabularyTokenizer) -> None:
    for place in range(20):
        LlamaGrammar(tokenizer, AnswerFormat("regex", f"a{{{place}}}"))
    assert len(module._tried) == module._MOST_TRIED


def test_a_schema_waits_for_no_grammar(tokenizer: VocabularyTokenizer) -> None:
    with module._COMPILING["grammar"]:
        LlamaGrammar(tokenizer, AnswerFormat("json_schema", '{"const": 1}'))


# ---------------------------------------------------------------------------- made ones

_NAMES = st.sampled_from(["root", "a", "b", "c"])
_TERMINALS = st.sampled_from(['"x"', "[a-z]", '"é"', ".", '"<|im_end|>"', '[^"]', '""'])
_COUNTS = st.sampled_from(["", "", "*", "+", "?", "{3}", "{0,99}", "{2,3000}", "{60000}"])


def _joined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    several = st.lists(inner, min_size=1, max_size=5)
    made = st.tuples(several, st.sampled_from([" ", " | "]), _COUNTS)
    return made.map(lambda parts: f"({parts[1].join(parts[0])}){parts[2]}")


_RULES = st.recursive(
    st.tuples(st.one_of(_NAMES, _TERMINALS), _COUNTS).map("".join), _joined, max_leaves=10
)
_GRAMMARS = st.tuples(_RULES, _RULES, _RULES, _RULES).map(
    lambda rules: "\n".join(f"{name} ::= {rule}" for name, rule in zip("rabc", rules, strict=True))
)


@pytest.mark.slow
def test_whatever_is_put_together_is_compiled_or_a_sentence(tokenizer: VocabularyTokenizer) -> None:
    before = peak_resident_bytes()

    @settings(max_examples=60 * int(os.environ.get("EDGESPEC_FUZZ", "1")))
    @given(_GRAMMARS)
    def check(text: str) -> None:
        try:
            LlamaGrammar(tokenizer, AnswerFormat("grammar", text.replace("r ::=", "root ::=")))
        except UnsupportedError as problem:
            assert "\n" not in str(problem) and len(str(problem)) > 20

    check()
    assert peak_resident_bytes() - before < _MOST_GROWN
