"""The suffix drafter: what followed the last time the text ended like this?

An index of the last texts (`text_index`) gives earlier places where a text ended the same way.
Every place votes for the token that followed it, with the square of its match
length as weight; the winner becomes a node. Its probability is calibrated by counting over

    match length x share of the votes x number of places that agree x this text or an older one

where length and age are those of the heaviest place that voted for it. (Edges deeper in the draft
are described as if the draft had already been accepted, so one table serves every depth.)
Ideas: prompt lookup decoding, SuffixDecoding (arXiv 2411.04975), consensus of
several matches from GOOSE (arXiv 2604.02047).
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from operator import itemgetter
from typing import Any

from edgespec.drafting import constants
from edgespec.drafting.calibration import Calibration, Counts, pairs_of
from edgespec.drafting.constants import (
    AGREEING_BORDERS,
    LENGTH_BORDERS,
    OF_OLDER_TEXTS,
    OF_THIS_TEXT,
    OLD_TEXT_WEIGHT,
    VOTE_BORDERS,
)
from edgespec.drafting.drafters.base import CountingDrafter, VerifyResult
from edgespec.drafting.proposal import EMPTY, Proposal, StepContext
from edgespec.drafting.text_index import LENGTH_CAP, Place, Text, TextIndex, to_keep
from edgespec.memory.store.texts import KeptText

# Cells of the calibration. A value lands in the bucket of the last border it reaches.
_NUM_LENGTHS = len(LENGTH_BORDERS) + 1
_NUM_SHARES = len(VOTE_BORDERS) + 1
_NUM_COUNTS = len(AGREEING_BORDERS) + 1
NUM_CELLS = _NUM_LENGTHS * _NUM_SHARES * _NUM_COUNTS * 2
_LENGTH_BUCKET = [bisect_right(LENGTH_BORDERS, length) for length in range(2 * LENGTH_CAP + 1)]
# The weight of its vote comes with it.
_Vote = tuple[float, Place]


def new_calibration(known: Counts, make: type[Calibration] = Calibration) -> Calibration:
    """Cells are numbered ((length * shares + share) * counts + count) * 2 + this_text."""
    lengths = [cell // (2 * _NUM_COUNTS * _NUM_SHARES) for cell in range(NUM_CELLS)]
    groups = [2 * length + cell % 2 for cell, length in enumerate(lengths)]
    recents = [0 if length < 4 else 1 if length < 6 else 2 for length in lengths]
    pairs = zip(OF_OLDER_TEXTS, OF_THIS_TEXT, strict=True)
    priors = [chance for pair in pairs for chance in pair]
    return make(NUM_CELLS, groups, recents, priors, known)


class SuffixDrafter(CountingDrafter):
    """Drafts from repetitions in the text, in the last texts of this process, and of itself.

    Args:
        texts: the index of these texts.
    """

    name = "suffix"

    def __init__(self, texts: TextIndex | None = None) -> None:
        super().__init__(new_calibration(known_counts(self.name, NUM_CELLS)))
        self.texts = texts or TextIndex()
        self._text: Text | None = None
        # Of a text that is read: its tokens, and how many of them are in the index already.
        self._coming: Sequence[int] = ()
        self._num_indexed = 0

    @property
    def nbytes(self) -> int:
        return self.texts.nbytes

    def begin(self, tokens: Sequence[int]) -> None:
        """Start a new text; older ones of its history stay as a weaker source."""
        super().begin(tokens)
        self.prepare(tokens, len(tokens))
        self._num_indexed = 0

    def prepare(self, tokens: Sequence[int], count: int) -> None:
        """Index the first `count` tokens, about 4 us each."""
        done = self._num_indexed
        if self._text is None or not done or tokens[:done] != self._coming[:done]:
            self._text = self.texts.begin(self.history, tokens, max(1, count))
            done = max(1, count, len(self._text.tokens))  # another text may have had more
        elif count > done:
            self._text, done = self.texts.extend(self._text, tokens[done:count]), count
        self._coming, self._num_indexed = tokens, done

    def recall(self, texts: Sequence[KeptText]) -> None:
        """Texts of earlier runs are a source like older texts of this one."""
        for history, tokens in texts:
            self.texts.recall(history, tokens)

    def written(self) -> list[KeptText]:
        """The texts of this process, all users', with the history of each."""
        return to_keep(self.texts.texts())

    def has_hit(self, tokens: Sequence[int] = ()) -> bool:
        """Whether the last four tokens, with `tokens` behind the text, stood together before."""
        return self._text is not None and self.texts.is_familiar(self._text, tokens)

    # -- proposing -------------------------------------------------------------------------

    def propose(self, context: StepContext, base: Proposal = EMPTY) -> Proposal:
        votes = self._votes()
        self._proposal = self._chain(votes, context) if votes else EMPTY
        return self._proposal

    def _votes(self) -> list[_Vote]:
        """Earlier places that ended like the text does now, heaviest first."""
        if self._text is None:
            return []
        votes = []
        for place in self.texts.places(self._text):
            _, _, length, is_own = place
            weight = float(length * length)
            if not is_own and length < LENGTH_CAP:
                weight *= OLD_TEXT_WEIGHT
            votes.append((weight, place))
        votes.sort(key=itemgetter(0), reverse=True)
        return votes

    def _chain(self, votes: list[_Vote], context: StepContext) -> Proposal:
        """What most of the votes say, token by token."""
        tokens: list[int] = []
        probabilities: list[float] = []
        cells: list[int] = []
        probability = 1.0
        while len(tokens) < context.max_nodes:
            token, cell, votes = self._elect(votes, tokens)
            if not votes:
                break
            probability *= self._calibration.probability(cell)
            if probability < context.min_probability and tokens:
                break
            tokens.append(token)
            probabilities.append(probability)
            cells.append(cell)
        self._cells = cells
        parents = range(-1, len(tokens) - 1)
        return Proposal(tokens, parents, probabilities, (self.name,) * len(tokens))

    def _elect(self, votes: list[_Vote], path: Sequence[int]) -> tuple[int, int, list[_Vote]]:
        """What `votes` say comes after the text and `path`: token, cell, and who voted for it.

        Nobody where all their texts have ended.
        """
        depth = len(path)
        if len(votes) == 1:
            [(_, (tokens, next_, _, is_own))] = votes
            at = next_ + depth
            if at < len(tokens):
                return tokens[at], _cell(votes, depth, 1.0), votes
            if not is_own:
                return 0, 0, []
            return path[at - len(tokens)], _cell(votes, depth, 1.0), votes
        ballots: list[tuple[int, _Vote]] = []
        weights: dict[int, float] = {}
        for vote in votes:
            weight, (tokens, next_, _, is_own) = vote
            at = next_ + depth
            if at < len(tokens):
                token = tokens[at]
            elif is_own:
                # A place near the end reads on in the draft itself: that is how loops continue.
                token = path[at - len(tokens)]
            else:
                continue  # an older text has ended
            ballots.append((token, vote))
            weights[token] = weights.get(token, 0.0) + weight
        if len(weights) == 1:
            agreeing = votes if len(ballots) == len(votes) else [vote for _, vote in ballots]
            return ballots[0][0], _cell(agreeing, depth, 1.0), agreeing
        if not weights:
            return 0, 0, []
        winner = max(weights, key=weights.__getitem__)
        agreeing = [vote for ballot, vote in ballots if ballot == winner]
        return winner, _cell(agreeing, depth, weights[winner] / sum(weights.values())), agreeing

    # -- learning --------------------------------------------------------------------------

    def observe(self, result: VerifyResult) -> None:
        super().observe(result)
        if self._text is not None:
            self._text = self.texts.extend(self._text, result.emitted)

    def share_with(self, other: SuffixDrafter) -> None:
        super().share_with(other)
        self.texts = other.texts


