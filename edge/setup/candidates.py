"""Who could draft in a plan whose request leaves it open.

Each candidate is a request that asks for more than the plan so far. It is planned if it is expected
to pay, and taken if nothing is left out for it; the plan says why, or why not (`best_drafters`):

1. drafts of what the text repeats, which every plan begins with
2. where large steps are cheap: of what else the target could have said (recycling)
3. behind long texts: the target's own, over a window
4. those of an early exit or a head; without either, of a small model: one that lies here with the
   model's vocabulary, the embedded one, or another that lies here

A file that edgespec trained says how often it is right, so that measured step times predict what it
brings. Of another head nothing says it, and so it is tried until its rounds do. Imports no
inference library and no numpy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

from edgespec.drafting import HEAD, MODEL, WINDOW
from edgespec.drafting.combined import keeps_out, part_saved
from edgespec.drafting.constants import (
    TELLING_ROUNDS,
    TRANSLATED_GAINS,
    WINDOW_FIRST,
    WINDOW_GAINS,
    WINDOW_LAST,
)
from edgespec.errors import DoesNotFitError, EdgespecError
from edgespec.memory.plan.layout import DRAFT_SIZES
from edgespec.memory.plan.options import LLAMACPP, ONNX
from edgespec.memory.plan.plan import Choice, Plan, Request
from edgespec.memory.times import NO_DIFFERENCE, predicted_speedup
from edgespec.models.early_exit import (
    ExitInfo,
    MadeFor,
    file_hash,
    gains_of,
    read_exit,
    read_made_for,
)
from edgespec.models.embedded import embedded_drafter_path
from edgespec.models.heads import NAMES_OUTPUTS, has_head, heads_beside
from edgespec.models.hub.resolve import EMBEDDED, local_models
from edgespec.models.pairing import check_drafter, check_pair, heads_for, is_translated
from edgespec.models.spec import ONNX_FORMAT, ModelSpec, read_model_spec
from edgespec.setup.stored import (
    curve_at,
    draft_key,
    snapshot_cost,
    stored_curve,
    stored_learned,
)

# Of the tokens that drafts gain on a file's own text, what they gain on people's prompts: a head
# said 0.66 a round of one draft, and the first 96 tokens of answers had 0.38; an exit 0.57, 0.38.
_HOLDS = 0.6
# Times as long as plain steps take where kernels read the model's layers by name: 1.01 to 1.09 in
# four turns of Qwen2.5 1.5B, 1.03 in the median.
_READ_BY_NAME = 1.03
# Times a plain step that one of eight nodes takes. A ledger bounds what recycling can lose, so that
# this is where it brings nothing: over suffix alone 1.013 at 1.15, 1.000 at 1.3, 1.002 at 1.48,
# 0.999 at 1.67, in replays of SmolLM2's answers that charge nothing for its tables.
_FLAT = 1.3
_EXIT, SMALL_MODEL = "early_exit", "draft_model"  # names in a plan
_DRAFTS = {
    _EXIT: "the model's own first words of what follows",
    HEAD: "the head",
    SMALL_MODEL: "a small model",
}


@dataclass(frozen=True, slots=True)
class DraftSource:
    """What may draft besides tables: an early exit or a head, in a file or in the model's own.

    gains[i] is what an i + 1st draft adds to the tokens of a round, as its file says, or what small
    models bring; without any it says nothing.
    """

    kind: str  # _EXIT, HEAD or SMALL_MODEL
    spec: ModelSpec | None  # of its file; None: the model's own
    gains: Sequence[float] = ()
    is_named: bool = False

    @property
    def drafts_as(self) -> str:
        """MODEL or HEAD."""
        return HEAD if self.kind == HEAD else MODEL


def source_of(spec: ModelSpec, request: Request) -> DraftSource | None:
    """What `--drafter auto` considers: the named file, the shipped one, or the model's own.

    Else a head beside the model that was trained for this very file, else a small model.

    Raises UnsupportedError where the named one is of another model.
    """
    if request.drafter != "auto":
        return None
    path, is_named = request.draft_model, request.draft_model is not None
    path = path or embedded_drafter_path()
    own = DraftSource(HEAD, None) if has_head(spec) else None
    if path is None:
        return own or _trained_beside(spec) or _small_model(spec, request)
    drafter = read_model_spec(path, heads=True)
    if not is_named and drafter.reads is not None and drafter.vocab_size != spec.vocab_size:
        return own or _trained_beside(spec) or _small_model(spec, request)
    made = read_exit(drafter) if drafter.reads is None else read_made_for(path)
    width = drafter.embedding_size if drafter.reads is None else drafter.reads.width
    if is_named:
        if made is None and drafter.reads is None:
            return None  # a smaller model, which drafts in any case
        check_pair(spec, drafter)
    elif made is None or width != spec.embedding_size or made.target_hash != file_hash(spec.path):
        return own or _trained_beside(spec) or _small_model(spec, request)
    kind = _EXIT if drafter.reads is None else HEAD
    return DraftSource(kind, drafter, _held(made), is_named)


def _held(made: ExitInfo | MadeFor | None) -> list[float]:
    """What drafts gain on people's prompts, by a file that says what they do on its own text."""
    return [] if made is None else [_HOLDS * gain for gain in gains_of(made.report)]


