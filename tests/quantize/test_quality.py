"""What files lost, against slow and obvious arithmetic; and mixtures for a size."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray
from random_gguf import F32, VOCABULARY, write_model

from edgespec.errors import DoesNotFitError
from edgespec.models.exits.openings import Chat
from edgespec.quantize import quality
from edgespec.quantize.context import EvalContext
from edgespec.quantize.convert import Recipe, convert, predict
from edgespec.quantize.fit import Fitness, cheapest, fit
from edgespec.quantize.pieces import Pieces, recipe_of
from edgespec.quantize.quality import Reference, make_reference, quality_of, score
from edgespec.quantize.rounding import rounding_errors
from edgespec.quantize.texts import CountedText, texts_of_tokens, write_texts

CHAT = Chat(before=[1, 2], between=[3, 4], ends=frozenset({VOCABULARY - 1}), openings=[[5, 6]])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("source") / "random.gguf", "llama", F32)


@pytest.fixture(scope="module")
def coarse(source: Path) -> Path:
    target = source.with_name("coarse.gguf")
    convert(source, target, "Q4_0")
    return target


@pytest.fixture(scope="module")
def texts(source: Path) -> list[CountedText]:
    return write_texts(source, CHAT, 3, threads=1, seed=4, length=48)


@pytest.fixture(scope="module")
def reference(source: Path, texts: list[CountedText]) -> Reference:
    return make_reference(source, texts, threads=1)


def log_laws(path: Path, texts: Sequence[CountedText]) -> NDArray[np.float64]:
    """Log probabilities of all tokens at all counted places."""
    rows = []
    with EvalContext(path, context_size=64, batch_size=64, threads=1) as context:
        for text in texts:
            for _, logits in context.score(text.tokens):
                wide = logits[text.counted].astype(np.float64)
                rows.append(wide - np.log(np.exp(wide).sum(axis=1, keepdims=True)))
    return np.concatenate(rows)


# --------------------------------------------------------------------------------------- texts


def test_texts_keep_to_the_chat_and_count_what_was_drawn(texts: list[CountedText]) -> None:
    for text in texts:
        assert text.tokens[:2].tolist() == [1, 2] and len(text.tokens) <= 48
        assert not text.counted[0] and not text.counted[-1]
        assert len(text.counted) == len(text.tokens) and text.counted.sum() >= 6


def test_texts_are_the_same_for_the_same_seed(source: Path, texts: list[CountedText]) -> None:
    again = write_texts(source, CHAT, 3, threads=1, seed=4, length=48)
    other = write_texts(source, CHAT, 3, threads=1, seed=5, length=48)
    assert [t.tokens.tolist() for t in again] == [t.tokens.tolist() for t in texts]
    assert [t.tokens.tolist() for t in other] != [t.tokens.tolist() for t in texts]


def test_given_tokens_are_cut_into_pieces_that_begin_alike() -> None:
    pieces = texts_of_tokens([list(range(25)), [7]], [99], length=11)
    assert [piece.tokens.tolist() for piece in pieces] == [
        [99, *range(10)],
        [99, *range(10, 20)],
    ]
    assert all(piece.counted.sum() == len(piece.tokens) - 1 for piece in pieces)


# ------------------------------------------------------------------------------------- quality


def test_the_source_loses_nothing(source: Path, reference: Reference) -> None:
    found = quality_of(reference, score(source, reference, threads=1))
    assert abs(found.kl.value) < 1e-6 and found.agreement.value == 1.0
    assert found.perplexity_ratio.value == pytest.approx(1.0, abs=1e-6)


def test_divergence_is_that_of_whole_distributions(
    source: Path, coarse: Path, texts: list[CountedText], reference: Reference
) -> None:
    """The vocabulary has one token more than is kept, so that nothing is taken together."""
    p, q = log_laws(source, texts), log_laws(coarse, texts)
    expected = (np.exp(p) * (p - q)).sum(axis=1)
    scores = score(coarse, reference, threads=1)
    np.testing.assert_allclose(scores.kl, expected, rtol=1e-4, atol=1e-5)
    assert scores.agrees.tolist() == (p.argmax(axis=1) == q.argmax(axis=1)).tolist()
    next_ids = np.concatenate([t.tokens[1:][t.counted[:-1]] for t in texts])
    rows = np.arange(len(next_ids))
    np.testing.assert_allclose(scores.next_log_q, q[rows, next_ids], atol=1e-4)
    found = quality_of(reference, scores)
    assert found.perplexity == pytest.approx(np.exp(-q[rows, next_ids].mean()), rel=1e-4)
    assert found.kl.low < found.kl.value < found.kl.high and found.places == len(rows)


def test_taking_tokens_together_gives_a_lower_bound(
    source: Path, coarse: Path, texts: list[CountedText]
) -> None:
    whole = score(coarse, make_reference(source, texts, threads=1), threads=1).kl
    part = make_reference(source, texts, threads=1, top=3)
    assert part.ids.shape[1] == 3 and part.rest.max() > 0.05
    lumped = score(coarse, part, threads=1).kl
    assert (lumped <= whole + 1e-6).all() and whole.mean() > lumped.mean() > 0.5 * whole.mean()


def test_intervals_are_of_texts(reference: Reference) -> None:
    """Two texts of equal length, one all wrong: resampling finds 0, 1/2 and 1."""
    counted = np.ones(5, np.bool_)
    texts = (CountedText(np.arange(5, dtype=np.int32), counted),) * 2
    zeros = np.zeros(10, np.float32)
    both = Reference(texts, np.zeros((10, 1), np.int32), zeros[:, None], zeros, zeros)
    agrees = np.arange(10) < 5
    found = quality_of(both, quality.Scores(zeros, agrees, zeros))
    assert (found.agreement.value, found.agreement.low, found.agreement.high) == (0.5, 0.0, 1.0)


# ------------------------------------------------------------------------------------ mixtures


@pytest.fixture(scope="module")
def pieces(source: Path) -> Pieces:
    found = Pieces(source, source.parent / "pieces", allowed=("Q4_0", "Q5_0", "Q8_0"))
    found.make(1, lambda _what, _part: None)
    return found


def test_a_mixture_of_pieces_is_the_file_of_its_recipe(
    source: Path, pieces: Pieces, texts: list[CountedText], tmp_path: Path
) -> None:
    types = pieces.source_types()
    for number, name in enumerate(types):
        types[name] = ("Q4_0", "Q5_0", "Q8_0")[number % 3]
    target = tmp_path / "mixed.gguf"
    convert(source, target, recipe_of(types, None, ""))
    with EvalContext(pieces.paths(types), context_size=64, batch_size=64, threads=1) as context:
        ours = [rows.copy() for _, rows in context.score(texts[0].tokens)]
    with EvalContext(target, context_size=64, batch_size=64, threads=1) as context:
        theirs = [rows.copy() for _, rows in context.score(texts[0].tokens)]
    np.testing.assert_array_equal(ours[0], theirs[0])
    sizes = {c.tensor.name: dict(zip(c.types, c.sizes, strict=True)) for c in pieces.choices}
    size = pieces.fixed_bytes + sum(sizes[name][kind] for name, kind in types.items())
    assert 0 <= size - target.stat().st_size <= 512


def test_pieces_are_made_once(pieces: Pieces) -> None:
    pieces.make(1, lambda what, _part: pytest.fail(what))


@pytest.mark.parametrize("room", [0, 3, 6, 9, 14, 30])
def test_the_cheapest_levels_come_close_to_the_best_of_all(room: int) -> None:
    random = np.random.default_rng(room)
    for _ in range(20):
        sizes = [tuple(np.cumsum(random.integers(1, 4, 3)).tolist()) for _ in range(4)]
        costs = [np.sort(random.random(3))[::-1] for _ in range(4)]
        space = room + sum(size[0] for size in sizes)
        ours = cheapest(costs, sizes, space)

        def size_of(levels: Sequence[int]) -> int:
            return sum(size[level] for size, level in zip(sizes, levels, strict=True))  # noqa: B023

        def cost_of(levels: Sequence[int]) -> float:
            return sum(float(c[level]) for c, level in zip(costs, levels, strict=True))  # noqa: B023

        fitting = [x for x in itertools.product(range(3), repeat=4) if size_of(x) <= space]
        best = min(map(cost_of, fitting))
        assert size_of(ours) <= space
        step = max(float(cost[0] - cost[2]) for cost in costs)
        assert best <= cost_of(ours) + 1e-12 and cost_of(ours) <= best + step


def test_a_fit_is_within_its_size_and_better_than_a_uniform_type(
    source: Path, pieces: Pieces, reference: Reference, tmp_path: Path
) -> None:
    budget = predict(source, Recipe("Q5_0", ((".", "Q5_0"),))).file_bytes
    found = fit(pieces, reference, tmp_path / "kept", budget, matrix={}, threads=1, minutes=0.02)
    assert found.file_bytes <= budget and found.complete
    fitness = Fitness(pieces, reference, tmp_path / "other", 1)
    uniform = fitness(dict.fromkeys(found.types, "Q5_0"), len(reference.texts))
    assert found.kl <= uniform and found.kl <= found.start_kl
    lines = (tmp_path / "kept").read_text().splitlines()
    assert len(lines) <= found.evaluations


def test_rounding_errors_are_those_of_the_values(
    pieces: Pieces,
) -> None:
    """Weighed by the inputs' squares; a coarser type of the same kind is further away."""
    for choice in pieces.choices:
        name, columns = choice.tensor.name, choice.tensor.dims[0]
        alike = rounding_errors(pieces, choice, {})
        assert (alike >= 0).all() and alike[0] == max(alike) > min(alike) >= 0
        squares = np.zeros(columns, np.float32)
        assert rounding_errors(pieces, choice, {name: squares}) == pytest.approx(0.0)
        squares[:] = 4.0
        assert rounding_errors(pieces, choice, {name: squares}) == pytest.approx(4.0 * alike)
        kind = choice.types[-1]
        whole = [values_of(pieces.path(name, one)) for one in (choice.tensor.type.name, kind)]
        if len(whole[0]) <= 256:  # all rows are looked at
            expected = np.square(whole[0] - whole[1]).sum(axis=1).mean()
            assert alike[-1] == pytest.approx(expected, rel=1e-4)


