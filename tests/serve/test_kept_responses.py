"""Responses that are kept: for one key, and only as many as fit."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.serve.kept_responses import KeptResponses
from edgespec.serve.refusal import Refusal


def document(number: int, text: str = "") -> dict[str, Any]:
    return {"id": f"resp_{number}", "output": [{"id": f"msg_{number}", "text": text}]}


def is_there(kept: KeptResponses, number: int, owner: str = "me") -> bool:
    try:
        return bool(kept.document(owner, f"resp_{number}"))
    except Refusal as refusal:
        assert (refusal.status, refusal.code) == (404, "response_not_found")
        return False


def test_the_least_recently_used_goes_first() -> None:
    kept = KeptResponses(1 << 20, 2)
    kept.add("me", document(1), [])
    kept.add("me", document(2), [])
    assert is_there(kept, 1)
    kept.add("me", document(3), [])
    assert [is_there(kept, number) for number in (1, 2, 3)] == [True, False, True]
    assert kept.item("me", "msg_2") is None and kept.item("me", "msg_3") is not None


def test_bytes_are_bounded_whatever_is_kept() -> None:
    kept = KeptResponses(20_000, 1000)
    for number in range(300):
        kept.add("me", document(number, "é" * (number * 37 % 6000)), [{"n": number}])
        assert kept.nbytes <= 20_000
    kept.add("me", document(999, "a" * 30_000), [])
    assert not is_there(kept, 999)
    for number in range(300):
        if is_there(kept, number):
            kept.remove("me", f"resp_{number}")
    assert kept.nbytes == 0


def test_a_key_has_its_own() -> None:
    kept = KeptResponses(1 << 20, 10)
    kept.add("me", document(1), [{"role": "user"}])
    assert kept.items("me", "resp_1") == [{"role": "user"}]
    assert not is_there(kept, 1, "you") and kept.item("you", "msg_1") is None
    with pytest.raises(Refusal):
        kept.remove("you", "resp_1")
    assert is_there(kept, 1)
