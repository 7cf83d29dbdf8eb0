"""Drafts of a head: what of the text it has read, and when reading prompts pays."""

from __future__ import annotations

from typing import Any

import numpy as np
from draft_model_cases import ONE_HOT, V, context_of, counting, curve_of, paths_of

from edgespec.backends.base import Logits
from edgespec.drafting.model import HeadDrafter, HeadText


class Counting:
    """A head that says the next number, whatever its model's states are."""

    context_size, reads_prompts, block, token_ids = 64, False, 0, None

    def __init__(self) -> None:
        self.num_unread = 0
        self.began: list[int] = []

    def begin(self, token: int) -> Logits:
        self.began.append(token)
        return self.go_on(token)

    def go_on(self, token: int) -> Logits:
        return np.array(counting((token,)), np.float32)

    def memory_bytes(self) -> dict[str, int]:
        return {"head_compute": 7}

    def close(self) -> None: ...


def drafter_of(head: Any, *ms: float) -> HeadDrafter:
    return HeadDrafter(HeadText(head), curve_of(*(ms or (0.01,) * 16)), V)


def test_a_head_begins_with_the_last_token_and_goes_on_with_its_own() -> None:
    assert ONE_HOT[1] == counting((0,))
    head = Counting()
    drafter = drafter_of(head)
    drafter.begin([5, 1, 2])
    proposal = drafter.propose(context_of(max_nodes=3, branches=False))
    assert max(paths_of(proposal), key=len) == (3, 4, 5)
    assert head.began == [2]


def test_a_text_is_behind_by_what_the_head_has_not_read() -> None:
    head = Counting()
    text = HeadText(head)
    text.begin([1, 2])
    text.append((3, 4))
    head.num_unread = 5
    assert (text.tokens, text.num_missing) == ([1, 2, 3, 4], 6)
    text.begin([0] * (head.context_size - 16))
    assert text.can_be_read
    text.append((1,))  # now there is no room for sixteen drafts
    assert not text.can_be_read


def test_a_prompt_is_read_along_where_that_pays() -> None:
    """Reading 512 tokens takes 512 / 16 steps of 4 ms."""
    head = Counting()
    drafter = drafter_of(head, *[4.0] * 16)
    assert drafter.reading_ms() == 128.0
    for pays in (False, True, False):
        assert not head.reads_prompts or not pays
        drafter.can_read_prompts(pays=pays)
        assert head.reads_prompts is pays


def test_a_block_costs_one_step_however_many_of_it_are_drafted() -> None:
    """Steps so dear that no second one pays; of a block all rows are there after the first."""
    found = []
    for block in (0, 7):
        head = Counting()
        head.block = block
        drafter = drafter_of(head, *(30.0,) * 16)
        drafter.begin([5, 1, 2])
        found.append(len(drafter.propose(context_of(max_nodes=15, branches=False)).tokens))
    assert found == [1, 7]
