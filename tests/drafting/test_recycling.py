"""The recycling drafter: tables and proposals by hand, and all else against a slow drafter."""

from __future__ import annotations

import json
import math
import random
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.backends.base import DraftTree
from edgespec.drafting import recycling
from edgespec.drafting.proposal import EMPTY, Proposal, StepContext, TopTokens, VerifyResult
from edgespec.drafting.recycling import RecyclingDrafter
from edgespec.memory.times import CostCurve

quick = settings(max_examples=60)
Path = tuple[int, ...]
Rows = dict[tuple[int, ...], TopTokens]  # what the target says after these last tokens
LEAST = 0.02
CONTEXT = StepContext(31, LEAST, CostCurve([float("inf"), 1.0]), depth=0)


def paths_of(proposal: Proposal) -> list[Path]:
    """The tokens from below the root to each node."""
    paths: list[Path] = []
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def propose(
    drafter: RecyclingDrafter, base: Proposal = EMPTY, max_nodes: int = 31, least: float = LEAST
) -> Proposal:
    return drafter.propose(replace(CONTEXT, max_nodes=max_nodes, min_probability=least), base)


def table_of(proposal: Proposal) -> dict[Path, float]:
    return dict(zip(paths_of(proposal), proposal.probabilities, strict=True))


def learn(
    drafter: RecyclingDrafter,
    tokens: Sequence[int],
    rows: Sequence[TopTokens | None],
    emitted: Sequence[int],
    parents: Sequence[int] | None = None,
) -> None:
    """A round that verified these tokens, the root first, and saw these rows of them."""
    tree = DraftTree.chain(tokens) if parents is None else DraftTree(tokens, parents)
    drafter.observe(
        VerifyResult(tree, range(len(emitted)), emitted, CONTEXT, lambda node: rows[node])
    )


def drafter_of(text: Sequence[int], rows: dict[tuple[int, int], TopTokens]) -> RecyclingDrafter:
    """A drafter that has seen these rows after these pairs of tokens; `text` is written now."""
    drafter = RecyclingDrafter()
    for (before, last), row in rows.items():
        drafter.begin([before, last])
        learn(drafter, [last], [row], [0])
    drafter.begin(text)
    return drafter


# ------------------------------------------------------------------------------ tables


def test_a_table_gives_back_the_newest_row_of_a_key() -> None:
    table = recycling._Table()
    assert table.get(5) is None
    table.put(5, ([1, 2, 3], [0.5, 0.25, 0.25]))
    table.put(5, ([9], [1.0]))
    tokens, shares = table.get(5) or ((), ())
    assert list(tokens[:1]) == [9]
    assert list(shares) == [1.0] + [0.0] * 7


def test_a_row_is_cut_after_eight_tokens() -> None:
    table = recycling._Table()
    table.put(7, (range(20), [0.05] * 20))
    tokens, shares = table.get(7) or ((), ())
    assert list(tokens) == list(range(8)) and len(shares) == 8
    assert all(table.get(key) is None for key in (6, 8))


def test_a_later_key_of_the_same_slot_pushes_out_the_earlier_one() -> None:
    slot_of = recycling._Table._slot
    other = next(key for key in range(4, 1 << 20) if slot_of(key) == slot_of(3))
    table = recycling._Table()
    table.put(3, ([1], [1.0]))
    table.put(other, ([2], [1.0]))
    assert table.get(3) is None
    assert table.get(other) is not None


@pytest.mark.parametrize("first", [0, 151_000])
def test_keys_spread_over_the_slots(first: int) -> None:
    """5,000 tokens or pairs take more than nine in ten of the slots that they would by chance."""
    slot_of = recycling._Table._slot
    by_chance = 2**15 * (1 - (1 - 2**-15) ** 5000)
    tokens = range(first, first + 5000)
    for keys in (tokens, [before << 32 | 17 for before in tokens], [17 << 32 | t for t in tokens]):
        assert len({slot_of(key) for key in keys}) > 0.9 * by_chance


def test_the_tables_stay_below_their_ceiling() -> None:
    """Two tables of 32,768 slots of 72 bytes; also while they are made. 4 KiB are for headers."""
    drafter = RecyclingDrafter()
    assert drafter.nbytes == 2 * 32_768 * (8 + 8 * 4 + 8 * 4)
    tracemalloc.start()
    try:
        drafter.begin([1, 2])
        for token in range(3000):
            learn(drafter, [token], [([1, 2, 3], [0.5, 0.3, 0.2])], [token + 1])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= drafter.nbytes + 4096
    arrays = [a for t in drafter._tables for a in (t._keys, t._tokens, t._shares)]
    assert sum(array.itemsize * len(array) for array in arrays) == drafter.nbytes


