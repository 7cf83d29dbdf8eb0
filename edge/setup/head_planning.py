"""Whether a head drafts, in the model's own file or beside it, from what it has brought here.

Nothing says beforehand how often a head is right, so one is tried until its rounds say whether it
pays. Imports no inference library and no numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from edgespec.drafting.drafters import HEAD
from edgespec.errors import DoesNotFitError
from edgespec.memory.plan.drafts import DRAFT_SIZES
from edgespec.memory.plan.options import LLAMACPP
from edgespec.memory.plan.plan import Plan
from edgespec.memory.plan.request import Choice, Request
from edgespec.memory.plan.settings import settings_of
from edgespec.models.heads import has_head
from edgespec.models.pairing import check_pair, heads_for
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.setup.exit_planning import WORTH_LOADING, Experience
from edgespec.setup.snapshots import snapshot_cost
from edgespec.setup.stored import stored_learned


def head_of(spec: ModelSpec, request: Request) -> ModelSpec | None:
    """The head in a file of its own that `--drafter auto` has to think about: the named one.

    Raises UnsupportedError where it is another model's.
    """
    if request.drafter != "auto" or request.draft_model is None:
        return None
    head = read_model_spec(request.draft_model, heads=True)
    if head.reads is None:
        return None
    check_pair(spec, head)
    return head


def with_head(
    spec: ModelSpec,
    request: Request,
    plan: Plan,
    head: ModelSpec | None,
    plan_of: Callable[[Request], Plan],
) -> Plan:
    """The plan with a head drafting, where it is tried or pays; else `plan`, which says why not.

    The named one, or that in the model's file. Only where somebody left the drafters open, and has
    not named a draft model.
    """
    named = head.path if head is not None else None
    is_open = request.drafter == "auto" and request.draft_model == named
    if not is_open or plan.users > 1:
        return plan
    if obstacle := _obstacle(request, plan):
        return plan if named is None else plan.with_choice(Choice(HEAD, "not used", obstacle))
    if named is None and not has_head(spec):
        return _offered(spec, plan)
    names = f"suffix,{HEAD}"
    experience = Experience.from_json(stored_learned(spec, plan, head))
    reason = "it is not known yet whether it pays here"
    saved = 0.0
    if experience is not None:
        saved, rounds = experience.saved, experience.rounds
        reason = f"in the last {rounds:.0f} rounds here it saved {max(0.0, saved):.1%} of the time"
        cost = _snapshots_for_it(spec, plan)
        if cost > 1.0:
            saved = 1.0 - cost * (1.0 - saved)
            reason += f", and snapshots for it make plain steps {cost:.2f} times as long"
    if experience is None or saved > WORTH_LOADING:
        try:
            drafting = plan_of(replace(request, drafter=names, draft_model=named))
        except DoesNotFitError as problem:
            reason = str(problem)
        else:
            if drafting.draft_max and not drafting.is_limited:
                drafting = drafting.with_reason("drafter", "what the text repeats, and the head")
                return drafting.with_choice(Choice(HEAD, "used", reason))
            reason = f"{reason}; but context would be left out for it"
    return plan.with_choice(Choice(HEAD, "not used", f"{reason}; --drafter {names} uses it"))


def _obstacle(request: Request, plan: Plan) -> str:
    """What keeps heads from drafting, or ""."""
    if plan.backend != LLAMACPP:
        return "ONNX Runtime runs no heads"
    return "two models write in turns" if request.switch is not None else ""


def _offered(spec: ModelSpec, plan: Plan) -> Plan:
    """The plan, which names a head that lies beside the model and could draft for it."""
    found = next((path for path, problem in heads_for(spec) if not problem), None)
    if found is None:
        return plan
    reason = f"{found.name} lies beside the model; --draft-model {found} uses it"
    return plan.with_choice(Choice(HEAD, "not used", reason))


def _snapshots_for_it(spec: ModelSpec, plan: Plan) -> float:
    """How many times as long plain steps take with the snapshots that drafts of a head alone need.

    1 where the plan keeps some for other drafts.
    """
    if plan.draft_max:
        return 1.0
    return snapshot_cost(spec, settings_of(plan), DRAFT_SIZES[0]) or 1.0
