"""The one rule: verify the number of nodes with the most expected tokens per measured millisecond.

    n* = argmax over n of  E(n) / (t_draft + t(n)),   E(n) = 1 + sum of the n-1 largest path
                                                              probabilities

Where several texts share the step, E(n) begins with one token for each of them, and is their number
times the geometric mean (`decode/step.py`). No nodes but their roots are plain decoding and an
ordinary choice. The best of many noisy estimates is too good on average, so steps over drafts are
taken to be as slow as their times are unsure. What may be lost at most is not its business
(`ledger.py`). The rule knows neither drafters nor backends.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.backends.tree import DraftTree, is_chain
from edgespec.drafting.proposal import Proposal, StepContext


def choose_size(
    probabilities: Sequence[float],
    context: StepContext,
    *,
    kept: int = 0,
    spent_ms: float = 0.0,
    node_ms: float = 0.0,
    drafted: int = 0,
    required_gain: float = 1.0,
    tries: bool = False,
) -> tuple[int, float]:
    """How many of the proposed nodes to verify, possibly none, and the tokens/ms to expect.

    The step that has to be made in any case, over the root and the kept nodes, is estimated where
    its size was not measured; no other such size is chosen unless it may be tried.

    Args:
        probabilities: what each node adds to the tokens expected (of one text: the path's
            probability), the best first behind the kept ones.
        context: step times and the most that may be drafted.
        kept: the first nodes, which cannot be left out.
        spent_ms: time this round has taken already, by a clock.
        node_ms: time it takes to draft one more node, by a clock.
        drafted: nodes that are drafted already; those behind them take `node_ms` each.
        required_gain: times the tokens/ms without drafts that a choice of more must promise.
        tries: whether a size that was not measured is taken where its estimate is the best. Two
            such steps measure it, so that few are lost where the estimate was too good.
    """
    expected = 1.0 + context.others + sum(probabilities[:kept])
    scale = context.curve.scale  # below, all times are the curve's
    spent_ms, node_ms = spent_ms / scale, node_ms / scale
    spent_ms += max(0, kept - drafted) * node_ms
    curve, extra, depth, previous = context.curve, context.extra, context.depth, context.previous
    rate = expected / (spent_ms + curve.estimated_ms(1 + kept + extra, depth, previous))
    best, best_rate, least, required = kept, rate, rate, required_gain * rate
    step_ms = curve.estimated_ms if tries else curve.step_ms
    before = context.standard_error(1 + kept)  # which what is compared with has, too
    for size in range(kept + 1, min(len(probabilities), context.max_nodes) + 1):
        expected += probabilities[size - 1]
        if size > drafted:
            spent_ms += node_ms
        ms = step_ms(size + 1 + extra, depth, previous)
        rate = expected / (spent_ms + ms)
        if rate > least and rate >= required:
            unsure = max(0.0, context.standard_error(size + 1) - before)
            cautious = expected / (spent_ms + ms * (1.0 + unsure))
            if cautious > least:
                best, best_rate, least = size, rate, cautious
    return best, best_rate / scale


def likeliest_chain(proposal: Proposal) -> Proposal:
    """The best node, its best child, and so on: for models that cannot verify branches."""
    chain: list[int] = []
    for node, parent in enumerate(proposal.parents):
        if parent == (chain[-1] if chain else -1):
            chain.append(node)
    return proposal if len(chain) == len(proposal) else proposal.part(chain)


def build_tree(root: int, proposal: Proposal, num_drafted: int) -> DraftTree:
    """The root and the best `num_drafted` nodes, each branch after the one it leaves."""
    if num_drafted == 0:
        return DraftTree.chain((root,))
    parents = proposal.parents[:num_drafted]
    has_branches = not is_chain(parents)
    if has_branches:
        proposal = proposal.part(_depth_first(parents))
    return DraftTree(
        (root, *proposal.tokens[:num_drafted]),
        [-1, *(parent + 1 for parent in proposal.parents)]
        if has_branches
        else range(-1, num_drafted),
        ("", *proposal.sources[:num_drafted]) if proposal.sources else (),
        (None, *proposal.distributions[:num_drafted]) if proposal.distributions else (),
    )


def _depth_first(parents: Sequence[int]) -> list[int]:
    """The nodes depth first, likeliest child first: its path then lies in order."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    order: list[int] = []
    stack = children[-1][::-1]
    while stack:
        node = stack.pop()
        order.append(node)
        stack += reversed(children.get(node, []))
    return order
