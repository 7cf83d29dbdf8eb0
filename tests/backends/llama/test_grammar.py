"""What answers of a form may be: what is written, what is refused, and what that takes."""

from __future__ import annotations

import itertools
import json
import re
import time
import tracemalloc
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import edgespec
from edgespec.backends.base import AnswerFormat
from edgespec.backends.llama import json_schemas
from edgespec.backends.llama.grammar import LlamaGrammar
from edgespec.backends.llama.json_schemas import closed_schema
from edgespec.backends.llama.tokenizer import VocabularyTokenizer
from edgespec.errors import UnsupportedError
from edgespec.memory.bytes.footprint import (
    GRAMMAR_STATE_BYTES,
    GRAMMAR_TOKEN_BYTES,
    SAMPLING_TOKEN_BYTES,
)
from edgespec.memory.device.track import resident_bytes
from edgespec.models.embedded import embedded_model
from edgespec.sampling.params import SamplingParams
from edgespec.sampling.sampling import ConstrainedSampler, Sampler

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[VocabularyTokenizer]:
    found = VocabularyTokenizer(embedded_model())
    yield found
    found.close()


def made(
    tokenizer: VocabularyTokenizer,
    form: Any,
    kind: str = "json_schema",
    tags: tuple[str, str] | None = None,
) -> LlamaGrammar:
    text = form if isinstance(form, str) else json.dumps(form)
    return LlamaGrammar(tokenizer, AnswerFormat(kind, text, tags))


def takes(tokenizer: VocabularyTokenizer, grammar: LlamaGrammar, text: str) -> bool:
    """Whether a whole answer may be this text, whose tokens may be cut in any way."""
    left, row = text.encode(), np.zeros(tokenizer.vocab_size, np.float32)
    tokens, ends = _tokens_of(tokenizer)
    while left:
        masked = grammar.masked(row)
        beginnings = (left[:size] for size in range(min(len(left), 64), 0, -1))
        fit = [one for part in beginnings for one in tokens.get(part, ()) if masked[one] == 0.0]
        if not fit:
            return False
        assert grammar.allows(fit[0])
        grammar.accept(fit[0])
        left = left[len(tokenizer.token_bytes(fit[0])) :]
    return any(map(grammar.allows, ends))


@cache
def _tokens_of(tokenizer: VocabularyTokenizer) -> tuple[dict[bytes, list[int]], list[int]]:
    """Tokens by their bytes, and those that end an answer."""
    found: dict[bytes, list[int]] = {}
    for token, text in enumerate(tokenizer.all_bytes()):
        found.setdefault(text, []).append(token)
    return found, [token for token in range(tokenizer.vocab_size) if tokenizer.is_end(token)]


# -- what may come next ------------------------------------------------------------------------


def test_what_may_come_next(tokenizer: VocabularyTokenizer) -> None:
    grammar = made(tokenizer, 'root ::= "yes, it is" | "yes, it was"', "grammar")
    forced, num_sure = grammar.forced()
    assert b"".join(map(tokenizer.token_bytes, forced)) == b"yes, it "
    assert 0 < num_sure < len(forced), "its last space may be the beginning of a longer token"
    row = np.random.default_rng(1).normal(size=tokenizer.vocab_size).astype(np.float32)
    for token in tokenizer.encode("yes, it is", add_special=False):
        masked = grammar.masked(row)
        allowed = np.flatnonzero(np.isfinite(masked))
        assert all(grammar.allows(int(one)) for one in allowed)
        assert (masked[allowed] == row[allowed]).all()
        if num_sure:
            assert list(allowed) == [token], "forced text has one cut"
            num_sure -= 1
        others = np.random.default_rng(token).integers(0, len(row), 500)
        assert not any(grammar.allows(int(one)) for one in others if one not in allowed)
        grammar.accept(token)
    ends = np.flatnonzero(np.isfinite(grammar.masked(row)))
    assert len(ends) and all(tokenizer.is_end(int(token)) for token in ends)
    grammar.accept(int(ends[0]))
    assert grammar.allows(int(ends[0])) and not grammar.allows(70), "drafts may go on behind an end"
    assert np.isfinite(grammar.masked(row)).sum() == len(ends) and grammar.forced() == ([], 0)


