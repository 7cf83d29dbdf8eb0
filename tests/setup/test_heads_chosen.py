"""Whether a head is loaded: tried or judged by what it promises, then by what it saved here."""

from __future__ import annotations

from bisect import bisect_left
from math import inf
from pathlib import Path
from time import time
from typing import Any

import pytest
from eagle3_gguf import Head as Eagle
from eagle3_gguf import write_eagle
from hybrid_gguf import Shape, write_hollow, write_hybrid
from planning_cases import reason

from edgespec.drafting.combined import SAVINGS
from edgespec.errors import DoesNotFitError, UnsupportedError
from edgespec.memory.plan.plan import Plan, Request
from edgespec.memory.store import cache
from edgespec.memory.times import CostCurve
from edgespec.models.early_exit import MadeFor, file_hash
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.setup import candidates
from edgespec.setup.planning import make_run_plan
from edgespec.setup.stored import draft_key, learned_key, settings_key

pytestmark = pytest.mark.usefixtures("cache_folder")


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return read_model_spec(write_hollow(tmp_path / "model.gguf", Shape("qwen35", predicting=1)))


def plan_of(spec: ModelSpec, **changes: Any) -> Plan:
    return make_run_plan(spec, Request(context_size=512, kernels="off", **changes))


def saw(spec: ModelSpec, rounds: float, saved: float, **changes: float) -> None:
    """An earlier run of ten minutes had so many rounds, and saved that part of their time."""
    plain = plan_of(spec, drafter="suffix")
    found = (rounds, 1000.0 * rounds, 1000.0 * rounds * saved, 0.0)
    values = dict(zip(SAVINGS, found, strict=True))
    document = {**values, "time": time(), "since": time() - 600.0, **changes}
    cache.store("learned", learned_key(spec, plain, None), document)


@pytest.mark.parametrize(
    ("rounds", "saved", "used"),
    [(0.0, 0.0, True), (100.0, 0.0, True), (400.0, 0.0, False), (400.0, 0.2, True)],
)
def test_a_head_is_used_until_it_was_seen_not_to_pay(
    spec: ModelSpec, rounds: float, saved: float, used: bool
) -> None:
    saw(spec, rounds, saved)
    plan = plan_of(spec)
    assert (plan.drafter == "suffix,head") == used
    assert ("head_kv_cache" in plan.component_bytes) == used
    why = reason(plan, "head")
    assert ("saved" in why) == (rounds > 300)
    assert used or "--drafter suffix,head uses it" in why
    assert plan_of(spec, drafter="suffix,head").drafter == "suffix,head", "as asked"


def test_a_figure_that_kept_a_head_out_is_forgotten(spec: ModelSpec) -> None:
    """As fast as it was learned, in ten minutes, and within a day; so is one of unknown age."""
    now = time()
    for age_s, learned_s, used in (
        (500.0, 600.0, False),
        (700.0, 600.0, True),
        (90_000.0, 1e6, True),
        (-700.0, 600.0, True),
    ):
        saw(spec, 400.0, -0.27, time=now - age_s, since=now - age_s - learned_s)
        plan = plan_of(spec)
        assert (plan.drafter == "suffix,head") == used, age_s
    saw(spec, 400.0, 0.2, time=now - 1e7, since=now - 2e7)
    assert plan_of(spec).drafter == "suffix,head", "what paid is used again"


def test_a_figure_that_is_unsure_keeps_no_head_out(spec: ModelSpec) -> None:
    """400 rounds of 1000 steps that saved nothing, within two standard errors of 2%, or of 0.2%."""
    saw(spec, 400.0, 0.0, squares=(0.01 * 400_000.0) ** 2)
    assert plan_of(spec).drafter == "suffix,head"
    saw(spec, 400.0, 0.0, squares=(0.001 * 400_000.0) ** 2)
    assert plan_of(spec).drafter == "suffix"


def test_a_head_is_not_used_where_others_are_named(spec: ModelSpec) -> None:
    assert plan_of(spec, drafter="suffix").drafter == "suffix"
    assert plan_of(spec, drafter="none").drafter == "none"
    with pytest.raises(UnsupportedError, match="cannot draft together"):
        plan_of(spec, drafter="head,model")


