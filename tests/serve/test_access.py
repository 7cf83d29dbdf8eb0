"""Names and keys, as they are compared."""

from __future__ import annotations

import pytest

from edgespec.errors import UnsupportedError
from edgespec.serve.access import (
    AuthSettings,
    check_exposure,
    checked_keys,
    checked_origins,
    host_name,
    is_loopback,
)


def test_only_this_machine_uses_a_server_without_a_key() -> None:
    for host in ("127.0.0.5", "::1", "localhost", "LocalHost.", "[::1]:80"):
        assert is_loopback(host)
        check_exposure(host, ())
    for host in ("0.0.0.0", "example.org", "", "::", "localhost.example.org"):
        assert not is_loopback(host)
        check_exposure(host, ("key",))
        with pytest.raises(UnsupportedError, match="others could use a server on"):
            check_exposure(host, ())


@pytest.mark.parametrize(
    ("sent", "name"),
    [
        ("A.Example:80", "a.example"),
        ("a.example.", "a.example"),
        ("a.example.:8080", "a.example"),
        ("[2001:DB8::1]:80", "2001:db8::1"),
        ("2001:db8::1", "2001:db8::1"),
        ("", ""),
        (":", ""),
        ("[", ""),
    ],
)
def test_hosts_are_compared_by_their_names(sent: str, name: str) -> None:
    assert host_name(sent) == name


def test_origins_are_compared_as_browsers_send_them() -> None:
    access = AuthSettings(origins=("https://App.example/",))
    assert access.takes_origin("https://app.example")
    assert not access.takes_origin("https://app.example.org")
    assert AuthSettings(origins=("*",)).takes_origin("null")


def test_keys_lose_the_space_around_them_and_nothing_else() -> None:
    assert checked_keys(None) == ()
    assert checked_keys([" a b\n", "c"]) == ("a b", "c")
    access = AuthSettings(checked_keys(["a b"]))
    assert access.has_key("a b")
    assert not access.has_key("a") and not access.has_key("") and not access.has_key("ä b")


@pytest.mark.parametrize("key", ["schlüssel", "a\nb", "a\x7f", "\ud800"])
def test_keys_are_what_every_client_can_send(key: str) -> None:
    """Browsers send Latin-1 and most other clients UTF-8."""
    with pytest.raises(UnsupportedError, match="API key 1 has a character"):
        checked_keys([key])


def test_origins_are_those_that_browsers_send() -> None:
    good = ["https://App.example/", "http://[::1]:3000", "chrome-extension://abc", "null", "*"]
    assert checked_origins(good)[0] == "https://app.example"
    for wrong in ("localhost", "nonsense", "", "app.example:80", "http://", "http://a.b/c", "**"):
        with pytest.raises(UnsupportedError, match="is no origin of web pages"):
            checked_origins([wrong])
