"""Where two sequences part."""

from __future__ import annotations

import pytest

from edgespec.prefix import common_prefix_length


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 511, 512, 513, 1000])
def test_common_prefix_length(size: int) -> None:
    a = list(range(1000))
    assert common_prefix_length(a, [*a[:size], -1, *a]) == size
    assert common_prefix_length(a[:size], a) == common_prefix_length(a, a[:size]) == size
