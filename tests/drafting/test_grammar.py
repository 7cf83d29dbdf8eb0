"""Answers that keep to a grammar, drafted by several drafters on a backend that feeds tokens again.

The grammar is a template over bytes: text that is forced, then some free letters, and so on. A
token of two bytes spells forced text too, so drafts of it may be cut wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from branching import Branching
from fake_backend import FakeBackend
from frozen_times import Frozen, free_drafts
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.backends.base import DraftTree, Logits
from edgespec.decode.engine import Engine
from edgespec.drafting.combined import CombinedDrafter
from edgespec.drafting.model import ModelDrafter
from edgespec.drafting.proposal import EMPTY, Drafter, Proposal, StepContext, VerifyResult
from edgespec.drafting.recycling import RecyclingDrafter
from edgespec.drafting.suffix import SuffixDrafter
from edgespec.sampling.params import SamplingParams

pytestmark = pytest.mark.usefixtures("frozen_clock")

INF = float("inf")
V = 132
TWO = 128  # a token that stands for the next two bytes of a forced text
FREE = b"abcd"
PROMPT = [*b'{"a": "ab", "b": "cd"}']
_ROWS = np.random.default_rng(5).normal(0.0, 1.5, (V, V)).astype(np.float32)
Part = bytes | int  # forced text, or a number of free letters


def letters(context: tuple[int, ...]) -> Sequence[float]:
    """Depends on the last two tokens; likes the token of two bytes now and then."""
    row = _ROWS[context[-1]] + 0.5 * _ROWS[context[-2] if len(context) > 1 else 0][::-1]
    row[TWO] += 3.0 if context[-1] % 3 == 0 else 0.0
    found: list[float] = row.tolist()
    return found


def other_letters(context: tuple[int, ...]) -> Sequence[float]:
    """A draft model that is often right."""
    found: list[float] = (letters(context) + 0.8 * _ROWS[-1 - context[-1]]).tolist()
    return found


class Template:
    """A grammar whose text repeats these parts for ever."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = [part for part in parts if part]
        self._place, self._done = 0, 0

    @property
    def _part(self) -> Part:
        return self._parts[self._place % len(self._parts)]

    def _rest(self) -> bytes:
        return self._part[self._done :] if isinstance(self._part, bytes) else b""

    def allows(self, token: int) -> bool:
        rest = self._rest()
        return (token == TWO and len(rest) > 1) or token in (rest[:1] if rest else FREE)

    def masked(self, logits_row: Logits) -> Logits:
        allowed = [self.allows(token) for token in range(len(logits_row))]
        row: Logits = np.where(allowed, logits_row, -INF).astype(np.float32)
        return row

    def accept(self, token: int) -> None:
        assert self.allows(token)
        self._done += 2 if token == TWO else 1
        if self._done == (len(self._part) if isinstance(self._part, bytes) else self._part):
            self._place, self._done = self._place + 1, 0

    def forced(self) -> tuple[Sequence[int], int]:
        rest, place = self._rest(), self._place
        while rest and len(rest) < 64:
            place += 1
            part = self._parts[place % len(self._parts)]
            if not isinstance(part, bytes):
                break
            rest += part
        return rest[:64], len(rest) // 2


TEMPLATES: dict[str, Sequence[Part]] = {
    "forced first": [b'{"name": "', 5, b'", "colour": "', 2, b'"}'],
    "free first": [3, b"aab", 40, b"ba"],
    "forced only": [b'{"a": 1}'],
    "letter by letter": [1, b"d", 2, b"cb"],
    "free, then long": [9, b'", "colour": "', 7, b'", "name": "'],
}


def model_drafter() -> ModelDrafter:
    return ModelDrafter(FakeBackend(other_letters, V), Frozen([INF, *[0.01] * 16]), V)


class Diary(Drafter):
    """Keeps the text as it hears of it, and proposes nothing."""

    name = "diary"

    def __init__(self) -> None:
        self.text: list[int] = []
        self.context: list[tuple[int, int]] = []

    def begin(self, tokens: Sequence[int]) -> None:
        self.text = list(tokens)

    def propose(self, context: StepContext, base: Proposal = EMPTY) -> Proposal:
        return EMPTY

    def observe(self, outcome: VerifyResult) -> None:
        self.text += outcome.emitted
        self.context.append((len(outcome.tree), outcome.context.extra))

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, document: dict[str, Any] | None) -> None:
        pass


DRAFTERS: dict[str, Callable[[], list[Drafter]]] = {
    "suffix": lambda: [SuffixDrafter()],
    "suffix and recycling": lambda: [SuffixDrafter(), RecyclingDrafter()],
    "branching suffix and recycling": lambda: [Branching(), RecyclingDrafter()],
    "suffix and model": lambda: [SuffixDrafter(), model_drafter()],
    "model and suffix": lambda: [model_drafter(), Branching()],
    "all": lambda: [Branching(), RecyclingDrafter(), model_drafter()],
}

CURVES: dict[str, Sequence[float]] = {
    "flat": [INF, *[1000.0] * 32],
    "three sizes of 32": [INF, 1.0, INF, INF, 1.2, INF, INF, INF, 1.5, *[INF] * 24],
    "single tokens and eight": [INF, 1.0, *[INF] * 6, 1.4],
    "as many as the largest step": [INF, 1.0, 1.05, 1.1, 1.15],
}


class Witness(FakeBackend):
    """Remembers the trees, and how many tokens were fed again with each."""

    def __init__(self, **options: Any) -> None:
        super().__init__(letters, V, feeds_again=True, **options)
        self.trees: list[DraftTree] = []
        self.fed_again: list[int] = []

    def verify(self, tree: DraftTree) -> Logits:
        self.trees.append(tree)
        self.fed_again.append(self.pending)
        return super().verify(tree)