def values_of(piece: Path) -> NDArray[np.float32]:
    """By another program than the one under test."""
    tensor = GGUFReader(piece).tensors[0]
    values: NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type)
    return values


def test_a_stopped_search_goes_on_where_it_was(
    pieces: Pieces, reference: Reference, tmp_path: Path
) -> None:
    """What was measured is not measured again, a line cut off by a kill is, and results agree."""
    kept, budget = tmp_path / "kept", 150 * 1024
    first = fit(pieces, reference, kept, budget, matrix={}, threads=1, minutes=0.02)
    lines = kept.read_text().splitlines()
    kept.write_text("\n".join(lines[:-3]) + "\n" + lines[-3][:9])
    again = fit(pieces, reference, kept, budget, matrix={}, threads=1, minutes=0.02)
    assert again.start_kl == pytest.approx(first.start_kl)
    now = kept.read_text().splitlines()
    assert now[: len(lines) - 3] == lines[:-3]
    shared = min(len(lines), len(now) - 1)  # the line that was cut off stays
    order = [json.loads(line)[0] for line in now[: len(lines) - 3] + now[len(lines) - 2 :]]
    assert order[:shared] == [json.loads(line)[0] for line in lines][:shared]


def test_an_interrupt_gives_the_best_so_far(
    pieces: Pieces, reference: Reference, tmp_path: Path
) -> None:
    def stop(what: str, _part: float) -> None:
        if what.startswith("searching"):
            raise KeyboardInterrupt

    found = fit(
        pieces,
        reference,
        tmp_path / "kept",
        150 * 1024,
        matrix={},
        threads=1,
        minutes=9,
        progress=stop,
    )
    assert not found.complete and found.kl == found.start_kl


def test_a_size_nothing_fits_into(pieces: Pieces, reference: Reference, tmp_path: Path) -> None:
    with pytest.raises(DoesNotFitError, match="at least") as caught:
        fit(pieces, reference, tmp_path / "kept", 20_000, matrix={}, threads=1)
    assert "ask for" in caught.value.hint
