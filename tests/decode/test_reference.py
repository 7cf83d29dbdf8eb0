"""The engine against the loop in one function: the same tokens, whatever is drafted."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest
from decoding_cases import Model
from fake_backend import FakeBackend
from hypothesis import given, settings
from hypothesis import strategies as st
from lossless_cases import CURVES, DRAFTERS, DRAWS, MODELS, PROMPT, V, plain

from edgespec.decode.engine import Engine
from edgespec.decode.reference import decode
from edgespec.sampling.params import SamplingParams
from edgespec.sampling.sampling import Sampler

ROOT = Path(__file__).parents[2]


def reference(
    model: Model,
    drafter: str,
    params: SamplingParams,
    prompt: Sequence[int],
    count: int,
    *,
    end: int = -1,
    tree: bool = True,
) -> tuple[list[int], int]:
    """The tokens, and how many steps they took."""
    backend = FakeBackend(model, V, end=end, tree=tree, batch_size=4)
    sampler = Sampler(params, V, prompt)
    tokens = list(decode(backend, DRAFTERS[drafter](model), sampler, prompt, count))
    return tokens, len(backend.steps)


@settings(max_examples=120)
@given(
    model=st.sampled_from([*MODELS.values()]),
    drafter=st.sampled_from([*DRAFTERS]),
    curve=st.sampled_from([*CURVES.values()]),
    prompt=st.lists(st.integers(0, V - 1), min_size=1, max_size=24),
    count=st.integers(1, 60),
    end=st.integers(-1, V - 1),
    temperature=st.sampled_from([0.0, 0.7, 1.2]),
    seed=st.integers(0, 5),
    tree=st.booleans(),
)
def test_the_engine_writes_what_the_reference_writes(
    model: Model, drafter: str, curve: object, prompt: list[int], count: int, end: int,
    temperature: float, seed: int, tree: bool,
) -> None:  # fmt: skip
    """Drafters that draw their tokens keep a temperature's distribution, and not its tokens."""
    params = SamplingParams(temperature=0.0 if drafter in DRAWS else temperature, seed=seed)
    backend = FakeBackend(model, V, end=end, tree=tree)
    made = DRAFTERS[drafter](model)
    with Engine(backend, curve=curve(), drafter=made) as engine:  # type: ignore[operator]
        written = engine.generate(prompt, max_tokens=count, sampling=params).token_ids
    tokens, _ = reference(model, drafter, params, prompt, count, end=end, tree=tree)
    assert list(written) == tokens
    assert tokens == plain(model, prompt, count, params, end=end)


@pytest.mark.parametrize("drafter", ["oracle", "suffix", "garbage tree"])
def test_drafts_save_the_steps_of_the_tokens_that_were_right(drafter: str) -> None:
    """Four right tokens a step make five; wrong ones never cost a step more."""
    tokens, steps = reference(MODELS["looping"], drafter, SamplingParams(), PROMPT, 101)
    assert len(tokens) == 101
    assert steps == 20 if drafter == "oracle" else steps <= 100


def test_the_page_on_architecture_shows_the_loop_as_it_is() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    shown = page.split("```python\n", 1)[1].split("```", 1)[0]
    assert shown.strip() and textwrap.indent(shown, "    ") in inspect.getsource(decode)
