"""Plans of whole runs, with what was measured earlier."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from laid_out import sizes_by_hand
from planning_cases import CELL, INF, MIB, PLENTY, SPEC, plan_of

from edgespec.errors import DoesNotFitError
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.device import accelerators, host
from edgespec.memory.plan.machine import this_machine
from edgespec.memory.plan.plan import Request
from edgespec.memory.store import cache
from edgespec.memory.times import CostCurve
from edgespec.setup.planning import make_run_plan, speed_model
from edgespec.setup.stored import settings_key


@pytest.mark.usefixtures("quiet")
def test_the_drafters_tables_are_part_of_the_plan() -> None:
    """1.5 MiB of texts and an eighth for growing, and three tables of 65,536 entries of 4 bytes.

    All users have the same.
    """
    tables = (3 << 19) * 9 // 8 + 3 * 4 * 65_536
    for users in (1, 4):
        found = make_run_plan(SPEC, Request(users=users), PLENTY).component_bytes
        assert found["drafter_tables"] == tables
    plain = make_run_plan(SPEC, Request(drafter="none"), PLENTY)
    assert "drafter_tables" not in plain.component_bytes


@pytest.mark.usefixtures("quiet")
def test_free_memory_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which 4 MiB are left to whatever changes until a plan is loaded."""
    monkeypatch.setattr(host, "available_bytes", lambda: 24 * MIB)
    monkeypatch.setattr(accelerators, "accelerators", lambda: ())
    with pytest.raises(DoesNotFitError, match="free: 20 MiB"):
        make_run_plan(SPEC, Request(), replace(this_machine(), sizes=sizes_by_hand))


SETTINGS = RunConfig(512, threads=2, kv_type_k="f16", drafter="suffix")


@pytest.mark.usefixtures("quiet")
def test_a_small_budget_does_not_bind_a_later_one() -> None:
    """What an earlier plan had no room for is tried again where the measured sizes are cheap."""
    request = Request(threads=2, budget_bytes=2 << 30)
    times = {"flat": [4.0, 4.2, 4.4, 4.6], "steep": [4.0, 8.0, 12.0, 16.0]}
    drafts = {}
    for name, base in times.items():
        cache.store("curves", settings_key(SPEC, SETTINGS), CostCurve([INF, *base]).as_json())
        drafts[name] = make_run_plan(SPEC, request, PLENTY).draft_max
    assert drafts["flat"] > 3 >= drafts["steep"]


@pytest.mark.usefixtures("quiet")
def test_blanks_in_a_list_of_drafters_do_not_count() -> None:
    plan = make_run_plan(SPEC, Request(drafter=" suffix, recycling"), PLENTY)
    assert plan.drafter == "suffix,recycling"


@pytest.mark.usefixtures("quiet")
def test_speed_is_estimated_from_bandwidth_until_it_is_measured() -> None:
    """2.0 MiB at 20 GB/s are 0.107 ms a token; then the stored curve's 4 ms."""
    estimate = speed_model(SPEC, SETTINGS)
    assert not estimate.is_measured
    assert estimate.tokens_per_s(0, 0) == pytest.approx(20e9 / SPEC.weight_bytes)
    cache.store("curves", settings_key(SPEC, SETTINGS), CostCurve([INF, 4.0, 5.0]).as_json())
    assert speed_model(SPEC, SETTINGS).is_measured
    assert speed_model(SPEC, SETTINGS).tokens_per_s(0, 0) == pytest.approx(250.0)
    assert make_run_plan(SPEC, Request(threads=2), PLENTY).plain_tokens_per_s == pytest.approx(
        250.0
    )


@pytest.mark.usefixtures("quiet")
def test_an_exact_run_knows_the_largest_step_that_rounds_alike() -> None:
    """Measured by an earlier run under the settings of exact runs."""
    request = Request(threads=2, exact=True)
    assert make_run_plan(SPEC, request, PLENTY).draft_max == 31
    exact = RunConfig(512, threads=2, kv_type_k="bf16", drafter="suffix")
    cache.store("invariance", settings_key(SPEC, exact), {"steps": [[32, 704, 8]]})
    assert make_run_plan(SPEC, request, PLENTY).draft_max == 7
    assert make_run_plan(SPEC, Request(threads=2), PLENTY).draft_max == 31
    for damaged in ([32, 704, "eight"], [8, 704, 8], [32, None, 8], [32, 8], {"tried": 32}):
        cache.store("invariance", settings_key(SPEC, exact), {"steps": [damaged]})
        assert make_run_plan(SPEC, request, PLENTY).draft_max == 31, "no limit is known"


def test_planning_imports_no_inference_library_and_no_numpy() -> None:
    code = (
        "import sys, edgespec.setup.planning; "
        "print(sorted({'numpy', 'llama_cpp', 'onnxruntime', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_cache_of_a_plan_is_that_of_the_footprint() -> None:
    plan = plan_of(context_size=1000, exact=True)
    assert plan.component_bytes["kv_cache"] == 1024 * CELL
