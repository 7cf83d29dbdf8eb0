"""Tables of what quantizing found."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.cli.quantize_text import report_text

STEP_MS = {"1": 10.0, "4": 12.5, "8": 20.0}
LOSS = {
    "kl": {"value": 0.01, "low": 0.008, "high": 0.012},
    "agreement": {"value": 0.95},
    "perplexity_ratio": {"value": 1.02},
}


def words(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_a_mixture_says_how_many_tensors_have_which_type() -> None:
    report = {
        "type": "Q4_0",
        "target_bytes": 133 << 10,
        "source_bytes": 714 << 10,
        "tensor_types": {"a": "Q6_K", "b": "Q4_0", "c": "Q4_0"},
        "kl_on_search_texts": 0.0123,
        "kl_of_start": 0.05,
        "evaluations": 7,
        "measuring_s": 3.2,
    }
    assert words(report_text(report)) == [
        ["type", "Q4_0"],
        "size 133 KiB of 714 KiB".split(),
        "tensors 2 in Q4_0, 1 in Q6_K".split(),
        "divergence 0.0123 from the source on the texts of the search, 0.0500 before it".split(),
        "measured 7 mixtures in 3 s".split(),
    ]


def test_types_of_a_cache_are_held_against_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[dict[str, Any]] = [
        {"kv_type": "f16", "step_ms": STEP_MS},
        {"kv_type": "q8_0", "step_ms": STEP_MS, "quality": LOSS},
    ]
    found = words(report_text({"kv_rows": rows, "places": 64, "step_depth": 256}))
    times = "10.00 ms 12.50 ms 20.00 ms".split()
    assert found[1] == ["f16", "source", *times]
    assert found[2] == ["q8_0", "0.0100", "95.0%", "1.020x", *times]
    assert "losses over 64 tokens of one text" in " ".join(map(" ".join, found))
    monkeypatch.setenv("COLUMNS", "40")
    narrow = report_text({"kv_rows": rows, "places": 64, "step_depth": 256})
    assert max(map(len, narrow.splitlines())) <= 40 and "20.00 ms" in narrow


def test_the_chosen_type_is_marked_beside_what_was_predicted_for_it() -> None:
    def row(kind: str, plain: float, **more: Any) -> dict[str, Any]:
        speeds = {"plain_tokens_per_s": plain, "speculative_tokens_per_s": 1.5 * plain}
        return {
            "type": kind, "is_source": False, "bytes": 1 << 20, "step_ms": STEP_MS, **speeds, **more
        }  # fmt: skip

    source = row("Q8_0", 20.0, measured={"plain_tokens_per_s": 20.0})
    chosen = row("Q4_0", 38.0, measured={"plain_tokens_per_s": 40.0}, kl=0.02)
    rows = [{**source, "is_source": True}, row("Q5_0", 30.0, kl=0.01), chosen]
    text = report_text({"rows": rows, "type": "Q4_0", "max_kl": 0.05})
    assert [line.endswith("<- chosen") for line in text.splitlines()[1:4]] == [False, False, True]
    assert " ".join(text.split()).endswith(
        "Q4_0: 40.0 tokens/s plain as written, 38.0 predicted, 2.00x of the source; "
        "at most 0.0500 of loss was allowed"
    )
