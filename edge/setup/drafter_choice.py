"""Whether an early exit or a head drafts, too: from what it has brought here, or promises to.

A file that edgespec trained says how often it is right, so that measured step times predict what it
brings. Of another head nothing says it, and so it is tried until its rounds do. Imports no
inference library and no numpy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, isfinite
from pathlib import Path
from typing import Any

from edgespec.drafting.constants import (
    NO_DIFFERENCE,
    TELLING_ROUNDS,
    WINDOW_FIRST,
    WINDOW_GAINS,
    WINDOW_LAST,
)
from edgespec.drafting.drafters import HEAD, MODEL, WINDOW
from edgespec.drafting.ledger import SAVINGS
from edgespec.errors import DoesNotFitError, EdgespecError
from edgespec.memory.plan.layout import DRAFT_SIZES
from edgespec.memory.plan.options import LLAMACPP, ONNX
from edgespec.memory.plan.plan import Plan
from edgespec.memory.plan.request import Choice, Request
from edgespec.memory.plan.settings import settings_of
from edgespec.memory.times.speed import predicted_speedup
from edgespec.models.early_exit import (
    ExitInfo,
    MadeFor,
    gains_of,
    read_exit,
    read_made_for,
    target_hash,
)
from edgespec.models.embedded import embedded_drafter_path
from edgespec.models.heads import NAMES_OUTPUTS, has_head, heads_beside
from edgespec.models.pairing import check_pair, heads_for
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.setup.stored import draft_settings_of, snapshot_cost, stored_curve, stored_learned

# Of the tokens that drafts gain on a file's own text, what they gain on people's prompts: a head
# said 0.66 a round of one draft, and the first 96 tokens of answers had 0.38; an exit 0.57, 0.38.
_HOLDS = 0.6
# Times as long as plain steps take where kernels read the model's layers by name: 1.01 to 1.09 in
# four turns of Qwen2.5 1.5B, 1.03 in the median.
_READ_BY_NAME = 1.03
_WORTH_A_WINDOW = 1.03  # times plain decoding that is predicted where contexts are full
_WORTH_LOADING = 0.01  # of the time of rounds: what it has to save where that was seen
_CHOICES = {MODEL: "early_exit", HEAD: HEAD}  # names in a plan
_DRAFTS = {MODEL: "the model's own first words of what follows", HEAD: "the head"}


@dataclass(frozen=True, slots=True)
class Candidate:
    """What may draft besides tables: an early exit or a head, in a file or in the model's own.

    gains[i] is what an i + 1st draft adds to the tokens of a round, as its file says; without any
    it says nothing.
    """

    drafts_as: str  # MODEL or HEAD
    spec: ModelSpec | None  # of its file; None: the model's own
    gains: Sequence[float] = ()
    is_named: bool = False


@lru_cache(maxsize=1)
def _shipped(path: Path) -> ModelSpec:
    """Which stays as it is while a program runs; lists of models plan many files."""
    return read_model_spec(path, heads=True)


def candidate_of(spec: ModelSpec, request: Request) -> Candidate | None:
    """What `--drafter auto` thinks about: the named file, the shipped one, or the model's own.

    Else a head beside the model that was trained for this very file.

    Raises UnsupportedError where the named one is of another model.
    """
    if request.drafter != "auto":
        return None
    path, is_named = request.draft_model, request.draft_model is not None
    path = path or embedded_drafter_path()
    own = Candidate(HEAD, None) if has_head(spec) else None
    if path is None:
        return own or _trained_beside(spec)
    drafter = read_model_spec(path, heads=True) if is_named else _shipped(Path(path))
    if not is_named and drafter.reads is not None and drafter.vocab_size != spec.vocab_size:
        return own or _trained_beside(spec)
    made = read_exit(drafter) if drafter.reads is None else read_made_for(path)
    if is_named:
        if made is None and drafter.reads is None:
            return None  # a smaller model, which drafts in any case
        check_pair(spec, drafter)
    elif made is None or not _is_made_for(spec, drafter, made):
        return own or _trained_beside(spec)
    drafts_as = MODEL if drafter.reads is None else HEAD
    return Candidate(drafts_as, drafter, () if made is None else gains_of(made.report), is_named)


def _trained_beside(spec: ModelSpec) -> Candidate | None:
    """A head in the model's folder that edgespec trained for this very file."""
    for path in heads_beside(spec):
        with contextlib.suppress(EdgespecError):  # somebody else's, or no head at all
            made = read_made_for(path)
            if made is not None and made.target_hash == target_hash(spec):
                drafter = read_model_spec(path, heads=True)
                check_pair(spec, drafter)
                return Candidate(HEAD, drafter, gains_of(made.report))
    return None


