"""Whether the head in a model's own file drafts, from what it has brought on this device.

Nothing says beforehand how often a head is right, so one is tried until its rounds say whether it
pays. Imports no inference library and no numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from edgespec.drafting.drafters import HEAD
from edgespec.errors import DoesNotFitError
from edgespec.memory.plan.options import LLAMACPP
from edgespec.memory.plan.plan import Plan
from edgespec.memory.plan.request import Choice, Request
from edgespec.models.heads import has_head
from edgespec.models.spec import ModelSpec
from edgespec.setup.exit_planning import WORTH_LOADING, Experience
from edgespec.setup.stored import stored_learned


def with_head(
    spec: ModelSpec, request: Request, plan: Plan, plan_of: Callable[[Request], Plan]
) -> Plan:
    """The plan with the head drafting, where it is tried or pays; else `plan`, which says why not.

    Only where somebody left the drafters open, and has not named a draft model.
    """
    is_open = request.drafter == "auto" and request.draft_model is None and request.switch is None
    is_possible = plan.backend == LLAMACPP and plan.users == 1 and has_head(spec)
    if not is_open or not is_possible:
        return plan
    names = f"suffix,{HEAD}"
    experience = Experience.from_json(stored_learned(spec, plan, None))
    reason = "it is not known yet whether it pays here"
    if experience is not None:
        part, rounds = max(0.0, experience.saved), experience.rounds
        reason = f"in the last {rounds:.0f} rounds here it saved {part:.1%} of the time"
    if experience is None or experience.saved > WORTH_LOADING:
        try:
            drafting = plan_of(replace(request, drafter=names))
        except DoesNotFitError as problem:
            reason = str(problem)
        else:
            if drafting.draft_max and not drafting.is_limited:
                drafting = drafting.with_reason("drafter", "what the text repeats, and the head")
                return drafting.with_choice(Choice(HEAD, "used", reason))
            reason = f"{reason}; but context would be left out for it"
    return plan.with_choice(Choice(HEAD, "not used", f"{reason}; --drafter {names} uses it"))
