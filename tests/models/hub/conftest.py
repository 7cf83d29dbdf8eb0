"""No test of this folder sees the caches of the person who runs it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_files import NAME, write
from hub_server import COMMIT, Hub, empty_home, endpoint, serving
from random_gguf import F32, Q8_0, write_model

from edgespec.models.hub import fetching


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return empty_home(tmp_path / "home", monkeypatch)


@pytest.fixture
def hub_elsewhere() -> Iterator[Hub]:
    with serving(Hub()) as hub:
        yield hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with endpoint(monkeypatch) as one:
        yield one


@pytest.fixture
def everything(home: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A file in every cache, by its name."""
    repository = home / "hub" / "models--owner--Tiny-GGUF"
    write(repository / "refs" / "main", COMMIT)
    snapshot = repository / "snapshots" / COMMIT
    ollama = home / ".ollama" / "models"
    digest = "sha256:" + "5" * 64
    layers = [
        {"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:" + "6" * 64},
        {"mediaType": "application/vnd.ollama.image.model", "digest": digest},
    ]
    for name in ("registry.ollama.ai/library/qwen3/4b", "hf.co/owner/Other-GGUF/Q8_0"):
        write(ollama / "manifests" / name, json.dumps({"layers": layers}))
        layers[1]["digest"] = digest = "sha256:" + "7" * 64
    blobs = [write(ollama / "blobs" / f"sha256-{n * 64}") for n in "57"]
    monkeypatch.setenv(
        "EDGESPEC_MODELS", os.pathsep.join([str(home / "mine"), str(home / "absent")])
    )
    return {
        "hf:owner/Tiny-GGUF:Q8_0": write(snapshot / "Tiny-Q8_0.gguf"),
        "hf:owner/Tiny-GGUF:BF16": write(snapshot / "Tiny-BF16-00001-of-00002.gguf"),
        "hf:owner/Tiny-GGUF/mtp-Tiny-Q8_0.gguf": write(snapshot / "mtp-Tiny-Q8_0.gguf"),
        "ollama:qwen3:4b": blobs[0],
        "ollama:hf.co/owner/Other-GGUF:Q8_0": blobs[1],
        "~/.cache/llama.cpp/old.gguf": write(home / ".cache" / "llama.cpp" / "old.gguf"),
        "~/.lmstudio/models/a/b/c.gguf": write(home / ".lmstudio/models/a/b/c.gguf"),
        "~/mine/deep/own.gguf": write(home / "mine" / "deep" / "own.gguf"),
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A model in two types, of 730 and 250 KB, whose headers have 7 KB."""
    folder = tmp_path_factory.mktemp("models")
    return {
        f"Tiny-{name}.gguf": write_model(folder / name, "llama", kind).read_bytes()
        for name, kind in (("F32", F32), ("Q8_0", Q8_0))
    }


@pytest.fixture
def repository(hub: Hub, data: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The hub with that model, of which a part of the header is asked for at first."""
    monkeypatch.setattr(fetching, "_FIRST_BYTES", 2048)
    hub.repositories[NAME] = {".gitattributes": b"x", **data}
    hub.small.add(".gitattributes")
    return hub


# -- connections that break --------------------------------------------------------------------
@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting before another attempt takes no time."""
    monkeypatch.setattr("time.sleep", lambda _: None)
