"""Plans by hand: each choice, and what it is made by."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from planning_cases import (
    CELL,
    MIB,
    PLENTY,
    RECURRENT,
    SPEC,
    TABLES,
    curve,
    gpu,
    measured,
    model,
    outcome,
    plan_of,
    reason,
    unmeasured,
)

from edgespec.errors import DoesNotFitError, UnsupportedError
from edgespec.memory.bytes.footprint import (
    RunShape,
    footprint,
)
from edgespec.memory.device import device
from edgespec.memory.plan.plan import Device, Settings
from edgespec.memory.plan.request import Request
from edgespec.memory.times.speed import SpeedModel
from edgespec.models.spec import ModelSpec
from edgespec.setup.planning import make_run_plan
from edgespec.setup.stored import settings_of

# ------------------------------------------------------------------------------ choices


def test_a_plan_without_wishes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "usable_cores", lambda: 6)
    plan = plan_of(threads=None)
    assert (plan.context_size, plan.threads, plan.drafter) == (4096, 6, "suffix")
    assert (plan.kv_type_k, plan.kv_type_v, plan.gpu_layers) == ("f16", "f16", 0)
    assert (plan.exact, plan.mapped) == (False, True)
    assert plan.component_bytes["kv_cache"] == 4096 * CELL
    assert plan.component_bytes["drafter_tables"] == TABLES
    assert plan.predicted_peak_bytes == sum(part.nbytes for part in plan.components)
    assert (plan.available_bytes, plan.limit_bytes, plan.predicted_gpu_bytes) == (64 << 30,) * 2 + (
        0,
    )


def test_a_plan_is_the_footprint_of_its_own_settings() -> None:
    plan = plan_of(context_size=1000, kv_type="q8_0")
    shape = RunShape(
        1000, plan.batch_size, plan.draft_max + 1, "q8_0", "q8_0", threads=2, mapped=plan.mapped
    )
    assert plan.components == footprint(SPEC, shape, drafter_bytes=TABLES)


def test_what_is_asked_for_is_what_is_planned() -> None:
    plan = plan_of(context_size=2000, threads=3, kv_type="q8_0", draft_max=5, drafter="none")
    assert (plan.context_size, plan.threads) == (2000, 3)
    assert (plan.kv_type_k, plan.kv_type_v, plan.drafter) == ("q8_0", "q8_0", "none")
    assert "drafter_tables" not in plan.component_bytes
    values = {name: choice["value"] for name, choice in plan.as_json().items()}
    assert values == {
        "context_size": 2000,
        "threads": 3,
        "kv_type": "q8_0",
        "gpu_layers": 0,
        "device": "cpu",
        "drafter": "none",
        "draft_max": 0,
        "batch_size": plan.batch_size,
        "mapped": 1,
    }
    assert plan_of(draft_max=5).draft_max == 5


def test_every_choice_has_a_reason() -> None:
    plan = plan_of()
    assert set(plan.as_json()) == {
        "context_size", "threads", "kv_type", "gpu_layers", "drafter", "draft_max", "batch_size",
        "mapped", "device",
    }  # fmt: skip
    assert all(choice.reason for choice in plan.choices)
    assert reason(plan, "threads") == "as asked" != reason(plan, "context_size")
    assert reason(plan_of(context_size=999), "context_size") == "as asked"
    assert reason(plan_of(draft_max=9), "draft_max") == "as asked"


@pytest.mark.parametrize(
    ("request_", "trained", "context_size"),
    [
        ({}, 32768, 4096),
        ({}, 2048, 2048),
        ({"prompt_tokens": 3000, "max_tokens": 1000}, 32768, 4096),
        ({"prompt_tokens": 5000, "max_tokens": 1000}, 32768, 6144),
        ({"prompt_tokens": 40_000, "max_tokens": 1000}, 32768, 32768),
        ({"context_size": 333}, 32768, 333),
        ({"context_size": 32768}, 32768, 32768),
        ({"prefer": "context"}, 32768, 32768),
        ({"prefer": "context"}, 1000, 1000),
    ],
)
def test_the_context_is_what_is_needed_and_what_was_trained(
    request_: dict[str, Any], trained: int, context_size: int
) -> None:
    assert plan_of(replace(SPEC, context_length=trained), **request_).context_size == context_size


def test_a_context_that_was_asked_for_needs_no_smaller_cache() -> None:
    whole = plan_of(prefer="context").predicted_peak_bytes
    asked: dict[str, Any] = {"prefer": "context", "budget_bytes": whole * 4 // 5}
    assert plan_of(**asked).kv_type_k == "q8_0"
    assert plan_of(**asked, context_size=1024).kv_type_k == "f16"


@pytest.mark.parametrize("wish", [{}, {"draft_max": 200}])
def test_the_largest_step_fits_into_the_context(wish: dict[str, Any]) -> None:
    assert plan_of(context_size=16, **wish).draft_max == 15
    assert plan_of(context_size=1, **wish).draft_max == 0


@pytest.mark.parametrize(("width", "batch_size"), [(256, 128), (1024, 64), (4096, 64)])
def test_a_wide_model_reads_prompts_in_smaller_batches(width: int, batch_size: int) -> None:
    assert plan_of(model(width=width)).batch_size == batch_size


def test_a_batch_has_room_for_the_largest_step() -> None:
    assert plan_of(draft_max=200).batch_size == 256
    assert plan_of(draft_max=255).batch_size == 256
    assert plan_of(draft_max=100).batch_size == 128


def test_exact_avoids_the_path_that_rounds_differently() -> None:
    """K and V of different types; a type that was asked for is not exchanged."""
    plan = plan_of(exact=True)
    assert (plan.exact, plan.kv_type_k, plan.kv_type_v) == (True, "bf16", "f16")
    assert plan.as_json()["kv_type"]["value"] == "bf16/f16"
    assert plan.component_bytes["kv_cache"] == 4096 * CELL
    kept = plan_of(exact=True, kv_type="q8_0")
    assert (kept.kv_type_k, kept.kv_type_v) == ("q8_0", "q8_0")


@pytest.mark.parametrize(("max_step", "largest"), [(None, 31), (32, 31), (31, 15), (5, 3), (3, 0)])
def test_drafts_stay_below_the_largest_step_that_rounds_alike(
    max_step: int | None, largest: int
) -> None:
    assert plan_of(exact=True, max_step=max_step, speed_of=unmeasured).draft_max == largest


@pytest.mark.parametrize("spec", [RECURRENT, replace(SPEC, arch="jamba", is_hybrid=True)])
def test_a_state_that_cannot_be_rolled_back_has_no_drafter_and_no_tables(spec: ModelSpec) -> None:
    plan = plan_of(spec)
    assert (plan.drafter, plan.draft_max) == ("none", 0)
    assert "drafter_tables" not in plan.component_bytes
    assert "rolled back" in reason(plan, "drafter")
    assert plan.tokens_per_s == plan.plain_tokens_per_s
    with pytest.raises(UnsupportedError, match=f"{spec.arch} .*cannot be rolled back") as caught:
        plan_of(spec, drafter="suffix")
    assert "--drafter" in caught.value.hint


def test_recurrent_state_is_planned() -> None:
    assert plan_of(RECURRENT).component_bytes["kv_cache"] == 20_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_type": "q5_1"}, "'q5_1'"),
        ({"threads": 0}, "--threads 0"),
        ({"threads": -4}, "--threads -4"),
        ({"draft_max": -1}, "--draft-max -1"),
        ({"draft_max": 256}, "--draft-max 256"),
        ({"context_size": 0}, "--ctx 0"),
        ({"context_size": -5}, "--ctx -5"),
        ({"context_size": 32769}, "--ctx 32769 exceeds the 32768 tokens"),
        ({"budget_bytes": 0}, "--budget 0"),
        ({"budget_bytes": -1}, "--budget -1"),
        ({"prefer": "beauty"}, "'beauty'"),
        ({"drafter": "lookahead"}, "'lookahead'"),
    ],
    ids=str,
)
def test_an_impossible_option_is_refused_with_its_value_and_a_hint(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(message)) as caught:
        make_run_plan(SPEC, Request(**options), PLENTY)
    assert caught.value.hint


def test_a_cache_type_needs_heads_of_whole_blocks() -> None:
    with pytest.raises(UnsupportedError, match=r"--kv-type q8_0 .* multiple of 32 .* 80") as caught:
        plan_of(model(head=80), kv_type="q8_0")
    assert "--kv-type f16" in caught.value.hint


# ------------------------------------------------------------------------------ weights


def test_weights_are_mapped_unless_the_processor_rewrites_them() -> None:
    """A mapped Q4_0 file would lie beside its rewritten copy, so it is read instead."""
    q4_0, avx2 = model(kind="Q4_0"), Device(64 << 30, features=frozenset({"avx2"}))
    assert plan_of(q4_0).mapped
    assert plan_of(SPEC, avx2).mapped, "no AVX kernel for blocks of Q4_1"
    copied = plan_of(q4_0, avx2)
    assert not copied.mapped
    found = copied.component_bytes
    layers = [one for one in q4_0.tensors.values() if "blk" in one.name and len(one.dims) > 1]
    table = q4_0.tensors["token_embd.weight"].data_bytes
    assert found["weights_repacked"] == sum(one.data_bytes for one in layers) + table
    assert found["weights"] == q4_0.weight_bytes - sum(one.data_bytes for one in layers)
    assert "twice" in reason(copied, "mapped")


# ------------------------------------------------------------------------------ drafts


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
    assert speeds[31] > speeds[7] > speeds[3] > 100.0, "the example says something"


def test_without_a_measurement_all_sizes_get_measured() -> None:
    plan = plan_of(speed_of=unmeasured)
    assert plan.draft_max == 31
    assert "measured on first use" in reason(plan, "draft_max")
    assert "not measured" in plan.speed_source
    assert plan_of(speed_of=unmeasured, budget_bytes=1 << 40).draft_max < 31


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


# ------------------------------------------------------------------------------ GPUs


def test_everything_goes_to_a_gpu_that_has_room() -> None:
    plan = plan_of(SPEC, Device(64 << 30, gpu(8 << 30)))
    found = plan.component_bytes
    assert (plan.gpu_layers, plan.mapped, plan.batch_size) == (-1, False, 512)
    assert found["gpu_kv_cache"] == 4096 * CELL and "kv_cache" not in found
    table = SPEC.tensors["token_embd.weight"].data_bytes
    assert found["gpu_weights"] == SPEC.weight_bytes, "the table once more, as the head"
    assert found["weights"] == table
    assert plan.predicted_gpu_bytes == sum(
        size for name, size in found.items() if name.startswith("gpu_")
    )
    assert "all fit into Some GPU" in reason(plan, "gpu_layers")


def test_as_many_layers_as_fit_go_to_a_small_gpu() -> None:
    """One layer more would not fit even with the least context, batch and no drafts."""
    seen = set()
    for mebibytes in range(1, 12):
        free = mebibytes * MIB // 2
        plan = plan_of(SPEC, Device(64 << 30, gpu(free)))
        assert plan.predicted_gpu_bytes <= free
        seen.add(plan.gpu_layers)
        if plan.gpu_layers == -1:
            continue
        least = RunShape(512, 32, 1, threads=2, gpu_layers=plan.gpu_layers + 1, mapped=False)
        parts = footprint(SPEC, least)
        assert sum(part.nbytes for part in parts if part.device == "gpu") > free
    assert {0, -1} < seen, "from none to all, with something between"


def test_a_budget_covers_the_gpu_too() -> None:
    machine = Device(64 << 30, gpu(8 << 30))
    whole = plan_of(SPEC, machine)
    needed = whole.predicted_peak_bytes + whole.predicted_gpu_bytes
    for part in (0.75, 0.8, 0.9, 1.0):
        budget = int(needed * part)
        plan = plan_of(SPEC, machine, budget_bytes=budget)
        assert plan.predicted_peak_bytes + plan.predicted_gpu_bytes <= budget
        assert plan.context_size < 4096 or part >= 0.9


def test_a_gpu_without_room_leaves_everything_to_the_processor() -> None:
    plan = plan_of(SPEC, Device(64 << 30, gpu(1000)))
    assert (plan.gpu_layers, plan.predicted_gpu_bytes, plan.mapped) == (0, 0, True)


def test_layers_can_be_kept_off_the_gpu() -> None:
    plan = plan_of(SPEC, Device(64 << 30, gpu(8 << 30)), gpu_layers=0)
    assert (plan.gpu_layers, plan.predicted_gpu_bytes, plan.batch_size) == (0, 0, 128)
    assert reason(plan, "gpu_layers") == "as asked"


def test_as_many_layers_as_were_asked_for() -> None:
    plan = plan_of(SPEC, Device(64 << 30, gpu(8 << 30)), gpu_layers=3)
    shape = RunShape(512, 32, 1, gpu_layers=3, mapped=False)
    weights = [part for part in footprint(SPEC, shape) if part.name == "weights"]
    assert plan.gpu_layers == 3
    assert plan.component_bytes["gpu_weights"] == weights[1].nbytes
    assert plan.component_bytes["gpu_kv_cache"] == 2 * plan.component_bytes["kv_cache"] // 2


def test_shared_memory_is_one_pool() -> None:
    """What the GPU takes counts against the same limit, and the file stays mapped."""
    machine = Device(100 * MIB, gpu(64 << 30, shares=True))
    plan = plan_of(SPEC, machine)
    assert (plan.gpu_layers, plan.mapped, plan.predicted_gpu_bytes) == (-1, True, 0)
    assert plan.predicted_peak_bytes == sum(plan.component_bytes.values())
    assert {"gpu_weights", "gpu_kv_cache", "gpu_compute"} <= set(plan.component_bytes)
    tight = plan_of(SPEC, replace(machine, free_bytes=plan.predicted_peak_bytes - 1))
    assert tight.predicted_peak_bytes < plan.predicted_peak_bytes
    assert isinstance(outcome(SPEC, replace(machine, free_bytes=60 * MIB)), DoesNotFitError)


def test_the_settings_of_step_times_know_the_gpu() -> None:
    asked: list[Settings] = []

    def speed_of(settings: Settings) -> SpeedModel:
        asked.append(settings)
        return SpeedModel(curve(), is_measured=True)

    plan = plan_of(SPEC, Device(64 << 30, gpu(8 << 30)), speed_of, kv_type="q8_0", threads=5)
    assert asked == [Settings(5, "q8_0", "q8_0", -1, "suffix")] == [settings_of(plan)]
