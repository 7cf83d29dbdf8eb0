"""States of the target that heads learn from."""

from __future__ import annotations

from pathlib import Path

from eagle_cases import texts_of

from edgespec.models.exits.eagle import layers_read
from edgespec.models.spec import ModelSpec


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
