"""Which backend runs a file: the one that was measured faster, with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from laid_out import machine_with
from planning_cases import SPEC, thorough

from edgespec.errors import DoesNotFitError, UnsupportedError
from edgespec.memory.device.accelerators import Accelerator
from edgespec.memory.plan.machine import Machine
from edgespec.memory.plan.options import LLAMACPP, ONNX
from edgespec.memory.plan.plan import Plan
from edgespec.memory.plan.request import Request
from edgespec.memory.plan.settings import Settings, settings_of
from edgespec.memory.store import cache
from edgespec.memory.times.curve import CostCurve
from edgespec.models.embedded import embedded_model
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.setup import candidates, planning
from edgespec.setup.planning import make_run_plan
from edgespec.setup.stored import settings_key

pytestmark = pytest.mark.model
INF = float("inf")
MACHINE = machine_with(8 << 30, (), repacks=True)


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    """The embedded model, nothing measured yet, onnxruntime installed."""
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(candidates, "find_spec", lambda _name: object())
    return read_model_spec(embedded_model())


@pytest.fixture(scope="module")
def small_spec(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelSpec]:
    """A small model without an early exit, for all examples of a property."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGESPEC_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(candidates, "find_spec", lambda _name: object())
        patch.setattr(planning, "source_of", lambda _spec, _request: None)
        yield SPEC


def plan(spec: ModelSpec, machine: Machine = MACHINE, **request: Any) -> Plan:
    return make_run_plan(spec, Request(**{"threads": 2, **request}), machine)


def measured(
    spec: ModelSpec,
    backend: str,
    single_ms: float,
    *more_ms: float,
    tried: bool = True,
    kind: str = "f16",
) -> None:
    """Store step times: of one token and more, or of up to 32 that all take as long as one."""
    kinds = ("f32", "f32") if backend == ONNX else (kind, kind)
    settings = Settings(2, *kinds, 0, "suffix", backend)
    curve = CostCurve([INF, single_ms, *(more_ms or [single_ms] * 31)])
    curve.answered_ms = 1e5 * tried
    cache.store("curves", settings_key(spec, settings), curve.as_json())


def choice(made: Plan) -> tuple[str, str]:
    (found,) = (one for one in made.choices if one.name == "backend")
    assert found.value == made.backend
    return made.backend, found.reason


def test_what_was_never_tried_is_not_chosen(spec: ModelSpec) -> None:
    measured(spec, LLAMACPP, 5.0)
    backend, reason = choice(plan(spec))
    assert backend == LLAMACPP
    assert "not tried" in reason and "--backend onnx" in reason


@pytest.mark.parametrize(("llama", "onnx", "backend"), [(5, 4, ONNX), (4, 5, LLAMACPP)])
def test_the_faster_one_is_chosen_and_both_speeds_are_named(
    spec: ModelSpec, llama: float, onnx: float, backend: str
) -> None:
    measured(spec, LLAMACPP, llama)
    measured(spec, ONNX, onnx)
    made = plan(spec)
    assert choice(made)[0] == backend
    assert "with llama.cpp" in choice(made)[1] and "with ONNX Runtime" in choice(made)[1]
    assert made.kv_type_k == ("f32" if backend == ONNX else "f16")


def test_a_gain_within_the_noise_is_no_reason_to_switch(spec: ModelSpec) -> None:
    measured(spec, LLAMACPP, 5.0)
    measured(spec, ONNX, 4.9)
    assert plan(spec).backend == LLAMACPP


def test_a_budget_that_only_one_of_them_fits_decides(spec: ModelSpec) -> None:
    measured(spec, LLAMACPP, 5.0)
    measured(spec, ONNX, 2.0)
    small = plan(spec, backend=LLAMACPP, context_size=512).predicted_peak_bytes
    backend, reason = choice(plan(spec, context_size=512, budget_bytes=small))
    assert backend == LLAMACPP and "budget" in reason
    assert plan(spec, context_size=512).backend == ONNX


def test_what_was_asked_for_is_taken(spec: ModelSpec) -> None:
    measured(spec, LLAMACPP, 5.0)
    measured(spec, ONNX, 2.0)
    assert choice(plan(spec, backend=LLAMACPP)) == (LLAMACPP, "as asked")
    assert choice(plan(spec, backend=ONNX)) == (ONNX, "as asked")
    assert "q8_0" in choice(plan(spec, kv_type="q8_0"))[1]


def test_a_gpu_is_llama_cpps(spec: ModelSpec) -> None:
    measured(spec, ONNX, 1.0)
    gpu = Accelerator("CUDA0", "a GPU", 8 << 30, 7 << 30, shares_memory=False)
    made = plan(spec, machine_with(8 << 30, (gpu,)))
    assert choice(made) == (LLAMACPP, "runs on the GPU")


