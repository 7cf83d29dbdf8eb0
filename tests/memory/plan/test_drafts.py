"""How large drafts may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from planning_cases import (
    CELL,
    SPEC,
    TABLES,
    curve,
    measured,
    plan_of,
    reason,
    unmeasured,
)

from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.times import Round, SpeedModel


@pytest.mark.parametrize(("max_step", "largest"), [(None, 31), (32, 31), (31, 15), (5, 3), (3, 0)])
def test_drafts_stay_below_the_largest_step_that_rounds_alike(
    max_step: int | None, largest: int
) -> None:
    assert plan_of(exact=True, max_step=max_step, speed_of=unmeasured).draft_max == largest


def test_the_draft_is_the_least_that_keeps_nearly_all_of_the_speed() -> None:
    """By the usual history at 1 ms a node: predictions for 31, 15, 7 and 3 are this close."""
    predict = SpeedModel(curve(), is_measured=True).tokens_per_s
    speeds = {draft: predict(draft, 128) for draft in (31, 15, 7, 3)}
    for budget, kept in ((1 << 40, 0.98), (None, 0.995)):
        plan = plan_of(budget_bytes=budget)
        enough = [draft for draft, speed in speeds.items() if speed >= kept * max(speeds.values())]
        assert plan.draft_max == min(enough)
        assert plan.tokens_per_s == pytest.approx(speeds[plan.draft_max])
        assert plan.plain_tokens_per_s == pytest.approx(100.0)
        told = f"keeps {kept:.1%}" if budget else "less than 2% of the memory"
        assert told in reason(plan, "draft_max")
        assert f"; {plan.tokens_per_s / 100:.2f}x of plain" in reason(plan, "draft_max")
    assert speeds[31] > speeds[7] > speeds[3] > 100.0, "the example says something"


def test_without_a_measurement_all_sizes_get_measured() -> None:
    plan = plan_of(speed_of=unmeasured)
    assert plan.draft_max == 31
    assert "measured on first use" in reason(plan, "draft_max")
    assert plan.speed_source == "estimated from memory bandwidth"
    small = plan_of(speed_of=unmeasured, budget_bytes=1 << 40)
    assert small.draft_max < 31 and "of plain predicted" in reason(small, "draft_max")


def test_drafts_that_seem_not_to_pay_keep_a_small_step() -> None:
    """A busy machine may have been measured; the controller does not draft where it loses."""
    plan = plan_of(speed_of=measured(5.0), budget_bytes=1 << 40)
    assert plan.draft_max == 3
    assert plan.tokens_per_s == plan.plain_tokens_per_s


def test_without_a_budget_a_draft_for_hardly_any_memory_is_taken() -> None:
    """Most texts gain little from it, and some a lot."""
    plan = plan_of(speed_of=measured(5.0))
    least = plan_of(speed_of=measured(5.0), draft_max=3, context_size=plan.context_size)
    assert plan.draft_max > 3
    assert plan.predicted_peak_bytes <= 1.02 * least.predicted_peak_bytes
    assert "less than 2% of the memory" in reason(plan, "draft_max")


def test_draft_rows_and_tables_are_paid_for() -> None:
    """31 more rows of 4,000 logits, here and in the compute buffer, and the drafter's tables."""
    more, fewer = plan_of(draft_max=31, context_size=512), plan_of(draft_max=0, context_size=512)
    assert more.component_bytes["logits"] - fewer.component_bytes["logits"] == 31 * 16_000
    assert "drafter_tables" not in fewer.component_bytes, "no drafts, no tables"
    assert more.predicted_peak_bytes > fewer.predicted_peak_bytes + TABLES + 31 * 16_000 - 1


HYBRID = replace(
    SPEC,
    arch="qwen35",
    keeps_state=True,
    is_recurrent_layer=(True, False, True, False),
    num_kv_heads=(0, 2, 0, 2),
)


