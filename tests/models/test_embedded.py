"""What drafts for the embedded model."""

from __future__ import annotations

import pytest

from edgespec.models.early_exit import file_hash, read_made_for
from edgespec.models.embedded import embedded_drafter_path, embedded_model
from edgespec.models.pairing import check_pair
from edgespec.models.spec import EAGLE, read_model_spec


@pytest.mark.model
def test_the_shipped_head_is_the_embedded_models() -> None:
    path = embedded_drafter_path()
    assert path is not None
    target, head = read_model_spec(embedded_model()), read_model_spec(path, heads=True)
    check_pair(target, head)
    assert head.reads is not None and head.reads.kind == EAGLE
    made = read_made_for(path)
    assert made is not None and made.target_hash == file_hash(target.path)
    assert made.report["agreement"] > 0.6
    assert head.file_bytes < target.file_bytes / 7  # what it may take of the memory
