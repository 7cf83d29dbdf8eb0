"""Texts that a model writes for its own drafter."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from exit_texts import written_texts
from random_gguf import Q4_0, VOCABULARY, write_model

from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.context import LlamaSettings
from edgespec.backends.tree import DraftTree
from edgespec.models.spec import ModelSpec, read_model_spec

if TYPE_CHECKING:
    from edgespec.models.exits.openings import Chat
    from edgespec.models.exits.training_texts import TrainingText


SETTINGS = LlamaSettings(context_size=512, batch_size=64, max_nodes=32, max_leaves=1)


@pytest.fixture
def target(tmp_path: Path) -> ModelSpec:
    pytest.importorskip("torch", reason="training needs torch")
    return read_model_spec(write_model(tmp_path / "target.gguf", "llama", Q4_0))


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
