"""Which drafted tokens are kept: sample-and-match.

target token    what the sampler picks from the target's logits at a node
accepted        the drafted child that carries the target token; its own logits are read next
correction      the target token when no child carries it; a bonus when the node was a leaf

Every emitted token is picked from the target's own logits by the target's own sampler, so for
deterministic proposals the output has exactly the target's distribution, whatever was drafted
(algorithms: naive sampling, e.g. SpecInfer arXiv 2305.09781 section 4.3). With a sampler that
draws one random number a token, the same seed even gives the same tokens as plain decoding.
Trees with tokens drawn from a draft model need `edgespec.verification`. Pure: no model inside.
"""

from __future__ import annotations

from collections.abc import Callable

from edgespec.backends.base import Logits
from edgespec.tree import DraftTree


def accept(
    tree: DraftTree, logits: Logits, pick: Callable[[Logits], int]
) -> tuple[list[int], list[int]]:
    """Walk the tree from the root while its children carry what `pick` picks.

    Args:
        tree: the verified tree.
        logits: one row per node, [n, V].
        pick: chooses the next token from a row, [V]; called once per emitted token, in order.

    Returns:
        The nodes to commit (root first) and the tokens emitted. Both have the same length: the
        last token is a correction or a bonus and becomes the next root.
    """
    node, path, emitted = 0, [], []
    while node >= 0:
        token = pick(logits[node])
        path.append(node)
        emitted.append(token)
        node = tree.child(node, token)
    return path, emitted