# ------------------------------------------------------------------------------ by hand


def test_nothing_is_proposed_before_anything_was_seen() -> None:
    drafter = RecyclingDrafter()
    drafter.begin([1, 2, 3])
    assert len(propose(drafter)) == 0


def test_the_best_successors_follow_with_their_priors() -> None:
    """After 1 2 came 5, 6 or 7: ranks 0, 1 and 2 of the table of pairs."""
    drafter = drafter_of([1, 2], {(1, 2): ([5, 6, 7], [0.6, 0.3, 0.1])})
    proposal = propose(drafter)
    assert table_of(proposal) == pytest.approx({(5,): 0.3, (6,): 0.08, (7,): 0.04})
    assert list(proposal.parents) == [-1, -1, -1]
    assert not proposal.kept and not proposal.distributions and proposal.draft_ms == 0.0


def test_the_longer_key_is_asked_first() -> None:
    rows: dict[tuple[int, int], TopTokens] = {(1, 2): ([5], [1.0]), (3, 2): ([6], [1.0])}
    assert table_of(propose(drafter_of([1, 2], rows))) == pytest.approx({(5,): 0.3})
    assert table_of(propose(drafter_of([3, 2], rows))) == pytest.approx({(6,): 0.3})
    # After another token than 1 or 3 only the newest row of the token 2 is known.
    assert table_of(propose(drafter_of([8, 2], rows))) == pytest.approx({(6,): 0.18})


def test_a_draft_reads_on_into_itself() -> None:
    """2 -> 5 -> 2 -> 5 ...: by the pairs 1 2 and 2 5, then by the token 2, then by 2 5 again."""
    drafter = drafter_of([1, 2], {(1, 2): ([5], [1.0]), (2, 5): ([2], [1.0])})
    proposal = propose(drafter, least=0.001)
    assert list(proposal.tokens) == [5, 2, 5, 2]
    assert list(proposal.parents) == [-1, 0, 1, 2]
    steps = (0.3, 0.3, 0.18, 0.3)  # the next one would be of 0.18 and below 0.001
    assert list(proposal.probabilities) == pytest.approx(
        [math.prod(steps[:n]) for n in (1, 2, 3, 4)]
    )


def test_floor_and_size_bound_the_draft() -> None:
    drafter = drafter_of([1, 2], {(1, 2): (range(10, 18), [0.125] * 8)})
    sizes = [len(propose(drafter, least=least)) for least in (0.01, 0.03, 0.05, 0.2, 0.5)]
    assert sizes == [8, 3, 2, 1, 0]
    assert [len(propose(drafter, max_nodes=n, least=0.01)) for n in (0, 1, 5, 31)] == [0, 1, 5, 8]


def test_branches_hang_on_what_others_propose() -> None:
    """5 and 5 6 are proposed: beside 5 stands 7, below 5 6 comes 8; 5 itself is not recycled."""
    rows: dict[tuple[int, int], TopTokens] = {
        (1, 2): ([5, 7], [0.6, 0.4]),
        (5, 6): ([8], [1.0]),
    }
    base = Proposal([5, 6], [-1, 0], [0.8, 0.7])
    proposal = propose(drafter_of([1, 2], rows), base)
    assert list(proposal.tokens) == [5, 6, 8, 7]
    assert list(proposal.parents) == [-1, 0, 1, -1]
    assert list(proposal.probabilities) == pytest.approx([0.8, 0.7, 0.7 * 0.3, 0.08])


def test_no_branch_where_others_leave_nothing() -> None:
    rows: dict[tuple[int, int], TopTokens] = {(1, 2): ([7], [1.0])}
    base = Proposal([5], [-1], [0.99])
    assert paths_of(propose(drafter_of([1, 2], rows), base)) == [(5,)]
    base = Proposal([5], [-1], [0.97])
    assert paths_of(propose(drafter_of([1, 2], rows), base)) == [(5,), (7,)]


def test_how_sure_others_are_is_counted_apart() -> None:
    """Beside a sure sibling it is always wrong, alone it is always right."""
    rows: dict[tuple[int, int], TopTokens] = {(1, 2): ([7], [1.0])}
    drafter = drafter_of([1, 2], rows)
    sure = Proposal([5], [-1], [0.9])
    for _ in range(20):
        for base, emitted in ((sure, 5), (EMPTY, 7)):
            drafter.begin([1, 2])
            propose(drafter, base)
            learn(drafter, [2], [None], [emitted])
    drafter.begin([1, 2])
    alone, beside = propose(drafter), propose(drafter, sure, least=0.001)
    assert table_of(alone)[7,] > 0.6
    assert table_of(beside)[7,] < 0.2


