"""Every GGUF on a machine is found, by the name that finds it again."""

from __future__ import annotations

from pathlib import Path

import pytest
from hub_files import write

import edgespec
from edgespec.errors import ModelNotFoundError
from edgespec.models.hub import caches, resolve


def test_every_cache_is_listed_and_every_name_finds_its_file(everything: dict[str, Path]) -> None:
    first = everything["hf:owner/Tiny-GGUF:BF16"]
    write(first.with_name("Tiny-BF16-00002-of-00002.gguf"), "GGUF, too")
    found = {one.name: one for one in caches.local_models() if one.name != caches.EMBEDDED}
    assert {name: one.path for name, one in found.items()} == everything
    assert found["hf:owner/Tiny-GGUF:BF16"].file_bytes == len("GGUF") + len("GGUF, too")
    for name, path in everything.items():
        assert resolve.model_file(name) == path


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


@pytest.mark.model
def test_python_takes_the_same_names_and_fetches_nothing() -> None:
    assert edgespec.plan("embedded").context_size == edgespec.plan().context_size
    with pytest.raises(ModelNotFoundError) as caught:
        edgespec.plan("hf:owner/Tiny-GGUF:Q8_0")
    assert caught.value.hint == "`edgespec models pull hf:owner/Tiny-GGUF:Q8_0` gets it"
