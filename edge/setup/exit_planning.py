"""Whether an early exit pays on this device, from measured times, before anything is loaded.

Imports no inference library and no numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Any

from edgespec.drafting.drafters import MODEL
from edgespec.drafting.drafters.model_savings import SAVINGS
from edgespec.errors import DoesNotFitError, UnsupportedError
from edgespec.memory.plan.plan import Plan
from edgespec.memory.plan.request import Choice, Request
from edgespec.memory.plan.settings import settings_of
from edgespec.memory.times.curve import CostCurve
from edgespec.memory.times.speed import predicted_speedup
from edgespec.models.embedded import embedded_drafter_path
from edgespec.models.exits.early_exit import ExitInfo, check_exit, read_exit
from edgespec.models.pairing import check_pair
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.setup.stored import draft_settings_of, stored_curve, stored_learned

# Predicted gain for which one is loaded unseen. Files tell of text of their own, which flatters:
# the shipped one says 1.57 tokens a round of one draft, and answers to people's prompts had 1.38
# (64 tokens long) to 1.48 (192). And its memory has to be worth it.
_WORTH_TRYING = 1.15
WORTH_LOADING = 0.01  # of the time of rounds: what it has to save where that was seen
_TELLING_ROUNDS = 300


@dataclass(frozen=True, slots=True)
class EarlyExit:
    """A drafter file that may be used, and whether somebody named it."""

    spec: ModelSpec
    info: ExitInfo
    is_named: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to load a drafter, and why."""

    pays: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Experience:
    """What an early exit brought in earlier runs on this device."""

    rounds: float
    saved: float  # part of the time that these rounds would have taken without it

    @classmethod
    def from_json(cls, document: Mapping[str, Any] | None) -> Experience | None:
        """Of the document that a run has left; None where it says too little or is old."""
        values = [(document or {}).get(name) for name in SAVINGS]
        if not all(isinstance(value, float) and isfinite(value) for value in values):
            return None
        rounds, usual_ms, saved_ms = (float(value) for value in values if value is not None)
        if rounds < _TELLING_ROUNDS or usual_ms <= 0.0:
            return None
        return cls(rounds, saved_ms / usual_ms)


def exit_of(spec: ModelSpec, request: Request) -> EarlyExit | None:
    """The early exit that `--drafter auto` has to think about: the named file, or the shipped one.

    Raises UnsupportedError where the named one is of another model.
    """
    if request.drafter != "auto":
        return None
    path = request.draft_model or embedded_drafter_path()
    if path is None:
        return None
    draft_spec = read_model_spec(path, heads=True)
    info = read_exit(draft_spec) if draft_spec.reads is None else None
    if info is None:
        return None
    if request.draft_model is not None:
        check_pair(spec, draft_spec)
        return EarlyExit(draft_spec, info, is_named=True)
    try:
        check_exit(spec, draft_spec, info)
    except UnsupportedError:
        return None
    return EarlyExit(draft_spec, info, is_named=False)


def with_early_exit(
    spec: ModelSpec,
    request: Request,
    plan: Plan,
    early_exit: EarlyExit,
    plan_of: Callable[[Request], Plan],
) -> Plan:
    """The plan with an early exit drafting, where that pays; else `plan`, which says why not."""
    draft_spec = early_exit.spec
    draft_curve = stored_curve(draft_spec, draft_settings_of(plan, draft_spec))
    curve = stored_curve(spec, settings_of(plan))
    experience = Experience.from_json(stored_learned(spec, plan, draft_spec))
    verdict = judge(early_exit, spec, curve, draft_curve, experience)
    names = f"{plan.drafter},{MODEL}"
    if verdict.pays:
        wider = replace(request, drafter=names, draft_model=draft_spec.path)
        try:
            drafting = plan_of(wider)
        except DoesNotFitError as problem:
            verdict = Verdict(False, str(problem))
        else:
            if drafting.draft_max and not drafting.is_limited:
                reason = "what the text repeats, and the model's own first words of what follows"
                drafting = drafting.with_reason("drafter", reason)
                return drafting.with_choice(Choice("early_exit", "used", verdict.reason))
            verdict = Verdict(False, f"{verdict.reason}; but context would be left out for it")
    hint = f"; --drafter {names} uses it" if early_exit.is_named else ""
    return plan.with_choice(Choice("early_exit", "not used", verdict.reason + hint))


def judge(
    found: EarlyExit,
    target: ModelSpec,
    curve: CostCurve | None,
    draft_curve: CostCurve | None,
    experience: Experience | None = None,
) -> Verdict:
    """What it brought here, or else what its file says of how often it is right, and step times.

    One that is shipped is used where measurements say that it pays; one that was named, unless
    they say that it does not. A draft step that was not measured takes as long as its share of the
    target's bytes.
    """
    if experience is not None:
        part, rounds = experience.saved, experience.rounds
        reason = f"in the last {rounds:.0f} rounds here it saved {max(0.0, part):.1%} of the time"
        return Verdict(part > WORTH_LOADING, reason)
    gains = _gains(found.info)
    if not gains or curve is None:
        missing = "step times are not measured yet"
        if not gains:
            missing = "its file does not say how often it is right"
        return Verdict(found.is_named, missing)
    plain_ms = curve.base[1]
    draft_ms = plain_ms * found.spec.weight_bytes / target.weight_bytes
    if draft_curve is not None:
        draft_ms = draft_curve.base[1]
    speed, length = predicted_speedup(gains, curve.base, draft_ms)
    two_ms = curve.step_ms(2, 0)
    reason = (
        f"{speed:.2f}x of plain decoding predicted: {length:.2f} tokens a round, "
        f"{draft_ms / plain_ms:.2f} plain steps a draft, "
        + (f"{two_ms / plain_ms:.2f} for two tokens" if two_ms < inf else "one token a step")
    )
    return Verdict(speed > _WORTH_TRYING, reason)


def _gains(info: ExitInfo) -> Sequence[float]:
    gains = info.report.get("gains")
    if not isinstance(gains, list) or not all(isinstance(part, (int, float)) for part in gains):
        return ()
    return gains
