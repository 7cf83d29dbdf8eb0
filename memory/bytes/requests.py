"""Bytes of what requests bring before their answers are in the queue, and of a server's guests."""

from __future__ import annotations

from edgespec.models.chat import TEMPLATE_LIMITS

LARGE_BYTES = 64 << 10  # from here on a body waits for its turn
LARGEST_BYTES = 1 << 20  # from here on only one of these is read at a time
AT_ONCE = 2  # large bodies that are parsed, prepared and tokenized
BODY_BYTES = 4 << 20  # of a body without images
HELD_BODIES = 2  # times the largest body: what may be received meanwhile
MOST_VALUES = 200_000  # of a body
TOKEN_CHARS = 16  # of a text for each token of the context, which are not worth a look

# Measured on EPYCs, glibc (`benchmarks/attacks.py constants`): what the worst bodies of eight at
# once add to a process (31 to 42 MiB), and what llama.cpp's tokenizers take for a byte of short
# words (70 to 83).
_READING_BYTES = 48 << 20
_TOKENIZING_BYTES = 84
_TOKEN_BYTES = 6  # of a token that a text of a whole context may have, short words counted


# Of the process that tries grammars (`benchmarks/guests.py held`): it has 12 MiB, and 380 to 450
# bytes for each token of a vocabulary. What is above that is for grammars that are tried.
FORM_BYTES = 24 << 20
FORM_TOKEN_BYTES = 450


def requests_bytes(context_size: int) -> int:
    """Most that requests take in a server before their answers are in the queue."""
    text_bytes = min(BODY_BYTES, context_size * _TOKEN_BYTES)
    return _READING_BYTES + AT_ONCE * _TOKENIZING_BYTES * text_bytes


def guests_bytes(vocab_size: int, context_size: int) -> int:
    """Most that the processes take which render templates and try grammars for a server.

    Args:
        vocab_size: 0 where no grammar is tried.
    """
    # 256 bytes: a token as vocabularies write it; a context of more is refused.
    conversation_bytes = min(BODY_BYTES, context_size * 256)
    templates = TEMPLATE_LIMITS.most_bytes(conversation_bytes)
    return templates + (FORM_BYTES + FORM_TOKEN_BYTES * vocab_size if vocab_size else 0)
