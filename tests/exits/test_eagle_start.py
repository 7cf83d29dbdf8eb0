"""What a head begins as: its heads of attention look where they should before any training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from random_gguf import VOCABULARY, WIDTH

from edgespec.exits.target import Hyperparameters, hyperparameters_of
from edgespec.models.spec import ModelSpec

_PLACES = 3000
_TEXT = 60


def test_the_width_is_shared_among_heads() -> None:
    pytest.importorskip("torch", reason="training needs torch")
    from edgespec.exits.eagle import heads_of

    heads = heads_of(Hyperparameters(576, 9, 3, 64, 1e-5, 1e5, True))
    assert (heads.token, heads.one, heads.two, heads.total) == (6, 3, 2, 12)


def test_heads_see_their_own_place_and_places_of_the_same_token(target: ModelSpec) -> None:
    """Rows that show their own token and the one before; a text that comes twice."""
    import torch

    from edgespec.exits.eagle import first_parameters, head_shape, heads_of

    shape = hyperparameters_of(target)
    places = _places(torch)
    parameters = first_parameters(target, shape, places)
    random = np.random.default_rng(1)
    tokens = np.tile(random.permutation(VOCABULARY)[: _TEXT // 2], 3)[: _TEXT + 2]
    shares = _shares(head_shape(shape), parameters, _table(torch), tokens)
    heads = heads_of(shape)
    assert shares[: heads.token].diagonal(dim1=1, dim2=2).min() > 0.8
    last = np.arange(_TEXT // 2, _TEXT)  # places whose next token stood at one before
    for head in (heads.token, heads.token + heads.one):
        assert shares[head][last, last + 1 - _TEXT // 2].mean() > 0.8


def _table(torch: Any) -> Any:
    torch.manual_seed(7)
    table = torch.randn(VOCABULARY, WIDTH)
    return table / table.square().mean(1, keepdim=True).sqrt()


def _rows(own: Any, before: Any) -> Any:
    """What the target shows at places: both tokens, and that it is one."""
    import torch

    rows = torch.cat([own, before, torch.ones_like(own)], 1)
    return rows / rows.square().mean(1, keepdim=True).sqrt()


def _places(torch: Any) -> Any:
    from edgespec.exits.eagle import Places

    table = _table(torch)
    tokens = torch.randint(VOCABULARY, (4, _PLACES))
    before, own, token, best = table[tokens]
    rows = _rows(own, before)
    # A part that is always there, as states of models have it.
    after = token @ torch.randn(WIDTH, WIDTH) / WIDTH**0.5 + best + 3.0
    return Places(rows, torch.ones(rows.shape[1]), token, own, before, best, after, 1.0)


def _shares(shape: Any, parameters: Any, table: Any, tokens: Any) -> Any:
    """What each head of attention takes from where, [heads, T, T]: places 1 to T of a text."""
    import torch

    from edgespec.exits.network import attend, rms_norm, rotations

    before, own, token = (table[torch.from_numpy(tokens[i : i + _TEXT])] for i in range(3))
    fused = _rows(own, before) @ parameters["fc.weight"].T
    normed = rms_norm(fused, parameters["attn_norm_2.weight"], shape.epsilon)
    kept: list[Any] = []

    def attention(q: Any, k: Any, v: Any) -> Any:
        scores = torch.einsum("bthd,bshd->bhts", q, k)[0] * shape.head_length**-0.5
        hidden = torch.ones(_TEXT, _TEXT).triu(1).bool()
        kept.append(scores.masked_fill(hidden, float("-inf")).softmax(-1))
        return v

    angles = rotations(shape, torch.arange(_TEXT)[None])
    attend(shape, parameters, torch.cat([token, normed], 1)[None], angles, attention)
    return kept[0]
