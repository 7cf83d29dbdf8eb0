"""From a name that a person typed to a model file on this machine.

A name is the path of a file or folder, `hf:OWNER/REPO[:QUANT]`, `ollama:NAME[:TAG]`, `embedded`, or
one of `EMBEDDING_MODELS`.

Folders where other programs keep theirs are listed and manifests read; no model file is opened.
What cannot be read is left out, as a cache of somebody else is none of our business.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from edgespec.errors import MissingDependencyError, ModelNotFoundError
from edgespec.models.embedded import embedded_model
from edgespec.models.hub import choice
from edgespec.paths import expanded

EMBEDDED = "embedded"
HUB, OLLAMA = "hf:", "ollama:"  # how names of two caches begin
FOLDERS = "EDGESPEC_MODELS"  # folders of the user's own, with the system's separator between them
_OLLAMA_HOST, _OLLAMA_USER = "registry.ollama.ai", "library"
_OLLAMA_MODEL = "application/vnd.ollama.image.model"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MANIFEST_BYTES = 1 << 20
_LM_STUDIO = ("~/.lmstudio", "~/.cache/lm-studio")
_FOLDER = "models--"  # how the hub's cache calls a repository


@dataclass(frozen=True, slots=True)
class Local:
    """A GGUF file that lies here: `name` is what the command line takes for it."""

    name: str
    path: Path
    source: str

    @property
    def file_bytes(self) -> int:
        """Size of the file, with all parts of a split one; 0 where it is gone."""
        name = choice.read_name(self.path.name)
        prefix, parts = name.prefix, name.parts
        files = [self.path]
        if parts > 1:
            count = range(1, parts + 1)
            files = [self.path.with_name(f"{prefix}-{n:05}-of-{parts:05}.gguf") for n in count]
        return sum(file.stat().st_size for file in files if file.exists())


def local_models() -> list[Local]:
    """Every GGUF file on this machine that is found; first parts for split ones.

    A file that two programs share is listed for the first of them: under each name that the hub or
    Ollama has for it, or under one path.
    """
    owners: dict[str, Local] = {}
    found = []
    for local in _everything():
        owner = owners.setdefault(os.path.realpath(local.path), local)
        has_names = owner.source == local.source and local.name.startswith((HUB, OLLAMA))
        if owner is local or has_names:
            found.append(local)
    return found


def named(name: str) -> Local | None:
    """The model of that name or path. Names of the hub and of Ollama are the same in any case."""
    found = list(_everything())
    exact = (one for one in found if name in (one.name, str(one.path)))
    other = (
        one
        for one in found
        if one.name.startswith((HUB, OLLAMA)) and one.name.lower() == name.lower()
    )
    return next(exact, None) or next(other, None)


def _everything() -> Iterator[Local]:
    with suppress(MissingDependencyError):
        yield Local(EMBEDDED, embedded_model(), "edgespec")
    yield from _of_hub()
    yield from _of_ollama()
    own = os.environ.get(FOLDERS, "").split(os.pathsep)
    for source, folder in (
        ("llama.cpp", llama_cpp_cache()),
        *(("LM Studio", Path(os.path.expanduser(home)) / "models") for home in _LM_STUDIO),
        *((FOLDERS, Path(os.path.expanduser(folder))) for folder in own if folder),
    ):
        home = os.path.expanduser("~")
        for path in gguf_files(folder):
            is_own = path.is_relative_to(home)
            name = f"~{os.sep}{path.relative_to(home)}" if is_own else str(path)
            yield Local(name, path, source)


def gguf_files(folder: Path) -> list[Path]:
    """Models, and heads and projectors, below a folder; one path for all parts of a split one."""
    try:
        paths = sorted(folder.rglob("*.gguf")) if folder.is_dir() else []
    except OSError:
        return []
    return [path for path in paths if choice.read_name(path.name).part == 1 and path.is_file()]


# -- Hugging Face's cache, which llama.cpp shares ------------------------------------------------


def hub_cache() -> Path:
    """Where files of the hub lie, by llama.cpp's rule (`llama.cpp: common/hf-cache.cpp`)."""
    for variable, below in (
        ("LLAMA_CACHE", ""),
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
    ):
        if folder := os.environ.get(variable):
            return Path(os.path.expanduser(folder)) / below
    return Path(os.path.expanduser("~/.cache/huggingface/hub"))


def repository_folder(repository: str) -> Path:
    """Where the cache keeps a repository, named OWNER/REPO."""
    return hub_cache() / f"{_FOLDER}{repository.replace('/', '--')}"


def snapshots(repository: str) -> list[tuple[str, Path]]:
    """Folders with files of OWNER/REPO, each with the repository's name as it is written there.

    The last known commit comes first, then others, the newest first. The hub takes names in any
    case, so those that differ in it follow.
    """
    exact = repository_folder(repository)
    try:
        others = sorted(hub_cache().glob(f"{_FOLDER}*--*"))
    except OSError:
        others = []
    same = [one for one in others if one != exact and one.name.lower() == exact.name.lower()]
    return [(_repository_in(one), place) for one in (exact, *same) for place in _snapshots(one)]


def _repository_in(folder: Path) -> str:
    return folder.name.removeprefix(_FOLDER).replace("--", "/", 1)


