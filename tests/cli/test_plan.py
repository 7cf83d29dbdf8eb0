"""`edgespec plan`: what is chosen and allocated, at every width and as JSON."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_line import CHOICES, COMPONENTS, ESCAPE, EXACT, Command, first_column, run
from random_gguf import F32, Q4_0, write_model

from edgespec.backends.llama.tokenizer import open_tokenizer
from edgespec.memory.device import bandwidth, host, neighbours
from edgespec.models.embedded import embedded_model

SPEED = re.compile(
    r"predicted  [\d.]+ to [\d.]+ tokens/s, plain [\d.]+ to [\d.]+, while nothing else computes"
    r"\s+\(estimated\s+from\s+memory\s+bandwidth\)"
)


@pytest.mark.model
@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize("columns", [100, 200])
def test_plan_fits_the_terminal(
    command: Command, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    done = command("plan", "--ctx", "1024", "--exact")
    assert (done.status, done.err) == (0, "")
    title, components, choices, speed, others = done.out.rstrip("\n").split("\n\n")
    assert title.endswith("(Q4_1)")
    *names, total = first_column(components)
    assert {name.replace(" ", "_") for name in names} == COMPONENTS
    assert total == "at most" and " of 8.00 GiB free, 7.7" in components.splitlines()[-1]
    assert {name.replace(" ", "_") for name in first_column(choices)} == CHOICES
    assert SPEED.fullmatch(speed), speed
    first, *rest = others.splitlines()
    assert first == "you could also have"
    assert first_column("\n".join(rest)) == ["smaller", "longer context"]
    assert [line for line in done.out.splitlines() if len(line) > columns] == []
    assert [line for line in done.out.splitlines() if line != line.rstrip()] == []
    assert ESCAPE not in done.out


@pytest.mark.model
@pytest.mark.usefixtures("steady")
def test_plan_at_40_columns(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is chosen and what it takes; every line of it, and nothing is cut off."""
    monkeypatch.setenv("COLUMNS", "40")
    done = command("plan", "--ctx", "1024", "--threads", "2")
    _, _components, choices, *_ = done.out.split("\n\n")
    assert {name.replace(" ", "_") for name in first_column(choices)} == CHOICES
    assert [line for line in done.out.splitlines()[1:] if len(line) > 40] == []
    assert "threads       2         as asked\n" in choices
    assert (
        "kv type       f16       half precision\n"
        "                        costs no\n"
        "                        measurable\n"
        "                        quality\n"
    ) in choices


@pytest.mark.model
@pytest.mark.usefixtures("steady")
def test_plan_of_a_budget_says_so(command: Command) -> None:
    """The same text for the same bytes, in whatever unit."""
    texts = [
        command("plan", "--budget", text).out
        for text in ("0.25GiB", "256MiB", "262144KiB", " 256 mib ", "268.435456MB")
    ]
    assert " of 256 MiB budget, " in texts[0]
    assert texts == texts[:1] * len(texts)


