"""Which backend runs a file: llama.cpp, unless ONNX Runtime is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from laid_out import machine_with
from planning_cases import SPEC, thorough

from edgespec.errors import DoesNotFitError, UnsupportedError
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.device.accelerators import Accelerator
from edgespec.memory.plan.machine import Machine
from edgespec.memory.plan.options import LLAMACPP, ONNX
from edgespec.memory.plan.plan import Plan, Request
from edgespec.memory.store import cache
from edgespec.memory.times import CostCurve
from edgespec.models.embedded import embedded_model
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.setup import planning
from edgespec.setup.planning import make_run_plan
from edgespec.setup.stored import settings_key

pytestmark = pytest.mark.model
INF = float("inf")
MACHINE = machine_with(8 << 30, (), repacks=True)


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    """The embedded model, nothing measured yet."""
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path))
    return read_model_spec(embedded_model())


@pytest.fixture(scope="module")
def small_spec(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelSpec]:
    """A small model without an early exit, for all examples of a property."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGESPEC_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(planning, "source_of", lambda _spec, _request: None)
        yield SPEC


def plan(spec: ModelSpec, machine: Machine = MACHINE, **request: Any) -> Plan:
    return make_run_plan(spec, Request(**{"threads": 2, **request}), machine)


def measured(
    spec: ModelSpec,
    backend: str,
    single_ms: float,
    *more_ms: float,
    kind: str = "f16",
) -> None:
    """Store step times: of one token and more, or of up to 32 that all take as long as one."""
    kinds = ("f32", "f32") if backend == ONNX else (kind, kind)
    key, value = kinds
    settings = RunConfig(512, threads=2, kv_type_k=key, kv_type_v=value, backend=backend)
    curve = CostCurve([INF, single_ms, *(more_ms or [single_ms] * 31)])
    cache.store("curves", settings_key(spec, settings), curve.as_json())


def choice(made: Plan) -> tuple[str, str]:
    (found,) = (one for one in made.choices if one.name == "backend")
    assert found.value == made.backend
    return made.backend, found.reason


def test_a_faster_onnx_runtime_is_not_chosen_unless_asked_for(spec: ModelSpec) -> None:
    measured(spec, LLAMACPP, 5.0)
    measured(spec, ONNX, 1.0)
    assert choice(plan(spec)) == (LLAMACPP, "it runs GGUF files")
    assert choice(plan(spec, users=4)) == (LLAMACPP, "it runs GGUF files")


def test_what_was_asked_for_is_taken(spec: ModelSpec) -> None:
    measured(spec, LLAMACPP, 5.0)
    measured(spec, ONNX, 2.0)
    assert choice(plan(spec, backend=LLAMACPP)) == (LLAMACPP, "as asked")
    assert choice(plan(spec, backend=ONNX)) == (ONNX, "as asked")


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
    keys = {settings_key(spec, one) for one in (made, usual)}
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
    usual, exact = (plan(spec, backend=ONNX, exact=exact) for exact in (False, True))
    assert settings_key(spec, usual) != settings_key(spec, exact)


def test_weights_that_change_their_type_are_named(spec: ModelSpec) -> None:
    """The embedded file is Q4_1 with a Q6_K or Q8_0 table; only Q4_0 and Q8_0 are taken over."""
    (mapped,) = (one for one in plan(spec, backend=ONNX).choices if one.name == "mapped")
    assert "Q4_1" in mapped.reason and "8 bits" in mapped.reason


@pytest.mark.slow
@settings(thorough, max_examples=12, phases=(Phase.explicit, Phase.generate))
@given(
    st.lists(st.floats(3.0, 60.0), min_size=1, max_size=31),
    st.sampled_from((LLAMACPP, ONNX)),
    st.sampled_from(({}, {"prefer": "context"}, {"max_tokens": 2000, "prompt_tokens": 600})),
)
def test_more_budget_never_buys_less(
    small_spec: ModelSpec, steps_ms: list[float], backend: str, request_of: dict[str, Any]
) -> None:
    """Context, drafts and predicted speed over 40 budgets, with either backend."""
    spec, request_of = small_spec, {"backend": backend, **request_of}
    for kind in ("f16", "q8_0"):
        measured(spec, backend, min(steps_ms), *steps_ms, kind=kind)
    ample = plan(spec, **request_of).predicted_peak_bytes
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
