"""Importance matrices: computed, read, and refused."""

from __future__ import annotations

import os
import signal
import struct
from pathlib import Path

import numpy as np
import pytest
from quantize_cases import write_matrix
from random_gguf import WIDTH

from edgespec.errors import (
    UnsupportedError,
)
from edgespec.models.gguf.reader import read_gguf
from edgespec.quantize import imatrix
from edgespec.quantize.imatrix import compute_imatrix, read_imatrix


def test_a_computed_matrix_holds_mean_squares(
    source: Path, tokens: list[list[int]], matrix: Path
) -> None:
    """The first block's inputs are normalised embeddings: their mean square is worked out here."""
    found = read_imatrix(matrix)
    model = read_gguf(source)
    data = source.read_bytes()

    def tensor(name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        info = next(t for t in model.tensors if t.name == name)
        raw = np.frombuffer(data[info.offset : info.offset + info.data_bytes], np.float32)
        return raw.reshape(info.dims[::-1])

    rows = tensor("token_embd.weight")[np.concatenate(tokens)]
    rows = rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + 1e-6)
    expected = ((rows * tensor("blk.0.attn_norm.weight")) ** 2).mean(axis=0)
    np.testing.assert_allclose(found.values["blk.0.attn_q.weight"], expected, rtol=1e-4)
    assert {"blk.3.ffn_down.weight", "output.weight"} <= set(found.values)
    assert found.dataset == "random" and len(found.values["blk.0.attn_q.weight"]) == WIDTH


def test_sums_are_divided_by_their_counts(tmp_path: Path) -> None:
    """Nothing is known of what was never multiplied: all its columns weigh the same."""
    path = write_matrix(tmp_path / "m.gguf", {"a": (4, [2.0, 8.0]), "b": (0, [3.0])})
    found = read_imatrix(path)
    assert found.values["a"].tolist() == [0.5, 2.0] and found.values["b"].tolist() == [1.0]
    assert (found.dataset, found.num_chunks) == ("data", 7)


def test_a_file_in_the_older_format_is_told_how_to_be_made_new(tmp_path: Path) -> None:
    path = tmp_path / "old.dat"
    path.write_bytes(struct.pack("<ii1sii2fi", 1, 1, b"a", 4, 2, 2.0, 8.0, 7))
    with pytest.raises(UnsupportedError, match="it is no GGUF file") as caught:
        read_imatrix(path)
    assert "--output-format gguf" in caught.value.hint


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GGUF",
        b"GGUF" + bytes(40),
        b"hello, this is text",
    ],
)
def test_files_that_are_no_matrix(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "matrix"
    path.write_bytes(data)
    with pytest.raises(UnsupportedError, match="no importance matrix"):
        read_imatrix(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_matrix_that_is_not_finite(tmp_path: Path, value: float) -> None:
    with pytest.raises(UnsupportedError, match="its values for a are not finite"):
        read_imatrix(write_matrix(tmp_path / "m.gguf", {"a": (1, [value])}))


def test_an_interrupt_within_a_callback_is_not_lost(
    source: Path, tokens: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes while llama.cpp shows a node; C would drop what is raised there."""
    shown: list[int] = []

    def hear(*_: object) -> bool:
        if not shown:
            signal.raise_signal(signal.SIGINT)
        shown.append(1)
        return False

    monkeypatch.setattr(imatrix._Sums, "hear", hear)
    signal.signal(signal.SIGINT, before := signal.default_int_handler)  # some shells ignore it
    with pytest.raises(KeyboardInterrupt):
        compute_imatrix(source, tokens, tmp_path / "matrix.gguf", threads=1, dataset="random")
    assert shown and os.listdir(tmp_path) == []
    assert signal.getsignal(signal.SIGINT) is before
