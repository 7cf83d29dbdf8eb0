"""How many bytes a head adds to a run, in its model's file or in one of its own.

As `edgespec.memory.bytes.footprint` for models. Rows are those that a head reads and gives, besides
logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from edgespec.memory.bytes.footprint import (
    Component,
    beside_another,
    context_parts,
    weights_parts,
)
from edgespec.memory.bytes.shape import RunShape
from edgespec.memory.bytes.simulation import Answer, Wanted
from edgespec.models.spec import ASSISTANT, DFLASH, EAGLE, MTP, ModelSpec, Reads

HEAD_NODES, HEAD_UNREAD = 8, 65  # tokens of a head's steps, and rows that wait to be fed to it
HEAD_ANEW = 16  # tokens that a head reads behind a gap, before it drafts: a short step
# Tokens that an EAGLE-3 head reads at once: those, and the one that it drafts behind. Its graph has
# a row of logits for each of them.
EAGLE_TOKENS = HEAD_ANEW + 1
BLOCK_TOKENS = 16  # as many as a DFlash head takes in at once
# What contexts of heads have in llama.cpp that others do not: the type of one for a model's last
# block (LLAMA_CONTEXT_TYPE_MTP), and one row of logits.
MTP_CONTEXT = (("ctx_type", 1), ("n_outputs_max", 1), ("n_seq_max", 1))
_F32 = 4


def block_nodes(reads: Reads) -> int:
    """Tokens of a DFlash head's step, the one that it drafts behind among them.

    As many as other heads' steps have, where it was trained for more.
    """
    return min(reads.block, HEAD_NODES)


def reader_context(shape: RunShape) -> tuple[tuple[str, int], ...]:
    """Of a head that reads layers of its model: small batches, with logits of all their tokens."""
    batch = shape.batch_size
    return (("n_batch", batch), ("n_ubatch", batch), ("n_outputs_max", shape.max_nodes))


def wanted_block(spec: ModelSpec, target: RunShape) -> Wanted:
    """The context of the head in a model's own file, beside the model's, which comes first."""
    return Wanted(spec, _block_shape(target, target), MTP_CONTEXT, beside=0)


def wanted_head(head: ModelSpec, target: RunShape, shape: RunShape) -> Wanted:
    """The context of a head in a file of its own, beside its model's, which comes first.

    `shape` says how the head is loaded; its sizes of steps do not count.
    """
    shape = _head_shape(head.reads, target, shape)
    reads_layers = head.reads is not None and head.reads.kind in (EAGLE, DFLASH)
    return Wanted(head, shape, reader_context(shape) if reads_layers else MTP_CONTEXT, beside=0)


def block_footprint(spec: ModelSpec, target: RunShape, answer: Answer) -> tuple[Component, ...]:
    """The components that the head in a model's file adds to a run, its weights apart."""
    parts = (*context_parts(answer), *_rows_of_block(spec, target))
    return tuple(replace(part, name=f"head_{part.name}") for part in parts if part.nbytes)


def head_footprint(
    spec: ModelSpec, target: RunShape, wanted: Wanted, answer: Answer
) -> tuple[Component, ...]:
    """The components that a head in a file of its own adds to a run of `spec` under `target`."""
    head, shape = wanted.spec, wanted.shape
    parts = (
        *weights_parts(head, shape, answer),
        *context_parts(answer),
        *_rows_of(spec, target, head, shape),
    )
    return beside_another("head", head, (part for part in parts if part.nbytes))


def _block_shape(target: RunShape, shape: RunShape) -> RunShape:
    """Of a model's last block: its batches are those of the model."""
    return replace(
        shape,
        context_size=target.context_size,
        batch_size=target.batch_size,
        max_nodes=HEAD_NODES,
        sequences=1,
        leaves=1,
        head=True,
        captured=(),
    )


def _head_shape(reads: Reads | None, target: RunShape, shape: RunShape) -> RunShape:
    assert reads is not None, "a head"
    shape = replace(shape, context_size=target.context_size, captured=())
    if reads.kind == MTP:
        return _block_shape(target, shape)
    if reads.kind == EAGLE:
        return replace(shape, batch_size=EAGLE_TOKENS, max_nodes=EAGLE_TOKENS)
    if reads.kind == DFLASH:
        return replace(shape, batch_size=BLOCK_TOKENS, max_nodes=block_nodes(reads))
    kinds = target.type_k, target.type_v  # it looks into the model's cache
    shape = replace(shape, type_k=kinds[0], type_v=kinds[1])
    return replace(shape, batch_size=1, max_nodes=1, head=True)


def _rows_of_block(spec: ModelSpec, target: RunShape) -> Iterator[Component]:
    """Rows of the model, kept by both contexts for a batch and by the drafter until it has fed
    them."""
    batch = target.batch_size + HEAD_NODES
    rows = target.batch_size + target.max_nodes + batch + HEAD_UNREAD + min(batch, HEAD_UNREAD)
    yield Component("rows", rows * spec.embedding_size * _F32, is_ceiling=True)
    yield Component("logits", spec.vocab_size * _F32, is_ceiling=True)


def _rows_of(
    spec: ModelSpec, target: RunShape, head: ModelSpec, shape: RunShape
) -> Iterator[Component]:
    """Rows that the model's context keeps for a batch, and the drafter until it has fed them."""
    assert head.reads is not None, "a head"
    kind, logits = head.reads.kind, shape.max_nodes
    if kind == MTP:
        yield from _rows_of_block(head, target)
        return
    of_target = target.batch_size + target.max_nodes + HEAD_UNREAD
    if kind == ASSISTANT:
        values = spec.embedding_size * (of_target + 3)
    else:
        values = len(target.captured) * spec.embedding_size * (of_target + shape.batch_size)
    if kind == EAGLE:  # and rows of its encoder, and rows to go on with
        values += head.embedding_size * 2 * EAGLE_TOKENS
    yield Component("rows", values * _F32, is_ceiling=True)
    yield Component("logits", logits * head.vocab_size * _F32, is_ceiling=True)
