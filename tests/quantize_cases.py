"""What tests of quantizing share: the conversation that a model of random weights writes."""

from __future__ import annotations

import struct

from random_gguf import VOCABULARY

from edgespec.models.exits.openings import Chat

CHAT = Chat(before=[1, 2], between=[3, 4], ends=frozenset({VOCABULARY - 1}), openings=[[5, 6]])


def legacy(entries: dict[str, tuple[int, list[float]]]) -> bytes:
    data = struct.pack("<i", len(entries))
    for name, (calls, values) in entries.items():
        data += struct.pack("<i", len(name)) + name.encode()
        data += struct.pack(f"<ii{len(values)}f", calls, len(values), *values)
    return data + struct.pack("<ii4s", 7, 4, b"data")
