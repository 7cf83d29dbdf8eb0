"""The batch of a prompt."""

from __future__ import annotations

import pytest
from planning_cases import (
    model,
    plan_of,
)


@pytest.mark.parametrize(("width", "batch_size"), [(256, 128), (1024, 64), (4096, 64)])
def test_a_wide_model_reads_prompts_in_smaller_batches(width: int, batch_size: int) -> None:
    assert plan_of(model(width=width)).batch_size == batch_size


def test_a_batch_has_room_for_the_largest_step() -> None:
    assert plan_of(draft_max=200).batch_size == 256
    assert plan_of(draft_max=255).batch_size == 256
    assert plan_of(draft_max=100).batch_size == 128
