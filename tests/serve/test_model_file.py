"""Model files that are loaded and leave, for real: tiny ones, and the embedded one."""

from __future__ import annotations

import base64
import gc
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from bert_gguf import RANK, write_random_bert
from random_gguf import F32, Q8_0, write_model
from sound_gguf import write_hearing
from vision_gguf import images
from waiting import PATIENCE_S, until

from edgespec.memory.device import reservations
from edgespec.memory.device.track import private_bytes
from edgespec.memory.plan.machine import this_machine
from edgespec.memory.plan.plan import Request
from edgespec.memory.store import cache
from edgespec.models.embedded import embedded_model
from edgespec.serve.model_file import ModelFile
from edgespec.serve.parsing import Limits
from edgespec.serve.pool import ANY, Member, Pool, Shared
from edgespec.serve.server import Server
from edgespec.setup.embedding import Embedder
from edgespec.setup.planning import Capacity

REQUEST = Request(users=1, context_size=256, drafter="none", kernels="off", keeps_to_form=True)


def pool_of(paths: list[Path], fitting: int, request: Request = REQUEST) -> Pool:
    """A pool of files, of which so many of the largest fit at once."""
    shared, machine = Shared(Limits()), this_machine()
    models = [ModelFile([one.stem], one, request, machine, shared) for one in paths]
    for one in models:
        one.plan([])
    sizes = sorted(sum((one.sizes or {}).values()) for one in models)
    capacity = Capacity({"host": 1 << 40}, sum(sizes[-fitting:]))
    return Pool([Member(one) for one in models], capacity, shared=shared)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    kinds = [("one", "llama", F32), ("two", "llama", Q8_0), ("three", "gemma3", F32)]
    return [
        write_model(tmp_path / f"{name}.gguf", arch, kind, seed, reads_bytes=True)
        for seed, (name, arch, kind) in enumerate(kinds)
    ]


@pytest.fixture
def address(files: list[Path]) -> Iterator[str]:
    pool = pool_of(files, fitting=2)
    with Server(pool) as server:
        yield server.start()


