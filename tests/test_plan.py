"""Footprints by hand, and plans by property: a plan fits, or the refusal says what would."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from edgespec.errors import DoesNotFitError, UnsupportedError
from edgespec.memory import cache, device
from edgespec.memory.curve import CostCurve
from edgespec.memory.footprint import (
    compute_bytes,
    footprint,
    kv_cache_bytes,
    padded,
    weights_bytes,
)
from edgespec.memory.plan import Plan, Request, make_plan
from edgespec.models.spec import ModelSpec
from edgespec.planning import calibration_key, make_run_plan, settings_key, stored_curve

MIB = 1 << 20
INF = float("inf")
PLENTY = 64 << 30
quick = settings(max_examples=300, deadline=None, derandomize=True, database=None)

# Two layers, embedding 64, 4 heads of 16, 2 of them for keys and values; a Q4_0 file of 12 MiB.
SPEC = ModelSpec(
    path=Path("tiny.gguf"),
    files=(Path("tiny.gguf"),),
    file_bytes=12 * MIB + 4096,
    weight_bytes=12 * MIB,
    fingerprint="f00d",
    arch="llama",
    name="tiny",
    file_type="Q4_0",
    notes=(),
    num_layers=2,
    num_prediction_layers=0,
    embedding_size=64,
    vocab_size=1000,
    context_length=32768,
    feed_forward_size=(96, 80),
    num_heads=(4, 4),
    num_kv_heads=(2, 2),
    key_length=(16, 16),
    value_length=(16, 16),
    sliding_window=0,
    is_sliding=(False, False),
    num_experts=0,
    num_experts_used=0,
    expert_feed_forward_size=0,
    is_recurrent=False,
    is_hybrid=False,
    is_recurrent_layer=(False, False),
    state_values=0,
    has_encoder=False,
    tied_embeddings=False,
    group_bytes=(("token_embd", 3 * MIB), ("output", 2 * MIB), ("feed_forward", 7 * MIB)),
    type_bytes=(("Q4_0", 9 * MIB), ("Q6_K", 2 * MIB), ("F32", MIB)),
    layer_bytes=(3 * MIB, 4 * MIB),
    chat_template=None,
    bos_id=None,
    eos_id=None,
    add_bos=None,
    tokenizer_model="gpt2",
    tokenizer_pre="",
    tokenizer_hash="",
)
RECURRENT = replace(
    SPEC,
    arch="mamba",
    is_recurrent=True,
    num_kv_heads=(0, 0),
    is_recurrent_layer=(True, True),
    state_values=5000,
)


# ------------------------------------------------------------------------------ footprint


def test_caches_are_made_of_blocks_of_256_cells() -> None:
    assert [padded(cells) for cells in (1, 256, 257, 1000, 4096)] == [256, 256, 512, 1024, 4096]


@pytest.mark.parametrize(
    ("type_k", "type_v", "per_layer_and_cell"),
    [
        ("f16", "f16", 2 * (16 + 16) * 2),
        ("f32", "f32", 2 * (16 + 16) * 4),
        ("f16", "bf16", 2 * (16 + 16) * 2),
        ("q8_0", "q8_0", 2 * (17 + 17)),  # 34 bytes per 32 values
        ("q4_0", "q4_0", 2 * (9 + 9)),  # 18 bytes per 32 values
        ("f16", "q8_0", 2 * (32 + 17)),
    ],
)
def test_the_cache_by_hand(type_k: str, type_v: str, per_layer_and_cell: int) -> None:
    """1,000 tokens take 1,024 cells in each of two layers of two heads of 16 + 16 values."""
    assert kv_cache_bytes(SPEC, 1000, 256, type_k, type_v) == 2 * 1024 * per_layer_and_cell


def test_layers_are_counted_as_they_are() -> None:
    """Layer 0 caches nothing; layer 1 has 3 heads of 32 + 8 values."""
    spec = replace(SPEC, num_kv_heads=(0, 3), key_length=(16, 32), value_length=(16, 8))
    assert kv_cache_bytes(spec, 512, 256) == 512 * 3 * (32 + 8) * 2


def test_a_sliding_layer_holds_its_window_and_a_batch() -> None:
    """300 + 256 tokens take 768 cells; a context that is shorter needs no more than itself."""
    spec = replace(SPEC, sliding_window=300, is_sliding=(True, False))
    assert kv_cache_bytes(spec, 4096, 256) == (768 + 4096) * 128
    assert kv_cache_bytes(spec, 512, 256) == (512 + 512) * 128


def test_recurrent_state_is_counted_once_whatever_the_context() -> None:
    assert kv_cache_bytes(RECURRENT, 256, 256) == kv_cache_bytes(RECURRENT, 9999, 256) == 20_000


def test_intermediate_results_by_hand() -> None:
    """288 tokens of 2 * 96 + 6 * 64 numbers, their masks over 512 cells, 32 rows of logits."""
    activations, masks, rows = 288 * 576 * 4, 288 * 512 * 6, 32 * 1000 * 4
    assert compute_bytes(SPEC, 288, 32, 512) == activations + masks + rows
    no_mlp = replace(SPEC, feed_forward_size=(0, 0))
    assert compute_bytes(no_mlp, 256, 0, 300) == 256 * (2 * 256 + 384) * 4 + 256 * 512 * 6


def test_weights_that_the_cpu_repacks_are_there_twice() -> None:
    """9 MiB of Q4_0, less the 3 MiB of the lookup table, which is only read by rows.

    With tied embeddings the table is the output layer too, and is repacked.
    """
    assert weights_bytes(SPEC, 0) == {"weights": 12 * MIB, "weights_repacked": 6 * MIB}
    tied = replace(SPEC, tied_embeddings=True)
    assert weights_bytes(tied, 0)["weights_repacked"] == 9 * MIB
    q6 = replace(SPEC, file_type="Q6_K", type_bytes=(("Q6_K", 12 * MIB),))
    assert weights_bytes(q6, 0)["weights_repacked"] == 0


def footprint_of(spec: ModelSpec = SPEC, **changes: Any) -> dict[str, int]:
    options: dict[str, Any] = {
        "context_size": 1000,
        "batch_size": 256,
        "max_nodes": 32,
        "type_k": "f16",
        "type_v": "f16",
        "gpu_layers": 0,
        "drafter_bytes": 7777,
    }
    return footprint(spec, **{**options, **changes})


def test_a_whole_run_by_hand() -> None:
    parts = footprint_of()
    runtime = parts.pop("runtime")
    assert parts == {
        "weights": 12 * MIB,
        "weights_repacked": 6 * MIB,
        "kv_cache": 2 * 1024 * 128,
        "compute": (256 + 32) * (576 * 4 + 1024 * 6) + 128_000,
        "logits": 128_000,
        "drafter_tables": 7777,
    }
    # The interpreter and its libraries alone take more than 40 MiB.
    assert 40 * MIB < runtime < 200 * MIB


def test_a_larger_vocabulary_needs_larger_tables() -> None:
    larger = footprint_of(replace(SPEC, vocab_size=151_936))
    assert larger["runtime"] - footprint_of()["runtime"] >= 150_936 * 32
    assert larger["logits"] == 32 * 151_936 * 4


def test_a_sliding_layer_of_a_run_holds_its_window_and_the_whole_batch() -> None:
    """LlamaBackend's batch is 256 + 32 tokens, so a window of 512 takes 1,024 cells, not 768.

    llama.cpp says so for Gemma 3 270M (15 such layers of 18): 28,311,552 bytes for 4,096 tokens.
    """
    spec = replace(SPEC, sliding_window=512, is_sliding=(True, False))
    assert footprint_of(spec, context_size=4096)["kv_cache"] == (1024 + 4096) * 128


# ------------------------------------------------------------------------------ choices


def plan_of(spec: ModelSpec = SPEC, **request: Any) -> Plan:
    return make_plan(spec, Request(**request), drafter_bytes=7777, available_bytes=PLENTY)


def test_a_plan_without_wishes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "usable_cores", lambda: 6)
    plan = plan_of()
    assert (plan.context_size, plan.threads, plan.drafter) == (4096, 6, "suffix")
    assert (plan.kv_type_k, plan.kv_type_v) == ("f16", "f16")
    assert not plan.exact
    assert plan.components["kv_cache"] == 4096 * 2 * 128
    assert plan.components["drafter_tables"] == 7777
    assert plan.predicted_peak_bytes == sum(plan.components.values())
    assert plan.available_bytes == PLENTY


def test_what_is_asked_for_is_what_is_planned() -> None:
    plan = plan_of(
        context_size=2000, threads=3, kv_type="q8_0", gpu_layers=7, draft_max=5, drafter="none"
    )
    assert (plan.context_size, plan.threads, plan.gpu_layers) == (2000, 3, 7)
    assert (plan.kv_type_k, plan.kv_type_v, plan.drafter) == ("q8_0", "q8_0", "none")
    values = {name: choice["value"] for name, choice in plan.as_json().items()}
    assert values == {
        "context_size": 2000,
        "threads": 3,
        "kv_type": "q8_0",
        "gpu_layers": 7,
        "drafter": "none",
        "draft_max": 0,
        "batch_size": plan.batch_size,
    }


def test_every_choice_has_a_reason() -> None:
    reasons = {name: choice["reason"] for name, choice in plan_of(threads=3).as_json().items()}
    assert set(reasons) == {
        "context_size", "threads", "kv_type", "gpu_layers", "drafter", "draft_max", "batch_size",
    }  # fmt: skip
    assert all(reasons.values())
    assert reasons["threads"] == "as asked"
    assert reasons["context_size"] != "as asked"


@pytest.mark.parametrize(
    ("request_", "trained", "context_size"),
    [
        (Request(), 32768, 4096),
        (Request(), 2048, 2048),
        (Request(prompt_tokens=3000, max_tokens=1000), 32768, 4096),
        (Request(prompt_tokens=5000, max_tokens=1000), 32768, 6144),
        (Request(prompt_tokens=40_000, max_tokens=1000), 32768, 32768),
        (Request(context_size=333), 32768, 333),
        (Request(context_size=32768), 32768, 32768),
    ],
)
def test_the_context_is_what_is_needed_and_what_was_trained(
    request_: Request, trained: int, context_size: int
) -> None:
    spec = replace(SPEC, context_length=trained)
    assert make_plan(spec, request_, available_bytes=PLENTY).context_size == context_size


def test_draft_nodes_are_paid_for() -> None:
    """A node is a row of 1,000 logits, here and in the compute buffer, 576 numbers, and a mask."""
    more, fewer = plan_of(draft_max=31), plan_of(draft_max=0)
    assert more.predicted_peak_bytes - fewer.predicted_peak_bytes == 31 * (
        (2 * 1000 + 576) * 4 + 4096 * 6
    )


def test_exact_avoids_the_path_that_rounds_differently() -> None:
    """K and V of different types; a type that was asked for is not exchanged."""
    plan = plan_of(exact=True)
    assert plan.exact
    kinds = plan.kv_type_k, plan.kv_type_v
    assert kinds[0] != kinds[1]
    assert plan.as_json()["kv_type"]["value"] == "/".join(kinds)
    assert plan.components["kv_cache"] == kv_cache_bytes(SPEC, 4096, 256, *kinds)
    assert plan_of(exact=True, kv_type="f32").kv_type_v == "f32"


@pytest.mark.parametrize("spec", [RECURRENT, replace(SPEC, arch="jamba", is_hybrid=True)])
def test_a_state_that_cannot_be_rolled_back_has_no_drafter_and_no_tables(spec: ModelSpec) -> None:
    plan = make_plan(spec, Request(), drafter_bytes=7777, available_bytes=PLENTY)
    assert (plan.drafter, plan.draft_max, plan.components["drafter_tables"]) == ("none", 0, 0)
    assert "rolled back" in plan.as_json()["drafter"]["reason"]
    with pytest.raises(UnsupportedError, match=f"{spec.arch} .*cannot be rolled back"):
        plan_of(spec, drafter="suffix")


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
        ({"drafter": "lookahead"}, "'lookahead'"),
    ],
    ids=str,
)
def test_an_impossible_option_is_refused_with_its_value_and_a_hint(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "available_bytes", lambda: PLENTY)
    with pytest.raises(UnsupportedError, match=re.escape(message)) as caught:
        make_run_plan(SPEC, Request(**options))
    assert caught.value.hint


def test_a_files_weights_are_counted_as_the_cpu_holds_them() -> None:
    """Nothing says that there is a GPU, so a ceiling holds what the CPU repacks."""
    assert plan_of().components.get("weights_repacked") == 6 * MIB


# ------------------------------------------------------------------------------ what does not fit


def bytes_of(context_size: int, **request: Any) -> int:
    return plan_of(context_size=context_size, **request).predicted_peak_bytes


def test_a_context_nobody_asked_for_shrinks_until_it_fits() -> None:
    plan = make_plan(SPEC, Request(), drafter_bytes=7777, available_bytes=bytes_of(2560) + 5)
    assert plan.context_size == 2560
    assert plan.as_json()["context_size"] == {
        "value": 2560,
        "reason": "the largest that fits in free memory",
    }


def test_a_context_that_was_asked_for_is_refused_with_the_largest_that_fits() -> None:
    available = bytes_of(2560) + 5
    needed = bytes_of(8192)
    with pytest.raises(DoesNotFitError) as caught:
        make_plan(SPEC, Request(context_size=8192), drafter_bytes=7777, available_bytes=available)
    message = str(caught.value)
    assert f"needs {-(-needed // MIB)} MiB for 8192 tokens" in message
    assert f"free: {available // MIB} MiB" in message
    assert "`--ctx 2560` fits" in caught.value.hint


def test_a_prompt_that_leaves_no_room_is_refused_instead_of_cut() -> None:
    available = bytes_of(2560)
    request = Request(prompt_tokens=3000, max_tokens=100)
    with pytest.raises(DoesNotFitError, match="4096 tokens"):
        make_plan(SPEC, request, drafter_bytes=7777, available_bytes=available)


def test_a_model_that_cannot_fit_at_all_says_so() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        make_plan(SPEC, Request(), available_bytes=20 * MIB)
    assert caught.value.hint == "use a smaller model file"


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    """Models of many shapes: sliding, recurrent and shared layers, up to 16 GiB of weights."""
    num_layers = draw(st.integers(1, 4))
    recurrent = draw(st.booleans())

    def each(values: st.SearchStrategy[Any]) -> tuple[Any, ...]:
        return tuple(draw(st.lists(values, min_size=num_layers, max_size=num_layers)))

    return replace(
        SPEC,
        num_layers=num_layers,
        vocab_size=draw(st.integers(1, 300_000)),
        weight_bytes=draw(st.integers(1, 16 << 30)),
        context_length=draw(st.sampled_from((100, 512, 1000, 4096, 131_072))),
        embedding_size=draw(st.integers(1, 8192)),
        feed_forward_size=each(st.integers(0, 30_000)),
        num_kv_heads=each(st.integers(0, 64)),
        key_length=each(st.integers(1, 256)),
        value_length=each(st.integers(0, 256)),
        sliding_window=draw(st.integers(1, 5000)),
        is_sliding=each(st.booleans()),
        is_recurrent=recurrent,
        state_values=draw(st.integers(1, 10**8)) if recurrent else 0,
    )


requests = st.builds(
    Request,
    context_size=st.none() | st.integers(1, 131_072),
    threads=st.none() | st.integers(1, 8),
    kv_type=st.none() | st.sampled_from(("f32", "f16", "q8_0", "q4_0")),
    gpu_layers=st.none() | st.integers(0, 4),
    draft_max=st.none() | st.integers(0, 255),
    drafter=st.sampled_from(("auto", "none")),
    exact=st.booleans(),
    prompt_tokens=st.integers(0, 8000),
    max_tokens=st.integers(0, 8000),
)
# How much is free, as a part of what the request takes with its context.
parts = st.floats(0.0, 1.2)


def try_plan(spec: ModelSpec, request: Request, available: int) -> Plan | DoesNotFitError:
    try:
        return make_plan(spec, request, drafter_bytes=2 * MIB, available_bytes=available)
    except DoesNotFitError as error:
        return error


def part_of_need(spec: ModelSpec, request: Request, part: float) -> int:
    plan = make_plan(spec, request, drafter_bytes=2 * MIB, available_bytes=1 << 60)
    return int(part * plan.predicted_peak_bytes)


def possible(spec: ModelSpec, request: Request) -> bool:
    return request.context_size is None or request.context_size <= spec.context_length


@quick
@given(specs(), requests, parts)
def test_a_plan_never_exceeds_what_is_free(spec: ModelSpec, request: Request, part: float) -> None:
    assume(possible(spec, request))
    available = part_of_need(spec, request, part)
    plan = try_plan(spec, request, available)
    if isinstance(plan, DoesNotFitError):
        assert part <= 1.0
        return
    assert plan.predicted_peak_bytes <= available
    assert all(size >= 0 for size in plan.components.values())
    assert 1 <= plan.context_size <= spec.context_length
    assert plan.context_size == (request.context_size or plan.context_size)


@quick
@given(specs(), requests, parts)
def test_a_refusal_names_the_largest_context_and_that_one_fits(
    spec: ModelSpec, request: Request, part: float
) -> None:
    """In steps of 256 tokens. Without such a context, not even the smallest one fits."""
    assume(possible(spec, request))
    available = part_of_need(spec, request, part)
    error = try_plan(spec, request, available)
    if isinstance(error, Plan):
        return
    needed, free = re.findall(r"needs (\d+) MiB.*free: (\d+) MiB", str(error))[0]
    assert int(free) == available // MIB <= int(needed)
    named = re.search(r"`--ctx (\d+)` fits", error.hint)
    context_size = int(named[1]) if named else 0
    if context_size:
        fitting = try_plan(spec, replace(request, context_size=context_size), available)
        assert isinstance(fitting, Plan)
    larger = context_size + 256
    if larger <= spec.context_length:
        refused = try_plan(spec, replace(request, context_size=larger), available)
        assert isinstance(refused, DoesNotFitError)


@pytest.mark.parametrize("kv_type", [None, "q8_0", "q4_0"])
def test_a_hint_offers_nothing_that_does_not_help(kv_type: str | None) -> None:
    """For 32,768 tokens there is room for 2,560 only: half the bytes a token are not enough."""
    available = bytes_of(2560, kv_type=kv_type) + 2 * MIB
    request = Request(context_size=32768, kv_type=kv_type)
    error = try_plan(SPEC, request, available)
    assert isinstance(error, DoesNotFitError)
    assert "`--ctx 2560` fits" in error.hint
    if "or `--kv-type q8_0`" in error.hint:
        again = try_plan(SPEC, replace(request, kv_type="q8_0"), available)
        assert isinstance(again, Plan)


def test_a_refusal_never_says_that_as_much_is_free_as_is_needed() -> None:
    """One byte is missing: the needed MiB are rounded up, or the sentence makes no sense."""
    with pytest.raises(DoesNotFitError) as caught:
        make_plan(SPEC, Request(context_size=4096), available_bytes=bytes_of(4096) - 7778)
    needed, free = re.findall(r"needs (\d+) MiB.*free: (\d+) MiB", str(caught.value))[0]
    assert int(needed) > int(free)


# ------------------------------------------------------------------------------ whole runs


def test_the_drafters_tables_are_part_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """18 bytes a token for 65,536 tokens, and three tables of 65,536 entries of 4 bytes, twice."""
    monkeypatch.setattr(device, "available_bytes", lambda: PLENTY)
    tables = 18 * 65_536 + 2 * 3 * 4 * 65_536
    assert make_run_plan(SPEC, Request()).components["drafter_tables"] == tables
    assert make_run_plan(SPEC, Request(drafter="none")).components["drafter_tables"] == 0
    assert make_run_plan(RECURRENT, Request()).components["drafter_tables"] == 0


def test_free_memory_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "available_bytes", lambda: 20 * MIB)
    with pytest.raises(DoesNotFitError, match="free: 20 MiB"):
        make_run_plan(SPEC, Request())


def test_step_times_belong_to_a_file_and_its_settings() -> None:
    """Whatever changes a step's time changes the key; the length of the context does not."""
    keys = [
        settings_key(SPEC, plan_of(threads=2)),
        settings_key(SPEC, plan_of(threads=3)),
        settings_key(SPEC, plan_of(threads=2, kv_type="q8_0")),
        settings_key(SPEC, plan_of(threads=2, exact=True)),
        settings_key(SPEC, plan_of(threads=2, gpu_layers=5)),
        settings_key(replace(SPEC, fingerprint="beef"), plan_of(threads=2)),
    ]
    assert len(set(keys)) == len(keys)
    assert settings_key(SPEC, plan_of(threads=2, context_size=999)) == keys[0]
    assert calibration_key(SPEC, "suffix") != calibration_key(SPEC, "other")
    assert calibration_key(SPEC, "suffix") != calibration_key(
        replace(SPEC, fingerprint="b"), "suffix"
    )


