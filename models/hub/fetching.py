"""From a repository of the hub into the cache that `huggingface_hub` and llama.cpp share.

    models--OWNER--REPO/refs/main                   the commit
    models--OWNER--REPO/blobs/SHA256                the bytes; while they come, with llama.cpp's
                                                    ending, so that either program goes on
    models--OWNER--REPO/snapshots/COMMIT/PATH       a link to them

A file is planned from its header before its weights are fetched, and is in its place only when its
bytes have the digest that was announced.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import DoesNotFitError, DownloadError, ModelFileError, ModelNotFoundError
from edgespec.models.gguf.reader import read_gguf
from edgespec.models.hub import caches, choice, remote
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.models.writing import is_full, whole_file
from edgespec.progress import Progress

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

    repository: remote.Repository
    paths: tuple[str, ...]

    @property
    def name(self) -> str:
        """By which the same files are meant everywhere."""
        return caches.HUB + choice.name_of(self.paths[0], self.repository.name)

    @property
    def file_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(self.repository.files[path].file_bytes for path in self.paths)


def find(name: str, tag: str = "") -> Wanted:
    """What a tag means in OWNER/REPO, as it is on the hub now.

    Raises ModelNotFoundError, with the tags there are, and DownloadError.
    """
    repository = remote.list_repository(name)
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


def _write_header(repository: remote.Repository, path: str, target: Path) -> None:
    size = repository.files[path].file_bytes
    known, wanted = 0, min(size, _FIRST_BYTES)
    while True:
        with open(target, "ab" if known == 0 else "r+b") as file:
            file.seek(known)
            file.write(remote.read_beginning(repository, path, known, wanted))
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
    try:
        with header_only(wanted) as spec:
            fits(spec)
    except DoesNotFitError as problem:
        smaller = _smaller(wanted, lambda one: _is_fit(one, fits))
        raise DoesNotFitError(
            f"{wanted.name} would not fit: {problem}",
            hint=f"{smaller} fits; {problem.hint}" if smaller else problem.hint,
        ) from problem


def _is_fit(wanted: Wanted, fits: Check) -> bool:
    try:
        with header_only(wanted) as spec:
            fits(spec)
    except DoesNotFitError:
        return False
    return True


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
    folder = caches.hub_cache()
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
    there = sum(_present(wanted.repository, path) for path in wanted.paths)
    return wanted.file_bytes - there


def _variable() -> str:
    """The variable that says where the cache is, whatever others say."""
    return "LLAMA_CACHE" if os.environ.get("LLAMA_CACHE") else "HF_HUB_CACHE"


# -- fetching ----------------------------------------------------------------------------------


def fetch(wanted: Wanted, progress: Progress | None = None) -> Path:
    """Bring a model into the cache; what is there is not fetched again. Returns its first part.

    Raises DownloadError, also where the bytes are not those that were announced, and OSError for
    a disk that cannot be written.
    """
    total, before = max(1, wanted.file_bytes), 0
    for path in wanted.paths:

        def tell(count: int, path: str = path, before: int = before) -> None:
            if progress is not None:
                progress(f"fetching {os.path.basename(path)}", (before + count) / total)

        _fetch_file(wanted.repository, path, tell)
        before += wanted.repository.files[path].file_bytes
    _refer(caches.repository_folder(wanted.repository.name), wanted.repository.commit)
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
    for _, place in caches.snapshots(wanted.repository.name):
        is_now = place.name == wanted.repository.commit
        if all(
            (place / path).is_file()
            and (is_now or Path(os.path.realpath(place / path)).name == _digest(wanted, path))
            for path in wanted.paths
        ):
            if is_now:
                _refer(place.parents[1], wanted.repository.commit)
            return place / wanted.paths[0]
    return None


def _digest(wanted: Wanted, path: str) -> str:
    return wanted.repository.files[path].digest


def _place(repository: remote.Repository, path: str) -> Path:
    return caches.repository_folder(repository.name) / "snapshots" / repository.commit / path


def _blob(repository: remote.Repository, path: str) -> Path:
    folder = caches.repository_folder(repository.name)
    return folder / "blobs" / repository.files[path].digest


def _present(repository: remote.Repository, path: str) -> int:
    """Bytes of a file that are on the disk."""
    blob = _blob(repository, path)
    for file in (blob, blob.with_name(blob.name + _PARTIAL)):
        with suppress(OSError):
            return file.stat().st_size
    return 0


def _fetch_file(repository: remote.Repository, path: str, tell: Callable[[int], None]) -> None:
    from filelock import FileLock

    place, blob = _place(repository, path), _blob(repository, path)
    if place.exists():
        return
    locks = caches.hub_cache() / ".locks" / caches.repository_folder(repository.name).name
    for folder in (locks, blob.parent, place.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with FileLock(locks / f"{blob.name}.lock"):
        if not blob.exists():
            _fill(repository, path, blob, tell)
        if not place.exists():
            _link(blob, place)


def _fill(
    repository: remote.Repository, path: str, blob: Path, tell: Callable[[int], None]
) -> None:
    partial, file = blob.with_name(blob.name + _PARTIAL), repository.files[path]
    with open(partial, "ab") as target:
        present = target.tell()
        if present > file.file_bytes:
            target.truncate(0)
            present = 0
        try:
            remote.write_file(repository, path, target, present, tell)
        except OSError as problem:
            if is_full(problem):
                problem.filename = str(partial)
            raise
    kind, digest = file.hashing()
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


def _link(blob: Path, place: Path) -> None:
    place.unlink(missing_ok=True)  # what is here and does not exist is a link to nothing
    try:
        place.symlink_to(os.path.relpath(blob, place.parent))
    except OSError:  # links are for administrators on some systems
        os.replace(blob, place)


# -- removing ----------------------------------------------------------------------------------


def files_of(local: caches.Local) -> tuple[list[Path], list[Path]]:
    """What has to go for a model of the hub's cache to be gone, and what stays elsewhere.

    Links go, and bytes in the repository's folder that nobody else has. What a link means beyond
    that folder stays: another person or program keeps it there.

    Raises ModelNotFoundError for a file that is not in the cache.
    """
    cache = caches.hub_cache()
    real = Path(os.path.realpath(cache))
    links = _parts_beside(local.path)
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


def _parts_beside(path: Path) -> list[Path]:
    """All parts of the model whose first part is given."""
    names = [other.name for other in path.parent.iterdir()]
    return [path.with_name(name) for name in choice.parts_of(names, path.name)]
