"""Single products of edgespec's kernels against ggml's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from product_cases import F32, FAR, IQ3_S, Q4_0, ExpertProduct, distance

from edgespec.backends.llama import ggml_products
from edgespec.backends.llama.ggml_products import MatrixProduct, quantized
from edgespec.backends.llama.kernels import (
    KERNEL_TYPES,
    packed_type,
)
from edgespec.errors import BackendError
from edgespec.memory.device.kernels import packed_bytes

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("attached")]


def numbers(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


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


def test_all_that_a_product_had_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stays is in the memory of a run that no plan has: kernels are compared as it loads."""
    called, call = Counter[str](), ggml_products._call

    def counted(name: str, *arguments: Any) -> Any:
        called[name] += 1
        return call(name, *arguments)

    monkeypatch.setattr(ggml_products, "_call", counted)
    both(Q4_0, numbers(1, 16, 256), numbers(2, 1, 256), 1)
    for made, freed, count in (
        ("ggml_init", "ggml_free", 4),
        ("ggml_backend_alloc_ctx_tensors_from_buft", "ggml_backend_buffer_free", 4),
        ("ggml_backend_cpu_init", "ggml_backend_free", 2),
    ):
        assert called[made] == called[freed] == count


@settings(max_examples=40)
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
        with ExpertProduct(
            kind,
            weights,
            (columns, rows, experts),
            tokens=tokens,
            threads=2,
            buffer_type=buffer_type,
            used=used,
        ) as product:
            results.append(product.of(x, ids))
    assert distance(*results) < FAR


@pytest.mark.parametrize("kind", [Q4_0, F32])
@pytest.mark.parametrize("inputs", [1, 3], ids=["one input for all", "an input each"])
@pytest.mark.parametrize(("tokens", "threads"), [(1, 1), (1, 2), (3, 2), (40, 1), (150, 2)])
def test_experts_have_the_bits_of_single_products(
    kind: int, inputs: int, tokens: int, threads: int
) -> None:
    """Some experts have no token, one, or more than a tile has room for."""
    experts, used, rows, columns = 9, 3, 48, 96
    matrices = numbers(7, experts, rows, columns)
    x = numbers(8, tokens, inputs, columns)
    rng = np.random.default_rng(9)
    ids = np.stack([rng.choice(8, used, replace=False, p=[0.65, *7 * [0.05]]) for _ in x])
    with ExpertProduct(
        kind,
        quantized(kind, matrices.reshape(-1, columns)),
        (columns, rows, experts),
        tokens=tokens,
        threads=threads,
        buffer_type=packed_type(),
        used=used,
        inputs=inputs,
    ) as product:
        found = product.of(x, ids.astype(np.int32))
    for expert in range(experts):
        with MatrixProduct(
            kind,
            quantized(kind, matrices[expert]),
            (columns, rows),
            tokens=1,
            buffer_type=packed_type(),
        ) as single:
            for token, slot in np.argwhere(ids == expert):
                alone = single(x[token, slot % inputs][None])[0]
                assert np.array_equal(found[token, slot], alone)


@pytest.mark.parametrize(
    ("kind", "rows", "columns"),
    [(Q4_0, 24, 256), (Q4_0, 15, 32), (IQ3_S, 32, 256), (F32, 32, 40)],
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
