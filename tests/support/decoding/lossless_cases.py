"""Models, drafters and engines for which whatever is drafted may not change the tokens.

Plain decoding is a loop in this file that knows only the model and the sampler: no engine, no
backend, no tree. Where the choice of a draft's size matters, step times are frozen, so that no
clock takes part.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from branching import Branching
from decoding_cases import flat
from fake_backend import FakeBackend
from frozen_times import Frozen
from hypothesis import strategies as st

from edgespec.backends.base import DraftTree, Logits
from edgespec.decode.engine import Engine
from edgespec.drafting import make_drafter
from edgespec.drafting.combined import CombinedDrafter
from edgespec.drafting.model import (
    HeadDrafter,
    HeadText,
    ModelDrafter,
    WindowDrafter,
    WindowText,
)
from edgespec.drafting.proposal import EMPTY, Drafter, Proposal, StepContext, VerifyResult
from edgespec.drafting.recycling import RecyclingDrafter
from edgespec.drafting.suffix import SuffixDrafter
from edgespec.memory.times import CostCurve
from edgespec.sampling.params import SamplingParams
from edgespec.sampling.sampling import Sampler

Model = Callable[[tuple[int, ...]], Sequence[float]]
INF = float("inf")
V = 12  # vocabulary of most models here


def random_model(context: tuple[int, ...]) -> Sequence[float]:
    """A random table of logits by the last two tokens, as an order-2 Markov chain."""
    before = context[-2] if len(context) > 1 else 0
    return TABLE[before][context[-1]]


def looping_model(context: tuple[int, ...]) -> Sequence[float]:
    """Counts 0 to 6 again and again, but every 19th token is another one."""
    slip = len(context) % 19 == 0
    return ONE_HOT[len(context) // 19 * 5 % V if slip else (context[-1] + 1) % 7]


def copying_model(context: tuple[int, ...]) -> Sequence[float]:
    """Repeats what it wrote 11 tokens ago, but every 37th token is another one."""
    slip = len(context) % 37 == 0
    return ONE_HOT[(context[-1] * 7 + 3) % V if slip else context[-min(11, len(context))]]


TABLE: list[list[list[float]]] = np.random.default_rng(1).normal(0.0, 2.0, (V, V, V)).tolist()
ONE_HOT: list[list[float]] = (5.0 * np.eye(V) + np.linspace(0.0, 0.1, V)).tolist()
MODELS: dict[str, Model] = {
    "random": random_model,
    "looping": looping_model,
    "copying": copying_model,
}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def plain(
    model: Model,
    prompt: Sequence[int],
    count: int,
    params: SamplingParams | None = None,
    *,
    end: int = -1,
    vocab_size: int = V,
) -> list[int]:
    """Plain decoding: one row of logits, one pick, one more token."""
    sampler = Sampler(params or SamplingParams(), vocab_size, prompt)
    tokens: list[int] = []
    while len(tokens) < count and (not tokens or tokens[-1] != end):
        tokens.append(sampler.pick(np.asarray(model((*prompt, *tokens)), dtype=np.float32)))
    return tokens


# ------------------------------------------------------------------------------ drafters


class Scribe(Drafter):
    """Keeps the text; what it proposes is for others to say."""

    name = "scribe"

    def __init__(self) -> None:
        self.text: list[int] = []

    def begin(self, tokens: Sequence[int]) -> None:
        self.text = list(tokens)

    def observe(self, outcome: VerifyResult) -> None:
        self.text += outcome.emitted

    def propose(self, context: StepContext, base: Proposal = EMPTY) -> Proposal:
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, document: dict[str, Any] | None) -> None:
        pass


class Oracle(Scribe):
    """The model itself, drafting `num_nodes` tokens greedily and sure of them."""

    def __init__(self, model: Model, num_nodes: int) -> None:
        super().__init__()
        self._model = model
        self._num_nodes = num_nodes

    def propose(self, context: StepContext, base: Proposal = EMPTY) -> Proposal:
        size = min(self._num_nodes, context.max_nodes)
        tokens = plain(self._model, self.text, size)
        return Proposal(tokens, range(-1, size - 1), [1.0] * size)


class Garbage(Scribe):
    """Random tokens in a chain or a random tree, claimed to be right with probability 0.99."""

    def __init__(self, *, chain: bool) -> None:
        super().__init__()
        self._random = random.Random(4)
        self._chain = chain

    def propose(self, context: StepContext, base: Proposal = EMPTY) -> Proposal:
        size = min(7, context.max_nodes)
        tokens = [self._random.randrange(V) for _ in range(size)]
        parents = [
            node - 1 if self._chain else self._random.randrange(-1, node) for node in range(size)
        ]
        return Proposal(tokens, parents, [0.99 ** (node + 1) for node in range(size)])


RIGHT = V  # in a shape: the token that the model itself would take


class Shaped(Scribe):
    """Trees of given shapes, one a round: a list of (which earlier node is the parent, token).

    It ignores how many nodes it may propose; siblings may carry the same token.
    """

    def __init__(self, model: Model, shapes: Sequence[Sequence[tuple[int, int]]]) -> None:
        super().__init__()
        self._model = model
        self._shapes = shapes
        self._round = 0

    def propose(self, context: StepContext, base: Proposal = EMPTY) -> Proposal:
        shape = self._shapes[self._round % len(self._shapes)]
        self._round += 1
        paths: list[list[int]] = []
        parents = [choice % (node + 1) - 1 for node, (choice, _) in enumerate(shape)]
        for parent, (_, token) in zip(parents, shape, strict=True):
            path = paths[parent] if parent >= 0 else []
            if token == RIGHT:
                token = int(np.argmax(self._model((*self.text, *path))))
            paths.append([*path, token])
        return Proposal([path[-1] for path in paths], parents, [0.9] * len(shape))


def garbage_model(context: tuple[int, ...]) -> Sequence[float]:
    """A draft model that knows nothing, and is sure of it."""
    return ONE_HOT[(context[-1] * 5 + len(context)) % V]


def model_drafter(draft: Model, vocab_size: int = V) -> ModelDrafter:
    """A draft model whose steps take a hundredth of the target's."""
    curve = Frozen([INF, *[0.01] * 16])
    return ModelDrafter(FakeBackend(draft, vocab_size), curve, vocab_size)


