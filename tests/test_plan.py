"""Plans by hand and by property: a plan fits its budget, or the refusal says what would."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from edgespec.errors import DoesNotFitError, UnsupportedError
from edgespec.memory import cache, device
from edgespec.memory.accelerators import Accelerator
from edgespec.memory.curve import CostCurve
from edgespec.memory.footprint import (
    RunShape,
    footprint,
    kv_cache_bytes,
    kv_type_fits,
    runtime_bytes,
)
from edgespec.memory.plan import Device, Plan, Settings
from edgespec.memory.planner import make_plan
from edgespec.memory.request import Request
from edgespec.memory.speed import DEFAULT_ROUNDS, RoundHistory, SpeedModel
from edgespec.models.ggml_types import GGML_TYPES
from edgespec.models.gguf import GgufTensor
from edgespec.models.spec import ModelSpec
from edgespec.planning import (
    make_run_plan,
    rounds_key,
    settings_key,
    settings_of,
    speed_model,
    stored_curve,
    stored_rounds,
)

MIB = 1 << 20
INF = float("inf")
TABLES = 3 * MIB  # of the drafter
PLENTY = Device(64 << 30)
TYPES = {kind.name: kind for kind in GGML_TYPES.values()}
quick = settings(max_examples=150, deadline=None, derandomize=True, database=None)
thorough = settings(max_examples=30, deadline=None, derandomize=True, database=None)


def model(
    layers: int = 4,
    width: int = 256,
    heads: tuple[int, int] = (4, 2),
    head: int = 64,
    feed_forward: int = 512,
    vocabulary: int = 4000,
    kind: str = "Q4_1",
    **changes: Any,
) -> ModelSpec:
    """A llama with tied embeddings. By default a token takes 4 x 2 x (64 + 64) values of cache."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (width, vocabulary),
        "output_norm.weight": (width,),
    }
    for number in range(layers):
        parts = {
            "attn_norm": (width,),
            "attn_q": (width, heads[0] * head),
            "attn_k": (width, heads[1] * head),
            "attn_v": (width, heads[1] * head),
            "attn_output": (heads[0] * head, width),
            "ffn_norm": (width,),
            "ffn_gate": (width, feed_forward),
            "ffn_up": (width, feed_forward),
            "ffn_down": (feed_forward, width),
        }
        shapes |= {f"blk.{number}.{name}.weight": dims for name, dims in parts.items()}
    tensors = {}
    for name, dims in shapes.items():
        used = TYPES["F32"] if len(dims) == 1 else TYPES[kind]
        size = prod(dims) // used.block_size * used.block_bytes
        tensors[name] = GgufTensor(name, used, dims, 0, size)
    spec = ModelSpec(
        path=Path("tiny.gguf"), files=(Path("tiny.gguf"),), file_bytes=0,
        weight_bytes=sum(one.data_bytes for one in tensors.values()), fingerprint="f00d",
        arch="llama", name="tiny", file_type=kind, notes=(), num_layers=layers,
        num_prediction_layers=0, embedding_size=width, vocab_size=vocabulary,
        context_length=32768, feed_forward_size=(feed_forward,) * layers,
        num_heads=(heads[0],) * layers, num_kv_heads=(heads[1],) * layers,
        key_length=(head,) * layers, value_length=(head,) * layers, sliding_window=0,
        is_sliding=(False,) * layers, num_experts=0, num_experts_used=0,
        expert_feed_forward_size=0, is_recurrent=False, is_hybrid=False,
        is_recurrent_layer=(False,) * layers, state_values=0, has_encoder=False,
        tied_embeddings=True, group_bytes=(), type_bytes=(), layer_bytes=(), chat_template=None,
        bos_id=None, eos_id=None, add_bos=None, tokenizer_model="gpt2", tokenizer_pre="",
        tokenizer_hash="", tensors=tensors,
    )  # fmt: skip
    return replace(spec, **changes)


SPEC = model()
CELL = 4 * 2 * (64 + 64) * 2  # bytes of cache a token
RECURRENT = replace(SPEC, arch="mamba", is_recurrent=True, num_kv_heads=(0,) * 4, state_values=5000)


def curve(cost: float = 0.1, max_nodes: int = 32) -> CostCurve:
    """10 ms for one token, and a part of that for each further one."""
    return CostCurve([INF, *(10.0 * (1 + cost * (n - 1)) for n in range(1, max_nodes + 1))])


