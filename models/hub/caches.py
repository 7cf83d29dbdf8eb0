"""Model files that are on this machine already: where other programs keep theirs, and by what name.

Folders are listed and manifests read; no model file is opened. What cannot be read is left out, as
a cache of somebody else is none of our business.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import MissingDependencyError
from edgespec.models.embedded import embedded_model
from edgespec.models.hub import choice

EMBEDDED = "embedded"
HUB, OLLAMA = "hf:", "ollama:"  # how names of two caches begin
FOLDERS = "EDGESPEC_MODELS"  # folders of the user's own, with the system's separator between them
_OLLAMA_HOST, _OLLAMA_USER = "registry.ollama.ai", "library"
_OLLAMA_MODEL = "application/vnd.ollama.image.model"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MANIFEST_BYTES = 1 << 20


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
    """Every GGUF file on this machine that is found, each once, first parts for split ones."""
    seen: set[Path] = set()
    found = []
    for local in _everything():
        real = Path(os.path.realpath(local.path))
        if real not in seen:
            seen.add(real)
            found.append(local)
    return found


def _everything() -> Iterator[Local]:
    yield from _embedded()
    yield from _of_hub()
    yield from _of_ollama()
    for source, folder in (
        ("llama.cpp", llama_cpp_cache()),
        *(("LM Studio", folder) for folder in _lm_studio_folders()),
        *((FOLDERS, Path(os.path.expanduser(folder))) for folder in _own_folders()),
    ):
        for path in _gguf_files(folder):
            yield Local(_short(path), path, source)


def _embedded() -> Iterator[Local]:
    try:
        yield Local(EMBEDDED, embedded_model(), "edgespec")
    except MissingDependencyError:
        return


def _gguf_files(folder: Path) -> list[Path]:
    """Models, and heads and projectors, below a folder; one path for all parts of a split one."""
    try:
        paths = sorted(folder.rglob("*.gguf")) if folder.is_dir() else []
    except OSError:
        return []
    return [path for path in paths if choice.read_name(path.name).part == 1 and path.is_file()]


def _short(path: Path) -> str:
    """A path as people write it."""
    home = os.path.expanduser("~")
    return f"~{os.sep}{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


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
    return hub_cache() / f"models--{repository.replace('/', '--')}"


def snapshot(repository: str) -> Path | None:
    """The folder with the files of a repository's last known commit."""
    folder = repository_folder(repository)
    commit = _commit(folder / "refs")
    place = folder / "snapshots" / commit if commit else None
    if place is not None and place.is_dir():
        return place
    try:  # fetched by commit, which leaves no reference
        others = sorted((folder / "snapshots").iterdir(), key=lambda path: path.stat().st_mtime)
    except OSError:
        return None
    return others[-1] if others else None


def cached_paths(repository: str) -> list[str]:
    """GGUF files of a repository that lie in the cache, by their paths in it."""
    place = snapshot(repository)
    if place is None:
        return []
    files = sorted(place.rglob("*.gguf"))
    return [file.relative_to(place).as_posix() for file in files if file.exists()]


def _commit(refs: Path) -> str:
    for name in ("main", "master"):
        try:
            commit = (refs / name).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            continue
        if re.fullmatch("[0-9a-f]{40}", commit):
            return commit
    return ""


def _of_hub() -> Iterator[Local]:
    try:
        folders = sorted(hub_cache().glob("models--*--*"))
    except OSError:
        return
    for folder in folders:
        repository = folder.name.removeprefix("models--").replace("--", "/", 1)
        place, paths = snapshot(repository), cached_paths(repository)
        for path in paths:
            if place is None or choice.read_name(path).part != 1:
                continue
            yield Local(_hub_name(repository, paths, path), place / path, "Hugging Face hub")


def _hub_name(repository: str, paths: list[str], path: str) -> str:
    """The name by which this file is found again; its path where a tag means another one."""
    tag = choice.read_name(path).tag
    meant = tag and choice.is_model(path) and choice.choose(paths, tag) == path
    return f"{HUB}{repository}:{tag}" if meant else f"{HUB}{repository}/{path}"


# -- Ollama's ------------------------------------------------------------------------------------


def _ollama_folders() -> list[Path]:
    if folder := os.environ.get("OLLAMA_MODELS"):
        return [Path(os.path.expanduser(folder))]
    # The second one is that of the system's service.
    home = Path(os.path.expanduser("~/.ollama/models"))
    return [home, Path("/usr/share/ollama/.ollama/models")]


def _of_ollama() -> Iterator[Local]:
    for folder in _ollama_folders():
        try:
            manifests = sorted((folder / "manifests").glob("*/*/*/*"))
        except OSError:
            continue
        for manifest in manifests:
            blob = _ollama_blob(folder, manifest)
            if blob is not None:
                host, user, model, tag = manifest.parts[-4:]
                yield Local(f"{OLLAMA}{_ollama_name(host, user, model)}:{tag}", blob, "Ollama")


def _ollama_name(host: str, user: str, model: str) -> str:
    if host != _OLLAMA_HOST:
        return f"{host}/{user}/{model}"
    return model if user == _OLLAMA_USER else f"{user}/{model}"


def _ollama_blob(folder: Path, manifest: Path) -> Path | None:
    """The weights that a manifest names; None where it names none, or they are gone."""
    try:
        if manifest.stat().st_size > _MANIFEST_BYTES:
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


def _lm_studio_folders() -> list[Path]:
    homes = [
        Path(os.path.expanduser("~/.lmstudio")),
        Path(os.path.expanduser("~/.cache/lm-studio")),
    ]
    return [home / "models" for home in homes]


def _own_folders() -> list[str]:
    return [folder for folder in os.environ.get(FOLDERS, "").split(os.pathsep) if folder]
