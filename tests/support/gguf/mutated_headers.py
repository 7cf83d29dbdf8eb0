"""Headers of GGUF files that somebody damaged, or wrote to do damage: sizes, counts and names."""

from __future__ import annotations

import math
import random
import re
import struct
from pathlib import Path
from typing import NamedTuple

from gemma4_gguf import write_gemma4
from hybrid_gguf import HYBRIDS, Shape, write_hybrid

from edgespec.models.gguf.reader import read_gguf

_ODD = (0, 1, 2, 3, 5, 7, 255, 256, 1000, 65_535, 1 << 20, 2**31 - 1, 2**31, 2**32 - 1)
ARCHITECTURES = ("llama", "qwen3moe", "glm4moe", "gemma4", *HYBRIDS)


class Known(NamedTuple):
    """The beginning of a sound file, the bytes of the whole one, and places of settings' values."""

    header: bytes
    size: int
    values: tuple[int, ...]


def headers(folder: Path) -> list[Known]:
    """Of a small file of each architecture."""
    found = []
    for arch in ARCHITECTURES:
        path, shape = folder / f"{arch}.gguf", Shape(arch)
        write_gemma4(path) if arch == "gemma4" else write_hybrid(path, shape)
        gguf = read_gguf(path)
        header = path.read_bytes()[: min(one.offset for one in gguf.tensors)]
        values = tuple(
            header.find(entry) + 12 + struct.unpack_from("<Q", entry)[0] + skipped
            for entry in gguf.settings
            for skipped in (0, 12, 16)
            if 12 + struct.unpack_from("<Q", entry)[0] + skipped < len(entry)
        )
        found.append(Known(header, path.stat().st_size, values))
    return found


def mutated(known: list[Known], seed: int) -> bytes:
    """One of them with some bits, numbers or values of settings replaced; zeros for its tensors."""
    source = random.Random(seed)
    header, size, values = source.choice(known)
    changed = bytearray(header)
    for _ in range(source.choice((1, 1, 1, 2, 3))):
        kind = source.random()
        if kind < 0.1:
            changed[source.randrange(4, len(changed))] ^= 1 << source.randrange(8)
        elif kind < 0.15:
            _change_number(changed, source.randrange(4, len(changed) - 8), source)
        elif kind < 0.25:
            _change_number(changed, _behind_a_name(header, source), source)
        else:
            _change_number(changed, source.choice(values), source)
    return bytes(changed) + bytes(max(0, size - len(changed)))


def _behind_a_name(header: bytes, source: random.Random) -> int:
    """Where the number of a tensor's dimensions is, one of them, or its type."""
    places = [found.end() for found in re.finditer(rb"\.weight", header)]
    return source.choice(places) + source.choice((0, 4, 12, 20))


def _change_number(changed: bytearray, place: int, source: random.Random) -> None:
    form = source.choice(("<I", "<I", "<I", "<I", "<I", "<f", "<Q", "<B"))
    if place + 8 > len(changed):
        return
    (old,) = struct.unpack_from(form, changed, place)
    if form == "<f":
        struct.pack_into(form, changed, place, source.choice((0.0, -1.0, 1e30, math.inf, math.nan)))
        return
    value = source.choice((*_ODD, old + 1, old - 1, old * 2, old // 2, 1 << 62, 2**64 - 1))
    struct.pack_into(form, changed, place, value % (1 << 8 * struct.calcsize(form)))
