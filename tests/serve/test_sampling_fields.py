"""How a request says tokens are picked: whose default holds, and what the words mean."""

from __future__ import annotations

import math
from typing import Any

import pytest

from edgespec.sampling.params import SamplingParams
from edgespec.serve.fields import Fields
from edgespec.serve.limits import Limits
from edgespec.serve.refusal import Refusal
from edgespec.serve.sampling_fields import (
    seed_of_choice,
    take_max_tokens,
    take_sampling,
    take_stops,
)

DEFAULTS = SamplingParams(temperature=0.7, top_k=40, seed=5, logit_bias={3: 1.0})


def taken(**values: Any) -> SamplingParams:
    fields = Fields(values)
    found = take_sampling(fields, DEFAULTS, Limits())
    fields.end()
    return found


def test_what_is_not_said_is_as_the_server_was_started() -> None:
    assert taken() == DEFAULTS
    assert taken(top_k=-1, seed=-1) == SamplingParams(temperature=0.7, logit_bias={3: 1.0})
    # 0 means the best token alone, which is what no share of the probability gives.
    assert 0.0 < taken(top_p=0).top_p < 1e-6


def test_a_penalty_has_two_names() -> None:
    assert taken(repeat_penalty=1.5) == taken(repetition_penalty=1.5)
    with pytest.raises(Refusal, match=r"^repeat_penalty is not supported: repet"):
        taken(repeat_penalty=1.5, repetition_penalty=1.2)


def test_biases_are_an_object_or_pairs() -> None:
    """An empty one takes those of the server away; false in a pair is never."""
    assert taken(logit_bias={"7": -5, "2": 1}).logit_bias == ((2, 1.0), (7, -5.0))
    assert taken(logit_bias=[[7, -5], [2, False]]).logit_bias == ((2, -math.inf), (7, -5.0))
    assert taken(logit_bias={}).logit_bias == ()


@pytest.mark.parametrize("bias", [{"seven": 1}, {"7": True}, {"7": 101}, {"-7": 1}, [[7]], "7"])
def test_biases_that_cannot_be(bias: Any) -> None:
    with pytest.raises(Refusal, match=r"^logit_bias must "):
        taken(logit_bias=bias)


def test_each_answer_of_several_has_a_seed_of_its_own() -> None:
    assert [seed_of_choice(DEFAULTS, index).seed for index in range(3)] == [5, 6, 7]
    assert seed_of_choice(SamplingParams(), 2).seed is None  # each is drawn anyway


def test_the_first_name_of_a_length_counts_and_all_are_checked() -> None:
    names = ("max_completion_tokens", "max_tokens")
    both = Fields({"max_tokens": 9, "max_completion_tokens": 4})
    assert take_max_tokens(both, 16, 2048, *names) == 4
    both.end()
    assert take_max_tokens(Fields({}), 16, 2048, *names) == 16
    assert take_max_tokens(Fields({}), None, 2048, *names) == 2048
    assert take_max_tokens(Fields({"max_tokens": -1}), 16, 2048, *names) == 2048
    with pytest.raises(Refusal, match=r"^max_tokens must be at least 1$"):
        take_max_tokens(Fields({"max_tokens": 0, "max_completion_tokens": 4}), 16, 2048, *names)


def test_stops_are_one_text_or_some() -> None:
    limits = Limits(stops=2, stop_chars=3)
    assert take_stops(Fields({"stop": "end"}), limits) == ("end",)
    assert take_stops(Fields({"stop": ["a", ""]}), limits) == ("a",)
    for stop in (["a", "b", "c"], "long", ["a", 1], {"a": 1}):
        with pytest.raises(Refusal, match=r"^stop "):
            take_stops(Fields({"stop": stop}), limits)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (["top-k", "typical_p", "temp", "infill"], ("top_k", "typ_p", "temperature")),
        ("kpt", ("top_k", "top_p", "temperature")),
        ("top_k;temperature", ("top_k", "temperature")),
        ([], ()),
    ],
)
def test_samplers_have_llama_cpps_other_names(given: object, names: tuple[str, ...]) -> None:
    assert taken(samplers=given).samplers == names
