"""One loaded model and the drafters it is tried with, seen from its own process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from math import isfinite
from typing import Any

from edgespec.bench.interleaving import Answer
from edgespec.decode.engine import Engine, Prompt
from edgespec.drafting.drafters import HEAD, MODEL, WINDOW, drafter_names, make_drafter
from edgespec.drafting.drafters.base import Drafter
from edgespec.drafting.drafters.combined import CombinedDrafter
from edgespec.drafting.drafters.model import WritingDrafter
from edgespec.drafting.ledger import RoundHistory
from edgespec.measure.noise import find_divergence, measure_batch_noise
from edgespec.memory.device.track import MemoryTracker, peak_resident_bytes
from edgespec.memory.plan.plan import Plan
from edgespec.memory.plan.request import Request
from edgespec.models.spec import ModelSpec
from edgespec.sampling.params import SamplingParams
from edgespec.setup.loading import load_plan, plan_to_load
from edgespec.switching.engine import SwitchingEngine

AUTO, PLAIN = "auto", "none"
_SAMPLE_S = 0.1  # between two looks at the memory


class LoadedModel:
    """The answers of one loaded model by each of `drafters`, in that order.

    A drafter is the text of a list as `--drafter` takes it; `AUTO` is what the plan chooses and
    `PLAIN` decodes plainly. All of them share one load, whose plan has room for each.
    """

    def __init__(
        self, engine: Engine, plan: Plan, drafters: Sequence[str], tracker: MemoryTracker
    ) -> None:
        self._engine = engine
        self._plan = plan
        self._names = drafters
        self._tracker = tracker
        loaded = engine.drafter
        members = loaded.member if isinstance(loaded, CombinedDrafter) else lambda _name: None
        self._model = members(MODEL) or members(HEAD) or members(WINDOW)
        self._state = loaded.state() if loaded is not None else {}
        self._drafters: list[Drafter | None] = [None] * len(drafters)
        self._of_small: list[Drafter | None] = [None] * len(drafters)  # of a pair that takes turns
        # What is counted for later runs are rounds of the drafter that was loaded alone.
        self._histories = [
            engine.history if loaded is not None and name == loaded.name else RoundHistory()
            for name in drafters
        ]
        self._noise: float | None = None
        for place in range(len(drafters)):
            self.renew(place)

    def renew(self, place: int) -> None:
        """A new drafter at `place`, which knows what was counted so far, and no text."""
        before = self._drafters[place]
        state = self._state if before is None else before.state()
        self._drafters[place] = drafter = make_drafter(self._names[place], self._model)
        if drafter is not None:
            drafter.load_state(state)
        if isinstance(self._engine, SwitchingEngine):
            known = self._of_small[place] or self._engine.small.drafter
            if known is not None:
                self._of_small[place] = fresh = make_drafter(known.name)
                assert fresh is not None
                fresh.load_state(known.state())

    def answer(
        self, place: int, prompt: Prompt, max_tokens: int, sampling: SamplingParams | None = None
    ) -> Answer:
        """The answer with the drafter at `place`, greedy by default."""
        self._engine.drafter = drafter = self._drafters[place]
        self._engine.history = self._histories[place]
        if isinstance(self._model, WritingDrafter):
            self._model.forget()  # the others' answer to this prompt, or the prompt itself
        if isinstance(self._engine, SwitchingEngine):
            self._engine.small.drafter = self._of_small[place]
        result = self._engine.generate(
            prompt, max_tokens=max_tokens, sampling=sampling, speculate=drafter is not None
        )
        return Answer(result.token_ids, result.counters)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt in the model's chat format."""
        return self._engine.encode(prompt)

    def gap(self, prompt: Prompt, ids: Sequence[int], others: Sequence[int]) -> float:
        """How close the two best logits are where two answers to `prompt` part.

        0.0 where two models write: rounding may as well have moved a hand-over.
        """
        if isinstance(self._engine, SwitchingEngine):
            return 0.0
        divergence = find_divergence(self._engine.backend, self._engine.encode(prompt), ids, others)
        return divergence.gap if divergence else 0.0

    def noise(self) -> float:
        """How far step sizes move gaps between logits here."""
        if self._noise is None:
            self._noise = measure_batch_noise(self._engine.backend)
        return self._noise

    def facts(self) -> dict[str, Any]:
        """The plan, step times, and the memory that was predicted, allocated and measured.

        `step_ms` are the times of steps over 1, 2, ... tokens; None was not measured.
        """
        curve = self._engine.curve
        steps = [] if curve is None else curve.base[1:]
        return {
            "step_ms": [ms if isfinite(ms) else None for ms in steps],
            "plan": self._plan.as_json(),
            "threads": self._plan.threads,
            "place": self._engine.backend.capabilities.place or self._plan.device,
            "memory": {
                "limit_bytes": self._plan.limit_bytes,
                "predicted_peak_bytes": self._plan.predicted_peak_bytes,
                "measured_peak_bytes": peak_resident_bytes(),
                "predicted": self._plan.component_bytes,
                "allocated": self._engine.backend.memory_bytes(),
                "samples": [asdict(sample) for sample in list(self._tracker.samples)],
                "phases": [{"time_s": at, "name": name} for at, name in self._tracker.phases],
            },
        }

    def mark(self, phase: str) -> None:
        """A new phase of the memory's history begins."""
        self._tracker.mark(phase)

    def close(self) -> None:
        """Free the model."""
        with self._engine:
            self._tracker.__exit__(None, None, None)


def open_model(
    spec: ModelSpec,
    request: Request,
    drafters: Sequence[str],
    report: Callable[[str, float], None],
) -> tuple[LoadedModel, list[str]]:
    """Load `spec` for all of `drafters`; also what each of them came to. Raises as `load`."""
    with ExitStack() as opened:
        tracker = opened.enter_context(MemoryTracker(_SAMPLE_S))
        tracker.mark("load")
        plan_for = partial(plan_to_load, spec, report=report)
        chosen = plan_for(replace(request, drafter=AUTO)) if AUTO in drafters else None
        resolved = [chosen.drafter if chosen and name == AUTO else name for name in drafters]
        every = ",".join(dict.fromkeys(part for name in resolved for part in drafter_names(name)))
        plan = chosen if chosen and chosen.drafter == every else None
        plan = plan or plan_for(replace(request, drafter=every or PLAIN))
        engine = opened.enter_context(load_plan(spec, plan, progress=report))
        loaded = LoadedModel(engine, plan, resolved, tracker)
        opened.pop_all()
        return loaded, resolved
