"""`edgespec models list`: what is here, and what it would do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import Command
from random_gguf import Q8_0, write_model

from edgespec.memory.bytes import simulation
from edgespec.memory.plan.plan import Plan
from edgespec.models import processes
from edgespec.models.processes import start_module
from edgespec.setup import planning


def test_the_list_says_how_fast_where_it_was_measured(
    at_home: Command, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = planning.make_run_plan
    monkeypatch.setenv("EDGESPEC_MODELS", str(home))
    write_model(home / "here.gguf", "llama", Q8_0)
    (home / "broken.gguf").write_bytes(b"<!doctype html>")

    def measured(*arguments: Any) -> Plan:
        source = "measured on 24 November 2026 with 50% of its threads, as other programs computed"
        return replace(made(*arguments), speed_source=source, tokens_per_s=42.4)

    for plan, speed in ((made, "-"), (measured, "42")):
        monkeypatch.setattr(planning, "make_run_plan", plan)
        lines = [line.split() for line in at_home("models", "list")[1].splitlines()]
        row = next(line for line in lines if line[0] == "~/here.gguf")
        assert row[1] == "Q8_0" and row[6] == speed
        broken = next(line for line in lines if line[0] == "~/broken.gguf")
        assert " ".join(broken[-8:]) == "- a web page, not a GGUF model"


def test_one_process_of_llama_cpp_answers_for_all_files(
    at_home: Command, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There was one for each: half a second of every file."""
    started = list[str]()

    def counted(module: str, *arguments: str, **options: Any) -> Any:
        started.append(module)
        return start_module(module, *arguments, **options)

    monkeypatch.setattr(processes, "start_module", counted)
    monkeypatch.setattr(simulation, "_simulator", simulation._Simulator())
    monkeypatch.setenv("EDGESPEC_MODELS", str(home))
    for arch in ("llama", "qwen2", "qwen3"):
        write_model(home / f"{arch}.gguf", arch, Q8_0)
    listed = at_home("models", "list")[1]
    assert all(f"~/{arch}.gguf" in listed for arch in ("llama", "qwen2", "qwen3"))
    assert len(started) == 1


def test_a_machine_without_models_says_how_to_get_one(
    at_home: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.models.hub.caches._embedded", lambda: iter(()))
    status, out, told = at_home("models", "list")
    assert (status, out) == (0, "")
    assert told == "no model is here; `edgespec models pull hf:OWNER/REPO` gets one\n"