@pytest.mark.parametrize("form", [{"const": 'red "herring"'}, {"enum": ["blue whales"]}])
def test_what_is_forced_within_strings_is_told(
    tokenizer: VocabularyTokenizer, form: dict[str, Any]
) -> None:
    forced, num_sure = made(tokenizer, form).forced()
    written = b"".join(map(tokenizer.token_bytes, forced)).decode()
    assert num_sure > 3 and json.loads(written) == form.get("const", "blue whales")


WRITTEN = (
    ({"const": 'a"\\\n\x00é😀'}, ['"a\\"\\\\\\n\\u0000é😀"'], ['"a"']),
    ({"type": ["string", "null"], "enum": ["a", None]}, ['"a"', "null"], ['"b"']),
    ({"type": ["string", "null"], "maxLength": 2}, ['"ab"', "null"], ['"abc"']),
    ({"pattern": "^(red|green|blue)$", "type": "string"}, ['"red"'], ['"red', '"reds"']),
    ({"pattern": "^a]$", "type": "string"}, ['"a]"'], ['"a"']),
    ({"pattern": "^.{1,3}$", "type": "string"}, ['"a\\"b"'], ['"a"b"', '"a\nb"']),
    ({"type": "integer", "minimum": 3, "maximum": 12}, ["3", "12"], ["2", "13", "3.5"]),
    ({"type": "number", "exclusiveMinimum": 0.5}, ["0.51", "7"], ["0.5", "-1"]),
    ({"type": "integer", "multipleOf": 25}, ["50", "0"], ["30"]),
    ({"type": "array", "prefixItems": [{"const": 1}], "items": False}, ["[1]"], ["[1, 2]"]),
    ({"type": "array", "minItems": 2, "maxItems": 3}, ["[1, {}]"], ["[1]", "[1,2]"]),
    ({"type": "string", "minLength": 1.0, "maxLength": 2.0}, ['"ab"'], ['""', '"abc"']),
    ({"type": "object"}, ["{}", '{"a": {"b": [1, 2]}}'], ["[]", '{ "a": 1}', '{"a":1}']),
    (True, ["1", '{"a": null}'], ["nul"]),
    ({"$ref": "#/$defs/value", "$defs": {"value": {"const": 1}}}, ["1"], ["2"]),
    (
        {"$ref": "#/$defs/n", "$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}}}}},
        ['{"n": {"n": {}}}'],
        ['{"m": 1}'],
    ),
    (
        {"oneOf": [{"type": "integer"}, {"type": "string"}], "description": "either"},
        ["1", '"a"'],
        ["null"],
    ),
)


@pytest.mark.parametrize(("form", "right", "wrong"), WRITTEN, ids=lambda one: str(one)[:40])
def test_documents_of_a_schema(
    tokenizer: VocabularyTokenizer, form: Any, right: list[str], wrong: list[str]
) -> None:
    assert [takes(tokenizer, made(tokenizer, form), text) for text in right] == [True] * len(right)
    assert not any(takes(tokenizer, made(tokenizer, form), text) for text in wrong)


def test_strings_have_no_raw_control_characters(tokenizer: VocabularyTokenizer) -> None:
    grammar = made(tokenizer, {"type": "string"})
    for token in tokenizer.encode('"a', add_special=False):
        grammar.accept(token)
    assert not any(grammar.allows(t) for t in tokenizer.encode("\n", add_special=False))


@pytest.mark.parametrize(
    ("kind", "text", "right", "wrong"),
    [
        ("regex", r"[a-z]+/\d{2}", "abc/12", "abc/1"),
        ("regex", r"\x{22}\x{5c}\x{1f600}", '"\\😀', "x"),
        ("grammar", 'root ::= "\\u0041\\x42" [\\u0043-\\u0045]', "ABD", "ABF"),
        ("grammar", 'root ::= "a" . "b"', "a\nb", "ab"),
        ("grammar", 'root ::= "a.b" [.]', "a.b.", "a.bc"),
        ("grammar", 'root ::= item ("," item)*\nitem ::= [0-9]{2}', "12,34", "1"),
        ("grammar", "start: NUMBER /[a-c]/\nNUMBER: /[0-9]+/", "12b", "b"),
    ],
)
def test_expressions_and_grammars(
    tokenizer: VocabularyTokenizer, kind: str, text: str, right: str, wrong: str
) -> None:
    assert takes(tokenizer, made(tokenizer, text, kind), right)
    assert not takes(tokenizer, made(tokenizer, text, kind), wrong)


TOKENS = [
    ('root ::= <|im_start|> "a"', [[1, "a"]], [["a"], [1], [1, 1, "a"]]),
    ('root ::= "a" <[1]> | "<[0]>" [<[0>]* # <[0]>', [["a", 1], ["<[0]>0>"]], [["a"], [0]]),
    ("root ::= text* <|im_start|>\ntext ::= !<[1]>", [["ab", 1], [3, 1], [1]], [["ab"], [1, 1]]),
    ('root ::= ("a" <|im_start|>){2}', [["a", 1, "a", 1]], [["a", 1]]),
    ('root ::= "a" <|im_end|>', [["a"]], [[], ["b"]]),  # an answer ends where its text may end
    ("root ::= <[49151]>", [[49151]], [[49150]]),
]


@pytest.mark.model
@pytest.mark.parametrize(("text", "taken", "refused"), TOKENS)
def test_a_grammar_may_name_tokens(
    tokenizer: VocabularyTokenizer, text: str, taken: list[Any], refused: list[Any]
) -> None:
    """By their text or their id, as llama.cpp's grammars do; the quoted ones are texts."""
    end = next(one for one in range(tokenizer.vocab_size) if tokenizer.is_end(one))

    def fits(parts: list[int | str]) -> bool:
        grammar = made(tokenizer, text, "grammar")
        for part in parts:
            ids = tokenizer.encode(part, add_special=False) if isinstance(part, str) else [part]
            for token in ids:
                if not grammar.allows(token):
                    return False
                grammar.accept(token)
        return grammar.allows(end)

    assert all(map(fits, taken)) and not any(map(fits, refused))


@pytest.mark.model
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("root ::= <no such token>", "names <no such token>, which is"),
        ("root ::= <[999999999]>", "cannot be used"),
        ('start ::= "a"', "No 'root' rule found"),
        ('# root ::= "b"\nnext ::= "a"', "No 'root' rule found"),
    ],
)
def test_a_grammar_without_its_root_or_its_tokens_says_so(
    tokenizer: VocabularyTokenizer, text: str, words: str
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        made(tokenizer, text, "grammar")
    assert words in str(caught.value)


@pytest.mark.parametrize("kind", ["json_schema", "regex", "grammar"])
def test_a_form_begins_behind_a_thought(tokenizer: VocabularyTokenizer, kind: str) -> None:
    form = {"json_schema": '{"const": "yes"}', "regex": '"yes"', "grammar": 'root ::= "\\"yes\\""'}

    def fits(text: str, opening: str) -> bool:
        return takes(tokenizer, made(tokenizer, form[kind], kind, (opening, "</think>")), text)

    assert fits('Let me {think}.\n</think>\n\n"yes"', "")
    assert fits('<think>\nAny </thing> é</think>"yes"', "<think>")
    assert fits('"yes"', "<think>"), "a model may go without a thought where none has begun"
    assert not fits('"yes"', "")
    assert not fits('Hm.</think>\n\n"no"', "")
    assert not fits("<think>\nAny", "<think>"), "an answer does not end within a thought"


def test_special_tokens_close_a_thought(tokenizer: VocabularyTokenizer) -> None:
    """As models have them whose tags are control tokens: the text of their names is no end."""
    [tag] = tokenizer.encode("<|im_start|>", add_special=False)
    grammar = made(tokenizer, {"const": 1}, "json_schema", ("", "<|im_start|>"))
    for token in tokenizer.encode("Hm.", add_special=False):
        grammar.accept(token)
    assert grammar.allows(tag)
    grammar.accept(tag)
    assert not grammar.allows(tag) and takes(tokenizer, grammar, "1")


def test_tags_of_several_tokens_close_a_thought(tokenizer: VocabularyTokenizer) -> None:
    """As gpt-oss has them: the answer begins behind the header of its channel."""
    opening, closing = "<|im_start|>analysis<|im_start|>", "<file_sep><|im_start|>final<|im_start|>"
    for text, fits in (
        (f"{opening}Hm.{closing}1", True),
        ("1", True),
        (f"{opening}Hm.<file_sep>1", False),
        (f"{opening}Hm.1", False),
    ):
        grammar = made(tokenizer, {"const": 1}, "json_schema", (opening, closing))
        tokens = [*tokenizer.encode(text, add_special=False), tokenizer.encode("<|im_end|>")[0]]
        while tokens and grammar.allows(tokens[0]):
            grammar.accept(tokens.pop(0))
        assert (not tokens) is fits, text


@pytest.mark.parametrize("marker", ["<|im_start|>", "<tool_call>"])
@pytest.mark.parametrize("tags", [None, ("<think>", "</think>"), ("", "</think>")])
def test_an_answer_may_be_of_another_kind_behind_a_marker(
    tokenizer: VocabularyTokenizer, marker: str, tags: tuple[str, str] | None
) -> None:
    """As a tool call is, whose text is free, control tokens included."""
    wanted = AnswerFormat("json_schema", '{"const": 1}', tags, marker)
    [end] = tokenizer.encode("<|im_end|>", add_special=False)
    for text, fits in (
        ("1", True),
        (f"{marker}weather<file_sep>" + '{"a": "b"}' * 300, True),
        ("weather", False),
        (f"1{marker}", False),
    ):
        grammar = LlamaGrammar(tokenizer, wanted)
        thought = "" if tags is None else f"{tags[0]}Hm.</think>\n\n"
        tokens = [*tokenizer.encode(thought + text, add_special=False), end]
        while tokens and grammar.allows(tokens[0]):
            grammar.accept(tokens.pop(0))
        assert (not tokens) is fits, text


# -- objects are closed ------------------------------------------------------------------------

A, B = {"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "integer"}}}
BOTH = {"allOf": [{"properties": {"o": A}}, {"properties": {"o": B}}]}


@pytest.mark.parametrize(
    ("schema", "closed", "open_"),
    [
        (A, ['{"a": 1}', "{}"], ['{"b": 1}', '{"a": 1, "c": 2}']),
        ({"properties": {}}, ["{}"], ['{"a": 1}']),
        ({"properties": {"o": A}}, ['{"o": {"a": 1}}'], ['{"o": {"b": 1}}']),
        ({"items": A}, ['[{"a": 1}]'], ['[{"b": 1}]']),
        ({**A, "additionalProperties": True}, ['{"a": 1, "c": 2}'], []),
        ({**A, "patternProperties": {"^x": {}}}, ['{"a": 1, "x": 2}'], []),
        ({"type": "object", "required": ["z"]}, ['{"z": 1, "y": 2}'], []),
        ({**A, "required": ["z"]}, ['{"a": 1, "z": 2}'], ['{"z": 2, "y": 1}']),
        ({"allOf": [A, B]}, ['{"a": 1, "b": 2}'], ['{"a": 1, "c": 2}']),
        ({**A, "anyOf": [B, {"type": "object"}]}, ['{"a": 1, "b": 2}'], ['{"c": 2}']),
        ({"anyOf": [A, B]}, ['{"a": 1}', '{"b": 1}'], ['{"a": 1, "b": 2}']),
        ({"$ref": "#/$defs/a", "$defs": {"a": A}}, ['{"a": 1}'], ['{"b": 1}']),
        (
            {"allOf": [{"$ref": "#/$defs/a"}, B], "$defs": {"a": A}},
            ['{"a": 1, "b": 2}'],
            ['{"a": 1, "c": 2}'],
        ),
        (BOTH, ['{"o": {"a": 1, "b": 2}}'], []),
        ({"const": {"properties": {}}}, ['{"properties": {}}'], []),
        ({"properties": {"format": {"format": "int32"}}}, ['{"format": 1}'], ['{"x": 1}']),
    ],
    ids=lambda one: str(one)[:60],
)  # fmt: skip
def test_objects_are_closed_unless_a_schema_says_otherwise(
    tokenizer: VocabularyTokenizer, schema: Any, closed: list[str], open_: list[str]
) -> None:
    for text in closed:
        assert takes(tokenizer, made(tokenizer, schema), text), text
    for text in open_:
        assert not takes(tokenizer, made(tokenizer, schema), text), text


def test_what_a_schema_was_is_not_looked_at_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """References to one list of branches, from everywhere: minutes, were it not bounded."""
    monkeypatch.setattr(json_schemas, "_MOST_STEPS", json_schemas._MOST_STEPS // 10)
    branches = [{"properties": {f"p{i}": True}} for i in range(2000)]
    schema = {
        "properties": {f"q{i}": {"type": "object", "$ref": "#/$defs/big"} for i in range(2000)},
        "$defs": {"big": {"anyOf": branches}},
    }
    with pytest.raises(UnsupportedError, match="refer to each other too often"):
        closed_schema(json.dumps(schema))


CAT = {"properties": {"kind": {"const": "cat"}, "meows": {"type": "integer"}}, "required": ["kind"]}
DOG = {"properties": {"kind": {"enum": ["dog"]}, "barks": {"type": "number"}}, "required": ["kind"]}
PETS = {"cat": {**CAT, "type": "object"}, "dog": {**DOG, "type": "object"}}


@pytest.mark.parametrize(
    ("branches", "right"),
    [
        ([{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], '{"kind": "dog", "barks": 1.5}'),
        ([{"$ref": "#/$defs/cat"}, {"items": {"$ref": "#/$defs/cat"}, "type": "array"}], "[]"),
        ([{"type": "string"}, {"type": ["integer", "null"]}], "null"),
        ([{"enum": [1, 2]}, {"const": 3}], "3"),
        (
            [
                {"type": "object", **A, "required": ["a"]},
                {"type": "object", **B, "required": ["b"]},
            ],
            '{"b": 1}',
        ),
    ],
    ids=str,
)
def test_one_of_branches_that_differ(
    tokenizer: VocabularyTokenizer, branches: list[Any], right: str
) -> None:
    schema = {"oneOf": branches, "$defs": PETS}
    assert takes(tokenizer, made(tokenizer, schema), right)


@pytest.mark.parametrize(
    "branches",
    [
        [{"const": 1}, {"const": 1.0}],
        [{"type": "integer"}, {"type": "number"}],
        [{"type": "string", "maxLength": 5}, {"type": "string", "minLength": 2}],
        [{"required": ["a"]}, {"required": ["b"]}],
        [{"type": "object", **A}, {"type": "object", **B}],
        [{"$ref": "#/$defs/cat"}, {"type": "object", "additionalProperties": True}],
        [{"$ref": "#/$defs/cat"}, {"required": ["kind"]}],
    ],
    ids=str,
)
def test_one_of_branches_that_may_both_fit_are_refused(
    tokenizer: VocabularyTokenizer, branches: list[Any]
) -> None:
    with pytest.raises(UnsupportedError, match="oneOf"):
        made(tokenizer, {"oneOf": branches, "$defs": PETS})


# -- what is refused ---------------------------------------------------------------------------


AT_THE_ITEM = r"at properties\.a\.items\.anyOf\[1\]: "


def nested(bad: dict[str, Any]) -> str:
    """A schema with a bad one within an item of a property, and good ones around it."""
    item = {"anyOf": [{"type": "string"}, bad]}
    good = {"type": "object", "properties": {"c": {"type": "integer"}}}
    return json.dumps(
        {"type": "object", "properties": {"b": good, "a": {"type": "array", "items": item}}}
    )


REFUSED: tuple[tuple[dict[str, str], str], ...] = (
    ({"grammar": "root ::= ("}, "Expected"),
    ({"grammar": "other ::= 'x'"}, "Expected"),
    ({"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000}, "nested too deeply"),
    ({"grammar": "root ::= root"}, "no text fits it"),
    ({"grammar": 'root ::= "\\uD800"'}, "no character"),
    ({"regex": "a\ud800"}, "half a character"),
    ({"grammar": "start: missing"}, "missing"),
    ({"grammar": ""}, "empty"),
    ({"regex": "("}, "unclosed group"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"json_schema": "{"}, "line 1"),
    ({"json_schema": "false"}, "an object"),
    ({"json_schema": '{"type": "nothing"}'}, "nothing"),
    ({"json_schema": '{"uniqueItems": true, "type": "array"}'}, "uniqueItems"),
    ({"json_schema": '{"not": {"type": "array"}}'}, "not"),
    ({"json_schema": '{"oneOf": [{"minimum": 1}, {"type": "integer"}]}'}, "oneOf"),
    ({"json_schema": '{"$ref": "#"}'}, "no text fits it"),
    (
        {"json_schema": nested({"not": {}})},
        AT_THE_ITEM + "unsupported keywords not",
    ),
    ({"json_schema": nested({"type": "text"})}, AT_THE_ITEM + "Invalid type"),
    (
        {"json_schema": nested({"multipleOf": 1000003})},
        AT_THE_ITEM + "multipleOf",
    ),
    (
        {"json_schema": '{"$defs": {"x": {"not": {}}}, "items": {"$ref": "#/$defs/x"}}'},
        r"at \$defs\.x: ",
    ),
    ({"json_schema": '{"$ref": "http://localhost/x"}'}, "http://localhost/x"),
    ({"json_schema": '{"format": "regex"}'}, "regex"),
    ({"json_schema": '{"multipleOf": 1000003}'}, "1,000,003 remainders"),
    ({"json_schema": '{"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}'}, "remainders"),
    ({"json_schema": '{"description": "' + "x" * (300 << 10) + '"}'}, "are the most"),
    ({"json_schema": '{"items":' * 3000 + "{}" + "}" * 3000}, "nested too deeply"),
    ({"json_schema": "{}", "grammar": 'root ::= "x"'}, "one of"),
)


@pytest.mark.parametrize(("options", "reason"), REFUSED, ids=lambda one: str(one)[:50])
def test_what_cannot_be_used_is_refused_in_one_sentence(
    exact_engine: edgespec.Engine,
    options: dict[str, str],
    reason: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(UnsupportedError, match=reason) as caught:
        exact_engine.stream("x", max_tokens=3, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert capfd.readouterr() == ("", ""), "nothing of a schema is printed"


HOSTILE: tuple[tuple[str, Any], ...] = (
    ("json_schema", {"type": "string", "pattern": "^a]$"}),
    ("json_schema", {"type": "string", "pattern": "^(a|){1000}$"}),
    ("json_schema", {"type": "string", "pattern": "^((a|)(b|)(c|)){300}$"}),
    ("json_schema", {"type": "string", "pattern": "^(a{1000}){1000}$"}),
    ("json_schema", {"type": "string", "pattern": "^(a|b)*a(a|b){500}$"}),
    ("json_schema", {"type": "string", "maxLength": 60_000}),
    ("json_schema", {"enum": [f"value {i} {i * i}" for i in range(5000)]}),
    (
        "json_schema",
        {"allOf": [{"anyOf": [{"properties": {f"{x}{i}": {}}} for x in "ab"]} for i in range(10)]},
    ),
    ("json_schema", {"anyOf": [{"$ref": "#"}, {"items": {"$ref": "#"}}]}),
    ("json_schema", {"const": "a" * 60_000}),
    ("regex", "(a*)*" * 200 + "b{60000}"),
    ("grammar", 'root ::= ("a" root | root "b" | root root | "")*'),
)


@pytest.mark.parametrize(("kind", "form"), HOSTILE, ids=lambda one: str(one)[:40])
def test_no_form_takes_long(tokenizer: VocabularyTokenizer, kind: str, form: Any) -> None:
    """Those that never ended, or took seconds a token, with llama.cpp's; each call is measured."""
    row = np.zeros(tokenizer.vocab_size, np.float32)
    made(tokenizer, {})  # builds what all share
    began = time.thread_time()
    slowest, last = 0.0, began
    try:
        grammar = made(tokenizer, form, kind)
        for _ in range(20):
            grammar.forced()
            token = int(grammar.masked(row).argmax())
            grammar.accept(token)
            slowest, last = max(slowest, time.thread_time() - last), time.thread_time()
            if tokenizer.is_end(token):
                break
    except UnsupportedError as problem:
        assert "\n" not in str(problem)
    assert max(slowest, time.thread_time() - last) < 1.0


# -- what it takes -----------------------------------------------------------------------------


def test_a_pattern_of_beginnings_is_looked_at_once() -> None:
    """Each was followed to the end of the pattern before: minutes for 240 KB."""
    schema = {"type": "string", "pattern": "([" * 120_000}
    assert closed_schema(json.dumps(schema)) == schema


def test_a_plan_has_room_for_what_a_grammar_asks_of_the_vocabulary() -> None:
    tokenizer = VocabularyTokenizer(embedded_model())
    size = tokenizer.vocab_size
    row = np.random.default_rng(1).normal(size=size).astype(np.float32)
    before = resident_bytes()
    words = r"^(?:\S+\s+){0,49}\S+$"  # its lexer has states for words times characters
    users = 4
    grammars = [
        made(tokenizer, {"type": "string", "maxLength": 500, "pattern": words})
        for _ in range(users)
    ]
    grammar = grammars[0]
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=1)
    for _ in range(3):
        grammar.forced()
        ConstrainedSampler(Sampler(params, size, [1]), grammar).pick(row)
    for token in tokenizer.encode('"' + "It is at the end of the road. " * 6, add_special=False):
        for one in grammars:
            one.masked(row)
            one.accept(token)
    assert resident_bytes() - before <= GRAMMAR_TOKEN_BYTES * size + GRAMMAR_STATE_BYTES * users
    tracemalloc.start()
    try:
        sampler = ConstrainedSampler(Sampler(params, size, [1]), grammar)
        for _ in range(3):
            sampler.pick(row)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        tokenizer.close()
    assert peak <= SAMPLING_TOKEN_BYTES * size
    with pytest.raises(UnsupportedError, match="closed"):
        grammar.forced()  # would tokenize with a vocabulary that is gone


def test_a_vocabulary_that_cannot_be_used_is_looked_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Looking keeps the interpreter; here nothing ends an answer, as in some strangers' files."""
    looked = []
    monkeypatch.setattr(VocabularyTokenizer, "is_end", lambda *_: looked.append(1))
    tokenizer = VocabularyTokenizer(embedded_model())
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="cannot be kept to a form: its vocabulary"):
            made(tokenizer, {})
    tokenizer.close()
    assert 0 < len(looked) < 10


PIECES = st.sampled_from(
    ["a", "[a-z]", ".", r"\w", "(a|)", "(a|b|c|)", "(.*a)", "]", "}", "é", '"']
)
COUNTS = st.sampled_from(["", "*", "+", "?", "{3}", "{0,9}", "{300}", "{1000}", "{2,3000}"])
PATTERNS = st.recursive(
    st.tuples(PIECES, COUNTS).map("".join),
    lambda inner: st.tuples(st.lists(inner, min_size=1, max_size=4), COUNTS).map(
        lambda pair: f"({''.join(pair[0])}){pair[1]}"
    ),
    max_leaves=12,
)


@pytest.mark.parametrize("examples", [25, pytest.param(300, marks=pytest.mark.long)])
def test_no_pattern_takes_long(tokenizer: VocabularyTokenizer, examples: int) -> None:
    @settings(max_examples=examples)
    @given(PATTERNS)
    def check(pattern: str) -> None:
        test_no_form_takes_long(tokenizer, "json_schema", {"type": "string", "pattern": pattern})

    check()


# -- formats -----------------------------------------------------------------------------------

FORMATS = [
    ("uri-reference", ["a/b?c=d#e", "a b"], []),  # it is passed over
    ("iri", ["http://example.org/a"], ["a b", "/a"]),
    ("idn-email", ["a@example.org"], ["a", "a b@c.d"]),
    ("idn-hostname", ["example.org"], ["a b", "-a"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fit", "other"), FORMATS)
def test_formats_are_kept_to_or_passed_over(
    tokenizer: VocabularyTokenizer, name: str, fit: list[str], other: list[str]
) -> None:
    for schema in ({"format": name}, {"format": name, "pattern": "^"}):
        for text in fit:
            form = {"type": "string", **schema}
            assert takes(tokenizer, made(tokenizer, form), json.dumps(text)), text
        for text in other:
            assert not takes(tokenizer, made(tokenizer, form), json.dumps(text)), text


# -- numbers of words --------------------------------------------------------------------------


@pytest.mark.parametrize("count", ["{0,3}", "{2}", "{1,}", "*", "+", "?"])
@pytest.mark.parametrize("separator", [r"\s+", " ", "[, ]+", "-"])
@pytest.mark.parametrize("word", [r"\S+", "[a-z]+", r"\w*"])
def test_a_pattern_of_words_means_what_it_says(word: str, separator: str, count: str) -> None:
    """It is told to the library in another way, which is cheaper where the length is bounded."""
    for opening in ("(?:", "("):
        pattern = f"^{opening}{word}{separator}){count}{word}$"
        told = closed_schema(json.dumps({"type": "string", "pattern": pattern}))["pattern"]
        assert told != pattern
        for size in range(6):
            for letters in itertools.product("a ,-", repeat=size):
                text = "".join(letters)
                assert bool(re.search(pattern, text)) is bool(re.search(told, text)), text


@pytest.mark.parametrize("pattern", [r"^(?:\S+\s+){2}\S*$", r"^(?:a b){2}a+$", r"\(?:a b){2}a"])
def test_other_patterns_are_told_as_they_are(pattern: str) -> None:
    assert closed_schema(json.dumps({"pattern": pattern}))["pattern"] == pattern


def test_a_long_text_of_a_bounded_number_of_words_is_written(
    tokenizer: VocabularyTokenizer,
) -> None:
    """It ran out of states on its way."""
    schema = {"type": "string", "pattern": r"^(?:\S+\s+){0,49}\S+$", "maxLength": 500}
    grammar, row = made(tokenizer, schema), np.zeros(tokenizer.vocab_size, np.float32)
    words = " ".join(f"word{number} is" for number in range(24))
    for token in tokenizer.encode(json.dumps(f"{words} {'x' * (480 - len(words))}")):
        assert np.isfinite(grammar.masked(row)[token])
        grammar.accept(token)