def _small_model(spec: ModelSpec, request: Request) -> DraftSource | None:
    """The small model to draft with: of the same vocabulary, the embedded one, or another."""
    if request.switch is not None or spec.format == ONNX_FORMAT:
        return None
    most = spec.weight_bytes // 5
    local = [(one.file_bytes, one) for one in local_models()]
    small = sorted((size, one.path) for size, one in local if 0 < size <= most)[-8:]
    embedded = [one.path for size, one in local if one.name == EMBEDDED and size <= most]
    found: list[tuple[bool, bool, int, DraftSource]] = []
    for path in dict.fromkeys((*embedded, *(path for _, path in small))):
        with contextlib.suppress(EdgespecError):  # a projector, or of a kind that cannot draft
            draft = read_model_spec(path, heads=True)
            if draft.reads is not None or read_exit(draft) is not None:
                continue
            check_drafter(spec, draft)
            source = DraftSource(SMALL_MODEL, draft, TRANSLATED_GAINS)
            order = is_translated(spec, draft), path not in embedded, draft.weight_bytes
            found.append((*order, source))
    return min(found, key=lambda one: one[:3])[3] if found else None


def _trained_beside(spec: ModelSpec) -> DraftSource | None:
    """A head in the model's folder that edgespec trained for this very file."""
    for path in heads_beside(spec):
        with contextlib.suppress(EdgespecError):  # somebody else's, or no head at all
            made = read_made_for(path)
            if made is not None and made.target_hash == file_hash(spec.path):
                drafter = read_model_spec(path, heads=True)
                check_pair(spec, drafter)
                return DraftSource(HEAD, drafter, _held(made))
    return None


@dataclass(frozen=True, slots=True)
class Candidate:
    """More that could draft than in the plan so far: what asks for it, and whether it would pay.

    `choice` is the name under which the plan tells that it is used; "": who drafts is all it tells.
    """

    request: Request
    who: str  # drafts then, in words
    pays: bool
    reason: str
    choice: str = ""
    is_told: bool = False  # also where it is not used, with this
    hint: str = ""


def best_drafters(
    spec: ModelSpec,
    request: Request,
    source: DraftSource | None,
    plan_of: Callable[[Request], Plan],
) -> Plan:
    """The plan on one backend and its kernels, with the drafters that are worth it."""
    tables = request if source is None else replace(request, draft_model=None)
    plan = plan_of(tables)
    if plan.drafter == "none":
        return plan
    if request.drafter == "auto" and plan.drafter == "suffix":
        for candidate in (_recycling, _window):
            plan = _with(candidate(spec, tables, plan), plan, plan_of)
    if source is None:
        return with_offer(spec, request, _with_prediction(spec, plan))
    drafting = _with(_drafts_of(source, spec, request, plan), plan, plan_of)
    if source.is_named or source.kind == SMALL_MODEL:
        return drafting
    return drafting.with_reason(SMALL_MODEL, "found here, and made for this very file")


