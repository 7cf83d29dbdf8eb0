"""The page at `/`: one file that needs nothing from outside, and fetches from its server alone."""

from __future__ import annotations

import functools
from importlib.resources import files

PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@functools.cache
def page() -> bytes:
    """Its bytes."""
    return files("edgespec.serve").joinpath("page.html").read_bytes()
