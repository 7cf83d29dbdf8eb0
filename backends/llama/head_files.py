"""Heads in files of their own, each opened as its kind."""

from __future__ import annotations

from collections.abc import Callable

from edgespec.backends.llama.block_head import BlockHead
from edgespec.backends.llama.cache_head import CacheHead
from edgespec.backends.llama.context import LlamaContext
from edgespec.backends.llama.eagle_head import EagleHead
from edgespec.backends.llama.following import DraftHead
from edgespec.backends.llama.head import MtpHead
from edgespec.memory.bytes.config import RunConfig
from edgespec.models.spec import ASSISTANT, DFLASH, EAGLE, MTP, ModelSpec

_KINDS: dict[str, Callable[..., DraftHead]] = {
    EAGLE: EagleHead,
    MTP: MtpHead,
    ASSISTANT: CacheHead,
    DFLASH: BlockHead,
}


def open_head_file(
    spec: ModelSpec,
    settings: RunConfig,
    model: LlamaContext,
    *,
    progress: Callable[[float], None] | None = None,
) -> DraftHead:
    """The head in the file of `spec`, for the model of another context, whose cache is empty.

    `settings` are its own; their sizes of steps do not count. Raises as `LlamaContext.open`.
    """
    assert spec.reads is not None, "a head"
    return _KINDS[spec.reads.kind](model, spec, settings, progress=progress)