@pytest.fixture
def template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "edgespec.decode.engine.make_grammar",
        lambda _, wanted, *rest: wanted and Template(TEMPLATES[wanted.text]),
    )


def check(
    engine: Engine, grammar: str | None, count: int, sampling: SamplingParams | None = None
) -> list[int]:
    options: dict[str, Any] = {"max_tokens": count, "sampling": sampling, "grammar": grammar}
    expected = engine.generate(PROMPT, speculate=False, **options)
    found = engine.generate(PROMPT, **options)
    assert found.token_ids == expected.token_ids
    counters = found.counters
    assert counters.accepted_tokens + counters.rounds == count - 1
    assert sum(counters.drafted_by.values()) == counters.drafted_tokens
    return list(found.token_ids)


@pytest.mark.usefixtures("template")
@pytest.mark.parametrize(
    ("max_nodes", "curve"),
    [
        pytest.param(nodes, curve, marks=[] if curve in often else [pytest.mark.long])
        for nodes, often in ((2, ()), (5, ("flat",)), (32, ("flat", "three sizes of 32")))
        for curve in CURVES
    ],
)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_change_nothing(drafter: str, max_nodes: int, curve: str) -> None:
    """Greedy and drawn, with each grammar and none in turn, one engine for all of them."""
    diary = Diary()
    backend = Witness(max_nodes=max_nodes)
    times = Frozen(list(CURVES[curve]))
    engine = Engine(backend, curve=times, drafter=CombinedDrafter([*DRAFTERS[drafter](), diary]))
    for grammar in (*TEMPLATES, None, *TEMPLATES):
        written = check(engine, grammar, 40)
        assert diary.text == [*PROMPT, *written], "histories have no holes"
        if grammar is not None:
            check(engine, grammar, 25, SamplingParams(temperature=1.0, top_k=40, seed=3))
    if max_nodes == 32 and curve == "flat":
        names = {name for tree in backend.trees for name in tree.sources}
        assert names > {"", "grammar"}
    assert all(nodes + extra < len(times.base) for nodes, extra in diary.context)


@pytest.mark.usefixtures("template")
@pytest.mark.parametrize("drafter", ["branching suffix and recycling", "model and suffix", "all"])
def test_forced_rounds_come_with_tokens_that_are_fed_again(drafter: str) -> None:
    """The cases that these tests are for do occur: branches before forced text, of any length.

    A forced round as large as any may follow one that others were asked for with such tokens.
    """
    backend = Witness(max_nodes=5)
    engine = Engine(backend, curve=free_drafts(5), drafter=CombinedDrafter(DRAFTERS[drafter]()))
    for seed in range(4):
        sampling = SamplingParams(temperature=0.4, seed=seed)
        check(engine, "letter by letter", 120, sampling)
        check(engine, "free, then long", 120, sampling)
    pairs = list(zip(backend.trees, backend.fed_again, strict=True))
    assert any(again and "grammar" in tree.sources for tree, again in pairs)


templates = st.lists(
    st.binary(max_size=6).map(lambda text: bytes(FREE[byte % 4] for byte in text))
    | st.integers(0, 6),
    min_size=1,
    max_size=5,
).filter(any)


@settings(max_examples=60)
@given(
    parts=templates,
    drafter=st.sampled_from(sorted(DRAFTERS)),
    measured=st.sets(st.integers(2, 16), max_size=3),
    max_nodes=st.integers(1, 17),
    count=st.integers(1, 40),
    tree=st.booleans(),
)
def test_no_template_and_no_curve_changes_an_answer(
    parts: list[Part], drafter: str, measured: set[int], max_nodes: int, count: int, tree: bool
) -> None:
    curve = Frozen([INF, *(1.0 if n == 1 or n in measured else INF for n in range(1, 17))])
    backend = Witness(max_nodes=max_nodes, tree=tree)
    combined = CombinedDrafter(DRAFTERS[drafter]())
    engine = Engine(backend, curve=curve, drafter=combined)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgespec.decode.engine.make_grammar", lambda *_: Template(parts))
        for _ in range(2):
            check(engine, "any", count)


class Sleeper(Diary):
    """Pauses as often as it may."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds, self.asked = rounds, 0

    def propose(self, context: StepContext, base: Proposal = EMPTY) -> Proposal:
        self.asked += 1
        return EMPTY

    def cooldown(self) -> int:
        return self.rounds

    def has_hit(self, _tokens: Sequence[int] = ()) -> bool:
        return False


@pytest.mark.usefixtures("template")
@pytest.mark.parametrize("grammar", TEMPLATES)
def test_a_drafter_pauses_under_a_grammar_and_forced_text_is_drafted_all_the_same(
    grammar: str,
) -> None:
    asked, forced, texts = [], [], []
    for rounds in (0, 1, 1000):
        sleeper = Sleeper(rounds)
        engine = Engine(Witness(max_nodes=32), curve=free_drafts(32), drafter=sleeper)
        found = engine.generate(PROMPT, max_tokens=90, grammar=grammar)
        assert sleeper.text == [*PROMPT, *found.token_ids], "histories have no holes"
        asked.append(sleeper.asked)
        forced.append(found.counters.accepted_by["grammar"])
        texts.append(found.token_ids)
    assert texts[0] == texts[1] == texts[2]
    assert forced[0] == forced[1] == forced[2] > 0
    assert asked[0] >= asked[1] >= asked[2]
    if any(isinstance(part, int) and part > 2 for part in TEMPLATES[grammar]):
        assert asked[0] > asked[1] > asked[2]
