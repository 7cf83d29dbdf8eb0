"""Types of the cache, layers on a GPU, and whether weights are mapped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from laid_out import machine_with
from planning_cases import (
    CELL,
    MIB,
    SPEC,
    curve,
    does_not_fit,
    gpu,
    model,
    parts_by_hand,
    peak,
    plan_of,
    reason,
    with_experts,
)

from edgespec.errors import UnsupportedError
from edgespec.memory.bytes.config import Device, RunConfig
from edgespec.memory.device.kernels import attends, missing_kernels
from edgespec.memory.plan.plan import Plan, Request
from edgespec.memory.times import SpeedModel
from edgespec.setup.stored import draft_key, settings_key


def test_a_context_that_was_asked_for_needs_no_smaller_cache() -> None:
    whole = plan_of(prefer="context").predicted_peak_bytes
    asked: dict[str, Any] = {"prefer": "context", "budget_bytes": whole * 4 // 5}
    assert plan_of(**asked).kv_type_k == "q8_0"
    assert plan_of(**asked, context_size=1024).kv_type_k == "f16"


def test_exact_avoids_the_path_that_rounds_differently() -> None:
    """K and V of different types; a type that was asked for is not exchanged."""
    plan = plan_of(exact=True)
    assert (plan.exact, plan.kv_type_k, plan.kv_type_v) == (True, "bf16", "f16")
    assert plan.as_json()["kv_type"]["value"] == "bf16/f16"
    assert plan.component_bytes["kv_cache"] == 4096 * CELL
    kept = plan_of(exact=True, kv_type="q8_0")
    assert (kept.kv_type_k, kept.kv_type_v) == ("q8_0", "q8_0")


@pytest.mark.parametrize("head", [64, 512])
def test_exact_keeps_f16_where_attention_is_of_our_own(head: int) -> None:
    if reason := missing_kernels():
        pytest.skip(f"edgespec has no kernels here: {reason}")
    machine, spec = machine_with(64 << 30, missing_kernels=""), model(kind="Q4_0", head=head)
    if not attends(spec.key_length[0], spec.value_length[0]):
        pytest.skip("edgespec's attention needs AVX2, AVX-512 or NEON with dotprod")
    plan = plan_of(spec, machine, exact=True)
    assert (plan.kv_type_k, plan.kv_type_v) == ("f16", "f16")
    assert "edgespec's attention" in plan.as_json()["kv_type"]["reason"]
    assert plan_of(spec, machine, exact=True, kernels="off").kv_type_k == "bf16"


@pytest.mark.parametrize(("keys", "values"), [(576, 0), (640, 640)])
def test_exact_knows_the_heads_that_our_attention_does_not_have(keys: int, values: int) -> None:
    """Latent attention keeps its values in keys of 576; some heads are wider than 576."""
    if reason := missing_kernels():
        pytest.skip(f"edgespec has no kernels here: {reason}")
    spec = model(kind="Q4_0")
    layers = spec.num_layers
    wide = replace(spec, key_length=(keys,) * layers, value_length=(values,) * layers)
    plan = plan_of(wide, machine_with(64 << 30, missing_kernels=""), exact=True)
    assert (plan.kv_type_k, plan.kv_type_v) == ("bf16", "f16")


def test_a_cache_type_needs_heads_of_whole_blocks() -> None:
    with pytest.raises(
        UnsupportedError, match=r"KV cache of q8_0 .* multiple of 32 .* 80"
    ) as caught:
        plan_of(model(head=80), kv_type="q8_0")
    assert "--kv-type f16" in caught.value.hint


def test_weights_are_mapped_unless_the_processor_rewrites_them() -> None:
    """A mapped Q4_0 file would lie beside its rewritten copy, so it is read instead."""
    q4_0, avx2 = model(kind="Q4_0"), machine_with(64 << 30, repacks=True)
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


def test_everything_goes_to_a_gpu_that_has_room() -> None:
    plan = plan_of(SPEC, machine_with(64 << 30, gpu(8 << 30)))
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
        plan = plan_of(SPEC, machine_with(64 << 30, gpu(free)))
        assert plan.predicted_gpu_bytes <= free
        seen.add(plan.gpu_layers)
        if plan.gpu_layers == -1:
            continue
        more = (Device("gpu", plan.gpu_layers + 1, "GPU0"),)
        parts = parts_by_hand(512, devices=more, mapped=False)
        assert sum(part.nbytes for part in parts if part.device == "gpu") > free
    assert {0, -1} < seen, "from none to all, with something between"


def test_a_gpu_without_room_leaves_everything_to_the_processor() -> None:
    plan = plan_of(SPEC, machine_with(64 << 30, gpu(1000)))
    assert (plan.gpu_layers, plan.predicted_gpu_bytes, plan.mapped) == (0, 0, True)


def test_layers_can_be_kept_off_the_gpu() -> None:
    plan = plan_of(SPEC, machine_with(64 << 30, gpu(8 << 30)), gpu_layers=0)
    assert (plan.gpu_layers, plan.predicted_gpu_bytes, plan.batch_size) == (0, 0, 128)
    assert reason(plan, "gpu_layers") == "as asked"


def test_without_a_gpu_that_can_be_used_all_layers_stay_here() -> None:
    """ONNX Runtime has another way to use one."""
    assert plan_of(gpu_layers=-1).gpu_layers == 0
    one, two = gpu(8 << 30), (*gpu(8 << 30), replace(gpu(8 << 30)[0], name="GPU1"))
    for devices in (one, two):
        plan = plan_of(SPEC, machine_with(64 << 30, devices), backend="onnx")
        assert (plan.gpu_layers, plan.predicted_gpu_bytes) == (0, 0)
        assert reason(plan, "gpu_layers") == "layers are offloaded by llama.cpp alone"


def test_as_many_layers_as_were_asked_for() -> None:
    plan = plan_of(SPEC, machine_with(64 << 30, gpu(8 << 30)), gpu_layers=3)
    parts = parts_by_hand(512, devices=(Device("gpu", 3, "GPU0"),), mapped=False)
    weights = {part.device: part.nbytes for part in parts if part.name == "weights"}
    assert plan.gpu_layers == 3
    assert plan.component_bytes["gpu_weights"] == weights["gpu"]
    assert plan.component_bytes["gpu_kv_cache"] == 2 * plan.component_bytes["kv_cache"] // 2


def test_the_settings_of_step_times_know_the_gpu() -> None:
    asked: list[RunConfig] = []

    def speed_of(config: RunConfig) -> SpeedModel:
        asked.append(config)
        return SpeedModel(curve(), is_measured=True)

    plan = plan_of(SPEC, machine_with(64 << 30, gpu(8 << 30)), speed_of, kv_type="q8_0", threads=5)
    (key,) = {settings_key(SPEC, one) for one in (*asked, plan)}
    assert "5 threads | q8_0/q8_0 | -1 gpu layers" in key
    assert key.endswith(f" | {SPEC.num_layers + 1} on Some GPU")
    assert draft_key(SPEC, plan, SPEC).endswith(" | Some GPU")


def test_step_times_of_one_gpu_are_not_another_s() -> None:
    """Its number is the same after GGML_VK_VISIBLE_DEVICES has another one seen."""
    machine = machine_with(64 << 30, gpu(8 << 30))
    (one,) = machine.accelerators
    plans = [
        plan_of(SPEC, replace(machine, accelerators=(replace(one, description=name),)))
        for name in ("fast", "slow")
    ]
    plans.append(plan_of(SPEC, machine, gpu_layers=0))
    assert len({settings_key(SPEC, plan) for plan in plans}) == len(plans)
    assert len({draft_key(SPEC, plan, SPEC) for plan in plans}) == len(plans)


def test_layers_that_no_gpu_can_take_are_refused_with_the_reason() -> None:
    machine = machine_with(64 << 30, missing_gpu="llama.cpp was built for vulkan but sees no GPU")
    with pytest.raises(UnsupportedError, match=r"--gpu-layers 3 .* for vulkan but sees no GPU"):
        plan_of(SPEC, machine, gpu_layers=3)
    assert reason(plan_of(SPEC, machine), "gpu_layers") == machine.missing_gpu


def test_only_the_preference_for_context_takes_a_smaller_cache_and_says_what_it_costs() -> None:
    budget = peak(context_size=4096)
    long = plan_of(budget_bytes=budget, prefer="context")
    assert (long.kv_type_k, long.kv_type_v) == ("q8_0", "q8_0")
    assert long.context_size == 6144  # 34 bytes for 32 values instead of 64, and the text
    assert "what it loses is measured" in reason(long, "kv_type")
    assert plan_of(budget_bytes=budget, prefer="speed").kv_type_k == "f16"
    ample = plan_of(prefer="context")
    assert (ample.kv_type_k, ample.context_size) == ("f16", SPEC.context_length)


@pytest.mark.parametrize(
    ("losses", "kind"),
    [
        ({}, "q8_0"),
        ({"q8_0": 0.001}, "q8_0"),
        ({"q8_0": 0.001, "q4_0": 0.5}, "q8_0"),
        ({"q8_0": 0.001, "q4_0": 0.08}, "q4_0"),
        ({"q8_0": 0.001, "q8_0/q4_0": 0.02, "q5_0": 0.3}, "q8_0/q4_0"),
        ({"q8_0": 0.11, "q4_0": 0.5}, "f16"),
    ],
)
def test_measured_losses_decide_which_cache_is_taken(losses: dict[str, float], kind: str) -> None:
    """The budget is one that q8_0 does not make large enough either."""
    plan = plan_of(budget_bytes=peak(context_size=4096), prefer="context", kv_losses=losses)
    assert (plan.kv_type, plan.kv_loss) == (kind, losses.get(kind))
    if kind in losses:
        assert f"loses {losses[kind]:.2g} nats" in reason(plan, "kv_type")


@pytest.mark.parametrize(
    ("asked", "pair"),
    [
        ({"kv_type": "q8_0", "cache_type_v": "q4_0"}, ("q8_0", "q4_0")),
        ({"cache_type_v": "q4_0"}, ("f16", "q4_0")),
        ({"cache_type_k": "q8_0", "cache_type_v": "q8_0"}, ("q8_0", "q8_0")),
    ],
)
def test_keys_and_values_may_have_two_types(asked: dict[str, Any], pair: tuple[str, str]) -> None:
    plan = plan_of(**asked)
    assert (plan.kv_type_k, plan.kv_type_v) == pair
    assert plan_of(**asked, kv_losses={plan.kv_type: 3.0}).kv_loss == 3.0


def test_a_cache_that_loses_much_is_told_where_it_is_asked_for_and_never_proposed() -> None:
    asked = plan_of(kv_type="q4_0", kv_losses={"q4_0": 5.2, "q8_0": 0.004})
    assert "loses 5.2 nats against f16" in reason(asked, "kv_type")
    assert "no longer this model's" in reason(asked, "kv_type")
    assert asked.as_json()["kv_losses"]["value"] == "q8_0 0.004, q4_0 5.2"
    assert "measured by the first load" in reason(plan_of(kv_type="q4_0"), "kv_type")
    tight: dict[str, Any] = {"context_size": 4096, "budget_bytes": peak(context_size=2560)}
    hint = does_not_fit(**tight, kv_losses={"q8_0": 0.2, "q5_0": 0.01}).hint
    assert "--kv-type q5_0" in hint and "q8_0" not in hint and "loses 0.01 nats" in hint


# -- experts ---------------------------------------------------------------------------------------

EXPERTS = with_experts(model(layers=8, feed_forward=1024), 16, 2)


def placed(plan: Plan) -> tuple[int, int]:
    """Layers on the GPU, and first layers whose experts are not."""
    numbers = [pattern.partition(")")[0].count("|") + 1 for pattern, _ in plan.overrides]
    return plan.gpu_layers, sum(numbers)


def test_experts_stay_here_where_whole_layers_would() -> None:
    """Of as few layers as do not fit; more of them the smaller the GPU is.

    One whole layer here may be less to read than the experts of two.
    """
    seen = []
    for mebibytes in range(4, 80, 4):
        plan = plan_of(EXPERTS, machine_with(64 << 30, gpu(mebibytes * MIB)), context_size=512)
        assert plan.predicted_gpu_bytes <= mebibytes * MIB
        seen += [placed(plan)[1]] if plan.gpu_layers < 0 else []
    assert seen == sorted(seen, reverse=True) and {0, 4, 8} < set(seen)


def test_experts_that_stay_are_read_in_part() -> None:
    """A token reads an eighth of them: that is what the plan compares, and says."""
    plan = plan_of(EXPERTS, machine_with(64 << 30, gpu(36 * MIB)), context_size=512)
    layers, kept = placed(plan)
    assert layers == -1 and 0 < kept < 8
    each = sum(EXPERTS.tensors[f"blk.0.ffn_{one}_exps.weight"].data_bytes for one in PARTS)
    assert plan.component_bytes["weights"] == kept * each + TABLE_BYTES
    read = kept * each // 8 >> 20
    told = reason(plan, "gpu_layers")
    assert f"experts of the first {kept} layers here: a token reads {read} MiB" in told
    whole = plan_of(EXPERTS, machine_with(64 << 30, gpu(36 * MIB)), override_tensor=())
    assert 0 < whole.gpu_layers < 8 and not whole.overrides
    assert f"with {whole.gpu_layers} whole layers elsewhere (--n-cpu-moe 0)" in told


PARTS = ("gate", "up", "down")
TABLE_BYTES = EXPERTS.tensors["token_embd.weight"].data_bytes


def test_tensors_go_where_they_are_asked_to() -> None:
    machine = machine_with(64 << 30, gpu(8 << 30))
    asked = ("ffn_down_exps=CPU", r"blk\.0\.attn_q=GPU0")
    plan = plan_of(EXPERTS, machine, override_tensor=asked)
    assert plan.overrides == (("ffn_down_exps", "host"), (r"blk\.0\.attn_q", "gpu"))
    down = EXPERTS.tensors["blk.0.ffn_down_exps.weight"].data_bytes
    assert plan.component_bytes["weights"] == 8 * down + TABLE_BYTES
    assert "tensors as --override-tensor says" in reason(plan, "gpu_layers")
    alone = plan_of(EXPERTS, machine, override_tensor=asked, gpu_layers=0)
    assert alone.predicted_gpu_bytes > EXPERTS.tensors["blk.0.attn_q.weight"].data_bytes
    assert [(one.label, one.layers) for one in alone.devices] == [("gpu", 0)]


def test_a_device_that_is_not_there_is_told() -> None:
    with pytest.raises(UnsupportedError, match="names CUDA7, and there is no such device") as told:
        plan_of(EXPERTS, machine_with(64 << 30, gpu(8 << 30)), override_tensor=("x=CUDA7",))
    assert told.value.hint == "use CPU, GPU0"


@pytest.mark.parametrize("text", ["", "exps", "=CPU", "exps=", "a\0=CPU", "a" * 5000 + "=CPU"])
def test_what_is_no_pattern_with_a_device_is_told(text: str) -> None:
    with pytest.raises(UnsupportedError, match="is not PATTERN=DEVICE"):
        Request(override_tensor=(text,))


def test_times_of_steps_are_kept_by_where_tensors_lie() -> None:
    machine = machine_with(64 << 30, gpu(8 << 30))
    moved = plan_of(EXPERTS, machine, override_tensor=("ffn_down_exps=CPU",))
    assert settings_key(EXPERTS, moved) != settings_key(EXPERTS, plan_of(EXPERTS, machine))
