"""Whether an early exit is used: shipped and named ones, by time, memory and what is known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import time
from typing import Any

import pytest
from eagle3_gguf import Head, write_eagle
from hybrid_gguf import Shape, write_hybrid
from laid_out import machine_with
from random_gguf import Q4_0, Q8_0, write_model, write_untrained

import edgespec
from edgespec.errors import UnsupportedError
from edgespec.memory.plan.machine import Machine
from edgespec.memory.plan.plan import Plan, Request, draft_config
from edgespec.memory.store import cache
from edgespec.memory.times import CostCurve
from edgespec.models.early_exit import MadeFor, file_hash
from edgespec.models.embedded import embedded_drafter_path
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.setup.candidates import source_of
from edgespec.setup.planning import make_run_plan
from edgespec.setup.stored import draft_key, learned_key, settings_key

FLAT = [1.0, 1.05, 1.1, 1.15, 1.22, 1.3, 1.37, 1.45, 1.5, 1.55, 1.6, 1.65, 1.7, 1.75, 1.8, 1.85]
STEEP = [1.0 + 0.8 * n for n in range(16)]
OFTEN = [0.7, 0.5, 0.3, 0.2]
MACHINE = machine_with(4 << 30, (), repacks=True)


@pytest.fixture
def target(tmp_path: Path) -> ModelSpec:
    return read_model_spec(write_model(tmp_path / "target.gguf", "llama", Q8_0))


def exit_file(target: ModelSpec, path: Path, gains: Any = OFTEN) -> Path:
    return write_untrained(target, path, 0, report={"gains": gains} if gains else {}).path


@pytest.fixture
def drafter(target: ModelSpec, tmp_path: Path) -> Path:
    return exit_file(target, tmp_path / "exit.gguf")


@pytest.fixture
def shipped(drafter: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("edgespec.setup.candidates.embedded_drafter_path", lambda: drafter)
    return drafter


def plan_of(target: ModelSpec, machine: Machine = MACHINE, **request: Any) -> Plan:
    return make_run_plan(target, Request(threads=1, backend="llamacpp", **request), machine)


def measured(target: ModelSpec, times: Sequence[float]) -> None:
    key = settings_key(target, plan_of(target, drafter="suffix"))
    cache.store("curves", key, CostCurve([float("inf"), *times]).as_json())


def drafts_measured(target: ModelSpec, drafter: Path, ms: float) -> None:
    key = draft_key(target, plan_of(target, drafter="suffix"), read_model_spec(drafter))
    cache.store("curves", key, CostCurve([float("inf"), *[ms] * 8]).as_json())


def choice(plan: Plan) -> tuple[str, str]:
    found = plan.as_json()["early_exit"]
    return found["value"], found["reason"]


# ------------------------------------------------------------------------------- shipped


def test_nothing_is_said_where_there_is_none(
    target: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.setup.candidates.embedded_drafter_path", lambda: None)
    assert "early_exit" not in plan_of(target).as_json()


def test_before_anything_is_measured_a_shipped_one_is_not_used(
    target: ModelSpec, shipped: Path
) -> None:
    plan = plan_of(target)
    assert choice(plan) == ("not used", "step times are not measured yet")
    assert (plan.drafter, plan.draft_model) == ("suffix", None)


@pytest.mark.parametrize(("kind", "bits"), [("f16", 16), ("q8_0", 8.5), ("q4_0", 4.5)])
def test_its_cache_is_as_small_as_the_targets(
    target: ModelSpec, drafter: Path, kind: str, bits: float
) -> None:
    plan = plan_of(
        target, draft_model=drafter, drafter="model", draft_max=3, context_size=512, kv_type=kind
    )
    spec = read_model_spec(drafter)
    assert plan.component_bytes["draft_kv_cache"] == 512 * spec.kv_values_per_token * bits / 8
    assert draft_config(plan, spec).kv_type_k == kind


def test_it_is_used_where_it_pays(target: ModelSpec, shipped: Path) -> None:
    """A draft step is taken to last as long as its share of the target's bytes."""
    measured(target, FLAT)
    plan = plan_of(target)
    share = read_model_spec(shipped).weight_bytes / target.weight_bytes
    value, reason = choice(plan)
    rates = [(1 + 0.6 * sum(OFTEN[:n])) / (FLAT[n] + n * share) for n in range(1, len(OFTEN) + 1)]
    assert value == "used" and reason.startswith(f"{max(rates):.2f}x of plain decoding predicted: ")
    assert reason.endswith(f"{share:.2f} plain steps a draft, 1.05 for two tokens")
    assert (plan.drafter, plan.draft_model) == ("suffix,model", shipped)
    assert {"draft_weights", "draft_kv_cache"} <= set(plan.component_bytes)
    asked = [one.name for one in plan.choices if one.reason == "as asked"]
    assert not {"drafter", "draft_model"} & set(asked)


