"""How many bytes a head adds to a run, in its model's file or in one of its own.

As `edgespec.memory.bytes.footprint` for models. Rows are those that a head reads and gives, besides
logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.bytes.footprint import (
    F32,
    Component,
    beside_another,
    context_parts,
    weights_parts,
)
from edgespec.memory.bytes.simulation import Allocation, ContextRequest
from edgespec.models.spec import ASSISTANT, DFLASH, EAGLE, MTP, HeadSpec, ModelSpec

HEAD_NODES, HEAD_UNREAD = 8, 65  # tokens of a head's steps, and rows that wait to be fed to it
HEAD_ANEW = 16  # tokens that a head reads behind a gap, before it drafts: a short step
# Tokens that an EAGLE-3 head reads at once: those, and the one that it drafts behind. Its graph has
# a row of logits for each of them.
EAGLE_TOKENS = HEAD_ANEW + 1
BLOCK_TOKENS = 16  # as many as a DFlash head takes in at once


def wanted_head(head: ModelSpec, target: RunConfig, config: RunConfig) -> ContextRequest:
    """The context of a head in this file, beside its model's, which comes first."""
    config, changes = head_settings(head.reads, target, config)
    return ContextRequest(head, config, tuple(changes.items()), beside=0)


def block_footprint(
    spec: ModelSpec, target: RunConfig, answer: Allocation
) -> tuple[Component, ...]:
    """The components that the head in a model's file adds to a run, its weights apart."""
    parts = (*context_parts(answer), *_rows_of_block(spec, target))
    return tuple(replace(part, name=f"head_{part.name}") for part in parts if part.nbytes)


def head_footprint(
    spec: ModelSpec, target: RunConfig, wanted: ContextRequest, answer: Allocation
) -> tuple[Component, ...]:
    """The components that a head in a file of its own adds to a run of `spec` under `target`."""
    head, config = wanted.spec, wanted.config
    parts = (
        *weights_parts(head, config, answer),
        *context_parts(answer),
        *_rows_of(spec, target, head, config),
    )
    return beside_another("head", head, (part for part in parts if part.nbytes))


def head_settings(
    reads: HeadSpec | None, target: RunConfig, config: RunConfig
) -> tuple[RunConfig, dict[str, int]]:
    """How the context of a head is made, and parameters of llama.cpp that others do not have.

    `config` says how it is loaded; its sizes of steps do not count. Without `reads` it is the last
    block of its model's own file.
    """
    config = replace(config, context_size=target.context_size, cells=0, captured_layers=())
    if reads is not None and reads.kind in (EAGLE, DFLASH):
        # It reads layers of its model, in small batches, with logits of all their tokens.
        batch, nodes = EAGLE_TOKENS, EAGLE_TOKENS
        if reads.kind == DFLASH:  # as many as other heads' steps have, where it is made for more
            batch, nodes = BLOCK_TOKENS, min(reads.block, HEAD_NODES)
        changes = {"n_batch": batch, "n_ubatch": batch, "n_outputs_max": nodes}
        return replace(config, batch_size=batch, max_nodes=nodes), changes
    config = replace(config, head=True)
    if reads is not None and reads.kind == ASSISTANT:  # it looks into the model's cache
        key, value = target.kv_type_k, target.kv_type_v
        config = replace(config, kv_type_k=key, kv_type_v=value, batch_size=1, max_nodes=1)
    else:
        config = replace(config, batch_size=target.batch_size, max_nodes=HEAD_NODES)
        config = replace(config, max_leaves=1, users=1, lora=())
    # LLAMA_CONTEXT_TYPE_MTP, of one for a model's last block, and one row of logits.
    return config, {"ctx_type": 1, "n_outputs_max": 1, "n_seq_max": 1}


def _rows_of_block(spec: ModelSpec, target: RunConfig) -> Iterator[Component]:
    """Rows of the model, kept by both contexts for a batch and by the drafter until it has fed
    them."""
    batch = target.batch_size + HEAD_NODES
    rows = target.batch_size + target.max_nodes + batch + HEAD_UNREAD + min(batch, HEAD_UNREAD)
    yield Component("rows", rows * spec.embedding_size * F32, is_ceiling=True)
    yield Component("logits", spec.vocab_size * F32, is_ceiling=True)


def _rows_of(
    spec: ModelSpec, target: RunConfig, head: ModelSpec, config: RunConfig
) -> Iterator[Component]:
    """Rows that the model's context keeps for a batch, and the drafter until it has fed them."""
    assert head.reads is not None, "a head"
    kind, logits = head.reads.kind, config.max_nodes
    if kind == MTP:
        yield from _rows_of_block(head, target)
        return
    of_target = target.batch_size + target.max_nodes + HEAD_UNREAD
    if kind == ASSISTANT:
        values = spec.embedding_size * (of_target + 3)
    else:
        values = len(target.captured_layers) * spec.embedding_size * (of_target + config.batch_size)
    if kind == EAGLE:  # and rows of its encoder, and rows to go on with
        values += head.embedding_size * 2 * EAGLE_TOKENS
    yield Component("rows", values * F32, is_ceiling=True)
    yield Component("logits", logits * head.vocab_size * F32, is_ceiling=True)