@pytest.mark.parametrize(
    ("draft_max", "base"),
    [
        (3, [INF, 4.0, 6.0, INF, 7.0]),
        (1, [INF, 4.0, 6.0]),
        (5, [INF, 4.0, 6.0, INF, 7.0, INF, INF]),
    ],
)
def test_a_stored_curve_fits_the_largest_draft_of_the_plan(
    draft_max: int, base: list[float]
) -> None:
    """Cut where drafts are shorter, open where they are longer: what is missing is measured."""
    plan = plan_of(threads=2, draft_max=draft_max)
    assert stored_curve(SPEC, plan) is None
    curve = CostCurve([INF, 4.0, 6.0, INF, 7.0], 0.01, 0.002, 0.5)
    cache.store("curves", settings_key(SPEC, plan), curve.as_json())
    stored = stored_curve(SPEC, plan)
    assert stored is not None
    assert stored.base == base
    assert (stored.depth_ms, stored.depth_node_ms, stored.change_ms) == (0.01, 0.002, 0.5)


@pytest.mark.parametrize(
    "base",
    [
        [],
        [None, None],
        [None, "x"],
        None,
        [None, 10**400],
    ],
    ids=lambda base: str(base)[:20],
)
def test_a_damaged_stored_curve_is_measured_again(base: Any) -> None:
    plan = plan_of(threads=2)
    document = {**CostCurve([INF, 4.0]).as_json(), "base_ms": base}
    cache.store("curves", settings_key(SPEC, plan), document)
    assert stored_curve(SPEC, plan) is None


def test_planning_imports_no_inference_library_and_no_numpy() -> None:
    code = (
        "import sys, edgespec.planning; "
        "print(sorted({'numpy', 'llama_cpp', 'onnxruntime', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