def measured(cost: float = 0.1) -> Callable[[Settings], SpeedModel]:
    return lambda _settings: SpeedModel(curve(cost), is_measured=True)


def unmeasured(_settings: Settings) -> SpeedModel:
    return SpeedModel(curve(0.35), is_measured=False)


def plan_of(
    spec: ModelSpec = SPEC,
    machine: Device = PLENTY,
    speed_of: Callable[[Settings], SpeedModel] | None = None,
    max_step: int | None = None,
    kv_losses: Any = None,
    **request: Any,
) -> Plan:
    return make_plan(
        spec,
        Request(**{"threads": 2, **request}),
        machine,
        speed_of or measured(),
        drafter_bytes=TABLES,
        max_step_of=lambda _settings: max_step,
        kv_losses=kv_losses,
    )


def outcome(*args: Any, **request: Any) -> Plan | DoesNotFitError:
    try:
        return plan_of(*args, **request)
    except DoesNotFitError as error:
        return error


def refusal(*args: Any, **request: Any) -> DoesNotFitError:
    with pytest.raises(DoesNotFitError) as caught:
        plan_of(*args, **request)
    return caught.value


def reason(plan: Plan, name: str) -> str:
    return str(plan.as_json()[name]["reason"])


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


def gpu(free: int, shares: bool = False) -> tuple[Accelerator, ...]:
    return (Accelerator("GPU0", "Some GPU", 2 * free, free, shares),)


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


# ------------------------------------------------------------------------------ budgets


def peak(**request: Any) -> int:
    """Bytes of a plan with the smallest batch and no drafts."""
    shape = RunShape(request.pop("context_size"), 32, 1, threads=2, **request)
    return sum(part.nbytes for part in footprint(SPEC, shape))


def test_a_context_nobody_asked_for_shrinks_until_it_fits() -> None:
    """2,560 tokens fit without drafts; one byte less, and 2,304 do."""
    least = peak(context_size=2560)
    plan = plan_of(budget_bytes=least, drafter="none")
    assert (plan.context_size, plan.batch_size) == (2560, 32)
    assert plan.as_json()["context_size"] == {"value": 2560, "reason": "the largest that fits"}
    assert plan.predicted_peak_bytes == least
    assert plan_of(budget_bytes=least - 1, drafter="none").context_size == 2304
    assert plan_of(SPEC, Device(least), drafter="none").context_size == 2560


def test_drafts_come_before_context_unless_context_is_preferred() -> None:
    """There is room for 4,096 tokens or for a draft and fewer of them."""
    budget = peak(context_size=4096)
    fast = plan_of(budget_bytes=budget)
    assert fast.draft_max > 0 and fast.context_size < 4096
    long = plan_of(budget_bytes=budget, prefer="context", kv_type="f16")
    assert (long.draft_max, long.context_size) == (0, 4096)
    assert "no room for drafts" in reason(long, "draft_max")
    longer = plan_of(budget_bytes=peak(context_size=20_480) + 4 * TABLES, prefer="context")
    assert longer.context_size > 20_480, "beyond what is usually wanted"


def test_context_leaves_room_for_drafts_that_were_asked_for() -> None:
    budget = peak(context_size=4096)
    plan = plan_of(budget_bytes=budget, prefer="context", kv_type="f16", draft_max=15)
    assert plan.draft_max == 15 and 2048 < plan.context_size < 4096
    assert plan.predicted_peak_bytes <= budget


def test_only_the_preference_for_context_takes_a_smaller_cache_and_says_what_it_costs() -> None:
    budget = peak(context_size=4096)
    long = plan_of(budget_bytes=budget, prefer="context")
    assert (long.kv_type_k, long.kv_type_v) == ("q8_0", "q8_0")
    assert long.context_size == 7424  # 34 bytes for 32 values instead of 64
    assert "cost in quality" in reason(long, "kv_type")
    for prefer in ("speed", "quality"):
        assert plan_of(budget_bytes=budget, prefer=prefer).kv_type_k == "f16"
    ample = plan_of(prefer="context")
    assert (ample.kv_type_k, ample.context_size) == ("f16", SPEC.context_length)


