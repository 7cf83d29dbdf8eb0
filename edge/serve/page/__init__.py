"""The page at `/`: files that need nothing from outside, and fetch from their server alone.

`markdown-it.js` is a library's (markdown-it.LICENSE.txt); the others are edgespec's.
"""

from __future__ import annotations

import functools
from importlib.resources import files

_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "txt": "text/plain"}

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; media-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@functools.cache
def page_files() -> dict[str, tuple[str, bytes]]:
    """By their paths on a server: the kind and the bytes of each file."""
    found = {}
    for file in files(__name__).iterdir():
        if (kind := _KINDS.get(file.name.rpartition(".")[2])) is not None:
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            found[path] = kind, file.read_bytes()
    return found