def ask(address: str, model: str, prompt: str = "ab", **fields: Any) -> Any:
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
    answer = httpx.post(f"{address}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


@pytest.mark.model
def test_a_model_that_comes_back_goes_on_with_what_was_kept_on_disk(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for one of three: each leaves for the next, which the last one cannot."""
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    pool = pool_of(files, 1, replace(REQUEST, disk_cache_bytes=1 << 30))
    body = {"prompt": "words that are kept " * 9, "max_tokens": 8, "temperature": 0}

    def answer(name: str) -> tuple[str, int]:
        """Its text, and how many tokens of the prompt were read for it."""
        told = httpx.post(
            f"{address}/v1/completions", json={**body, "model": name}, timeout=PATIENCE_S
        ).json()
        usage = told["usage"]
        unread = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        return told["choices"][0]["text"], unread

    with Server(pool) as server:
        address = server.start()
        names = [one.stem for one in files]
        first = {name: answer(name) for name in names}
        assert all(unread > 128 for _, unread in first.values())
        assert {name: answer(name) for name in names} == {
            name: (first[name][0], 1) for name in names
        }


@pytest.mark.long
@pytest.mark.model
def test_three_models_take_turns_in_room_for_two(address: str, files: list[Path]) -> None:
    """Each writes what it writes alone, however often it was unloaded."""
    names = [one.stem for one in files]
    first = {name: ask(address, name) for name in names}
    assert len(set(first.values())) == 3
    for name in [*names, *names]:
        assert ask(address, name) == first[name]
    told = httpx.get(f"{address}/v1/models").json()["data"]
    states = [one["state"] for one in told]
    assert states.count("ready") == 2 and states.count("unloaded") == 1
    assert all(one["bytes"] > 0 and one["context_length"] == 256 for one in told)
    status = httpx.get(f"{address}/status").json()
    held = sum(one["bytes"] for one in told if one["state"] == "ready")
    assert status["memory"]["planned_peak_bytes"] == held
    metrics = httpx.get(f"{address}/metrics").text
    assert 'edgespec_model_loads_total{model="one"} ' in metrics
    unloaded = next(one["id"] for one in told if one["state"] == "unloaded")
    props = httpx.get(f"{address}/props", params={"model": unloaded}).json()
    assert (props["is_sleeping"], props["model_alias"]) == (True, unloaded)
    assert httpx.get(f"{address}/status").json()["queue"]["users"] == 2


@pytest.mark.model
def test_chats_embeddings_and_ranking_share_one_budget(tmp_path: Path) -> None:
    """In room for two of four, whichever path asks: each answers as it does alone."""
    paths = [
        write_model(tmp_path / "chat.gguf", "llama", F32, reads_bytes=True),
        write_random_bert(tmp_path / "embed.gguf"),
        write_random_bert(tmp_path / "rank.gguf", pooling=RANK),
        write_model(tmp_path / "other.gguf", "llama", Q8_0, 1, reads_bytes=True),
    ]
    with Embedder(paths[1]) as embedder:
        row = embedder.embed(["a dog"]).rows[0].tolist()
    pool = pool_of(paths, fitting=2)
    with Server(pool) as server:
        address = server.start()
        for _ in range(2):
            texts = {name: ask(address, name) for name in ("chat", "other")}
            made = httpx.post(f"{address}/v1/embeddings", json={"input": "a dog"}).json()
            assert made["model"] == "embed", "the first one that makes embeddings"
            assert made["data"][0]["embedding"] == pytest.approx(row, abs=1e-6)
            body = {"model": "rank", "query": "cat", "documents": ["a dog", "the sun"]}
            assert len(httpx.post(f"{address}/v1/rerank", json=body).json()["results"]) == 2
            assert texts == {name: ask(address, name) for name in ("chat", "other")}
        cards = {one["id"]: one for one in httpx.get(f"{address}/v1/models").json()["data"]}
        assert sum(one["state"] == "ready" for one in cards.values()) < 4
        assert sum(one["loads"] for one in cards.values()) > 4
        assert all(one["bytes"] > 0 for one in cards.values())
        assert [cards[name]["kind"] for name in ("chat", "embed")] == ["chat", "embed"]
        told = httpx.post(f"{address}/v1/completions", json={"model": "embed", "prompt": "a"})
        assert told.status_code == 404 and "embed makes embeddings and writes no text" in told.text
        url = f"{address}/v1/embeddings"
        told = httpx.post(url, json={"input": "a", "model": "embed", "keep_alive": 0})
        assert told.status_code == 200
        until(lambda: pool.find("embed", ANY).loaded is None)
        told = httpx.get(f"{address}/props", params={"model": "embed"})
        assert told.json()["default_generation_settings"]["n_ctx"] == 64


@pytest.mark.model
def test_other_programs_plan_beside_all_models_that_are_left(
    address: str, files: list[Path], cache_folder: Path
) -> None:
    """Who left gave up what the process had reserved for all of them."""

    def reserved() -> int:
        return reservations._ours(cache.load("reservations", "programs"))

    ask(address, "one")
    ask(address, "two")
    both = reserved()
    # Its last request may hold it for a moment more.
    until(lambda: httpx.post(f"{address}/models/unload", json={"model": "two"}).is_success)
    assert 0 < reserved() < both
    assert httpx.get(f"{address}/v1/models/one").json()["bytes"] <= reserved()


@pytest.mark.model
def test_a_file_that_breaks_meanwhile_fails_its_own_requests(
    address: str, files: list[Path]
) -> None:
    before = ask(address, "two")
    ask(address, "one")
    assert httpx.post(f"{address}/models/unload", json={"model": "one"}).status_code == 200
    whole = files[0].read_bytes()
    files[0].unlink()
    body = {"model": "one", "prompt": "ab", "max_tokens": 4}
    answer = httpx.post(f"{address}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 500 and "one cannot be loaded: no such file" in answer.text
    files[0].write_bytes(whole[: len(whole) // 2])
    answer = httpx.post(f"{address}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 500 and "one cannot be loaded:" in answer.text
    assert ask(address, "two") == before
    files[0].write_bytes(whole)
    ask(address, "one")


def serving(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "edgespec.cli.main", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    line = next(line for line in lines if "listening on" in line)
    return process, line.split()[2].rstrip(";")


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize(
    "end", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL]
)
def test_a_process_that_ends_in_a_load_leaves_nothing_behind(
    measured_cache: Path, monkeypatch: pytest.MonkeyPatch, files: list[Path], end: signal.Signals
) -> None:
    """SIGTERM ends it within its seconds, and after kill -9 the next one begins as ever."""
    monkeypatch.setenv("EDGESPEC_CACHE", str(measured_cache))
    named = [str(embedded_model()), str(files[0]), "--ctx", "256"]
    for killed in (True, False):
        process, address = serving(*named)
        try:
            name = embedded_model().stem if killed else files[0].stem
            body = {"model": name, "prompt": "a", "max_tokens": 2, "stream": True}
            url = f"{address}/v1/completions"
            with httpx.stream("POST", url, json=body, timeout=PATIENCE_S) as answer:
                lines = answer.iter_lines()
                assert next(lines) == ": waiting"
                if killed:
                    began = time.monotonic()
                    process.send_signal(end)
                    process.wait(PATIENCE_S)
                    assert time.monotonic() - began < PATIENCE_S
                else:
                    assert any(line == "data: [DONE]" for line in lines)
        finally:
            process.terminate()
            process.communicate(timeout=PATIENCE_S)


@pytest.mark.long
@pytest.mark.model
def test_memory_goes_back_when_a_model_leaves(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three models take turns in room for one, with grammars: what is held stays as it is."""
    monkeypatch.setattr("edgespec.serve.pool._PATIENCE_S", 0.0)
    paths = [files[0], embedded_model(), files[2]]
    pool = pool_of(paths, fitting=1)
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    held: list[int] = []
    with Server(pool) as server:
        address = server.start()
        for turn in range(14):
            for one in paths:
                fields: dict[str, Any] = (
                    {"response_format": form} if one == embedded_model() else {}
                )
                text = ask(address, one.stem, max_tokens=16, **fields)
                assert not fields or json.loads(text)["a"] in (1, 2)
            for one in paths:
                httpx.post(f"{address}/models/unload", json={"model": one.stem})
            until(lambda: all(one.loaded is None for one in pool.members))
            gc.collect()
            if turn >= 3:
                held.append(private_bytes())
    # What other threads of this process hold for a moment only adds: the least of each counts.
    assert min(held[-4:]) <= 1.02 * min(held[:4]), [n >> 10 for n in held]


@pytest.mark.model
@pytest.mark.long
def test_models_that_see_take_turns(vision_folder: Path) -> None:
    """Each loads its own projector of the folder, and takes larger bodies before it is loaded."""
    names = ("llava", "qwen3vl")
    url = f"data:image/png;base64,{base64.b64encode(images(1)[0]).decode()}"
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "?"},
    ]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 4, "temperature": 0}
    request = replace(REQUEST, context_size=512, image_max_tokens=64)
    pool = pool_of([vision_folder / f"{name}.gguf" for name in names], 1, request)
    for asked, sees in ((request, True), (replace(request, mmproj="none"), False)):
        path = vision_folder / "llava.gguf"
        unplanned = ModelFile(["llava"], path, asked, this_machine())
        assert unplanned.about["modalities"]["vision"] == sees
    with Server(pool) as server:
        address = server.start()
        for name in (*names, *names):
            url = f"{address}/v1/chat/completions"
            answer = httpx.post(url, json={**body, "model": name}, timeout=PATIENCE_S)
            assert answer.status_code == 200, answer.text
            told = {one["id"]: one for one in httpx.get(f"{address}/v1/models").json()["data"]}
            assert told[name]["state"] == "ready" and told[name]["modalities"]["vision"]
    assert pool.sees_images


def test_what_a_model_takes_is_told_before_it_is_loaded(tmp_path: Path) -> None:
    model, projector = write_hearing(tmp_path, "qwen2a")

    def takes() -> Any:
        unplanned = ModelFile(["heard"], model, REQUEST, this_machine())
        return unplanned.about["modalities"]

    data = projector.read_bytes()
    projector.write_bytes(b"damaged")
    assert takes() == {"vision": False, "audio": False}
    projector.write_bytes(data)
    assert takes() == {"vision": False, "audio": True}
