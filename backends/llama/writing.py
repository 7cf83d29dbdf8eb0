"""A model that many texts lie in at once, each in a place of its own: what writes training text.

Steps over a hundred texts cost hardly more for each than its products, which edgespec's kernels
take where they fit. What is kept of a token is what the model computes for it when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import Logits
from edgespec.backends.llama.batch import Batch
from edgespec.backends.llama.context import LlamaContext, LlamaSettings
from edgespec.backends.llama.hidden_rows import LayerRows, Rows
from edgespec.models.exits.text_writer import CANDIDATES, Seen
from edgespec.models.spec import ModelSpec

_MOST_AT_ONCE = 128  # tokens, or as many as there are places
_COMPETING = 64  # logits of which one is looked at first


class Places:
    """The model of `spec`, `places` texts of at most `length` tokens at once.

    The states behind so many blocks as `layers` say are kept. Raises as `LlamaContext.open`.
    """

    def __init__(
        self, spec: ModelSpec, *, places: int, length: int, layers: Sequence[int], threads: int
    ) -> None:
        self.places, self.length = places, length
        most = self._most = max(places, _MOST_AT_ONCE)
        settings = LlamaSettings(
            length,
            batch_size=most,
            max_nodes=most,
            max_leaves=1,
            threads=threads,
            kernels=True,
            tied=spec.tied_embeddings,
            users=places,
            cells=places * length,
            unified=False,
        )
        self._context = LlamaContext(settings)
        self._layers = sorted(set(layers))
        try:
            self._context.open(str(spec.path), None, lambda _params: None)
            self._kept = LayerRows(self._context, self._layers) if layers else None
        except BaseException:
            self._context.close()
            raise
        self._batch = Batch(self._context.lib, most, 1, None, self._context.width)

    def begin(self, place: int, tokens: Sequence[int]) -> Seen:
        """Read the first tokens of a new text in a place; what was there is forgotten."""
        self._context.remove(place, 0)
        parts = []
        for start in range(0, len(tokens), self._most):
            part = tokens[start : start + self._most]
            positions = range(start, start + len(part))
            parts.append(self._seen(part, positions, [place] * len(part)))
        return Seen(
            np.concatenate([part.ids for part in parts]),
            np.concatenate([part.logits for part in parts]),
            {
                layer: np.concatenate([part.states[layer] for part in parts])
                for layer in self._layers
            },
        )

    def step(self, first: int, tokens: Sequence[int], positions: Sequence[int]) -> Seen:
        """Read one token more of each text in so many places from `first` on."""
        for place, position in enumerate(positions, first):
            if position == 0:
                self._context.remove(place, 0)
        return self._seen(tokens, positions, range(first, first + len(tokens)))

    def _seen(self, tokens: Sequence[int], positions: Sequence[int], places: Sequence[int]) -> Seen:
        batch, count = self._batch, len(tokens)
        batch.put(0, tokens)
        batch.positions[:count] = positions
        batch.ids[:count, 0] = places
        self._context.decode(batch, count)
        ids, logits = largest(self._context.rows(count), CANDIDATES)
        return Seen(ids, logits, self._states(count))

    def _states(self, count: int) -> dict[int, NDArray[np.uint16]]:
        if self._kept is None:
            return {}
        rows = np.empty((count, self._kept.width), np.float32)
        self._kept.copy(0, rows)
        parts = np.split(_bits(rows), len(self._layers), 1)
        return dict(zip(self._layers, parts, strict=True))

    def close(self) -> None:
        """Free the model; safe to call twice."""
        self._context.close()


def _bits(rows: Rows) -> NDArray[np.uint16]:
    """The bits of rows in bfloat16, rounded to the nearest."""
    half: NDArray[np.uint16] = (((rows.view(np.uint32) >> 15) + 1) >> 1).astype(np.uint16)
    return half


def largest(logits: Logits, count: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Tokens of the largest logits of each row [n, V], the best one first, and these: [n, count].

    Fewer where V is smaller. Logits of one column of a table compete first: where so many
    columns are looked at as are asked for, none of the largest is missed.
    """
    size = logits.shape[1]
    count, columns = min(count, size), size // _COMPETING
    table = logits[:, : columns * _COMPETING].reshape(len(logits), _COMPETING, columns)
    ids = np.empty((len(logits), count), np.int32)
    rest = np.arange(columns * _COMPETING, size)
    best = table.max(1) if columns > count else np.zeros((len(logits), columns), np.float32)
    for row, (values, most) in enumerate(zip(logits, best, strict=True)):
        asked = np.argpartition(most, -count)[-count:] if columns > count else np.arange(columns)
        among = np.concatenate([(asked + columns * np.arange(_COMPETING)[:, None]).ravel(), rest])
        found = among[np.argpartition(values[among], -count)[-count:]]
        ids[row] = found[np.argsort(-values[found])]
    return ids, np.take_along_axis(logits, ids, 1)
