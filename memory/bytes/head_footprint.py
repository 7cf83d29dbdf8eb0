"""How many bytes a head adds to a run, in its model's file or in one of its own.

As `edgespec.memory.bytes.footprint` for models. Rows are those that a head reads and gives, besides
logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from edgespec.memory.bytes.footprint import (
    HOST,
    KV_TYPE_BYTES,
    Component,
    RunShape,
    batch_shape,
    beside_another,
    kv_cache_bytes,
    padded,
    weights_bytes,
    work_bytes,
)
from edgespec.memory.bytes.graph import BatchShape
from edgespec.memory.bytes.head_graph import (
    assistant_compute_bytes,
    block_compute_bytes,
    eagle_compute_bytes,
    head_compute_bytes,
)
from edgespec.memory.bytes.places import device_layers, holder
from edgespec.models.spec import ASSISTANT, DFLASH, EAGLE, MTP, ModelSpec, Reads

HEAD_NODES, HEAD_UNREAD = 8, 65  # tokens of a head's steps, and rows that wait to be fed to it
HEAD_ANEW = 16  # tokens that a head reads behind a gap, before it drafts: a short step
# Tokens that an EAGLE-3 head reads at once: those, and the one that it drafts behind. Its graph has
# a row of logits for each of them.
EAGLE_TOKENS = HEAD_ANEW + 1
BLOCK_TOKENS = 16  # as many as a DFlash head takes in at once
_F32 = 4
_Parts = Iterator[Component]


def head_footprint(spec: ModelSpec, shape: RunShape) -> tuple[Component, ...]:
    """The components that the head in a model's file adds to a run, its weights apart."""
    return _named(_parts_of_block(spec, shape))


def head_file_footprint(
    spec: ModelSpec, target: RunShape, head: ModelSpec, shape: RunShape
) -> tuple[Component, ...]:
    """The components that a head in a file of its own adds to a run of `spec` under `target`.

    `shape` says how the head is loaded; its sizes of steps do not count.
    """
    assert head.reads is not None, "a head"
    parts = _FILES[head.reads.kind](spec, target, head, shape)
    return beside_another("head", head, (part for part in parts if part.nbytes))


def _named(parts: Iterable[Component]) -> tuple[Component, ...]:
    return tuple(replace(part, name=f"head_{part.name}") for part in parts)


def _parts_of_block(spec: ModelSpec, shape: RunShape) -> _Parts:
    """Of a model's last block: a context of one layer, where that lies, and rows of the model.

    These are kept by both contexts for a batch, and by the drafter until it has fed them. Of
    several devices each may compute all of it.
    """
    layer, devices = f"blk.{spec.num_layers - 1}", device_layers(spec, shape)
    keys, values = (spec.tensors[f"{layer}.attn_{one}.weight"].dims[1] for one in "kv")
    kinds = KV_TYPE_BYTES[shape.type_k], KV_TYPE_BYTES[shape.type_v]
    cache = padded(shape.context_size) * (keys * kinds[0] + values * kinds[1])
    batch = shape.batch_size + HEAD_NODES
    rows = shape.batch_size + shape.max_nodes + batch + HEAD_UNREAD + min(batch, HEAD_UNREAD)
    compute = head_compute_bytes(spec, batch_shape(spec, shape, 1))
    block, logits = (holder(devices, i) or HOST for i in (spec.num_layers - 1, spec.num_layers))
    others = sorted({block, logits} - {HOST})
    yield Component("kv_cache", int(cache), device=block)
    yield Component("compute", compute, is_ceiling=block != HOST)
    yield from (Component("compute", compute, True, one) for one in others)
    yield Component("rows", rows * spec.embedding_size * _F32, is_ceiling=True)
    yield Component("logits", spec.vocab_size * _F32, is_ceiling=True)


def _parts_of_block_file(
    _spec: ModelSpec, target: RunShape, head: ModelSpec, shape: RunShape
) -> _Parts:
    """Of a model's last block in a file of its own: its batches are those of the model."""
    shape = replace(
        shape,
        context_size=target.context_size,
        batch_size=target.batch_size,
        max_nodes=target.max_nodes,
        head=True,
    )
    yield from weights_bytes(head, shape)
    yield from _parts_of_block(head, shape)
    yield Component("work", work_bytes(head, shape), is_ceiling=True)


