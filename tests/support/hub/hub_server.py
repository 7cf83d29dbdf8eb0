"""A hub on this machine: listings, redirects, ranges, errors and broken connections."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_API = re.compile(r"/api/models/([^/]+/[^/]+)(/tree/[0-9a-f]{40})?")
_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([0-9a-f]{40})/(.+)")


@dataclass
class Asked:
    """One request: `first` and `last` byte where a range was asked for."""

    path: str
    first: int | None = None
    last: int | None = None
    authorization: str | None = None


@dataclass
class Hub:
    """Repositories by OWNER/REPO and path, and what is to go wrong with them."""

    address: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    small: set[str] = field(default_factory=set)  # paths that lie in git itself, without SHA-256
    status: dict[str, int] = field(default_factory=dict)  # of every answer about a repository
    token: str = ""  # without it, everything is 401
    error_code: str = ""
    breaks: list[int] = field(default_factory=list)  # bytes after which coming transfers end
    damaged: bool = False  # bytes are not those that were announced
    ignores_ranges: bool = False
    commit: Any = COMMIT  # as told; files are served under COMMIT
    listing: Any = None  # in place of the files
    written: str = "x/y"  # how the hub writes the repository's name
    following: str = ""  # the address of each listing's next page
    moved: str = ""  # where a question about the repository is sent instead
    endless: bool = False  # listings are a number of blanks that does not end
    asked: list[Asked] = field(default_factory=list)

    def sent(self, path: str) -> list[Asked]:
        """Requests for the bytes of a file."""
        digests = {
            hashlib.sha256(files[path]).hexdigest()
            for files in self.repositories.values()
            if path in files
        }
        return [one for one in self.asked if one.path.removeprefix("/cdn/") in digests]


CACHES = (
    *("LLAMA_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "OLLAMA_MODELS"),
    *("EDGESPEC_MODELS", "HF_TOKEN", "HF_HUB_OFFLINE", "MODEL_ENDPOINT"),
)


def empty_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with nothing in it, where the caches of other programs are looked for."""
    folder.mkdir()
    for name in CACHES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("USERPROFILE", str(folder))
    monkeypatch.setenv("HF_HUB_CACHE", str(folder / "hub"))
    return folder


@contextmanager
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """An empty hub, which HF_ENDPOINT names."""
    with serving(Hub()) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield hub


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """The hub at `hub.address`, until the end of the block."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        asked = Asked(path, authorization=self.headers.get("Authorization"))
        self.hub.asked.append(asked)
        if match := re.fullmatch(r"/cdn/(\w+)", path):
            self._send_bytes(match[1], asked)
        elif match := _API.fullmatch(path):
            if self.hub.moved and not match[2] and not self.hub.moved.endswith(match[1]):
                self._empty(307, Location=self.hub.moved)
            elif not self._refused(name := self._known(match[1])):
                self._send_json(self._tree(name) if match[2] else self._info())
        elif match := _RESOLVE.fullmatch(path):
            if not self._refused(name := self._known(match[1])):
                self._redirect(self.hub.repositories[name][match[3]])
        else:
            self._empty(404)

    def _known(self, name: str) -> str:
        """The hub takes names in any case."""
        same = (one for one in self.hub.repositories if one.lower() == name.lower())
        return next(same, name)

    def _refused(self, name: str) -> bool:
        is_known = name in self.hub.repositories
        status = self.hub.status.get(name, 200 if is_known else 404)
        if self.hub.token and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            status = 401
        if status != 200:
            code = {"X-Error-Code": self.hub.error_code} if self.hub.error_code else {}
            self._empty(status, **code)
        return status != 200

    def _info(self) -> dict[str, Any]:
        return {"sha": self.hub.commit, "id": self.hub.written}

    def _tree(self, name: str) -> Any:
        if self.hub.listing is not None:
            return self.hub.listing
        listed: list[dict[str, Any]] = [{"type": "directory", "path": "folder", "oid": "0" * 40}]
        for path, data in self.hub.repositories[name].items():
            one: dict[str, Any] = {"type": "file", "path": path, "size": len(data)}
            one["oid"] = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
            if path not in self.hub.small:
                digest = hashlib.sha256(data).hexdigest()
                one["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 134}
            listed.append(one)
        return listed

    def _redirect(self, data: bytes) -> None:
        digest = hashlib.sha256(data).hexdigest()
        self._empty(302, Location=f"{self.hub.address}/cdn/{digest}", **{"X-Repo-Commit": COMMIT})

    def _send_bytes(self, digest: str, asked: Asked) -> None:
        files = [data for files in self.hub.repositories.values() for data in files.values()]
        data = next(one for one in files if hashlib.sha256(one).hexdigest() == digest)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first, last = 0, len(data) - 1
        if wanted and not self.hub.ignores_ranges:
            first, last = int(wanted[1]), int(wanted[2] or last)
            asked.first, asked.last = first, last
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        else:
            self.send_response(200)
        body = data[first : last + 1]
        if self.hub.damaged:
            body = bytes(len(body))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.hub.breaks:
            self.wfile.write(body[: self.hub.breaks.pop(0)])
            self.close_connection = True
            return
        self.wfile.write(body)

    def _send_json(self, document: Any) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        if self.hub.following:
            self.send_header("Link", f'<{self.hub.following}>; rel="next"')
        self.send_header("Content-Length", str(1 << 40 if self.hub.endless else len(body)))
        self.end_headers()
        with suppress(OSError):
            while self.hub.endless:
                self.wfile.write(b" " * (1 << 16))
        self.wfile.write(body)

    def _empty(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()
