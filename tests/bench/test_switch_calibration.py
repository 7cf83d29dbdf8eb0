"""Thresholds for two models, found on texts of this device."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_backend import FakeBackend
from numpy.typing import NDArray
from random_gguf import Q8_0, write_model
from switching_cases import Pair, request_for, written_pair

from edgespec.bench import switch_calibration
from edgespec.bench.switch_calibration import calibrate
from edgespec.decode.engine import Engine
from edgespec.errors import UnsupportedError
from edgespec.measure.prompts import PROMPTS
from edgespec.memory.plan.plan import Request
from edgespec.memory.times import CostCurve
from edgespec.models.spec import read_model_spec
from edgespec.setup.planning import make_run_plan
from edgespec.switching.engine import SwitchingEngine
from edgespec.switching.planning import SwitchPolicy, stored_switch


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return written_pair(tmp_path)


def test_calibrating_meets_the_wish_and_keeps_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables in place of models: the small one is the large one with noise."""
    random = np.random.default_rng(0)
    table = random.normal(0.0, 2.0, (256, 256))
    noisy = table + random.normal(0.0, 0.7, (256, 256))

    def fake(rows: NDArray[np.float64], step_ms: float) -> dict[str, Any]:
        listed = rows.tolist()
        curve = CostCurve([math.inf, *(step_ms * (1 + 0.1 * n) for n in range(16))])
        backend = FakeBackend(lambda context: listed[context[-1]], 256, max_nodes=16)
        return {"backend": backend, "curve": curve}

    def load(*_: object, **__: object) -> SwitchingEngine:
        small = Engine(**fake(noisy, 2.0))
        return SwitchingEngine(**fake(table, 10.0), small=small, policy=SwitchPolicy())

    monkeypatch.setattr(switch_calibration, "load_plan", load)
    monkeypatch.setattr(switch_calibration, "_MOST_TOKENS", 40)
    found = calibrate(pair[0], request_for(pair), large_share=0.4)
    assert found["expected"]["large_share"] == pytest.approx(0.4, abs=0.05)
    assert found["expected"]["quality"] > 0.4
    kept = stored_switch(*pair)
    assert kept is not None
    assert kept.policy.as_json() == found["policy"]
    assert kept.large_share == found["expected"]["large_share"]
    assert 0.0 < kept.drafted[0] < kept.drafted[-1] < 8.0
    json.dumps(found, allow_nan=False)  # numbers that every reader of JSON knows
    shares = [point["large_share"] for point in found["points"]]
    assert shares == sorted(shares) and (shares[0], shares[-1]) == (0.0, 1.0)
    better = calibrate(pair[0], request_for(pair), quality=0.9)
    assert better["expected"]["quality"] >= 0.9
    with pytest.raises(UnsupportedError, match="not between 0 and 1"):
        calibrate(pair[0], request_for(pair), quality=1.5)


def test_a_text_of_several_steps_is_read_behind_what_was_read_before() -> None:
    """Rows of a model that counts what it has seen."""
    backend = FakeBackend(lambda context: np.arange(64) == len(context), 64, max_nodes=3)
    rows = switch_calibration.forced_rows(backend, [1, 2], [3, 4, 5, 6, 7])
    assert [int(np.argmax(row)) for row in rows] == [2, 3, 4, 5, 6]


@pytest.mark.model
def test_calibrating_a_model_with_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything agrees, so any threshold has the full quality."""
    monkeypatch.setattr(switch_calibration, "_MOST_TOKENS", 12)
    monkeypatch.setattr(switch_calibration, "_LEAST_TOKENS", 12)
    monkeypatch.setattr(switch_calibration, "PROMPTS", PROMPTS[:4])
    path = write_model(tmp_path / "random.gguf", "llama", Q8_0, reads_bytes=True)
    spec = read_model_spec(path)
    asked = Request(switch=spec.path, context_size=4096, threads=1, backend="llamacpp")
    found = calibrate(spec, asked, large_share=0.5)
    assert found["expected"]["large_share"] == pytest.approx(0.5, abs=0.15)
    assert found["expected"]["agreement"] == found["alone"]["small"]["agreement"] == 1.0
    assert [found["points"][i]["large_share"] for i in (0, -1)] == [0.0, 1.0]
    assert stored_switch(spec, spec) is not None
    reason = make_run_plan(spec, asked).as_json()["switch"]["reason"]
    assert "tokens/s predicted" in reason
