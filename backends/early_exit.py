"""An early-exit drafter in llama.cpp, seen with the ids of its target.

The model's own vocabulary is only its head. It is fed embeddings of the target's whole table, and
its rows of logits are spread over the target's tokens: those without a row get -inf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import Logits
from edgespec.backends.llamacpp import LlamaBackend, LlamaSettings
from edgespec.models.early_exit import KEPT_ROWS, ExitInfo
from edgespec.models.gguf import read_gguf_shards
from edgespec.models.onnx_weights import dequantize, raw_rows
from edgespec.models.spec import ModelSpec

_TABLE = "token_embd.weight"


class EmbeddingTable:
    """Embeddings of a model's tokens, read from its file as they are needed.

    Raises MissingDependencyError without the gguf package.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._tensor, path = next(
            (tensor, shard.path)
            for shard in read_gguf_shards(spec.path)
            for tensor in shard.tensors
            if tensor.name == _TABLE
        )
        self._raw = raw_rows(path, self._tensor)
        self._kept: dict[int, NDArray[np.float32]] = {}

    def __call__(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """[n, width] for n tokens."""
        missing = sorted({token for token in tokens if token not in self._kept})
        if missing:
            if len(self._kept) + len(missing) > KEPT_ROWS:
                self._kept.clear()
                missing = sorted(set(tokens))
            rows = dequantize(self._tensor, self._raw[missing])
            self._kept |= {token: row.copy() for token, row in zip(missing, rows, strict=True)}
        return np.stack([self._kept[token] for token in tokens])


class ExitBackend(LlamaBackend):
    """The drafter of `info` for `target`; raises as LlamaBackend and EmbeddingTable."""

    def __init__(
        self,
        path: str,
        settings: LlamaSettings,
        target: ModelSpec,
        info: ExitInfo,
        *,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        super().__init__(path, settings, progress=progress, embed=EmbeddingTable(target))
        self._ids = np.array(info.token_ids)
        self._wide = np.full((settings.max_nodes, target.vocab_size), -np.inf, np.float32)

    def _rows(self, count: int) -> Logits:
        self._wide[:count, self._ids] = super()._rows(count)
        return self._wide[:count]
