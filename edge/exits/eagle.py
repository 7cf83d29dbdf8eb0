"""The head of EAGLE-3 (arXiv 2503.01840) as llama.cpp computes it, in torch.

At place P it reads the target's rows behind three of its blocks for token P, normalized together
and joined to one row g by `fc`, and the embedding of token P + 1, from the target's own table. Both
are normalized and go side by side into the attention of one block; g alone goes on beside it. What
the block gives makes the next token's logits, and stands for g at place P + 1 where the target has
not been yet.

Only attention's values bring the token to the rest of the block, so there are as many heads of keys
and values as of queries: a third of that many hold too little of it.

What it begins as is not learnt by gradients. With some texts, ridge regression forecasts the
target's last state behind the next token from its rows and that token's embedding. `fc` has the
rows' part of it. The token's part goes through heads of attention that look at their own place
alone, sharply, by the fastest rotary angles. Other heads copy (induction, arXiv 2209.11895): the
token behind a place is looked for among earlier ones by codes, which `fc` reads from the rows of
their places; what stood behind is handed on as the target's state would show it. Codes lie where
forecasts vary least, and are compared by the slowest rotary angles. Some heads look for two tokens
in a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from edgespec.exits.files import ROWS_NORM, HeadInfo
from edgespec.exits.network import (
    Tensor,
    Weights,
    attend,
    causal_attention,
    feed_forward,
    read_tensor,
    rms_norm,
    rotations,
)
from edgespec.exits.target import Hyperparameters, import_torch
from edgespec.exits.texts import TrainingText
from edgespec.models.heads import DRAFTED
from edgespec.models.spec import ModelSpec

# -- what it begins as -----------------------------------------------------------------

_LEAST_SIZE = 1e-3  # of a value, in parts of its row's
_RIDGE, _RIDGE_OF_ONE = 3e-3, 1e-4
_TOKEN_PART = 2 / 3  # of the width, that a token is handed on with
_CODED_PART = 1 / 3  # of the width, that codes are made of
_ONE, _TWO = 192, 288  # of the width for each head that copies by one token, and by two
_FREE = 1  # heads that begin as nothing
_FAST = 6  # rotary pairs that look at their own place
_SHARP, _ALIKE = 24.0, 14.0  # scores of the own place, and of the same token
_CODE_SIZE = 1.5  # of a code in a row, beside a forecast
_COPIED = 0.5  # of what the target's state would show
_NOISE = 0.01
# Values inside the block's feed-forward part, in widths: of a model with 5.8 widths these would be
# two fifths of the head's bytes, which each draft reads.
_HIDDEN = 2


class Places(NamedTuple):
    """n places of texts, each between the token that stands there and the one behind it."""

    rows: Tensor  # [n, layers x width] of the target, of one size each
    sizes: Tensor  # [layers x width] of their values before
    token: Tensor  # [n, width]: the embedding behind the place, normalized as all of them
    own: Tensor  # [n, width]: that of the place,
    before: Tensor  # [n, width]: and that before it
    best: Tensor  # [n, width]: that which the target likes best behind `token`
    after: Tensor  # [n, width]: the target's last state behind `token`, normalized
    after_size: float  # of such a state before


@dataclass(frozen=True, slots=True)
class Heads:
    """How many heads of attention do what, for a width and a length of heads."""

    token: int  # hand on the token behind the place,
    one: int  # copy by one token,
    two: int  # copy by two

    @property
    def total(self) -> int:
        """All of them, with those that begin as nothing."""
        return self.token + self.one + self.two + _FREE


def heads_of(shape: Hyperparameters) -> Heads:
    """Those of a head for a target of this shape."""
    width, length = shape.width, shape.head_length
    token = -int(-_TOKEN_PART * width // length)
    return Heads(token, max(1, width // _ONE), max(1, width // _TWO))


def places_of(
    spec: ModelSpec,
    shape: Hyperparameters,
    texts: Sequence[TrainingText],
    states: Sequence[Tensor],
    last: Sequence[Tensor],
) -> Places:
    """Those of some texts, of which `states` are the target's rows, [T, layers x width].

    `last` are its states after all blocks, [T, width].
    """
    torch = import_torch()
    table = Weights(spec, torch.float32).embedding()

    def embedded(ids: Sequence[Tensor]) -> Tensor:
        return _unit(table[torch.cat(list(ids))], shape)

    tokens = [torch.from_numpy(text.tokens.astype(int)) for text in texts]
    best = [torch.from_numpy(text.teacher_ids[2:, 0].astype(int)) for text in texts]
    rows = _unit(torch.cat([one[1:-1] for one in states]).float(), shape)
    sizes = rows.square().mean(0).sqrt().clamp(min=_LEAST_SIZE)
    after = torch.cat([one[2:] for one in last]).float()
    return Places(
        rows / sizes,
        sizes,
        embedded([one[2:] for one in tokens]),
        embedded([one[1:-1] for one in tokens]),
        embedded([one[:-2] for one in tokens]),
        embedded(best),
        _unit(after, shape),
        float(after.square().mean().sqrt()),
    )


def first_parameters(spec: ModelSpec, shape: Hyperparameters, places: Places) -> dict[str, Tensor]:
    """A head's tensors by name, but for its final norm and its rows."""
    torch = import_torch()
    width, last = shape.width, Weights(spec, torch.float32).block(spec.num_layers - 1)
    start = _Start(shape, places)
    return {
        ROWS_NORM: 1.0 / places.sizes,
        "fc.weight": start.fc.T.contiguous(),
        "attn_norm.weight": torch.ones(width),
        "attn_norm_2.weight": torch.ones(width),
        **start.attention(),
        "ffn_norm.weight": last["ffn_norm.weight"],
        **_feed_forward(last, _HIDDEN * width, places.after_size),
    }


