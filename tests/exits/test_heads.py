"""Training a head: its network is llama.cpp's, the loss falls, its file loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from eagle_driver import EagleDriver
from exit_texts import written_texts
from random_gguf import F32, Q4_0, VOCABULARY, WIDTH, write_model, write_untrained
from typer.testing import CliRunner

from edgespec.cli.main import app
from edgespec.errors import EdgespecError, UnsupportedError
from edgespec.models.exits.eagle import check_target, layers_read
from edgespec.models.exits.eagle_file import HeadInfo, read_head, write_head
from edgespec.models.exits.eagle_start import ROWS_NORM
from edgespec.models.spec import ModelSpec, read_model_spec

if TYPE_CHECKING:
    from edgespec.models.exits.eagle_training import EagleTrainer
    from edgespec.models.exits.training_texts import TrainingText

IDS = np.arange(0, VOCABULARY, 2, dtype=np.int32)
TOKENS = list(range(40, 64))
DRAFTED = 4  # of a chain


def test_layers_are_low_middle_and_high() -> None:
    assert layers_read(30) == (2, 15, 27)
    assert layers_read(32) == (2, 16, 29)
    assert all(0 <= layer < count for count in range(2, 9) for layer in layers_read(count))


def test_models_whose_states_llama_cpp_keeps_to_itself_are_refused(tmp_path: Path) -> None:
    spec = read_model_spec(write_model(tmp_path / "model.gguf", "qwen2", Q4_0))
    with pytest.raises(UnsupportedError, match="qwen2 models do not hand out") as caught:
        check_target(spec)
    assert "--kind exit" in caught.value.hint


def test_a_chain_is_attended_to_in_its_order() -> None:
    """What drafting place by place gives, at every place at once: three drafts of 6 places."""
    torch = pytest.importorskip("torch", reason="training needs torch")
    from edgespec.models.exits.eagle import Unrolled, head_shape
    from edgespec.models.exits.network import Hyperparameters, rms_norm

    shape = head_shape(Hyperparameters(16, 2, 1, 8, 1e-6, 10_000.0, True))
    torch.manual_seed(3)
    parameters = random_parameters(torch, shape)
    embeddings, rows = torch.randn(1, 6, 16), torch.randn(1, 6, 48)
    found = list(Unrolled(shape, parameters, embeddings, rows).states(3))
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

    from edgespec.models.exits import network

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


# ---------------------------------------------------------------------- with a tiny model


@pytest.fixture
def target(tmp_path: Path) -> ModelSpec:
    pytest.importorskip("torch", reason="training needs torch")
    return read_model_spec(write_model(tmp_path / "target.gguf", "llama", F32))


def texts_of(target: ModelSpec, count: int = 60) -> list[TrainingText]:
    return written_texts(target, count, layers=layers_read(target.num_layers))


def trainer_of(target: ModelSpec, folder: Path) -> EagleTrainer:
    from edgespec.models.exits.eagle_training import EagleTrainer
    from edgespec.models.exits.target_states import StoredStates
    from edgespec.models.exits.training_texts import (
        load_training_texts,
        save_training_texts,
        text_files,
    )

    if not text_files(folder):
        save_training_texts(folder / "texts-00000.npz", texts_of(target), 1.0)
    states = StoredStates(target, folder, layers_read(target.num_layers))
    return EagleTrainer(target, IDS, load_training_texts(folder), states)


def with_any_values(trainer: EagleTrainer) -> None:
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


def write(trainer: EagleTrainer, target: ModelSpec, path: Path) -> HeadInfo:
    write_head(
        target,
        path,
        shape=trainer.shape,
        layers=layers_read(target.num_layers),
        token_ids=IDS,
        head=trainer.head(),
        block=trainer.block(),
        norm=trainer.norm(),
        report={},
    )
    info = read_head(path)
    assert info is not None
    return info


def test_states_are_kept_while_texts_are_written(target: ModelSpec, tmp_path: Path) -> None:
    from edgespec.models.exits.target_states import StoredStates
    from edgespec.models.exits.training_texts import save_training_texts

    texts = texts_of(target, 8)
    save_training_texts(tmp_path / "texts-00000.npz", texts, 1.0)
    layers = layers_read(target.num_layers)
    kept = [rows.float() for rows in StoredStates(target, tmp_path, layers)]
    for path in tmp_path.glob("*.npy"):
        path.unlink()
    computed = [rows.float() for rows in StoredStates(target, tmp_path, layers)]
    assert len(list(tmp_path.glob("*.npy"))) == len(set(layers))
    for first, second in zip(kept, computed, strict=True):
        assert (first - second).abs().max() < 0.05 * second.abs().max()


def test_the_torch_head_is_llama_cpps(target: ModelSpec, tmp_path: Path) -> None:
    """The logits of all places, and of a chain of its own behind the last one."""
    import torch

    from edgespec.models.exits.eagle import Unrolled
    from edgespec.models.exits.network import Weights, rms_norm

    trainer = trainer_of(target, tmp_path)
    with_any_values(trainer)
    info = write(trainer, target, tmp_path / "head.gguf")
    trainer.go_on_from_file(info)  # as the file's types round it
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
    unrolled = Unrolled(trainer.shape, values, embeddings, torch.from_numpy(states)[None, :-1])
    with torch.inference_mode():
        drafted = list(unrolled.states(DRAFTED + 1))
        chain = [drafted[depth][0, known - 2 + depth] for depth in range(DRAFTED + 1)]
        every = torch.stack([*drafted[0][0, : known - 2], *chain])
        normed = rms_norm(every, values["output_norm.weight"], trainer.shape.epsilon)
        expected = normed @ torch.from_numpy(trainer.head()).T
    assert np.isneginf(np.delete(found, IDS, axis=1)).all()
    difference = np.abs(found[:, IDS] - expected.numpy()).max()
    assert difference < 0.03 * np.abs(expected.numpy()).max()


def test_training_lowers_the_loss_and_goes_on(target: ModelSpec, tmp_path: Path) -> None:
    trainer = trainer_of(target, tmp_path)
    trainer.fit_lens()
    before = trainer.quality()
    checkpoint = tmp_path / "head.pt"
    after = trainer.train(2.0, checkpoint=checkpoint)
    assert after.loss < before.loss
    again = trainer_of(target, tmp_path)
    assert again.train(0.0, checkpoint=checkpoint).loss == pytest.approx(after.loss)
    assert len(after.gains) == 8 and all(0.0 <= part <= 1.0 for part in after.gains)
    info = write(trainer, target, tmp_path / "first.gguf")
    further = trainer_of(target, tmp_path)
    untrained = further.quality().loss
    further.go_on_from_file(info)
    rounded = further.quality().loss
    assert rounded == pytest.approx(after.loss, abs=0.1 * (untrained - after.loss))


def test_bfloat16_learns_as_float32_does(
    target: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty steps of the same texts from the same start: losses fall alike."""
    import torch

    from edgespec.models.exits import trainer as module

    falls = []
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(module, "fast_dtype", lambda dtype=dtype: dtype)
        trainer = trainer_of(target, tmp_path)
        trainer.fit_lens()
        before, random = trainer.quality().loss, np.random.default_rng(1)
        optimizer = torch.optim.AdamW(list(trainer.parameters.values()))
        for _ in range(20):
            trainer._step(optimizer, 1e-3, random, DRAFTED)
        falls.append(before - trainer.quality().loss)
        assert all(value.dtype == torch.float32 for value in trainer.parameters.values())
    assert min(falls) > 0.0
    assert falls[1] == pytest.approx(falls[0], rel=0.4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kind", "eagle3", "--exit-layer", "2"], "--exit-layer 2 is for early exits"),
        (["--kind", "eagle3", "--from", "EXIT"], "exit.gguf is not a trained head"),
        (["--kind", "eagle3", "--head-size", "9999"], "--head-size 9999 is not possible"),
    ],
)
def test_what_cannot_be_a_head_is_said(tmp_path: Path, options: list[str], words: str) -> None:
    target = read_model_spec(write_model(tmp_path / "target.gguf", "llama", Q4_0))
    files = {"EXIT": str(write_untrained(target, tmp_path / "exit.gguf", 2).path)}
    arguments = ["draft", "train", str(target.path), "-o", str(tmp_path / "new.gguf")]
    result = CliRunner().invoke(app, [*arguments, *(files.get(part, part) for part in options)])
    assert isinstance(result.exception, EdgespecError), result.exception
    assert words in str(result.exception) and result.exception.hint


