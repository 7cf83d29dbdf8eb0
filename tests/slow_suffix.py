"""The suffix drafter as it is defined: slow and obvious."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.drafting.drafters import suffix

Path = tuple[int, ...]
Vote = tuple[float, int, int]  # weight, place, match length
LEAST = 0.02  # probability of a node that is asked for


class SlowDrafter:
    """What the module's docstring says, with lists and a search through all of the text."""

    def __init__(self, max_children: int) -> None:
        self.max_children = max_children
        self.calibration = suffix.new_calibration({})
        self.text: list[int] = []
        self.start = 0
        self.cells: dict[Path, int] = {}

    def begin(self, tokens: Sequence[int]) -> None:
        self.calibration.forget_recent()
        self.start = len(self.text)
        self.text += tokens
        self.cells = {}

    def match_length(self, place: int) -> int:
        """How many tokens before `place` equal the last ones of the text, at most 32."""
        length = 0
        while length < min(32, place) and self.text[place - 1 - length] == self.text[-1 - length]:
            length += 1
        return length

    def places(self) -> dict[int, int]:
        """The 16 latest places after the last 4, 2 and 1 tokens of the text -> match length."""
        lengths: dict[int, int] = {}
        for order in (4, 2, 1):
            found = [
                place
                for place in range(len(self.text) - 1, order - 1, -1)
                if self.text[place - order : place] == self.text[-order:]
            ]
            for place in found[:16]:
                lengths.setdefault(place, self.match_length(place))
        return lengths

    def continuation(self, place: int, path: Path) -> int:
        """The token that a place predicts after `path`: the text goes on with the draft itself."""
        return [*self.text, *path][place + len(path)]

    def votes(self) -> list[Vote]:
        """What each place weighs, heaviest first, and the latest of equals."""
        votes = [
            ((1.0 if place >= self.start else 0.05) * length * length, place, length)
            for place, length in self.places().items()
        ]
        return sorted(votes, reverse=True)

    def cell(self, agreeing: Sequence[Vote], depth: int, share: float) -> int:
        def bucket(value: float, borders: Sequence[float]) -> int:
            return sum(value >= border for border in borders)

        _, place, match_length = agreeing[0]
        length = bucket(min(match_length + depth, 64), (2, 3, 4, 5, 7, 10, 15, 23))
        shared = bucket(share, (0.3, 0.5, 0.65, 0.8, 0.9, 0.97, 0.995))
        count = bucket(len(agreeing), (2, 3, 5, 9))
        return ((length * 8 + shared) * 5 + count) * 2 + (place >= self.start)

    def candidates(self, max_depth: int) -> dict[Path, float]:
        """All nodes down to `max_depth` -> path probability."""
        self.cells = {}
        found: dict[Path, float] = {}
        self.expand(self.votes(), (), 1.0, max_depth, found)
        return found

    def expand(
        self,
        votes: Sequence[Vote],
        path: Path,
        probability: float,
        max_depth: int,
        found: dict[Path, float],
    ) -> None:
        if len(path) == max_depth or not votes:
            return
        parties: dict[int, list[Vote]] = {}
        for vote in votes:
            parties.setdefault(self.continuation(vote[1], path), []).append(vote)
        weights = {token: sum(vote[0] for vote in party) for token, party in parties.items()}
        for token in sorted(weights, key=lambda token: -weights[token])[: self.max_children]:
            share = weights[token] / sum(weights.values())
            cell = self.cell(parties[token], len(path), share)
            below = probability * self.calibration.probability(cell)
            if below >= LEAST or not path:
                longer = (*path, token)
                found[longer], self.cells[longer] = below, cell
                self.expand(parties[token], longer, below, max_depth, found)

    def observe(self, emitted: Sequence[int], proposed: Sequence[Path]) -> None:
        """Count the proposed nodes whose parent was right; then the text is longer."""
        for path in sorted(proposed, key=len):
            depth = len(path) - 1
            if depth < len(emitted) and path[:depth] == tuple(emitted[:depth]):
                self.calibration.count(self.cells[path], path[depth] == emitted[depth])
        self.text += emitted
