"""What drafters hand to the controller: candidate nodes, and what a round may cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edgespec.memory.times.curve import CostCurve

if TYPE_CHECKING:
    from edgespec.sampling.distributions import DraftDistribution
    from edgespec.sampling.sampling import Sampler


@dataclass(frozen=True, slots=True)
class Proposal:
    """Candidate nodes below the root, most probable first.

    A node's probability is that of its whole path, so it never exceeds its parent's and the best
    n nodes always form a tree. The first `kept` nodes were drawn at random: dropping one after
    seeing its token would bias the output (see `edgespec.decode.verification`), so they stay.
    """

    tokens: Sequence[int]  # [n]
    parents: Sequence[int]  # [n], index into this proposal; -1 is the root
    probabilities: Sequence[float]  # [n], non-increasing behind the kept ones
    sources: Sequence[str] = ()  # [n], the drafter of each node; empty: there is only one
    distributions: Sequence[
        DraftDistribution | None
    ] = ()  # [n], what each was drawn from; empty: none was drawn
    kept: int = 0
    draft_ms: float = 0.0  # time that models took to make it

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, nodes: Sequence[int]) -> Proposal:
        """These nodes in this order; the parents of each must be among them and before it."""
        places = {node: place for place, node in enumerate(nodes)}
        places[-1] = -1
        return Proposal(
            [self.tokens[node] for node in nodes],
            [places[self.parents[node]] for node in nodes],
            [self.probabilities[node] for node in nodes],
            [self.sources[node] for node in nodes] if self.sources else (),
            [self.distributions[node] for node in nodes] if self.distributions else (),
            sum(node < self.kept for node in nodes),
            self.draft_ms,
        )

    def cut_off(self, goes_on: float) -> Proposal:
        """The proposal where each further token is only looked at with the chance `goes_on`."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        pairs = zip(self.probabilities, depths, strict=True)
        chances = [probability * goes_on**depth for probability, depth in pairs]
        order = sorted(range(self.kept, len(self)), key=lambda node: -chances[node])
        return replace(self, probabilities=chances).part([*range(self.kept), *order])


EMPTY = Proposal((), (), ())


@dataclass(frozen=True, slots=True)
class StepContext:
    """What a round may cost, and what its drafts are worth.

    Times are those of this moment, as a clock would show them: the curve's at its `scale`.

    At most `max_nodes` may be drafted; those less probable than `min_probability` cannot pay and
    need not be proposed. `branches` says whether siblings can be verified. `sampler` is there when
    the target's tokens are drawn at random: drafts may then be drawn by it, too.
    """

    max_nodes: int
    min_probability: float
    curve: CostCurve
    depth: int  # tokens in the target's cache
    previous: int = 0  # nodes of the target's step before, whose graph can be reused
    extra: int = 0  # tokens that the target will be fed besides the nodes
    others: int = 0  # of these, the roots of other texts, each of which brings a token
    branches: bool = True
    sampler: Sampler | None = None

    @property
    def token_ms(self) -> float:
        """A plain step's time for each of its tokens: the unit of ledgers."""
        return self.estimated_ms(1) / (1 + self.others)

    def standard_error(self, num_nodes: int) -> float:
        """Relative standard deviation of the predicted time of a step."""
        return self.curve.standard_error(num_nodes + self.extra, self.depth)

    def step_ms(self, num_nodes: int) -> float:
        """Predicted time of a target step over `num_nodes`, the root included.

        Infinite where that size was not measured.
        """
        curve = self.curve
        return curve.scale * curve.step_ms(num_nodes + self.extra, self.depth, self.previous)

    def estimated_ms(self, num_nodes: int) -> float:
        """As `step_ms`, of a step that is no choice: estimated where it was not measured."""
        curve = self.curve
        return curve.scale * curve.estimated_ms(num_nodes + self.extra, self.depth, self.previous)


@dataclass(frozen=True, slots=True)
class DraftEstimate:
    """What a draft model expects of a round before it is asked, and what asking it takes."""

    probabilities: Sequence[float]  # of the nodes of its chain, non-increasing; none: it cannot
    read_ms: float = 0.0  # to read what it has not seen: bought once, used in many rounds
    first_ms: float = 0.0  # that drafting takes whatever its length
    node_ms: float = 0.0  # and each token more
