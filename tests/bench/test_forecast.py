"""Forecasts of a policy on recorded texts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from switching_cases import LARGE_TABLE, POLICIES, PROMPT, SMALL_TABLE, obvious, switching

from edgespec.bench.switch_calibration import Trace, choose, forecast, writers
from edgespec.decode.generation import LARGE, SMALL
from edgespec.memory.times import CostCurve
from edgespec.switching.engine import entropy_nats
from edgespec.switching.planning import SwitchPolicy


def traces() -> list[Trace]:
    """Texts in which the models differ where the small one is unsure."""
    random = np.random.default_rng(3)
    made = []
    for _ in range(8):
        small = random.exponential(1.0, 200)
        agrees = random.random(200) > small / 4
        made.append(Trace((0.7 * small).tolist(), small.tolist(), agrees.tolist(), 20))
    return made


CURVES = {
    LARGE: CostCurve([math.inf, *(9.0 + 0.5 * n for n in range(1, 33))]),
    SMALL: CostCurve([math.inf, *(3.0 + 0.2 * n for n in range(1, 33))]),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_forecast_runs_the_rule_itself(policy: SwitchPolicy) -> None:
    text, models = obvious(policy, 60)
    contexts = [(*PROMPT, *text[:place]) for place in range(60)]
    trace = Trace(
        [entropy_nats(LARGE_TABLE.row(c)) for c in contexts],
        [entropy_nats(SMALL_TABLE.row(c)) for c in contexts],
        [True] * 60,
    )
    said, turns = writers(policy, trace)
    assert said == models == [model for model, tokens in turns for _ in range(tokens)]
    assert tuple(turns) == switching(policy, drafts=False).generate(PROMPT, max_tokens=60).turns


def test_single_models_are_the_ends_of_every_forecast() -> None:
    large, small = (forecast(SwitchPolicy.always(m), traces(), CURVES) for m in (LARGE, SMALL))
    assert (large.large_share, large.quality, large.agreement) == (1.0, 1.0, 1.0)
    assert (small.large_share, small.quality) == (0.0, 0.0)
    assert large.ms_per_token == pytest.approx(9.5)
    assert small.ms_per_token == pytest.approx(3.2)


def test_thresholds_are_chosen_for_a_share_or_a_quality() -> None:
    for share in (0.2, 0.4, 0.7):
        found = choose(traces(), CURVES, large_share=share)
        assert found.large_share == pytest.approx(share, abs=0.03)
    better = choose(traces(), CURVES, quality=0.8)
    worse = choose(traces(), CURVES, quality=0.3)
    assert better.quality >= 0.8
    assert worse.quality >= 0.3
    assert worse.ms_per_token < better.ms_per_token
