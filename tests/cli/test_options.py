"""Options that commands share: what they become, and the words of other programs for them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer
from command_line import Command

from edgespec.cli.main import application
from edgespec.cli.options import DEFAULTS, Group, SamplingOptions, SettingsInTurns


def test_one_option_given_twice_is_two_loads_beside_any_number_of_drafters() -> None:
    settings = SettingsInTurns.of(
        {"drafter": ["none", "suffix,recycling"], "kv_type": ["f16", "q8_0"], "threads": [1],
         "context_size": [512], "budget": None, "exact": True}
    )  # fmt: skip
    assert settings.drafters == ("none", "suffix,recycling")
    assert [label for label, _ in settings.each] == ["--kv-type f16", "--kv-type q8_0"]
    assert [one.given for _, one in settings.each] == [
        {"kv_type": kv_type, "threads": 1, "context_size": 512, "exact": True}
        for kv_type in ("f16", "q8_0")
    ]


@pytest.mark.parametrize(
    "values", [{"threads": [1, 2, 3]}, {"threads": [1, 2], "kv_type": ["f16", "q8_0"]}]
)
def test_more_than_two_loads_are_misuse(values: dict[str, Any]) -> None:
    with pytest.raises(
        typer.BadParameter, match="one option besides --drafter may be given twice, no more"
    ):
        SettingsInTurns.of({"drafter": [], **values})


def test_no_option_is_one_setting_without_a_name() -> None:
    assert SettingsInTurns.of({"drafter": [], "kv_type": None, "exact": False}).each == (
        ("", DEFAULTS),
    )


@pytest.mark.parametrize(
    ("alias", "option"),
    [
        ("-m", "--model"),
        ("-hf", "--hf-repo"),
        ("-p", "--prompt"),
        ("--ctx-size", "--ctx"),
        ("--n-gpu-layers", "--gpu-layers"),
        ("-md", "--draft-model"),
        ("-ctk", "--cache-type-k"),
        ("-ctv", "--cache-type-v"),
        ("--temp", "--temperature"),
        ("--n-predict", "--max-tokens"),
        ("-r", "--stop"),
    ],
)
def test_words_of_llama_cpp_are_known(say: Command, alias: str, option: str) -> None:
    _, out, _ = say("run", "--help")
    names = [line.split("<")[0].replace(",", "").split() for line in out.splitlines()]
    assert any(alias in line and option in line for line in names)


@pytest.mark.model
@pytest.mark.parametrize(
    "arguments",
    [("-ctk", "q9"), ("-ctk", "q8_0", "-ctv", "q9"), ("--kv-type", "q8_0/q4_0")],
)
def test_cache_types_that_cannot_be_are_misuse(say: Command, arguments: tuple[str, ...]) -> None:
    assert say("plan", *arguments)[0] == 2


@pytest.mark.model
@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (("-ctk", "q8_0", "-ctv", "q8_0"), "q8_0"),
        (("-ctk", "q8_0"), "q8_0/f16"),
        (("--kv-type", "q8_0", "--cache-type-v", "q5_0"), "q8_0/q5_0"),
    ],
)
def test_llama_cpps_cache_types_are_ours(
    say: Command, arguments: tuple[str, ...], kind: str
) -> None:
    _, out, _ = say("plan", *arguments, "--json")
    assert json.loads(out)["plan"]["kv_type"]["value"] == kind


@pytest.mark.model
@pytest.mark.parametrize("word", ["none", "plain"])
def test_plain_and_none_are_one_drafter(say: Command, word: str) -> None:
    _, out, _ = say("plan", "--drafter", word, "--json")
    assert json.loads(out)["plan"]["drafter"]["value"] == "none"


@pytest.mark.model
@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize(
    "given", [("-c", "0"), ("-c", "-1"), ("-t", "0"), ("-t", "-1"), ("-n", "-1")]
)
def test_what_llama_cpp_leaves_to_itself_is_left_open(say: Command, given: tuple[str, str]) -> None:
    asked, usual = (json.loads(say("plan", *more, "--json").out) for more in (given, ()))
    for name in ("context_size", "kv_type", "threads"):
        assert asked["plan"][name] == usual["plan"][name]


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [({"top_k": -1}, "top_k", 0), ({"seed": -1}, "seed", None), ({"top_k": 40}, "top_k", 40)],
)
def test_sampling_that_llama_cpp_leaves_to_itself(
    given: dict[str, int], field: str, value: int | None
) -> None:
    assert getattr(SamplingOptions.of(given).params(), field) == value


@pytest.mark.model
def test_an_answer_without_an_end_fills_the_context(command: Command) -> None:
    asked = ("Count: one two three", "--raw", "-c", "64", "-n", "-1", "--logit-bias", "2=-inf")
    found = command("run", "--prompt", *asked, "--json").document
    assert found["finish_reason"] == "context_full"
    assert found["prompt_tokens"] + found["generated_tokens"] == 64


# -- options that llama.cpp alone has ----------------------------------------------------------


@pytest.mark.model
def test_harmless_options_of_llama_cpp_are_taken_with_a_note(command: Command) -> None:
    given = ("--jinja", "-fa", "on", "-b", "512", "--no-mmap", "-cnv", "-np", "2", "--mlock")
    done = command("plan", *given)
    assert done.status == 0
    assert set(done.err.splitlines()) == {
        f"{name} is llama.cpp's and changes nothing here" for name in given if name[0] == "-"
    }


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (("-fa", "maybe"), "-fa is on, off, auto"),
        (("-fx", "on"), "No such option: -fx"),
        (("-ngld", "0"), "No such option: -ngld"),
        (("-sm", "none"), "No such option: -sm"),
        (("-cnvx",), "No such option: -cnvx"),
        (("-hffx", "F"), "No such option: -hffx"),
        (("-hff", "F"), "'-hff' / '--hf-file': edgespec has none: name the file's type"),
        (("--lora-scaled", "F"), "'--lora-scaled': edgespec has none: use --lora FILE=SCALE"),
        (("--ignore-eos",), "No such option: --ignore-eos"),
        (("-c", "512", "-x"), "No such option: -x"),
    ],
)
def test_an_option_that_is_missing_is_named_whole(
    command: Command, given: tuple[str, ...], named: str
) -> None:
    """Letter by letter -fa was --file a, -sm --seed m, and -hff the help."""
    done = command("run", "-p", "hi", *given)
    assert (done.status, done.out) == (2, "") and named in done.err


def test_values_may_follow_a_letter(command: Command) -> None:
    assert "the prompt is empty" in command("run", "-c512", "-n5", "-vv").err
    assert "cannot read no.txt" in command("run", "-f./no.txt").err


def test_options_of_llama_cpp_are_in_no_help(command: Command) -> None:
    assert "--jinja" not in command("run", "--help").out


def test_groups_are_read_by_python_3_10() -> None:
    """Which refuses a `ClassVar` that does not say of what: no command started with it."""
    application()  # all commands

    def below(group: type[Group]) -> list[type[Group]]:
        return [group, *(one for other in group.__subclasses__() for one in below(other))]

    groups = below(Group)
    assert len(groups) > 5
    assert not [one for one in groups if "ClassVar" in one.__annotations__.values()]
