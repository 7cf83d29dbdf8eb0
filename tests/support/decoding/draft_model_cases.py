"""Draft models that are functions, and a clock that only their steps move."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from fake_backend import FakeBackend
from frozen_times import Frozen
from hypothesis import settings

from edgespec.backends.base import DraftTree, Logits
from edgespec.drafting.model import ModelDrafter, new_calibration
from edgespec.drafting.proposal import DraftEstimate, Proposal, StepContext, VerifyResult
from edgespec.memory.times import CostCurve
from edgespec.models.early_exit import ExitInfo
from edgespec.sampling.params import SamplingParams
from edgespec.sampling.sampling import Sampler

quick = settings(max_examples=60)
Model = Callable[[tuple[int, ...]], Sequence[float]]
INF = float("inf")
V = 8
EXIT = ExitInfo("", "", {}, 1, array("i", range(V)))
LONGEST = 16
# Before anything was counted: of a token that its model is so sure of, and of one to come.
FIRST_CHANCE = {0.9: new_calibration().probability(7), 1.0: new_calibration().probability(10)}
HOPE = 0.7
ONE_HOT: list[list[float]] = (20.0 * np.eye(V)).tolist()
TABLE: list[list[list[float]]] = np.random.default_rng(3).normal(0.0, 1.5, (V, V, V)).tolist()


def counting(context: tuple[int, ...]) -> Sequence[float]:
    """Surely the next number."""
    return ONE_HOT[(context[-1] + 1) % V]


def rough(context: tuple[int, ...]) -> Sequence[float]:
    return TABLE[context[-2] if len(context) > 1 else 0][context[-1]]


def curve_of(*ms: float) -> CostCurve:
    """A curve with t(1), t(2), ... in ms, which no clock corrects."""
    return Frozen([INF, *ms])


class Clock:
    """Moves by one draft step's time with each step of the draft model."""

    ms = 0.0

    def __call__(self) -> float:
        return self.ms / 1e3


class Draft(FakeBackend):
    """A draft model that takes time and counts the tokens it is fed."""

    def __init__(self, model: Model, clock: Clock, node_ms: float, **options: Any) -> None:
        super().__init__(model, options.pop("vocab_size", V), **options)
        self.clock = clock
        self.node_ms = node_ms
        self.fed = 0

    def prefill(self, tokens: Sequence[int]) -> Logits:
        self.fed += len(tokens)
        return super().prefill(tokens)

    def verify(self, tree: DraftTree) -> Logits:
        self.fed += len(tree)
        self.clock.ms += self.node_ms
        return super().verify(tree)

    @property
    def cached(self) -> list[int]:
        return self._committed


def drafter_of(
    model: Model, clock: Clock, node_ms: float = 0.01, **options: Any
) -> tuple[ModelDrafter, Draft]:
    draft = Draft(model, clock, node_ms, **options)
    return ModelDrafter(draft, curve_of(*[node_ms] * 16), V), draft


def context_of(*ms: float, max_nodes: int = 15, **options: Any) -> StepContext:
    """Target steps of up to 32 nodes in 10 ms, or of the given times."""
    curve = curve_of(*(ms or (10.0,) * 32))
    return StepContext(max_nodes, options.pop("min_probability", 0.02), curve, depth=0, **options)


def estimate_of(drafter: ModelDrafter, **options: Any) -> DraftEstimate:
    return drafter.estimate(context_of(**options))


def sampler_of(seed: int, **params: Any) -> Sampler:
    return Sampler(SamplingParams(temperature=1.0, seed=seed, **params), V)


def paths_of(proposal: Proposal) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def observe(drafter: ModelDrafter, emitted: Sequence[int]) -> None:
    drafter.observe(VerifyResult(DraftTree.chain((0,)), range(len(emitted)), emitted, context_of()))