@pytest.mark.model
@pytest.mark.usefixtures("steady")
def test_plan_says_the_same_at_every_width(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for columns in ("40", "60", "100", "1000"):
        monkeypatch.setenv("COLUMNS", columns)
        texts.append(command("plan", "--ctx", "1024").out.split())
    assert all(sorted(text) == sorted(texts[0]) for text in texts)
    assert len(texts[0]) > 60


@pytest.mark.model
@pytest.mark.usefixtures("steady")
def test_plan_json(command: Command) -> None:
    options = ("--ctx", "512", "--kv-type", "q8_0", "--threads", "3", "--budget", "1GiB")
    done = command("plan", *options, "--json")
    assert (done.status, done.err) == (0, "")
    document = done.document
    assert set(document) == {
        "model", "name", "file_type", "plan", "memory", "predicted_plain_tokens_per_s",
        "predicted_tokens_per_s", "speed_source", "alternatives", "kv_loss_nats",
        "predicted_plain_range", "predicted_range",
    }  # fmt: skip
    assert Path(document["model"]) == embedded_model()
    assert document["file_type"] == "Q4_1" and "135M" in document["name"]
    assert set(document["plan"]) == CHOICES
    for choice in document["plan"].values():
        assert set(choice) == {"value", "reason"} and choice["reason"]
    values = {name: choice["value"] for name, choice in document["plan"].items()}
    assert (values["context_size"], values["kv_type"], values["threads"]) == (512, "q8_0", 3)
    memory = document["memory"]
    assert set(memory) == {
        "predicted_peak_bytes", "predicted_gpu_bytes", "available_bytes", "limit_bytes",
        "components", "ceilings", "mapped", "devices",
    }  # fmt: skip
    assert memory["predicted_peak_bytes"] == sum(memory["components"].values())
    assert set(memory["components"]) == COMPONENTS
    # 30 layers x 3 heads x (64 + 64) numbers of 34/32 bytes for 512 tokens.
    assert memory["components"]["kv_cache"] == 30 * 3 * 128 * 34 // 32 * 512
    assert (memory["available_bytes"], memory["limit_bytes"]) == ((8 << 30) - (4 << 20), 1 << 30)
    assert memory["predicted_gpu_bytes"] == 0
    assert set(memory["ceilings"]) == COMPONENTS - EXACT
    assert document["predicted_tokens_per_s"] >= document["predicted_plain_tokens_per_s"] > 0
    assert document["speed_source"] == "estimated from memory bandwidth"
    for of in ("plain_", ""):
        low, high = document[f"predicted_{of}range"]
        assert low < document[f"predicted_{of}tokens_per_s"] < high
    for other in document["alternatives"]:
        assert set(other) == {"name", "options", "peak_bytes", "context_size", "tokens_per_s"}
    assert [other["name"] for other in document["alternatives"]] == ["smaller", "longer context"]


@pytest.mark.model
def test_plans_in_a_row_say_the_same_and_one_beside_a_busy_program_lies_in_their_range(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is known at first; the embedded model is smaller than the caches of many machines."""
    moved, busy = iter([20e9, 11e9, 23e9]), iter([0.0, 1.0, 0.0])
    monkeypatch.setattr(bandwidth, "_measure", lambda *_: next(moved))
    monkeypatch.setattr(neighbours.Neighbours, "share", lambda _self: next(busy))
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "first"))
    monkeypatch.setattr(host, "last_cache_bytes", lambda: 64 << 20)
    bandwidth._total_bytes.cache_clear()
    asked = ("plan", "--ctx", "512", "--threads", "1", "--json")
    names = ("predicted_tokens_per_s", "predicted_range", "speed_source")
    said = [[command(*asked).document[name] for name in names] for _ in range(5)]
    assert said == said[:1] * 5
    speed, (low, high), _ = said[0]
    for folder in ("busy", "quiet"):  # another cache, filled at another moment
        monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / folder))
        other, (least, most), _ = (command(*asked).document[name] for name in names)
        assert low < other < high and least < speed < most
    bandwidth._total_bytes.cache_clear()


RARE_SCRIPT = "\u1780\u17d2\u1798\u17c2\u179a " * 330  # its tokens are nearly as many as its bytes


@pytest.mark.model
def test_a_long_prompt_in_a_rare_script_is_planned_for(measured: str, tmp_path: Path) -> None:
    """Planned by halves of its bytes it did not fit."""
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(RARE_SCRIPT, encoding="utf-8")
    options = ("--max-tokens", "4", "--json")
    done = run("plan", "--file", str(prompt), *options, cache=measured)
    assert (done.status, done.err) == (0, "")
    with open_tokenizer(embedded_model()) as tokenizer:
        num_tokens = len(tokenizer.encode(RARE_SCRIPT))
    assert 4096 < num_tokens + 4 <= done.document["plan"]["context_size"]["value"]


@pytest.mark.model
@pytest.mark.long
def test_a_long_prompt_in_a_rare_script_has_room(measured: str, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(RARE_SCRIPT, encoding="utf-8")
    options = ("--raw", "--max-tokens", "4", "--json")
    done = run("run", "--file", str(prompt), *options, cache=measured)
    assert done.status == 0, done.err
    context = done.document["plan"]["context_size"]["value"]
    assert 4096 < done.document["prompt_tokens"] + 4 <= context


@pytest.mark.usefixtures("steady")
def test_what_does_not_fit_is_refused_with_a_file_that_does(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.memory.plan.machine.resident_bytes", lambda: 0)
    large = write_model(tmp_path / "large.gguf", "llama", F32, name="Random", width=256)
    write_model(tmp_path / "small.gguf", "llama", Q4_0, name="Random", width=256)
    options = ("--ctx", "512", "--draft-max", "0", "--kernels", "off")
    peaks = [
        command("plan", str(tmp_path / name), *options, "--json").document["memory"]
        for name in ("large.gguf", "small.gguf")
    ]
    budget = sum(one["predicted_peak_bytes"] for one in peaks) // 2
    done = command("plan", str(large), *options, "--budget", f"{budget >> 10}KiB")
    assert done.status == 1 and "small.gguf` (Q4_0) fits in" in " ".join(done.err.split())
