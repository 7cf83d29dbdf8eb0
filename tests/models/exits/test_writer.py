"""Files of early exits: which tokens they have, and what they copy."""

from __future__ import annotations

from typing import Any

import numpy as np
from random_gguf import VOCABULARY

from edgespec.models.exits.writer import choose_tokens
from edgespec.models.onnx.weights import raw_rows
from edgespec.models.spec import ModelSpec


def test_blocks_are_the_targets_bytes(llama_or_qwen2: ModelSpec, drafter: ModelSpec) -> None:
    def bytes_of(spec: ModelSpec, name: str) -> Any:
        return raw_rows(spec.path, spec.tensors[name])

    copied = [name for name in drafter.tensors if name.startswith(("blk.0.", "blk.1."))]
    assert len(copied) >= 18
    for name in copied:
        assert drafter.tensors[name].type == llama_or_qwen2.tensors[name].type
        assert np.array_equal(bytes_of(drafter, name), bytes_of(llama_or_qwen2, name)), name


def test_control_tokens_and_the_most_frequent_are_chosen(llama_or_qwen2: ModelSpec) -> None:
    counts = np.zeros(VOCABULARY, np.int64)
    counts[[200, 100, 150]] = 5, 9, 7
    assert choose_tokens(llama_or_qwen2, counts, 3).tolist() == [100, 150, VOCABULARY - 1]
    assert choose_tokens(llama_or_qwen2, counts, 5).tolist() == [0, 100, 150, 200, VOCABULARY - 1]
