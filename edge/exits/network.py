"""The forward pass of a llama or qwen2 model in torch, from the weights of a GGUF file.

Only what training a drafter needs: blocks that run on texts or token by token, and the head.
Weights are dequantized by numpy; a block's tensors keep the names they have in the file, so that a
trained block is written back as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.exits.target import Hyperparameters, hyperparameters_of, import_torch
from edgespec.models.gguf.reader import GgufTensor
from edgespec.models.gguf.shards import read_gguf_shards
from edgespec.models.onnx.weights import float_rows
from edgespec.models.spec import ModelSpec

_BATCH_TOKENS = 2048

Tensor: TypeAlias = Any  # torch.Tensor; mypy does not follow it
Block: TypeAlias = Mapping[str, Tensor]  # by name within the block, such as "attn_q.weight"
Attention: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


def fast_dtype() -> Any:
    """What products are fastest in: bfloat16 where the processor multiplies in it, or float32."""
    torch = import_torch()
    questions = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    has_half = any(bool(getattr(torch.cpu, name, bool)()) for name in questions)
    return torch.bfloat16 if has_half else torch.float32


def products_in(dtype: Any) -> Any:
    """A context in which products of float32 tensors are computed so."""
    torch = import_torch()
    return torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16)


class Weights:
    """The dequantized tensors of a model, read when they are asked for."""

    def __init__(self, spec: ModelSpec, dtype: Any) -> None:
        self._dtype = dtype
        self._head_name = spec.head_name
        self._files = {
            tensor.name: (shard.path, tensor)
            for shard in read_gguf_shards(spec.path)
            for tensor in shard.tensors
        }

    def tensor(self, name: str) -> Tensor:
        """One tensor, [rows, columns] or [columns]."""
        return read_tensor(*self._files[name]).to(self._dtype)

    def block(self, number: int) -> dict[str, Tensor]:
        """The tensors of one block, by their names within it."""
        start = f"blk.{number}."
        names = [name for name in self._files if name.startswith(start)]
        return {name[len(start) :]: self.tensor(name) for name in names}

    def embedding(self) -> Tensor:
        """The table of input embeddings, [V, width]."""
        return self.tensor("token_embd.weight")

    def head(self) -> Tensor:
        """The output head, [V, width]."""
        return self.tensor(self._head_name)


def read_tensor(path: Path, tensor: GgufTensor) -> Tensor:
    """A tensor of a file in float32, [rows, columns] or [columns]."""
    torch = import_torch()
    values = np.concatenate(list(float_rows(path, tensor)))
    return torch.from_numpy(values.reshape(tuple(reversed(tensor.dims))))


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / rms(x) * weight over the last axis, in float32 inside."""
    wide = x.float()
    scale = (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (wide * scale).to(x.dtype) * weight


def rotations(shape: Hyperparameters, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions [..., T], each [..., T, 1, head_length / 2]."""
    torch = import_torch()
    half = shape.head_length // 2
    frequencies = shape.rope_base ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = positions.float()[..., None] * frequencies
    return angles.cos()[..., None, :], angles.sin()[..., None, :]


def run_block(
    shape: Hyperparameters,
    block: Block,
    x: Tensor,
    angles: tuple[Tensor, Tensor],
    attention: Attention,
) -> Tensor:
    """One block on x [B, T, width]; `attention` takes q, k, v as [B, T, heads, head_length]."""
    normed = rms_norm(x, block["attn_norm.weight"], shape.epsilon)
    return feed_forward(shape, block, x + attend(shape, block, normed, angles, attention))


def attend(
    shape: Hyperparameters,
    block: Block,
    normed: Tensor,
    angles: tuple[Tensor, Tensor],
    attention: Attention,
) -> Tensor:
    """What a block's attention adds to its input, of which this is the normalized one."""
    functional = import_torch().nn.functional

    def heads(name: str, count: int) -> Tensor:
        values = functional.linear(normed, block[f"{name}.weight"], block.get(f"{name}.bias"))
        return values.unflatten(-1, (count, shape.head_length))

    mixed = attention(
        _rotate(shape, heads("attn_q", shape.num_heads), angles),
        _rotate(shape, heads("attn_k", shape.num_kv_heads), angles),
        heads("attn_v", shape.num_kv_heads),
    )
    return functional.linear(mixed.flatten(-2), block["attn_output.weight"])


def feed_forward(shape: Hyperparameters, block: Block, x: Tensor) -> Tensor:
    """x [B, T, width] and what a block's feed-forward part adds to it."""
    functional = import_torch().nn.functional
    normed = rms_norm(x, block["ffn_norm.weight"], shape.epsilon)
    gate = functional.silu(functional.linear(normed, block["ffn_gate.weight"]))
    inner = gate * functional.linear(normed, block["ffn_up.weight"])
    return x + functional.linear(inner, block["ffn_down.weight"])


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of whole texts that start in column 0; what follows a text does not matter."""
    attend = import_torch().nn.functional.scaled_dot_product_attention
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return attend(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def _rotate(shape: Hyperparameters, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    torch = import_torch()
    cos, sin = (angle.to(x.dtype) for angle in angles)
    if shape.paired:
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x.chunk(2, -1)
    turned = (first * cos - second * sin, first * sin + second * cos)
    return torch.stack(turned, -1).flatten(-2) if shape.paired else torch.cat(turned, -1)


def target_states(
    spec: ModelSpec,
    texts: Sequence[NDArray[np.int32]],
    layers: Sequence[int],
) -> dict[int, list[Tensor]]:
    """The states of each text after so many blocks, [T, width] in bfloat16, by number of blocks.

    Texts are their tokens, [T].
    """
    torch = import_torch()
    shape, weights = hyperparameters_of(spec), Weights(spec, torch.bfloat16)
    blocks = [weights.block(number) for number in range(max(layers))]
    embedding = weights.embedding()
    states: dict[int, list[Tensor]] = {layer: [torch.empty(0)] * len(texts) for layer in layers}
    with torch.inference_mode():
        for group in groups([len(text) for text in texts], range(len(texts))):
            x = embedding[padded([torch.from_numpy(texts[i].astype(int)) for i in group])]
            angles = rotations(shape, torch.arange(x.shape[1])[None])
            for number in range(max(layers) + 1):
                for row, index in enumerate(group if number in layers else ()):
                    states[number][index] = x[row, : len(texts[index])].clone()
                if number < len(blocks):
                    x = run_block(shape, blocks[number], x, angles, causal_attention)
    return states


def groups(lengths: Sequence[int], numbers: Sequence[int]) -> list[list[int]]:
    """Some texts' numbers: those of about one length, some thousand tokens together."""
    found: list[list[int]] = []
    for index in sorted(numbers, key=lambda number: lengths[number]):
        if not found or lengths[index] * (len(found[-1]) + 1) > _BATCH_TOKENS:
            found.append([])
        found[-1].append(index)
    return found


def padded(rows: Iterable[Tensor]) -> Tensor:
    """Rows of several lengths as one tensor [B, T, ...], with zeros behind the shorter ones."""
    return import_torch().nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
