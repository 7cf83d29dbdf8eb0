"""What the Hugging Face hub says about a repository, through `huggingface_hub`.

Files are listed, parts of them read, and whole ones written to a file that is given. Where they
belong in the cache is `fetching.py`'s. A token, a mirror (`HF_ENDPOINT`) and proxies are taken
from where `huggingface_hub` takes them.

A listing becomes names of files in the cache, and a mirror may send any. What is kept of one can be
joined to a path: commits and digests are hexadecimal, paths stay below the repository.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import IO, Any

from edgespec.errors import DownloadError, MissingDependencyError, ModelNotFoundError

_ENDPOINTS = ("MODEL_ENDPOINT", "HF_ENDPOINT")  # the first one is llama.cpp's
_TRUE = ("1", "on", "true", "yes")
_COMMIT, _SHA256_LETTERS = re.compile("[0-9a-f]{40}"), 64
_DIGEST = re.compile(f"[0-9a-f]{{40}}|[0-9a-f]{{{_SHA256_LETTERS}}}")
_MOST_FILES, _MOST_FILE_BYTES = 100_000, 1 << 50
_MOST_NAME_BYTES = 255  # of a file or folder, on every usual disk
_ALONE = "name a file that is here; `edgespec models list` shows them"
_BROKEN = "check the connection; the same command goes on where it stopped"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository: its size, and the SHA-256 of its bytes or their id in git (SHA-1)."""

    path: str
    file_bytes: int
    digest: str

    def hashing(self) -> tuple[str, Any]:
        """The kind of its digest, and a hash that gives it after all bytes of the file."""
        if len(self.digest) == _SHA256_LETTERS:
            return "SHA-256", hashlib.sha256()
        head = f"blob {self.file_bytes}\0".encode()
        return "git's SHA-1", hashlib.sha1(head, usedforsecurity=False)


@dataclass(frozen=True, slots=True)
class Repository:
    """The files of OWNER/REPO at a commit, in the hub's order."""

    name: str
    commit: str
    files: dict[str, RemoteFile]


