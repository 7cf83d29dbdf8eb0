"""What a loaded model's drafter begins with, and what its run adds to what is stored."""

from __future__ import annotations

from typing import Any
from warnings import warn

from edgespec.drafting.drafters import HEAD, MODEL, make_drafter
from edgespec.drafting.drafters.combined import CombinedDrafter
from edgespec.drafting.drafters.model import WritingDrafter
from edgespec.drafting.drafters.suffix import SuffixDrafter
from edgespec.errors import EdgespecWarning
from edgespec.memory.plan.plan import Plan
from edgespec.memory.plan.settings import settings_of
from edgespec.memory.store.texts import add_texts, remembered_texts
from edgespec.memory.times.curve import CostCurve
from edgespec.memory.times.speed import RoundHistory
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.setup import stored


class Learning:
    """One load of a model, from what earlier runs counted to what this one adds.

    Args:
        curve: step times, which the run goes on learning; None: there are no drafts.
        model: the opened draft model or head of the plan, if there is one.
        vocab_size: of the model; a damaged text may have tokens that it does not.
    """

    def __init__(
        self,
        spec: ModelSpec,
        plan: Plan,
        curve: CostCurve | None,
        model: WritingDrafter | None,
        vocab_size: int,
    ) -> None:
        self.drafter: CombinedDrafter | None = None
        self.more_drafters: list[CombinedDrafter] = []  # of further users
        self.history = RoundHistory()
        self._spec, self._plan, self._curve = spec, plan, curve
        self._draft_spec: ModelSpec | None = None
        if plan.draft_model is not None:
            self._draft_spec = read_model_spec(plan.draft_model, heads=True)
        if curve is not None:
            self._begin(model, vocab_size)
        if plan.remember and self._suffix is None:
            said = "nothing is remembered: texts are kept for the suffix drafter, which is not used"
            warn(said, EdgespecWarning, stacklevel=2)

    def _begin(self, model: WritingDrafter | None, vocab_size: int) -> None:
        spec, plan = self._spec, self._plan
        # A plan whose steps have no room for drafts loads no draft model.
        names = plan.drafter if model is not None else plan.of_small().drafter
        self.drafter = make_drafter(names, model)
        if self.drafter is None:
            return
        self.history = stored.stored_history(spec, names)
        learned: dict[str, Any] = {}
        if model is not None:
            learned = stored.stored_learned(spec, plan, self._draft_spec)
        made = (make_drafter(names) for _ in range(plan.users - 1))
        self.more_drafters = [drafter for drafter in made if drafter is not None]
        known = {**stored.stored_calibration(spec), MODEL: learned, HEAD: learned}
        texts = remembered_texts(spec.fingerprint) if plan.remember else []
        self.drafter.load_state(known)
        for drafter in self.more_drafters:
            drafter.share_with(self.drafter)
        self.drafter.recall([one for one in texts if max(one[1], default=0) < vocab_size])

    @property
    def _suffix(self) -> SuffixDrafter | None:
        """What has the texts of all users, if it drafts."""
        found = self.drafter.member(SuffixDrafter.name) if self.drafter is not None else None
        return found if isinstance(found, SuffixDrafter) else None

    def keep(self) -> None:
        """Add what the run has learned to what is stored now, and free the draft model."""
        try:
            if self._curve is not None:
                settings = settings_of(self._plan)
                stored.learn_curve(self._spec, settings, self._curve)
            if self.drafter is not None:
                self._add(self.drafter)
        finally:
            if self.drafter is not None:
                self.drafter.close()

    def _add(self, drafter: CombinedDrafter) -> None:
        spec, plan, state = self._spec, self._plan, drafter.state()
        stored.keep_calibration(spec, state)
        if plan.remember and self._suffix is not None:
            add_texts(spec.fingerprint, spec.path.name, self._suffix.written())
        for name in state.keys() & {MODEL, HEAD}:
            stored.keep_learned(spec, plan, self._draft_spec, state[name])
        if plan.draft_max:  # rounds that could not draft say nothing about others
            stored.keep_rounds(spec, drafter.name, self.history.rounds())
