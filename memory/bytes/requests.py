"""Bytes of what requests bring before their answers are in the queue."""

from __future__ import annotations

LARGE_BYTES = 64 << 10  # from here on a body waits for its turn
LARGEST_BYTES = 1 << 20  # from here on only one of these is read at a time
AT_ONCE = 2  # large bodies that are parsed, prepared and tokenized
BODY_BYTES = 4 << 20  # of a body without images
HELD_BODIES = 2  # times the largest body: what may be received meanwhile
MOST_VALUES = 200_000  # of a body
TOKEN_CHARS = 16  # of a text for each token of the context, which are not worth a look

# Measured on EPYC with glibc: what the worst bodies of eight at once add to a process (42 MiB), and
# what llama.cpp's tokenizers take for a byte of a text of short words.
_READING_BYTES = 48 << 20
_TOKENIZING_BYTES = 70
_TOKEN_BYTES = 6  # of a token that a text of a whole context may have, short words counted


def requests_bytes(context_size: int) -> int:
    """Most that requests take in a server before their answers are in the queue."""
    text_bytes = min(BODY_BYTES, context_size * _TOKEN_BYTES)
    return _READING_BYTES + AT_ONCE * _TOKENIZING_BYTES * text_bytes
