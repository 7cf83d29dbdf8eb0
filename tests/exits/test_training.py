"""Training an early exit: the arithmetic of its choice, and with torch a tiny model's whole way."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from exit_texts import written_texts
from random_gguf import F32, Q4_0, VOCABULARY, write_model, write_untrained
from typer.testing import CliRunner

from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.context import LlamaSettings
from edgespec.backends.tree import DraftTree
from edgespec.cli.main import app
from edgespec.errors import DoesNotFitError, EdgespecError, UnsupportedError
from edgespec.exits.chat import read_prompts
from edgespec.exits.texts import places_of
from edgespec.models.exits.early_exit import read_exit
from edgespec.models.exits.network import check_architecture
from edgespec.models.exits.writer import write_exit
from edgespec.models.spec import ModelSpec, read_model_spec

if TYPE_CHECKING:
    from edgespec.models.exits.openings import Chat
    from edgespec.models.exits.training_texts import TrainingText

SETTINGS = LlamaSettings(context_size=512, batch_size=64, max_nodes=32, max_leaves=1)


def test_architectures_the_trainer_does_not_know_are_refused(tmp_path: Path) -> None:
    spec = read_model_spec(write_model(tmp_path / "model.gguf", "gemma3", Q4_0))
    with pytest.raises(UnsupportedError, match=r"its architecture \(gemma3\)"):
        check_architecture(spec)


def test_info_of_another_model_is_a_sentence(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", "llama", Q4_0)
    result = CliRunner().invoke(app, ["draft", "info", str(path)])
    assert isinstance(result.exception, UnsupportedError)
    assert "no drafter that edgespec made" in str(result.exception)


def test_prompts_are_lines_or_json(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('<1>\n\n{"prompt": "<2>"}\n{"turns": ["<3>", "<4>"]}\n{broken\n')

    class Lines:
        def encode(self, text: str, *, add_special: bool = True) -> list[int]:
            return [len(text), int(add_special)]

    assert [p[0] for p in read_prompts(path, Lines())] == [3, 3, 3, 3, 7]  # type: ignore[arg-type]


def test_gains_are_those_of_rounds_that_follow_one_another() -> None:
    """Two right, two wrong and one right: rounds begin at places 0, 2, 3, 4 with one draft."""
    from edgespec.models.exits.trainer import gains_of

    hits = [np.array([True, True, False, False, True])]
    lengths = np.cumsum([1.0, *gains_of(hits)])
    assert lengths[:3].tolist() == pytest.approx([1.0, 5 / 4, 5 / 3])
    assert lengths[3:].tolist() == pytest.approx([5 / 3] * 6)


def test_gains_of_drafts_that_follow_their_own_are_by_their_place_in_a_round() -> None:
    """The first of a round is always right and the second never: each round of two is two long."""
    from edgespec.models.exits.trainer import agreement_of, gains_of

    hits = [np.array([[True] * 6, [False] * 6])]
    assert agreement_of(hits) == 1.0
    assert gains_of(hits) == pytest.approx([1.0, *[0.0] * 7])


def test_a_killed_run_leaves_nothing_that_is_read(tmp_path: Path) -> None:
    from edgespec.models.exits.training_texts import load_training_texts, written

    (tmp_path / ".texts-00000.partial.npz").write_bytes(b"half")
    assert (load_training_texts(tmp_path), written(tmp_path)) == ([], (0, 0.0))


def test_a_model_that_does_not_fit_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = read_model_spec(write_model(tmp_path / "model.gguf", "llama", Q4_0))
    assert places_of(spec) == 128
    monkeypatch.setattr("edgespec.memory.device.host.available_bytes", lambda: 1 << 20)
    with pytest.raises(DoesNotFitError, match=r"the caches of 4 conversations"):
        places_of(spec)


# ---------------------------------------------------------------------- with torch


@pytest.fixture
def target(tmp_path: Path) -> ModelSpec:
    pytest.importorskip("torch", reason="training needs torch")
    return read_model_spec(write_model(tmp_path / "target.gguf", "llama", Q4_0))


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_the_torch_network_is_llama_cpps(arch: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="training needs torch")
    from edgespec.models.exits import network

    spec = read_model_spec(write_model(tmp_path / "model.gguf", arch, F32))
    tokens = list(range(40, 60))
    backend = LlamaBackend(spec.path, SETTINGS)
    expected = backend.verify(DraftTree.chain(tokens)).copy()
    backend.close()
    shape, weights = network.hyperparameters_of(spec), network.Weights(spec, torch.float32)
    x = weights.embedding()[torch.tensor(tokens)][None]
    angles = network.rotations(shape, torch.arange(len(tokens))[None])
    for number in range(spec.num_layers):
        x = network.run_block(shape, weights.block(number), x, angles, network.causal_attention)
    x = network.rms_norm(x, weights.tensor("output_norm.weight"), shape.epsilon)
    found = torch.nn.functional.linear(x, weights.head())[0].numpy()
    assert np.abs(found - expected).max() < 0.01 * np.abs(expected).max()


def test_written_text_carries_the_targets_logits(target: ModelSpec) -> None:
    from edgespec.models.exits.openings import Chat

    chat = Chat([1, 2], [3, 4], frozenset([VOCABULARY - 1]), [[5], [6, 7]], words=[8])
    check_written(target, chat, 4)


def test_passages_of_earlier_answers_are_read(
    target: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"LENGTH": 40, "LONG_LENGTH": 90, "_USER_LENGTH": 6, "_ANSWER_ROOM": 30}
    parts = {"LONG_PART": 0.4, "_PASSAGE_LENGTH": 10, "_LEAST_DISTINCT": 0.0}
    for name, value in {**sizes, **parts}.items():
        monkeypatch.setattr(f"edgespec.models.exits.text_writer.{name}", value)
    from edgespec.models.exits.openings import Chat

    chat = Chat([1, 2], [3, 4], frozenset(), [], tasks=[([5, 6], [7]), ([8], [])])
    texts = check_written(target, chat, 24)
    asked = [text for text in texts if text.tokens[2] in (5, 8)]
    assert asked and max(len(text.tokens) for text in texts) > 60
    written = {tuple(pair) for text in texts for pair in pairwise(text.tokens[6:].tolist())}
    passages = [list(pairwise(text.tokens[5:12].tolist())) for text in asked]
    assert any(pair in written for pairs in passages for pair in pairs)


def check_written(target: ModelSpec, chat: Chat, count: int) -> list[TrainingText]:
    """Some texts, each of which has the logits that llama.cpp has."""
    from edgespec.models.exits.training_texts import ANSWER, FORCED, USER

    texts = written_texts(target, count, chat=chat, places=5, first=[[9, 9, 9]])
    backend = LlamaBackend(target.path, SETTINGS)
    for text in texts:
        backend.truncate(0)
        rows = []
        for start in range(0, len(text.tokens), 32):
            part = text.tokens[start : start + 32].tolist()
            rows.append(backend.verify(DraftTree.chain(part)).copy())
            backend.commit(range(len(part)))
        expected = np.concatenate(rows)
        theirs = np.take_along_axis(expected, text.teacher_ids, axis=1)
        assert np.abs(theirs - text.teacher_logits).max() < 0.05 * np.abs(expected).max()
        assert text.tokens[:2].tolist() == [1, 2]
        assert set(text.kinds.tolist()) <= {FORCED, USER, ANSWER}
    backend.close()
    return texts


def test_training_lowers_the_loss_and_goes_on(target: ModelSpec, tmp_path: Path) -> None:
    import torch

    from edgespec.models.exits.target_states import target_states
    from edgespec.models.exits.training import ExitTrainer
    from edgespec.models.exits.training_texts import load_training_texts, save_training_texts

    written = written_texts(target)
    save_training_texts(tmp_path / "texts-00000.npz", written, 1.0)
    texts = load_training_texts(tmp_path)
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(texts, written, strict=True))
    states = target_states(target, [text.tokens for text in texts], [1, 2])[1]
    ids = np.arange(0, VOCABULARY, 2, dtype=np.int32)
    trainer = ExitTrainer(target, 1, ids, texts, states)
    trainer.fit_lens()
    before = trainer.quality()
    checkpoint = tmp_path / "exit.pt"
    after = trainer.train(1.0, checkpoint=checkpoint)
    assert after.loss < before.loss
    again = ExitTrainer(target, 1, ids, texts, states)
    assert again.train(0.0, checkpoint=checkpoint).loss == after.loss
    state = torch.load(checkpoint)
    for name, value in state["values"].items():
        state["values"][name] = value + 1.0  # as if the last steps had gone wrong
    torch.save(state, checkpoint)
    assert again.train(0.0, checkpoint=checkpoint).loss == after.loss
    assert len(after.gains) == 8 and all(0.0 <= part <= 1.0 for part in after.gains)


def test_a_drafter_is_trained_further(target: ModelSpec, tmp_path: Path) -> None:
    """What is read back from its file is what was written, but for the rounding of its types."""
    from edgespec.models.exits.target_states import target_states
    from edgespec.models.exits.training import ExitTrainer

    texts = written_texts(target)
    states = target_states(target, [text.tokens for text in texts], [1])[1]
    ids = np.arange(0, VOCABULARY, 2, dtype=np.int32)
    trainer = ExitTrainer(target, 1, ids, texts, states)
    first = trainer.train(1.0)
    path = tmp_path / "first.gguf"
    write_exit(
        target,
        path,
        exit_layer=1,
        token_ids=ids,
        head=trainer.head(),
        adapter=trainer.block(),
        norm=trainer.norm(),
        report={},
    )
    drafter = read_model_spec(path)
    info = read_exit(drafter)
    assert info is not None
    more = np.arange(0, VOCABULARY, dtype=np.int32)  # another head
    again = ExitTrainer(target, 1, more, texts, states)
    untrained = again.quality(ids).loss
    again.go_on_from_file(drafter, info)
    assert again.quality(ids).loss == pytest.approx(first.loss, abs=0.1 * (untrained - first.loss))
    assert again.train(0.0).loss == again.quality().loss


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--from", "TARGET"], "is not a trained early exit"),
        (["--from", "EXIT", "--exit-layer", "3"], "cannot begin with an exit after block 2"),
        (["--from", "MISSING"], "there is no file"),
    ],
)
def test_what_cannot_be_trained_further_is_said(
    tmp_path: Path, options: list[str], words: str
) -> None:
    target = read_model_spec(write_model(tmp_path / "target.gguf", "llama", Q4_0))
    files = {"TARGET": str(target.path), "MISSING": str(tmp_path / "none.gguf")}
    files["EXIT"] = str(write_untrained(target, tmp_path / "exit.gguf", 2).path)
    arguments = ["draft", "train", str(target.path), "-o", str(tmp_path / "new.gguf")]
    result = CliRunner().invoke(app, [*arguments, *(files.get(part, part) for part in options)])
    assert isinstance(result.exception, EdgespecError)
    assert words in str(result.exception) and result.exception.hint


def test_the_command_makes_a_drafter(
    target: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.models.exits.text_writer.LENGTH", 48)
    monkeypatch.setattr("edgespec.exits.texts._PLACES", 32)
    drafter = tmp_path / "drafter.gguf"
    arguments = ["draft", "train", str(target.path), "-o", str(drafter), "--minutes", "0.06"]
    result = CliRunner().invoke(app, [*arguments, "--head-size", "128", "--json"])
    assert result.exit_code == 0, result.exception
    report = json.loads(result.stdout.splitlines()[-1])
    info = read_exit(read_model_spec(drafter))
    assert info is not None and info.report["agreement"] == report["agreement"]
    shown = CliRunner().invoke(app, ["draft", "info", str(drafter)]).stdout
    assert "target.gguf" in shown and "128 tokens" in shown and "(trained)" in shown
