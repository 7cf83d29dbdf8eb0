"""What a run of prompts comes to, on numbers worked by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from bench_cases import answer

from edgespec.bench.summary import Prompted, summary


def test_a_summary_on_numbers_worked_by_hand() -> None:
    drafted: dict[str, Any] = {
        "drafted_by": Counter(suffix=4),
        "accepted_by": Counter(suffix=3),
    }
    ours = [
        Prompted([answer(1.0, 7, 3, drafted_tokens=4, step_s=0.9, host_s=0.1, **drafted)]),
        Prompted([answer(1.0, 10, ids=(1, 9), step_s=1.0)], gap=0.3),
    ]
    base = [Prompted([answer(2.0, 10)]), Prompted([answer(1.0, 10)])]
    found = summary(ours, base, noise=0.2)
    assert found["tokens_per_s"] == 10.0 and found["ratio"] == 1.5
    assert found["end_to_end_tokens_per_s"] == pytest.approx(22 / 3)
    assert found["acceptance_length"] == pytest.approx(20 / 17)
    assert (found["drafted_by"], found["accepted_by"]) == ({"suffix": 4}, {"suffix": 3})
    assert (found["identical"], found["unexplained"], found["largest_gap"]) == (1, 1, 0.3)
    assert found["host_share"] == pytest.approx(0.05)
    assert summary(ours, base, noise=0.4)["unexplained"] == 0
