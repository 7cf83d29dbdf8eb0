"""The target's rows behind some of its blocks for training texts: what drafters learn to read.

They are computed once with the frozen blocks, or kept while the texts are written. Kept ones lie in
files beside the texts and are read from there, since many of them would not fit in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from edgespec.models.exits.network import (
    Tensor,
    Weights,
    causal_attention,
    hyperparameters_of,
    import_torch,
    rotations,
    run_block,
)
from edgespec.models.exits.training_texts import (
    TrainingText,
    load_training_texts,
    states_path,
    text_files,
)
from edgespec.models.spec import ModelSpec
from edgespec.models.writing import whole_file

_BATCH_TOKENS = 2048


def target_states(
    spec: ModelSpec,
    texts: Sequence[NDArray[np.int32]],
    layers: Sequence[int],
    progress: Callable[[float], None] = lambda _part: None,
) -> dict[int, list[Tensor]]:
    """The states of each text after so many blocks, [T, width] in bfloat16, by number of blocks.

    Texts are their tokens, [T].
    """
    torch = import_torch()
    shape, weights = hyperparameters_of(spec), Weights(spec, torch.bfloat16)
    blocks = [weights.block(number) for number in range(max(layers))]
    embedding = weights.embedding()
    states: dict[int, list[Tensor]] = {layer: [torch.empty(0)] * len(texts) for layer in layers}
    done = 0
    with torch.inference_mode():
        for group in groups([len(text) for text in texts]):
            x = embedding[padded([torch.from_numpy(texts[i].astype(int)) for i in group])]
            angles = rotations(shape, torch.arange(x.shape[1])[None])
            for number in range(max(layers) + 1):
                for row, index in enumerate(group if number in layers else ()):
                    states[number][index] = x[row, : len(texts[index])].clone()
                if number < len(blocks):
                    x = run_block(shape, blocks[number], x, angles, causal_attention)
            done += len(group)
            progress(done / len(texts))
    return states


def groups(lengths: Sequence[int]) -> list[list[int]]:
    """Texts of about one length, some thousand tokens together."""
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    found: list[list[int]] = []
    for index in order:
        if not found or lengths[index] * (len(found[-1]) + 1) > _BATCH_TOKENS:
            found.append([])
        found[-1].append(index)
    return found


def padded(rows: Iterable[Tensor]) -> Tensor:
    """Rows of several lengths as one tensor [B, T, ...], with zeros behind the shorter ones."""
    return import_torch().nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def bits_of(states: Tensor) -> NDArray[np.uint16]:
    """States as the bits of bfloat16, which numpy does not know."""
    bits: NDArray[np.uint16] = states.bfloat16().view(import_torch().uint16).numpy()
    return bits


class StoredStates(Sequence[Tensor]):
    """The states of a folder's texts, those after some blocks side by side: [T, blocks x width].

    What is not there yet is computed and kept.
    """

    def __init__(
        self,
        spec: ModelSpec,
        folder: Path,
        layers: Sequence[int],
        progress: Callable[[float], None] = lambda _part: None,
    ) -> None:
        self._torch = import_torch()
        self._rows: list[tuple[list[NDArray[np.uint16]], int, int]] = []
        files = text_files(folder)
        for number, path in enumerate(files):
            missing = [layer for layer in layers if not states_path(path, layer).exists()]
            texts = load_training_texts(path)
            if missing:
                _keep_states(spec, path, texts, missing)
            progress((number + 1) / len(files))
            bits = [np.load(states_path(path, layer), mmap_mode="r") for layer in layers]
            ends = np.cumsum([len(text.tokens) for text in texts]).tolist()
            self._rows += [(bits, *part) for part in zip([0, *ends], ends, strict=False)]

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        """Those of one text, in bfloat16."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        bits, start, end = self._rows[index]
        rows = np.concatenate([layer[start:end] for layer in bits], axis=1)
        return self._torch.from_numpy(rows).view(self._torch.bfloat16)


def _keep_states(
    spec: ModelSpec, path: Path, texts: Sequence[TrainingText], layers: Sequence[int]
) -> None:
    states = target_states(spec, [text.tokens for text in texts], layers)
    for layer in layers:
        with whole_file(states_path(path, layer)) as partial, partial.open("wb") as file:
            np.save(file, np.concatenate([bits_of(rows) for rows in states[layer]]))
