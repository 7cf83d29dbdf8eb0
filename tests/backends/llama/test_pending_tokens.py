"""Tokens that wait for a head: against a list of all that came."""

from __future__ import annotations

import random

import numpy as np

from edgespec.backends.llama.following import PendingTokens

MOST, WIDTH = 5, 2


def add(unread: PendingTokens, tokens: list[int]) -> None:
    """Tokens whose rows say which they are."""
    at = 0
    for rows in unread.places(len(tokens)):
        rows[:] = np.array(tokens[at : at + len(rows)])[:, None]
        at += len(rows)
    unread.tokens += tokens


def test_rows_stay_with_their_tokens() -> None:
    rng, unread, waiting, count = random.Random(5), PendingTokens(MOST, WIDTH), list[int](), 0
    for _ in range(2000):
        size = rng.randrange(1, MOST + 1)
        new = list(range(count, count + size))
        too_many = max(0, len(waiting) + size - MOST)
        unread.leave(too_many)
        add(unread, new)
        waiting, count = [*waiting[too_many:], *new], count + size
        if rng.random() < 0.2:
            length = rng.randrange(len(waiting) + 1)
            unread.cut(length)
            del waiting[length:]
        assert unread.tokens == waiting
        assert unread.rows(len(waiting)).tolist() == [[token] * WIDTH for token in waiting]
        [beside] = unread.places(1)
        beside[:] = -1.0
        assert unread.rows(len(waiting) + 1).tolist()[-1] == [-1.0] * WIDTH
