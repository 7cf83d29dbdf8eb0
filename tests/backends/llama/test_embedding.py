"""A context that makes rows of texts; the rows are compared in tests/setup/test_embedding.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from bert_gguf import write_random_bert

from edgespec.backends.llama.embedding import EmbeddingContext
from edgespec.errors import BackendError
from edgespec.memory.bytes.config import RunConfig

_MEAN = (("embeddings", 1), ("pooling_type", 1), ("n_batch", 64), ("n_ubatch", 64))


def test_a_step_leaves_nothing_behind(tmp_path: Path) -> None:
    """The same text gives the same row, whatever was computed before and beside it."""
    path = write_random_bert(tmp_path / "bert.gguf")
    settings = RunConfig(context_size=64, batch_size=64, max_nodes=64, max_leaves=1)
    parameters = (*_MEAN, ("n_seq_max", 4), ("n_outputs_max", 0))
    context = EmbeddingContext(str(path), settings, parameters, ranks=False)
    rows = np.zeros((4, context.size), np.float32)
    places = [row.ctypes.data for row in rows]
    context.read([[2, 4, 5, 3], [2, 9, 3], [2, 7, 7, 7, 3]], places[:3])
    first = rows.copy()
    context.read([[2, 9, 3], [2, 4, 5, 3]], places[2:])
    assert np.allclose(rows[2], first[1], atol=1e-5) and np.allclose(rows[3], first[0], atol=1e-5)
    assert np.array_equal(rows[:2], first[:2])
    context.close()
    context.close()


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bert.gguf"
    path.write_bytes(b"GGUF nothing")
    settings = RunConfig(context_size=64, batch_size=64, max_nodes=64, max_leaves=1)
    with pytest.raises(BackendError, match=r"cannot load bert\.gguf"):
        EmbeddingContext(str(path), settings, _MEAN, ranks=False)
