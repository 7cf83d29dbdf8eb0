"""What a server tells of itself."""

from __future__ import annotations

import httpx
from serving_cases import Serve, Speaker


def test_what_a_server_tells_of_itself(serve: Serve) -> None:
    address = serve(Speaker())
    httpx.post(f"{address}/v1/completions", json={"prompt": "a"})
    assert httpx.get(f"{address}/props").json()["default_generation_settings"]["n_ctx"] == 2048
    assert httpx.get(f"{address}/slots").json()[0]["is_processing"] is False
    told = httpx.get(f"{address}/metrics").text
    assert "edgespec_generated_tokens_total 14\n" in told
    assert 'edgespec_requests_total{status="200"} 3\n' in told
    state = httpx.get(f"{address}/status").json()
    assert state["totals"]["generations"] == 1 and state["queue"]["waiting"] == 0
    pieces = httpx.post(f"{address}/tokenize", json={"content": "Hé", "with_pieces": True}).json()
    assert pieces["tokens"][0] == {"id": 72, "piece": "H"}
    assert pieces["tokens"][1] == {"id": 0xC3, "piece": [0xC3]}
    back = httpx.post(f"{address}/detokenize", json={"tokens": [72, 0xC3, 0xA9]}).json()
    assert back == {"content": "Hé"}
    wrong = httpx.post(f"{address}/detokenize", json={"tokens": [999]})
    assert "from 0 to 256" in wrong.json()["error"]["message"]
