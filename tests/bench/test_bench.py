"""`edgespec bench`: turns, ratios, summaries, what is printed and written."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dying
import numpy as np
import pytest
from typer.testing import CliRunner

from edgespec.bench.interleaving import Answer, interleaved, order_of
from edgespec.bench.ratios import Ratio, Timed, middle_repeats, rate, ratio_of
from edgespec.bench.report import render_bench_report
from edgespec.bench.summary import Prompted, speed_by_position, summary
from edgespec.bench.worker import Worker
from edgespec.cli.bench import bench_text
from edgespec.cli.main import app
from edgespec.cli.options import DEFAULTS, PlanOptionLists
from edgespec.decode.engine import Prompt
from edgespec.decode.stats import Counters
from edgespec.errors import BackendError, ContextFullError, ModelNotFoundError, UnsupportedError
from edgespec.measure.prompts import TaskPrompt, first_of_each_task, read_prompts
from edgespec.memory.plan.request import Request
from edgespec.models.embedded import embedded_model

runner = CliRunner()


def answer(
    seconds: float, rounds: int, accepted: int = 0, ids: Sequence[int] = (1, 2, 3), **more: Any
) -> Answer:
    """An answer by hand: `rounds` rounds in `seconds`, and half a second for the prompt."""
    counters = Counters(
        generated_tokens=1 + rounds + accepted,
        rounds=rounds,
        accepted_tokens=accepted,
        time_to_first_token_s=0.5,
        decode_s=seconds,
        **more,
    )
    return Answer(tuple(ids), counters)


# -------------------------------------------------------------------------------------- turns


class Scripted:
    """A contender that only notes what it was asked."""

    def __init__(self, name: str, log: list[str], fails_on: str = "") -> None:
        self.name = name
        self._log = log
        self._fails_on = fails_on

    def renew(self) -> None:
        self._log.append(f"renew {self.name}")

    def answer(self, prompt: Prompt, max_tokens: int) -> Answer:
        if prompt == self._fails_on:
            raise ContextFullError("too long", hint="raise --ctx")
        self._log.append(f"{self.name}{prompt}")
        return answer(1.0, max_tokens)


def test_contenders_interleaved_and_all_prompts_come_before_any_again() -> None:
    log: list[str] = []
    contenders = [Scripted("A", log), Scripted("B", log)]
    taken = list(interleaved(contenders, ["1", "2", "3"], max_tokens=4, repeats=2))
    assert log[:2] == ["renew A", "renew B"] and log[8:10] == log[:2]
    for repeat, asked in enumerate((log[2:8], log[10:])):
        assert asked == [
            f"{'AB'[place]}{number + 1}"
            for number in range(3)
            for place in order_of(number, 2, repeat)
        ]
    assert [one[:3] for one in taken] == [
        (repeat, number, place)
        for repeat in range(2)
        for number in range(3)
        for place in order_of(number, 2, repeat)
    ]


@pytest.mark.parametrize("contenders", [1, 2, 3, 8])
def test_every_contender_is_as_often_early_as_late(contenders: int) -> None:
    orders = [order_of(number, contenders) for number in range(400)]
    assert all(sorted(order) == list(range(contenders)) for order in orders)
    places = np.array([[order.index(one) for one in range(contenders)] for order in orders])
    assert places.mean(axis=0) == pytest.approx([(contenders - 1) / 2] * contenders), "exactly"
    if contenders > 1:
        for period in (2, 5, 10):
            first = [order[0] for order in orders[::period]]
            assert min(first.count(one) for one in range(contenders)) > 0, "whatever comes round"
            assert order_of(period, contenders, 1) == order_of(period + 1, contenders)


def test_a_failed_prompt_fails_the_run_and_is_named() -> None:
    contenders = [Scripted("A", []), Scripted("B", [], fails_on="2")]
    with pytest.raises(ContextFullError, match="prompt 2, B: too long") as caught:
        list(interleaved(contenders, ["1", "2"], max_tokens=4))
    assert caught.value.hint == "raise --ctx"


# ------------------------------------------------------------------------------------- ratios


def test_a_ratio_weighs_prompts_by_their_time() -> None:
    """10 + 30 tokens in 1 + 1 s over 10 + 30 tokens in 1 + 3 s: 20/s over 10/s."""
    ours, other = [Timed(10, 1.0), Timed(30, 1.0)] * 3, [Timed(10, 1.0), Timed(30, 3.0)] * 3
    assert rate(ours) == 20.0 and rate(other) == 10.0
    ratio = ratio_of(ours, other)
    assert ratio.value == 2.0
    assert ratio.low is not None and ratio.high is not None
    assert 1.0 <= ratio.low < 2.0 < ratio.high <= 3.0
    assert ratio_of(ours, other) == ratio, "the same numbers give the same interval"


@pytest.mark.parametrize("prompts", [1, 4])
def test_few_prompts_have_no_interval(prompts: int) -> None:
    assert ratio_of([Timed(10, 1.0)] * prompts, [Timed(10, 2.0)] * prompts) == Ratio(2.0)


def test_an_interval_holds_its_ratio() -> None:
    """Here every prompt is 1.30 to 1.31 times as fast, and all together 1.41 times."""
    ours = [Timed(100, 1.0), Timed(20, 0.25)] * 2
    base = [Timed(100, 1.3), Timed(100, 1.64)] * 2
    ratio = ratio_of([*ours, *ours], [*base, *base], list("aabbccdd"))
    assert ratio.value == pytest.approx(1.41, abs=0.01)
    assert ratio.value is not None and ratio.low is not None and ratio.high is not None
    assert ratio.low <= ratio.value <= ratio.high


def test_answers_of_one_token_tell_nothing_about_decoding() -> None:
    nothing = Timed(0, 0.0)
    ours, base = [Timed(10, 1.0)] * 5, [Timed(10, 2.0)] * 5
    told = ratio_of(ours, base)
    assert ratio_of([*ours, nothing, Timed(9, 1.0)], [*base, Timed(9, 1.0), nothing]) == told
    assert ratio_of([nothing], [nothing]) == Ratio(None)


def test_an_interval_narrows_with_more_prompts() -> None:
    few = [Timed(10, 1.0 + 0.1 * (i % 3)) for i in range(9)]
    base = [Timed(10, 2.0)] * 9
    wide, narrow = ratio_of(few, base), ratio_of(few * 9, base * 9)
    assert wide.value is not None and narrow.value == pytest.approx(wide.value)
    widths = [(one.high or 0.0) - (one.low or 0.0) for one in (narrow, wide)]
    assert 0.0 < widths[0] < 0.5 * widths[1]


def test_what_differs_between_tasks_does_not_widen_an_interval() -> None:
    ours = [Timed(10, 1.0)] * 3 + [Timed(10, 0.2)] * 3
    base = [Timed(10, 2.0)] * 6
    apart = ratio_of(ours, base, ["a"] * 3 + ["b"] * 3)
    together = ratio_of(ours, base)
    assert together.value is not None and together.low is not None
    assert (apart.low, apart.high) == pytest.approx((together.value, together.value))
    assert together.low < 0.8 * together.value


@pytest.mark.parametrize("size", [2, 3, 8])
def test_few_prompts_a_task_give_the_interval_of_stratified_sampling(size: int) -> None:
    """Rates over a constant are means, whose standard error is known: with n prompts in each task
    of N in all, sqrt(sum(n * variance)) / N. Drawing n of n would be sqrt(1/2) of it for n = 2."""
    tasks = [f"{place // size}" for place in range(240)]
    tokens = np.random.default_rng(5).integers(50, 150, size=len(tasks))
    ratio = ratio_of([Timed(int(n), 1.0) for n in tokens], [Timed(1, 1.0)] * len(tasks), tasks)
    variances = tokens.reshape(-1, size).var(axis=1, ddof=1)
    error = np.sqrt(size * variances.sum()) / len(tasks)
    assert ratio.value is not None and ratio.low is not None and ratio.high is not None
    assert ratio.value - ratio.low == pytest.approx(1.96 * error, rel=0.1)
    assert ratio.high - ratio.value == pytest.approx(1.96 * error, rel=0.1)


def test_prompts_that_are_alone_in_their_task_are_drawn_together() -> None:
    ours = [Timed(10, seconds) for seconds in (1.0, 0.9, 0.5, 0.8, 0.7)]
    base = [Timed(10, 2.0)] * 5
    assert ratio_of(ours, base, list("abcde")) == ratio_of(ours, base)
    one = ratio_of(ours, base, list("aabbc"))
    joined = ratio_of([*ours[:2], ours[4], *ours[2:4]], base, list("aaabb"))
    assert (one.low, one.high) == pytest.approx((joined.low, joined.high)), "joins the largest"


def test_the_repeat_with_the_median_ratio_counts() -> None:
    base = [Timed(10, 1.0), Timed(10, 4.0), Timed(10, 1.0)]
    assert middle_repeats([Timed(10, 0.5), Timed(10, 3.9), Timed(10, 0.25)], base) == [0]
    assert middle_repeats([Timed(10, 0.5), Timed(10, 1.0)], base[:2]) == [0, 1]
    alone = [Timed(10, 1.0), Timed(10, 4.0), Timed(10, 2.0)]
    assert middle_repeats(alone, alone) == [2], "a baseline's own: by its speed"


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


def test_speed_by_position_counts_tokens_where_they_were_written() -> None:
    marks = ((1, 0.0), (31, 3.0), (33, 3.5), (65, 5.5))
    one = Prompted([Answer((), Counters(), marks)])
    assert speed_by_position([one]) == [
        {"from_token": 0, "tokens_per_s": 32 / 3.5},
        {"from_token": 32, "tokens_per_s": 16.0},
    ]


# ------------------------------------------------------------------------------------ prompts


def test_prompts_in_the_form_of_spec_bench(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"question_id": 1, "category": "qa", "turns": ["Who?", "And then?"]},
        {"category": "qa", "turns": ["Where?"]},
        {"category": "math", "turns": ["1 + 1?"]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    prompts = read_prompts(path)
    assert prompts == [TaskPrompt("qa", "Who?"), TaskPrompt("qa", "Where?"),
                       TaskPrompt("math", "1 + 1?")]  # fmt: skip
    assert first_of_each_task(prompts, 1) == [prompts[0], prompts[2]]


def test_only_line_ends_end_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    text = "one\u2028two\x85three"
    path.write_bytes(
        json.dumps({"category": "qa", "turns": [text]}, ensure_ascii=False).encode() + b"\r\n"
    )
    assert read_prompts(path) == [TaskPrompt("qa", text)]


@pytest.mark.parametrize(
    "line", ["nonsense", "[]", '{"category": "qa"}', '{"category": 1, "turns": ["x"]}',
             '{"category": "qa", "turns": ["half \\ud800"]}',
             '{"category": "qa", "turns": []}', '{"category": "qa", "turns": [" "]}']
)  # fmt: skip
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"category": "qa", "turns": ["Who?"]}\n' + line)
    with pytest.raises(UnsupportedError, match="line 2") as caught:
        read_prompts(path)
    assert "category" in caught.value.hint


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="cannot read"):
        read_prompts(tmp_path / "none.jsonl")


# ------------------------------------------------------------------------------------ options


def test_options_given_several_times_are_multiplied() -> None:
    lists = PlanOptionLists.of(
        {"drafter": ["none", "suffix,recycling"], "kv_type": ["f16", "q8_0"], "threads": [1, 2],
         "ctx": [512], "budget": None, "exact": True}
    )  # fmt: skip
    assert lists.drafters == ("none", "suffix,recycling")
    assert [label for label, _ in lists.each] == [
        "--kv-type f16 --threads 1", "--kv-type f16 --threads 2",
        "--kv-type q8_0 --threads 1", "--kv-type q8_0 --threads 2",
    ]  # fmt: skip
    assert all(one.exact and one.ctx == 512 and one.drafter == "auto" for _, one in lists.each)
    assert {(one.kv_type, one.threads) for _, one in lists.each} == {
        ("f16", 1), ("f16", 2), ("q8_0", 1), ("q8_0", 2),
    }  # fmt: skip


def test_no_option_is_one_setting_without_a_name() -> None:
    assert PlanOptionLists.of({"drafter": [], "kv_type": None, "exact": False}).each == (
        ("", DEFAULTS),
    )


def test_an_unknown_drafter_is_misuse() -> None:
    done = runner.invoke(app, ["bench", "--drafter", "plain", "--drafter", "suffix,magic"])
    assert done.exit_code == 2
    assert "magic" in done.output


@pytest.mark.parametrize("option", ["--html", "--csv"])
def test_a_missing_folder_is_found_before_minutes_are_spent(tmp_path: Path, option: str) -> None:
    done = runner.invoke(app, ["bench", option, str(tmp_path / "none" / "out")])
    assert done.exit_code == 1
    assert "no folder" in str(done.exception)


# ------------------------------------------------------------------------------------- output


def row(ratio: float, identical: int = 2, **changes: Any) -> dict[str, Any]:
    """Numbers of one task, by hand."""
    found: dict[str, Any] = {
        "prompts": 2, "tokens": 256, "tokens_per_s": 100 * ratio, "ratio": ratio,
        "ratio_low": ratio - 0.05, "ratio_high": ratio + 0.05,
        "end_to_end_tokens_per_s": 90 * ratio, "end_to_end_ratio": ratio,
        "end_to_end_ratio_low": ratio, "end_to_end_ratio_high": ratio,
        "time_to_first_token_s": 0.25, "rounds": 128, "drafted_tokens": 0, "accepted_tokens": 0,
        "acceptance_length": 1.0, "drafted_by": {}, "accepted_by": {}, "draft_s": 0.0,
        "host_share": 0.01, "identical": identical, "unexplained": 0, "largest_gap": 0.0,
    }  # fmt: skip
    return {**found, **changes}


def document(**changes: Any) -> dict[str, Any]:
    """A bench document by hand: plain and suffix, two tasks."""
    suffix = row(
        1.4, identical=1, drafted_tokens=90, accepted_tokens=60, acceptance_length=1.5,
        drafted_by={"suffix": 80, "recycling": 10}, accepted_by={"suffix": 60},
    )  # fmt: skip
    positions = [{"from_token": 0, "tokens_per_s": 100.0}, {"from_token": 32, "tokens_per_s": 98.0}]
    memory = {
        "measured_peak_bytes": 270 << 20, "predicted_peak_bytes": 280 << 20, "phases": [],
        "samples": [{"time_s": 0.1, "resident_bytes": 40 << 20}],
    }  # fmt: skip
    found: dict[str, Any] = {
        "model": {"file": "tiny.gguf", "name": "Tiny", "type": "Q4_0", "bytes": 1},
        "machine": {
            "cpu": "A processor of some length indeed", "cores": 2, "system": "Linux x86_64",
            "python": "3.11.7", "edgespec": "0.1.0", "llama_cpp_python": "0.3.36",
        },
        "settings": {"max_tokens": 128, "repeats": 3, "prompts": 4, "tasks": 2},
        "ceiling": {
            "bytes_per_token": 86 << 20, "memory_bytes_per_s": 40e9, "tokens_per_s": 443.6,
            "plain_tokens_per_s": 100.0,
        },
        "loads": [{"settings": "", "batch_noise": 0.1, "memory": memory}],
        "variants": [
            {"name": "plain", "drafter": "none", "settings": "", "load": 0, "overall": row(1.0),
             "tasks": {"summarization": row(1.0), "code": row(1.0)}, "by_position": positions},
            {"name": "suffix,recycling", "drafter": "suffix,recycling", "settings": "", "load": 0,
             "overall": suffix, "tasks": {"summarization": row(1.8), "code": row(1.1)},
             "by_position": positions},
        ],
        "answers": [],
    }  # fmt: skip
    return {**found, **changes}


def test_the_ceiling_comes_first_and_every_task_has_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = bench_text(document())
    assert text.index("ceiling  443.6 tokens/s plain: 40.0 GB/s over 86 MiB") < text.index("code")
    assert "plain    100.0 tokens/s, 23% of the ceiling" in text
    assert "summarization  100.0  180.0  1.80x  [1.75, 1.85]  1.00    0.25 s  2 of 2" in text
    assert "overall        100.0  140.0  1.40x  [1.35, 1.45]  1.50    0.25 s  1 of 2" in text
    assert "60 of 80 by suffix, 0 of 10 by recycling" in text
    assert "1 answers part from the first drafter's, 0 of them where" in text.replace("\n", " ")
    assert text.endswith("memory  peak 270 MiB, planned 280 MiB")


@pytest.mark.parametrize("columns", [40, 60, 100])
def test_text_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = bench_text(document())
    assert [line for line in text.splitlines() if len(line) > columns] == []
    assert "1.80x" in text and "1.40x" in text


def test_what_the_answers_do_not_tell_is_a_dash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of one token have no ratio, and few prompts no interval."""
    monkeypatch.setenv("COLUMNS", "100")
    unknown = {"ratio": None, "ratio_low": None, "ratio_high": None, "end_to_end_ratio": None}
    found = document()
    found["variants"][1]["overall"].update(unknown)
    found["variants"][1]["tasks"]["code"].update(unknown)
    found["variants"][1]["tasks"]["summarization"]["ratio_low"] = None
    text = bench_text(found)
    assert "code           100.0  110.0  -      -    " in text
    assert "summarization  100.0  180.0  1.80x  -    " in text
    assert render_bench_report(found).count("<svg") == 3


