"""The suffix drafter as it is defined: slow and obvious."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.drafting import suffix

Path = tuple[int, ...]
# Weight, text and place in it, match length.
Vote = tuple[float, int, int, int]
LEAST = 0.02  # probability of a node that is asked for


class SlowDrafter:
    """What the module's docstring says, with lists and a search through all of the text."""

    def __init__(self) -> None:
        self.calibration = suffix.new_calibration({})
        self.texts: list[list[int]] = []  # the last one is written
        self.cells: dict[Path, int] = {}

    def begin(self, tokens: Sequence[int]) -> None:
        self.calibration.forget_recent()
        self.texts.append(list(tokens))
        self.cells = {}

    @property
    def text(self) -> list[int]:
        """What is written."""
        return self.texts[-1]

    def match_length(self, number: int, place: int) -> int:
        """How many tokens before `place` equal the last ones of the text, at most 64.

        64 where both texts are the same from the beginning on, for 8 tokens at least.
        """
        other, length, most = self.texts[number], 0, min(64, place, len(self.text))
        while length < most and other[place - 1 - length] == self.text[-1 - length]:
            length += 1
        return 64 if 8 <= length == place == len(self.text) else length

    def places(self) -> dict[tuple[int, int], int]:
        """The 16 latest places after the last 4, 2 and 1 tokens of the text -> match length."""
        lengths: dict[tuple[int, int], int] = {}
        for order in (4, 2, 1):
            found = [
                (number, place)
                for number in reversed(range(len(self.texts)))
                for place in reversed(range(order, len(self.texts[number]) + 1))
                if (number, place) != (len(self.texts) - 1, len(self.text))
                and self.texts[number][place - order : place] == self.text[-order:]
            ]
            for place in found[:16]:
                lengths.setdefault(place, self.match_length(*place))
        return lengths

    def continuation(self, number: int, place: int, path: Path) -> int | None:
        """The token that a place predicts after `path`: the text goes on with the draft itself.

        None where an older text ends.
        """
        is_own = number == len(self.texts) - 1
        known = [*self.text, *path] if is_own else self.texts[number]
        return known[place + len(path)] if place + len(path) < len(known) else None

    def votes(self) -> list[Vote]:
        """What each place weighs, heaviest first, and the latest of equals."""
        votes = []
        for (number, place), length in self.places().items():
            counts = number == len(self.texts) - 1 or length == 64
            votes.append(((1.0 if counts else 0.05) * length * length, number, place, length))
        return sorted(votes, reverse=True)

    def cell(self, agreeing: Sequence[Vote], depth: int, share: float) -> int:
        def bucket(value: float, borders: Sequence[float]) -> int:
            return sum(value >= border for border in borders)

        _, number, _, match_length = agreeing[0]
        length = bucket(min(match_length + depth, 128), (2, 3, 4, 5, 7, 10, 15, 23, 40, 64))
        shared = bucket(share, (0.3, 0.5, 0.65, 0.8, 0.9, 0.97, 0.995))
        count = bucket(len(agreeing), (2, 3, 5, 9))
        return ((length * 8 + shared) * 5 + count) * 2 + (number == len(self.texts) - 1)

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
            token = self.continuation(vote[1], vote[2], path)
            if token is not None:
                parties.setdefault(token, []).append(vote)
        weights = {token: sum(vote[0] for vote in party) for token, party in parties.items()}
        for token in sorted(weights, key=lambda token: -weights[token])[:1]:
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
        self.texts[-1] += emitted