@pytest.mark.parametrize(
    ("losses", "kind"),
    [
        ({}, "q8_0"),
        ({"q8_0": 0.001}, "q8_0"),
        ({"q8_0": 0.001, "q4_0": 0.5}, "q8_0"),
        ({"q8_0": 0.001, "q4_0": 0.008}, "q4_0"),
        ({"q8_0": 0.02, "q4_0": 0.5}, "f16"),
    ],
)
def test_measured_losses_decide_which_cache_is_taken(losses: dict[str, float], kind: str) -> None:
    """The budget is one that q8_0 does not make large enough either."""
    plan = plan_of(budget_bytes=peak(context_size=4096), prefer="context", kv_losses=losses)
    assert plan.kv_type_k == plan.kv_type_v == kind
    if kind in losses:
        assert f"divergence of {losses[kind]:.4f}" in reason(plan, "kv_type")


def test_a_context_that_was_asked_for_is_refused_with_the_largest_that_fits() -> None:
    available = peak(context_size=2560) + 5
    error = refusal(SPEC, Device(available), context_size=8192)
    needed = peak(context_size=8192)
    assert f"needs {-(-needed // MIB)} MiB for 8192 tokens" in str(error)
    assert f"free: {available // MIB} MiB" in str(error)
    assert "`--ctx 2560` fits" in error.hint
    assert f"budget: {available // MIB} MiB" in str(
        refusal(context_size=8192, budget_bytes=available)
    )


