"""Lossless where tokens are drawn: by the same seed they are those of plain decoding.

Where drafts are drawn, too, the output has the model's distribution.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
from branching import Branching
from decoding_cases import flat
from fake_backend import FakeBackend
from hypothesis import given, settings
from hypothesis import strategies as st
from lossless_cases import (
    DRAFTERS,
    DRAWS,
    MODELS,
    PROMPT,
    Shaped,
    Witness,
    check_text,
    head_drafter,
    model_drafter,
    random_model,
    shapes_of_trees,
)
from numpy.typing import NDArray
from word_laws import (
    WORD_LOGITS,
    WORD_SAMPLING,
    WORD_V,
    chi_square_p,
    distribution_of_words,
    slow_probabilities,
    twisted_model,
    upper_gamma,
    word_state,
    words_model,
    words_of,
)

from edgespec.backends.base import DraftDistribution, DraftTree, Logits
from edgespec.decode.engine import Engine
from edgespec.decode.verification import accept_sampled
from edgespec.drafting.combined import CombinedDrafter
from edgespec.drafting.proposal import Drafter
from edgespec.drafting.recycling import RecyclingDrafter
from edgespec.drafting.suffix import SuffixDrafter
from edgespec.sampling.params import SamplingParams
from edgespec.sampling.sampling import Sampler, TargetDistribution, without

pytestmark = pytest.mark.usefixtures("frozen_clock")


PARAMS = {
    "temperature": SamplingParams(temperature=0.8, seed=5),
    "top-p": SamplingParams(temperature=0.8, top_p=0.95, seed=6),
    "top-k and min-p": SamplingParams(temperature=1.3, top_k=5, min_p=0.02, seed=7),
    "penalties": SamplingParams(
        temperature=0.8,
        top_p=0.95,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.1,
        penalty_last_n=20,
        seed=8,
    ),
    "greedy penalties": SamplingParams(repetition_penalty=1.4, frequency_penalty=0.2),
    "bias": SamplingParams(temperature=0.8, logit_bias={3: -5.0, 4: 2.0}, seed=9),
    "dry": SamplingParams(
        temperature=0.8,
        dry_multiplier=0.8,
        dry_allowed_length=1,
        dry_sequence_breakers=(),
        seed=10,
    ),
    "greedy dry": SamplingParams(
        dry_multiplier=2.0, dry_allowed_length=1, dry_sequence_breakers=()
    ),
    "xtc": SamplingParams(temperature=0.9, xtc_probability=0.5, xtc_threshold=0.05, seed=11),
    "mirostat": SamplingParams(temperature=1.0, mirostat=2, mirostat_tau=2.0, seed=12),
    "typical": SamplingParams(temperature=1.0, typical_p=0.8, dynatemp_range=0.4, seed=13),
    "sigma, another order": SamplingParams(
        temperature=1.2,
        top_n_sigma=1.5,
        min_p=0.05,
        presence_penalty=0.5,
        samplers=("temperature", "min_p", "penalties", "top_n_sigma"),
        seed=14,
    ),
}


@pytest.mark.parametrize(
    ("params", "drafter", "model"),
    [
        # Each sampler with each drafter on one model at each change, on the others in the long run.
        pytest.param(*case, marks=[pytest.mark.long] if (row + column + place) % 3 else [])
        for row, params in enumerate(PARAMS)
        for column, drafter in enumerate(DRAFTERS)
        if not (drafter in DRAWS and PARAMS[params].draws_freely)
        for place, model in enumerate(MODELS)
        for case in [(params, drafter, model)]
    ],
)
def test_the_same_seed_gives_the_same_tokens(params: str, drafter: str, model: str) -> None:
    """One random number a token, also in a tree: speculation does not even move the dice.

    Drafts that are drawn do; they are left out where tokens are drawn freely.
    """
    next_logits = MODELS[model]
    backend = Witness(next_logits)
    engine = Engine(backend, curve=flat(), drafter=DRAFTERS[drafter](next_logits))
    for prompt in (PROMPT, PROMPT[::-1]):
        check_text(engine, next_logits, prompt, 50, PARAMS[params])
    assert max(backend.steps) > 1


@settings(max_examples=100)
@given(shapes_of_trees, st.sampled_from(sorted(PARAMS)), st.integers(1, 30))
def test_no_shape_of_tree_moves_the_dice(
    shapes: list[list[tuple[int, int]]], params: str, count: int
) -> None:
    backend = Witness(random_model, context_size=len(PROMPT) + 30)
    engine = Engine(backend, curve=flat(), drafter=Shaped(random_model, shapes))
    check_text(engine, random_model, PROMPT, count, PARAMS[params])


@pytest.mark.parametrize("params", [name for name in PARAMS if PARAMS[name].draws_freely])
@pytest.mark.parametrize("drafter", DRAWS)
def test_the_same_seed_gives_the_same_tokens_again_where_drafts_are_drawn(
    drafter: str, params: str
) -> None:
    """Step times being the same: what is drafted decides which random number meets which token."""
    texts = []
    for _ in range(2):
        engine = Engine(
            Witness(random_model), curve=flat(), drafter=DRAFTERS[drafter](random_model)
        )
        result = engine.generate(PROMPT, max_tokens=50, sampling=PARAMS[params])
        texts.append(result.token_ids)
        assert isinstance(engine.backend, Witness)
        assert engine.backend.cached == [*PROMPT, *result.token_ids[:-1]]
        assert any(tree.distributions for tree in engine.backend.trees)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("params", [name for name in PARAMS if PARAMS[name].draws_freely])
@pytest.mark.parametrize("drafter", DRAWS)
def test_an_exact_engine_draws_no_draft(drafter: str, params: str) -> None:
    backend = Witness(random_model)
    engine = Engine(backend, curve=flat(), drafter=DRAFTERS[drafter](random_model), is_exact=True)
    check_text(engine, random_model, PROMPT, 50, PARAMS[params])
    assert max(backend.steps) > 1


def test_a_drawn_seed_repeats_the_text() -> None:
    engine = Engine(Witness(random_model), curve=flat(), drafter=SuffixDrafter())
    params = SamplingParams(temperature=1.0)
    streams = [engine.stream(PROMPT, max_tokens=40, sampling=params) for _ in range(2)]
    texts = [[token for chunk in stream for token in chunk.token_ids] for stream in streams]
    assert texts[0] != texts[1]  # equal once in more than 2^32 runs: then the seeds are equal
    again = SamplingParams(temperature=1.0, seed=streams[0].seed)
    assert list(engine.generate(PROMPT, max_tokens=40, sampling=again).token_ids) == texts[0]


@pytest.mark.parametrize(
    ("freedom", "statistic", "p"),
    [
        (1, 3.841, 0.05),
        (10, 18.307, 0.05),
        (100, 124.342, 0.05),
        (50, 76.154, 0.01),
        (4, 0.711, 0.95),
    ],
)
def test_the_chi_square_of_the_tables(freedom: int, statistic: float, p: float) -> None:
    assert upper_gamma(freedom / 2, statistic / 2) == pytest.approx(p, rel=1e-3)


def sample_words(drafter: Drafter | None, num_words: int) -> Counter[tuple[int, ...]]:
    """The words that a fake target writes with this drafter."""
    backend = FakeBackend(words_model, WORD_V, max_nodes=7)
    return words_of(Engine(backend, curve=flat(), drafter=drafter), num_words)


WORD_DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "suffix": SuffixDrafter,
    # Always the same tree, full of the token 0 and 1: accepting too gladly would show at once.
    "tree": lambda: Shaped(words_model, [[(0, 0), (0, 1), (1, 0), (1, 1), (2, 3), (3, 0)]]),
}


@pytest.mark.parametrize(
    ("num_words", "off"), [(12_000, 0.9), pytest.param(50_000, 0.85, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("drafter", WORD_DRAFTERS)
def test_sampled_output_has_the_models_distribution(
    drafter: str, num_words: int, off: float
) -> None:
    """Words with each drafter against the exact distribution at temperature 0.8 and top-p 0.95.

    A right program fails once in a million seeds; the seeds are fixed, so it is always the same
    run. The last line shows the power: had the temperature been `off`, it would have failed.
    """
    counts = sample_words(WORD_DRAFTERS[drafter](), num_words)
    distribution = distribution_of_words(0.8, 0.95)
    assert math.fsum(distribution.values()) == pytest.approx(1.0)
    assert 40 < len(distribution) < WORD_V**3  # top-p forbids some words
    assert set(counts) <= set(distribution)
    assert chi_square_p(counts, distribution) > 1e-6
    assert chi_square_p(counts, distribution_of_words(off, 0.95)) < 1e-6


# ------------------------------------------------------------------------------ sampled drafts


@cache
def draft_distribution(place: int, first: int, second: int) -> list[float]:
    """A draft model that is far from the target: other temperature, no filter, a twist."""
    logits = WORD_LOGITS[place][first][second]
    return slow_probabilities([0.7 * logit + 0.2 * t for t, logit in enumerate(logits)], 1.0, 1.0)


def drawn_tree(
    context: tuple[int, ...], chain: bool, dice: random.Random
) -> tuple[DraftTree, list[NDArray[np.float64] | None]]:
    """Three tokens in a chain, or two siblings, one of them with a child, and a known token."""
    tokens, parents = [context[-1]], [-1]
    distributions: list[NDArray[np.float64] | None] = [None]

    def draw(parent: int) -> None:
        text = (*context, *(tokens[i] for i in DraftTree(tokens, parents).path(parent)[1:]))
        distribution: DraftDistribution | None = np.array(draft_distribution(*word_state(text)))
        for node, token in enumerate(tokens):
            if parents[node] == parent and distribution is not None:
                distribution = without(distribution, token)
        assert distribution is not None
        distributions.append(distribution.astype(np.float64))
        tokens.append(dice.choices(range(WORD_V), distribution.tolist())[0])
        parents.append(parent)

    for parent in (0, 1, 2) if chain else (0, 0, 1):
        draw(parent)
    if not chain and DraftTree(tokens, parents).child(0, 0) < 0:
        tokens.append(0)
        parents.append(0)
        distributions.append(None)
    return DraftTree(tokens, parents), distributions


def sample_words_from_draws(num_words: int, *, chain: bool) -> Counter[tuple[int, ...]]:
    """The words of texts of 100 words each, drafted by drawing and verified in steps."""
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for seed in range(num_words // 100):
        backend = FakeBackend(words_model, WORD_V, max_nodes=5)
        sampler = Sampler(replace(WORD_SAMPLING, seed=seed), WORD_V)
        dice = random.Random(f"drafts of {seed}")
        tokens = [sampler.pick(backend.prefill([0, 0, 0]))]
        while len(tokens) < 300:
            tree, distributions = drawn_tree((0, 0, 0, *tokens), chain, dice)
            distributions_of_rows = partial(_distribution_of_row, sampler, backend.verify(tree))
            path, emitted = accept_sampled(tree, distributions, distributions_of_rows, sampler)
            backend.commit(path)
            tokens += emitted
            accepted += len(path) - 1
        counts.update(tuple(tokens[i : i + 3]) for i in range(0, 300, 3))
    assert accepted > 0.3 * 3 * num_words
    return counts


def _distribution_of_row(sampler: Sampler, logits: Logits, node: int) -> TargetDistribution:
    return sampler.unsorted_distribution(logits[node])


@pytest.mark.parametrize(
    "chain", [pytest.param(True, marks=pytest.mark.long), False], ids=["chain", "tree"]
)
def test_verified_draws_have_the_models_distribution(chain: bool) -> None:
    """15,000 words against the exact distribution at temperature 0.8 and top-p 0.95.

    A right program fails once in a million seeds; the seeds are fixed, so it is always the same
    run. The last line shows the power: had the temperature been 0.9, it would have failed.
    """
    counts = sample_words_from_draws(15_000, chain=chain)
    distribution = distribution_of_words(0.8, 0.95)
    assert set(counts) <= set(distribution)
    assert chi_square_p(counts, distribution) > 1e-6
    assert chi_square_p(counts, distribution_of_words(0.9, 0.95)) < 1e-6


DRAWN_DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "model": lambda: model_drafter(twisted_model, WORD_V),
    "head": lambda: head_drafter(twisted_model, WORD_V),
    "suffix and model": lambda: CombinedDrafter(
        [Branching(), model_drafter(twisted_model, WORD_V)]
    ),
    "model, suffix and recycling": lambda: CombinedDrafter(
        [model_drafter(twisted_model, WORD_V), SuffixDrafter(), RecyclingDrafter()]
    ),
}


@pytest.mark.parametrize(
    ("drafter", "tree"),
    [
        pytest.param(name, tree, marks=[pytest.mark.long] if tree == ("model" == name) else [])
        for name in DRAWN_DRAFTERS
        for tree in (False, True)
    ],
)
def test_drawn_drafts_have_the_models_distribution(drafter: str, tree: bool) -> None:
    """3,000 words of the engine against the exact distribution at temperature 0.8 and top-p 0.95.

    A right program fails once in a million seeds; the seeds are fixed, so it is always the same
    run. The last line shows the power: had the temperature been 1.0, it would have failed.
    """
    backend = Witness(words_model, WORD_V, max_nodes=7, tree=tree)
    engine = Engine(backend, curve=flat(), drafter=DRAWN_DRAFTERS[drafter]())
    counts = words_of(engine, 3_000)
    distribution = distribution_of_words(0.8, 0.95)
    assert any(not verified.is_chain for verified in backend.trees) == tree
    assert sum(bool(verified.distributions) for verified in backend.trees) > 0.5 * len(
        backend.trees
    )
    assert set(counts) <= set(distribution)
    assert chi_square_p(counts, distribution) > 1e-6
    assert chi_square_p(counts, distribution_of_words(1.0, 0.95)) < 1e-6
