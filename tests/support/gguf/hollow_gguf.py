"""GGUF files of real shapes without data, which reads as zeros and takes no room on the disk."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path

import gguf
import numpy as np


def write_infos(
    writer: gguf.GGUFWriter, path: Path, tensors: Mapping[str, tuple[tuple[int, ...], str]]
) -> None:
    """End a file with tensors of these shapes, as numpy has them, and types."""
    data_bytes = 0
    for name, (shape, kind) in tensors.items():
        type_ = gguf.GGMLQuantizationType[kind]
        block, block_bytes = gguf.GGML_QUANT_SIZES[type_]
        nbytes = prod(shape) // block * block_bytes
        writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes, raw_dtype=type_)
        data_bytes += -(-nbytes // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.truncate(-(-path.stat().st_size // 32) * 32 + data_bytes)
