"""What the file of an early exit says of itself."""

from __future__ import annotations

import pytest
from random_gguf import IDS

from edgespec.errors import EdgespecError
from edgespec.models.exits.early_exit import read_exit
from edgespec.models.spec import ModelSpec, read_model_spec


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