def test_the_largest_components_are_named() -> None:
    """16 MiB of cache and 2.03 of weights, each rounded up; the runtime is larger than both."""
    error = refusal(SPEC, Device(64 * MIB), context_size=8192)
    runtime = -(-runtime_bytes(SPEC) // MIB)
    assert f"(runtime {runtime}, kv cache 16, weights 3, compute 1 MiB)" in str(error)


def test_a_refusal_never_says_that_as_much_is_free_as_is_needed() -> None:
    """One byte is missing: the needed MiB are rounded up, or the sentence makes no sense."""
    error = refusal(SPEC, Device(peak(context_size=4096) - 1), context_size=4096)
    needed, free = re.findall(r"needs (\d+) MiB.*free: (\d+) MiB", str(error))[0]
    assert int(needed) > int(free)


def test_a_prompt_that_leaves_no_room_is_refused_instead_of_cut() -> None:
    error = refusal(SPEC, Device(peak(context_size=2560)), prompt_tokens=3000, max_tokens=100)
    assert "for 3328 tokens" in str(error)


def test_a_model_that_cannot_fit_at_all_says_so() -> None:
    assert refusal(SPEC, Device(20 * MIB)).hint == "use a smaller model file"


def test_a_budget_that_is_too_small_names_the_smallest() -> None:
    hint = refusal(budget_bytes=20 * MIB).hint
    smallest = int(re.findall(r"`--budget (\d+)MiB`", hint)[0])
    assert smallest == -(-peak(context_size=512) // MIB)
    # Rounded up to a whole MiB there may be room for 256 tokens more.
    assert plan_of(budget_bytes=smallest * MIB).context_size in (512, 768)
    assert isinstance(outcome(budget_bytes=(smallest - 1) * MIB), DoesNotFitError)


def test_a_draft_that_does_not_fit_is_named() -> None:
    """There is 1 MiB left for drafts, less than the drafter's tables take."""
    budget = peak(context_size=512) + MIB
    error = refusal(budget_bytes=budget, context_size=512, draft_max=31)
    assert "a smaller --draft-max" in error.hint
    assert plan_of(budget_bytes=budget, context_size=512, draft_max=0).draft_max == 0


@pytest.mark.parametrize("kv_type", ["f32", "q8_0", "q4_0"])
def test_a_cache_type_that_was_chosen_is_not_argued_about(kv_type: str) -> None:
    assert (
        "--kv-type" not in refusal(SPEC, Device(70 * MIB), context_size=32768, kv_type=kv_type).hint
    )


def test_a_cache_type_that_the_heads_do_not_allow_is_not_offered() -> None:
    error = refusal(model(head=80), Device(80 * MIB), context_size=32768)
    assert "--ctx" in error.hint and "q8_0" not in error.hint


# ------------------------------------------------------------------------------ properties


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    """Models of many shapes: sliding, recurrent and headless layers, any processor's types."""
    layers = draw(st.integers(1, 5))
    kv_heads = draw(st.sampled_from((1, 2, 8)))
    spec = model(
        layers=layers,
        width=draw(st.sampled_from((256, 512, 2048))),
        heads=(kv_heads * draw(st.integers(1, 4)), kv_heads),
        head=draw(st.sampled_from((64, 80, 128, 256))),
        feed_forward=draw(st.sampled_from((256, 1024, 8192))),
        vocabulary=draw(st.sampled_from((256, 32_000, 151_936))),
        kind=draw(st.sampled_from(("Q4_0", "Q4_K", "Q8_0", "Q6_K", "F16"))),
        context_length=draw(st.sampled_from((100, 512, 1000, 4096, 32_768))),
    )
    if draw(st.booleans()):
        pattern = draw(st.lists(st.booleans(), min_size=layers, max_size=layers))
        spec = replace(spec, sliding_window=draw(st.integers(1, 5000)), is_sliding=tuple(pattern))
    if draw(st.booleans()):
        spec = replace(spec, is_recurrent=True, state_values=draw(st.integers(1, 10**7)))
    return spec


# Unmeasured sizes, steps that are not monotone, drafts that lose.
speeds = st.builds(
    lambda times, is_measured: (
        lambda _settings: SpeedModel(CostCurve([INF, 10.0, *times]), is_measured)
    ),
    st.lists(st.floats(5.0, 400.0) | st.just(INF), max_size=31),
    st.booleans(),
)
wishes = st.fixed_dictionaries(
    {},
    optional={
        "context_size": st.sampled_from((1, 100, 500, 512, 3000, 32_768)),
        "threads": st.integers(1, 8),
        "kv_type": st.sampled_from(("f32", "f16", "bf16", "q8_0", "q4_0")),
        "draft_max": st.integers(0, 255),
        "drafter": st.sampled_from(("auto", "none")),
        "exact": st.booleans(),
        "prompt_tokens": st.integers(0, 8000),
        "max_tokens": st.integers(0, 8000),
        "prefer": st.sampled_from(("speed", "quality", "context")),
    },
)
processors = st.sampled_from((frozenset(), frozenset({"avx2"}), frozenset({"neon", "dotprod"})))


@st.composite
def machines(draw: st.DrawFn) -> Device:
    """With no GPU, a small or a large one, or one that shares the memory."""
    gpus: tuple[Accelerator, ...] = ()
    if draw(st.booleans()):
        gpus = gpu(draw(st.integers(1, 200)) * MIB, draw(st.booleans()))
    return Device(64 << 30, gpus, draw(processors))


def possible(spec: ModelSpec, machine: Device, request: dict[str, Any]) -> bool:
    """Requests that nothing but memory can refuse.

    Layers on a GPU with memory of its own are chosen without looking at `draft_max`.
    """
    return (
        request.get("context_size", 1) <= spec.context_length
        and kv_type_fits(spec, request.get("kv_type", "f16"))
        and ("draft_max" not in request or not machine.gpu_free_bytes)
    )


def taken(plan: Plan) -> int:
    return plan.predicted_peak_bytes + plan.predicted_gpu_bytes


@quick
@given(specs(), machines(), speeds, wishes, st.floats(0.3, 1.2), st.booleans())
def test_a_plan_never_exceeds_what_it_may_take(
    spec: ModelSpec,
    machine: Device,
    speed_of: Callable[[Settings], SpeedModel],
    request: dict[str, Any],
    part: float,
    is_budget: bool,
) -> None:
    """Part of what the request takes when there is plenty, as a budget or as free memory."""
    assume(possible(spec, machine, request))
    ample = plan_of(spec, machine, speed_of, **request)
    limit = int(part * taken(ample))
    options = {"budget_bytes": limit} if is_budget else {}
    where = machine if is_budget else replace(machine, free_bytes=limit)
    plan = outcome(spec, where, speed_of, **request, **options)
    if isinstance(plan, DoesNotFitError):
        assert plan.hint
        return
    assert plan.predicted_peak_bytes <= limit == plan.limit_bytes
    assert plan.predicted_gpu_bytes <= machine.gpu_free_bytes
    assert taken(plan) <= limit or not is_budget
    assert all(component.nbytes > 0 for component in plan.components)
    assert 1 <= plan.context_size <= spec.context_length
    assert plan.context_size == request.get("context_size", plan.context_size)
    assert plan.draft_max < plan.batch_size
    assert plan.draft_max == request.get("draft_max", plan.draft_max) or plan.drafter == "none"
    assert plan.tokens_per_s >= plan.plain_tokens_per_s * (1 - 1e-9)


@quick
@given(specs(), machines(), speeds, wishes, st.floats(0.5, 1.1))
def test_quality_is_never_traded_silently(
    spec: ModelSpec,
    machine: Device,
    speed_of: Callable[[Settings], SpeedModel],
    request: dict[str, Any],
    part: float,
) -> None:
    """However tight the budget: f16 unless asked, and bf16 beside it for exact runs."""
    assume(possible(spec, machine, request))
    budget = int(part * taken(plan_of(spec, machine, speed_of, **request)))
    plan = outcome(spec, machine, speed_of, **request, budget_bytes=budget)
    if isinstance(plan, DoesNotFitError):
        return
    asked = request.get("kv_type")
    if asked in (None, "f16") and request.get("exact"):
        assert (plan.kv_type_k, plan.kv_type_v) == ("bf16", "f16")
    else:
        assert (plan.kv_type_k, plan.kv_type_v) == (asked or "f16",) * 2


@thorough
@given(specs(), processors, speeds, st.none() | st.sampled_from((512, 4096)), st.booleans())
def test_more_budget_is_never_worse(
    spec: ModelSpec,
    features: frozenset[str],
    speed_of: Callable[[Settings], SpeedModel],
    context_size: int | None,
    exact: bool,
) -> None:
    """40 budgets, from a tenth of what is needed to more than enough."""
    assume(spec.context_length >= (context_size or 1))
    machine = Device(64 << 30, features=features)
    request = {"context_size": context_size, "exact": exact}
    ample = taken(plan_of(spec, machine, speed_of, **request))
    best, fitted = 0.0, False
    for step in range(1, 41):
        budget = int(ample * (0.1 + step / 30))
        plan = outcome(spec, machine, speed_of, **request, budget_bytes=budget)
        if isinstance(plan, DoesNotFitError):
            assert not fitted, f"{budget} does not fit, but less did"
            assert plan.hint
            continue
        assert plan.tokens_per_s >= best * (1 - 1e-9), f"slower with {budget}"
        best, fitted = plan.tokens_per_s, True
    assert fitted


@thorough
@given(specs(), st.booleans(), st.integers(1, 64))
def test_more_budget_never_stops_fitting_with_a_gpu(
    spec: ModelSpec, shares: bool, mebibytes: int
) -> None:
    """And never brings fewer layers to it."""
    machine = Device(64 << 30, gpu(mebibytes * MIB, shares))
    ample = taken(plan_of(spec, machine))
    layers, fitted = -2, False
    for step in range(1, 41):
        plan = outcome(spec, machine, budget_bytes=int(ample * (0.1 + step / 30)))
        if isinstance(plan, DoesNotFitError):
            assert not fitted
            continue
        on_gpu = plan.gpu_layers if plan.gpu_layers >= 0 else spec.num_layers + 1
        assert on_gpu >= layers
        layers, fitted = on_gpu, True
    assert fitted


@quick
@given(specs(), processors, st.sampled_from((512, 3000, 4096, 32_768)), st.floats(0.2, 1.0))
def test_a_hint_that_names_a_context_works(
    spec: ModelSpec, features: frozenset[str], context_size: int, part: float
) -> None:
    """The context it names fits as it stands, and one of 256 tokens more does not."""
    assume(spec.context_length >= context_size)
    machine = Device(64 << 30, features=features)
    wish: dict[str, Any] = {"context_size": context_size}
    limit = int(part * taken(plan_of(spec, machine, drafter="none", **wish)))
    tight = replace(machine, free_bytes=limit)
    error = outcome(spec, tight, **wish)
    if isinstance(error, Plan):
        return
    ways = re.findall(r"`(?:--kv-type (\w+) )?--ctx (\d+)`", error.hint)
    assert ways or error.hint == "use a smaller model file"
    for kv_type, tokens in ways:
        named = {"kv_type": kv_type or None}
        assert isinstance(outcome(spec, tight, context_size=int(tokens), **named), Plan)
        assert int(tokens) <= context_size
        if int(tokens) + 256 <= context_size:
            larger = outcome(spec, tight, context_size=int(tokens) + 256, **named)
            assert isinstance(larger, DoesNotFitError)


@quick
@given(specs(), processors, st.floats(0.01, 0.9))
def test_a_hint_that_names_a_budget_works(
    spec: ModelSpec, features: frozenset[str], part: float
) -> None:
    machine = Device(64 << 30, features=features)
    smallest = taken(plan_of(spec, machine, context_size=min(512, spec.context_length)))
    error = outcome(spec, machine, budget_bytes=int(part * smallest))
    if isinstance(error, Plan):
        return
    for named in re.findall(r"`--budget (\d+)MiB`", error.hint):
        assert isinstance(outcome(spec, machine, budget_bytes=int(named) * MIB), Plan)
        less = outcome(spec, machine, budget_bytes=(int(named) - 1) * MIB)
        assert isinstance(less, DoesNotFitError)
    for named in re.findall(r"`--ctx (\d+)`", error.hint):
        wish = {"context_size": int(named), "budget_bytes": int(part * smallest)}
        assert isinstance(outcome(spec, machine, **wish), Plan)


@quick
@given(specs(), processors, speeds, st.floats(0.4, 1.3))
def test_alternatives_hold_what_they_claim(
    spec: ModelSpec,
    features: frozenset[str],
    speed_of: Callable[[Settings], SpeedModel],
    part: float,
) -> None:
    """Each one's options are followed; `faster` names a budget, the others fit this one."""
    machine = Device(64 << 30, features=features)
    budget = int(part * taken(plan_of(spec, machine, speed_of)))
    plan = outcome(spec, machine, speed_of, budget_bytes=budget)
    if isinstance(plan, DoesNotFitError):
        return
    for other in plan.alternatives:
        wish: dict[str, Any] = {"budget_bytes": budget}
        if found := re.search(r"--ctx (\d+)", other.options):
            wish["context_size"] = int(found[1])
        if found := re.search(r"--draft-max (\d+)", other.options):
            wish["draft_max"] = int(found[1])
        if found := re.search(r"--budget (\d+)MiB", other.options):
            wish["budget_bytes"] = int(found[1]) * MIB
        made = plan_of(spec, machine, speed_of, **wish)
        assert made.context_size >= other.context_size
        assert made.tokens_per_s >= 0.98 * other.tokens_per_s
        assert other.peak_bytes <= wish["budget_bytes"]
        if other.name == "faster":
            assert other.tokens_per_s > 1.02 * plan.tokens_per_s
        elif other.name == "longer context":
            assert other.context_size > plan.context_size
        else:
            assert other.peak_bytes <= plan.predicted_peak_bytes


# ------------------------------------------------------------------------------ whole runs


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody measures this machine's bandwidth: 20 GB/s."""
    monkeypatch.setattr("edgespec.planning.memory_bandwidth", lambda: 20e9)


@pytest.mark.usefixtures("quiet")
def test_the_drafters_tables_are_part_of_the_plan() -> None:
    """18 bytes a token for 65,536 tokens, and three tables of 65,536 entries of 4 bytes, twice."""
    tables = 18 * 65_536 + 2 * 3 * 4 * 65_536
    found = make_run_plan(SPEC, Request(), PLENTY).component_bytes
    assert found["drafter_tables"] == tables
    plain = make_run_plan(SPEC, Request(drafter="none"), PLENTY)
    assert "drafter_tables" not in plain.component_bytes


@pytest.mark.usefixtures("quiet")
def test_free_memory_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "available_bytes", lambda: 20 * MIB)
    monkeypatch.setattr(device, "llama_accelerators", lambda: ())
    with pytest.raises(DoesNotFitError, match="free: 20 MiB"):
        make_run_plan(SPEC, Request())


@pytest.mark.usefixtures("quiet")
def test_step_times_belong_to_a_file_and_its_settings() -> None:
    """Whatever changes a step's time changes the key; context, budget and drafter do not."""

    def key(spec: ModelSpec = SPEC, **changes: Any) -> str:
        return settings_key(spec, replace(Settings(2, "f16", "f16", 0, "suffix"), **changes))

    keys = [
        key(),
        key(threads=3),
        key(kv_type_k="bf16"),
        key(kv_type_v="q8_0"),
        key(gpu_layers=5),
        key(replace(SPEC, fingerprint="beef")),
    ]
    assert len(set(keys)) == len(keys)
    plans = [plan_of(), plan_of(context_size=999), plan_of(budget_bytes=1 << 30)]
    assert {settings_key(SPEC, settings_of(plan)) for plan in plans} == {keys[0]}
    assert rounds_key(SPEC, "suffix") != rounds_key(SPEC, "other")
    assert rounds_key(SPEC, "suffix") != rounds_key(replace(SPEC, fingerprint="b"), "suffix")


SETTINGS = Settings(2, "f16", "f16", 0, "suffix")


def test_a_stored_curve_is_found_again() -> None:
    assert stored_curve(SPEC, SETTINGS) is None
    kept = CostCurve([INF, 4.0, 6.0, INF, 7.0], 0.01, 0.002, 0.5)
    cache.store("curves", settings_key(SPEC, SETTINGS), kept.as_json())
    assert stored_curve(SPEC, SETTINGS) == kept
    assert stored_curve(SPEC, replace(SETTINGS, threads=3)) is None


@pytest.mark.parametrize(
    "base",
    [[], [None, None], [None, "x"], None, [None, 10**400]],
    ids=lambda base: str(base)[:20],
)
def test_a_damaged_stored_curve_is_none(base: Any) -> None:
    document = {**CostCurve([INF, 4.0]).as_json(), "base_ms": base}
    cache.store("curves", settings_key(SPEC, SETTINGS), document)
    assert stored_curve(SPEC, SETTINGS) is None


def test_a_few_rounds_tell_little() -> None:
    """From 500 on those of this file count; before, what is usual."""
    key = rounds_key(SPEC, "suffix")
    assert stored_rounds(SPEC, "suffix") == DEFAULT_ROUNDS
    cache.store("rounds", key, {"rounds": RoundHistory([(4, 4, 499.0)]).rounds()})
    assert stored_rounds(SPEC, "suffix") == DEFAULT_ROUNDS
    cache.store("rounds", key, {"rounds": RoundHistory([(4, 4, 500.0)]).rounds()})
    assert stored_rounds(SPEC, "suffix") == ((4, 4, 500.0),)
    cache.store("rounds", key, {"rounds": "many"})
    assert stored_rounds(SPEC, "suffix") == DEFAULT_ROUNDS


@pytest.mark.usefixtures("quiet")
def test_speed_is_estimated_from_bandwidth_until_it_is_measured() -> None:
    """2.0 MiB at 20 GB/s are 0.107 ms a token; then the stored curve's 4 ms."""
    estimate = speed_model(SPEC, SETTINGS)
    assert not estimate.is_measured
    assert estimate.tokens_per_s(0, 0) == pytest.approx(20e9 / SPEC.weight_bytes)
    cache.store("curves", settings_key(SPEC, SETTINGS), CostCurve([INF, 4.0, 5.0]).as_json())
    assert speed_model(SPEC, SETTINGS).is_measured
    assert speed_model(SPEC, SETTINGS).tokens_per_s(0, 0) == pytest.approx(250.0)
    assert make_run_plan(SPEC, Request(threads=2), PLENTY).plain_tokens_per_s == pytest.approx(
        250.0
    )


@pytest.mark.usefixtures("quiet")
def test_an_exact_run_knows_the_largest_step_that_rounds_alike() -> None:
    """Measured by an earlier run under the settings of exact runs."""
    request = Request(threads=2, exact=True)
    assert make_run_plan(SPEC, request, PLENTY).draft_max == 31
    exact = Settings(2, "bf16", "f16", 0, "suffix")
    cache.store("invariance", settings_key(SPEC, exact), {"largest_step": 8})
    assert make_run_plan(SPEC, request, PLENTY).draft_max == 7
    assert make_run_plan(SPEC, Request(threads=2), PLENTY).draft_max == 31
    cache.store("invariance", settings_key(SPEC, exact), {"largest_step": "eight"})
    assert make_run_plan(SPEC, request, PLENTY).draft_max == 31


def test_planning_imports_no_inference_library_and_no_numpy() -> None:
    code = (
        "import sys, edgespec.planning; "
        "print(sorted({'numpy', 'llama_cpp', 'onnxruntime', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_cache_of_a_plan_is_that_of_the_footprint() -> None:
    plan = plan_of(context_size=1000, exact=True)
    shape = RunShape(1000, plan.batch_size, plan.draft_max + 1, "bf16", "f16")
    assert plan.component_bytes["kv_cache"] == kv_cache_bytes(SPEC, shape) == 1024 * CELL
