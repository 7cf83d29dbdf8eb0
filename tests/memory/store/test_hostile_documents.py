"""Documents of the cache that are damaged or made up: they are ignored, and nothing else breaks."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
from fake_backend import FakeBackend
from frozen_times import Frozen, free_drafts
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.decode.engine import Engine
from edgespec.decode.generation import LARGE, SMALL
from edgespec.drafting.combined import CombinedDrafter, RoundHistory
from edgespec.drafting.model import ModelDrafter
from edgespec.drafting.proposal import Calibration
from edgespec.drafting.recycling import RecyclingDrafter
from edgespec.drafting.suffix import SuffixDrafter
from edgespec.errors import UnsupportedError
from edgespec.memory.times import CostCurve, SpeedModel
from edgespec.switching.planning import Calibrated, SwitchPolicy, read_calibrated, switch_reason

INF = math.inf
V = 8
quick = settings(max_examples=100)

numbers = st.sampled_from(
    [0, -1, 1, 7, 2**31, 2**63, 10**400, -(10**400), 0.5, -0.5, 1e9, 1e308, INF, -INF, math.nan]
)
leaves = st.none() | st.booleans() | numbers | st.floats() | st.integers() | st.text(max_size=4)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=3) | st.sampled_from(["0", "-1", "7"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to each part of a document, itself included."""
    inner: list[tuple[Any, Any]] = []
    if isinstance(document, dict):
        inner = list(document.items())
    elif isinstance(document, list):
        inner = list(enumerate(document))
    return [path, *(place for key, part in inner for place in places(part, (*path, key)))]


def damaged(document: Any, data: st.DataObject) -> Any:
    """One or two parts of it are something else, or gone."""
    document = copy.deepcopy(document)
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from(places(document)))
        if not place:
            return data.draw(values)
        *way, last = place
        holder = document
        for key in way:
            holder = holder[key]
        if data.draw(st.booleans()):
            holder[last] = data.draw(values)
        else:
            del holder[last]
    return document


# ------------------------------------------------------------------------------ drafters


def rows(context: tuple[int, ...]) -> list[float]:
    return [9.0 if token == (3 * context[-1] + 1) % 5 else 0.1 * token for token in range(V)]


def engine_of(drafter: CombinedDrafter) -> Engine:
    return Engine(FakeBackend(rows, V), curve=free_drafts(16), drafter=drafter)


def all_drafters() -> CombinedDrafter:
    model = ModelDrafter(FakeBackend(rows, V), Frozen([INF, *[0.01] * 16]), V)
    return CombinedDrafter([SuffixDrafter(), RecyclingDrafter(), model])


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    drafter = all_drafters()
    for _ in range(3):
        engine_of(drafter).generate([1, 2, 1, 2], max_tokens=40)
    kept: dict[str, Any] = json.loads(json.dumps(drafter.state()))
    assert kept["suffix"]["cells"] and kept["model"]["cells"]
    return kept


@settings(max_examples=250)  # it is seldom a whole drafter's part that is damaged
@given(data=st.data())
def test_drafters(state: dict[str, Any], data: st.DataObject) -> None:
    """Whatever is loaded, answers are right and what is kept then can be loaded again."""
    document = damaged(state, data)
    if not isinstance(document, dict):  # `cache.load` gives nothing else
        return
    drafter = all_drafters()
    drafter.load_state(document)
    result = engine_of(drafter).generate([1, 2, 1, 2], max_tokens=12)
    plain = engine_of(drafter).generate([1, 2, 1, 2], max_tokens=12, speculate=False)
    assert result.token_ids == plain.token_ids
    kept = json.loads(json.dumps(drafter.state(), allow_nan=False))
    again = all_drafters()
    again.load_state(kept)
    assert again.state()["suffix"] == kept["suffix"]


@pytest.mark.parametrize(
    "cells",
    [
        {"0": [0, 5e-324]},
        {"0": [0.0, 0.0004], "2": [1, 2]},
        {"0": [7, 8000], "00": [7, 8000]},
        {"1": [1, 5000], "+1": [1, 5000]},
    ],
)
def test_what_was_loaded_is_kept_as_it_is_loaded(cells: dict[str, Any]) -> None:
    """Nothing is stored of tries that round to none, nor more than is read."""
    tables = [Calibration(3, groups=(0, 0, 1), recents=(0, 1, 1), priors=(0.5, 0.2)) for _ in "ab"]
    tables[0].load_json({"num_cells": 3, "cells": cells})
    tables[1].load_json(tables[0].as_json())
    assert tables[1].as_json() == tables[0].as_json()


@quick
@given(data=st.data())
def test_calibration(data: st.DataObject) -> None:
    fresh = Calibration(3, groups=(0, 0, 1), recents=(0, 1, 1), priors=(0.5, 0.2))
    document = {"num_cells": 3, "cells": {"0": [1, 2], "2": [3.5, 4000.0]}}
    fresh.load_json(damaged(document, data))
    for _ in range(2):
        assert all(0.0 <= fresh.probability(cell) <= 1.0 for cell in range(3))
        assert all(0.0 <= fresh.group_probability(group) <= 1.0 for group in range(2))
        fresh.count(2, True)


# ------------------------------------------------------------------------------ times and rounds


CURVE = CostCurve([INF, 5.0, 6.0, INF, 8.0], 0.001, 0.0001, 0.5, 1.1)


@quick
@given(data=st.data())
def test_curves(data: st.DataObject) -> None:
    try:
        curve = CostCurve.from_json(damaged(CURVE.as_json(), data))
    except (KeyError, TypeError, ValueError):
        return
    for nodes in range(1, len(curve.base) + 2):
        assert curve.step_ms(nodes, 100) > 0.0
        assert 0.0 < curve.estimated_ms(nodes, 100) < INF
    assert 0.0 < SpeedModel(curve, is_measured=True).tokens_per_s(7, 100) < INF
    json.dumps(curve.as_json(), allow_nan=False)


@quick
@given(data=st.data())
def test_round_histories(data: st.DataObject) -> None:
    document = damaged([[1, 1, 3.0], [4, 2, 1.0], [8, 8, 2.5]], data)
    history = RoundHistory.from_json(document)
    history.observe(4, 3)
    speed = SpeedModel(CURVE, True, tuple(history.rounds())).tokens_per_s(7, 0)
    assert 0.0 < speed < INF
    json.dumps(history.rounds(), allow_nan=False)


# ------------------------------------------------------------------------------ pairs


PAIR = {
    "policy": SwitchPolicy().as_json(),
    "large_share": 0.3,
    "quality": 0.5,
    "turns": [[[SMALL, 4], [LARGE, 2], [SMALL, 0], [LARGE, 3]], [[LARGE, 1], [SMALL, 5]]],
    "drafted": [0.7, 1.2],
}


@quick
@given(data=st.data())
def test_what_was_calibrated_of_a_pair(data: st.DataObject) -> None:
    found: Calibrated | None = read_calibrated(damaged(PAIR, data))
    why, speed = switch_reason(found, {LARGE: CURVE, SMALL: CURVE.scaled(0.2)}, 300, alone=10.0)
    assert 0.0 <= speed < INF
    assert not any(word in why for word in ("nan", "inf ", "inf,"))


@quick
@given(data=st.data())
def test_policies(data: st.DataObject) -> None:
    document = damaged(SwitchPolicy().as_json(), data)
    if not isinstance(document, dict):
        return
    try:
        policy = SwitchPolicy.from_json(document)
    except (TypeError, UnsupportedError):
        return
    json.dumps(policy.as_json(), allow_nan=False)
