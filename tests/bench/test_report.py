"""The page of a bench."""

from __future__ import annotations

from bench_cases import document

from edgespec.bench.report import render_bench_report


def test_the_page_shows_tasks_intervals_and_memory() -> None:
    measured = document()
    page = render_bench_report(measured)
    assert page.count("<svg") == 1, "memory of one moment is no plot"
    samples = measured["loads"][0]["memory"]["samples"]
    samples.append({**samples[0], "time_s": 1.0})
    page = render_bench_report(measured)
    assert page.count("<svg") == 2
    for words in ("Speed by task", "270.0 MiB measured", "[1.75, 1.85]",
                  "plain 0.42, suffix,recycling 0.3 (RAPL: package-0, 3.2 W idle)",
                  "A processor of some length indeed", "benchmark of tiny.gguf"):  # fmt: skip
        assert words in page
    assert "2026-11-27 12:00" in page and "kept 1.2 cores busy" in page
    assert "<script" not in page
