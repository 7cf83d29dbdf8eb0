"""edgespec's kernels inside llama.cpp: products against ggml's, models with and without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.context import LlamaSettings
from edgespec.backends.llama.ggml_products import MatrixProduct, quantized
from edgespec.backends.llama.kernels import (
    KERNEL_TYPES,
    attach,
    kernels,
    packed_type,
    product_ms,
)
from edgespec.backends.llama.library import library
from edgespec.errors import BackendError
from edgespec.measure.noise import largest_invariant_step, prefill_is_invariant
from edgespec.memory.bytes.footprint import RunShape, weights_bytes
from edgespec.memory.device.kernels import attends, packed_bytes
from edgespec.models.embedded import embedded_model
from edgespec.models.spec import read_model_spec

pytestmark = pytest.mark.model
F32, Q4_0, Q4_K, Q2_K = 0, 2, 12, 10
FAR = 0.02  # root mean square of the difference, over that of the product


@pytest.fixture(scope="module", autouse=True)
def attached() -> None:
    if reason := attach():
        pytest.skip(f"edgespec has no kernels here: {reason}")


def numbers(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def distance(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean((ours - theirs) ** 2) / np.mean(theirs**2)))


def both(
    kind: int, weights: NDArray[np.float32], x: NDArray[np.float32], threads: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The product with our kernels, and with ggml's."""
    data, shape = quantized(kind, weights), weights.shape[::-1]
    results = []
    for buffer_type in (packed_type(), None):
        with MatrixProduct(
            kind, data, shape, tokens=len(x), threads=threads, buffer_type=buffer_type
        ) as product:
            results.append(product(x))
    return results[0], results[1]


@settings(deadline=None, max_examples=40)
@given(
    kind=st.sampled_from(KERNEL_TYPES),
    panels=st.integers(1, 9),
    blocks=st.integers(1, 3),
    tokens=st.integers(1, 40),
    threads=st.integers(1, 2),
    seed=st.integers(0, 1 << 30),
)
def test_products_are_ggmls(
    kind: int, panels: int, blocks: int, tokens: int, threads: int, seed: int
) -> None:
    weights = numbers(seed, 16 * panels, 256 * blocks)
    x = numbers(seed + 1, tokens, 256 * blocks)
    ours, theirs = both(kind, weights, x, threads)
    assert distance(ours, theirs) < FAR


@pytest.mark.parametrize("kind", KERNEL_TYPES)
def test_a_row_does_not_depend_on_its_step(kind: int) -> None:
    weights, x = quantized(kind, numbers(1, 48, 512)), numbers(2, 33, 512)

    def product(rows: NDArray[np.float32], threads: int) -> NDArray[np.float32]:
        with MatrixProduct(
            kind,
            weights,
            (512, 48),
            tokens=len(rows),
            threads=threads,
            buffer_type=packed_type(),
        ) as made:
            return made(rows)

    single = np.concatenate([product(row[None], 1) for row in x])
    for size in (2, 3, 7, 8, 13, 16, 33):
        for threads in (1, 2):
            assert np.array_equal(product(x[:size], threads), single[:size])


@pytest.mark.parametrize("kind", KERNEL_TYPES)
@pytest.mark.parametrize("tokens", [1, 5])
def test_experts_are_ggmls(kind: int, tokens: int) -> None:
    experts, used, rows, columns = 5, 2, 32, 256
    weights = quantized(kind, numbers(3, experts * rows, columns))
    x = numbers(4, tokens, columns)
    ids = np.random.default_rng(5).permuted(
        np.tile(np.arange(experts, dtype=np.int32), (tokens, 1)), axis=1
    )[:, :used]
    results = []
    for buffer_type in (packed_type(), None):
        with MatrixProduct(
            kind,
            weights,
            (columns, rows, experts),
            tokens=tokens,
            threads=2,
            buffer_type=buffer_type,
            used=used,
        ) as product:
            results.append(product(x, ids))
    assert distance(*results) < FAR


