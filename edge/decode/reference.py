"""The decode loop in one function: one model, one text, one drafter; no threads, no clock.

    propose -> verify -> accept -> commit

Read it first. `step.py` does the same for several texts at once, and verifies only as many drafts
as their measured times are worth. `tests/decode/test_reference.py` compares both token by token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edgespec.backends.base import Backend
from edgespec.decode.step import accept
from edgespec.drafting.model import top_tokens_of
from edgespec.drafting.proposal import (
    EMPTY,
    Drafter,
    StepContext,
    VerifyResult,
    build_tree,
    likeliest_chain,
)
from edgespec.memory.times import CostCurve
from edgespec.sampling.sampling import Sampler


def decode(
    backend: Backend, drafter: Drafter, sampler: Sampler, prompt: Sequence[int], max_tokens: int
) -> Iterator[int]:
    """The tokens that a model writes behind a prompt, up to one that ends the text or the most.

    They are plain decoding's, whatever the drafter proposes: each is picked from a row of the
    model's own logits, and a draft only saves the step that its row would have taken.
    """
    backend.truncate(0)
    for start in range(0, len(prompt), backend.batch_size):
        row = backend.prefill(prompt[start : start + backend.batch_size])
    emitted = [sampler.pick(row)]
    drafter.begin([*prompt, *emitted])
    while True:
        for root in emitted:
            yield root
            max_tokens -= 1
            if not max_tokens or backend.tokenizer.is_end(root):
                return
        # Propose: a tree of tokens below the last one, which is its root and not in the cache yet.
        room = min(max_tokens, backend.max_nodes, backend.context_size - backend.length) - 1
        free = CostCurve([float("inf"), *[1.0] * (room + 1)])  # drafts cost nothing here
        context = StepContext(room, 0.0, free, backend.length)
        proposal = drafter.propose(context) if room > 0 else EMPTY
        if not backend.capabilities.tree:
            proposal = likeliest_chain(proposal)
        tree = build_tree(root, proposal, min(len(proposal), room))
        # Verify: one step of the model, a row of logits behind each node.
        logits = backend.verify(tree)
        # Accept: walk down while a child is what the sampler picks; the last pick has no node.
        path, emitted = accept(tree, logits, sampler.pick)
        # Commit: the path stays in the cache, the other nodes are taken back. The drafter learns.
        backend.commit(path)
        rows = [top_tokens_of(one) for one in logits]
        drafter.observe(VerifyResult(tree, path, emitted, context, rows.__getitem__))
