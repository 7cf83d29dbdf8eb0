"""From a name that a person typed to a model file on this machine.

A name is the path of a file or folder, `hf:OWNER/REPO[:QUANT]`, `ollama:NAME[:TAG]`, `embedded`, or
one of `EMBEDDING_MODELS`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from edgespec.errors import ModelNotFoundError
from edgespec.models.embedded import embedded_model
from edgespec.models.hub import caches, choice
from edgespec.paths import expanded

# Brings the file of a repository that a tag means; `edgespec.models.hub.fetching` has one.
Fetch: TypeAlias = Callable[[str, str], Path]

# Small models that make vectors, by the names that people type; each is one file of the hub.
EMBEDDING_MODELS = {
    "bge-small": "hf:ggml-org/bge-small-en-v1.5-Q8_0-GGUF/bge-small-en-v1.5-q8_0.gguf",
    "nomic-embed-text": "hf:nomic-ai/nomic-embed-text-v1.5-GGUF/nomic-embed-text-v1.5.Q8_0.gguf",
    "embeddinggemma": "hf:ggml-org/embeddinggemma-300M-GGUF/embeddinggemma-300M-Q8_0.gguf",
    "qwen3-embedding": "hf:Qwen/Qwen3-Embedding-0.6B-GGUF/Qwen3-Embedding-0.6B-Q8_0.gguf",
}
_SHOWN = 200  # letters of a name that is nobody's
_NEAR = 3  # names that an error offers
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_OF_OLLAMA = re.compile(r"[\w.-]+:[\w.-]+")  # as `ollama run` takes it
# What other programs' users write before the name of a repository.
_HUB_WORDS = (caches.HUB, "hf.co/", "huggingface.co/", "https://hf.co/", "https://huggingface.co/")
_LISTED = "`edgespec models list` shows what is here"


def is_name(text: str) -> bool:
    """Whether a text names a model, whether it is there or not: nobody would say it to one."""
    return (
        text == caches.EMBEDDED
        or text in EMBEDDING_MODELS
        or text.startswith((*_HUB_WORDS, caches.OLLAMA))
        or (text.lower().endswith(".gguf") or exists(text))
    )


def exists(text: str) -> bool:
    """Whether a file or folder of that name exists."""
    try:
        return expanded(text).exists()
    except (OSError, ValueError):  # too long for a name
        return False


def model_file(name: str, fetch: Fetch | None = None) -> Path:
    """The file or folder that a name means; one of the hub is fetched where it is not here.

    Raises ModelNotFoundError with the nearest names, and what `fetch` raises.
    """
    if name == caches.EMBEDDED:
        return embedded_model()
    if repository_and_tag := hub_name(name):
        return _of_hub(*repository_and_tag, fetch)
    if name.startswith(caches.OLLAMA):
        return _of_ollama(name)
    if exists(name):
        return expanded(name)
    raise missing(name)


def missing(name: str) -> ModelNotFoundError:
    """What to say about a name that nothing here has."""
    shown = name if len(name) <= _SHOWN else f"{name[:_SHOWN]}..."
    return ModelNotFoundError(f"there is no {_kind(name)} {shown}", hint=_hint(name))


def hub_name(name: str) -> tuple[str, str] | None:
    """OWNER/REPO and the tag or path of a file in it, or None for what is no name of the hub's.

    >>> hub_name("hf:owner/Tiny-GGUF:Q8_0")
    ('owner/Tiny-GGUF', 'Q8_0')
    """
    name = EMBEDDING_MODELS.get(name, name)
    begins = next((word for word in _HUB_WORDS if name.startswith(word)), None)
    if begins is None:
        return None
    repository, _, tag = name.removeprefix(begins).rstrip("/").partition(":")
    owner, _, rest = repository.partition("/")
    model, _, path = rest.partition("/")
    repository = f"{owner}/{model}"
    if not _REPOSITORY.fullmatch(repository) or (path and not path.endswith(".gguf")):
        raise ModelNotFoundError(
            f"{name} names no repository", hint="write hf:OWNER/REPO or hf:OWNER/REPO:Q4_K_M"
        )
    return repository, path or tag


def _of_hub(repository: str, tag: str, fetch: Fetch | None) -> Path:
    if (path := cached(repository, tag)) is not None:
        return path
    if fetch is None:
        name = f"{caches.HUB}{repository}" + (f":{tag}" if tag else "")
        raise ModelNotFoundError(
            f"{name} is not on this machine", hint=f"`edgespec models pull {name}` gets it"
        )
    return fetch(repository, tag)


def cached(repository: str, tag: str) -> Path | None:
    """The first part of what a tag means in OWNER/REPO, where all parts are in the hub's cache.

    Raises ModelNotFoundError where several files here may be meant.
    """
    for written, place in caches.snapshots(repository):
        paths = caches.gguf_paths(place)
        chosen = choice.choose(paths, tag, written, is_listing=False)
        if chosen is not None and choice.is_whole(paths, chosen):
            return place / choice.parts_of(paths, chosen)[0]
    return None


def _of_ollama(name: str) -> Path:
    wanted = name if ":" in name.removeprefix(caches.OLLAMA) else f"{name}:latest"
    if (local := caches.named(wanted)) is not None:
        return local.path
    there = wanted.removeprefix(caches.OLLAMA)
    raise ModelNotFoundError(
        f"Ollama has no model {there} here", hint=_hint(name, f"`ollama pull {there}` gets it")
    )


def nearest(name: str) -> list[str]:
    """Names of models here that are like another one, the nearest first."""
    word = _plain(name)
    names = [local.name for local in caches.local_models()]
    holding = [one for one in names if word and word in _plain(one)]
    parts = {_plain(part): one for one in names for part in (*re.split("[/:]", one), one)}
    near = [parts[found] for found in difflib.get_close_matches(word, parts, _NEAR, 0.5)]
    return list(dict.fromkeys([*holding, *near]))[:_NEAR]


def _plain(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower().removesuffix(".gguf"))


def _kind(name: str) -> str:
    return "file" if "/" in name or name.lower().endswith(".gguf") else "model or file"


def _hint(name: str, otherwise: str = "") -> str:
    """The nearest names, or what `otherwise` says, or what a name of this form may mean."""
    if near := nearest(name):
        return f"near it: {', '.join(near)}; {_LISTED}"
    if otherwise:
        return f"{otherwise}; {_LISTED}"
    if _OF_OLLAMA.fullmatch(name):
        return f"a model of Ollama's is {caches.OLLAMA}{name}; {_LISTED}"
    if _REPOSITORY.fullmatch(name) and not name.startswith((".", "~")):
        return f"hf:{name} gets it from the Hugging Face hub; {_LISTED}"
    check = "check the path; " if _kind(name) == "file" else ""
    return f"{check}{_LISTED}, and `edgespec models pull hf:OWNER/REPO` gets one"
