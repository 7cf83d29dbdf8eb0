"""What else is named where nothing fits: smaller files of the model, and one that can be made."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from laid_out import machine_with
from planning_cases import MIB, model
from random_gguf import F32, Q4_0, write_model

import edgespec
from edgespec.errors import DoesNotFitError
from edgespec.memory.plan.plan import Request
from edgespec.setup.planning import plan_or_say_what_fits

pytestmark = pytest.mark.usefixtures("quiet", "small_process")
OPTIONS: dict[str, Any] = {"context_size": 512, "draft_max": 0, "threads": 1, "kernels": "off"}


@pytest.fixture
def small_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process holds does not change from plan to plan."""
    monkeypatch.setattr("edgespec.memory.plan.machine.resident_bytes", lambda: 0)


def two_files(folder: Path) -> tuple[Path, Path, int]:
    """A file, a smaller one of the same model, and a budget that only the latter fits into."""
    large = write_model(folder / "large.gguf", "llama", F32, name="Random", width=256)
    small = write_model(folder / "small.gguf", "llama", Q4_0, name="Random", width=256)
    write_model(folder / "other.gguf", "llama", Q4_0, name="Another")
    (folder / "broken.gguf").write_bytes(b"GGUF")
    peaks = [edgespec.plan(path, **OPTIONS).predicted_peak_bytes for path in (large, small)]
    assert peaks[1] < peaks[0]
    return large, small, (peaks[0] + peaks[1]) // 2


def test_a_smaller_file_of_the_same_model_is_named(tmp_path: Path) -> None:
    large, small, budget = two_files(tmp_path)
    for call in (edgespec.plan, edgespec.load):
        with pytest.raises(DoesNotFitError) as caught:
            call(large, **OPTIONS, budget_bytes=budget)
        assert f"`{small}` (Q4_0) fits in" in caught.value.hint
        assert "other.gguf" not in caught.value.hint
    assert edgespec.plan(small, **OPTIONS, budget_bytes=budget).context_size == 512


def test_what_quantize_fit_would_make_is_named_where_types_get_so_small() -> None:
    """16 MiB are missing of 100 MiB of weights; 90 would be too many to leave out."""
    spec = model(layers=8, feed_forward=16384, kind="Q8_0")
    spec = replace(spec, file_bytes=spec.weight_bytes, path=Path("my models/a.gguf"))
    asked = Request(threads=1, context_size=512, draft_max=0, drafter="none", kernels="off")
    whole = plan_or_say_what_fits(spec, asked, machine_with(1 << 40)).predicted_peak_bytes
    missing = spec.weight_bytes // 6
    with pytest.raises(DoesNotFitError) as caught:
        plan_or_say_what_fits(spec, asked, machine_with(whole - missing))
    command = re.findall(r"`(edgespec quantize fit .*?)`", caught.value.hint)[0]
    *_, source, target, wanted = shlex.split(command)
    assert source == "my models/a.gguf" and target == f"a-{wanted}.gguf"
    size = int(wanted.removesuffix("MiB"))
    assert 0.9 * (spec.file_bytes - missing) < size * MIB <= spec.file_bytes - missing
    with pytest.raises(DoesNotFitError) as caught:
        plan_or_say_what_fits(spec, asked, machine_with(whole - 9 * spec.weight_bytes // 10))
    assert "quantize fit" not in caught.value.hint