def with_candidate(
    spec: ModelSpec,
    request: Request,
    plan: Plan,
    candidate: Candidate,
    plan_of: Callable[[Request], Plan],
) -> Plan:
    """The plan with the candidate drafting where it is tried or pays; else `plan` says why not."""
    choice = _CHOICES[candidate.drafts_as]
    if obstacle := _obstacle(request, plan, candidate.drafts_as):
        is_named = candidate.is_named
        return plan.with_choice(Choice(choice, "not used", obstacle)) if is_named else plan
    # A head follows chains alone, and tables of what else could have been said bring branches.
    tables = plan.drafter.removesuffix(f",{WINDOW}") if candidate.drafts_as == MODEL else "suffix"
    names = f"{tables},{candidate.drafts_as}"
    pays, reason = _judged(spec, plan, candidate)
    if pays:
        path = None if candidate.spec is None else candidate.spec.path
        try:
            drafting = plan_of(replace(request, drafter=names, draft_model=path))
        except DoesNotFitError as problem:
            reason = str(problem)
        else:
            if drafting.draft_max and not drafting.is_limited:
                who = f"what the text repeats, and {_DRAFTS[candidate.drafts_as]}"
                drafting = drafting.with_reason("drafter", who)
                return drafting.with_choice(Choice(choice, "used", reason))
            reason = f"{reason}; but context would be left out for it"
    is_at_hand = candidate.is_named or candidate.spec is None
    hint = f"; --drafter {names} uses it" if is_at_hand else ""
    return plan.with_choice(Choice(choice, "not used", reason + hint))


def with_offer(spec: ModelSpec, request: Request, plan: Plan) -> Plan:
    """The plan, which names a head that lies beside the model and could draft for it."""
    is_open = request.drafter == "auto" and request.draft_model is None and plan.users == 1
    if not is_open or _obstacle(request, plan, HEAD):
        return plan
    found = next((path for path, problem in heads_for(spec) if not problem), None)
    if found is None:
        return plan
    reason = f"{found.name} lies beside the model; --draft-model {found} uses it"
    return plan.with_choice(Choice(HEAD, "not used", reason))


def window_unsupported(spec: ModelSpec, request: Request) -> str:
    """What keeps the model from drafting for itself over a part of its cache, or ""."""
    if request.backend == ONNX:
        return "ONNX Runtime's cache holds one text"
    if spec.keeps_state:
        return f"{spec.arch} keeps a recurrent state, which has no parts"
    if spec.sliding_window:
        return f"{spec.arch} has sliding windows itself"
    if request.exact and request.users != 1:
        return "with --exact users share no cells, so a window could not, either"
    return ""


def with_window(
    spec: ModelSpec, request: Request, plan: Plan, plan_of: Callable[[Request], Plan]
) -> Plan:
    """The plan with the model drafting for itself, where contexts get so deep that it pays.

    By measured step times, behind as many tokens as there is room for. It takes no memory but for
    the distributions that drafts are drawn from.
    """
    curve = stored_curve(spec, settings_of(plan))
    if curve is None or request.switch is not None or window_unsupported(spec, request):
        return plan
    depth = plan.context_size
    steps = [curve.step_ms(size, depth) for size in range(len(curve.base))]
    draft_ms = curve.step_ms(1, WINDOW_FIRST + WINDOW_LAST)
    speed, _ = predicted_speedup(WINDOW_GAINS, steps, draft_ms)
    if speed <= _WORTH_A_WINDOW:
        return plan
    try:
        drafting = plan_of(replace(request, drafter=f"{plan.drafter},{WINDOW}"))
    except DoesNotFitError:
        return plan
    if not drafting.draft_max or drafting.is_limited:
        return plan
    who = f"what the text repeats, and behind long texts the model over {WINDOW_LAST} cells of it"
    drafting = drafting.with_reason("drafter", who)
    reason = f"{speed:.2f}x of plain decoding predicted behind {depth} tokens"
    return drafting.with_choice(Choice(WINDOW, "used", reason))


