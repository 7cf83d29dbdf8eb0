"""Settings of a sampler: their ranges, and what they are equal to."""

from __future__ import annotations

import math
from typing import Any

import pytest

from edgespec.errors import UnsupportedError
from edgespec.sampling.params import SamplingParams


@pytest.mark.parametrize(
    ("settings_of_case", "message"),
    [
        ({"temperature": -0.5}, "temperature must be 0 or more, got -0.5"),
        ({"temperature": math.nan}, "got nan"),
        ({"temperature": math.inf}, "got inf"),
        ({"top_k": -1}, "top_k must be 0 or more, got -1"),
        ({"top_p": 1.5}, "top_p must be from 0 to 1, got 1.5"),
        ({"top_p": math.nan}, "top_p .* nan"),
        ({"min_p": -0.1}, "min_p must be from 0 to 1, got -0.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be from 1e-6 to 1e6, got 0.0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty .* inf"),
        ({"presence_penalty": math.nan}, "presence_penalty must be from -1e6 to 1e6, got nan"),
        ({"frequency_penalty": math.inf}, "frequency_penalty must be from -1e6 to 1e6, got inf"),
        ({"penalty_last_n": -2}, "penalty_last_n must be -1 or more, got -2"),
        ({"logit_bias": {3: math.nan}}, "the logit bias of token 3 .* nan"),
        ({"logit_bias": {3: math.inf}}, "the logit bias of token 3 .* inf"),
        ({"logit_bias": {3: -1e300}}, "the logit bias of token 3 .* -1e[+]300"),
        ({"logit_bias": ((3, 1.0), (3, 2.0))}, "names token 3 twice"),
        ({"seed": -1}, "seed must be 0 or more, got -1"),
    ],
)
def test_settings_out_of_range_are_refused_with_a_hint(
    settings_of_case: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        SamplingParams(**settings_of_case)
    assert caught.value.hint


def test_settings_compare_and_hash_by_value() -> None:
    one = SamplingParams(logit_bias={7: 1, 2: -1.0})
    two = SamplingParams(logit_bias=((2, -1.0), (7, 1.0)))
    assert one == two
    assert len({one, two}) == 1
    assert one.logit_bias == ((2, -1.0), (7, 1.0))
    assert one.is_greedy and not one.uses_history
