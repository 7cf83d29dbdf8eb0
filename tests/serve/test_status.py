"""What a server tells of itself."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import httpx
import pytest
from decoding_cases import VOCAB
from serving_cases import HELLO, Controlled, Serve, Speaker

from edgespec.memory.device import energy
from edgespec.serve.parsing import Limits
from edgespec.serve.pool import Shared


def test_what_a_server_tells_of_itself(serve: Serve) -> None:
    address = serve(Speaker())
    httpx.post(f"{address}/v1/completions", json={"prompt": "a"})
    assert httpx.get(f"{address}/props").json()["default_generation_settings"]["n_ctx"] == 2048
    assert httpx.get(f"{address}/slots").status_code == 404
    told = httpx.get(f"{address}/metrics").text
    assert "llamacpp:tokens_predicted_total 14\n" in told
    assert "edgespec_generations_total 1\n" in told
    assert "edgespec_time_to_first_token_seconds_total " in told
    names = [line.split("{")[0].split(" ")[0] for line in told.splitlines() if line[:1] != "#"]
    assert not [one for one in names if one.startswith("edgespec_") and "_tokens_" in one]
    assert 'edgespec_requests_total{status="200"} 2\n' in told
    state = httpx.get(f"{address}/status").json()
    assert state["totals"]["generations"] == 1 and state["queue"]["waiting"] == 0
    pieces = httpx.post(f"{address}/tokenize", json={"content": "Hé", "with_pieces": True}).json()
    assert pieces["tokens"][0] == {"id": 72, "piece": "H"}
    assert pieces["tokens"][1] == {"id": 0xC3, "piece": [0xC3]}
    back = httpx.post(f"{address}/detokenize", json={"tokens": [72, 0xC3, 0xA9]}).json()
    assert back == {"content": "Hé"}
    wrong = httpx.post(f"{address}/detokenize", json={"tokens": [999]})
    assert "from 0 to 256" in wrong.json()["error"]["message"]


def test_names_are_those_that_clients_of_llama_cpp_read(serve: Serve) -> None:
    address = serve(Speaker(), file_name="tiny.gguf")
    props = httpx.get(f"{address}/props").json()
    assert (props["model_path"], props["is_sleeping"]) == ("tiny.gguf", False)
    assert props["build_info"].startswith("edgespec-")
    params = props["default_generation_settings"]["params"]
    assert (params["repeat_penalty"], params["repeat_last_n"]) == (1.0, 64)
    httpx.post(f"{address}/completion", json={"prompt": "abc"})
    httpx.post(f"{address}/completion", json={"prompt": "abc"})
    lines = httpx.get(f"{address}/metrics").text.splitlines()
    told = dict(line.split(" ") for line in lines if line.startswith("llamacpp:"))
    assert told["llamacpp:tokens_predicted_total"] == "28"
    read = int(told["llamacpp:prompt_tokens_total"])
    assert read + int(told["llamacpp:prompt_tokens_cached_total"]) == 6
    assert "# TYPE llamacpp:requests_processing gauge" in lines
    answer = httpx.post(f"{address}/v1/completions", json={"prompt": "a"}).json()
    assert answer["system_fingerprint"] == props["build_info"]
    assert answer["timings"]["prompt_per_token_ms"] > 0
    chat = httpx.post(f"{address}/v1/chat/completions", json={"messages": HELLO}).json()
    assert chat["system_fingerprint"] == props["build_info"]


def test_texts_of_control_tokens_may_be_text(serve: Serve) -> None:
    backend = Speaker()
    backend.tokenizer = Controlled(VOCAB)
    address, body = serve(backend), {"content": "a<user>"}
    ids = httpx.post(f"{address}/tokenize", json=body).json()["tokens"]
    plain = httpx.post(f"{address}/tokenize", json={**body, "parse_special": False}).json()
    assert ids == [97, 7] and plain["tokens"] == [*b"a<user>"]


def test_joules_are_told_where_the_machine_counts_them(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zone = tmp_path / "class/powercap/intel-rapl:0"
    zone.mkdir(parents=True)
    for name, text in {"name": "package-0", "energy_uj": "1", "max_energy_range_uj": "0"}.items():
        (zone / name).write_text(text)
    monkeypatch.setattr(energy, "SYS", tmp_path)
    address = serve(Speaker())
    (zone / "energy_uj").write_text("2500001")
    told = httpx.get(f"{address}/metrics").text
    assert 'edgespec_energy_joules_total{counter="RAPL: package-0"} 2.5\n' in told
    assert "edgespec_read_ahead_joules_total 0\n" in told
    prewarm = {"messages": HELLO, "prompt_cache_options": {"prewarm": True}}
    monkeypatch.setattr(energy.EnergyMeter, "joules", partial(next, itertools.count(0.0, 1.5)))
    httpx.post(f"{address}/v1/chat/completions", json={"messages": HELLO, "max_tokens": 0})
    httpx.post(f"{address}/v1/chat/completions", json=prewarm)
    assert "edgespec_read_ahead_joules_total 1.5\n" in httpx.get(f"{address}/metrics").text
    shared = Shared(Limits())
    shared.close()
    assert shared.energy is not None and not shared.energy._sampler.is_alive()
    monkeypatch.setattr(energy, "SYS", tmp_path / "none")
    assert "joules" not in httpx.get(f"{serve(Speaker())}/metrics").text
