"""From a repository of the hub into the cache that `huggingface_hub` and llama.cpp share.

    models--OWNER--REPO/refs/main                   the commit
    models--OWNER--REPO/blobs/SHA256                the bytes; while they come, with llama.cpp's
                                                    ending, so that either program goes on
    models--OWNER--REPO/snapshots/COMMIT/PATH       a link to them

A file is planned from its header before its weights are fetched, and is in its place only when its
bytes have the digest that was announced.

A token, a mirror (`HF_ENDPOINT`) and proxies are taken from where `huggingface_hub` takes them. A
listing becomes names of files in the cache, and a mirror may send any. What is kept of one can be
joined to a path: commits and digests are hexadecimal, paths stay below the repository.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any
from urllib.parse import urljoin, urlsplit

from edgespec.errors import (
    DoesNotFitError,
    DownloadError,
    MissingDependencyError,
    ModelFileError,
    ModelNotFoundError,
)
from edgespec.models.gguf.reader import read_gguf
from edgespec.models.hub import choice, resolve
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.models.writing import is_full, whole_file
from edgespec.progress import Progress

# -- what the hub says about a repository ----------------------------------------------

_ENDPOINTS = ("MODEL_ENDPOINT", "HF_ENDPOINT")  # the first one is llama.cpp's
_TRUE = ("1", "on", "true", "yes")
_COMMIT, _SHA256_LETTERS = re.compile("[0-9a-f]{40}"), 64
_DIGEST = re.compile(f"[0-9a-f]{{40}}|[0-9a-f]{{{_SHA256_LETTERS}}}")
_MOST_FILES, _MOST_FILE_BYTES = 100_000, 1 << 50
# Of a listing: a page of the hub's has 1,000 files, which is 0.3 MiB.
_MOST_PAGES, _MOST_PAGE_BYTES, _PIECE_BYTES = 200, 16 << 20, 1 << 16
_PATIENCE_S = 10.0  # for the next bytes of one
_MOST_NAME_BYTES = 255  # of a file or folder, on every usual disk
_ALONE = "name a file that is here; `edgespec models list` shows them"
_BROKEN = "check the connection; the same command goes on where it stopped"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository: its size, and the SHA-256 of its bytes or their id in git (SHA-1)."""

    path: str
    file_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Repository:
    """The files of OWNER/REPO at a commit, in the hub's order."""

    name: str
    commit: str
    files: dict[str, RemoteFile]


def list_repository(name: str) -> Repository:
    """The GGUF files of OWNER/REPO as they are now, under the name that the hub writes.

    Raises ModelNotFoundError, and DownloadError also for a listing that is not of the hub's form.
    """
    with _told(name):
        info = next(_pages(name, f"/api/models/{name}"))
        info = info if isinstance(info, dict) else {}
        commit = _formed(name, "commit", info.get("sha"), _COMMIT)
        tree = _pages(name, f"/api/models/{name}/tree/{commit}?recursive=true")
        listed = (one for page in tree for one in (page if isinstance(page, list) else [page]))
        there = (o for o in listed if isinstance(o, dict) and o.get("type") != "directory")
        kept = islice((o for o in there if str(o.get("path")).endswith(".gguf")), _MOST_FILES)
        files = [_remote_file(name, one) for one in kept]
    written = str(info.get("id"))  # of a repository that was renamed it is another name
    name = written if written.lower() == name.lower() else name
    return Repository(name, commit, {one.path: one for one in files})