def _cell(agreeing: list[_Vote], depth: int, share: float) -> int:
    """The calibration cell of a token that these voted for."""
    _, _, length, is_own = agreeing[0][1]
    bucket = _LENGTH_BUCKET[min(length + depth, 2 * LENGTH_CAP)]
    cell = bucket * _NUM_SHARES + bisect_right(VOTE_BORDERS, share)
    return (cell * _NUM_COUNTS + bisect_right(AGREEING_BORDERS, len(agreeing))) * 2 + is_own


VERSION = 1


@cache
def known_counts(drafter: str, num_cells: int) -> Counts:
    """Hits and tries by cell of a drafter's table; nothing where there are none."""
    document = _document()
    found = document.get(drafter) if document.get("version") == VERSION else None
    if not isinstance(found, dict) or found.get("num_cells") != num_cells:
        return {}
    pairs = {int(cell): counts for cell, counts in pairs_of(found.get("cells")).items()}
    there = {cell: counts for cell, counts in pairs.items() if counts[1] > 0.0}
    return cautious(there) if max(there, default=0) < num_cells else {}


def cautious(counts: Counts) -> Counts:
    """The same number of tries, at the odds that one may expect of another model."""
    found = {}
    for cell, (hits, tries) in counts.items():
        odds = constants.PRIOR_ODDS * (hits + 0.5) / (tries - hits + 0.5)
        found[cell] = (tries * odds / (1.0 + odds), tries)
    return found


def _document() -> dict[str, Any]:
    text = files("edgespec.drafting").joinpath("priors.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document