def fits(spec: ModelSpec, budget: int) -> bool:
    try:
        plan_of(spec, drafter="suffix", draft_max=7, budget_bytes=budget)
    except DoesNotFitError:
        return False
    return True


def test_a_head_gives_way_to_context(spec: ModelSpec) -> None:
    """Where both do not fit, the head is left out, and that is said."""
    most = plan_of(spec, drafter="suffix", draft_max=7).predicted_peak_bytes
    budgets = range(most // 2, most, 1 << 14)
    least = bisect_left(budgets, True, key=lambda budget: fits(spec, budget))
    plan = plan_of(spec, draft_max=7, budget_bytes=budgets[least])
    assert plan.drafter == "suffix" and plan.draft_max == 7
    (choice,) = (one for one in plan.choices if one.name == "head")
    assert choice.value == "not used" and "needs" in choice.reason


# ------------------------------------------------------------------ what a head's file promises

SHAPE = Shape("llama", interval=1)
FLAT, STEEP = [1.0, 1.05, 1.1, 1.15], [1.0, 1.9, 2.8, 3.7]
DRAFT_MS = 0.1


@pytest.fixture
def target(tmp_path: Path) -> ModelSpec:
    return read_model_spec(write_hybrid(tmp_path / "target.gguf", SHAPE))


@pytest.fixture
def head(target: ModelSpec, tmp_path: Path) -> Path:
    return write_eagle(tmp_path / "head.gguf", target.path, SHAPE, Eagle())


def promises(patch: pytest.MonkeyPatch, made_for: str, gains: list[float]) -> None:
    """Its file says for which target it was made, and how often it is right."""
    made = MadeFor(made_for, "target.gguf", {"gains": gains} if gains else {})
    patch.setattr(candidates, "read_made_for", lambda _path: made)


def measured(target: ModelSpec, head: Path, times: list[float]) -> None:
    plain, spec = plan_of(target, drafter="suffix"), read_model_spec(head, heads=True)
    keys = settings_key(target, plain), draft_key(target, plain, spec)
    for key, ms in zip(keys, (times, [DRAFT_MS] * 8), strict=True):
        cache.store("curves", key, CostCurve([inf, *ms]).as_json())


@pytest.mark.parametrize(
    ("gains", "times", "used", "why"),
    [
        ([0.9, 0.6], FLAT, True, "1.46x of plain decoding predicted: 1.90 tokens a round, 0.10"),
        ([0.6, 0.3], STEEP, False, "x of plain decoding predicted"),
        ([0.2], FLAT, False, "0.97x of plain decoding predicted"),
        ([], STEEP, True, "it is not known yet whether it pays here"),
        ([0.6], [], True, "step times are not measured yet"),
    ],
)
def test_a_named_head_is_judged_by_what_its_file_promises(
    target: ModelSpec,
    head: Path,
    monkeypatch: pytest.MonkeyPatch,
    gains: list[float],
    times: list[float],
    used: bool,
    why: str,
) -> None:
    promises(monkeypatch, "whatever", gains)
    if times:
        measured(target, head, times)
    plan = plan_of(target, draft_model=head)
    assert plan.drafter == ("suffix,head" if used else "suffix")
    assert why in reason(plan, "head")
    assert used or "--drafter suffix,head uses it" in reason(plan, "head")


@pytest.mark.parametrize("times", [FLAT, STEEP, []])
@pytest.mark.parametrize("is_its", [True, False])
def test_a_shipped_head_is_used_where_it_is_predicted_to_pay(
    target: ModelSpec, head: Path, monkeypatch: pytest.MonkeyPatch, times: list[float], is_its: bool
) -> None:
    monkeypatch.setattr(candidates, "embedded_drafter_path", lambda: head)
    promises(monkeypatch, file_hash(target.path) if is_its else "another", [0.6, 0.3])
    if times:
        measured(target, head, times)
    plan = plan_of(target)
    assert (plan.draft_model == head) == (is_its and times == FLAT)
    assert ("head" in plan.as_json()) == is_its
    assert not is_its or "uses it" not in reason(plan, "head"), "nobody can name it"