def test_a_kind_that_there_is_not_is_wrong_usage() -> None:
    result = CliRunner().invoke(app, ["draft", "train", "--kind", "medusa"])
    assert result.exit_code == 2 and "exit, eagle3" in result.output


def test_a_head_of_another_model_is_not_gone_on_with(target: ModelSpec, tmp_path: Path) -> None:
    head = write(trainer_of(target, tmp_path), target, tmp_path / "head.gguf")
    other = write_model(tmp_path / "other.gguf", "llama", F32, seed=6)
    arguments = ["draft", "train", str(other), "-o", str(tmp_path / "new.gguf"), "--kind", "eagle3"]
    result = CliRunner().invoke(app, [*arguments, "--from", str(head.file.path)])
    assert isinstance(result.exception, UnsupportedError)
    assert "is a head of target.gguf, not of other.gguf" in str(result.exception)


def test_the_command_makes_a_head_and_goes_on(
    target: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.models.exits.text_writer.LENGTH", 48)
    monkeypatch.setattr("edgespec.exits.texts._PLACES", 32)
    path = tmp_path / "head.gguf"
    arguments = ["draft", "train", str(target.path), "-o", str(path), "--kind", "eagle3"]
    info: HeadInfo | None = None
    for minutes in ("0.05", "0.06"):
        result = CliRunner().invoke(
            app, [*arguments, "--minutes", minutes, "--head-size", "128", "--json"]
        )
        assert result.exit_code == 0, result.exception
        report = json.loads(result.stdout.splitlines()[-1])
        info = read_head(path)
        assert info is not None and info.report["agreement"] == report["agreement"]
        assert len(info.token_ids) == report["head_size"] >= 128
    assert info is not None and info.layers == layers_read(target.num_layers)
    with EagleDriver(target.path, path, info.layers, WIDTH) as driver:
        rows = driver.fused(driver.states([1, 2, 3]))
        logits, _ = driver.drafted([2, 3, 4], rows, 0)
    assert np.isfinite(logits[:, info.token_ids]).all()
    shown = CliRunner().invoke(app, ["draft", "info", str(path)]).stdout
    assert "target.gguf" in shown and "inputs of the layers 2, 2, 1" in shown
    assert "tokens/round" in shown
