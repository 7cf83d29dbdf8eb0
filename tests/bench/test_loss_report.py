"""The page of a comparison: the source has no loss, and names stay texts."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.bench.report import render_losses

pytest.importorskip("matplotlib", reason="the report extra is not installed")

STEP_MS = {"1": 10.0, "4": 12.5}


def row(file: str, **more: Any) -> dict[str, Any]:
    return {
        "file": file,
        "bytes": 3 << 20,
        "step_ms": STEP_MS,
        "plain_tokens_per_s": 100.0,
        "speculative_tokens_per_s": 130.0,
        **more,
    }


def test_every_file_has_a_row_with_what_it_lost() -> None:
    quality = {
        "kl": {"value": 0.01, "low": 0.008, "high": 0.012},
        "agreement": {"value": 0.95},
        "perplexity": 12.5,
        "perplexity_ratio": {"value": 1.02},
    }
    rows = [row("<source>.gguf"), row("small.gguf", quality=quality)]
    page = render_losses({"rows": rows, "places": 640, "texts": 4, "step_depth": 256}, "a & b")
    assert "over 640 places of 4 texts" in page and "after 256 tokens" in page
    assert "<source>" not in page and "&lt;source&gt;.gguf" in page
    cells = ["0.0100 [0.0080, 0.0120]", "95.0%", "12.50 (1.020x)", "100.0", "130.0"]
    assert all(cell in page for cell in cells)
    assert page.count("<svg") == 2
