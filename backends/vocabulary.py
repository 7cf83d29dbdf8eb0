"""The tokenizer of a model, without its weights: a GGUF's through llama.cpp, or a folder's own."""

from __future__ import annotations

from typing import Protocol

from edgespec.backends.base import Tokenizer
from edgespec.backends.llama.tokenizer import VocabularyTokenizer
from edgespec.backends.ort.tokenizer import FolderTokenizer
from edgespec.models.spec import ONNX_FORMAT, ModelSpec


class OwnTokenizer(Tokenizer, Protocol):
    """A tokenizer that belongs to whoever opened it."""

    def close(self) -> None: ...


def open_vocabulary(spec: ModelSpec) -> OwnTokenizer:
    """The tokenizer of a model. Raises as `VocabularyTokenizer` and `FolderTokenizer`."""
    if spec.format == ONNX_FORMAT:
        return FolderTokenizer(spec.path, spec.vocab_size)
    return VocabularyTokenizer(spec.path)
