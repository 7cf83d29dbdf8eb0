"""What is counted of a proposal: nodes whose parent was right, and no others."""

from __future__ import annotations

from edgespec.drafting.proposal import Calibration, Proposal, count_hits


class Counted(Calibration):
    def __init__(self) -> None:
        super().__init__(4, [0] * 4, [0] * 4, [0.5])
        self.seen: list[tuple[int, bool]] = []

    def count(self, cell: int, hit: bool) -> None:
        self.seen.append((cell, hit))


def counted(tokens: list[int], parents: list[int], cells: list[int], *emitted: int) -> object:
    calibration = Counted()
    proposal = Proposal(tokens, parents, [0.5] * len(tokens))
    count_hits(proposal, cells, emitted, calibration)
    return calibration.seen


def test_a_chain_is_counted_up_to_its_first_mistake() -> None:
    assert counted([1, 2, 3], [-1, 0, 1], [0, 1, 2], 1, 9) == [(0, True), (1, False)]
    assert counted([1, 2, 3], [-1, 0, 1], [0, 1, 2], 1, 2, 3, 4) == [
        (0, True),
        (1, True),
        (2, True),
    ]


def test_nodes_behind_the_last_token_are_not_known_to_be_wrong() -> None:
    assert counted([1, 2, 3], [-1, 0, 1], [0, 1, 2], 1) == [(0, True)]


def test_of_a_tree_all_siblings_on_the_way_are_counted() -> None:
    """Tokens 1 and 2 follow the text, 3 the wrong one of them and 4 the right one."""
    seen = counted([1, 2, 3, 4], [-1, -1, 0, 1], [0, 1, 2, 3], 2, 4, 7)
    assert seen == [(0, False), (1, True), (3, True)]


def test_nodes_of_others_are_passed_through() -> None:
    assert counted([1, 2, 3], [-1, 0, 1], [-1, 1, -1], 1, 2, 9) == [(1, True)]
