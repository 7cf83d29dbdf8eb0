"""Cells of a KV cache on disk: in files of sessions, and kept so that texts go on from there.

Either is one file of cells with a JSON document behind them:

    cells, as the backend writes them | document | magic, sizes, SHA-256 of all before it

What was cut off or changed is never read, and a writer that dies leaves the file that was there.

What a cache held is kept under a budget, so that texts that begin alike go on from there.
A text is kept in pieces, each in a file: the cells of some of its tokens, and the name of the piece
before them. So a text that has grown adds a small file, and texts with a beginning in common have
its pieces in common. A cache that cannot be written in parts is one piece.

A piece lies in the folder of the model, settings and library that its cells are of, readable by its
owner alone. Its name is a digest of its document: tokens, the piece before, and whose it is. Before
it is used its cells are held against their checksum. The pieces used least recently go first, those
at the ends of texts before those that others go on from.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from edgespec.errors import SessionFileError
from edgespec.memory.store import cache
from edgespec.models.writing import reason, remove_dead, whole_file
from edgespec.prefix import common_prefix_length

USUAL_BYTES = 4 << 30  # of disk, where nobody says how many
_SUFFIX = ".cells"
_FOLDER = "prefixes"
_OPEN = b"\0\0\0\x80"  # in place of a token that ends a message
_MAGIC = b"edgespec session\x01"
_FOOTER = struct.Struct("<17sQQ32s")  # magic, bytes of the cache, bytes of the JSON, digest
_HINT = "name a file that /save or Session.save wrote"


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """The cells of some tokens of a text, in a file.

    Args:
        parent: the piece before; None where the text begins with this one.
        start: tokens of the text before it, of which all are in the pieces before.
        images: as of `KeepsCache`; only where the text is one piece.
        ends: places of the text in this piece where a message ends or begins, each with a digest of
            the text up to there: the same for the same text in other tokens.
    """

    path: Path
    parent: Piece | None
    start: int
    tokens: array[int]
    images: Sequence[Sequence[int]]
    ends: Sequence[tuple[int, str]]
    owner: str

    @property
    def end(self) -> int:
        """Tokens of the text up to its end."""
        return self.start + len(self.tokens)

    @property
    def parent_name(self) -> str:
        """Of the file of the piece before; "" for none."""
        return "" if self.parent is None else self.parent.path.name

    @property
    def chain(self) -> list[Piece]:
        """All pieces of the text, the first one first."""
        found: list[Piece] = []
        one: Piece | None = self
        while one is not None:
            found.append(one)
            one = one.parent
        return found[::-1]

    @property
    def text(self) -> list[int]:
        """All tokens of the text up to its end."""
        found: list[int] = []
        for one in self.chain:
            found[one.start :] = one.tokens
        return found


class PrefixStore:
    """Pieces of one model with one cache, for any number of threads and processes.

    Args:
        key: what cells have to be made with to be read back.
        model: of the file, to be shown.
        budget_bytes: of all pieces on this machine, whatever they are of.
    """

    def __init__(self, key: str, model: str, budget_bytes: int) -> None:
        self._root = cache.cache_directory() / _FOLDER
        self._folder = self._root / _hex(key.encode())
        self._model, self.budget_bytes = model, budget_bytes
        self._pieces: dict[str, Piece | None] = {}  # by name; None is none that can be used
        self._lock = threading.Lock()
        for folder in (self._root, self._folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in self._root.iterdir():
            remove_dead(folder)  # what was being written when its process was killed

    # -- finding ---------------------------------------------------------------------------

    def find(self, text: Sequence[int], salt: str, most: int) -> tuple[Piece, int] | None:
        """The piece that has most of a text's beginning, and how many tokens of it.

        Of pieces that end within `most` tokens.
        """
        wanted, owner = array("i", text), _owner(salt)
        best: tuple[Piece, int] | None = None
        below: dict[str, list[Piece]] = {}
        for piece in self._all():
            if piece.owner == owner and piece.end <= most:
                below.setdefault(piece.parent_name, []).append(piece)
        waiting = below.get("", [])
        while waiting:
            piece = waiting.pop()
            size = common_prefix_length(piece.tokens, wanted[piece.start : piece.end])
            common = piece.start + size
            if size and (best is None or common > best[1]):
                best = piece, common
            waiting += [one for one in below.get(piece.path.name, ()) if one.start <= common]
        return best

    def find_text(self, places: Mapping[str, int], salt: str) -> tuple[Sequence[int], int] | None:
        """The tokens of the longest text that a text has, by the digests of its `places`.

        And how many of that text's tokens they stand for.
        """
        owner, best = _owner(salt), 0
        found: tuple[Piece, int] | None = None
        for piece in self._all():
            for length, digest in piece.ends if piece.owner == owner else ():
                if places.get(digest, 0) > best:
                    best, found = places[digest], (piece, length)
        return None if found is None else (found[0].text[: found[1]], best)

    def latest(self, salt: str, most: int) -> Piece | None:
        """The end of the text that was used last, of at most so many tokens; None without any."""
        owner, pieces = _owner(salt), self._all()
        parents = {piece.parent_name for piece in pieces}
        used = {path: used for used, _, path in _files(self._root)}
        ends = [
            piece
            for piece in pieces
            if piece.owner == owner and piece.end <= most and piece.path.name not in parents
        ]
        return max(ends, key=lambda one: used.get(one.path, 0), default=None)

    def is_whole(self, piece: Piece) -> bool:
        """Whether a piece and those before it are undamaged; a damaged one is removed.

        All at once: checksums of 8,000 tokens of a 1.5B take 0.36 s one after the other.
        """
        with ThreadPoolExecutor() as pool:
            are_whole = list(pool.map(_has_its_checksum, piece.chain))
        for one, is_whole in zip(piece.chain, are_whole, strict=True):
            if not is_whole:
                self.remove(one)
        return all(are_whole)

    def touch(self, piece: Piece) -> None:
        """It is used now, and so are those before it: what goes first is the last of them."""
        now = time.time_ns()
        for place, one in enumerate(reversed(piece.chain)):
            with suppress(OSError):
                os.utime(one.path, ns=(now, now + 1000 * place))

    def _all(self) -> list[Piece]:
        """What is there now, pieces of other processes included; parents come first."""
        with self._lock:
            names = set[str]()
            with suppress(OSError):
                names = {one for one in os.listdir(self._folder) if one.endswith(_SUFFIX)}
            for name in self._pieces.keys() - names:
                del self._pieces[name]
            self._read(names - self._pieces.keys())
            found: dict[str, Piece] = {}
            for piece in sorted(filter(None, self._pieces.values()), key=lambda one: one.start):
                if piece.parent is None or piece.parent_name in found:
                    found[piece.path.name] = piece
            return list(found.values())

    def _read(self, names: Iterable[str]) -> None:
        """Take pieces from their documents. One whose parent is not there may be read later."""
        documents = {}
        for name in names:
            self._pieces[name] = None
            with suppress(OSError, SessionFileError, ValueError, KeyError, TypeError):
                text = read_document(self._folder / name)
                if _name(text) == name:
                    document = json.loads(text)
                    documents[name] = int(document["start"]), document
        for name, (start, document) in sorted(documents.items(), key=lambda one: one[1][0]):
            parent = self._pieces.get(document["parent"]) if start else None
            if start and parent is None:
                del self._pieces[name]
                continue
            with suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
                self._pieces[name] = self._piece(self._folder / name, parent, document)

    def _piece(self, path: Path, parent: Piece | None, document: Mapping[str, Any]) -> Piece:
        tokens = array("i", document["tokens"])
        ends = [(int(length), str(digest)) for length, digest in document["ends"]]
        images, owner = document["images"], document["owner"]
        return Piece(path, parent, int(document["start"]), tokens, images, ends, owner)

    # -- keeping ---------------------------------------------------------------------------

    def add(
        self,
        parent: Piece | None,
        start: int,
        tokens: Sequence[int],
        salt: str,
        write: Callable[[str], int],
        *,
        images: Sequence[Sequence[int]] = (),
        ends: Sequence[tuple[int, str]] = (),
    ) -> Piece:
        """Keep a piece, whose cells `write` puts into a file and says how many bytes they are.

        Raises OSError where it cannot be written or is larger than the budget, and as `write`.
        """
        document = {
            "model": self._model,
            "parent": None if parent is None else parent.path.name,
            "start": start,
            "tokens": list(tokens),
            "images": [list(one) for one in images],
            "ends": list(ends),
            "owner": _owner(salt),
        }
        text = json.dumps(document).encode()
        path = self._folder / _name(text)
        with self._lock:
            known = self._pieces.get(path.name)
        if known is not None and path.exists():
            return known
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # others may have cleared it
        with whole_file(path, synced=False, private=True) as partial:
            write_parts(partial, text, write)
            self._make_room(partial.stat().st_size, parent)
        piece = self._piece(path, parent, document)
        with self._lock:
            self._pieces[path.name] = piece
        self.touch(piece)
        return piece

    def _make_room(self, nbytes: int, kept: Piece | None) -> None:
        """Remove what was used least recently until there is room; not `kept` and those before."""
        if nbytes > self.budget_bytes:
            raise OSError(errno.EFBIG, "a text is larger than the budget of the disk cache")
        own = set() if kept is None else {one.path for one in kept.chain}
        found = list(_files(self._root))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total + nbytes <= self.budget_bytes:
                return
            if path not in own:
                with suppress(OSError):
                    path.unlink()
                total -= size
        if total + nbytes > self.budget_bytes:
            raise OSError(errno.EFBIG, "a text is larger than the budget of the disk cache")

    def remove_parts_of(self, piece: Piece) -> None:
        """Forget texts of one piece each that another one of them goes on from."""
        for one in self._all():
            size = len(one.tokens)
            is_part = one.path != piece.path and one.parent is None and one.owner == piece.owner
            if is_part and one.tokens == piece.tokens[:size]:
                self.remove(one)

    def remove(self, piece: Piece) -> None:
        """Forget a piece; those that go on from it are of no use any more."""
        for one in self._all():
            if any(piece.path == before.path for before in one.chain):
                with suppress(OSError):
                    one.path.unlink()


def usual_budget() -> int:
    """Bytes of disk to take unasked: none where four times as much is not free."""
    try:
        free = shutil.disk_usage(cache.nearest_directory()).free
    except OSError:
        return 0
    return USUAL_BYTES if free >= 4 * USUAL_BYTES else 0


def kept_bytes() -> dict[str, int]:
    """Bytes of what is kept, by the names of the models."""
    found: dict[str, int] = {}
    for _, size, path in _files(cache.cache_directory() / _FOLDER):
        try:
            model = str(json.loads(read_document(path))["model"])
        except (OSError, SessionFileError, ValueError, KeyError, TypeError):
            model = ""
        found[model] = found.get(model, 0) + size
    return found


def forget() -> None:
    """Delete all of it. Raises UnsupportedError where something cannot be deleted."""
    root = cache.cache_directory() / _FOLDER
    cache.delete(path for _, _, path in _files(root))
    for folder in root.iterdir() if root.is_dir() else ():
        remove_dead(folder)


def ends_of(
    tokens: Sequence[int], bytes_of: Callable[[int], bytes], *, is_open: bool = False
) -> list[tuple[int, str]]:
    """Where control tokens of a text stand, before and behind them, and digests of it up to there.

    The digests of equal texts are equal, whatever tokens their words are; an image stands for
    itself. `is_open`: the end of the text is such a place, too, as of one whose answer has ended.
    """
    digest, words, found = b"", list[bytes](), list[tuple[int, str]]()
    for place, token in enumerate(tokens):
        if token >= 0 and (data := bytes_of(token)):
            words.append(data)
            continue
        if words:
            found.append((place, _hex(digest + b"".join(words) + _OPEN)))
        digest = _digest(digest + b"".join(words) + token.to_bytes(4, "little", signed=True))
        words.clear()
        found.append((place + 1, digest.hex()))
    if is_open and words:
        found.append((len(tokens), _hex(digest + b"".join(words) + _OPEN)))
    return found


def ends_of_text(
    text: str, before: Sequence[int], controls: Iterable[tuple[int, int, int]]
) -> dict[str, int]:
    """Where control tokens of a text begin, by the digests that `ends_of` has of its tokens.

    Args:
        before: control tokens that come before the text.
        controls: begin and end of each that is in it, and the token.
    """
    digest, start, found = b"", 0, dict[str, int]()
    for token in before:
        digest = _digest(digest + token.to_bytes(4, "little"))
    for begin, end, token in controls:
        words = text[start:begin].encode(errors="surrogatepass")
        found[_hex(digest + words + _OPEN) if words else digest.hex()] = begin
        digest, start = _digest(digest + words + token.to_bytes(4, "little")), end
    return found


def _files(root: Path) -> Iterator[tuple[int, int, Path]]:
    """All pieces: when each was used, its bytes and its path."""
    for path in root.glob(f"*/*{_SUFFIX}"):
        with suppress(OSError):
            told = path.stat()
            yield told.st_mtime_ns, told.st_size, path


def _has_its_checksum(piece: Piece) -> bool:
    try:
        read_session(piece.path)
    except SessionFileError:
        return False
    return True


def _owner(salt: str) -> str:
    """A digest of a salt, which says whose a text is and does not reveal it."""
    return _hex(b"owner " + salt.encode())


def _name(document: bytes) -> str:
    return f"{_hex(document)}{_SUFFIX}"


def _hex(data: bytes) -> str:
    return _digest(data).hex()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


# -- the files -------------------------------------------------------------------------------


def write_session(
    path: Path, document: dict[str, Any], write_cache: Callable[[str], int] | None = None
) -> None:
    """Replace `path` by a file, or leave it as it is.

    `write_cache` writes the cache to the path it is given and returns how many bytes it wrote.
    Raises SessionFileError when the file cannot be written.
    """
    try:
        with whole_file(path, private=True) as partial:
            write_parts(partial, json.dumps(document).encode(), write_cache)
    except OSError as problem:
        raise SessionFileError(
            f"cannot write {path}: {reason(problem)}", hint="name a file in a folder of yours"
        ) from problem


def read_session(path: Path) -> tuple[dict[str, Any], int]:
    """The document of a file, and how many bytes of cache come first.

    Raises SessionFileError for a file that is missing, damaged, or of another kind.
    """
    try:
        with open(path, "rb") as file:
            cache_bytes, json_bytes, wanted = _sizes(path, file)
            digest = _sum_of(file, cache_bytes)
            text = file.read(json_bytes)
    except OSError as problem:
        raise SessionFileError(f"cannot read {path}: {problem.strerror}", hint=_HINT) from problem
    digest.update(text)
    if digest.digest() != wanted:
        raise SessionFileError(f"{path} is damaged: its checksum is wrong")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise SessionFileError(f"{path} is damaged: {problem}") from problem
    if not isinstance(document, dict):
        raise SessionFileError(f"{path} is damaged: it holds no conversation")
    return document, cache_bytes


def write_parts(
    path: Path, document: bytes, write_cache: Callable[[str], int] | None = None
) -> None:
    """Write cache, document and footer to an empty file. Raises OSError."""
    cache_bytes = write_cache(os.fspath(path)) if write_cache is not None else 0
    with path.open("r+b") as file:
        file.truncate(cache_bytes)
        digest = _sum_of(file, cache_bytes)
        file.seek(cache_bytes)
        digest.update(document)
        file.write(document)
        file.write(_FOOTER.pack(_MAGIC, cache_bytes, len(document), digest.digest()))


def read_document(path: Path) -> bytes:
    """The bytes of a file's document, without a look at the cells: nothing vouches for them.

    Raises as `read_session`, and OSError.
    """
    with open(path, "rb") as file:
        cache_bytes, json_bytes, _ = _sizes(path, file)
        file.seek(cache_bytes)
        return file.read(json_bytes)


def _sizes(path: Path, file: IO[bytes]) -> tuple[int, int, bytes]:
    """What the footer says: bytes of the cache, bytes of the document, the checksum."""
    size = os.fstat(file.fileno()).st_size
    if size < _FOOTER.size:
        raise SessionFileError(f"{path} is not a session of edgespec", hint=_HINT)
    file.seek(size - _FOOTER.size)
    magic, cache_bytes, json_bytes, wanted = _FOOTER.unpack(file.read(_FOOTER.size))
    if magic != _MAGIC:
        raise SessionFileError(f"{path} is not a session of edgespec, or is cut off", hint=_HINT)
    if cache_bytes + json_bytes + _FOOTER.size != size or json_bytes > 256 << 20:
        raise SessionFileError(f"{path} is damaged: its sizes do not add up")
    return cache_bytes, json_bytes, wanted


def _sum_of(file: IO[bytes], size: int) -> hashlib._Hash:
    """SHA-256 of the first `size` bytes; the file stands behind them afterwards."""
    digest = hashlib.sha256()
    file.seek(0)
    while size > 0 and (block := file.read(min(size, 1 << 20))):
        digest.update(block)
        size -= len(block)
    return digest