def test_it_is_not_used_where_steps_are_dear(target: ModelSpec, shipped: Path) -> None:
    measured(target, STEEP)
    value, reason = choice(plan_of(target))
    assert value == "not used" and "x of plain decoding predicted" in reason
    assert "draft_weights" not in plan_of(target).component_bytes


@pytest.mark.parametrize(("two_ms", "said"), [(1.3, "used"), (1.4, "not used")])
def test_what_a_file_promises_has_to_be_more_than_it_flatters(
    target: ModelSpec, drafter: Path, two_ms: float, said: str
) -> None:
    """1.8 tokens a round of one draft, so 1.48 of people's prompts, over 1.4 or 1.5 plain steps."""
    certain = exit_file(target, drafter, gains=[0.8])
    measured(target, [1.0, two_ms, *[9.0] * 14])
    drafts_measured(target, certain, 0.1)
    value, reason = choice(plan_of(target, draft_model=certain))
    assert value == said and "1.48 tokens a round" in reason


def test_a_curve_of_single_tokens_is_enough_to_say_no(target: ModelSpec, shipped: Path) -> None:
    """What a run with `--draft-max 0` leaves behind."""
    measured(target, FLAT[:1])
    value, reason = choice(plan_of(target))
    assert value == "not used" and reason.endswith("plain steps a draft, one token a step")


def test_a_measured_draft_step_counts_more_than_bytes(target: ModelSpec, shipped: Path) -> None:
    measured(target, FLAT)
    drafts_measured(target, shipped, 2.0)
    value, reason = choice(plan_of(target))
    assert value == "not used" and "2.00 plain steps a draft" in reason


def lived(target: ModelSpec, drafter: Path, plan: Plan | None = None, **found: Any) -> str:
    """What a run with it leaves behind: 400 rounds now, if nothing else is said; and where."""
    plan = plan or plan_of(target, drafter="suffix")
    key = learned_key(target, plan, read_model_spec(drafter))
    now = time()
    usual = {
        "rounds": 400.0,
        "usual_steps": 1000.0,
        "squares": 0.0,
        "time": now,
        "since": now - 600,
    }
    cache.store("learned", key, usual | found)
    return key


@pytest.mark.parametrize(
    ("saved_steps", "said"), [(40.0, "used"), (4.0, "not used"), (-40.0, "not used")]
)
def test_what_it_brought_here_counts_more_than_what_its_file_says(
    target: ModelSpec, shipped: Path, saved_steps: float, said: str
) -> None:
    measured(target, FLAT if said != "used" else STEEP)
    lived(target, shipped, saved_steps=saved_steps)
    part = max(0.0, saved_steps / 1000)
    reason = f"in the last 400 rounds here it saved {part:.1%} of the time"
    assert choice(plan_of(target)) == (said, reason)


@pytest.mark.parametrize(
    "found",
    [{"rounds": 299.0}, {"time": time() - 40 * 86400}, {"usual_steps": 0.0}, {"time": "now"}],
)
def test_few_rounds_and_old_ones_say_nothing(
    target: ModelSpec, shipped: Path, found: dict[str, Any]
) -> None:
    measured(target, FLAT)
    lived(target, shipped, saved_steps=0.0, **found)
    assert "predicted" in choice(plan_of(target))[1]