def is_offline() -> bool:
    """Whether nothing may be asked of the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in _TRUE


def list_repository(name: str) -> Repository:
    """The GGUF files of OWNER/REPO as they are now, under the name that the hub writes.

    Raises ModelNotFoundError, and DownloadError also for a listing that is not of the hub's form.
    """
    with _told(name):
        hub = _hub()
        api = hub.HfApi(endpoint=_endpoint())
        info = api.model_info(name)
        commit = _formed(name, "commit", info.sha, _COMMIT)
        tree = api.list_repo_tree(name, recursive=True, revision=commit)
        listed = [one for one in islice(tree, _MOST_FILES) if hasattr(one, "size")]
        files = [_remote_file(name, one) for one in listed if str(one.path).endswith(".gguf")]
    written = str(info.id)  # of a repository that was renamed it is another name
    name = written if written.lower() == name.lower() else name
    return Repository(name, commit, {one.path: one for one in files})


def _remote_file(name: str, one: Any) -> RemoteFile:
    """Raises DownloadError for what could lead out of the cache."""
    digest = one.blob_id if one.lfs is None else one.lfs.sha256
    size = one.size
    if not _is_below(one.path):
        raise _malformed(name, "path", one.path)
    if type(size) is not int or not 0 <= size <= _MOST_FILE_BYTES:
        raise _malformed(name, "size", size)
    return RemoteFile(one.path, size, _formed(name, "digest", digest, _DIGEST))


def _is_below(path: Any) -> bool:
    """Whether a path stays below the folder that it is joined to, on every system."""
    if not isinstance(path, str) or not path.isprintable() or any(one in path for one in "\\:"):
        return False
    parts = path.split("/")
    return all(
        part not in ("", ".", "..") and len(part.encode()) <= _MOST_NAME_BYTES for part in parts
    )


def _formed(name: str, what: str, value: Any, form: re.Pattern[str]) -> str:
    if not isinstance(value, str) or not form.fullmatch(value):
        raise _malformed(name, what, value)
    return value


def _malformed(name: str, what: str, value: Any) -> DownloadError:
    return DownloadError(
        f"the listing of {name} has the {what} {str(value)[:80]!r}, which no hub sends",
        hint="check HF_ENDPOINT; nothing was written",
    )


def read_beginning(repository: Repository, path: str, start: int, end: int) -> bytes:
    """Bytes `start` to `end` of a file, by a range request. Raises as `write_file`."""
    part = io.BytesIO()
    _get(repository, path, _Limited(part, end - start), f"bytes={start}-{end - 1}", end - start, 0)
    return part.getvalue()


def write_file(
    repository: Repository, path: str, file: IO[bytes], present: int, tell: Callable[[int], None]
) -> None:
    """Write a file of the repository, of which `present` bytes are in `file` already.

    A broken connection is taken up again five times. `tell` hears how many bytes are there.

    Raises ModelNotFoundError, and DownloadError where the hub refuses or the connection breaks for
    good; then what came stays in `file`.
    """
    size = repository.files[path].file_bytes
    _get(repository, path, _Limited(file, size, tell), None, size, present)


class _Limited:
    """A file as `http_get` writes it: tells how far it is, and takes no more than was announced."""

    def __init__(
        self, file: IO[bytes], most_bytes: int, tell: Callable[[int], None] | None = None
    ) -> None:
        self._file, self._most_bytes, self._tell = file, most_bytes, tell

    def write(self, data: bytes) -> int:
        written = self._file.write(data)
        position = self._file.tell()
        if position > self._most_bytes:
            raise DownloadError("the server sends more than was asked for", hint=_ALONE)
        if self._tell is not None:
            self._tell(position)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _get(
    repository: Repository, path: str, file: Any, part: str | None, size: int, present: int
) -> None:
    with _told(f"{repository.name}/{path}"):
        hub = _hub()
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers

        address = hub.hf_hub_url(
            repository.name, path, revision=repository.commit, endpoint=_endpoint()
        )
        headers = {**build_hf_headers(), **({"Range": part} if part else {})}
        http_get(address, file, resume_size=present, headers=headers, expected_size=size)


def _hub() -> Any:
    """The library, silent: progress and failures are told in our words."""
    try:
        import huggingface_hub
    except ImportError:
        raise MissingDependencyError(
            "models are fetched with huggingface_hub, which is not installed",
            hint="pip install 'edgespec[hub]'",
        ) from None
    from huggingface_hub.utils import disable_progress_bars, logging

    disable_progress_bars()
    logging.set_verbosity_error()
    return huggingface_hub


def _endpoint() -> str | None:
    return next((os.environ[name].rstrip("/") for name in _ENDPOINTS if os.environ.get(name)), None)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Turns what the library and the network can say into our errors."""
    if is_offline():
        raise DownloadError(f"HF_HUB_OFFLINE forbids asking for {what}", hint=_ALONE)
    try:
        yield
    except (DownloadError, MissingDependencyError, ModelNotFoundError):
        raise
    except Exception as problem:
        raise _in_a_sentence(what, problem) from problem


def _in_a_sentence(what: str, problem: Exception) -> DownloadError | ModelNotFoundError:
    status = getattr(getattr(problem, "response", None), "status_code", None)
    kind = type(problem).__name__
    if kind == "GatedRepoError" or status == 403:
        return DownloadError(
            f"{what} asks for its terms to be accepted first",
            hint="accept them on its page, then set HF_TOKEN or run `hf auth login`",
        )
    if status in (401, 404):
        has_token = bool(os.environ.get("HF_TOKEN"))
        known = "" if has_token else "; a private one needs HF_TOKEN or `hf auth login`"
        return ModelNotFoundError(f"the hub has no {what}", hint=f"check the name{known}")
    if status == 429:
        return DownloadError(
            f"the hub answers no more questions for now (429) about {what}",
            hint="wait some minutes, or set HF_TOKEN: those who log in may ask more",
        )
    if status is not None:
        return DownloadError(f"the hub failed on {what} (status {status})", hint=_BROKEN)
    if isinstance(problem, OSError) and problem.errno is not None:
        raise problem
    first = (str(problem).splitlines() or [""])[0]
    return DownloadError(f"{what} could not be fetched: {kind}: {first}"[:300], hint=_BROKEN)