def test_without_onnxruntime_the_reason_says_so(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(spec, ONNX, 1.0)
    monkeypatch.setattr(candidates, "find_spec", lambda _name: None)
    assert choice(plan(spec)) == (LLAMACPP, "ONNX Runtime is not installed")


def test_options_that_onnx_runtime_cannot_honour_are_refused(spec: ModelSpec) -> None:
    with pytest.raises(UnsupportedError, match="KV cache of q8_0") as caught:
        plan(spec, backend=ONNX, kv_type="q8_0")
    assert "llamacpp" in caught.value.hint
    with pytest.raises(UnsupportedError, match="--gpu-layers 4"):
        plan(spec, backend=ONNX, gpu_layers=4)


def test_an_npu_is_onnx_runtimes_and_measured_apart(spec: ModelSpec) -> None:
    made = plan(spec, device="npu")
    assert choice(made) == (ONNX, "an NPU is ONNX Runtime's")
    assert made.device == "npu" and made.as_json()["device"]["reason"] == "as asked"
    usual = plan(spec, backend=ONNX)
    assert (usual.device, plan(spec).device) == ("cpu", "cpu")
    keys = {settings_key(spec, settings_of(one)) for one in (made, usual)}
    assert len(keys) == 2 and min(keys, key=len) + " on npu" in keys
    with pytest.raises(UnsupportedError, match=r"not possible with llama\.cpp"):
        plan(spec, device="npu", backend=LLAMACPP)


def test_a_device_maps_to_layers_with_llama_cpp(spec: ModelSpec) -> None:
    gpu = Accelerator("CUDA0", "a GPU", 8 << 30, 7 << 30, shares_memory=False)
    machine = machine_with(8 << 30, (gpu,))
    assert plan(spec, machine).device == plan(spec, machine, device="gpu").device == "gpu"
    assert plan(spec, machine, device="gpu").gpu_layers == -1
    on_cpu = plan(spec, machine, device="cpu")
    assert (on_cpu.device, on_cpu.gpu_layers) == ("cpu", 0)
    measured(spec, ONNX, 1.0)
    assert plan(spec, machine, device="cpu").backend == ONNX, "no GPU in the way"
    for device, layers in (("cpu", 4), ("gpu", 0)):
        with pytest.raises(UnsupportedError, match="contradict"):
            plan(spec, machine, device=device, gpu_layers=layers)


def test_a_gpu_that_is_not_there_is_refused(spec: ModelSpec) -> None:
    with pytest.raises(UnsupportedError, match=r"llama\.cpp sees no GPU") as caught:
        plan(spec, device="gpu")
    assert "--backend onnx" in caught.value.hint
    assert plan(spec, device="gpu", backend=ONNX).device == "gpu"


def test_exact_steps_are_measured_apart(spec: ModelSpec) -> None:
    """A padded one-token step is slower: its times belong to `--exact` alone."""
    usual, exact = (settings_of(plan(spec, backend=ONNX, exact=exact)) for exact in (False, True))
    assert settings_key(spec, usual) != settings_key(spec, exact)


def test_weights_that_change_their_type_are_named(spec: ModelSpec) -> None:
    """The embedded file is Q4_1 with a Q6_K or Q8_0 table; only Q4_0 and Q8_0 are taken over."""
    (mapped,) = (one for one in plan(spec, backend=ONNX).choices if one.name == "mapped")
    assert "Q4_1" in mapped.reason and "8 bits" in mapped.reason


@pytest.mark.slow
@settings(thorough, max_examples=12, phases=(Phase.explicit, Phase.generate))
@given(
    st.lists(st.floats(3.0, 60.0), min_size=1, max_size=31),
    st.lists(st.floats(3.0, 60.0), min_size=1, max_size=31),
    st.booleans(),
    st.sampled_from(({}, {"prefer": "context"}, {"max_tokens": 2000, "prompt_tokens": 600})),
)
def test_more_budget_never_buys_less(
    small_spec: ModelSpec,
    llama: list[float],
    onnx: list[float],
    is_tried: bool,
    request_of: dict[str, Any],
) -> None:
    """Context, drafts and predicted speed over 40 budgets, with both backends measured."""
    spec = small_spec
    for kind in ("f16", "q8_0"):
        measured(spec, LLAMACPP, min(llama), *llama, kind=kind)
    measured(spec, ONNX, min(onnx), *onnx, tried=is_tried)
    ample = plan(spec, backend=ONNX, **request_of).predicted_peak_bytes
    reached = (0, 0, 0.0)
    for step in range(1, 41):
        try:
            made = plan(spec, budget_bytes=int(ample * (0.3 + step / 40)), **request_of)
        except DoesNotFitError:
            assert reached == (0, 0, 0.0), "less was enough"
            continue
        now = made.context_size, made.draft_max, made.tokens_per_s * (1 + 1e-9)
        assert all(new >= old for new, old in zip(now, reached, strict=True)), (now, reached)
        reached = made.context_size, made.draft_max, made.tokens_per_s
    assert reached[0] > 0


def test_a_backend_that_takes_more_memory_must_be_worth_it(spec: ModelSpec) -> None:
    """1.3x as fast for 160 MiB more: much of a small budget, nothing of a large machine."""
    measured(spec, LLAMACPP, 5.2)
    measured(spec, ONNX, 4.0)
    needed = plan(spec, backend=ONNX).predicted_peak_bytes
    assert plan(spec).backend == ONNX
    tight = plan(spec, budget_bytes=needed)
    backend, reason = choice(tight)
    assert backend == LLAMACPP and "to be worth its memory" in reason
    assert plan(spec, budget_bytes=2 * needed).backend == ONNX


def test_a_backend_that_was_only_timed_must_promise_more(spec: ModelSpec) -> None:
    """Its prediction was never held against an answer."""
    measured(spec, LLAMACPP, 5.0)
    measured(spec, ONNX, 4.4, tried=False)
    assert plan(spec).backend == LLAMACPP
    measured(spec, ONNX, 4.4)
    assert plan(spec).backend == ONNX


def test_nothing_is_left_out_for_the_faster_backend(spec: ModelSpec) -> None:
    measured(spec, LLAMACPP, 5.0)
    measured(spec, ONNX, 2.0)
    usual = partial(plan, spec, drafter="suffix")  # no early exit, which might be left out instead
    whole = usual(backend=ONNX)
    budget = usual(backend=ONNX, context_size=whole.context_size - 256).predicted_peak_bytes
    made = usual(budget_bytes=budget)
    assert choice(made)[0] == LLAMACPP and "left out for it" in choice(made)[1]
    assert made.context_size == whole.context_size
