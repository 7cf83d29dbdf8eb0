"""Models with experts, and hybrids, on edgespec's kernels and on llama.cpp's: with random weights.

With llama.cpp's kernels rows of one-token steps differ from those of larger ones: its products of
F32 matrices have two orders of sums, one for a single token and another one for more. The matrix
that picks experts is F32, and so is the decay of delta nets (`ssm_alpha`). Random experts are often
picked by next to nothing, and another one moves logits more than rounding does. So the bound on
what separates both kinds of kernels is wide.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hybrid_gguf import Shape, write_hybrid
from numpy.typing import NDArray

import edgespec
from edgespec.backends.base import Backend, DraftTree
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.kernels import refusal_of_kernels
from edgespec.backends.llama.recurrent import RecurrentBackend
from edgespec.measure.noise import find_divergence
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.bytes.footprint import weights_parts
from edgespec.memory.bytes.simulation import ContextRequest, simulated
from edgespec.models.spec import read_model_spec

pytestmark = pytest.mark.model

TEXT = list(b"to be or not to be, that is the question: to be or not to be; 64 pears for 8 ")
SIZES = {"width": 128, "hidden": 256, "vocabulary": 272}  # rows in sixteens
SHAPES = {
    "qwen3moe": Shape("qwen3moe", interval=1, **SIZES),
    "qwen35": Shape("qwen35", state_heads=16, **SIZES),
    "qwen35moe": Shape("qwen35moe", **SIZES),
    "lfm2": Shape("lfm2", heads=4, **SIZES),
    "lfm2moe": Shape("lfm2moe", heads=4, **SIZES),
    "nemotron_h_moe": Shape("nemotron_h_moe", heads=4, **SIZES),
}
DRAFTS = 6
NOISE = 0.12  # root mean square of the difference, over that of the logits


@pytest.fixture(scope="module", autouse=True)
def attached() -> None:
    if reason := refusal_of_kernels():
        pytest.skip(f"edgespec has no kernels here: {reason}")


@pytest.fixture(scope="module", params=SHAPES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    kind = gguf.GGMLQuantizationType.Q4_0
    return write_hybrid(folder / "model.gguf", SHAPES[request.param], kind)


@contextmanager
def opened(path: Path, **changes: Any) -> Iterator[LlamaBackend]:
    values = {"batch_size": 64, "max_nodes": DRAFTS + 1, "gpu_layers": 0, "mapped": False}
    settings = RunConfig(512, **(values | changes))
    if read_model_spec(path).has_snapshots:
        made: LlamaBackend = RecurrentBackend(path, replace(settings, snapshots=DRAFTS))
    else:
        made = LlamaBackend(path, settings)
    with closing(made):
        yield made


def rows_of(backend: Backend, sizes: int) -> NDArray[np.float32]:
    """Logits after each token of the text, in steps of so many, [n, V]."""
    rows = []
    for start in range(0, len(TEXT), sizes):
        part = TEXT[start : start + sizes]
        rows.append(backend.verify(DraftTree.chain(part)).copy())
        backend.commit(range(len(part)))
    return np.concatenate(rows)


def test_the_output_is_that_of_llama_cpp_up_to_rounding(path: Path) -> None:
    rows = []
    for kernels in (True, False):
        with opened(path, kernels=kernels) as backend:
            rows.append(rows_of(backend, 1))
            assert ("weights_repacked" in backend.memory_bytes()) or not kernels
    ours, theirs = rows
    difference = np.sqrt(np.mean((ours - theirs) ** 2) / np.mean(theirs**2))
    assert 0.0 < difference < NOISE


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_depends_on_no_other_of_its_step(path: Path, threads: int) -> None:
    """Tokens of one step go to other experts, or share one; neither moves a bit."""
    with opened(path, kernels=True, threads=threads) as backend:
        single = rows_of(backend, 1)
        for sizes in (2, 4, DRAFTS):
            backend.truncate(0)
            assert np.array_equal(rows_of(backend, sizes), single), sizes


@pytest.mark.parametrize("exact", [pytest.param(False, marks=pytest.mark.long), True])
def test_drafts_are_lossless(path: Path, exact: bool) -> None:
    """`--exact` allows steps of several tokens: all of them round alike."""
    load = partial(edgespec.load, path, context_size=512, draft_max=3, threads=1, kernels="on")
    with load(exact=exact, drafter="suffix") as engine:
        for prompt in (TEXT * 2, list(b"abcdefg " * 12)):
            plain = engine.generate(prompt, max_tokens=60, speculate=False)
            result = engine.generate(prompt, max_tokens=60)
            ids = plain.token_ids, result.token_ids
            found = find_divergence(engine.backend, prompt, *ids)
            assert found is None or (not exact and found.gap < 1.0), found


def test_its_packed_weights_are_planned(path: Path) -> None:
    spec, shape = read_model_spec(path), RunConfig(512, 64, 1, mapped=False, kernels=True)
    (answer,) = simulated([ContextRequest(spec, shape)])
    planned = {part.name: part.nbytes for part in weights_parts(spec, shape, answer)}
    with opened(path, kernels=True) as backend:
        found = backend.memory_bytes()
    for name in ("weights", "weights_repacked"):
        assert found[name] == pytest.approx(planned[name], abs=0.02 * 2**20), name
