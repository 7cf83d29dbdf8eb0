"""Bytes of what requests bring before their answers are in the queue."""

from __future__ import annotations

LARGE_BYTES = 64 << 10  # from here on a body waits for its turn
AT_ONCE = 2  # large bodies that are parsed, prepared and tokenized
BODY_BYTES = 4 << 20  # of a body without images
HELD_BODIES = 2  # times the largest body: what may be received meanwhile
MOST_VALUES = 200_000  # of a body
TOKEN_CHARS = 16  # of a text for each token of the context, which are not worth a look