def _feed_forward(last: Mapping[str, Tensor], most: int, size: float) -> dict[str, Tensor]:
    """That of the target's last block, or the values of it that say most, `size` times smaller."""
    gate, up, down = (last[f"ffn_{name}.weight"] for name in ("gate", "up", "down"))
    says = up.norm(dim=1) * down.norm(dim=0)
    kept = says.topk(min(most, len(says))).indices.sort().values
    return {
        "ffn_gate.weight": gate[kept],
        "ffn_up.weight": up[kept],
        "ffn_down.weight": down[:, kept] / size,
    }


class _Codes:
    """Codes of tokens, made from embeddings, and how rows show them."""

    def __init__(self, heads: Heads, length: int, places: Places) -> None:
        torch = import_torch()
        width, half = places.token.shape[1], length // 2
        mean = places.token.mean(0)
        spread = (places.token - mean).T @ (places.token - mean) / len(places.token)
        values, vectors = torch.linalg.eigh(spread)
        count = max(half * heads.one, half // 2 * heads.two, int(_CODED_PART * width))
        white = vectors[:, -count:] / values[-count:].clamp(min=_LEAST_SIZE).sqrt()
        towards = mean / mean.norm()
        white = white - towards[:, None] * (towards @ white)[None]
        source = torch.Generator().manual_seed(0)

        def code(size: int, number: int) -> Tensor:  # of length 1, in each of so many heads
            mixed = torch.linalg.qr(torch.randn(count, size * number, generator=source))[0]
            return white @ mixed / size**0.5

        self.one = code(half, heads.one)  # [width, values]
        self.own, self.before = (code(half // 2, heads.two) for _ in range(2))
        wanted = torch.cat(
            [places.own @ self.one, places.own @ self.own, places.before @ self.before], 1
        )
        self.shown = _ridge(places.rows, wanted)  # [layers x width, values]


class _Start:
    """The parts of a head that are computed from places."""

    def __init__(self, shape: Hyperparameters, places: Places) -> None:
        torch = import_torch()
        self._shape, self._places, self._heads = shape, places, heads_of(shape)
        length = shape.head_length
        forecast = _ridge(torch.cat([places.rows, places.token], 1), places.after)
        of_rows, self._of_token = forecast.split([places.rows.shape[1], shape.width])
        self._codes = _Codes(self._heads, length, places)
        seen = places.rows @ of_rows
        directions = torch.linalg.eigh(seen.T @ seen)[1]
        self._axes = directions[:, : self._codes.shown.shape[1]]  # [width, values]
        rest = directions[:, self._axes.shape[1] :]
        self.fc = of_rows @ rest @ rest.T + _CODE_SIZE * self._codes.shown @ self._axes.T
        rows = places.rows @ self.fc
        self._row_size = float(rows.square().mean(1).sqrt().mean())
        self._rows = _unit(rows, shape)
        sizes = (3, self._heads.total, length, 2 * shape.width)
        noise = torch.Generator().manual_seed(1)
        self._qkv = _NOISE * torch.randn(sizes, generator=noise)
        self._o = torch.zeros(self._heads.total, length, shape.width)

    def attention(self) -> dict[str, Tensor]:
        """Queries, keys, values and the output."""
        torch = import_torch()
        count = self._heads.token  # that hand on tokens
        both = torch.cat([self._places.token, self._rows], 1)
        one = _ridge(both, torch.ones(len(both), 1), _RIDGE_OF_ONE)[:, 0]  # read as 1 anywhere
        size = (_SHARP * self._shape.head_length**0.5 / _FAST) ** 0.5
        for part in self._qkv[:2]:
            part[:count, 0 : 2 * _FAST : 2] += size * one
        self._move(self._of_token, range(count))
        self._copy()
        return {
            **{
                f"attn_{name}.weight": x.flatten(0, 1)
                for name, x in zip("qkv", self._qkv, strict=True)
            },
            "attn_output.weight": self._o.flatten(0, 1).T.contiguous(),
        }

    def _copy(self) -> None:
        torch = import_torch()
        heads, width = self._heads, self._shape.width
        q, k, _ = self._qkv
        half = self._shape.head_length // 2
        size = (_ALIKE * self._shape.head_length**0.5) ** 0.5
        keys = size * self._row_size / _CODE_SIZE * self._axes.T  # [values, width]
        codes = self._codes.one, self._codes.own, self._codes.before
        of_one, of_own, of_before = keys.split([code.shape[1] for code in codes])
        for head in range(heads.one):
            part, at = slice(head * half, (head + 1) * half), heads.token + head
            q[at, half:, :width] += size * self._codes.one[:, part].T
            k[at, half:, width:] += of_one[part]
        # The place's own token is before the one that is behind it.
        before = _ridge(self._rows, self._places.own @ self._codes.before)
        quarter = half // 2
        for head in range(heads.two):
            part = slice(head * quarter, (head + 1) * quarter)
            at = heads.token + heads.one + head
            last = half + quarter
            q[at, half:last, :width] += size * self._codes.own[:, part].T
            q[at, last : last + quarter, width:] += size * before[:, part].T
            k[at, half:last, width:] += of_own[part]
            k[at, last : last + quarter, width:] += of_before[part]
        places = self._places
        shown = _ridge(torch.cat([places.rows, places.token, places.best], 1), places.after)
        copying = range(heads.token, heads.token + heads.one + heads.two)
        self._move(_COPIED * shown[-width:], copying)

    def _move(self, matrix: Tensor, heads: range) -> None:
        """Let heads add a token's embedding times `matrix` [width, width], as nearly as they can.

        Singular values are dealt out in turns, so that each head has some of the largest.
        """
        torch = import_torch()
        token, values = self._places.token, self._qkv[2]
        spread = token.T @ token / len(token) + 1e-5 * torch.eye(len(matrix))
        root = torch.linalg.cholesky(spread)
        left, singular, right = torch.linalg.svd(root.T @ matrix)
        left = torch.linalg.solve(root.T, left) * singular.sqrt()
        right = right * singular.sqrt()[:, None]
        rank = min(len(singular), len(heads) * self._shape.head_length)
        for number, head in enumerate(heads):
            mine = range(number, rank, len(heads))
            values[head] = 0.0
            values[head, : len(mine), : len(matrix)] = left[:, mine].T
            self._o[head, : len(mine)] = right[mine]


def _unit(x: Tensor, shape: Hyperparameters) -> Tensor:
    return rms_norm(x, import_torch().ones(x.shape[-1]), shape.epsilon)


def _ridge(x: Tensor, y: Tensor, strength: float = _RIDGE) -> Tensor:
    """The matrix that makes y [n, ...] of x [n, ...]."""
    torch = import_torch()
    held = strength * len(x) * torch.eye(x.shape[1])
    return torch.linalg.solve(x.T @ x + held, x.T @ y)


# -- what it computes ------------------------------------------------------------------


def head_shape(target: Hyperparameters) -> Hyperparameters:
    """What a head of this target has in common with its blocks, and its heads of attention."""
    total = heads_of(target).total
    return replace(target, num_heads=total, num_kv_heads=total)


def values_of(info: HeadInfo) -> dict[str, Tensor]:
    """A head's tensors in float32, those of its block by their names within it."""
    return {
        tensor.name.removeprefix("blk.0."): read_tensor(info.file.path, tensor)
        for tensor in info.file.tensors
        if tensor.name != DRAFTED
    }


def unrolled(
    shape: Hyperparameters,
    parameters: Mapping[str, Tensor],
    embeddings: Tensor,
    rows: Tensor,
    count: int,
) -> Iterator[Tensor]:
    """States of so many drafted tokens at every place, before the final norm: [B, T, width] each.

    It drafts on from all places of whole texts at once (training-time test). The d + 1st token of
    place P is drafted from the state that the one before gave for place P - 1. In attention place P
    then sees the first keys up to place P - d, where the target has been, and behind them its own
    chain's: of the i-th token that at place P - d + i.

    Args:
        embeddings: [B, T, width] of the tokens behind the places.
        rows: [B, T, 3 x width] of the layers of the target that it reads.
    """
    torch = import_torch()
    angles = rotations(shape, torch.arange(rows.shape[1])[None])
    tokens = rms_norm(embeddings, parameters["attn_norm.weight"], shape.epsilon)
    normed_rows = rms_norm(rows, parameters[ROWS_NORM], shape.epsilon)
    x = torch.nn.functional.linear(normed_rows, parameters["fc.weight"])
    keys: list[Tensor] = []  # of each drafted token, [B, T, heads, head_length]
    values: list[Tensor] = []

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys.append(k)
        values.append(v)
        return _chain_attention(q, keys, values)

    for _ in range(count):
        normed = rms_norm(x, parameters["attn_norm_2.weight"], shape.epsilon)
        both = torch.cat([tokens, normed.to(tokens.dtype)], -1)
        mixed = attend(shape, parameters, both, angles, attention)
        state = feed_forward(shape, parameters, x + mixed)
        yield state
        x = _later(state, 1)


def _chain_attention(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Attention of the last drafted token, with keys and values of it and of those before it."""
    torch = import_torch()
    depth = len(keys) - 1
    if depth == 0:
        return causal_attention(q, keys[0], values[0])
    first, last = (x.transpose(1, 2) for x in (keys[0], values[0]))
    scores = q.transpose(1, 2) @ first.transpose(2, 3)  # [B, heads, T, T]
    places = torch.arange(q.shape[1])
    scores = scores.masked_fill(places[None] > places[:, None] - depth, float("-inf"))
    behind = range(1, depth + 1)
    own = [(q * _later(keys[i], depth - i)).sum(-1) for i in behind]  # [B, T, heads]
    every = torch.cat([scores, torch.stack(own, -1).transpose(1, 2)], -1).float()
    shares = (every * q.shape[-1] ** -0.5).softmax(-1).to(values[0].dtype)
    mixed = (shares[..., : len(places)] @ last).transpose(1, 2)
    for i in behind:
        share = shares[..., len(places) + i - 1].transpose(1, 2)[..., None]
        mixed = mixed + share * _later(values[i], depth - i)
    return mixed


def _later(rows: Tensor, places: int) -> Tensor:
    """Rows [B, T, ...] so many places later, with zeros before them."""
    torch = import_torch()
    if not places:
        return rows
    return torch.cat([torch.zeros_like(rows[:, :places]), rows[:, :-places]], 1)
