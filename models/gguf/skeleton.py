"""A skeleton: the header of a model without its tokenizer, in front of a hole as large as its data.

llama.cpp loads one without allocating in milliseconds, and says what the whole file would take.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

from edgespec.models.gguf.ggml_types import GGML_NUMBERS
from edgespec.models.gguf.reader import GgufTensor

_STRING, _UINT32 = 8, 4  # GGUF's numbers of value types
_VERSION, _ALIGNMENT = 3, 32
_NO_TOKENIZER = "none"  # llama.cpp's word for a model without one
_ALIGNMENT_KEY = b"general.alignment"


def skeleton_header(
    arch: str, settings: Sequence[bytes], vocab_size: int, tensors: Iterable[GgufTensor]
) -> tuple[bytes, int]:
    """The header, and bytes of the whole file that it announces.

    Args:
        settings: as of `Gguf.settings`; tensors of all parts of a split file are laid out in one.
        vocab_size: of the tokenizer that is left out.
    """
    kept = [one for one in settings if _key_of(one) != _ALIGNMENT_KEY]
    kept.append(_entry("tokenizer.ggml.model", _STRING, _text(_NO_TOKENIZER)))
    if not any(_key_of(one).endswith(b".vocab_size") for one in kept):
        kept.append(_entry(f"{arch}.vocab_size", _UINT32, struct.pack("<I", vocab_size)))
    infos, offset = [], 0
    for one in tensors:
        dims = struct.pack(f"<I{len(one.dims)}Q", len(one.dims), *one.dims)
        place = struct.pack("<IQ", GGML_NUMBERS[one.type.name], offset)
        infos.append(_text(one.name) + dims + place)
        offset += _aligned(one.data_bytes)
    counts = struct.pack("<IQQ", _VERSION, len(infos), len(kept))
    header = b"".join((b"GGUF", counts, *kept, *infos))
    return header, _aligned(len(header)) + offset


def write_skeleton(path: Path, header: bytes, file_bytes: int) -> None:
    """Write one; what follows the header takes no room on disks that know holes."""
    with path.open("wb") as file:
        file.write(header)
        file.truncate(file_bytes)


def _key_of(entry: bytes) -> bytes:
    (length,) = struct.unpack_from("<Q", entry)
    return entry[8 : 8 + length]


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _entry(key: str, kind: int, value: bytes) -> bytes:
    return _text(key) + struct.pack("<I", kind) + value


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
