"""What a step of a model of some file type takes here, without writing the model.

A model of L blocks takes f + L b for a step: b for a block, f for the head and what is done once.
Two small files tell both: one of a few blocks and one of a single block, timed without the head,
differ by the blocks; the single block timed with the head tells the rest. Before each step the
processor's caches are emptied of weights, because a whole model does not fit into them. (One that
does is faster than is predicted here.) edgespec's kernels multiply where
there are some, as in answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter

import numpy as np

from edgespec.memory.bytes.footprint import has_packed_weights
from edgespec.memory.device.kernels import missing_kernels
from edgespec.models.gguf.ggml_types import GgmlType
from edgespec.models.gguf.shards import read_gguf_shards
from edgespec.models.spec import read_model_spec
from edgespec.quantize.context import EvalContext
from edgespec.quantize.convert import Recipe, convert, kept_tensors

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32)
DEPTH = 256  # tokens in the cache
_REPEATS = 5
_FLUSHED_FLOATS = 16 << 20  # 128 MiB, more than a processor's caches hold
_FEW = 7  # blocks of the larger small file
_TOKEN = 100
_BATCH = 64


def step_ms(
    *paths: Path,
    threads: int,
    sizes: Sequence[int] = SIZES,
    outputs: bool = True,
    cold: bool = False,
    depth: int = DEPTH,
    kv_type: str = "f16",
) -> list[dict[int, float]]:
    """Median milliseconds of steps over so many tokens with `depth` in the cache, of each file.

    Several files are loaded at once and take turns: all share what drifts, so that a ratio of two
    such times does not depend on what else the machine does meanwhile.
    """
    found: list[dict[int, list[float]]] = [{size: [] for size in sizes} for _ in paths]
    flush = _flusher(cold)
    with ExitStack() as stack:
        steps = [
            stack.enter_context(_opened(path, threads, sizes, depth, kv_type)) for path in paths
        ]
        for _ in range(_REPEATS):
            for size in sizes:
                for times, step in zip(found, steps, strict=True):
                    step(size, outputs)  # the graph is built when the size changes
                    flush()
                    times[size].append(step(size, outputs))
    return [{size: float(np.median(ms)) for size, ms in times.items()} for times in found]


def predicted_step_ms(
    source: Path,
    types: dict[str, GgmlType],
    file_type: str,
    num_blocks: int,
    folder: Path,
    *,
    threads: int,
    sizes: Sequence[int] = SIZES,
    imatrix: Path | None = None,
) -> dict[int, float]:
    """Milliseconds of steps of a file that has not been written.

    Args:
        types: of the file's tensors, from a dry run.
        imatrix: some types cannot be made without one.
        folder: where the two small files may be; they are removed again.
    """
    few = tuple(sorted({round((n + 0.5) * num_blocks / _FEW - 0.5) for n in range(_FEW)}))
    one = (few[len(few) // 2],)
    paths = [folder / "few.gguf", folder / "one.gguf"]
    try:
        for path, blocks in zip(paths, (few, one), strict=True):
            _write(source, types, file_type, blocks, path, threads, imatrix)
        several, single, whole = (
            step_ms(path, threads=threads, sizes=sizes, outputs=outputs, cold=True)[0]
            for path, outputs in ((paths[0], False), (paths[1], False), (paths[1], True))
        )
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
    if len(few) == 1:
        return whole
    block = {n: max(0.0, several[n] - single[n]) / (len(few) - 1) for n in sizes}
    return {n: whole[n] + (num_blocks - 1) * block[n] for n in sizes}


@contextmanager
def pace(
    source: Path, num_blocks: int, folder: Path, *, threads: int
) -> Iterator[Callable[[], float]]:
    """How slow the machine is now: milliseconds of a step of one Q4_0 block, whenever asked."""
    path = folder / "pace.gguf"
    recipe = Recipe("Q4_0", blocks=(num_blocks // 2,))
    convert(source, path, recipe, threads=threads, synced=False)
    try:
        flush = _flusher(cold=True)
        with _opened(path, threads, (1,), DEPTH, "f16") as step:

            def now() -> float:
                step(1, True)
                times = []
                for _ in range(_REPEATS):
                    flush()
                    times.append(step(1, True))
                return float(np.median(times))

            yield now
    finally:
        path.unlink(missing_ok=True)


def _write(
    source: Path,
    types: dict[str, GgmlType],
    file_type: str,
    blocks: tuple[int, ...],
    target: Path,
    threads: int,
    imatrix: Path | None,
) -> None:
    """Some blocks with the types they have in the whole file."""
    tensors = kept_tensors(read_gguf_shards(source), blocks)
    overrides = tuple(
        ("^" + new.replace(".", r"\.") + "$", types[tensor.name].name)
        for new, tensor in tensors.items()
    )
    floats = file_type in ("F16", "BF16", "F32")
    recipe = Recipe(file_type, () if floats else overrides, imatrix, blocks=blocks)
    convert(source, target, recipe, threads=threads, synced=False)


def _flusher(cold: bool) -> Callable[[], object]:
    """What empties the processor's caches, or does nothing."""
    # Ones, because pages that were never written are all one page of zeros.
    return np.ones(_FLUSHED_FLOATS if cold else 0).sum


@contextmanager
def _opened(
    path: Path, threads: int, sizes: Sequence[int], depth: int, kv_type: str
) -> Iterator[Callable[[int, bool], float]]:
    """A loaded file with a past: what does a step (its size, with outputs or not) and times it."""
    largest = max(sizes)
    with EvalContext(
        path,
        context_size=depth + largest,
        batch_size=max(_BATCH, largest),
        threads=threads,
        kv_type=kv_type,
        kernels=not missing_kernels() and has_packed_weights(read_model_spec(path)),
    ) as context:
        tokens = [token % context.vocab_size for token in range(_TOKEN, _TOKEN + depth)]

        def fill() -> None:
            context.clear()
            for start in range(0, depth, _BATCH):
                part = tokens[start : start + _BATCH]
                context.step(part, range(start, start + len(part)), outputs=False)

        def step(size: int, outputs: bool) -> float:
            start = perf_counter()
            context.step(tokens[:size], range(depth, depth + size), outputs=outputs)
            elapsed = perf_counter() - start
            if not context.trim(depth):
                fill()
            return elapsed * 1e3

        fill()
        yield step
