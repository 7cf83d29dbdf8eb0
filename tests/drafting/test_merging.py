"""Merging proposals: against a merge of lists of paths, and by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.backends.base import DraftDistribution
from edgespec.drafting.combined import merge
from edgespec.drafting.proposal import EMPTY, Proposal, likeliest_chain

quick = settings(max_examples=60)
Path = tuple[int, ...]


def paths_of(proposal: Proposal) -> list[Path]:
    """The tokens from below the root to each node."""
    paths: list[Path] = []
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def named(
    name: str,
    nodes: dict[Path, float],
    *,
    kept: int = 0,
    distributions: Sequence[DraftDistribution | None] = (),
    draft_ms: float = 0.0,
) -> Proposal:
    """A proposal of these paths, in this order."""
    paths = list(nodes)
    return Proposal(
        [path[-1] for path in paths],
        [paths.index(path[:-1]) if len(path) > 1 else -1 for path in paths],
        list(nodes.values()),
        [name] * len(paths),
        distributions,
        kept,
        draft_ms,
    )


def table_of(proposal: Proposal) -> dict[Path, float]:
    return dict(zip(paths_of(proposal), proposal.probabilities, strict=True))


def slow_merge(base: Proposal, added: Proposal) -> dict[Path, float]:
    """Every path of both; a later one gets at most what its siblings leave of their parent."""
    found = table_of(base)
    for path, probability in table_of(added).items():
        parent = found[path[:-1]] if len(path) > 1 else 1.0
        others = sum(p for q, p in found.items() if q[:-1] == path[:-1] and q != path)
        found[path] = max(found.get(path, 0.0), min(probability, parent - others))
    return found


@st.composite
def trees(draw: st.DrawFn) -> dict[Path, float]:
    """Up to ten paths, parents first, whose siblings share the probability of their parent."""
    found: dict[Path, float] = {}
    left: dict[Path, float] = {(): 1.0}
    for _ in range(draw(st.integers(0, 10))):
        parent = draw(st.sampled_from(sorted(left)))
        path = (*parent, draw(st.integers(0, 2)))
        if path not in found:
            found[path] = left[parent] * draw(
                st.one_of(st.floats(0.0, 1.0), st.sampled_from((0.0, 1e-17, 0.3, 0.5, 1.0)))
            )
            left[parent] = max(0.0, left[parent] - found[path])
            left[path] = found[path]
    return found


def likeliest_first(nodes: dict[Path, float]) -> dict[Path, float]:
    return dict(sorted(nodes.items(), key=lambda node: (-node[1], len(node[0]))))


@st.composite
def drawn(draw: st.DrawFn) -> Proposal:
    """A proposal of which the first nodes were drawn; a number tells distributions apart."""
    nodes = draw(trees())
    kept = draw(st.integers(0, len(nodes)))
    rest = likeliest_first(dict(list(nodes.items())[kept:]))
    distributions = [np.array([float(node)]) if node < kept else None for node in range(len(nodes))]
    nodes = {**dict(list(nodes.items())[:kept]), **rest}
    return named(
        "drawn", nodes, kept=kept, distributions=distributions if kept else (), draft_ms=2.0
    )


given_trees = trees().map(lambda nodes: named("given", likeliest_first(nodes), draft_ms=0.5))
# Only one drafter of a list draws, and it may come first or later.
pairs = st.one_of(
    st.tuples(given_trees, drawn()),
    st.tuples(drawn(), given_trees),
    st.tuples(given_trees, trees().map(lambda nodes: named("other", likeliest_first(nodes)))),
)


@quick
@given(pairs)
def test_the_nodes_are_those_of_the_slow_merge(pair: tuple[Proposal, Proposal]) -> None:
    merged, expected = merge(*pair), slow_merge(*pair)
    paths = paths_of(merged)
    assert len(set(paths)) == len(paths)
    assert table_of(merged) == pytest.approx(expected, abs=1e-12)
    assert set(expected) == set(paths_of(pair[0])) | set(paths_of(pair[1]))


@quick
@given(pairs)
def test_a_merged_proposal_keeps_its_contract(pair: tuple[Proposal, Proposal]) -> None:
    """Parents come first and are likelier, siblings share them, the order is by probability."""
    merged = merge(*pair)
    probabilities = list(merged.probabilities)
    behind = probabilities[merged.kept :]
    assert behind == sorted(behind, reverse=True)
    spent = [0.0] * (len(merged) + 1)  # by parent; the last place is the root's
    for node, parent in enumerate(merged.parents):
        assert -1 <= parent < node
        assert 0.0 <= probabilities[node] <= ([*probabilities, 1.0])[parent]
        spent[parent] += probabilities[node]
    assert all(s <= p + 1e-9 for s, p in zip(spent, [*probabilities, 1.0], strict=True))


@quick
@given(pairs)
def test_no_probability_falls_and_a_node_belongs_to_who_was_first(
    pair: tuple[Proposal, Proposal],
) -> None:
    base, added = pair
    merged = merge(base, added)
    first, second = table_of(base), table_of(added)
    drawn_later = set(paths_of(added)[: added.kept])
    for path, source, probability in zip(
        paths_of(merged), merged.sources, merged.probabilities, strict=True
    ):
        assert probability >= first.get(path, 0.0)
        assert probability <= max(first.get(path, 0.0), second.get(path, 0.0))
        is_first = path in first and path not in drawn_later
        assert source == (base if is_first else added).sources[0]


@quick
@given(pairs)
def test_drawn_nodes_stay_in_front_in_the_order_in_which_they_were_drawn(
    pair: tuple[Proposal, Proposal],
) -> None:
    """Their distributions say what was drawn before, so another order would bias the output."""
    merged = merge(*pair)
    drawing = max(pair, key=lambda proposal: proposal.kept)
    assert merged.kept == drawing.kept
    assert paths_of(merged)[: merged.kept] == paths_of(drawing)[: drawing.kept]
    if merged.kept:
        assert all(
            ours is theirs
            for ours, theirs in zip(
                merged.distributions, drawing.distributions[: drawing.kept], strict=False
            )
        )
        assert list(merged.distributions[merged.kept :]) == [None] * (len(merged) - merged.kept)
    else:
        assert not merged.distributions


@quick
@given(pairs)
def test_the_chain_of_a_merged_proposal_is_its_best_path(pair: tuple[Proposal, Proposal]) -> None:
    """First child by first child; drawn nodes come first, so it follows them as far as it can."""
    merged = merge(*pair)
    chain = likeliest_chain(merged)
    assert list(chain.parents) == list(range(-1, len(chain) - 1))
    path: Path = ()
    while below := [other for other in paths_of(merged) if other[:-1] == path]:
        path = below[0]
    assert tuple(chain.tokens) == path
    nodes = [paths_of(merged).index(path[:depth]) for depth in range(1, len(path) + 1)]
    assert list(chain.probabilities) == [merged.probabilities[node] for node in nodes]
    assert list(chain.sources) == [merged.sources[node] for node in nodes]
    assert chain.kept == sum(node < merged.kept for node in nodes)


@quick
@given(pairs)
def test_the_time_adds_up(pair: tuple[Proposal, Proposal]) -> None:
    base, added = pair
    if len(base) and len(added):
        assert merge(base, added).draft_ms == base.draft_ms + added.draft_ms


# ------------------------------------------------------------------------------ by hand


def test_nothing_changes_beside_nothing() -> None:
    proposal = named("a", {(7,): 0.5, (7, 8): 0.2}, draft_ms=3.0)
    assert merge(proposal, EMPTY) is proposal
    assert merge(EMPTY, proposal) is proposal
    assert merge(EMPTY, EMPTY) is EMPTY


def test_two_chains_share_their_beginning() -> None:
    """7 8 and 7 9: 7 gets the larger probability, 9 what 8 leaves of it."""
    base = named("a", {(7,): 0.6, (7, 8): 0.5})
    added = named("b", {(7,): 0.8, (7, 9): 0.7})
    merged = merge(base, added)
    assert paths_of(merged) == [(7,), (7, 8), (7, 9)]
    assert list(merged.probabilities) == pytest.approx([0.8, 0.5, 0.3])
    assert list(merged.sources) == ["a", "a", "b"], "7 was proposed by a before"
    assert (list(merged.distributions), merged.kept) == ([], 0)


def test_what_comes_later_gets_what_is_left() -> None:
    """0.9 is taken: 0.1 is left for 8, and nothing for 9, which stays a node all the same."""
    merged = merge(named("a", {(7,): 0.9}), named("b", {(8,): 0.6, (9,): 0.3}))
    assert table_of(merged) == pytest.approx({(7,): 0.9, (8,): 0.1, (9,): 0.0})
    assert list(merged.sources) == ["a", "b", "b"]


def test_a_drawn_node_that_others_propose_too_keeps_its_law() -> None:
    """8 was proposed, then 7 was drawn and 8 after it, without 7: in this order they stay."""
    first, second = np.array([0.5, 0.3, 0.2]), np.array([0.0, 0.6, 0.4])
    base = named("a", {(8,): 0.7, (8, 9): 0.4})
    added = named(
        "b", {(7,): 0.2, (8,): 0.1, (7, 6): 0.1}, kept=3, distributions=[first, second, first]
    )
    merged = merge(base, added)
    assert paths_of(merged) == [(7,), (8,), (7, 6), (8, 9)]
    assert merged.kept == 3
    assert list(merged.probabilities) == pytest.approx([0.2, 0.7, 0.1, 0.4])
    assert list(merged.sources) == ["b", "b", "b", "a"]
    assert merged.distributions[1] is second and merged.distributions[3] is None
