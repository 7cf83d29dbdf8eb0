"""A model that is a function, whose cache can be written to files, whole or in parts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from decoding_cases import END, VOCAB, flat
from fake_backend import FakeBackend
from session_cases import TEMPLATE, shouting

from edgespec.backends.base import Logits
from edgespec.decode.engine import Engine
from edgespec.errors import BackendError
from edgespec.memory.store.cells import PrefixStore


class Keeping(FakeBackend):
    """Writes the tokens of its cells; counts those that it was given to prefill."""

    images: Sequence[Sequence[int]] = ()
    splits_cache = True
    prefilled = 0

    def prefill(self, tokens: Sequence[int]) -> Logits:
        self.prefilled += len(tokens)
        return super().prefill(tokens)

    def save_cache(self, path: str, start: int = 0, end: int | None = None) -> int:
        assert self.splits_cache or (start, end) in ((0, None), (0, self.length))
        return Path(path).write_text(json.dumps(list(self.tokens[:end][start:])))

    def load_cache(
        self,
        path: str,
        tokens: Sequence[int],
        images: Sequence[Sequence[int]] = (),
        start: int = 0,
    ) -> None:
        assert self.truncate(start) == start
        text = Path(path).read_bytes()
        if json.loads(text[: text.index(b"]") + 1]) != list(tokens):
            raise BackendError("these are other cells")
        for first in range(0, len(tokens), self.batch_size):
            super().prefill(tokens[first : first + self.batch_size])


def keeping_engine(
    model: Callable[[tuple[int, ...]], Sequence[float]] = shouting,
    *,
    key: str = "key",
    budget: int = 1 << 20,
    splits: bool = True,
    **options: Any,
) -> Engine:
    """An engine as a process makes it that keeps prefixes in the folder of this test."""
    backend = Keeping(model, VOCAB, end=END, **options)
    backend.splits_cache = splits
    engine = Engine(backend, curve=flat(), chat_template=TEMPLATE)
    engine.keep_prefixes(PrefixStore(key, "fake.gguf", budget))
    return engine