class FakeHead:
    """A head that is a function of the text; what it drafts it goes on from."""

    context_size, num_unread = 4096, 0
    reads_prompts, block, token_ids = True, 0, None

    def __init__(self, draft: Model) -> None:
        self.text: HeadText = HeadText(self)
        self._draft = draft
        self._ahead: list[int] = []

    def begin(self, token: int) -> Logits:
        assert self.text.tokens[-1] == token
        self._ahead = []
        return self._row()

    def go_on(self, token: int) -> Logits:
        self._ahead.append(token)
        return self._row()

    def _row(self) -> Logits:
        return np.asarray(self._draft((*self.text.tokens, *self._ahead)), np.float32)

    def memory_bytes(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass


def head_drafter(draft: Model, vocab_size: int = V) -> HeadDrafter:
    """A head whose steps take a hundredth of the target's."""
    head = FakeHead(draft)
    return HeadDrafter(head.text, Frozen([INF, *[0.01] * 16]), vocab_size)


class WholeText(WindowText):
    """All of a text, for a window that is a function of it."""

    begin, append = HeadText.begin, HeadText.append


class FakeWindow(FakeHead):
    """A head that is told when a chain ends."""

    first, last, num_cells = 1, 1, 5
    is_open = False

    def __init__(self, draft: Model) -> None:
        super().__init__(draft)
        self.text: WindowText = WholeText(self)

    def begin(self, token: int) -> Logits:
        assert not self.is_open
        self.is_open = True
        return super().begin(token)

    def end(self) -> None:
        self.is_open = False


def window_drafter(draft: Model) -> WindowDrafter:
    """The target over a part of its cache, which says what `draft` says."""
    return WindowDrafter(FakeWindow(draft).text, Frozen([INF, *[0.01] * 16]), V)


def combined(names: str) -> Drafter:
    drafter = make_drafter(names)
    assert drafter is not None
    return drafter


def all_together(draft: Model) -> Drafter:
    return CombinedDrafter([SuffixDrafter(), RecyclingDrafter(), model_drafter(draft)])


DRAFTERS: dict[str, Callable[[Model], Drafter]] = {
    "suffix": lambda model: SuffixDrafter(),
    "branching suffix": lambda model: Branching(),
    "oracle": lambda model: Oracle(model, 4),
    "garbage chain": lambda model: Garbage(chain=True),
    "garbage tree": lambda model: Garbage(chain=False),
    "suffix and recycling": lambda model: combined("suffix,recycling"),
    "model": model_drafter,
    "garbage model": lambda model: model_drafter(garbage_model),
    "head": head_drafter,
    "window": window_drafter,
    "garbage window": lambda model: window_drafter(garbage_model),
    "suffix and head": lambda model: CombinedDrafter([SuffixDrafter(), head_drafter(model)]),
    "all together": all_together,
    "all with a garbage model": lambda model: all_together(garbage_model),
}
MAKES_TREES = (
    "branching suffix",
    "garbage tree",
    "suffix and recycling",
    "model",
    "garbage model",
    "head",
    "window",
    "garbage window",
    "suffix and head",
    "all together",
    "all with a garbage model",
)
# These draw their drafts where the target's tokens are drawn: that keeps the distribution, but not
# the tokens.
DRAWS = (
    "model",
    "garbage model",
    "head",
    "window",
    "garbage window",
    "suffix and head",
    "all together",
    "all with a garbage model",
)

# ------------------------------------------------------------------------------ engines


class Witness(FakeBackend):
    """A fake backend that keeps the trees it verified and can be asked for its cache."""

    def __init__(self, model: Model, vocab_size: int = V, **options: Any) -> None:
        super().__init__(model, vocab_size, **options)
        self.trees: list[DraftTree] = []

    def verify(self, tree: DraftTree) -> Logits:
        self.trees.append(tree)
        return super().verify(tree)

    @property
    def cached(self) -> list[int]:
        return self._committed


def steep() -> CostCurve:
    """Every node costs a step of its own: nothing uncertain is verified."""
    return Frozen([INF, *(float(n) for n in range(1, 33))])


def uneven() -> CostCurve:
    """The shape of a CPU, with holes: sizes go up and down from round to round."""
    return Frozen([INF, 1.0, 1.3, 2.5, 1.6, INF, 1.9, INF, 2.0, *[INF] * 24], change_ms=0.2)


def learning() -> CostCurve:
    """Corrected by the clock of the test machine: which sizes are chosen is not known."""
    return CostCurve([INF, *[1.0] * 32])


CURVES = {"flat": flat, "steep": steep, "uneven": uneven, "learning": learning}


@cache
def _plain_once(model: Model, prompt: tuple[int, ...], count: int, key: str) -> list[int]:
    return plain(model, prompt, count, _PARAMS[key])


_PARAMS: dict[str, SamplingParams | None] = {}  # by what they say, as biases have no hash


def check_text(
    engine: Engine,
    model: Model,
    prompt: Sequence[int],
    count: int,
    params: SamplingParams | None = None,
) -> None:
    """Generate with speculation: the tokens are the plain ones, and so is what is cached.

    The plain ones are computed once for all drafters.
    """
    _PARAMS[repr(params)] = params
    expected = _plain_once(model, tuple(prompt), count, repr(params))
    result = engine.generate(prompt, max_tokens=count, sampling=params)
    assert list(result.token_ids) == expected
    assert isinstance(engine.backend, Witness)
    assert engine.backend.cached == [*prompt, *expected[:-1]]
    counters = result.counters
    assert counters.accepted_tokens + counters.rounds == count - 1
    assert counters.accepted_tokens <= counters.drafted_tokens


shapes_of_trees = st.lists(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, RIGHT)), max_size=14),
    min_size=1,
    max_size=4,
)