def test_rows_of_rejected_nodes_are_learned_too() -> None:
    """Root 2 with the children 5 and 6, of which 6 is right: the row after 2 5 is kept as well."""
    drafter = RecyclingDrafter()
    drafter.begin([1, 2])
    rows: list[TopTokens | None] = [([6], [1.0]), ([8], [1.0]), ([9], [1.0])]
    learn(drafter, [2, 5, 6], rows, [6, 9], parents=(-1, 0, 0))
    for text, expected in (([1, 2], 6), ([2, 5], 8), ([2, 6], 9), ([0, 5], 8)):
        drafter.begin(text)
        assert propose(drafter, max_nodes=1).tokens == [expected]


def test_the_text_goes_on_with_what_was_emitted() -> None:
    drafter = drafter_of([1, 2], {(3, 4): ([5], [1.0]), (4, 6): ([7], [1.0])})
    learn(drafter, [2], [None], [3, 4])
    assert paths_of(propose(drafter)) == [(5,)]
    learn(drafter, [4], [None], [6])
    assert paths_of(propose(drafter)) == [(7,)]


def test_rows_that_nobody_looked_at_change_nothing() -> None:
    drafter = drafter_of([1, 2], {(1, 2): ([5], [1.0])})
    learn(drafter, [2, 5], [None, None], [5, 6])
    drafter.begin([1, 2])
    assert paths_of(propose(drafter)) == [(5,)]


def test_a_text_of_one_token() -> None:
    drafter = drafter_of([2], {(1, 2): ([5], [1.0])})
    assert table_of(propose(drafter)) == pytest.approx({(5,): 0.18})


def test_nodes_of_others_are_not_counted_as_its_own() -> None:
    drafter = drafter_of([1, 2], {(1, 2): ([7], [1.0])})
    propose(drafter, Proposal([5], [-1], [0.5]))
    learn(drafter, [2, 5], [None, None], [5, 1])
    assert list(drafter.state()["cells"].values()) == [[0.0, 1.0]]  # that of 7


def test_counts_survive_a_restart_and_rows_do_not() -> None:
    drafter = drafter_of([1, 2], {(1, 2): ([5], [1.0])})
    propose(drafter)
    learn(drafter, [2], [None], [5])
    fresh = RecyclingDrafter()
    fresh.load_state(json.loads(json.dumps(drafter.state())))
    assert fresh.state() == drafter.state() != RecyclingDrafter().state()
    fresh.begin([1, 2])
    assert len(propose(fresh)) == 0


@pytest.mark.parametrize("document", [None, {}, {"num_cells": 3}, {"cells": "?"}])
def test_a_state_that_is_of_no_use_is_ignored(document: dict[str, object] | None) -> None:
    drafter = RecyclingDrafter()
    drafter.load_state(document)
    assert drafter.state() == RecyclingDrafter().state()


# ------------------------------------------------------------------------ the slow, obvious drafter


class SlowDrafter:
    """What the module's docstring says, with dictionaries and all paths there are."""

    def __init__(self) -> None:
        self.calibration = recycling._new_calibration()
        self.rows: Rows = {}
        self.text: list[int] = []
        self.cells: dict[Path, int] = {}

    def begin(self, tokens: Sequence[int]) -> None:
        self.calibration.forget_recent()
        self.text, self.cells = [0, *tokens], {}

    def candidates(self, base: dict[Path, float], floor: float) -> dict[Path, float]:
        """All nodes whose path has a probability of at least `floor`."""
        found: dict[Path, float] = {}
        self.cells = {}
        self.expand((), 1.0, base, floor, found)
        return found

    def expand(
        self,
        path: Path,
        probability: float,
        base: dict[Path, float],
        floor: float,
        found: dict[Path, float],
    ) -> None:
        below = {other: p for other, p in base.items() if other[:-1] == path}
        here = {other: p for other, p in below.items() if p >= floor}
        taken = sum(below.values())
        if probability - taken >= floor:
            before, last = (*self.text, *path)[-2:]
            table = 0 if (before, last) in self.rows else 1
            tokens, shares = self.rows.get((before, last)) or self.rows.get((last,)) or ((), ())
            for rank, (token, share) in enumerate(zip(tokens, shares, strict=True)):
                child = (*path, token)
                if child in below:
                    continue
                cell = self.cell(table, rank, share, taken / probability)
                path_probability = probability * self.calibration.probability(cell)
                if path_probability >= floor:
                    here[child], self.cells[child] = path_probability, cell
        found |= here
        for path, p in here.items():
            self.expand(path, p, base, floor, found)

    @staticmethod
    def cell(table: int, rank: int, share: float, rival: float) -> int:
        def bucket(value: float, borders: Sequence[float]) -> int:
            return sum(value >= border for border in borders)

        shares = bucket(share, (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 0.98))
        rivals = bucket(rival, (0.01, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9))
        return ((table * 4 + min(rank, 3)) * 10 + shares) * 8 + rivals

    def observe(
        self,
        tree: DraftTree,
        rows: Sequence[TopTokens | None],
        emitted: Sequence[int],
        proposed: Sequence[Path],
    ) -> None:
        for path in sorted(proposed, key=len):
            depth = len(path) - 1
            is_judged = depth < len(emitted) and path[:depth] == tuple(emitted[:depth])
            if is_judged and path in self.cells:
                self.calibration.count(self.cells[path], path[depth] == emitted[depth])
        for node, row in enumerate(rows):
            if row is not None:
                path = tuple(tree.tokens[i] for i in tree.path(node)[1:])
                before, last = (*self.text, *path)[-2:]
                self.rows[before, last] = self.rows[last,] = row
        self.text += emitted