def _snapshots(folder: Path) -> list[Path]:
    commits = list[str]()  # that have a reference: what was fetched by its commit alone has none
    for name in ("main", "master"):
        with suppress(OSError, ValueError):
            commits.append((folder / "refs" / name).read_text(encoding="utf-8").strip())
    known = next((one for one in commits if re.fullmatch("[0-9a-f]{40}", one)), "")

    def order(place: Path) -> tuple[bool, float]:
        return place.name == known, place.stat().st_mtime

    try:
        places = [place for place in (folder / "snapshots").iterdir() if place.is_dir()]
        return sorted(places, key=order, reverse=True)
    except OSError:
        return []


def gguf_paths(place: Path) -> list[str]:
    """GGUF files of a repository that lie in a snapshot of it, by their paths in it."""
    files = sorted(place.rglob("*.gguf"))
    return [file.relative_to(place).as_posix() for file in files if file.is_file()]


def _of_hub() -> Iterator[Local]:
    try:
        folders = sorted(hub_cache().glob(f"{_FOLDER}*--*"))
    except OSError:
        return
    for folder in folders:
        repository, seen = _repository_in(folder), set[str]()
        for place in _snapshots(folder):
            new = [path for path in gguf_paths(place) if path not in seen]
            seen.update(new)
            for path in new:
                if choice.read_name(path).part == 1:
                    name = f"{HUB}{choice.name_of(path, repository)}"
                    yield Local(name, place / path, "Hugging Face hub")


# -- Ollama's ------------------------------------------------------------------------------------


def _of_ollama() -> Iterator[Local]:
    # The second one is that of the system's service.
    usual = (os.path.expanduser("~/.ollama/models"), "/usr/share/ollama/.ollama/models")
    own = os.environ.get("OLLAMA_MODELS")
    for folder in map(Path, (os.path.expanduser(own),) if own else usual):
        try:
            manifests = sorted((folder / "manifests").glob("*/*/*/*"))
        except OSError:
            continue
        for manifest in manifests:
            blob = _ollama_blob(folder, manifest)
            if blob is not None:
                host, user, model, tag = manifest.parts[-4:]
                if host != _OLLAMA_HOST:
                    model = f"{host}/{user}/{model}"
                elif user != _OLLAMA_USER:
                    model = f"{user}/{model}"
                yield Local(f"{OLLAMA}{model}:{tag}", blob, "Ollama")


def _ollama_blob(folder: Path, manifest: Path) -> Path | None:
    """The weights that a manifest names; None where it names none, or they are gone."""
    try:
        if not manifest.is_file() or manifest.stat().st_size > _MANIFEST_BYTES:
            return None
        layers = json.loads(manifest.read_bytes())["layers"]
        digests = [one["digest"] for one in layers if one["mediaType"] == _OLLAMA_MODEL]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    for digest in digests:
        if isinstance(digest, str) and _DIGEST.fullmatch(digest):
            blob = folder / "blobs" / digest.replace(":", "-")
            return blob if blob.is_file() else None
    return None


# -- the others' ---------------------------------------------------------------------------------


def llama_cpp_cache() -> Path:
    """Where llama.cpp kept downloads before it used the hub's cache."""
    if folder := os.environ.get("LLAMA_CACHE"):
        return Path(os.path.expanduser(folder))
    if sys.platform == "darwin":
        return Path(os.path.expanduser("~/Library/Caches/llama.cpp"))
    caches = os.environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME")
    return Path(os.path.expanduser(caches or "~/.cache")) / "llama.cpp"


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
_HUB_WORDS = (HUB, "hf.co/", "huggingface.co/", "https://hf.co/", "https://huggingface.co/")
_LISTED = "`edgespec models list` shows what is here"


def is_name(text: str) -> bool:
    """Whether a text names a model, whether it is there or not: nobody would say it to one."""
    return (
        text == EMBEDDED
        or text in EMBEDDING_MODELS
        or text.startswith((*_HUB_WORDS, OLLAMA))
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
    if name == EMBEDDED:
        return embedded_model()
    if found := hub_name(name):
        if (path := cached(*found)) is not None:
            return path
        if fetch is None:
            shown = f"{HUB}{found[0]}" + (f":{found[1]}" if found[1] else "")
            raise ModelNotFoundError(
                f"{shown} is not on this machine", hint=f"`edgespec models pull {shown}` gets it"
            )
        return fetch(*found)
    if name.startswith(OLLAMA):
        wanted = name if ":" in name.removeprefix(OLLAMA) else f"{name}:latest"
        if (local := named(wanted)) is not None:
            return local.path
        there = wanted.removeprefix(OLLAMA)
        raise ModelNotFoundError(
            f"Ollama has no model {there} here", hint=_hint(name, f"`ollama pull {there}` gets it")
        )
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


def cached(repository: str, tag: str) -> Path | None:
    """The first part of what a tag means in OWNER/REPO, where all parts are in the hub's cache.

    Raises ModelNotFoundError where several files here may be meant.
    """
    for written, place in snapshots(repository):
        paths = gguf_paths(place)
        chosen = choice.choose(paths, tag, written, is_listing=False)
        if chosen is not None and choice.is_whole(paths, chosen):
            return place / choice.parts_of(paths, chosen)[0]
    return None


def nearest(name: str) -> list[str]:
    """Names of models here that are like another one, the nearest first."""
    word = _plain(name)
    names = [local.name for local in local_models()]
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
        return f"a model of Ollama's is {OLLAMA}{name}; {_LISTED}"
    if _REPOSITORY.fullmatch(name) and not name.startswith((".", "~")):
        return f"hf:{name} gets it from the Hugging Face hub; {_LISTED}"
    check = "check the path; " if _kind(name) == "file" else ""
    return f"{check}{_LISTED}, and `edgespec models pull hf:OWNER/REPO` gets one"
