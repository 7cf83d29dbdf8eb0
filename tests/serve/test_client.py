"""A client of servers: what it is told."""

from __future__ import annotations

import pytest
from serving_cases import Serve, Speaker

from edgespec.errors import BackendError, UnsupportedError
from edgespec.serve.client import Client


def test_what_is_refused_and_what_is_not_there_is_told(serve: Serve) -> None:
    address = serve(Speaker())
    client = Client(address)
    with pytest.raises(UnsupportedError, match="the server refuses: wibble is not supported"):
        list(client.stream("completions", {"prompt": "a", "wibble": 1}))
    with pytest.raises(BackendError, match="there is no server at"):
        list(Client("http://127.0.0.1:1").stream("completions", {"prompt": "a"}))
    for wrong in ("ftp://a", "http://", "http://a:x"):
        with pytest.raises(UnsupportedError):
            list(Client(wrong).stream("completions", {}))
