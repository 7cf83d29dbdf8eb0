"""Every GGUF on a machine is found, by the name that finds it again."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hub_files import write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import edgespec
from edgespec.errors import ModelNotFoundError
from edgespec.models.hub import resolve


def test_every_cache_is_listed_and_every_name_finds_its_file(everything: dict[str, Path]) -> None:
    first = everything["hf:owner/Tiny-GGUF:BF16"]
    write(first.with_name("Tiny-BF16-00002-of-00002.gguf"), "GGUF, too")
    found = {one.name: one for one in resolve.local_models() if one.name != resolve.EMBEDDED}
    assert {name: one.path for name, one in found.items()} == everything
    assert found["hf:owner/Tiny-GGUF:BF16"].file_bytes == len("GGUF") + len("GGUF, too")
    for name, path in everything.items():
        assert resolve.model_file(name) == path


def test_a_file_that_two_caches_share_is_listed_once(
    everything: dict[str, Path], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "mine" / "again.gguf").symlink_to(everything["ollama:qwen3:4b"])
    names = [one.name for one in resolve.local_models()]
    assert "ollama:qwen3:4b" in names and "~/mine/again.gguf" not in names
    monkeypatch.setenv("EDGESPEC_MODELS", os.pathsep.join([str(home / "mine")] * 2))
    assert sorted(names) == sorted(one.name for one in resolve.local_models())


def test_two_names_of_one_blob_are_two_models(everything: dict[str, Path], home: Path) -> None:
    folder = home / ".ollama/models/manifests/registry.ollama.ai/library"
    (folder / "qwen3" / "latest").write_bytes((folder / "qwen3" / "4b").read_bytes())
    names = [one.name for one in resolve.local_models()]
    assert {"ollama:qwen3:4b", "ollama:qwen3:latest"} <= set(names)
    path = everything["ollama:qwen3:4b"]
    for name in ("ollama:qwen3", "ollama:qwen3:latest", "ollama:qwen3:4b", "ollama:Qwen3:4B"):
        assert resolve.model_file(name) == path


def test_a_name_is_found_though_its_file_is_listed_by_another(
    everything: dict[str, Path], home: Path
) -> None:
    link = everything["hf:owner/Tiny-GGUF:Q8_0"].with_name("Tiny-Q4_0.gguf")
    link.symlink_to(everything["ollama:qwen3:4b"])
    assert "ollama:qwen3:4b" not in [one.name for one in resolve.local_models()]
    assert resolve.model_file("ollama:qwen3:4b") == everything["ollama:qwen3:4b"]


@pytest.mark.parametrize("name", ["hf:OWNER/tiny-gguf:q8_0", "hf:owner/TINY-gguf/tiny-q8_0.gguf"])
def test_names_of_the_hub_are_the_same_in_any_case(everything: dict[str, Path], name: str) -> None:
    path = everything["hf:owner/Tiny-GGUF:Q8_0"]
    assert resolve.model_file(name) == path
    other = path.parents[3] / "models--owner--tiny-gguf" / "snapshots" / ("b" * 40)
    write(other / "tiny-q8_0.gguf")
    assert resolve.model_file("hf:owner/Tiny-GGUF:Q8_0") == path, "that case first"
    assert resolve.model_file("hf:owner/tiny-gguf:Q8_0") == other / "tiny-q8_0.gguf"


def test_a_listed_name_is_certain_in_the_whole_repository(home: Path) -> None:
    folder = home / "hub" / "models--owner--Tiny-GGUF" / "snapshots" / ("a" * 40)
    files = {
        "Tiny-UD-Q4_K_M.gguf": ":UD-Q4_K_M",
        "Tiny-I-Compact.gguf": ":I-COMPACT",
        "Other-Q8_0.gguf": "/Other-Q8_0.gguf",
        "old/Tiny-Q8_0.gguf": "/old/Tiny-Q8_0.gguf",
    }
    for path in files:
        write(folder / path)
    listed = {one.name: one.path for one in resolve.local_models() if one.name.startswith("hf:")}
    assert listed == {f"hf:owner/Tiny-GGUF{name}": folder / path for path, name in files.items()}
    for name, place in listed.items():
        assert resolve.model_file(name) == place
    with pytest.raises(ModelNotFoundError, match="not on this machine"):
        resolve.model_file("hf:owner/Tiny-GGUF:Q4_K_M")  # that is another file of the hub


_DIGESTS = st.sampled_from(
    ["sha256:" + "5" * 64, "sha256:../../../../etc", "../x", "sha256:" + "5" * 63]
)
_TYPES = st.just("application/vnd.ollama.image.model") | st.text(max_size=5)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | _DIGESTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
_LAYERS = st.fixed_dictionaries(
    {"mediaType": _TYPES | _VALUES}, optional={"digest": _DIGESTS | _VALUES}
)
_MANIFESTS = st.binary(max_size=40) | (
    st.fixed_dictionaries({"layers": st.lists(_LAYERS, max_size=3) | _VALUES}) | _VALUES
).map(lambda document: json.dumps(document).encode())


@given(_MANIFESTS)
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_manifest_names_blobs_of_its_own_store_or_nothing(home: Path, manifest: bytes) -> None:
    folder = home / ".ollama" / "models"
    path = folder / "manifests/registry.ollama.ai/library/x/latest"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(manifest)
    blob = write(folder / "blobs" / f"sha256-{'5' * 64}")
    found = [one.path for one in resolve.local_models() if one.name != resolve.EMBEDDED]
    assert found in ([], [blob])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")
def test_what_is_no_file_is_no_manifest(home: Path) -> None:
    path = home / ".ollama/models/manifests/registry.ollama.ai/library/x/latest"
    path.parent.mkdir(parents=True)
    os.mkfifo(path)  # reading it would wait for ever
    assert [one.name for one in resolve.local_models() if one.name != resolve.EMBEDDED] == []


@pytest.mark.parametrize(
    "manifest",
    ["", "[]", "{}", '{"layers": 3}', '{"layers": [{"mediaType": 1}]}', "[" * 100_000,
     '{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "../../etc"}]}'],
)  # fmt: skip
def test_broken_manifests_are_left_out(home: Path, manifest: str) -> None:
    write(home / ".ollama/models/manifests/registry.ollama.ai/library/x/latest", manifest)
    assert [one.name for one in resolve.local_models() if one.name != resolve.EMBEDDED] == []


def test_the_cache_is_where_llama_cpp_looks(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value, place in (
        ("HF_HUB_CACHE", "", home / ".cache/huggingface/hub"),
        ("XDG_CACHE_HOME", "/xdg", Path("/xdg/huggingface/hub")),
        ("HF_HOME", "/hf", Path("/hf/hub")),
        ("HF_HUB_CACHE", "/cache", Path("/cache")),
        ("LLAMA_CACHE", "/llama", Path("/llama")),
    ):
        monkeypatch.setenv(variable, value)
        assert resolve.hub_cache() == place


# -- names that are no model ----------------------------------------------------------------------


@pytest.mark.model
def test_python_takes_the_same_names_and_fetches_nothing() -> None:
    assert edgespec.plan("embedded").context_size == edgespec.plan().context_size
    with pytest.raises(ModelNotFoundError) as caught:
        edgespec.plan("hf:owner/Tiny-GGUF:Q8_0")
    assert caught.value.hint == "`edgespec models pull hf:owner/Tiny-GGUF:Q8_0` gets it"