def _pages(name: str, address: str) -> Iterator[Any]:
    """A listing's pages of JSON, read by hand: the library would read one without an end.

    Raises DownloadError for more than `_MOST_PAGE_BYTES` or `_MOST_PAGES`, and for an address at
    another origin than the hub's, to which a mirror could send this machine and its token.
    """
    hub = _hub()
    from huggingface_hub.utils import build_hf_headers, validate_repo_id

    validate_repo_id(name)
    origin = urlsplit(_endpoint() or hub.constants.ENDPOINT)
    base, headers = origin.geturl(), build_hf_headers()
    following: str | None = base + address
    for _ in range(_MOST_PAGES):
        if following is None:
            return
        if urlsplit(following)[:2] != origin[:2]:
            raise _malformed(name, "address", following)
        # Redirects of renamed repositories are followed as pages are: here, and at this origin.
        with hub.get_session().stream(
            "GET", following, headers=headers, follow_redirects=False, timeout=_PATIENCE_S
        ) as response:
            if response.status_code >= 400:
                response.raise_for_status()
            moved = response.headers.get("Location") if response.status_code >= 300 else None
            following = moved or response.links.get("next", {}).get("url")
            following = None if following is None else urljoin(str(response.url), following)
            if moved is None:
                data = bytearray()
                for piece in response.iter_bytes(_PIECE_BYTES):
                    data += piece
                    if len(data) > _MOST_PAGE_BYTES:
                        raise _malformed(
                            name, "length", f"over {_MOST_PAGE_BYTES >> 20} MiB a page"
                        )
                yield json.loads(data)
    if following is not None:
        raise _malformed(name, "length", f"over {_MOST_PAGES} pages")


def _remote_file(name: str, one: dict[str, Any]) -> RemoteFile:
    """Raises DownloadError for what could lead out of the cache."""
    lfs, path, size = one.get("lfs"), one.get("path"), one.get("size")
    digest = lfs.get("oid") if isinstance(lfs, dict) else one.get("oid")
    parts = path.split("/") if isinstance(path, str) and path.isprintable() else [""]
    # Else it could leave the folder that it is joined to, on some system.
    is_below = all(
        not {"\\", ":"} & {*part}
        and part not in ("", ".", "..")
        and len(part.encode()) <= _MOST_NAME_BYTES
        for part in parts
    )
    if not isinstance(path, str) or not is_below:
        raise _malformed(name, "path", path)
    if type(size) is not int or not 0 <= size <= _MOST_FILE_BYTES:
        raise _malformed(name, "size", size)
    return RemoteFile(path, size, _formed(name, "digest", digest, _DIGEST))


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
    """Bytes `start` to `end` of a file, by a range request. Raises as `fetch`."""
    part = io.BytesIO()
    _get(repository, path, _Limited(part, end - start), f"bytes={start}-{end - 1}", end - start, 0)
    return part.getvalue()


@dataclass
class _Limited:
    """A file as `http_get` writes it: tells how far it is, and takes no more than was announced."""

    file: IO[bytes]
    most_bytes: int
    told: Callable[[int], object] = lambda _: None

    def write(self, data: bytes) -> int:
        written = self.file.write(data)
        position = self.file.tell()
        if position > self.most_bytes:
            raise DownloadError("the server sends more than was asked for", hint=_ALONE)
        self.told(position)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


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
    if (version := huggingface_hub.__version__).startswith("0."):
        raise MissingDependencyError(
            f"models are fetched with huggingface_hub 1.0 or newer, not {version}",
            hint="pip install 'edgespec[hub]', in another environment than the extra export's",
        )
    from huggingface_hub.utils import disable_progress_bars, logging

    disable_progress_bars()
    logging.set_verbosity_error()
    return huggingface_hub


def _endpoint() -> str | None:
    return next((os.environ[name].rstrip("/") for name in _ENDPOINTS if os.environ.get(name)), None)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Turns what the library and the network can say into our errors."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in _TRUE:
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
    code = getattr(getattr(problem, "response", None), "headers", {}).get("X-Error-Code")
    if code == "GatedRepo" or status == 403:
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


# -- what is wanted --------------------------------------------------------------------

_PARTIAL = ".downloadInProgress"
_FIRST_BYTES, _MOST_HEADER_BYTES = 1 << 20, 256 << 20
_GROWTH = 4
_SPARE_BYTES = 256 << 20  # of the disk, for everybody else
_BLOCK_BYTES = 4 << 20
_SMALLER_TRIED = 6  # headers that are read to find a quantization that fits

