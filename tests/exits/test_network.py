"""The network in torch against llama.cpp's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from random_gguf import F32, Q4_0, write_model

from edgespec.backends.base import DraftTree
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.errors import UnsupportedError
from edgespec.exits.target import check_target, hyperparameters_of
from edgespec.memory.bytes.config import RunConfig
from edgespec.models.spec import read_model_spec


def test_architectures_the_trainer_does_not_know_are_refused(tmp_path: Path) -> None:
    spec = read_model_spec(write_model(tmp_path / "model.gguf", "gemma3", Q4_0))
    with pytest.raises(UnsupportedError, match=r"its architecture \(gemma3\)"):
        check_target(spec, of_head=False)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_the_torch_network_is_llama_cpps(arch: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="training needs torch")
    from edgespec.exits import network

    spec = read_model_spec(write_model(tmp_path / "model.gguf", arch, F32))
    tokens = list(range(40, 60))
    backend = LlamaBackend(
        spec.path, RunConfig(context_size=512, batch_size=64, max_nodes=32, max_leaves=1)
    )
    expected = backend.verify(DraftTree.chain(tokens)).copy()
    backend.close()
    shape, weights = hyperparameters_of(spec), network.Weights(spec, torch.float32)
    x = weights.embedding()[torch.tensor(tokens)][None]
    angles = network.rotations(shape, torch.arange(len(tokens))[None])
    for number in range(spec.num_layers):
        x = network.run_block(shape, weights.block(number), x, angles, network.causal_attention)
    x = network.rms_norm(x, weights.tensor("output_norm.weight"), shape.epsilon)
    found = torch.nn.functional.linear(x, weights.head())[0].numpy()
    assert np.abs(found - expected).max() < 0.007 * np.abs(expected).max()
