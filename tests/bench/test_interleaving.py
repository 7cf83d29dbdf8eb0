"""Contenders take turns with each prompt."""

from __future__ import annotations

import numpy as np
import pytest
from bench_cases import answer

from edgespec.bench.loaded_model import Answer, interleaved, order_of
from edgespec.decode.engine import Prompt
from edgespec.errors import ContextFullError


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
