"""Token recycling: what the target would have said after these tokens before, and what else.

Each verified row of logits is knowledge that plain decoding throws away. Its best tokens are kept
in two tables, by the last two tokens and by the last one; the newest row of a key wins. A draft is
grown from them best path first, as DySpec does (arXiv 2410.11744), and hangs side branches onto
what other drafters propose (a main chain with branches: GOOSE, arXiv 2604.02047). Unlike the
original (arXiv 2408.08696) the tree is not fixed: a node's probability is counted over

    which table x rank in its row x share of the row x how sure other drafters are of its siblings

so that trees are as wide as the target's step-time curve is flat, and no wider.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_right
from collections.abc import Sequence

from edgespec.drafting.constants import RECYCLED_BORDERS, RECYCLED_GUESSES, RIVAL_BORDERS, WIDTH
from edgespec.drafting.proposal import (
    EMPTY,
    Calibration,
    CountingDrafter,
    Proposal,
    StepContext,
    TopTokens,
    VerifyResult,
)
from edgespec.memory.store.texts import KeptText

_SLOT_BITS = 15

# Cells of the calibration. A value lands in the bucket of the last border it reaches.
_NUM_RANKS = 4  # the last one stands for all that follow
_NUM_SHARES = len(RECYCLED_BORDERS) + 1
_NUM_RIVALS = len(RIVAL_BORDERS) + 1

# Path probability (negative: heaps are smallest first), token, cell or -1 for a node of the base,
# that node or -1, parent, and the token before.
_Candidate = tuple[float, int, int, int, int, int]


def _new_calibration() -> Calibration:
    """Cells are numbered ((table * ranks + rank) * shares + share) * rivals + rival."""
    cells = range(len(RECYCLED_GUESSES) * _NUM_RANKS * _NUM_SHARES * _NUM_RIVALS)
    groups = [cell // (_NUM_SHARES * _NUM_RIVALS) for cell in cells]
    recents = [group // _NUM_RANKS for group in groups]
    return Calibration(len(cells), groups, recents, [p for row in RECYCLED_GUESSES for p in row])


class _Table:
    """The newest top tokens by key, in a fixed number of slots: a later key pushes out another."""

    nbytes = (8 + 8 * WIDTH) << _SLOT_BITS

    def __init__(self) -> None:
        self._keys = array("q", [-1]) * (1 << _SLOT_BITS)
        self._tokens = array("i", [0]) * (WIDTH << _SLOT_BITS)
        self._shares = array("f", [0.0]) * (WIDTH << _SLOT_BITS)

    def get(self, key: int) -> TopTokens | None:
        slot = self._slot(key)
        if self._keys[slot] != key:
            return None
        row = slice(slot * WIDTH, (slot + 1) * WIDTH)
        return self._tokens[row], self._shares[row]

    def put(self, key: int, top_tokens: TopTokens) -> None:
        tokens, shares = top_tokens
        slot = self._slot(key)
        self._keys[slot] = key
        start, count = slot * WIDTH, min(len(tokens), WIDTH)
        self._tokens[start : start + count] = array("i", tokens[:count])
        self._shares[start : start + count] = array("f", shares[:count])
        for place in range(start + count, start + WIDTH):
            self._shares[place] = 0.0

    @staticmethod
    def _slot(key: int) -> int:
        # 2^64 / golden ratio, the usual multiplicative hash.
        return (key * 0x9E3779B97F4A7C15 >> 40) & ((1 << _SLOT_BITS) - 1)


class RecyclingDrafter(CountingDrafter):
    """Drafts from the target's own second thoughts; learns across texts of this process."""

    name = "recycling"

    @property
    def nbytes(self) -> int:
        return 2 * _Table.nbytes

    def __init__(self) -> None:
        super().__init__(_new_calibration())
        self._salt = 0  # in the keys of a history's rows
        self._tables: list[_Table] = []  # made when the first text begins; all users'
        self._last = (0, 0)

    def begin(self, tokens: Sequence[int]) -> None:
        """Start a new text; what was learned from others of its history stays."""
        super().begin(tokens)
        self._open(self.history)
        self._last = (tokens[-2] if len(tokens) > 1 else 0, tokens[-1])

    def _open(self, history: str) -> None:
        if not self._tables:
            self._tables += (_Table(), _Table())
        self._salt = hash(history) & ((1 << 63) - 1) if history else 0  # keys are not negative

    def recall(self, texts: Sequence[KeptText]) -> None:
        """Learn from texts of earlier runs, of which only the tokens are known."""
        for history, text in texts:
            self._open(history)
            for before, last, token in zip(text, text[1:], text[2:], strict=False):
                self._learn(before, last, ((token,), (1.0,)))

    # -- proposing -------------------------------------------------------------------------

    def propose(self, context: StepContext, base: Proposal = EMPTY) -> Proposal:
        """The most probable continuations, and nodes of `base` where branches hang below them."""
        floor = context.min_probability
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(base.parents):
            children.setdefault(parent, []).append(node)
        tokens: list[int] = []
        parents: list[int] = []
        probabilities: list[float] = []
        cells: list[int] = []
        heap = self._children(self._last, 1.0, -1, children.get(-1, ()), base, floor)
        heapq.heapify(heap)
        while heap and len(tokens) < context.max_nodes:
            negative, token, cell, base_node, parent, before = heapq.heappop(heap)
            node = len(tokens)
            tokens.append(token)
            parents.append(parent)
            probabilities.append(-negative)
            cells.append(cell)
            below = children.get(base_node, ()) if base_node >= 0 else ()
            for child in self._children((before, token), -negative, node, below, base, floor):
                heapq.heappush(heap, child)
        self._proposal, self._cells = Proposal(tokens, parents, probabilities), cells
        return self._proposal

    def _children(
        self,
        context: tuple[int, int],
        probability: float,
        parent: int,
        below: Sequence[int],
        base: Proposal,
        floor: float,
    ) -> list[_Candidate]:
        """Candidates after `context`, whose path has `probability`: `below` are those of `base`."""
        last = context[1]
        found: list[_Candidate] = []
        taken = 0.0
        for node in below:
            taken += base.probabilities[node]
            if base.probabilities[node] >= floor:
                found.append((-base.probabilities[node], base.tokens[node], -1, node, parent, last))
        if probability - taken < floor:
            return found
        known = {base.tokens[node] for node in below}
        table, row = self._row(context)
        rival = bisect_right(RIVAL_BORDERS, taken / probability)
        for rank, (token, share) in enumerate(zip(*row, strict=True)):
            if share == 0.0:
                break
            if token in known:
                continue
            place = table * _NUM_RANKS + min(rank, _NUM_RANKS - 1)
            cell = place * _NUM_SHARES + bisect_right(RECYCLED_BORDERS, share)
            cell = cell * _NUM_RIVALS + rival
            path = probability * self._calibration.probability(cell)
            if path >= floor:
                found.append((-path, token, cell, -1, parent, last))
        return found

    def _row(self, context: tuple[int, int]) -> tuple[int, TopTokens]:
        """What is known to follow, by the longer key where it was seen, and from which table."""
        before, last = context
        row = self._tables[0].get(self._salt ^ (before << 32 | last))
        if row is not None:
            return 0, row
        return 1, self._tables[1].get(self._salt ^ last) or ((), ())

    # -- learning --------------------------------------------------------------------------

    def observe(self, result: VerifyResult) -> None:
        """Count hits, and learn from all rows of the step, those of rejected nodes included."""
        super().observe(result)
        tree = result.tree
        for node, token in enumerate(tree.tokens):
            row = result.top_tokens(node)
            if row is None:
                continue
            before = tree.tokens[tree.parents[node]] if node else self._last[0]
            self._learn(before, token, row)
        before, last = [*self._last, *result.emitted][-2:]
        self._last = (before, last)

    def _learn(self, before: int, last: int, row: TopTokens) -> None:
        self._tables[0].put(self._salt ^ (before << 32 | last), row)
        self._tables[1].put(self._salt ^ last, row)

    def share_with(self, other: RecyclingDrafter) -> None:
        super().share_with(other)
        self._tables = other._tables
