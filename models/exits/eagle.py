"""The head of EAGLE-3 (arXiv 2503.01840) as llama.cpp computes it, in torch.

At place P it reads the target's rows behind three of its blocks for token P, normalized together
and joined to one row g by `fc`, and the embedding of token P + 1, from the target's own table. Both
are normalized and go side by side into the attention of one block; g alone goes on beside it. What
the block gives makes the next token's logits, and stands for g at place P + 1 where the target has
not been yet.

Only attention's values bring the token to the rest of the block, so there are as many heads of keys
and values as of queries: a third of that many hold too little of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from edgespec.errors import UnsupportedError
from edgespec.models.exits.eagle_start import ROWS_NORM, heads_of
from edgespec.models.exits.network import (
    Hyperparameters,
    Tensor,
    attend,
    causal_attention,
    check_architecture,
    feed_forward,
    import_torch,
    rms_norm,
    rotations,
)
from edgespec.models.heads import HANDS_OUT
from edgespec.models.spec import ModelSpec


def check_target(spec: ModelSpec) -> None:
    """Raise UnsupportedError for a model whose heads cannot be trained, or not be used."""
    if spec.arch not in HANDS_OUT:
        raise UnsupportedError(
            f"a head of {spec.path.name} cannot be used: {spec.arch} models do not hand out the "
            f"states that it reads",
            hint="train an early exit: --kind exit",
        )
    check_architecture(spec)


def layers_read(num_layers: int) -> tuple[int, int, int]:
    """Layers of the target whose inputs it reads: low, middle, high (llama.cpp's own default)."""
    return min(2, num_layers - 1), num_layers // 2, max(1, num_layers - 3)


def head_shape(target: Hyperparameters) -> Hyperparameters:
    """What a head of this target has in common with its blocks, and its heads of attention."""
    total = heads_of(target).total
    return replace(target, num_heads=total, num_kv_heads=total)


class Unrolled:
    """A head over whole texts, drafting on from every place at once (training-time test).

    The d + 1st call drafts for place P from the state that the call before gave for place P - 1. In
    attention place P then sees the first call's keys up to place P - d, where the target has been,
    and behind them its own chain's: of the i-th call that at place P - d + i.
    """

    def __init__(
        self,
        shape: Hyperparameters,
        parameters: Mapping[str, Tensor],
        embeddings: Tensor,  # [B, T, width] of the tokens behind the places
        rows: Tensor,  # [B, T, 3 x width] of the layers of the target that it reads
    ) -> None:
        torch = import_torch()
        self._shape, self._parameters = shape, parameters
        self._rows, self._embeddings = rows, embeddings
        self._angles = rotations(shape, torch.arange(rows.shape[1])[None])
        self._keys: list[Tensor] = []  # of each call, [B, T, heads, head_length]
        self._values: list[Tensor] = []

    def states(self, count: int) -> Iterator[Tensor]:
        """Of so many drafted tokens at every place, before the final norm: [B, T, width] each."""
        functional, parameters = import_torch().nn.functional, self._parameters
        shape = self._shape
        tokens = rms_norm(self._embeddings, parameters["attn_norm.weight"], shape.epsilon)
        rows = rms_norm(self._rows, parameters[ROWS_NORM], shape.epsilon)
        x = functional.linear(rows, parameters["fc.weight"])
        for depth in range(count):
            normed = rms_norm(x, parameters["attn_norm_2.weight"], shape.epsilon)
            both = import_torch().cat([tokens, normed.to(tokens.dtype)], -1)
            mixed = attend(shape, parameters, both, self._angles, self._attention)
            state = feed_forward(shape, parameters, x + mixed)
            yield state
            x = _later(state, 1) if depth + 1 < count else state

    def _attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch, depth = import_torch(), len(self._keys)
        self._keys.append(k)
        self._values.append(v)
        if depth == 0:
            return causal_attention(q, k, v)
        first, last = (x.transpose(1, 2) for x in (self._keys[0], self._values[0]))
        scores = q.transpose(1, 2) @ first.transpose(2, 3)  # [B, heads, T, T]
        places = torch.arange(q.shape[1])
        scores = scores.masked_fill(places[None] > places[:, None] - depth, float("-inf"))
        behind = range(1, depth + 1)
        own = [(q * _later(self._keys[i], depth - i)).sum(-1) for i in behind]  # [B, T, heads]
        every = torch.cat([scores, torch.stack(own, -1).transpose(1, 2)], -1).float()
        shares = (every * self._shape.head_length**-0.5).softmax(-1).to(v.dtype)
        mixed = (shares[..., : len(places)] @ last).transpose(1, 2)
        for i in behind:
            share = shares[..., len(places) + i - 1].transpose(1, 2)[..., None]
            mixed = mixed + share * _later(self._values[i], depth - i)
        return mixed


def _later(rows: Tensor, places: int) -> Tensor:
    """Rows [B, T, ...] so many places later, with zeros before them."""
    if not places:
        return rows
    torch = import_torch()
    return torch.cat([torch.zeros_like(rows[:, :places]), rows[:, :-places]], 1)
