"""A small model that nobody named: which one drafts, whether it does, and what the plan says."""

from __future__ import annotations

from pathlib import Path
from time import time
from typing import Any

import pytest
from bert_gguf import write_random_bert
from random_gguf import Q8_0, write_model

from edgespec.drafting.combined import SAVINGS
from edgespec.errors import UnsupportedError
from edgespec.memory.plan import plan as plans
from edgespec.memory.plan.plan import Plan, Request
from edgespec.memory.store import cache
from edgespec.memory.times import CostCurve
from edgespec.models.hub.resolve import EMBEDDED, Local
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.setup.planning import make_run_plan
from edgespec.setup.stored import learned_key, settings_key

pytestmark = pytest.mark.usefixtures("cache_folder")
FLAT = [1.0, 1.02, 1.04, 1.06, *[1.5] * 12]
STEEP = [1.0 + 0.8 * n for n in range(16)]


@pytest.fixture
def target(tmp_path: Path) -> ModelSpec:
    return read_model_spec(write_model(tmp_path / "large.gguf", "llama", Q8_0, width=512))


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of another vocabulary, as the embedded model is for most."""
    return here(monkeypatch, tmp_path / "small.gguf", EMBEDDED)


def here(monkeypatch: pytest.MonkeyPatch, path: Path, name: str, *others: Local) -> Path:
    """It is the model of that name on this machine, beside others."""
    write_model(path, "llama", Q8_0, reads_bytes=True)
    found = [Local(name, path, "edgespec"), *others]
    monkeypatch.setattr("edgespec.setup.candidates.local_models", lambda: found)
    return path


def plan_of(target: ModelSpec, **request: Any) -> Plan:
    request = {"context_size": 512, **request}
    return make_run_plan(target, Request(threads=1, backend="llamacpp", kernels="off", **request))


def told(plan: Plan) -> tuple[Any, str]:
    found = plan.as_json()["draft_model"]
    return found["value"], found["reason"]


def measured(target: ModelSpec, times: list[float]) -> None:
    key = settings_key(target, plan_of(target, drafter="suffix"))
    cache.store("curves", key, CostCurve([float("inf"), *times]).as_json())


def test_the_first_answer_has_it(target: ModelSpec, small: Path) -> None:
    """Before anything is measured: its ledger bounds what that can cost."""
    plan = plan_of(target)
    assert (plan.drafter, plan.draft_model) == ("suffix,model", small)
    value, reason = told(plan)
    assert value == "small.gguf" and reason.startswith("tried: ")
    assert {"draft_weights", "draft_kv_cache"} <= set(plan.component_bytes)
    assert plan.predicted_peak_bytes > plan_of(target, drafter="suffix").predicted_peak_bytes


def test_one_that_cannot_go_back_is_passed_over(
    target: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of the same vocabulary comes first, and its sliding windows would refuse the load."""
    sliding = write_model(tmp_path / "sliding.gguf", "gemma3", Q8_0)
    other = Local("sliding", sliding, "edgespec")
    small = here(monkeypatch, tmp_path / "small.gguf", EMBEDDED, other)
    assert plan_of(target).draft_model == small


def test_others_leave_it_out(target: ModelSpec, small: Path) -> None:
    """Who names drafters; and it drafts for no model that is hardly larger."""
    for drafter in ("suffix", "suffix,recycling", "none"):
        assert plan_of(target, drafter=drafter).draft_model is None
    itself = read_model_spec(small)
    plan = plan_of(itself)
    assert plan.drafter == "suffix" and "draft_model" not in plan.as_json()


def test_step_times_decide(target: ModelSpec, small: Path) -> None:
    measured(target, FLAT)
    value, reason = told(plan_of(target))
    assert value == "small.gguf" and "x of plain decoding predicted" in reason
    measured(target, STEEP)
    plan = plan_of(target)
    value, reason = told(plan)
    assert (plan.drafter, value) == ("suffix", "not used")
    assert "x of plain decoding predicted" in reason
    assert reason.endswith(f"; --draft-model {small} uses it")


