"""The one rule: verify the number of nodes with the most expected tokens per measured millisecond.

    n* = argmax over n of  E(n) / t(n),   E(n) = 1 + sum of the n-1 largest path probabilities

n = 1 is plain decoding and an ordinary choice. The rule knows neither drafters nor backends.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.drafters.base import Proposal
from edgespec.memory.curve import CostCurve
from edgespec.tree import DraftTree

# The best of many noisy estimates is too good on average, so a draft must promise this much more
# than plain decoding before it is used.
_MARGIN = 1.03


def choose_size(
    probabilities: Sequence[float],
    curve: CostCurve,
    depth: int,
    previous: int,
    max_drafted: int,
    extra: int = 0,
) -> int:
    """How many of the proposed nodes to verify, possibly none.

    Args:
        probabilities: path probabilities, non-increasing.
        curve: measured step times.
        depth: tokens in the cache.
        previous: nodes of the step before, whose graph can be reused.
        max_drafted: upper bound (room in the context, tokens still wanted).
        extra: tokens the backend will feed besides the nodes.
    """
    last = min(len(probabilities), max_drafted, len(curve.base) - 2 - extra)
    expected = 1.0
    best, best_rate = 0, _MARGIN / curve.step_ms(1 + extra, depth, previous)
    for num_drafted in range(1, last + 1):
        expected += probabilities[num_drafted - 1]
        rate = expected / curve.step_ms(num_drafted + 1 + extra, depth, previous)
        if rate > best_rate:
            best, best_rate = num_drafted, rate
    return best


def likeliest_chain(proposal: Proposal) -> Proposal:
    """The best node, its best child, and so on: for models that cannot verify branches."""
    tokens: list[int] = []
    probabilities: list[float] = []
    last = -1
    for node, parent in enumerate(proposal.parents):
        if parent == last:
            tokens.append(proposal.tokens[node])
            probabilities.append(proposal.probabilities[node])
            last = node
    return Proposal(tokens, range(-1, len(tokens) - 1), probabilities)


def build_tree(root: int, proposal: Proposal, num_drafted: int) -> DraftTree:
    """The root and the best `num_drafted` nodes, each branch after the one it leaves."""
    if num_drafted == 0:
        return DraftTree.chain((root,))
    tokens, parents = proposal.tokens[:num_drafted], proposal.parents[:num_drafted]
    if all(parent == node - 1 for node, parent in enumerate(parents)):
        return DraftTree.chain((root, *tokens))
    return _depth_first(root, tokens, parents)


def _depth_first(root: int, tokens: Sequence[int], parents: Sequence[int]) -> DraftTree:
    """Number the nodes depth first, likeliest child first: its path then lies in order."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    out_tokens, out_parents = [root], [-1]
    stack = [(node, 0) for node in reversed(children[-1])]
    while stack:
        node, parent = stack.pop()
        out_tokens.append(tokens[node])
        out_parents.append(parent)
        place = len(out_tokens) - 1
        stack += [(child, place) for child in reversed(children.get(node, []))]
    return DraftTree(out_tokens, out_parents)