tokens = st.integers(1, 4)


@st.composite
def top_tokens(draw: st.DrawFn) -> TopTokens:
    ids = draw(st.lists(tokens, min_size=1, max_size=4, unique=True))
    weights = sorted((draw(st.integers(1, 20)) for _ in ids), reverse=True)
    # Powers of two are exact in the float32 of the tables.
    return ids, [weight / 32 for weight in weights]


@st.composite
def spines(draw: st.DrawFn) -> Proposal:
    """What another drafter proposes: a chain, likeliest first."""
    path = draw(st.lists(tokens, max_size=4))
    chances = [draw(st.sampled_from((0.1, 0.4, 0.7, 0.95))) for _ in path]
    probabilities, chance = [], 1.0
    for step in chances:
        chance *= step
        probabilities.append(chance)
    return Proposal(path, range(-1, len(path) - 1), probabilities)


@quick
@given(st.data())
def test_proposals_and_counts_are_those_of_the_slow_drafter(data: st.DataObject) -> None:
    """Round after round: the same nodes with the same probabilities, learning as they go."""
    fast, slow = RecyclingDrafter(), SlowDrafter()
    rng = random.Random(data.draw(st.integers(0, 1000)))
    fast.begin([1, 2])
    slow.begin([1, 2])
    root = 2
    for _ in range(data.draw(st.integers(1, 12))):
        base, max_nodes = data.draw(spines()), data.draw(st.sampled_from((1, 4, 12)))
        proposal = propose(fast, base, max_nodes)
        paths, expected = paths_of(proposal), slow.candidates(table_of(base), LEAST)
        assert len(set(paths)) == len(paths) == min(max_nodes, len(expected))
        assert [expected[path] for path in paths] == pytest.approx(list(proposal.probabilities))
        best = sorted(expected.values(), reverse=True)[: len(paths)]
        assert list(proposal.probabilities) == pytest.approx(best)
        assert all(parent < node for node, parent in enumerate(proposal.parents))
        size = rng.randrange(len(proposal) + 1)
        tree = DraftTree(
            (root, *proposal.tokens[:size]), [-1, *(p + 1 for p in proposal.parents[:size])]
        )
        rows = [data.draw(st.none() | top_tokens()) for _ in range(len(tree))]
        way = tree.path(rng.randrange(len(tree)))
        emitted = [*(tree.tokens[node] for node in way[1:]), rng.randrange(1, 5)]
        fast.observe(VerifyResult(tree, way, emitted, CONTEXT, rows.__getitem__))
        slow.observe(tree, rows, emitted, paths)
        root = emitted[-1]
    assert fast.state() == slow.calibration.as_json()


def test_tables_that_are_shared_are_those_of_one_history_each() -> None:
    """What one user's rows taught drafts for the other one, but under no other name."""
    first, second = RecyclingDrafter(), RecyclingDrafter()
    second.share_with(first)
    row: TopTokens = ((7, 8), (0.9, 0.1))
    for history in ("", "a", "b"):
        first.history = second.history = history
        first.begin([1, 2, 3])
        if history == "a":
            learn(first, [3], [row], [0])
        second.begin([2, 3])
        assert (7 in propose(second).tokens) == (history == "a")
    assert first._tables is second._tables and len(first._tables) == 2