def _with(one: Candidate | None, plan: Plan, plan_of: Callable[[Request], Plan]) -> Plan:
    """The plan of a candidate where that pays and fits; else `plan`, which says why not."""
    if one is None:
        return plan
    reason = one.reason
    if one.pays:
        try:
            drafting = plan_of(one.request)
        except DoesNotFitError as problem:
            reason = f"{reason}; but it {problem}" if one.choice == SMALL_MODEL else str(problem)
        else:
            if drafting.draft_max and not drafting.is_limited:
                drafting = drafting.with_reason("drafter", one.who)
                if one.choice == SMALL_MODEL:  # whose name is told in any case
                    return drafting.with_reason(SMALL_MODEL, reason)
                used = Choice(one.choice, "used", reason)
                return drafting.with_choice(used) if one.choice else drafting
            left = drafting.context_size
            reason += f"; but it would leave {left} of {plan.context_size} tokens of context"
            if one.choice == SMALL_MODEL and left < plan.context_size:
                return plan.with_choice(
                    Choice(SMALL_MODEL, "not used", f"{reason}; --ctx {left} takes it")
                )
    if not one.is_told:
        return plan
    return plan.with_choice(Choice(one.choice, "not used", reason + one.hint))


def _recycling(spec: ModelSpec, request: Request, plan: Plan) -> Candidate | None:
    """What else the target could have said, where steps over many tokens cost little."""
    curve = stored_curve(spec, plan)
    if curve is None:
        return None
    pays = curve.step_ms(8, 0) <= _FLAT * curve.base[1]
    who = "steps over many tokens cost little here: what else the target could have said pays"
    return Candidate(replace(request, drafter="suffix,recycling"), who, pays, who)


def _window(spec: ModelSpec, request: Request, plan: Plan) -> Candidate | None:
    """The model drafting for itself, where contexts get so deep that it pays.

    By measured step times, behind as many tokens as there is room for. It takes no memory but for
    the distributions that drafts are drawn from.
    """
    curve = stored_curve(spec, plan)
    if curve is None or request.switch is not None or window_unsupported(spec, request):
        return None
    depth = plan.context_size
    steps = [curve.step_ms(size, depth) for size in range(len(curve.base))]
    draft_ms = curve.step_ms(1, WINDOW_FIRST + WINDOW_LAST)
    speed, _ = predicted_speedup(WINDOW_GAINS, steps, draft_ms)
    who = f"what the text repeats, and behind long texts the model over {WINDOW_LAST} cells of it"
    reason = f"{speed:.2f}x of plain decoding predicted behind {depth} tokens"
    asked = replace(request, drafter=f"{plan.drafter},{WINDOW}")
    return Candidate(asked, who, speed > NO_DIFFERENCE, reason, WINDOW)


def _drafts_of(source: DraftSource, spec: ModelSpec, request: Request, plan: Plan) -> Candidate:
    """An early exit or a head: where it is tried or pays."""
    choice, who = source.kind, f"what the text repeats, and {_DRAFTS[source.kind]}"
    if reason := _unsupported(request, plan, source.drafts_as):
        return Candidate(request, who, False, reason, choice, is_told=source.is_named)
    # A head follows chains alone, and tables of what else could have been said bring branches.
    tables = plan.drafter.removesuffix(f",{WINDOW}") if source.drafts_as == MODEL else "suffix"
    names = f"{tables},{source.drafts_as}"
    pays, reason = _judged(spec, plan, source)
    path = None if source.spec is None else source.spec.path
    is_at_hand = source.is_named or source.spec is None
    hint = f"; --drafter {names} uses it" if is_at_hand else ""
    if source.kind == SMALL_MODEL:
        hint = f"; --draft-model {path} uses it"
    asked = replace(request, drafter=names, draft_model=path)
    return Candidate(asked, who, pays, reason, choice, is_told=True, hint=hint)


def _with_prediction(spec: ModelSpec, plan: Plan) -> Plan:
    """The plan, which says what a smaller model that was named is expected to bring."""
    if plan.draft_model is None or MODEL not in plan.drafter.split(","):
        return plan
    drafter = read_model_spec(plan.draft_model)
    if read_exit(drafter) is not None:
        return plan
    source = DraftSource(SMALL_MODEL, drafter, TRANSLATED_GAINS, is_named=True)
    _, reason = _judged(spec, plan, source)
    return plan.with_reason(SMALL_MODEL, f"as asked; {reason}")


