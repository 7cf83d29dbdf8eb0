"""Every GGUF on a machine is found, by the name that finds it again."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import edgespec
from edgespec.errors import ModelNotFoundError
from edgespec.models.hub import caches, resolve

COMMIT = "a" * 40


def write(path: Path, text: str = "GGUF") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


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


def test_every_cache_is_listed_and_every_name_finds_its_file(everything: dict[str, Path]) -> None:
    first = everything["hf:owner/Tiny-GGUF:BF16"]
    write(first.with_name("Tiny-BF16-00002-of-00002.gguf"), "GGUF, too")
    found = {one.name: one for one in caches.local_models() if one.name != caches.EMBEDDED}
    assert {name: one.path for name, one in found.items()} == everything
    assert found["hf:owner/Tiny-GGUF:BF16"].file_bytes == len("GGUF") + len("GGUF, too")
    for name, path in everything.items():
        assert resolve.model_file(name) == path


def test_a_split_model_with_a_part_missing_is_not_here(everything: dict[str, Path]) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve.model_file("hf:owner/Tiny-GGUF:BF16")
    assert caught.value.hint == "`edgespec models pull hf:owner/Tiny-GGUF:BF16` gets it"
    assert resolve.model_file("hf:owner/Tiny-GGUF") == everything["hf:owner/Tiny-GGUF:Q8_0"]


def test_a_file_that_two_caches_share_is_listed_once(
    everything: dict[str, Path], home: Path
) -> None:
    (home / "mine" / "again.gguf").symlink_to(everything["ollama:qwen3:4b"])
    names = [one.name for one in caches.local_models()]
    assert "ollama:qwen3:4b" in names and "~/mine/again.gguf" not in names


@pytest.mark.parametrize(
    "manifest",
    ["", "[]", "{}", '{"layers": 3}', '{"layers": [{"mediaType": 1}]}', "[" * 100_000,
     '{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "../../etc"}]}'],
)  # fmt: skip
def test_broken_manifests_are_left_out(home: Path, manifest: str) -> None:
    write(home / ".ollama/models/manifests/registry.ollama.ai/library/x/latest", manifest)
    assert [one.name for one in caches.local_models() if one.name != caches.EMBEDDED] == []


def test_the_cache_is_where_llama_cpp_looks(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value, place in (
        ("HF_HUB_CACHE", "", home / ".cache/huggingface/hub"),
        ("XDG_CACHE_HOME", "/xdg", Path("/xdg/huggingface/hub")),
        ("HF_HOME", "/hf", Path("/hf/hub")),
        ("HF_HUB_CACHE", "/cache", Path("/cache")),
        ("LLAMA_CACHE", "/llama", Path("/llama")),
    ):
        monkeypatch.setenv(variable, value)
        assert caches.hub_cache() == place


# -- names that are no model ----------------------------------------------------------------------


def test_a_word_that_is_no_model_gets_the_nearest_names(everything: dict[str, Path]) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve.model_file("qwen")
    assert str(caught.value) == "there is no model or file qwen"
    assert caught.value.hint.startswith("near it: ollama:qwen3:4b")
    assert "hf:owner/Tiny-GGUF:Q8_0" in resolve.nearest("tiny-q8")
    assert resolve.nearest("zzz") == []


def test_the_name_of_a_repository_alone_is_not_taken_for_a_path() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve.model_file("owner/Other-GGUF")
    assert "hf:owner/Other-GGUF gets it from the Hugging Face hub" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("qwen3:4b", "a model of Ollama's is ollama:qwen3:4b"),
        ("ollama:qwen3:4b", "`ollama pull qwen3:4b` gets it"),
        ("ollama:qwen3", "`ollama pull qwen3:latest` gets it"),
    ],
)
def test_names_of_ollama_that_are_not_here_say_how_they_would_be(
    name: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caches, "local_models", list)
    with pytest.raises(ModelNotFoundError) as caught:
        resolve.model_file(name)
    assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("hf:owner/repo", ("owner/repo", "")),
        ("hf:owner/repo:Q8_0", ("owner/repo", "Q8_0")),
        ("hf.co/owner/repo:Q8_0", ("owner/repo", "Q8_0")),
        ("https://huggingface.co/owner/repo/", ("owner/repo", "")),
        ("hf:owner/repo/folder/x.gguf", ("owner/repo", "folder/x.gguf")),
        ("owner/repo", None),
    ],
)
def test_names_of_the_hub(name: str, found: tuple[str, str] | None) -> None:
    assert resolve.hub_name(name) == found


@pytest.mark.parametrize("name", ["hf:", "hf:owner", "hf:a/b/c", "hf:../..", "hf:a b/c"])
def test_what_names_no_repository(name: str) -> None:
    with pytest.raises(ModelNotFoundError):
        resolve.model_file(name)


@pytest.mark.model
def test_python_takes_the_same_names_and_fetches_nothing() -> None:
    assert edgespec.plan("embedded").context_size == edgespec.plan().context_size
    with pytest.raises(ModelNotFoundError) as caught:
        edgespec.plan("hf:owner/Tiny-GGUF:Q8_0")
    assert caught.value.hint == "`edgespec models pull hf:owner/Tiny-GGUF:Q8_0` gets it"
