"""Options of answers: what they become, and which values are misuse."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import typer

from edgespec.cli.options import FormatOptions, SamplingOptions
from edgespec.errors import UnsupportedError
from edgespec.sampling.params import SamplingParams


def test_without_options_all_is_as_in_python() -> None:
    assert SamplingOptions().params() == SamplingParams()


def test_every_setting_of_a_sampler_has_an_option() -> None:
    names = {one.name for one in SamplingOptions.parameters()}
    assert {field.name for field in fields(SamplingParams)} == names
    found = SamplingOptions({"repetition_penalty": 1.1, "penalty_last_n": 32}).params()
    assert (found.repetition_penalty, found.penalty_last_n) == (1.1, 32)


def test_options_have_llama_cpps_names_too() -> None:
    known = SamplingOptions.known()
    assert known["repetition_penalty"].names("")[0] == "--repeat-penalty"
    assert known["mirostat_tau"].names("")[0] == "--mirostat-ent"


@pytest.mark.parametrize(
    ("text", "value"), [("exact", 0.0), ("typical", 0.09), ("typical=0.2", 0.2)]
)
def test_drafts_may_change_an_answer_where_it_is_said(text: str, value: float) -> None:
    assert SamplingOptions({"accept_typical": text}).params().accept_typical == value


def test_samplers_may_have_any_of_their_names() -> None:
    found = SamplingOptions({"samplers": "Temp; top-k,typical;;nucleus"}).params()
    assert found.samplers == ("temperature", "top_k", "typ_p", "top_p")
    assert SamplingOptions({"samplers": ""}).params().samplers == ()


def test_lists() -> None:
    found = SamplingOptions(
        {"logit_bias": ["7=-5", "2=-inf"], "dry_sequence_breakers": ["none", "."]}
    )
    assert found.params().logit_bias == ((2, float("-inf")), (7, -5.0))
    assert found.params().dry_sequence_breakers == (".",)


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions({"top_p": 2.0}),
        SamplingOptions({"samplers": "top_k;magic"}),
        SamplingOptions({"logit_bias": ["7"]}),
        SamplingOptions({"logit_bias": ["x=1"]}),
        SamplingOptions({"accept_typical": "typical=much"}),
        SamplingOptions({"accept_typical": "nearly"}),
    ],
)
def test_values_that_nobody_could_honour_are_misuse(options: SamplingOptions) -> None:
    with pytest.raises(typer.BadParameter):
        options.params()


def test_a_form_is_a_text_or_a_file(tmp_path: Path) -> None:
    grammar = 'root ::= "a"'
    path = tmp_path / "grammar.gbnf"
    path.write_text(grammar)
    given = [
        FormatOptions(grammar=grammar),
        FormatOptions(grammar=str(path)),
        FormatOptions(grammar=f"@{path}"),
        FormatOptions(grammar_file=path),
    ]
    assert [one.texts() for one in given] == [
        {"grammar": grammar, "json_schema": None, "regex": None}
    ] * 4
    lark = "start: /a/"
    given = [FormatOptions(json_schema="{}"), FormatOptions(grammar=lark), FormatOptions(regex="a")]
    assert [{k: v for k, v in one.texts().items() if v is not None} for one in given] == [
        {"json_schema": "{}"},
        {"grammar": lark},
        {"regex": "a"},
    ]
    with pytest.raises(typer.BadParameter, match="once"):
        FormatOptions(regex="a", json_schema="{}").texts()
    with pytest.raises(typer.BadParameter, match="once"):
        FormatOptions(grammar=grammar, json_schema="{}").texts()
    with pytest.raises(UnsupportedError, match="cannot read"):
        FormatOptions(json_schema=str(tmp_path / "none.json")).texts()


def test_forms_of_other_programs_are_read_and_other_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "form"
    path.write_text('root ::= "é"\r\n', encoding="utf-16")
    assert FormatOptions(grammar_file=path).texts()["grammar"] == 'root ::= "é"\n'
    path.write_bytes(b"\xef\xbb\xbf{}\r\n")
    assert FormatOptions(json_schema=f"@{path}").texts()["json_schema"] == "{}\n"
    path.write_bytes(b'{"title": "\xe9"}')
    with pytest.raises(UnsupportedError, match="form is not UTF-8 text: byte 11 is 0xe9"):
        FormatOptions(json_schema_file=path).texts()
