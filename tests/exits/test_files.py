"""Files of early exits: which tokens they have, what they copy, what they say of themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from random_gguf import IDS, VOCABULARY

from edgespec.errors import EdgespecError
from edgespec.exits.files import choose_tokens
from edgespec.models.early_exit import read_exit
from edgespec.models.onnx.weights import raw_rows
from edgespec.models.spec import ModelSpec, read_model_spec


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


def test_a_file_says_what_it_was_made_from(llama_or_qwen2: ModelSpec, drafter: ModelSpec) -> None:
    info = read_exit(drafter)
    assert info is not None
    assert (info.exit_layer, info.target_name) == (2, "target.gguf")
    assert list(info.token_ids) == IDS.tolist()
    assert info.report == {"agreement": 0.5}
    assert (drafter.num_layers, drafter.vocab_size) == (3, len(IDS))
    assert read_exit(llama_or_qwen2) is None


def test_a_file_without_its_token_ids_is_an_error(drafter: ModelSpec) -> None:
    data = drafter.path.read_bytes()
    broken = data.replace(b"early_exit.token_ids", b"early_exit.token_idz")
    drafter.path.write_bytes(broken)
    with pytest.raises(EdgespecError, match="does not say which tokens"):
        read_exit(read_model_spec(drafter.path))