def test_one_variant_alone_is_shown_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    alone = document(variants=document()["variants"][:1])
    assert "plain, tokens/s" in bench_text(alone)
    assert render_bench_report(alone).count("<svg") == 3


def test_the_page_shows_tasks_intervals_positions_and_memory() -> None:
    page = render_bench_report(document())
    assert page.count("<svg") == 3
    for words in ("Speed by task", "Speed over the answer", "270.0 MiB measured", "[1.75, 1.85]",
                  "A processor of some length indeed", "benchmark of tiny.gguf"):  # fmt: skip
        assert words in page
    assert "<script" not in page


# ------------------------------------------------------------------------------ real processes


def test_what_loading_raises_comes_through(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        Worker(tmp_path / "none.gguf", Request(), ["none"])
    assert "none.gguf" in str(caught.value)


def test_a_worker_that_ends_by_itself_is_an_error_and_not_a_deadlock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("edgespec.bench.worker._serve", dying.ends_with_status_3)
    with pytest.raises(BackendError, match=r"^the process that ran the model ended with status 3$"):
        Worker(Path("none.gguf"), Request(), ["none"])


_CHATTING = f"""
import sys
sys.path.append({str(Path(__file__).parents[1])!r})
import dying
import edgespec.bench.worker as worker
from edgespec.memory.plan.request import Request
if __name__ == "__main__":
    worker._serve = dying.chatters
    print(worker.Worker("none.gguf", Request(), []).drafters)
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs PYTHONSAFEPATH")
def test_a_worker_neither_prints_on_stdout_nor_imports_from_the_folder(tmp_path: Path) -> None:
    folder, script = tmp_path / "here", tmp_path / "script.py"
    folder.mkdir()
    (folder / "pickle.py").write_text("raise SystemExit('the wrong one')\n")
    script.write_text(_CHATTING)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, cwd=folder
    )
    assert (done.returncode, done.stdout) == (0, "['none.gguf']\n"), done.stderr
    assert done.stderr.count("welcome") == 20_000


@pytest.mark.model
def test_a_worker_that_dies_is_an_error() -> None:
    request = Request(context_size=256, threads=1)
    with Worker(embedded_model(), request, ["none"]) as worker:
        worker._process.kill()
        with pytest.raises(BackendError, match="ended with status"):
            worker.call("noise")


@pytest.mark.model
@pytest.mark.usefixtures("exact_engine")  # which has measured what exact settings are
def test_bench_on_the_embedded_model(measured_cache: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    texts = ("Say blue ten times: blue blue blue blue blue", "Count: 1 2 3 4 1 2 3 4 1 2 3 4 1")
    lines = [{"category": f"task {i % 2}", "turns": [text]} for i, text in enumerate(texts)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    page, rows = tmp_path / "out.html", tmp_path / "out.csv"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "edgespec.cli.main", "bench", "--json", "-n", "12"),
            *("--prompts", str(prompts), "--repeats", "2", "--threads", "1", "--ctx", "256"),
            *("--drafter", "plain", "--drafter", "suffix", "--exact"),
            *("--draft-max", "3", "--draft-max", "7", "--html", str(page), "--csv", str(rows)),
        ],
        capture_output=True,
        text=True,
        timeout=170,
        env={**os.environ, "EDGESPEC_CACHE": str(measured_cache), "COLUMNS": "100"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    names = [one["name"] for one in found["variants"]]
    assert names == ["plain --draft-max 3", "suffix --draft-max 3",
                     "plain --draft-max 7", "suffix --draft-max 7"]  # fmt: skip
    for one in found["variants"]:
        assert set(one["tasks"]) == {"task 0", "task 1"}
        assert one["overall"]["prompts"] == one["overall"]["identical"] == 2
        assert one["overall"]["ratio_low"] is None, "two prompts have no interval"
    assert found["variants"][0]["overall"]["ratio"] == 1.0
    assert found["variants"][0]["overall"]["acceptance_length"] == 1.0
    assert [load["settings"] for load in found["loads"]] == ["--draft-max 3", "--draft-max 7"]
    for load in found["loads"]:
        memory = load["memory"]
        assert 0 < memory["measured_peak_bytes"] < 1.1 * memory["predicted_peak_bytes"]
    with rows.open(newline="") as file:
        answers = list(csv.DictReader(file))
    assert len(answers) == 4 * 2 * 2 and len(answers) == len(found["answers"])
    assert "Speed by task" in page.read_text()
