"""A chat that is asked for, and what a server says of its queue."""

from __future__ import annotations

from typing import Any

import httpx

HELLO: Any = {"messages": [{"role": "user", "content": "Hi"}]}
CHAT = "/v1/chat/completions"


def generations(address: str) -> int:
    """How many run or wait."""
    queue = httpx.get(f"{address}/status").json()["queue"]
    return int(queue["running"] + queue["waiting"])
