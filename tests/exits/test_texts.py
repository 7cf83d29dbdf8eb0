"""Texts that a model writes for its own drafter: what is in them, their files, and their memory."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from eagle_cases import texts_of
from exit_texts import written_texts
from random_gguf import Q4_0, VOCABULARY, write_model

from edgespec.backends.base import DraftTree
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.errors import DoesNotFitError, UnsupportedError
from edgespec.exits.target import layers_read
from edgespec.exits.texts import (
    TrainingText,
    alone_in,
    load_training_texts,
    places_of,
    read_prompts,
    save_training_texts,
    written,
)
from edgespec.memory.bytes.config import RunConfig
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.quantize.texts import ANSWER, FORCED, USER, Chat

SETTINGS = RunConfig(context_size=512, batch_size=64, max_nodes=32, max_leaves=1)


@pytest.fixture
def small(tmp_path: Path) -> ModelSpec:
    pytest.importorskip("torch", reason="training needs torch")
    return read_model_spec(write_model(tmp_path / "target.gguf", "llama", Q4_0))


def test_written_text_carries_the_targets_logits(small: ModelSpec) -> None:
    chat = Chat([1, 2], [3, 4], frozenset([VOCABULARY - 1]), [[5], [6, 7]], words=[8])
    check_written(small, chat, 4)


def test_passages_of_earlier_answers_are_read(
    small: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"LENGTH": 40, "LONG_LENGTH": 90, "_USER_LENGTH": 6, "_ANSWER_ROOM": 30}
    parts = {"LONG_PART": 0.4, "_PASSAGE_LENGTH": 10, "_LEAST_DISTINCT": 0.0}
    for name, value in {**sizes, **parts}.items():
        monkeypatch.setattr(f"edgespec.exits.texts.{name}", value)
    chat = Chat([1, 2], [3, 4], frozenset(), [], tasks=[([5, 6], [7]), ([8], [])])
    texts = check_written(small, chat, 24)
    asked = [text for text in texts if text.tokens[2] in (5, 8)]
    assert asked and max(len(text.tokens) for text in texts) > 60
    written = {tuple(pair) for text in texts for pair in pairwise(text.tokens[6:].tolist())}
    passages = [list(pairwise(text.tokens[5:12].tolist())) for text in asked]
    assert any(pair in written for pairs in passages for pair in pairs)


def check_written(target: ModelSpec, chat: Chat, count: int) -> list[TrainingText]:
    """Some texts, each of which has the logits that llama.cpp has."""
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


class Lines:
    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return [len(text), int(add_special)]


def test_prompts_are_lines_or_json(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('<1>\n\n{"prompt": "<2>"}\n{"turns": ["<3>", "<4>"]}\n{broken\n')

    assert [p[0] for p in read_prompts(path, Lines())] == [3, 3, 3, 3, 7]  # type: ignore[arg-type]


def test_lists_of_other_programs_are_read_and_other_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text('{"prompt": "äö"}\r\nthree\r\n', encoding="utf-8-sig", newline="")
    assert [p[0] for p in read_prompts(path, Lines())] == [2, 5]  # type: ignore[arg-type]
    path.write_bytes(b"one\ntw\xe9\n")
    with pytest.raises(UnsupportedError, match="prompts is not UTF-8 text: byte 6 is 0xe9"):
        read_prompts(path, Lines())  # type: ignore[arg-type]


def test_two_trainings_in_one_folder_would_number_their_texts_alike(tmp_path: Path) -> None:
    with alone_in(tmp_path):
        with pytest.raises(UnsupportedError, match="another `edgespec draft train`") as caught:
            with alone_in(tmp_path):
                pytest.fail("both are at work")
        assert "--output" in caught.value.hint
    with alone_in(tmp_path):  # the first one has ended
        pass


def test_a_killed_run_leaves_nothing_that_is_read(tmp_path: Path) -> None:
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


def test_states_are_kept_while_texts_are_written(target: ModelSpec, tmp_path: Path) -> None:
    from edgespec.exits.trainer import stored_states

    texts = texts_of(target, 8)
    save_training_texts(tmp_path / "texts-00000.npz", texts, 1.0)
    layers = layers_read(target.num_layers)
    kept = [rows.float() for text in stored_states(target, tmp_path, layers) for rows in text]
    for path in tmp_path.glob("*.npy"):
        path.unlink()
    states = stored_states(target, tmp_path, layers)
    computed = [rows.float() for text in states for rows in text]
    assert len(list(tmp_path.glob("*.npy"))) == len(set(layers))
    for first, second in zip(kept, computed, strict=True):
        assert (first - second).abs().max() < 0.05 * second.abs().max()