@pytest.mark.parametrize(
    ("kind", "rows", "columns"),
    [(Q4_0, 24, 256), (Q4_0, 15, 32), (Q2_K, 32, 256), (F32, 32, 40)],
    ids=[
        "rows no multiple of 16",
        "fewer rows than a panel",
        "a type without a kernel",
        "columns no multiple of 16",
    ],
)
def test_what_has_no_kernel_stays_with_llama_cpp(kind: int, rows: int, columns: int) -> None:
    assert packed_bytes(kind, rows, columns) == 0
    weights = quantized(kind, numbers(6, rows, columns))
    with pytest.raises(BackendError, match="no kernel"):
        MatrixProduct(kind, weights, (columns, rows), tokens=1, buffer_type=packed_type())


def test_products_are_timed_in_turns() -> None:
    theirs, ours = product_ms(Q4_K, (256, 64), 1)
    assert 0 < ours < 1e3 and 0 < theirs < 1e3


@pytest.fixture(scope="module")
def backend() -> Iterator[LlamaBackend]:
    with closing(load(True)) as made:
        yield made


def load(use: bool, kv_type: str = "f16") -> LlamaBackend:
    spec = read_model_spec(embedded_model())
    chosen = LlamaSettings(
        1024,
        64,
        max_nodes=8,
        threads=2,
        gpu_layers=0,
        mapped=False,
        kv_type_k=kv_type,
        kv_type_v=kv_type,
        kernels=use,
        tied=spec.tied_embeddings,
    )
    return LlamaBackend(embedded_model(), chosen)


def first_logits(backend: LlamaBackend) -> NDArray[np.float32]:
    backend.truncate(0)
    return np.array(backend.prefill(backend.tokenizer.encode("The capital of France is")))


def probabilities(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    weights: NDArray[np.float64] = np.exp(logits.astype(np.float64) - logits.max())
    return weights / float(weights.sum())


def test_a_model_says_the_same(backend: LlamaBackend) -> None:
    with closing(load(False)) as plain:
        theirs = probabilities(first_logits(plain))
    ours = probabilities(first_logits(backend))
    assert (theirs * np.log(theirs / ours)).sum() < 0.02


def test_bytes_are_those_that_were_planned(backend: LlamaBackend) -> None:
    spec = read_model_spec(embedded_model())
    shape = RunShape(1024, 64, 8, threads=2, mapped=False, kernels=True)
    planned = {part.name: part.nbytes for part in weights_bytes(spec, shape)}
    loaded = backend.memory_bytes()
    assert loaded["weights_repacked"] == pytest.approx(planned["weights_repacked"], rel=1e-3)
    assert "CPU_EDGESPEC" not in loaded
    # The embedding table is the head, too, and is kept once.
    assert planned["weights_repacked"] < 1.02 * spec.weight_bytes


@pytest.mark.parametrize("kv_type", ["f16", pytest.param("bf16", marks=pytest.mark.slow)])
def test_all_steps_round_like_single_tokens(kv_type: str) -> None:
    """Prompts too, and at depths where llama.cpp takes another path."""
    if not attends(64, 64):
        pytest.skip("edgespec's attention needs AVX2, AVX-512 or NEON with dotprod")
    with closing(load(True, kv_type)) as backend:
        assert largest_invariant_step(backend, depths=(20, 530), sizes=(2, 5, 8)) == 8
        assert prefill_is_invariant(backend, 8, depths=(530,))


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
def test_smaller_caches_say_the_same(backend: LlamaBackend, kv_type: str) -> None:
    """As f16 does: llama.cpp's attention rounds queries, too, and is further from it."""
    with closing(load(True, kv_type)) as smaller:
        ours = probabilities(first_logits(smaller))
    exact = probabilities(first_logits(backend))
    assert (exact * np.log(exact / ours)).sum() < 0.03


def test_only_loads_in_the_body_use_them() -> None:
    library()
    with kernels(True, threads=2):
        pass
    with closing(load(False)) as plain:
        assert "weights_repacked" not in plain.memory_bytes()  # Q4_1: llama.cpp has none
