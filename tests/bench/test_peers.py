"""The arithmetic of benchmarks/peers.py on made-up answers: the best setting, ratios, intervals."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def peers() -> ModuleType:
    path = ROOT / "benchmarks" / "peers.py"
    spec = importlib.util.spec_from_file_location("peers", path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path.parent))
        spec.loader.exec_module(found)
    return found


def line(task: str, **decode_s: float) -> dict[str, Any]:
    """A prompt that all contenders answered with 11 tokens, the first of them after 1 s."""
    answers = {
        name.replace("_", " "): {
            "generated_tokens": 11,
            "decoded_tokens": 10,
            "time_to_first_token_s": 1.0,
            "decode_s": seconds,
            "token_ids": [1, 2, 3],
            "drafted_tokens": 4,
            "accepted_tokens": 3,
        }
        for name, seconds in decode_s.items()
    }
    found = {"model": "m", "machine": "p", "max_tokens": 11, "busy_neighbours": 0.0}
    return {**found, "task": task, "answers": answers}


# Per prompt: edgespec 1 s, its plain decoding 2 s; llama-server 4 s, with drafts 2 s and 5 s.
LINES = [
    line("math", edgespec=1.0, edgespec_plain=2.0, server=4.0, server_a=2.0, server_b=5.0),
    line("prose", edgespec=2.0, edgespec_plain=2.0, server=4.0, server_a=8.0, server_b=4.0),
] * 3


def test_the_best_setting_of_a_peer_is_its_fastest(peers: ModuleType) -> None:
    """In each category anew, which is in the peer's favour."""
    found = peers.document_of(LINES, None)
    best = found["best_of_peers"]["server"]
    assert best["math"]["name"] == "server a" and best["math"]["ratio"] == pytest.approx(2.0)
    assert best["prose"]["name"] == "server" and best["prose"]["ratio"] == pytest.approx(2.0)
    assert best["overall"]["name"] == "server"
    assert found["best_drafts"]["server"] == "server b", "9 s for two prompts, and 10 s with a"


def test_ratios_are_of_times_of_the_same_prompts(peers: ModuleType) -> None:
    found = peers.document_of(LINES, None)
    assert found["baseline"] == "server" and found["prompts"] == 6
    rows = {row["name"]: row for row in found["contenders"]}
    assert rows["server"]["decode"]["ratio"] == pytest.approx(1.0)
    assert rows["edgespec"]["decode"]["ratio"] == pytest.approx(8.0 / 3.0)
    assert rows["edgespec"]["decode"]["tokens_per_s"] == pytest.approx(60 / 9.0)
    assert rows["edgespec"]["end_to_end"]["ratio"] == pytest.approx(10.0 / 5.0)
    assert rows["edgespec"]["identical"] == 6
    assert found["over_own_plain"]["math"]["ratio"] == pytest.approx(2.0)
    assert found["over_own_plain"]["overall"]["ratio"] == pytest.approx(4.0 / 3.0)


def test_too_few_prompts_have_no_interval(peers: ModuleType) -> None:
    found = peers.document_of(LINES[:2], None)
    assert found["best_of_peers"]["server"]["math"]["low"] is None
    many = peers.document_of(LINES * 2, None)["best_of_peers"]["server"]["math"]
    assert many["low"] == pytest.approx(2.0) and many["high"] == pytest.approx(2.0)