def with_offer(spec: ModelSpec, request: Request, plan: Plan) -> Plan:
    """The plan, which names a head that lies beside the model and could draft for it."""
    is_open = request.drafter == "auto" and request.draft_model is None and plan.users == 1
    if not is_open or _unsupported(request, plan, HEAD):
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


def _judged(spec: ModelSpec, plan: Plan, source: DraftSource) -> tuple[bool, str]:
    """Whether to load it, and why: what it brought here, or what its file and step times promise.

    What was saved here is an estimate with its error, and leaves it out only where it surely is no
    gain, for as long as that was learned. Its ledger bounds what it can lose to next to nothing, so
    that it only has to be worth its bytes: a percent of speed for every percent of the memory that
    the plan may take. A shipped one is used where measurements say that it pays; one that was
    named, or is the model's own, unless they say that it does not. A draft step that was not
    measured takes as long as its share of the target's bytes. Plain steps are longer where it alone
    needs snapshots, or is to read layers that llama.cpp does not hand out.
    """
    drafter, curve = source.spec, stored_curve(spec, plan)
    reads_by_name = source.drafts_as == HEAD and drafter and spec.arch in NAMES_OUTPUTS
    reading = _READ_BY_NAME if reads_by_name else 1.0
    learned = stored_learned(spec, plan, drafter)
    rounds, saved, error = part_saved(learned)
    if rounds >= TELLING_ROUNDS:
        cost = reading
        if not plan.draft_max and source.drafts_as == HEAD:  # it alone needs snapshots
            cost *= snapshot_cost(spec, plan, DRAFT_SIZES[0]) or 1.0
        reason = f"in the last {rounds:.0f} rounds here it saved {max(0.0, saved):.1%} of the time"
        if cost > 1.0:
            saved = 1.0 - cost * (1.0 - saved)
            reason += f", and plain steps take {cost:.2f} times as long for it"
        pays = saved + 2.0 * cost * error > NO_DIFFERENCE - 1.0
        if pays or keeps_out(learned):
            return pays, reason
    is_asked = source.is_named or drafter is None
    if drafter is None or not source.gains:
        missing = "its file does not say how often it is right"
        if source.drafts_as == HEAD:
            missing = "it is not known yet whether it pays here"
        return is_asked, missing
    if curve is None:
        if source.kind == SMALL_MODEL:  # its ledger bounds what a try can cost
            share = drafter.weight_bytes / spec.weight_bytes
            return True, f"tried: it has {share:.2f} of the bytes, and nothing is measured yet"
        return is_asked, "step times are not measured yet"
    plain_ms = curve.base[1]
    draft_ms = first_ms = plain_ms * drafter.weight_bytes / spec.weight_bytes
    draft_curve = curve_at(draft_key(spec, plan, drafter))
    if draft_curve is not None:
        draft_ms, first_ms = draft_curve.base[1], draft_curve.base[2]
    if source.drafts_as == MODEL or first_ms == inf:
        first_ms = draft_ms  # a head's first draft also takes in rows of the model
    speed, length = predicted_speedup(source.gains, curve.base, draft_ms, first_ms)
    speed /= reading
    two_ms = curve.step_ms(2, 0)
    reason = (
        f"{speed:.2f}x of plain decoding predicted: {length:.2f} tokens a round, "
        f"{first_ms / plain_ms:.2f} plain steps a draft, "
        + (f"{two_ms / plain_ms:.2f} for two tokens" if two_ms < inf else "one token a step")
    )
    return speed > NO_DIFFERENCE + drafter.weight_bytes / plan.limit_bytes, reason


def _unsupported(request: Request, plan: Plan, drafts_as: str) -> str:
    """What keeps it from drafting, or ""."""
    if drafts_as == MODEL:
        return ""
    if plan.backend != LLAMACPP:
        return "ONNX Runtime runs no heads"
    return "two models write in turns" if request.switch is not None else ""