# Refuses a model that does not fit, by raising DoesNotFitError.
Check = Callable[[ModelSpec], object]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The files of one model in a repository."""

    repository: Repository
    paths: tuple[str, ...]

    @property
    def name(self) -> str:
        """By which the same files are meant everywhere."""
        return resolve.HUB + choice.name_of(self.paths[0], self.repository.name)

    @property
    def file_bytes(self) -> int:
        return sum(self.repository.files[path].file_bytes for path in self.paths)


def find(name: str, tag: str = "") -> Wanted:
    """What a tag means in OWNER/REPO, as it is on the hub now.

    Raises ModelNotFoundError, with the tags there are, and DownloadError.
    """
    repository = list_repository(name)
    name = repository.name
    chosen = choice.choose(repository.files, tag, name)
    if chosen is None:
        tags = [choice.tag_of(path, name)[0] for path in choice.models(repository.files)]
        known = ", ".join(dict.fromkeys(tag for tag in tags if tag))
        missing = f"no {tag} in {name}" if tag else f"no GGUF model in {name}"
        raise ModelNotFoundError(
            f"there is {missing}",
            hint=f"it has {known}" if known else "look for a repository whose name ends in -GGUF",
        )
    wanted = Wanted(repository, tuple(choice.parts_of(repository.files, chosen)))
    if not choice.is_whole(list(repository.files), chosen):
        raise ModelNotFoundError(
            f"{name} has {len(wanted.paths)} parts of {choice.read_name(chosen).parts} of {chosen}",
            hint="take another quantization or another repository",
        )
    return wanted


# -- before a byte of the weights -----------------------------------------------------------------


@contextmanager
def header_only(wanted: Wanted) -> Iterator[ModelSpec]:
    """What a file on the hub says about itself: its header, in a file whose weights are holes.

    Raises ModelFileError where it is no language model, and DownloadError.
    """
    with tempfile.TemporaryDirectory(prefix="edgespec-") as folder:
        for path in wanted.paths:
            _write_header(wanted.repository, path, Path(folder) / os.path.basename(path))
        yield read_model_spec(Path(folder) / os.path.basename(wanted.paths[0]))


def _write_header(repository: Repository, path: str, target: Path) -> None:
    size = repository.files[path].file_bytes
    known, wanted = 0, min(size, _FIRST_BYTES)
    while True:
        with open(target, "ab" if known == 0 else "r+b") as file:
            file.seek(known)
            file.write(read_beginning(repository, path, known, wanted))
            file.truncate(size)
        known = wanted
        try:
            # Where the header ends in what is still a hole, what it says cannot be true.
            if read_gguf(target).data_offset <= known:
                return
        except ModelFileError:
            if known >= min(size, _MOST_HEADER_BYTES):
                raise
        wanted = min(size, known * _GROWTH)


def check(wanted: Wanted, fits: Check | None) -> None:
    """Refuse what the disk or a plan has no room for, and name a smaller quantization.

    Raises DoesNotFitError, and DownloadError for a cache that cannot be written.
    """
    _check_disk(wanted)
    if fits is None or not choice.is_model(wanted.paths[0]):
        return

    def why_not(one: Wanted) -> DoesNotFitError | None:
        try:
            with header_only(one) as spec:
                fits(spec)
        except DoesNotFitError as problem:
            return problem
        return None

    if problem := why_not(wanted):
        smaller = _smaller(wanted, lambda one: why_not(one) is None)
        raise DoesNotFitError(
            f"{wanted.name} would not fit: {problem}",
            hint=f"{smaller} fits; {problem.hint}" if smaller else problem.hint,
        ) from problem


def _smaller(wanted: Wanted, is_good: Callable[[Wanted], bool]) -> str | None:
    """The name of the largest smaller quantization that is good, of the next few."""
    files = wanted.repository.files
    others = [
        Wanted(wanted.repository, tuple(choice.parts_of(files, path)))
        for path in choice.models(files)
        if choice.is_whole(list(files), path)
    ]
    smaller = [one for one in others if one.file_bytes < wanted.file_bytes]
    smaller.sort(key=lambda one: -one.file_bytes)
    return next((one.name for one in smaller[:_SMALLER_TRIED] if is_good(one)), None)


def _check_disk(wanted: Wanted) -> None:
    folder = resolve.hub_cache()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        raise DownloadError(
            f"{wanted.name} is not here, and {there} cannot be written",
            hint=f"set {_variable()} to a folder that can",
        )
    free = shutil.disk_usage(there).free
    if _missing_bytes(wanted) + _SPARE_BYTES <= free:
        return
    smaller = _smaller(wanted, lambda one: _missing_bytes(one) + _SPARE_BYTES <= free)
    raise DoesNotFitError(
        f"{wanted.name} has {wanted.file_bytes >> 20} MiB, and {folder} has room for "
        f"{max(0, free - _SPARE_BYTES) >> 20} MiB",
        hint=(f"{smaller} fits, or " if smaller else "") + f"set {_variable()} to another disk",
    )


def _missing_bytes(wanted: Wanted) -> int:
    """Bytes of its files that are not on the disk."""
    left = wanted.file_bytes
    for path in wanted.paths:
        blob = _blob(wanted.repository, path)
        for file in (blob, blob.with_name(blob.name + _PARTIAL)):
            with suppress(OSError):
                left -= file.stat().st_size
                break
    return left


def _variable() -> str:
    """The variable that says where the cache is, whatever others say."""
    return "LLAMA_CACHE" if os.environ.get("LLAMA_CACHE") else "HF_HUB_CACHE"


# -- fetching ----------------------------------------------------------------------------------


def fetch(wanted: Wanted, progress: Progress | None = None) -> Path:
    """Bring a model into the cache; what is there is not fetched again. Returns its first part.

    A broken connection is taken up again five times; what came until then stays for the next call,
    which `hf_hub_download` would begin anew (benchmarks/LOG.md).

    Raises ModelNotFoundError; DownloadError where the hub refuses, or the bytes are not those that
    were announced; OSError for a disk that cannot be written.
    """
    total, before = max(1, wanted.file_bytes), 0
    for path in wanted.paths:

        def tell(count: int, path: str = path, before: int = before) -> None:
            if progress is not None:
                progress(f"fetching {os.path.basename(path)}", (before + count) / total)

        _fetch_file(wanted.repository, path, tell)
        before += wanted.repository.files[path].file_bytes
    _refer(resolve.repository_folder(wanted.repository.name), wanted.repository.commit)
    return _place(wanted.repository, wanted.paths[0])


def _refer(folder: Path, commit: str) -> None:
    """Let the cache say which commit is the newest; what cannot be written is found without."""
    reference = folder / "refs" / "main"
    with suppress(OSError):
        if not reference.exists() or reference.read_bytes() != commit.encode():
            reference.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(reference) as partial:
                partial.write_text(commit, encoding="utf-8")


def here(wanted: Wanted) -> Path | None:
    """The first part where all parts lie in the cache as the hub has them now.

    They may lie there under an older commit, with the same bytes. The cache may be read-only.
    """
    files = wanted.repository.files
    for _, place in resolve.snapshots(wanted.repository.name):
        is_now = place.name == wanted.repository.commit
        if all(
            (place / path).is_file()
            and (is_now or Path(os.path.realpath(place / path)).name == files[path].digest)
            for path in wanted.paths
        ):
            if is_now:
                _refer(place.parents[1], wanted.repository.commit)
            return place / wanted.paths[0]
    return None


def _place(repository: Repository, path: str) -> Path:
    return resolve.repository_folder(repository.name) / "snapshots" / repository.commit / path


def _blob(repository: Repository, path: str) -> Path:
    folder = resolve.repository_folder(repository.name)
    return folder / "blobs" / repository.files[path].digest


def _fetch_file(repository: Repository, path: str, tell: Callable[[int], None]) -> None:
    from filelock import FileLock

    place, blob = _place(repository, path), _blob(repository, path)
    if place.exists():
        return
    locks = resolve.hub_cache() / ".locks" / resolve.repository_folder(repository.name).name
    for folder in (locks, blob.parent, place.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with FileLock(locks / f"{blob.name}.lock"):
        if not blob.exists():
            _fill(repository, path, blob, tell)
        if not place.exists():
            place.unlink(missing_ok=True)  # what is here and does not exist is a link to nothing
            try:
                place.symlink_to(os.path.relpath(blob, place.parent))
            except OSError:  # links are for administrators on some systems
                os.replace(blob, place)


def _fill(repository: Repository, path: str, blob: Path, tell: Callable[[int], None]) -> None:
    partial, file = blob.with_name(blob.name + _PARTIAL), repository.files[path]
    size = file.file_bytes
    with open(partial, "ab") as target:
        present = target.tell()
        if present > size:
            target.truncate(0)
            present = 0
        try:
            _get(repository, path, _Limited(target, size, tell), None, size, present)
        except OSError as problem:
            if is_full(problem):
                problem.filename = str(partial)
            raise
    kind, digest = "SHA-256", hashlib.sha256()
    if len(file.digest) < _SHA256_LETTERS:
        head = f"blob {size}\0".encode()
        kind, digest = "git's SHA-1", hashlib.sha1(head, usedforsecurity=False)
    with partial.open("rb") as written:
        while block := written.read(_BLOCK_BYTES):
            digest.update(block)
    if digest.hexdigest() != file.digest:
        partial.unlink()
        raise DownloadError(
            f"{repository.name}/{path} came with other bytes than announced ({kind})",
            hint="the file was removed; fetch it again",
        )
    os.replace(partial, blob)


# -- removing ----------------------------------------------------------------------------------


def files_of(local: resolve.Local) -> tuple[list[Path], list[Path]]:
    """What has to go for a model of the hub's cache to be gone, and what stays elsewhere.

    Links go, and bytes in the repository's folder that nobody else has. What a link means beyond
    that folder stays: another person or program keeps it there.

    Raises ModelNotFoundError for a file that is not in the cache.
    """
    cache = resolve.hub_cache()
    real = Path(os.path.realpath(cache))
    names = [other.name for other in local.path.parent.iterdir()]
    links = [local.path.with_name(name) for name in choice.parts_of(names, local.path.name)]
    if not all(_named(link).is_relative_to(real) for link in links):
        raise ModelNotFoundError(
            f"{local.name} is not in the hub's cache", hint=f"it is {local.source}'s: {local.path}"
        )
    folder = real / _named(local.path).relative_to(real).parts[0]
    own = {_named(link) for link in links}
    others = (path for path in (folder / "snapshots").rglob("*") if path.is_symlink())
    used = {step for other in others if _named(other) not in own for step in _steps(other)}
    steps = list(dict.fromkeys(step for link in links for step in _steps(link)))
    there = [step for step in steps if os.path.lexists(step) and step not in used | own]
    outside = [step for step in there if not step.is_relative_to(folder)]
    return [*links, *(step for step in there if step not in outside)], outside


def _named(path: Path) -> Path:
    """Where a name itself lies, whatever it is a link to."""
    return Path(os.path.realpath(path.parent)) / path.name


def _steps(link: Path) -> Iterator[Path]:
    """What a link means, and what that means if it is a link, to the end."""
    seen: set[Path] = set()
    while link.is_symlink() and link not in seen:
        seen.add(link)
        link = _named(link.parent / os.readlink(link))
        yield link
