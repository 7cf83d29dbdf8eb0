"""Whose earlier texts draft for a request: those of the same API key, and without keys everybody's.

Drafts make an answer faster where it was written before. With the texts of others, the time an
answer takes would tell what they wrote.
"""

from __future__ import annotations

import hashlib
from contextvars import ContextVar

HISTORY: ContextVar[str] = ContextVar("history", default="")  # of the request that is served


def history_of(key: bytes) -> str:
    """A name made of an API key, which does not tell the key."""
    return hashlib.sha256(key).hexdigest()[:32]