def test_rounds_of_earlier_runs_count_as_a_few_hundred(target: ModelSpec, drafter: Path) -> None:
    """And stay as they are, and as old, where a run adds none."""
    options: dict[str, Any] = {"context_size": 256, "threads": 1, "backend": "llamacpp"}
    options |= {"draft_model": drafter, "drafter": "suffix,model"}
    edgespec.load(target.path, **options).close()  # measures
    plan = edgespec.plan(target.path, **options)
    for age_s in (40 * 86400, 3600):
        seen = time() - age_s
        key = lived(target, drafter, plan, saved_steps=0.0, time=seen)
        edgespec.load(target.path, **options).close()
        unused = cache.load("learned", key)
        assert unused is not None and (unused["rounds"], unused["time"]) == (400.0, seen)
        lived(target, drafter, plan, saved_steps=0.0, time=seen)
        with edgespec.load(target.path, **options) as engine:
            engine.generate([1, 2, 3], max_tokens=20)
        used = cache.load("learned", key)
        assert used is not None and 300.0 < used["rounds"] < 321.0
        assert used["time"] > seen


def test_the_models_are_freed_where_a_drafter_file_has_gone(
    target: ModelSpec, drafter: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"context_size": 256, "threads": 1, "backend": "llamacpp"}
    engine = edgespec.load(target.path, draft_model=drafter, drafter="suffix,model", **options)
    drafter.unlink()
    engine.close()


def test_it_is_not_used_where_it_does_not_fit(target: ModelSpec, shipped: Path) -> None:
    """Context is not given up for it."""
    measured(target, FLAT)
    without = plan_of(target, drafter="suffix", context_size=2048)
    most = without.predicted_peak_bytes
    plan = plan_of(target, context_size=2048, budget_bytes=most)
    value, reason = choice(plan)
    assert value == "not used" and plan.context_size == 2048
    assert "MiB" in reason or "left out" in reason
    assert plan.predicted_peak_bytes <= most


def test_it_is_not_looked_at_where_drafters_are_named(target: ModelSpec, shipped: Path) -> None:
    measured(target, FLAT)
    for names in ("suffix", "none"):
        assert "early_exit" not in plan_of(target, drafter=names).as_json()


def test_other_models_are_not_bothered_by_it(
    target: ModelSpec, shipped: Path, tmp_path: Path
) -> None:
    other = read_model_spec(write_model(tmp_path / "other.gguf", "llama", Q4_0, seed=9))
    measured(other, FLAT)
    assert "early_exit" not in plan_of(other).as_json()


