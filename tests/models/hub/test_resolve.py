"""Names of models: which file is meant, and what is said where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.errors import ModelNotFoundError
from edgespec.models.hub import resolve


def test_a_split_model_with_a_part_missing_is_not_here(everything: dict[str, Path]) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve.model_file("hf:owner/Tiny-GGUF:BF16")
    assert caught.value.hint == "`edgespec models pull hf:owner/Tiny-GGUF:BF16` gets it"
    assert resolve.model_file("hf:owner/Tiny-GGUF") == everything["hf:owner/Tiny-GGUF:Q8_0"]


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
    monkeypatch.setattr(resolve, "local_models", list)
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
        ("bge-small.gguf", None),
    ],
)
def test_names_of_the_hub(name: str, found: tuple[str, str] | None) -> None:
    assert resolve.hub_name(name) == found


@pytest.mark.parametrize("name", resolve.EMBEDDING_MODELS)
def test_names_of_embedding_models_are_each_one_file_of_the_hub(name: str) -> None:
    found = resolve.hub_name(name)
    assert found is not None and found[1].lower().endswith("q8_0.gguf")
    assert resolve.is_name(name) and found == resolve.hub_name(resolve.EMBEDDING_MODELS[name])
    with pytest.raises(ModelNotFoundError) as caught:
        resolve.model_file(name)
    assert caught.value.hint.startswith("`edgespec models pull hf:")


@pytest.mark.parametrize("name", ["hf:", "hf:owner", "hf:a/b/c", "hf:../..", "hf:a b/c"])
def test_what_names_no_repository(name: str) -> None:
    with pytest.raises(ModelNotFoundError):
        resolve.model_file(name)
