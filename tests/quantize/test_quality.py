"""What files lost, against slow and obvious arithmetic; and mixtures for a size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.quantize import quality
from edgespec.quantize.context import EvalContext
from edgespec.quantize.convert import convert
from edgespec.quantize.quality import Reference, make_reference, quality_of, score
from edgespec.quantize.texts import CountedText


@pytest.fixture(scope="module")
def coarse(source: Path) -> Path:
    target = source.with_name("coarse.gguf")
    convert(source, target, "Q4_0")
    return target


def log_laws(path: Path, texts: Sequence[CountedText]) -> NDArray[np.float64]:
    """Log probabilities of all tokens at all counted places."""
    rows = []
    with EvalContext(path, context_size=64, batch_size=64, threads=1) as context:
        for text in texts:
            for _, logits in context.score(text.tokens):
                wide = logits[text.counted].astype(np.float64)
                rows.append(wide - np.log(np.exp(wide).sum(axis=1, keepdims=True)))
    return np.concatenate(rows)


def test_the_source_loses_nothing(source: Path, reference: Reference) -> None:
    found = quality_of(reference, score(source, reference, threads=1))
    assert abs(found.kl.value) < 1e-6 and found.agreement.value == 1.0
    assert found.perplexity_ratio.value == pytest.approx(1.0, abs=1e-6)


def test_few_rows_are_looked_at_together(
    source: Path, texts: list[CountedText], reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of Gemma's vocabulary have 1 MiB each, and their order twice as much."""
    monkeypatch.setattr(quality, "_PIECE_BYTES", 1)
    sizes, log_sum = list[int](), quality._log_sum

    def seen(logits: NDArray[np.float32]) -> NDArray[np.float32]:
        sizes.append(len(logits))
        return log_sum(logits)

    monkeypatch.setattr(quality, "_log_sum", seen)
    found = make_reference(source, texts, threads=1)
    assert set(sizes) == {1}
    np.testing.assert_array_equal(found.ids, reference.ids)
    np.testing.assert_allclose(found.next_log_p, reference.next_log_p, atol=1e-6)


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