def _parts_of_eagle(spec: ModelSpec, target: RunShape, head: ModelSpec, shape: RunShape) -> _Parts:
    """Of an EAGLE-3 head, with rows of its encoder and rows to go on with."""
    shape = replace(shape, batch_size=EAGLE_TOKENS, max_nodes=EAGLE_TOKENS)
    own_values = head.embedding_size * 2 * EAGLE_TOKENS
    yield from _parts_of_reader(spec, target, head, shape, eagle_compute_bytes, own_values)


def block_nodes(reads: Reads) -> int:
    """Tokens of a DFlash head's step, the one that it drafts behind among them.

    As many as other heads' steps have, where it was trained for more.
    """
    return min(reads.block, HEAD_NODES)


def _parts_of_dflash(spec: ModelSpec, target: RunShape, head: ModelSpec, shape: RunShape) -> _Parts:
    """Of a DFlash head, with rows of logits for a block."""
    assert head.reads is not None, "a head"
    shape = replace(shape, batch_size=BLOCK_TOKENS, max_nodes=block_nodes(head.reads))
    yield from _parts_of_reader(spec, target, head, shape, block_compute_bytes, 0)


def _parts_of_reader(
    spec: ModelSpec,
    target: RunShape,
    head: ModelSpec,
    shape: RunShape,
    compute_bytes: Callable[[ModelSpec, BatchShape], int],
    own_values: int,
) -> _Parts:
    """Of a head that reads what some layers of the model take in.

    The model's context keeps these rows for a batch, and the drafter until it has fed them.
    """
    shape = replace(shape, context_size=target.context_size)
    of_target = target.batch_size + target.max_nodes + HEAD_UNREAD + shape.batch_size
    rows = len(target.hands_out) * spec.embedding_size * of_target + own_values
    compute = compute_bytes(head, batch_shape(head, shape, shape.batch_size))
    yield from weights_bytes(head, shape)
    for one in device_layers(head, shape) or {HOST: range(0)}:
        yield Component("kv_cache", kv_cache_bytes(head, shape), device=one)
    yield from _parts_of_steps(head, shape, compute, rows, shape.max_nodes)


def _parts_of_assistant(
    spec: ModelSpec, target: RunShape, head: ModelSpec, shape: RunShape
) -> _Parts:
    """Of one that looks into its model's cache, for one token at a time."""
    shape = replace(
        shape,
        context_size=target.context_size,
        batch_size=1,
        max_nodes=1,
        type_k=target.type_k,
        type_v=target.type_v,
        head=True,
    )
    window = batch_shape(spec, target, 1).window_cells
    batch = replace(batch_shape(head, shape, 1), window_cells=window)
    compute = assistant_compute_bytes(head, batch, spec.embedding_size)
    rows = spec.embedding_size * (target.batch_size + target.max_nodes + 3 + HEAD_UNREAD)
    yield from weights_bytes(head, shape)
    yield from _parts_of_steps(head, shape, compute, rows, 1)


def _parts_of_steps(
    head: ModelSpec, shape: RunShape, compute: int, row_values: int, num_rows: int
) -> _Parts:
    """What steps of a head take; of several devices each may compute all of them."""
    for one in {HOST: None, **device_layers(head, shape)}:
        yield Component("compute", compute, is_ceiling=True, device=one)
    yield Component("work", work_bytes(head, shape), is_ceiling=True)
    yield Component("rows", row_values * _F32, is_ceiling=True)
    yield Component("logits", num_rows * head.vocab_size * _F32, is_ceiling=True)


_FILES: dict[str, Callable[[ModelSpec, RunShape, ModelSpec, RunShape], _Parts]] = {
    EAGLE: _parts_of_eagle,
    MTP: _parts_of_block_file,
    ASSISTANT: _parts_of_assistant,
    DFLASH: _parts_of_dflash,
}
