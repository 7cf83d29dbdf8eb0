"""Layers shared among the host, GPUs and workers: by bytes, by speed, and as asked."""

from __future__ import annotations

from dataclasses import replace

import pytest
from laid_out import machine_with
from planning_cases import (
    MIB,
    SPEC,
    does_not_fit,
    gpu,
    measured,
    model,
    plan_of,
    reason,
    with_experts,
)

from edgespec.errors import UnsupportedError
from edgespec.memory.device.accelerators import Accelerator
from edgespec.memory.plan.layout import Layout
from edgespec.memory.plan.machine import Machine
from edgespec.memory.plan.placing import step_s
from edgespec.memory.plan.plan import Plan, Request, draft_config
from edgespec.memory.plan.planner import make_plan
from edgespec.setup.stored import settings_key

HOST_SPEED = 10e9
LARGE = model(layers=8, width=1024, head=64, heads=(16, 4), feed_forward=2048, vocabulary=2000)


def worker(
    free: int, speed: float = HOST_SPEED, latency_s: float = 0.0, port: int = 1
) -> Accelerator:
    name = f"10.0.0.{port}:50052"
    return Accelerator(name, f"CPU of worker {name}", free, free, False, name, 0, speed, latency_s)


def machine(*devices: Accelerator, free: int = 64 << 30) -> Machine:
    return machine_with(free, devices, bytes_per_s=HOST_SPEED)


def counts(plan: Plan) -> dict[str, int]:
    return {one.label: one.layers for one in plan.devices}


def test_a_faster_worker_takes_everything() -> None:
    plan = plan_of(LARGE, machine(worker(8 << 30, 4 * HOST_SPEED)))
    assert counts(plan) == {"worker1": 9}
    assert (plan.gpu_layers, plan.device, plan.predicted_gpu_bytes) == (9, "cpu", 0)
    assert plan.predicted_bytes_of("worker1") == sum(
        size for name, size in plan.component_bytes.items() if name.startswith("worker1_")
    )
    assert "9 on 10.0.0.1:50052, 0 here; the fastest ones filled first" in reason(
        plan, "gpu_layers"
    )


@pytest.mark.parametrize(
    "other",
    [worker(8 << 30, HOST_SPEED / 2), worker(8 << 30, 4 * HOST_SPEED, latency_s=0.05)],
    ids=["slower", "far away"],
)
def test_a_worker_that_costs_time_is_left_out_where_the_host_has_room(other: Accelerator) -> None:
    plan = plan_of(LARGE, machine(other))
    assert (counts(plan), plan.gpu_layers) == ({}, 0)
    assert "this machine has room for all" in reason(plan, "gpu_layers")
    assert counts(plan_of(LARGE, machine(other), gpu_layers=3)) == {"worker1": 3}, "as asked"


def test_no_layers_are_elsewhere_where_none_are_asked_for() -> None:
    assert counts(plan_of(LARGE, machine(worker(8 << 30, 4 * HOST_SPEED)), gpu_layers=0)) == {}


def test_a_worker_of_unknown_speed_counts_as_fast_as_this_machine() -> None:
    plans = [
        plan_of(LARGE, machine(worker(8 << 30, speed), free=90 * MIB), context_size=512)
        for speed in (0.0, HOST_SPEED)
    ]
    assert counts(plans[0]) == counts(plans[1]) != {}


def test_a_slow_worker_takes_what_the_host_has_no_room_for() -> None:
    alone = plan_of(LARGE, machine())
    room = alone.predicted_peak_bytes - 30 * MIB
    plan = plan_of(
        LARGE, machine(worker(8 << 30, HOST_SPEED / 2), free=room), context_size=4096, draft_max=0
    )
    assert 0 < counts(plan)["worker1"] < 9
    assert plan.predicted_peak_bytes <= room


def test_the_fastest_of_several_are_filled_first() -> None:
    slow, fast = worker(8 << 30, 2 * HOST_SPEED, port=1), worker(30 * MIB, 4 * HOST_SPEED, port=2)
    found = counts(plan_of(LARGE, machine(slow, fast)))
    assert 0 < found["worker2"] < 9 and found["worker1"] == 9 - found["worker2"]


def test_each_device_has_its_own_layers_and_stays_below_what_is_free() -> None:
    first, second = (
        worker(24 * MIB, 4 * HOST_SPEED, port=1),
        worker(40 * MIB, 4 * HOST_SPEED, port=2),
    )
    plan = plan_of(LARGE, machine(first, second))
    for share in plan.devices:
        assert plan.predicted_bytes_of(share.label) <= share.free_bytes


def test_a_gpu_comes_last_and_counts_as_the_fastest() -> None:
    """The last layers, and with them the logits, are on this machine."""
    devices = worker(8 << 30, 4 * HOST_SPEED), *gpu(30 * MIB)
    plan = plan_of(LARGE, machine(*devices))
    found = counts(plan)
    assert list(found) == ["worker1", "gpu"] and 0 < found["gpu"] < 9
    assert sum(found.values()) == 9
    assert plan.predicted_gpu_bytes == plan.predicted_bytes_of("gpu") <= 30 * MIB


@pytest.mark.parametrize("asked", [-1, 8])
def test_a_device_is_filled_that_does_not_have_the_head(asked: int) -> None:
    """The first one, which has the first layers: as many as there is room for, the head apart."""
    spec = model(8, 1024, heads=(16, 4), feed_forward=2048, vocabulary=48_000)
    room = 40 * MIB
    devices = worker(room, 2 * HOST_SPEED, port=1), worker(8 << 30, port=2)
    plan = plan_of(spec, machine(*devices), gpu_layers=asked, context_size=512, draft_max=0)
    found = counts(plan)
    assert set(found) == {"worker1", "worker2"}
    assert sum(found.values()) == (9 if asked < 0 else asked)
    assert 0.9 * room < plan.predicted_bytes_of("worker1") <= room


