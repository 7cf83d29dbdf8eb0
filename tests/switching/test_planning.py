"""Pairs of models in plans: bytes, errors, and which use of a pair is predicted to be faster."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from laid_out import machine_with
from switching_cases import Pair, request_for, written_pair

import edgespec
from edgespec.decode.generation import LARGE, SMALL
from edgespec.errors import DoesNotFitError, UnsupportedError
from edgespec.memory.plan.plan import Request
from edgespec.memory.store import cache
from edgespec.memory.times import CostCurve
from edgespec.setup.planning import make_run_plan
from edgespec.setup.stored import settings_key
from edgespec.switching.engine import SwitchingEngine
from edgespec.switching.planning import (
    Calibrated,
    SwitchPolicy,
    check_switch,
    keep_switch,
    stored_switch,
)

MIB = 1 << 20
PLENTY = machine_with(4 << 30)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return written_pair(tmp_path)


def calibrated(**changes: object) -> Calibrated:
    turns = [[(SMALL, 8), (LARGE, 4), (SMALL, 8)]] * 3
    found = Calibrated(SwitchPolicy(), 0.2, 0.6, turns, [0.5, 0.7])
    return replace(found, **changes)  # type: ignore[arg-type]


def store_curves(pair: Pair, large_ms: float, small_ms: float) -> None:
    plan = make_run_plan(pair[0], request_for(pair), PLENTY)
    for spec, own, ms in ((pair[0], plan, large_ms), (pair[1], plan.of_small(), small_ms)):
        base = [math.inf, *(ms * (1 + 0.1 * n) for n in range(32))]
        cache.store("curves", settings_key(spec, own), CostCurve(base).as_json())


def test_both_models_are_in_the_plan(pair: Pair) -> None:
    both = make_run_plan(pair[0], request_for(pair, context_size=1024), PLENTY)
    alone = make_run_plan(pair[0], Request(backend="llamacpp", context_size=1024), PLENTY)
    parts = both.component_bytes
    assert parts["switch_kv_cache"] == parts["kv_cache"] == alone.component_bytes["kv_cache"]
    assert parts["switch_compute"] > 0
    added = {name for name in parts if name.startswith("switch_")}
    assert {n: s for n, s in parts.items() if n not in added} == alone.component_bytes
    assert "switch_runtime" not in parts
    assert (both.switch, alone.switch) == (pair[1].path, None)
    small = both.of_small()
    assert (small.switch, small.context_size, small.batch_size) == (None, 1024, both.batch_size)


def test_the_shorter_model_bounds_the_context(pair: Pair) -> None:
    plan = make_run_plan(pair[0], request_for(pair), PLENTY)
    assert plan.context_size == 4096
    with pytest.raises(UnsupportedError, match="exceeds the 4096 tokens"):
        make_run_plan(pair[0], request_for(pair, context_size=8192), PLENTY)


def test_a_budget_for_one_model_says_so(pair: Pair) -> None:
    asked = request_for(pair, context_size=4096, draft_max=3)
    needed = make_run_plan(pair[0], asked, PLENTY).predicted_peak_bytes
    alone = make_run_plan(pair[0], replace(asked, switch=None), PLENTY).predicted_peak_bytes
    tight = replace(asked, budget_bytes=(needed + alone) // 2)
    with pytest.raises(DoesNotFitError, match="two models and 4096 tokens") as caught:
        make_run_plan(pair[0], tight, PLENTY)
    assert "leaving out --switch: large.gguf alone fits" in caught.value.hint
    assert "--ctx" in caught.value.hint


def test_what_was_calibrated_is_kept_for_the_pair(pair: Pair) -> None:
    large, small = pair
    assert stored_switch(large, small) is None
    found = calibrated(policy=SwitchPolicy.always(SMALL))
    keep_switch(large, small, found)
    assert stored_switch(large, small) == found
    assert stored_switch(small, large) is None


@pytest.mark.parametrize(
    "damage",
    [
        {"turns": [[["other", 1]]]},
        {"turns": [[["small", 0]]]},
        {"turns": [[["small", 2], ["large", 0], ["small", 1]]]},
        {"turns": [[["small", -1], ["large", 1]]]},
        {"turns": [[]]},
        {"turns": [[["small", 1.5]]]},
        {"policy": {"window": 1.5}},
        {"policy": {"up": 1}},
        {"policy": 3},
        {"policy": {"up_nats": 0.7, "only_where_it_pays": True}},
        {"drafted": 3},
    ],
)
def test_a_damaged_document_is_nothing(pair: Pair, damage: dict[str, object]) -> None:
    keep_switch(*pair, calibrated())
    (path,) = (cache.cache_directory() / "switching").iterdir()
    key = f"{pair[0].fingerprint} | {pair[1].fingerprint}"
    document = cache.load("switching", key)
    assert document is not None and path.exists()
    cache.store("switching", key, {**document, **damage})
    assert stored_switch(*pair) is None


def test_the_plan_says_which_use_of_the_pair_is_faster(pair: Pair) -> None:
    choice = make_run_plan(pair[0], request_for(pair), PLENTY).as_json()["switch"]
    assert "lossy; not calibrated: edgespec profile" in choice["reason"]
    keep_switch(*pair, calibrated())
    store_curves(pair, large_ms=10.0, small_ms=2.0)
    plan = make_run_plan(pair[0], request_for(pair), PLENTY)
    choice = plan.as_json()["switch"]
    assert choice["value"] == "small.gguf"
    assert "20% of the tokens" in choice["reason"] and "60% of the dis" in choice["reason"]
    # By text: 7 + 1 thrown and 8 steps of 2 ms, reading 4 in one of 2.6; 3 of 10 and reading 9 in
    # one of 18.
    spent = 8 * 2.0 + 18.0 + 3 * 10.0 + 2.6 + 7 * 2.0
    assert plan.tokens_per_s == pytest.approx(1e3 * 19 / spent)
    assert choice["reason"].endswith("switching is faster")
    turns = [[(SMALL, 1), (LARGE, 9)]]
    keep_switch(*pair, calibrated(turns=turns, drafted=[0.95, 1.85, 2.7, 3.5, 4.2]))
    store_curves(pair, large_ms=10.0, small_ms=0.5)
    reason = make_run_plan(pair[0], request_for(pair), PLENTY).as_json()["switch"]["reason"]
    assert reason.endswith("drafting is faster")


def test_pairs_that_cannot_take_turns_are_refused(pair: Pair, tmp_path: Path) -> None:
    large, small = pair
    check_switch(large, small)
    with pytest.raises(UnsupportedError, match="their tokenizers are"):
        check_switch(large, replace(small, tokenizer_model="llama"))
    with pytest.raises(UnsupportedError, match="--remember"):
        make_run_plan(large, request_for(pair, remember=True), PLENTY)
    with pytest.raises(edgespec.ModelNotFoundError):
        make_run_plan(large, Request(switch=tmp_path / "nowhere.gguf"), PLENTY)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_drafting_is_judged_by_the_steps_there_are(size: int) -> None:
    """Curves of few nodes: a draft needs a step of one more."""
    curves = {LARGE: CostCurve([math.inf, *[4.0] * size]), SMALL: CostCurve([math.inf, 1.0])}
    rates = [1 / 4, 1.5 / 5, 1.7 / 6]
    speed = calibrated().drafting_tokens_per_s(curves, 0)
    assert speed == pytest.approx(1e3 * max(rates[:size]))


# -- loaded --------------------------------------------------------------------------------


def test_a_loaded_pair_writes_what_its_models_write_alone(
    pair: Pair,
) -> None:
    prompt = list(range(50, 70))
    how = {"context_size": 256, "threads": 1, "backend": "llamacpp"}
    alone = {}
    for model, spec in zip((LARGE, SMALL), pair, strict=True):
        with edgespec.load(spec.path, **how) as engine:  # type: ignore[arg-type]
            alone[model] = engine.generate(prompt, max_tokens=40, speculate=False).token_ids
    assert alone[LARGE] != alone[SMALL]
    with edgespec.load(pair[0].path, switch=pair[1].path, **how) as engine:  # type: ignore[arg-type]
        assert isinstance(engine, SwitchingEngine)
        for model in (LARGE, SMALL):
            engine.policy = SwitchPolicy.always(model)
            written = engine.generate(prompt, max_tokens=40, speculate=False)
            assert written.token_ids == alone[model]
        engine.policy = SwitchPolicy(up_nats=0.5, down_nats=9.0)
        result = engine.generate(prompt, max_tokens=40, speculate=False)
        assert {span.model for span in result.spans} == {LARGE, SMALL}
