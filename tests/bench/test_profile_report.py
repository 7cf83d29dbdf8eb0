"""The memory-profile report: everything that was measured is on the page, and nothing else is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from edgespec.bench.report import render_profile
from edgespec.errors import MissingDependencyError, UnsupportedError
from edgespec.memory.report.page import require_place, timeline_of, write_page

MIB = 1 << 20


def profile(**changes: Any) -> dict[str, Any]:
    """A profile document by hand: two components, two drafters, three budgets."""
    document: dict[str, Any] = {
        "model": {"file": "tiny.gguf", "name": "Tiny", "type": "Q4_0", "bytes": 12 * MIB},
        "busy_neighbours": 0.05,
        "machine": {
            "measured_at": "2026-11-27 12:00 +0000",
            "cpu": "A processor",
            "cores": 2,
            "features": ["avx2"],
            "memory_bytes": 8 << 30,
            "available_bytes": 5 << 30,
            "gpu_kinds": [],
            "system": "Linux x86_64",
            "python": "3.11.7",
            "edgespec": "0.1.0",
            "llama_cpp_python": "0.3.36",
        },
        "plan": {
            "context_size": {"value": 4096, "reason": "enough for most prompts"},
            "draft_max": {"value": 7, "reason": "the least that keeps 99.5%"},
        },
        "memory": {
            "limit_bytes": 2 << 30,
            "predicted_peak_bytes": 100 * MIB,
            "measured_peak_bytes": 97 * MIB,
            "predicted": {"weights": 12 * MIB, "kv_cache": 8 * MIB},
            "allocated": {"weights": 12 * MIB},
            "samples": [
                {"time_s": 0.1, "resident_bytes": 40 * MIB},
                {"time_s": 2.0, "resident_bytes": 97 * MIB},
            ],
            "phases": [{"time_s": 0.0, "name": "load"}, {"time_s": 1.0, "name": "answers"}],
        },
        "step_ms": [{"depth": 0, "ms": {"1": 4.0, "2": 6.5, "4": 8.0}}],
        "draft_max": 3,
        "prefill": {"batch_size": 64, "tokens_per_s": 1234.0},
        "bandwidth": {
            "memory_bytes_per_s": 40e9,
            "used_bytes_per_s": 20e9,
            "ceiling_tokens_per_s": 400.0,
        },
        "largest_invariant_step": 7,
        "speed": [
            {
                "drafter": "plain",
                "predicted_tokens_per_s": 201.0,
                "measured_tokens_per_s": 200.0,
                "acceptance_length": 1.0,
                "by_task": {"write": 200.0, "edit": 198.0},
            },
            {
                "drafter": "suffix",
                "predicted_tokens_per_s": 290.0,
                "measured_tokens_per_s": 300.0,
                "acceptance_length": 2.5,
                "by_task": {"write": 210.0, "edit": 480.0},
            },
        ],
        "frontier": [
            {"budget_bytes": 60 * MIB, "tokens_per_s": None, "context_size": None},
            {"budget_bytes": 90 * MIB, "tokens_per_s": 200.0, "context_size": 512},
            {"budget_bytes": 100 * MIB, "tokens_per_s": 290.0, "context_size": 4096},
        ],
    }
    return {**document, **changes}


def visible_text(page: str) -> str:
    """What a reader sees, tags and styles left out."""
    page = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


@pytest.fixture(scope="module")
def page() -> str:
    """That of the document as it is."""
    return render_profile(profile())


def test_tables_and_plots_that_scroll_show_that_there_is_more(page: str) -> None:
    """A plot as narrow as a telephone had letters of six pixels."""
    assert page.count('<figure class="scroll"') == page.count("<figure") > 0
    assert re.search(r"figure svg \{[^}]*min-width: 36rem", page)
    style = re.search(r"\.scroll \{(.*?)\}", page, re.S)
    assert style and "overflow-x: auto" in style[1]
    assert style[1].count(" local") == style[1].count(" scroll") == 2  # covers, and shadows
    assert style[1].count("var(--more)") == 2  # a colour of their own, which glares in no scheme
    assert page.count("--more: #") == 2


def test_every_axis_says_what_is_on_it_and_each_phase_has_a_line(page: str) -> None:
    names = ("seconds", "MiB", "tokens in the step", "ms", "budget in MiB", "tokens/s")
    for name in (*names, "tokens of context (dashed)"):
        assert re.search(rf"<text[^>]*>{re.escape(name)}</text>", page), name
    memory = profile()["memory"]
    phases = [{"time_s": 0.1, "name": "load"}, {"time_s": 1.0, "name": "answers"}]
    of_none, of_two = (
        str(timeline_of({**memory, "phases": some})).count('id="line2d_')
        for some in (phases[:0], phases)
    )
    assert of_two == of_none + 2


def test_predicted_and_measured_stand_side_by_side(page: str) -> None:
    text = visible_text(page)
    assert "weights 12.0 MiB 12.0 MiB" in text
    assert "kv cache 8.0 MiB -" in text  # llama.cpp said nothing about it
    assert "peak of the process 100.0 MiB 97.0 MiB" in text
    assert "suffix 290.0 300.0 2.50" in text
    assert "1.50x" in text  # 300 over 200 tokens/s


def test_every_choice_comes_with_its_reason(page: str) -> None:
    text = visible_text(page)
    assert "context size 4096 enough for most prompts" in text
    assert "draft max 7 the least that keeps 99.5%" in text


def test_machine_and_versions_are_named(page: str) -> None:
    text = visible_text(page)
    for words in ("A processor, 2 cores", "avx2", "5.00 GiB free", "llama-cpp-python 0.3.36"):
        assert words in text
    assert "2026-11-27 12:00" in text and "computed nothing that counts" in text
    busy = visible_text(render_profile(profile(busy_neighbours=1.2)))
    assert "kept 1.2 cores busy" in busy


def test_steps_over_single_tokens_are_a_table_and_no_plot_of_one_point(page: str) -> None:
    """Without a drafter there is nothing else; the answers are plain alone."""
    curves = [{"depth": 0, "ms": {"1": 5.25}}, {"depth": 512, "ms": {"1": 6.5}}]
    plain = profile()["speed"][:1]
    changed = render_profile(profile(step_ms=curves, speed=plain, largest_invariant_step=1))
    text = visible_text(changed)
    assert changed.count("<svg") == page.count("<svg") - 1
    assert "5.2" in text and "6.5" in text and "without drafts" in text
    assert "none of several tokens" in text and "up to 1 tokens" not in text


def test_memory_is_no_ceiling_of_steps_on_a_gpu(page: str) -> None:
    text = visible_text(page)
    assert "bandwidth 40.0 GB/s; one-token steps read 20.0 GB/s of weights" in text
    text = visible_text(render_profile(profile(bandwidth={"used_bytes_per_s": 900e9})))
    assert "bandwidth one-token steps read 900.0 GB/s of weights" in text


def test_the_page_needs_nothing_from_outside(page: str) -> None:
    assert not re.findall(r"(?:src|href)\s*=\s*[\"'](?!#)", page)
    assert "<script" not in page and "@import" not in page
    assert not re.findall(r"url\((?![\"']?#)", page)


def test_plots_are_drawn_in_the_colour_of_the_page(page: str) -> None:
    plots = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(plots) == 5
    for plot in plots:
        ElementTree.fromstring(plot)
        assert "currentColor" in plot and "#010203" not in plot
        assert "fill: #000000" not in plot and "stroke: #000000" not in plot


def test_a_name_cannot_become_markup() -> None:
    model = {"file": "<b>.gguf", "name": "<img src=x onerror=alert(1)>", "type": "Q4_0", "bytes": 1}
    page = render_profile(profile(model=model))
    assert "<img" not in page and "&lt;img src=x" in page


def test_energy_is_a_column_where_it_was_measured() -> None:
    speed = [{**row, "j_per_token": 0.42, "energy_source": "RAPL"} for row in profile()["speed"]]
    text = visible_text(render_profile(profile(speed=speed)))
    assert "J a token (RAPL)" in text and text.count("0.42") == len(speed)


def test_no_drafter_and_no_fitting_budget_are_drawn_too() -> None:
    plain = profile()["speed"][:1]
    nothing = [{"budget_bytes": MIB, "tokens_per_s": None, "context_size": None}]
    text = visible_text(render_profile(profile(speed=plain, frontier=nothing)))
    assert "1.00x" in text


def test_the_report_is_written_as_utf8(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    model = {**profile()["model"], "name": "Modèle 模型"}
    write_page(render_profile(profile(model=model)), path)
    assert "Modèle 模型" in path.read_text(encoding="utf-8")


def test_a_folder_is_no_file_to_write(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="cannot write") as caught:
        write_page("", tmp_path)
    assert "--html" in caught.value.hint


def test_a_page_that_cannot_be_written_is_told_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    require_place(tmp_path / "page.html")
    for path in (tmp_path, tmp_path / "none" / "page.html"):
        with pytest.raises(UnsupportedError, match="cannot write"):
            require_place(path)


def test_without_matplotlib_the_hint_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(MissingDependencyError) as caught:
        render_profile(profile())
    assert "edgespec[report]" in caught.value.hint