def test_two_gpus_share_layers_by_their_bytes() -> None:
    first, second = gpu(30 * MIB)[0], replace(gpu(40 * MIB)[0], name="GPU1")
    plan = plan_of(LARGE, machine(first, second))
    assert set(counts(plan)) == {"gpu1", "gpu2"}
    for label, free in (("gpu1", 30 * MIB), ("gpu2", 40 * MIB)):
        assert 0 < plan.predicted_bytes_of(label) <= free


def test_a_budget_is_of_this_machine() -> None:
    alone = plan_of(LARGE, machine(), context_size=4096, draft_max=0)
    budget = alone.predicted_peak_bytes - 30 * MIB
    plan = plan_of(
        LARGE, machine(worker(8 << 30)), budget_bytes=budget, context_size=4096, draft_max=0
    )
    assert counts(plan) and plan.predicted_peak_bytes <= budget
    assert plan.predicted_peak_bytes + plan.predicted_bytes_of("worker1") > budget


def test_the_error_names_the_device_that_is_full() -> None:
    error = does_not_fit(LARGE, machine(worker(9 * MIB)), gpu_layers=-1, context_size=512)
    assert "free on worker 10.0.0.1:50052: 9 MiB" in str(error)
    assert "worker1 weights" in str(error)


def test_step_times_are_kept_for_the_shares() -> None:
    near = plan_of(LARGE, machine(worker(8 << 30)), gpu_layers=4)
    other = plan_of(LARGE, machine(worker(8 << 30, port=2)), gpu_layers=4)
    assert settings_key(LARGE, near).endswith(" | 4 on 10.0.0.1:50052")
    assert settings_key(LARGE, near) != settings_key(LARGE, other)
    assert " on " not in settings_key(LARGE, plan_of(LARGE, machine()))


def test_a_draft_model_stays_here() -> None:
    """A trip for each of its tokens would cost more than it saves."""
    plan = plan_of(LARGE, machine(worker(8 << 30)), gpu_layers=4)
    assert (draft_config(plan, LARGE).gpu_layers, plan.gpu_layers) == (0, 4)
    beside = plan_of(LARGE, machine(worker(8 << 30), *gpu(8 << 30)), gpu_layers=-1)
    assert draft_config(beside, LARGE).gpu_layers == -1


def test_what_workers_are_not_used_with_is_refused() -> None:
    there = machine(worker(8 << 30))
    with pytest.raises(UnsupportedError, match="ONNX Runtime"):
        plan_of(SPEC, there, backend="onnx", workers=("10.0.0.1:50052",))
    with pytest.raises(UnsupportedError, match="--switch"):
        request = Request(workers=("10.0.0.1:50052",))
        make_plan(SPEC, request, there, measured(), switch_spec=SPEC)


EXPERTS = with_experts(model(layers=8, feed_forward=1024), 16, 2)


def test_a_worker_without_room_for_all_leaves_experts_here() -> None:
    """A worker four times as fast: what a token reads there costs a quarter."""
    fast = worker(36 * MIB, 4 * HOST_SPEED)
    plan = plan_of(EXPERTS, machine(fast), context_size=512, draft_max=0)
    assert counts(plan) == {"worker1": 9} and plan.overrides
    assert plan.predicted_bytes_of("worker1") <= 36 * MIB
    assert "experts of the first" in reason(plan, "gpu_layers")


def test_experts_on_the_way_to_a_far_worker_cost_trips() -> None:
    """Each layer with experts here goes there and back once more: whole layers stay instead."""
    far = worker(36 * MIB, 4 * HOST_SPEED, latency_s=20e-6)
    plan = plan_of(EXPERTS, machine(far), context_size=512, draft_max=0)
    assert 0 < counts(plan)["worker1"] < 9 and not plan.overrides


def test_three_ways_in_the_right_order() -> None:
    """Whole layers, all experts, and experts of few layers here: by bytes over bandwidth."""
    layout = Layout(EXPERTS, machine(worker(8 << 30, 4 * HOST_SPEED)), Request(), 2, "f16", "f16")
    each = sum(EXPERTS.tensors[f"blk.0.{name}.weight"].data_bytes for name in DENSE)
    experts = EXPERTS.tensors["blk.0.ffn_up_exps.weight"].data_bytes * 3 / 8
    table = EXPERTS.tensors["token_embd.weight"].data_bytes
    all_read = 8 * (each + experts) + table

    def seconds(here: float) -> float:
        return (here + (all_read - here) / 4) / HOST_SPEED

    ways = {5: (0, 4 * (each + experts)), 9: (8, 8 * experts)}
    for count, (kept, here) in ways.items():
        found = step_s(replace(layout, experts_here=kept), (count,))
        assert found == pytest.approx(seconds(here), rel=0.001)
    assert step_s(replace(layout, experts_here=2), (9,)) == pytest.approx(
        seconds(2 * experts), rel=0.001
    )


def test_a_step_waits_for_what_it_fetches() -> None:
    """Once for a worker's layers, and three times for each one whose experts lie here."""
    layouts = [
        Layout(EXPERTS, machine(worker(8 << 30, HOST_SPEED, wait)), Request(), 2, "f16", "f16")
        for wait in (0.0, 1.0)
    ]
    for kept, count, waits in ((0, 5, 1), (8, 9, 1 + 3 * 8), (6, 5, 1 + 3 * 2), (3, 5, 1)):
        near, far = (step_s(replace(one, experts_here=kept), (count,)) for one in layouts)
        assert far - near == pytest.approx(waits), (kept, count)


DENSE = ("attn_q", "attn_k", "attn_v", "attn_output")
