"""What llama.cpp would allocate, in round numbers: for plans of models without a file.

Weights lie where their layers do, caches are counted by hand, and a buffer holds a batch of rows
and of logits. Q4_0 is rewritten for the processor where it `repacks`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from edgespec.memory.bytes.config import HOST, KV_TYPE_BYTES, RunConfig, padded
from edgespec.memory.bytes.simulation import ContextRequest, DeviceBytes
from edgespec.memory.device.accelerators import Accelerator
from edgespec.memory.plan.machine import Machine, this_machine
from edgespec.models.spec import ModelSpec

STATE_BYTES = 4 * 10**6  # of a recurrent state
_F32 = 4


def sizes_by_hand(
    wanted: Sequence[ContextRequest], *, repacks: bool = False
) -> list[dict[str, DeviceBytes]]:
    return [_one(each.spec, each.config, repacks) for each in wanted]


def machine_with(
    free_bytes: int,
    accelerators: tuple[Accelerator, ...] = (),
    *,
    repacks: bool = False,
    **options: Any,
) -> Machine:
    """A machine whose llama.cpp allocates as `sizes_by_hand` says."""
    sizes = partial(sizes_by_hand, repacks=repacks)
    return Machine(free_bytes, accelerators, sizes=sizes, **options)


def machine_by_hand(workers: Sequence[str] = ()) -> Machine:
    """This machine, where llama.cpp allocates as `sizes_by_hand` says."""
    return replace(this_machine(workers), sizes=sizes_by_hand)


def cache_bytes(spec: ModelSpec, shape: RunConfig, layer: int) -> int:
    """Of one layer: keys and values, or a recurrent state and its snapshots."""
    state = STATE_BYTES * (1 + shape.snapshots) // spec.num_layers if spec.keeps_state else 0
    cells = padded(shape.cache_cells)
    if spec.is_sliding[layer]:
        cells = padded(min(cells, shape.users * spec.sliding_window + shape.batch_size))
    key = spec.key_length[layer] * KV_TYPE_BYTES[shape.kv_type_k]
    value = spec.value_length[layer] * KV_TYPE_BYTES[shape.kv_type_v]
    return int(cells * spec.num_kv_heads[layer] * (key + value)) + state


def _one(spec: ModelSpec, shape: RunConfig, repacks: bool) -> dict[str, DeviceBytes]:
    places = _places(spec, shape)
    used = {HOST, *places, *(label for _, label in shape.overrides)}
    found = {label: [0, 0, 0, _compute(spec, shape)] for label in used}
    for tensor in spec.tensors.values():
        layer = _layer_of(spec, tensor.name)
        label = _overridden(shape, tensor.name) or (places[layer] if layer >= 0 else HOST)
        is_matrix = len(tensor.dims) > 1 and layer >= 0
        packs = label == HOST and is_matrix and tensor.type.name == "Q4_0"
        found[label][packs and (repacks or shape.kernels)] += tensor.data_bytes
    if spec.tied_embeddings and "token_embd.weight" in spec.tensors:
        head = places[spec.num_layers]
        packs = head == HOST and (repacks or shape.kernels) and spec.file_type == "Q4_0"
        if head != HOST or packs:
            found[head][packs] += spec.tensors["token_embd.weight"].data_bytes
    for layer in range(spec.num_layers):
        found[places[layer]][2] += cache_bytes(spec, shape, layer)
    return {label: DeviceBytes(*sizes) for label, sizes in found.items()}


def _overridden(shape: RunConfig, name: str) -> str:
    return next((label for pattern, label in shape.overrides if re.search(pattern, name)), "")


def _places(spec: ModelSpec, shape: RunConfig) -> list[str]:
    """The device of each layer, and of the head behind them."""
    given = [label for one in shape.devices for label in [one.label] * one.layers]
    everything = spec.num_layers + 1
    return [HOST] * (everything - len(given)) + given[:everything]


def _layer_of(spec: ModelSpec, name: str) -> int:
    if name.startswith("blk."):
        return int(name.split(".")[1])
    return -1 if name.startswith("token_embd.") else spec.num_layers


def _compute(spec: ModelSpec, shape: RunConfig) -> int:
    sequences = shape.users + shape.max_leaves - 1
    tokens = -(-min(shape.batch_size, shape.cache_cells) // sequences) * sequences
    rows = min(tokens, shape.max_nodes)
    mask = 2 * padded(shape.cache_cells) * tokens
    return _F32 * (4 * tokens * spec.embedding_size + rows * spec.vocab_size) + mask
