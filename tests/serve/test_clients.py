"""What clients send, as their sources build it: all of it is answered."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving_cases import Serve, Speaker
from waiting import PATIENCE_S

RECORDED: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "clients.json").read_text(encoding="utf-8")
)
# What a stream of each interface ends with.
LAST = {
    "/v1/chat/completions": r"data: \[DONE\]",
    "/v1/completions": r"data: \[DONE\]",
    "/v1/messages": "event: message_stop",
    "/v1/responses": r"event: response\.(completed|incomplete)",
    "/api/chat": '"done":true',
}


@pytest.mark.parametrize("one", RECORDED, ids=lambda one: str(one["client"]))
def test_what_a_client_sends_is_answered(serve: Serve, one: dict[str, Any]) -> None:
    address = serve(Speaker(), any_model=True)
    told = httpx.post(address + one["path"], json=one["body"], timeout=PATIENCE_S)
    assert told.status_code == 200, told.text
    if one["body"].get("stream"):
        assert re.search(LAST[one["path"].partition("?")[0]], told.text)
        assert '"error":{' not in told.text
