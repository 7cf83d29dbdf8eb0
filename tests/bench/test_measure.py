"""Where answers part from those of the first drafter, and what is asked of a load because of it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
from bench_cases import answer
from planning_cases import SPEC

from edgespec.bench import measure
from edgespec.bench.loaded_model import Answer
from edgespec.bench.measure import (
    _answers,
    _ceiling,
    _compare,
    _keep_common,
    _rows,
    bench,
)
from edgespec.bench.summary import Prompted
from edgespec.errors import BackendError
from edgespec.measure.prompts import TaskPrompt
from edgespec.memory.plan.plan import Request

PROMPTS = [TaskPrompt("code", "a"), TaskPrompt("math", "b")]
SAME, OTHER = (1, 2, 3), (1, 2, 9)


class Told:
    """A worker that tells gaps by the prompt, and keeps what it was asked."""

    def __init__(self, **gaps: float) -> None:
        self.gaps, self.asked = gaps, list[str]()

    def call(self, what: str, *arguments: Any) -> float:
        self.asked.append(what)
        return self.gaps[arguments[0]] if what == "gap" else 0.5


def answers(*ids: tuple[int, ...]) -> Prompted:
    return Prompted([answer(1.0, 3, ids=one) for one in ids])


def compared(worker: Told, *variants: list[Prompted]) -> float:
    return _compare(worker, PROMPTS, variants)  # type: ignore[arg-type]


def test_nobody_is_asked_where_answers_are_the_same() -> None:
    """Repeats are held against each other: two answers of one drafter may differ."""
    plain = [answers(SAME, OTHER), answers(SAME, SAME)]
    drafted = [answers(SAME, OTHER), answers(SAME, SAME)]
    worker = Told()
    assert compared(worker, plain, drafted) == 0.0
    assert worker.asked == [] and [one.gap for one in drafted] == [None, None]


def test_the_widest_gap_of_a_prompt_counts_and_each_pair_is_asked_for_once() -> None:
    plain = [answers(SAME, SAME), answers(SAME, SAME)]
    drafted = [answers(SAME, SAME), answers(OTHER, OTHER)]
    worker = Told(b=0.25)
    assert compared(worker, plain, drafted) == 0.5
    assert worker.asked == ["gap", "noise"]
    assert [one.gap for one in drafted] == [None, 0.25]
    assert [one.gap for one in plain] == [None, None]


def test_every_answer_has_a_row_that_says_whose_it_is() -> None:
    plain, drafted = [answers(SAME, SAME)] * 2, [answers(SAME, SAME), answers(SAME, OTHER)]
    drafted[1].gap = 0.25
    rows = _rows(PROMPTS, ["plain --ctx 512", "suffix --ctx 512"], [plain, drafted])
    shown = [(row["prompt"], row["variant"], row["repeat"], row["identical"]) for row in rows]
    assert shown == [
        (1, "plain --ctx 512", 1, True),
        (1, "plain --ctx 512", 2, True),
        (1, "suffix --ctx 512", 1, True),
        (1, "suffix --ctx 512", 2, True),
        (2, "plain --ctx 512", 1, True),
        (2, "plain --ctx 512", 2, True),
        (2, "suffix --ctx 512", 1, False),
        (2, "suffix --ctx 512", 2, False),
    ]
    assert (rows[0]["task"], rows[0]["generated_tokens"], rows[0]["tokens_per_s"]) == ("code", 4, 3)


@pytest.mark.parametrize(
    ("plain", "ceiling"), [(None, 10.0), (0.0, 10.0), (9.0, 10.0), (20.6, 20.6)]
)
def test_plain_decoding_is_never_above_its_ceiling(plain: float | None, ceiling: float) -> None:
    """Memory was measured to move ten times the weights in a second, beside other programs."""
    nbytes = SPEC.bytes_per_token
    found = _ceiling(SPEC, 10.0 * nbytes, plain)
    assert found["tokens_per_s"] == pytest.approx(ceiling)
    assert found["memory_bytes_per_s"] == pytest.approx(ceiling * nbytes)
    assert found.get("plain_tokens_per_s") == plain


class Answering:
    """A contender that answers at once."""

    def __init__(self, name: str) -> None:
        self.name = name

    def renew(self) -> None:
        pass

    def answer(self, _prompt: str, _max_tokens: int) -> Answer:
        return answer(1.0, 3)


@pytest.mark.parametrize(
    ("ended", "prompts", "repeats"), [(1, 0, 0), (2, 1, 1), (3, 1, 1), (5, 2, 1), (7, 2, 1)]
)
def test_what_all_have_answered_before_an_interruption_counts(
    ended: int, prompts: int, repeats: int
) -> None:
    """Two prompts, twice, by two contenders: eight answers, of which some were given."""
    told = list[float]()

    def progress(_what: str, part: float) -> None:
        told.append(part)
        if len(told) == ended:
            raise KeyboardInterrupt

    both = [Answering("plain"), Answering("suffix")]
    taken = _answers(both, PROMPTS, 16, 2, progress, None)  # type: ignore[arg-type]
    assert sum(len(one.answers) for ours in taken for one in ours) == ended
    assert _keep_common(PROMPTS, taken) == PROMPTS[:prompts]
    assert [[len(one.answers) for one in ours] for ours in taken] == 2 * [prompts * [repeats]]


def test_idle_power_is_measured_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Mock()
    meter.load.side_effect = BackendError("a tensor is missing")
    monkeypatch.setattr(measure, "energy_meter", lambda: nullcontext((meter, None)))
    monkeypatch.setattr(measure, "measured_bandwidth", lambda: None)
    monkeypatch.setattr(measure, "Worker", meter.load)
    with pytest.raises(BackendError, match="missing"):
        bench(SPEC, [("", Request())], ["none"], PROMPTS, max_tokens=1)
    assert [one[0] for one in meter.mock_calls] == ["measure_idle", "load"]