def test_a_head_beside_its_model_is_used_where_it_pays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was trained for this very file; another one is only told of."""
    monkeypatch.setattr("edgespec.setup.candidates.embedded_drafter_path", lambda: None)
    model = write_hybrid(tmp_path / "target.gguf", Shape("qwen2", interval=1))
    head = write_eagle(tmp_path / "eagle3-target.gguf", model, Shape("qwen2", interval=1), Head())
    spec = read_model_spec(model)
    measured(spec, FLAT)
    assert "lies beside the model" in plan_of(spec).as_json()["head"]["reason"]
    made = MadeFor(file_hash(spec.path), "target", {"gains": OFTEN})
    monkeypatch.setattr("edgespec.setup.candidates.read_made_for", lambda _path: made)
    draft_ms = 0.01 * FLAT[0]
    key = draft_key(spec, plan_of(spec, drafter="suffix"), spec_of(head))
    curve = CostCurve([float("inf"), *[draft_ms] * 8]).as_json()
    cache.store("curves", key, curve)
    plan = plan_of(spec)
    assert (plan.drafter, plan.draft_model) == ("suffix,head", head)
    assert "x of plain decoding predicted" in plan.as_json()["head"]["reason"]
    measured(spec, STEEP)
    plan = plan_of(spec)
    assert plan.draft_model is None and plan.as_json()["head"]["value"] == "not used"
    wider = Shape("qwen2", width=128, interval=1)
    write_eagle(head, write_hybrid(tmp_path / "wider.gguf", wider), wider, Head())
    assert source_of(spec, Request()) is None, "whatever the file says, it does not fit"


def spec_of(head: Path) -> ModelSpec:
    return read_model_spec(head, heads=True)


def test_the_packages_own_is_a_file_or_nothing() -> None:
    path = embedded_drafter_path()
    assert path is None or path.is_file()


# --------------------------------------------------------------------------------- named


def test_a_named_one_is_used_until_measurements_speak_against_it(
    target: ModelSpec, drafter: Path
) -> None:
    plan = plan_of(target, draft_model=drafter)
    assert choice(plan) == ("used", "step times are not measured yet")
    assert (plan.drafter, plan.draft_model) == ("suffix,model", drafter)
    measured(target, STEEP)
    plan = plan_of(target, draft_model=drafter)
    value, reason = choice(plan)
    assert value == "not used" and reason.endswith("--drafter suffix,model uses it")
    assert plan.draft_model is None
    forced = plan_of(target, draft_model=drafter, drafter="suffix,model")
    assert forced.draft_model == drafter and "early_exit" not in forced.as_json()


@pytest.mark.parametrize("gains", [None, "often", ["a"]])
def test_a_file_that_does_not_say_what_it_hits(
    target: ModelSpec, tmp_path: Path, gains: Any
) -> None:
    path = exit_file(target, tmp_path / "silent.gguf", gains)
    measured(target, STEEP)
    plan = plan_of(target, draft_model=path)
    assert choice(plan) == ("used", "its file does not say how often it is right")


def test_a_named_one_of_another_model_is_refused(drafter: Path, tmp_path: Path) -> None:
    other = read_model_spec(write_model(tmp_path / "other.gguf", "llama", Q4_0, seed=9))
    with pytest.raises(UnsupportedError, match="is an early exit of"):
        plan_of(other, draft_model=drafter)


def test_an_ordinary_draft_model_is_used_as_asked(target: ModelSpec, tmp_path: Path) -> None:
    small = write_model(tmp_path / "small.gguf", "llama", Q4_0, seed=3)
    measured(target, STEEP)
    plan = plan_of(target, draft_model=small)
    assert plan.draft_model == small and "early_exit" not in plan.as_json()


# ------------------------------------------------------------------------------- loading


def test_the_time_of_a_draft_step_is_measured_once(target: ModelSpec, drafter: Path) -> None:
    options: dict[str, Any] = {"context_size": 256, "threads": 1, "backend": "llamacpp"}
    options |= {"draft_model": drafter, "drafter": "suffix,model"}
    measurements = []
    steps: list[str] = []
    for _ in range(2):
        steps.clear()
        edgespec.load(target.path, progress=lambda what, _: steps.append(what), **options).close()
        measurements.append(steps.count("measuring step times"))
    assert measurements == [4, 0]  # of the target and of the drafter, begun and ended


def test_without_room_for_drafts_the_model_is_loaded_without_it(
    target: ModelSpec, drafter: Path
) -> None:
    options = {"context_size": 256, "threads": 1, "backend": "llamacpp", "draft_max": 0}
    with edgespec.load(target.path, draft_model=drafter, **options) as engine:  # type: ignore[arg-type]
        assert engine.drafter is None or "model" not in engine.drafter.name
        assert len(engine.generate([1, 2, 3], max_tokens=4).token_ids) == 4


def test_a_shipped_one_is_loaded_once_the_target_was_measured(
    target: ModelSpec, shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.setup.candidates.NO_DIFFERENCE", 0.0)
    names = []
    for _ in range(2):
        with edgespec.load(
            target.path, context_size=256, threads=1, backend="llamacpp", kernels="off"
        ) as engine:
            engine.generate([1, 2, 3], max_tokens=40)
            assert engine.drafter is not None
            names.append("model" in engine.drafter.name)
            allocated = engine.memory_bytes()
            assert ("draft_weights" in allocated) == names[-1]
    assert names == [False, True]
    learned = cache.load("learned", learned_key(target, plan_of(target), read_model_spec(shipped)))
    assert learned is not None and learned["rounds"] > 0 and "cells" in learned
