"""A head's network: against llama.cpp's own, and against drafting place by place."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from eagle_cases import DRAFTED, IDS, trainer_of, write
from eagle_driver import EagleDriver
from random_gguf import Q4_0, WIDTH, write_model

from edgespec.errors import UnsupportedError
from edgespec.exits.files import ROWS_NORM
from edgespec.exits.target import Hyperparameters, check_target, layers_read
from edgespec.models.spec import ModelSpec, read_model_spec

if TYPE_CHECKING:
    from edgespec.exits.trainer import HeadTrainer


TOKENS = list(range(40, 64))


def test_layers_are_low_middle_and_high() -> None:
    assert layers_read(30) == (2, 15, 27)
    assert layers_read(32) == (2, 16, 29)
    assert all(0 <= layer < count for count in range(2, 9) for layer in layers_read(count))


def test_models_whose_states_llama_cpp_keeps_to_itself_are_refused(tmp_path: Path) -> None:
    spec = read_model_spec(write_model(tmp_path / "model.gguf", "gemma3", Q4_0))
    with pytest.raises(UnsupportedError, match="gemma3 models do not hand out") as caught:
        check_target(spec, of_head=True)
    assert "--kind exit" in caught.value.hint


def test_a_chain_is_attended_to_in_its_order() -> None:
    """What drafting place by place gives, at every place at once: three drafts of 6 places."""
    torch = pytest.importorskip("torch", reason="training needs torch")
    from edgespec.exits.eagle import head_shape, unrolled
    from edgespec.exits.network import rms_norm

    shape = head_shape(Hyperparameters(16, 2, 1, 8, 1e-6, 10_000.0, True))
    torch.manual_seed(3)
    parameters = random_parameters(torch, shape)
    embeddings, rows = torch.randn(1, 6, 16), torch.randn(1, 6, 48)
    found = list(unrolled(shape, parameters, embeddings, rows, 3))
    for last in range(2, 6):
        known = last - 2  # the last place where the target has been
        normed = rms_norm(rows, parameters[ROWS_NORM], shape.epsilon)
        fused = torch.nn.functional.linear(normed, parameters["fc.weight"])[:, : known + 1]
        expected = slowly(shape, parameters, embeddings, fused, count=2)
        for depth, state in enumerate(expected):
            assert torch.allclose(found[depth][0, known + depth], state, atol=1e-5)


def slowly(shape: Any, parameters: Any, embeddings: Any, rows: Any, count: int) -> list[Any]:
    """States of the drafts behind `rows`: the text so far is computed anew for each of them."""
    import torch

    from edgespec.exits import network

    states: list[Any] = []
    for _ in range(count + 1):
        known = embeddings[:, : rows.shape[1]]
        angles = network.rotations(shape, torch.arange(rows.shape[1])[None])
        token = network.rms_norm(known, parameters["attn_norm.weight"], shape.epsilon)
        row = network.rms_norm(rows, parameters["attn_norm_2.weight"], shape.epsilon)
        both = torch.cat([token, row], -1)
        mixed = network.attend(shape, parameters, both, angles, network.causal_attention)
        state = network.feed_forward(shape, parameters, rows + mixed)[:, -1:]
        states.append(state[0, 0])
        rows = torch.cat([rows, state], 1)
    return states


def random_parameters(torch: Any, shape: Any) -> dict[str, Any]:
    width, joined = shape.width, 2 * shape.width
    mixed = shape.num_heads * shape.head_length
    sizes = {
        **{f"attn_{name}.weight": (mixed, joined) for name in "qkv"},
        "attn_output.weight": (width, mixed),
        "ffn_gate.weight": (24, width),
        "ffn_up.weight": (24, width),
        "ffn_down.weight": (width, 24),
        "fc.weight": (width, 3 * width),
    }
    parameters = {name: torch.randn(size) / size[1] ** 0.5 for name, size in sizes.items()}
    parameters[ROWS_NORM] = torch.rand(3 * width) + 0.5
    for name in ("attn_norm", "attn_norm_2", "ffn_norm"):
        parameters[f"{name}.weight"] = torch.rand(width) + 0.5
    return parameters


def with_any_values(trainer: HeadTrainer) -> None:
    """Random tensors of usual sizes: what it begins with is fitted, and makes more of rounding."""
    import torch

    torch.manual_seed(3)
    with torch.no_grad():
        for value in trainer.parameters.values():
            is_matrix = value.dim() == 2
            value.copy_(
                torch.randn_like(value) / value.shape[1] ** 0.5
                if is_matrix
                else torch.rand_like(value) + 0.5
            )


def test_the_torch_head_is_llama_cpps(target: ModelSpec, tmp_path: Path) -> None:
    """The logits of all places, and of a chain of its own behind the last one."""
    import torch

    from edgespec.exits.eagle import unrolled
    from edgespec.exits.network import Weights, rms_norm

    trainer = trainer_of(target, tmp_path)
    with_any_values(trainer)
    info = write(trainer, tmp_path / "head.gguf")
    trainer.go_on_from_file(info.file.path)  # as the file's types round it
    known = len(TOKENS) - DRAFTED
    with EagleDriver(target.path, info.file.path, info.layers, WIDTH) as driver:
        states = driver.states(TOKENS)
        rows = driver.fused(states)[: known - 1]
        found, last = driver.drafted(TOKENS[1:known], rows, 0)
        for place in range(known, len(TOKENS)):
            logits, last = driver.drafted([TOKENS[place]], last[-1:], place - 1)
            found = np.concatenate([found, logits])
    embedding = Weights(target, torch.float32).embedding()
    embeddings = embedding[torch.tensor(TOKENS[1:])][None]
    values = dict(trainer.parameters)
    rows = torch.from_numpy(states)[None, :-1]
    with torch.inference_mode():
        drafted = list(unrolled(trainer.shape, values, embeddings, rows, DRAFTED + 1))
        chain = [drafted[depth][0, known - 2 + depth] for depth in range(DRAFTED + 1)]
        every = torch.stack([*drafted[0][0, : known - 2], *chain])
        normed = rms_norm(every, values["output_norm.weight"], trainer.shape.epsilon)
        expected = normed @ torch.from_numpy(trainer.head()).T
    assert np.isneginf(np.delete(found, IDS, axis=1)).all()
    difference = np.abs(found[:, IDS] - expected.numpy()).max()
    assert difference < 0.03 * np.abs(expected.numpy()).max()
