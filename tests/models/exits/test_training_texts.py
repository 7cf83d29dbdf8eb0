"""The folder of texts that an exit is trained on: one training at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.errors import UnsupportedError
from edgespec.models.exits.training_texts import alone_in


def test_two_trainings_in_one_folder_would_number_their_texts_alike(tmp_path: Path) -> None:
    with alone_in(tmp_path):
        with pytest.raises(UnsupportedError, match="another `edgespec draft train`") as caught:
            with alone_in(tmp_path):
                pytest.fail("both are at work")
        assert "--output" in caught.value.hint
    with alone_in(tmp_path):  # the first one has ended
        pass


def test_a_killed_run_leaves_nothing_that_is_read(tmp_path: Path) -> None:
    from edgespec.models.exits.training_texts import load_training_texts, written

    (tmp_path / ".texts-00000.partial.npz").write_bytes(b"half")
    assert (load_training_texts(tmp_path), written(tmp_path)) == ([], (0, 0.0))
