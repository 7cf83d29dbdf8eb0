"""How a draft model's rows of logits become a proposal: a main chain, and siblings beside it.

A node's probability is counted by

    best or drawn x rank among its siblings x the draft model's share for it

Drawn nodes carry the distribution they were drawn from. Whether one is drawn is decided from what
was drawn before it, never from its own token (`edgespec.decode.verification` says why).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from edgespec.backends.base import Logits
from edgespec.drafting.constants import (
    BELIEF,
    BELIEF_POWER,
    BELIEVED_TRIES,
    DRAFT_GUESSES,
    MOST_DRAWN,
    SHARE_BORDERS,
    SPREAD,
    WIDTH,
)
from edgespec.drafting.proposal import Calibration, Proposal, StepContext, TopTokens
from edgespec.sampling.distributions import DraftDistribution, without
from edgespec.sampling.sampling import Sampler

_NUM_RANKS = 3  # nodes beside each other
SHARES = len(SHARE_BORDERS) + 1  # of the draft model's share for a token


def new_calibration() -> Calibration:
    """Cells are numbered (drawn * ranks + rank) * shares + share."""
    groups = [cell // SHARES for cell in range(2 * _NUM_RANKS * SHARES)]
    borders = pairwise((0.0, *SHARE_BORDERS, 1.0))
    said = {
        cell: (BELIEVED_TRIES * BELIEF * ((low + high) / 2.0) ** BELIEF_POWER, BELIEVED_TRIES)
        for cell, (low, high) in enumerate(borders)
    }
    return Calibration(len(groups), groups, groups, [p for row in DRAFT_GUESSES for p in row], said)


class ProposalBuilder:
    """A proposal that grows behind the last draft of its main chain: a token and siblings."""

    def __init__(self, context: StepContext, calibration: Calibration) -> None:
        self._context = context
        self._calibration = calibration
        self.tokens: list[int] = []
        self._parents: list[int] = []
        self.probabilities: list[float] = []
        self._cells: list[int] = []
        self._distributions: list[DraftDistribution] = []
        self._main_chain: list[int] = []  # its nodes

    @property
    def depth(self) -> int:
        """Tokens of the main chain."""
        return len(self._main_chain)

    @property
    def last_draft(self) -> int:
        """The last token of the main chain."""
        return self.tokens[self._main_chain[-1]]

    @property
    def chance(self) -> float:
        """That the whole main chain is accepted."""
        return self.probabilities[self._main_chain[-1]] if self._main_chain else 1.0

    def main_chain_probabilities(self) -> list[float]:
        """Of its nodes, [depth]."""
        return [self.probabilities[node] for node in self._main_chain]

    @property
    def is_full(self) -> bool:
        """Whether as much is drafted as may be."""
        most = self._context.max_nodes
        return len(self.tokens) >= (min(most, MOST_DRAWN) if self._context.sampler else most)

    def proposal(self, draft_ms: float) -> tuple[Proposal, list[int]]:
        """What has grown, the most probable first unless it was drawn, and the cells."""
        drawn = len(self._distributions)
        grown = Proposal(
            self.tokens,
            self._parents,
            self.probabilities,
            distributions=self._distributions,
            kept=drawn,
            draft_ms=draft_ms,
        )
        if drawn:
            return grown, self._cells
        order = sorted(range(len(self.tokens)), key=lambda node: -self.probabilities[node])
        return grown.part(order), [self._cells[node] for node in order]

    def main_chain(self) -> list[int]:
        return [self.tokens[node] for node in self._main_chain]

    def take(self, tokens: Sequence[int], shares: Sequence[float]) -> None:
        """The best of these tokens, best first with the draft model's shares; others beside it."""
        parent, chance = self._descend()
        width = _NUM_RANKS if self._context.branches else 1
        for rank, (token, share) in enumerate(zip(tokens[:width], shares, strict=False)):
            cell = _cell(0, rank, share)
            probability = chance * self._calibration.probability(cell)
            if rank > 0 and (self.is_full or probability < self._context.min_probability):
                return
            self._add(token, parent, probability, cell)

    def draw(self, row: Logits, sampler: Sampler) -> None:
        """A token that is drawn from logits [V], and others beside it."""
        ids, chances = sampler.unsorted_distribution(
            row[: sampler.vocab_size]
        )  # a pair may share fewer tokens
        parent, chance = self._descend()
        dense = np.zeros(sampler.vocab_size, np.float32)
        dense[slice(None) if ids is None else ids] = chances
        distribution: DraftDistribution | None = dense
        for rank in range(_NUM_RANKS if self._context.branches else 1):
            # What a sibling is worth before its token is known: what those before it were worth.
            worth = chance * self._calibration.group_probability(_NUM_RANKS + rank)
            if distribution is None or (
                rank > 0 and (self.is_full or worth < self._context.min_probability)
            ):
                return
            token = sampler.draw(distribution.astype(np.float64, copy=False))
            cell = _cell(1, rank, float(distribution[token]))
            self._distributions.append(distribution)
            self._add(token, parent, chance * self._calibration.probability(cell), cell)
            distribution = without(distribution, token)

    def _descend(self) -> tuple[int, float]:
        """The last draft, whose chance comes with it; the next node is the new one."""
        before = self._main_chain[-1] if self._main_chain else -1, self.chance
        self._main_chain.append(len(self.tokens))
        return before

    def _add(self, token: int, parent: int, probability: float, cell: int) -> None:
        self.tokens.append(token)
        self._parents.append(parent)
        self.probabilities.append(probability)
        self._cells.append(cell)


def _cell(drawn: int, rank: int, share: float) -> int:
    return (drawn * _NUM_RANKS + rank) * SHARES + share_bin(share)


def share_bin(share: float) -> int:
    """Which of `SHARES` a share is counted with."""
    return bisect_right(SHARE_BORDERS, share)


def top_tokens_of(row: Logits) -> TopTokens:
    """At most eight tokens of logits [V], best first, and their shares of their joint probability.

    Tokens far below the best one are left out. Two passes over the vocabulary: 30 us for 50,000.
    """
    best = row.max()
    ids = np.flatnonzero(row > best - np.float32(SPREAD))
    if len(ids) > WIDTH:
        ids = ids[np.argpartition(row[ids], len(ids) - WIDTH)[-WIDTH:]]
    logits = row[ids]
    order = np.argsort(-logits)
    weights = np.exp(logits[order] - best)
    return ids[order].tolist(), (weights / weights.sum()).tolist()


def best_token_of(row: Logits) -> tuple[int, float]:
    """The first of `top_tokens_of` and its share, in fewer steps; -1 for a broken row."""
    ids = np.flatnonzero(row > row.max() - np.float32(SPREAD))
    if not len(ids):
        return -1, 0.0
    logits = row[ids]
    first = int(logits.argmax())
    weights = np.exp(logits - logits[first])
    if len(ids) > WIDTH:
        weights = np.partition(weights, len(ids) - WIDTH)[-WIDTH:]
    return int(ids[first]), 1.0 / float(weights.sum())