def _judged(spec: ModelSpec, plan: Plan, candidate: Candidate) -> tuple[bool, str]:
    """Whether to load it, and why: what it brought here, or what its file and step times promise.

    Its ledger bounds what it can lose to next to nothing, so that it only has to be worth its
    bytes: a percent of speed for every percent of the memory that the plan may take. A shipped
    one is used where measurements say that it pays; one that was named, or is the model's own,
    unless they say that it does not. A draft step that was not measured takes as long as its share
    of the target's bytes. Plain steps are longer where it alone needs snapshots, or is to read
    layers that llama.cpp does not hand out.
    """
    drafter, curve = candidate.spec, stored_curve(spec, settings_of(plan))
    reads_by_name = candidate.drafts_as == HEAD and drafter and spec.arch in NAMES_OUTPUTS
    reading = _READ_BY_NAME if reads_by_name else 1.0
    rounds, usual_steps, saved_steps = _savings(stored_learned(spec, plan, drafter))
    if rounds >= TELLING_ROUNDS and usual_steps > 0.0:
        saved = saved_steps / usual_steps
        cost = reading * _snapshots_for_it(spec, plan, candidate)
        reason = f"in the last {rounds:.0f} rounds here it saved {max(0.0, saved):.1%} of the time"
        if cost > 1.0:
            saved = 1.0 - cost * (1.0 - saved)
            reason += f", and plain steps take {cost:.2f} times as long for it"
        return saved > _WORTH_LOADING, reason
    is_asked = candidate.is_named or drafter is None
    if drafter is None or not candidate.gains:
        missing = "its file does not say how often it is right"
        if candidate.drafts_as == HEAD:
            missing = "it is not known yet whether it pays here"
        return is_asked, missing
    if curve is None:
        return is_asked, "step times are not measured yet"
    plain_ms = curve.base[1]
    draft_ms = first_ms = plain_ms * drafter.weight_bytes / spec.weight_bytes
    draft_curve = stored_curve(drafter, draft_settings_of(plan, drafter))
    if draft_curve is not None:
        draft_ms, first_ms = draft_curve.base[1], draft_curve.base[2]
    if candidate.drafts_as == MODEL or first_ms == inf:
        first_ms = draft_ms  # a head's first draft also takes in rows of the model
    gains = [_HOLDS * gain for gain in candidate.gains]
    speed, length = predicted_speedup(gains, curve.base, draft_ms, first_ms)
    speed /= reading
    two_ms = curve.step_ms(2, 0)
    reason = (
        f"{speed:.2f}x of plain decoding predicted: {length:.2f} tokens a round, "
        f"{first_ms / plain_ms:.2f} plain steps a draft, "
        + (f"{two_ms / plain_ms:.2f} for two tokens" if two_ms < inf else "one token a step")
    )
    return speed > NO_DIFFERENCE + drafter.weight_bytes / plan.limit_bytes, reason


def _savings(document: Mapping[str, Any] | None) -> list[float]:
    """What earlier runs left: rounds, their plain steps, and those that were saved; else 0."""
    values = [(document or {}).get(name) for name in SAVINGS]
    is_ours = all(isinstance(value, float) and isfinite(value) for value in values)
    return [float(value) for value in values if value is not None] if is_ours else [0.0] * 3


def _obstacle(request: Request, plan: Plan, drafts_as: str) -> str:
    """What keeps it from drafting, or ""."""
    if drafts_as == MODEL:
        return ""
    if plan.backend != LLAMACPP:
        return "ONNX Runtime runs no heads"
    return "two models write in turns" if request.switch is not None else ""


def _snapshots_for_it(spec: ModelSpec, plan: Plan, candidate: Candidate) -> float:
    """How many times as long plain steps take with the snapshots that drafts of a head alone need.

    1 where the plan keeps some for other drafts.
    """
    if plan.draft_max or candidate.drafts_as == MODEL:
        return 1.0
    return snapshot_cost(spec, settings_of(plan), DRAFT_SIZES[0]) or 1.0


def _is_made_for(spec: ModelSpec, drafter: ModelSpec, made: ExitInfo | MadeFor) -> bool:
    width = drafter.embedding_size if drafter.reads is None else drafter.reads.width
    return width == spec.embedding_size and made.target_hash == target_hash(spec)
