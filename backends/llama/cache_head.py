"""A head that looks into its model's cache and keeps none: the assistant of Gemma 4.

It reads the row of the model's last token with the token behind it, at that one's position, and
goes on there with rows of its own, as llama.cpp's server drives it (`llama.cpp:
src/models/gemma4-assistant.cpp`, `common/speculative.cpp`). So all there is to follow is that row.

    model   reads   a b c d         its last row      rd
    head                            drafts from (e, rd), e being the next token; stays in its place
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.backends.base import Logits
from edgespec.backends.llama.head import MtpHead
from edgespec.backends.tree import DraftTree


class CacheHead(MtpHead):
    """In the file of a spec, for the model of another context, whose cache is empty.

    llama.cpp empties that when it lets this one look into it. Raises as `LlamaContext.open`.
    """

    batch_tokens = 1
    reads_prompts = False  # there is nothing of them to be read

    def follow(self, tokens: Sequence[int], *, reads: bool) -> None:
        """The model has read `tokens`, the first ones of its last step, into the cache of both."""
        self._models.copy(len(tokens) - 1, self._last)
        self.length += len(tokens)

    @property
    def _position(self) -> int:
        return self.length

    def prefill(self, tokens: Sequence[int]) -> Logits:
        """A step: it reads no prompts, and what is in the cache is the model's business."""
        logits: Logits = self.verify(DraftTree.chain(tokens[:1]))[0]
        return logits

    def verify(self, tree: DraftTree) -> Logits:
        """A step for each node, all at one position: for the clock alone."""
        row = np.zeros_like(self._last)
        steps = [self._step([token], row, self._position, wanted=True) for token in tree.tokens]
        logits: Logits = steps[-1][None]
        return logits