def test_of_one_that_was_named_the_plan_says_what_it_would_bring(
    target: ModelSpec, small: Path
) -> None:
    """It drafts in any case: its ledger closes it where that does not pay."""
    for times in (FLAT, STEEP):
        measured(target, times)
        plan = plan_of(target, draft_model=small)
        value, reason = told(plan)
        assert (plan.drafter, value) == ("suffix,model", "small.gguf")
        assert reason.startswith("as asked; ") and "x of plain decoding predicted" in reason


def test_what_it_saved_here_decides(target: ModelSpec, small: Path) -> None:
    draft = read_model_spec(small)
    key = learned_key(target, plan_of(target, drafter="suffix"), draft)
    for saved, drafter in ((-0.1, "suffix"), (0.2, "suffix,model")):
        values = dict(zip(SAVINGS, (400.0, 400_000.0, 400_000.0 * saved, 0.0), strict=True))
        cache.store("learned", key, {**values, "time": time(), "since": time() - 600.0})
        plan = plan_of(target)
        assert plan.drafter == drafter
        assert "in the last 400 rounds here it saved" in told(plan)[1]


def test_where_it_does_not_fit_the_plan_says_what_it_needs(target: ModelSpec, small: Path) -> None:
    least = plan_of(target, drafter="suffix").predicted_peak_bytes
    plan = plan_of(target, budget_bytes=least)
    assert plan.drafter == "suffix"
    value, reason = told(plan)
    assert value == "not used" and "but" in reason
    assert "needs" in reason or "tokens of context" in reason
    roomy = plan_of(target, budget_bytes=plan_of(target).predicted_peak_bytes)
    assert roomy.draft_model == small


def test_context_comes_first_and_the_plan_says_what_would_be_left(
    target: ModelSpec, small: Path
) -> None:
    """With the context that it names, the small model is taken under the same budget."""
    budget = plan_of(target, context_size=1024).predicted_peak_bytes
    plan = plan_of(target, context_size=None, budget_bytes=budget)
    value, reason = told(plan)
    assert value == "not used" and plan.drafter == "suffix"
    left = int(reason.split("--ctx ")[1].split()[0])
    assert left < plan.context_size
    assert plan_of(target, context_size=left, budget_bytes=budget).draft_model == small


def test_several_users_share_its_weights_and_its_cache(target: ModelSpec, small: Path) -> None:
    """Each has a window of its own, which is smaller than that of one user."""
    plans = {users: plan_of(target, users=users, context_size=2048) for users in (1, 2, 4)}
    for users, plan in plans.items():
        assert (plan.users, plan.drafter, plan.draft_model) == (users, "suffix,model", small)
    weights = {plan.component_bytes["draft_weights"] for plan in plans.values()}
    caches = [plan.component_bytes["draft_kv_cache"] for plan in plans.values()]
    assert len(weights) == 1 and 2 * caches[1] == caches[2] < 4 * caches[0]
    assert plan_of(target, draft_model=small, users=4).draft_model == small
    assert "draft_model" not in plan_of(target, users=4, drafter="suffix").as_json()


def test_an_early_exit_follows_one_text(
    target: ModelSpec, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "read_exit", lambda _spec: object())
    assert plan_of(target, draft_model=small, users=None).users == 1
    with pytest.raises(UnsupportedError, match="--users 2 is not possible: an early exit follows"):
        plan_of(target, draft_model=small, users=2)


def test_a_file_with_the_models_vocabulary_comes_first(
    target: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the embedded model, whatever else lies here; what cannot draft is passed over."""
    sibling = write_model(tmp_path / "sibling.gguf", "llama", Q8_0)
    wordpiece = write_random_bert(tmp_path / "wordpiece.gguf")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    stranger = tmp_path / "stranger.gguf"
    write_model(stranger, "llama", Q8_0, reads_bytes=True, controls=["<x>"])
    others = [Local(one.name, one, "folder") for one in (broken, wordpiece, sibling, stranger)]
    small = here(monkeypatch, tmp_path / "small.gguf", EMBEDDED, *others)
    assert plan_of(target).draft_model == sibling
    here(monkeypatch, small, EMBEDDED, others[0], others[1], others[3])
    assert plan_of(target).draft_model == small
    here(monkeypatch, small, "of a folder", others[0], others[1])
    assert plan_of(target).draft_model == small