def costing(cost: float, rounds: tuple[Round, ...]) -> Callable[[RunConfig], SpeedModel]:
    """Steps that each snapshot makes longer by this part, and what earlier rounds emitted."""

    def speed_of(config: RunConfig) -> SpeedModel:
        times = 1.0 + cost * config.snapshots
        return SpeedModel(curve().scaled(times), is_measured=True, rounds=rounds)

    return speed_of


@pytest.mark.parametrize(
    ("cost", "rounds", "drafts"),
    [
        (0.02, ((1, 1, 1000.0),), 0),  # nothing was ever drafted
        (0.02, ((1, 1, 900.0), (4, 4, 100.0)), 3),
        (0.02, ((1, 1, 990.0), (4, 4, 10.0)), 0),  # 2.6% less time, and 6% more
        (0.0, ((1, 1, 1000.0),), 3),  # they cost nothing: whoever drafts next may be right
        (0.0, ((1, 1, 900.0), (8, 8, 100.0)), 7),
        (0.2, ((1, 1, 900.0), (8, 8, 100.0)), 0),
    ],
)
def test_snapshots_are_kept_where_drafts_save_more_than_they_cost(
    cost: float, rounds: tuple[Round, ...], drafts: int
) -> None:
    plan = plan_of(HYBRID, speed_of=costing(cost, rounds))
    assert (plan.draft_max, plan.snapshots) == (drafts, drafts)
    assert plan.plain_tokens_per_s == pytest.approx(100.0), "without them"
    assert ("more than drafts save" in reason(plan, "snapshots")) == (drafts == 0)
    assert f"{1.0 + cost * (drafts or 3):.2f} times as long" in reason(plan, "snapshots")
    asked = plan_of(HYBRID, speed_of=costing(cost, rounds), drafter="suffix")
    assert asked.draft_max >= 3, "who asks for a drafter gets it"
    attending = plan_of(speed_of=costing(cost, rounds))
    assert attending.draft_max >= 3 and attending.snapshots == 0


def test_what_snapshots_cost_is_not_known_before_it_is_measured() -> None:
    plan = plan_of(HYBRID, speed_of=unmeasured)
    assert plan.snapshots == 3 and "measured on first use" in reason(plan, "snapshots")


def test_a_recurrent_state_is_copied_for_few_drafts_unless_asked() -> None:
    """Each draft takes a snapshot of it, in memory and in every step."""
    spec, attended = HYBRID, 4096 * CELL // 2
    plan = plan_of(spec, speed_of=unmeasured)
    assert plan.draft_max == 3 and "copy" in reason(plan, "draft_max")
    assert plan.component_bytes["kv_cache"] - attended == 4 * 4 * 10**6
    cheap = plan_of(replace(spec, arch="lfm2moe"), speed_of=unmeasured)
    assert cheap.draft_max == 7, "plain steps copy one state alone"
    assert plan_of(spec, draft_max=15).component_bytes["kv_cache"] - attended == 16 * 4 * 10**6
    plain = plan_of(spec, drafter="none")
    assert "snapshots" not in plain.as_json()
    assert plain.draft_max == 0 and plain.component_bytes["kv_cache"] - attended == 4 * 10**6
    tight = plan_of(spec, budget_bytes=plain.predicted_peak_bytes + 4 * 10**6)
    assert tight.draft_max == 0


def test_states_of_prefixes_come_before_drafts_at_every_budget() -> None:
    """One that reaches for a draft or for two states of a window, not for both, takes no draft."""
    spec = replace(SPEC, is_sliding=(True,) * 4, sliding_window=2000)
    plain = plan_of(spec, drafter="none", context_size=512)
    states = plain.component_bytes["states"]
    least = plain.predicted_peak_bytes - states
    found = [
        plan_of(spec, budget_bytes=least + states * tenths // 10, context_size=512).draft_max
        for tenths in range(31)
    ]
    assert found == sorted(found) and found[0] == 0 < found[-1]
