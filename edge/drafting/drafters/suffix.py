"""The suffix drafter: what followed the last time the text ended like this?

History (past texts, then the current prompt and output) is kept as one run of token ids. Hash
chains over its last 4, 2 and 1 tokens, as in LZ77 compressors, give earlier places where the text
ended the same way. Every place votes for the token that followed it, with the square of its match
length as weight; the winner becomes a node. Its probability is calibrated by counting over

    match length x share of the votes x number of places that agree x this text or an older one

where length and age are those of the heaviest place that voted for it. (Edges deeper in the draft
are described as if the draft had already been accepted, so one table serves every depth.)
Ideas: prompt lookup decoding, SuffixDecoding (arXiv 2411.04975), consensus of
several matches from GOOSE (arXiv 2604.02047).
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from edgespec.drafting.calibration import Calibration, Counts
from edgespec.drafting.drafters.base import Outcome, count_hits
from edgespec.drafting.priors import known_counts
from edgespec.drafting.proposal import EMPTY, Proposal, Stakes
from edgespec.prefix import common_prefix_length

_ORDERS = (4, 2, 1)  # lengths of the indexed endings, longest first
_MAX_PLACES = 16  # links followed in one hash chain
_LENGTH_CAP = 32  # matches are not followed further back than this
_HASH_BITS = 16
_HASH_MASK = (1 << _HASH_BITS) - 1
_MIX = 0x9E3779B1  # 2^32 / golden ratio, the usual multiplicative hash
_MAX_TAKEN_BACK = 8  # tokens at the end of a text, such as its end token, before it goes on
_OLD_TEXT_WEIGHT = 0.05  # a vote from an older text against one from this text

# Borders of the calibration cells. A value lands in the bucket of the last border it reaches.
_LENGTH_BORDERS = (2, 3, 4, 5, 7, 10, 15, 23)
_SHARE_BORDERS = (0.3, 0.5, 0.65, 0.8, 0.9, 0.97, 0.995)
_COUNT_BORDERS = (2, 3, 5, 9)
_NUM_LENGTHS = len(_LENGTH_BORDERS) + 1
_NUM_SHARES = len(_SHARE_BORDERS) + 1
_NUM_COUNTS = len(_COUNT_BORDERS) + 1
NUM_CELLS = _NUM_LENGTHS * _NUM_SHARES * _NUM_COUNTS * 2
_LENGTH_BUCKET = [bisect_right(_LENGTH_BORDERS, length) for length in range(2 * _LENGTH_CAP + 1)]


# Weight of its vote, position of what followed, match length, whether it is in this text.
_Place = tuple[float, int, int, bool]


def new_calibration(known: Counts, make: type[Calibration] = Calibration) -> Calibration:
    """Cells are numbered ((length * shares + share) * counts + count) * 2 + this_text."""
    lengths = [cell // (2 * _NUM_COUNTS * _NUM_SHARES) for cell in range(NUM_CELLS)]
    groups = [2 * length + cell % 2 for cell, length in enumerate(lengths)]
    recents = [0 if length < 4 else 1 if length < 6 else 2 for length in lengths]
    # Before anything was counted: a longer match is likelier to go on, an older text less so.
    priors = [
        (0.3 + 0.6 * length / (_NUM_LENGTHS - 1)) * (1.0 if this_text else 0.7)
        for length in range(_NUM_LENGTHS)
        for this_text in (0, 1)
    ]
    return make(NUM_CELLS, groups, recents, priors, known)


class SuffixDrafter:
    """Drafts from repetitions in the text, in older texts of this process, and of itself.

    Args:
        capacity: tokens of history kept; the older half is dropped when it is full.
        max_children: branches per node; 1 proposes chains.
    """

    name = "suffix"

    def __init__(self, *, capacity: int = 1 << 16, max_children: int = 1) -> None:
        self._capacity = capacity
        self._max_children = max_children
        self._calibration = new_calibration(known_counts(self.name, NUM_CELLS))
        self._text_start = 0
        self._cells: list[int] = []
        self._proposal = EMPTY
        self._clear()

    def _clear(self) -> None:
        self._tokens = array("i")
        # By order: where an ending with this hash was seen last (1 + position, 0 for never),
        # and for each position the one before it.
        self._heads = [array("i", bytes(4 << _HASH_BITS)) for _ in _ORDERS]
        self._links = [array("i") for _ in _ORDERS]

    @property
    def nbytes(self) -> int:
        """Ceiling of the tables in bytes; 4 bytes a token for the text and for each order.

        Growing arrays take up to an eighth more, and the heads exist twice for the moment in
        which the older half of the history is dropped.
        """
        per_token = 4 * (1 + len(_ORDERS))
        return self._capacity * per_token * 9 // 8 + 2 * len(_ORDERS) * (4 << _HASH_BITS)

    def begin(self, tokens: Sequence[int]) -> None:
        """Start a new text, or go on with this one; older ones stay as a weaker source."""
        self._proposal = EMPTY
        known = common_prefix_length(self._tokens[self._text_start :], array("i", tokens))
        too_many = len(self._tokens) - self._text_start - known
        if known and too_many <= _MAX_TAKEN_BACK:
            self._take_back(too_many)
            self.extend(tokens[known:])
            return
        self._calibration.forget_recent()
        self._text_start = len(self._tokens)
        self.extend(tokens)

    def recall(self, texts: Sequence[Sequence[int]]) -> None:
        """Texts of earlier runs are a source like older texts of this one."""
        for text in texts:
            self.extend(text)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append to the history and its hash chains, about 2 us a token."""
        if len(self._tokens) + len(tokens) > self._capacity:
            self._drop_older_half(len(tokens))
        text = self._tokens
        (heads4, heads2, heads1), (links4, links2, links1) = self._heads, self._links
        a, b, c = ([0, 0, 0, *text[-3:]])[-3:]
        for d in tokens[-self._capacity :]:
            text.append(d)
            end = len(text)
            for key, heads, links in (
                (_key4(a, b, c, d), heads4, links4),
                ((c * _MIX + d) * _MIX >> 16, heads2, links2),
                (d, heads1, links1),
            ):
                slot = key & _HASH_MASK
                links.append(heads[slot])
                heads[slot] = end
            a, b, c = b, c, d

    def is_familiar(self, tokens: Sequence[int]) -> bool:
        """Whether the last four tokens, with `tokens` behind the text, stood together before.

        The last place with their hash alone is looked at.
        """
        text = self._tokens
        ending = [*text[-4:], *tokens[-4:]][-4:]
        if len(ending) < 4:
            return False
        if tokens:
            place = self._heads[0][_key4(*ending) & _HASH_MASK]
        else:
            place = self._links[0][-1]
        return place >= 4 and text[place - 4 : place].tolist() == ending

    def _take_back(self, count: int) -> None:
        """Undo `extend` of the last `count` tokens: the chains go on as they did before them."""
        text = self._tokens
        (heads4, heads2, heads1), (links4, links2, links1) = self._heads, self._links
        for _ in range(count):
            a, b, c, d = ([0, 0, 0, *text[-4:]])[-4:]
            text.pop()
            for key, heads, links in (
                (_key4(a, b, c, d), heads4, links4),
                ((c * _MIX + d) * _MIX >> 16, heads2, links2),
                (d, heads1, links1),
            ):
                heads[key & _HASH_MASK] = links.pop()

    def _drop_older_half(self, incoming: int) -> None:
        keep = max(0, min(len(self._tokens), self._capacity // 2, self._capacity - incoming))
        dropped = len(self._tokens) - keep
        kept = self._tokens[dropped:]
        self._clear()
        self._text_start = max(0, self._text_start - dropped)
        self.extend(kept)

    # -- proposing -------------------------------------------------------------------------

    def propose(self, stakes: Stakes, base: Proposal = EMPTY) -> Proposal:
        """The most probable continuations, best first."""
        places = self._places()
        self._cells = []
        self._proposal = (
            self._build(places, stakes.max_nodes, stakes.min_probability) if places else EMPTY
        )
        return self._proposal

    def _places(self) -> list[_Place]:
        """Earlier places that ended like the text does now, heaviest first."""
        text = self._tokens
        end = len(text)
        lengths: dict[int, int] = {}
        for order, links in zip(_ORDERS, self._links, strict=True):
            if end < order:
                continue
            place = links[end - 1]
            for _ in range(_MAX_PLACES):
                if place == 0:
                    break
                if place not in lengths:
                    back, length = place, 0
                    limit = min(_LENGTH_CAP, place)
                    while length < limit and text[back - 1] == text[end - 1 - length]:
                        back -= 1
                        length += 1
                    if length >= order:  # a smaller one is a hash collision
                        lengths[place] = length
                place = links[place - 1]
        start = self._text_start
        places = [
            (float(length * length), place, length, True)
            if place >= start
            else (_OLD_TEXT_WEIGHT * length * length, place, length, False)
            for place, length in lengths.items()
        ]
        places.sort(reverse=True)
        return places

    def _build(self, places: list[_Place], max_nodes: int, min_probability: float) -> Proposal:
        """Best-first expansion of the votes into nodes."""
        if self._max_children == 1:
            return self._chain(places, max_nodes, min_probability)
        tokens: list[int] = []
        parents: list[int] = []
        probabilities: list[float] = []
        heap: list[tuple[float, int, int, int, list[_Place]]] = []
        node, parent_probability, path = -1, 1.0, tokens
        while True:
            for token, cell, agreeing in self._vote(places, path):
                probability = parent_probability * self._calibration.probability(cell)
                if probability >= min_probability or node < 0:
                    heapq.heappush(heap, (-probability, token, cell, node, agreeing))
            if not heap or len(tokens) == max_nodes:
                return Proposal(tokens, parents, probabilities, (self.name,) * len(tokens))
            negative, token, cell, parent, places = heapq.heappop(heap)
            node, parent_probability = len(tokens), -negative
            tokens.append(token)
            parents.append(parent)
            probabilities.append(parent_probability)
            self._cells.append(cell)
            path = _path(tokens, parents, node)

    def _chain(self, places: list[_Place], max_nodes: int, min_probability: float) -> Proposal:
        """The same where no node has siblings, in half the time: this runs before every step."""
        tokens: list[int] = []
        probabilities: list[float] = []
        probability = 1.0
        while len(tokens) < max_nodes:
            [(token, cell, places)] = self._vote(places, tokens)
            probability *= self._calibration.probability(cell)
            if probability < min_probability and tokens:
                break
            tokens.append(token)
            probabilities.append(probability)
            self._cells.append(cell)
        parents = range(-1, len(tokens) - 1)
        return Proposal(tokens, parents, probabilities, (self.name,) * len(tokens))

    def _vote(
        self, places: list[_Place], path: Sequence[int]
    ) -> list[tuple[int, int, list[_Place]]]:
        """What `places` say comes after the text and `path`: (token, cell, who voted for it)."""
        text, depth = self._tokens, len(path)
        end = len(text)
        if len(places) == 1:
            at = places[0][1] + depth
            token = text[at] if at < end else path[at - end]
            return [(token, _cell(places, depth, 1.0), places)]
        votes: dict[int, float] = {}
        ballots: list[int] = []
        for place in places:
            at = place[1] + depth
            # A place near the end reads on in the draft itself: that is how loops continue.
            token = text[at] if at < end else path[at - end]
            ballots.append(token)
            votes[token] = votes.get(token, 0.0) + place[0]
        if len(votes) == 1:
            return [(ballots[0], _cell(places, depth, 1.0), places)]
        total = sum(votes.values())
        winners = []
        for token in sorted(votes, key=votes.__getitem__, reverse=True)[: self._max_children]:
            agreeing = [place for place, vote in zip(places, ballots, strict=True) if vote == token]
            winners.append((token, _cell(agreeing, depth, votes[token] / total), agreeing))
        return winners

    # -- learning --------------------------------------------------------------------------

    def observe(self, outcome: Outcome) -> None:
        """Count every proposed node whose parent was right, then extend the history."""
        count_hits(self._proposal, self._cells, outcome.emitted, self._calibration)
        self._proposal = EMPTY
        self.extend(outcome.emitted)

    def count_with(self, other: SuffixDrafter) -> None:
        """Have the counts of another user's drafter, which it has, too, from now on."""
        self._calibration = other._calibration.for_another_text()

    def state(self) -> dict[str, Any]:
        """The counts."""
        return self._calibration.as_json()

    def load_state(self, document: dict[str, Any] | None) -> None:
        """Start from the counts of an earlier run."""
        self._calibration.load_json(document)


def _key4(a: int, b: int, c: int, d: int) -> int:
    """Where four tokens lie in the longest hash chains, in its low bits."""
    return (((a * _MIX + b) * _MIX + c) * _MIX + d) * _MIX >> 16


def _cell(agreeing: list[_Place], depth: int, share: float) -> int:
    """The calibration cell of a token that these places voted for."""
    _, _, length, this_text = agreeing[0]
    bucket = _LENGTH_BUCKET[min(length + depth, 2 * _LENGTH_CAP)]
    cell = bucket * _NUM_SHARES + bisect_right(_SHARE_BORDERS, share)
    return (cell * _NUM_COUNTS + bisect_right(_COUNT_BORDERS, len(agreeing))) * 2 + this_text


def _path(tokens: list[int], parents: list[int], node: int) -> list[int]:
    """Tokens from below the root down to `node`."""
    path = []
    while node >= 0:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]
