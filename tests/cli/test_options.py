"""Options that commands share: what they become, and the words of other programs for them."""

from __future__ import annotations

import json

import pytest
from command_line import Command

from edgespec.cli.options import DEFAULTS, PlanOptionLists


def test_options_given_several_times_are_multiplied() -> None:
    lists = PlanOptionLists.of(
        {"drafter": ["none", "suffix,recycling"], "kv_type": ["f16", "q8_0"], "threads": [1, 2],
         "context_size": [512], "budget": None, "exact": True}
    )  # fmt: skip
    assert lists.drafters == ("none", "suffix,recycling")
    assert [label for label, _ in lists.each] == [
        "--kv-type f16 --threads 1", "--kv-type f16 --threads 2",
        "--kv-type q8_0 --threads 1", "--kv-type q8_0 --threads 2",
    ]  # fmt: skip
    assert [one.given for _, one in lists.each] == [
        {"kv_type": kv_type, "threads": threads, "context_size": 512, "exact": True}
        for kv_type in ("f16", "q8_0")
        for threads in (1, 2)
    ]


def test_no_option_is_one_setting_without_a_name() -> None:
    assert PlanOptionLists.of({"drafter": [], "kv_type": None, "exact": False}).each == (
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
