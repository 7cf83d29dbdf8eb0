"""An early-exit drafter in llama.cpp: fed embeddings of the target's whole table.

Its rows of logits are as wide as its own head, whose tokens `ExitInfo.token_ids` names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.ggml_values import FloatRows
from edgespec.errors import BackendError, ModelFileError
from edgespec.memory.bytes.config import RunConfig
from edgespec.models.gguf.access import read_part
from edgespec.models.gguf.shards import read_gguf_shards
from edgespec.models.spec import ModelSpec

_TABLE = "token_embd.weight"


class EmbeddingTable:
    """Embeddings of a model's tokens, read from its file as they are needed.

    Rows are read rather than mapped, so that pages of the table do not add up in memory.

    Raises UnsupportedError for a type of table that llama.cpp cannot convert, and a call raises
    BackendError where the file has become shorter since, or the disk fails.
    """

    def __init__(self, spec: ModelSpec) -> None:
        tensor, path = next(
            (tensor, shard.path)
            for shard in read_gguf_shards(spec.path)
            for tensor in shard.tensors
            if tensor.name == _TABLE
        )
        self._to_float = FloatRows(tensor.type, tensor.dims[0])
        self._offset = tensor.offset
        self._file = path.open("rb", buffering=0)

    def __call__(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """[n, width] for n tokens."""
        size = self._to_float.row_bytes
        try:
            rows = [read_part(self._file, self._offset + token * size, size) for token in tokens]
        except ModelFileError as problem:
            raise BackendError(f"an embedding is missing: {problem}", hint=problem.hint) from None
        return self._to_float(np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), size))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class ExitBackend(LlamaBackend):
    """The drafter in a file, for `target`; raises as LlamaBackend and EmbeddingTable."""

    _table: EmbeddingTable | None = None

    def __init__(
        self,
        path: str,
        settings: RunConfig,
        target: ModelSpec,
        *,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self._table = EmbeddingTable(target)
        super().__init__(path, settings, progress=progress, embed=self._table)

    def close(self) -> None:
        super().close()
        if self._table is not None:
            self._table.close()
