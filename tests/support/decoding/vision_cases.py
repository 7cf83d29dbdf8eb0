"""Backends and engines that see, and libmtmd's own way of reading the same prompts."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frozen_times import free_drafts
from vision_gguf import TEMPLATE, images

from edgespec.backends.base import ImageRun
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.library import library
from edgespec.backends.llama.vision import mtmd
from edgespec.decode.engine import Engine
from edgespec.drafting.suffix import SuffixDrafter
from edgespec.memory.bytes.config import RunConfig
from edgespec.models.images import Image, read_image

PLACES = ("first", "last", "between")


def open_backend(folder: Path, name: str, **changes: Any) -> LlamaBackend:
    settings = {"context_size": 1024, "batch_size": 64, "threads": 1, "max_nodes": 8, **changes}
    projector = folder / f"mmproj-{name}.gguf"
    return LlamaBackend(folder / f"{name}.gguf", RunConfig(**settings, projector=projector))


def open_engine(folder: Path, name: str, *, drafts: bool = False, **changes: Any) -> Engine:
    """One that drafts, all that it can, from texts."""
    backend = open_backend(folder, name, **changes)
    curve = free_drafts(backend.max_nodes) if drafts else None
    make = SuffixDrafter if drafts else lambda: None
    more = [drafter for _ in range(1, backend.settings.users) if (drafter := make()) is not None]
    return Engine(backend, curve=curve, drafter=make(), more_drafters=more, chat_template=TEMPLATE)


def shown(count: int, first: int = 1) -> list[Image]:
    return [read_image(data) for data in images(count, first)]


def parts_with(place: str, count: int) -> list[str | Image]:
    """A prompt with images at its beginning, at its end, or between texts."""
    several = shown(count)
    texts = [f" and {number}" for number in range(count)]
    between: list[str | Image] = [one for pair in zip(texts, several, strict=True) for one in pair]
    if place == "between":
        return [*between, "?"]
    return [*several, "What is this?"] if place == "first" else ["What is this?", *several, "\n"]


def text_of(parts: Sequence[str | Image]) -> str:
    return "".join(one.mark if isinstance(one, Image) else one for one in parts)


def prompt(backend: LlamaBackend, parts: Sequence[str | Image]) -> list[list[int] | ImageRun]:
    """What is read one after the other."""
    made: list[list[int] | ImageRun] = []
    for part in parts:
        text = [backend.tokenizer.encode(part)] if isinstance(part, str) else []
        for one in text if isinstance(part, str) else backend.image_pieces(part):
            if made and isinstance(made[-1], list) and not isinstance(one, ImageRun):
                made[-1] += one
            else:
                made.append(one if isinstance(one, ImageRun) else [*one])
    return made


def read(backend: LlamaBackend, pieces: Sequence[list[int] | ImageRun]) -> Any:
    row = None
    for piece in pieces:
        row = backend.read_image(piece) if isinstance(piece, ImageRun) else backend.prefill(piece)
    assert row is not None
    return row.copy()


def forget_embeddings(engine: Engine) -> None:
    backend: Any = engine.backend
    backend._context.vision._kept.clear()


@contextmanager
def held_encoder(engine: Engine) -> Iterator[Held]:
    """Within, nothing is encoded before `go_on`."""
    backend: Any = engine.backend
    vision, held = backend._context.vision, Held()
    encode = vision._encoded

    def late(*given: Any) -> Any:
        held.begun.release()
        assert held.go_on.wait(60)
        held.count += 1
        return encode(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vision, "_encoded", late)
        try:
            yield held
        finally:
            held.go_on.set()


class Held:
    """An encoder that waits: what it has `begun`, and how many it has encoded since `go_on`."""

    def __init__(self) -> None:
        self.begun, self.go_on, self.count = threading.Semaphore(0), threading.Event(), 0

    def wait(self) -> None:
        assert self.begun.acquire(timeout=60)


class Reference:
    """libmtmd's helpers and plain calls of llama.cpp, in a backend's own context."""

    def __init__(self, backend: LlamaBackend) -> None:
        self.backend, self.lib, self.mtmd = backend, library(), mtmd()
        self.context = backend._context
        assert self.context.vision is not None
        self.vision = self.context.vision

    def read(self, parts: Sequence[str | Image]) -> tuple[Any, int]:
        """The last logits of a prompt, read into an empty cache, and the next position."""
        lib = self.mtmd
        marker = lib.mtmd_default_marker()
        text = b"".join(marker if isinstance(one, Image) else one.encode() for one in parts)
        asked = lib.mtmd_input_text(text, len(text), True, True)
        bitmaps = [self.vision._bitmap(one) for one in parts if isinstance(one, Image)]
        several = (ctypes.c_void_p * len(bitmaps))(*bitmaps)
        chunks, handle = lib.mtmd_input_chunks_init(), self.vision._context
        status = lib.mtmd_tokenize(handle, chunks, ctypes.byref(asked), several, len(bitmaps))
        assert status == 0
        self.backend.truncate(0)
        self.lib.llama_memory_clear(self.context.memory, False)
        end = ctypes.c_int32()
        status = lib.mtmd_helper_eval_chunks(
            *(handle, self.context.handle, chunks, 0, 0),
            *(self.backend.batch_size, True, ctypes.byref(end)),
        )
        assert status == 0
        for bitmap in bitmaps:
            lib.mtmd_bitmap_free(bitmap)
        lib.mtmd_input_chunks_free(chunks)
        return self.context.rows(1)[0].copy(), end.value

    def greedy(self, parts: Sequence[str | Image], count: int) -> list[int] | None:
        """The tokens of plain greedy decoding; None where libmtmd's embeddings are no numbers."""
        row, position = self.read(parts)
        if not np.isfinite(row).all():
            return None
        tokens = [int(np.argmax(row))]
        while len(tokens) < count and not self.backend.tokenizer.is_end(tokens[-1]):
            self.backend._shared.chain.put_chain(tokens[-1:], position)
            self.context.decode(self.backend._shared.chain, 1)
            tokens.append(int(np.argmax(self.context.rows(1)[0])))
            position += 1
        self.lib.llama_memory_clear(self.context.memory, False)
        return tokens
