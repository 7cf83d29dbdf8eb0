"""Proposals of several drafters as one tree.

Nodes that spell the same text are one node (longest shared prefix). Its probability is the larger
one: each drafter counted how often it is right given what it looks at, and the surer one looks at
more. Siblings exclude each other, so a node that comes later gets at most what those before it
leave of their parent. A node belongs to the drafter its probability is from.
"""

from __future__ import annotations

from dataclasses import replace

from edgespec.drafting.proposal import Proposal


def merge(base: Proposal, added: Proposal) -> Proposal:
    """Both proposals in one tree, kept nodes first, then by probability; both name sources.

    At most one of the two has kept nodes.
    """
    if not len(added) or not len(base):
        return base if len(base) else added
    tokens, parents = list(base.tokens), list(base.parents)
    probabilities, sources = list(base.probabilities), list(base.sources)
    distributions = [*(base.distributions or [None] * len(base))]
    added_distributions = added.distributions or [None] * len(added)
    nodes = {key: node for node, key in enumerate(zip(parents, tokens, strict=True))}
    left: dict[int, float] = {-1: 1.0}  # of a parent's probability, not yet given to a child
    for parent, probability in zip(parents, probabilities, strict=True):
        left[parent] = left.get(parent, probabilities[parent]) - probability
    kept = dict.fromkeys(range(base.kept))  # in the order in which they were drawn
    places: list[int] = []
    for i, token in enumerate(added.tokens):
        parent = places[added.parents[i]] if added.parents[i] >= 0 else -1
        node = nodes.get((parent, token), -1)
        already = probabilities[node] if node >= 0 else 0.0
        room = left.get(parent, probabilities[parent]) + already
        probability = max(already, min(added.probabilities[i], room))
        left[parent] = room - probability
        if node < 0:
            node = len(tokens)
            nodes[parent, token] = node
            tokens.append(token)
            parents.append(parent)
            probabilities.append(probability)
            sources.append(added.sources[i])
            distributions.append(added_distributions[i])
        elif probability > already or i < added.kept:
            # The children's share of this node stays what it was, so what is left of it grows.
            if node in left:
                left[node] += probability - already
            probabilities[node] = probability
            sources[node] = added.sources[i]
            distributions[node] = added_distributions[i] if i < added.kept else distributions[node]
        if i < added.kept:
            kept[node] = None
        places.append(node)
    merged = Proposal(
        tokens,
        parents,
        probabilities,
        sources,
        distributions if kept else (),
        draft_ms=base.draft_ms + added.draft_ms,
    )
    others = sorted(set(range(len(tokens))) - kept.keys(), key=lambda n: (-probabilities[n], n))
    return replace(merged.part([*kept, *others]), kept=len(kept))
