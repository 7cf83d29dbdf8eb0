"""The batch of a prompt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from planning_cases import (
    model,
    plan_of,
)

from edgespec.memory.plan import layout
from edgespec.models.projector import read_projector


@pytest.mark.parametrize(("width", "batch_size"), [(256, 128), (1024, 64), (4096, 64)])
def test_a_wide_model_reads_prompts_in_smaller_batches(width: int, batch_size: int) -> None:
    assert plan_of(model(width=width)).batch_size == batch_size


def test_a_batch_has_room_for_the_largest_step() -> None:
    assert plan_of(draft_max=200).batch_size == 256
    assert plan_of(draft_max=255).batch_size == 256
    assert plan_of(draft_max=100).batch_size == 128


def test_an_image_that_sees_itself_is_read_in_one_batch(
    vision_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models had batches of 64 or 128, and every image of Gemma 3 ended in an error."""
    small = read_projector(vision_folder / "mmproj-gemma3.gguf")
    projector = replace(small, image_size=16 * small.patch_size * small.merge)
    monkeypatch.setattr(layout, "read_projector", lambda _path: projector)
    assert projector.tokens(None) == 256
    assert plan_of(mmproj=str(small.path)).batch_size == 256
