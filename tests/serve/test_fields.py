"""Fields of a request, one by one: what is taken, and in which words the rest is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from edgespec.serve.parsing import ApiError, Fields, shown


def refused(call: Callable[[], object]) -> tuple[str, str | None, str | None]:
    with pytest.raises(ApiError) as caught:
        call()
    assert caught.value.status == 400
    return str(caught.value), caught.value.param, caught.value.code


def test_what_nobody_took_is_named_once_without_its_value(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger wrote the name, and may write any number of them."""
    monkeypatch.setattr("edgespec.serve.parsing._NAMED", set())
    for _ in range(3):
        fields = Fields({"q\n1": "secret", "inner": [{"zzz": 1}, {"zzz": 1}]})
        assert len([one.path for one in fields.objects("inner", 9)]) == 2
        fields.end()
    told = [one.getMessage() for one in caplog.records]
    assert [line.split()[4] for line in told] == ["inner[].zzz,", r"q\n1,"]
    assert "secret" not in caplog.text
    for number in range(2000):
        Fields({f"q{number}": 1}).end()
    assert len(caplog.records) <= 256


def test_what_asks_for_nothing_is_no_problem() -> None:
    """null is as if it had been left out, at every depth."""
    fields = Fields({"a": 1, "inner": {"b": 2, "c": None}, "d": None, "e": [], "f": 7})
    inner = fields.object("inner")
    fields.refuse_set({"d": "leave it", "e": "leave it"})
    assert refused(lambda: fields.refuse_set({"f": "leave it"})) == (
        "f is not supported: leave it",
        "f",
        "unsupported_parameter",
    )
    assert (inner.whole("b", 0, 0, 9), fields.pop("a"), fields.text("d", "-")) == (2, 1, "-")
    fields.end()


def test_whatever_was_taken_out_of_a_request_ends_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that no reader can forget the unknown fields of a part."""
    monkeypatch.setattr("edgespec.serve.parsing._NAMED", (named := set[str]()))
    fields = Fields({"a": {"b": {"c": 1}, "d": 2}, "e": {"type": "of another kind", "f": 3}})
    fields.object("a").object("b")
    fields.within(fields.pop("e"), "e").take()
    assert not named
    fields.end()
    assert named == {"a.b.c", "a.d"}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (True, "must be a whole number, not true"),  # which Python takes for 1
        (1.5, "must be a whole number, not 1.5"),
        ("3", 'must be a whole number, not "3"'),
        (9, "must be 0 to 8, not 9"),
        (float("inf"), "must be a whole number, not Infinity"),
    ],
)
def test_whole_numbers(value: Any, words: str) -> None:
    assert Fields({"n": 3.0}).whole("n", 1, 0, 8) == 3  # as some clients write it
    assert refused(lambda: Fields({"n": value}).whole("n", 1, 0, 8))[0] == f"n {words}"


@pytest.mark.parametrize("value", [True, "0.5", float("nan"), 1.01, -0.01])
def test_numbers(value: Any) -> None:
    assert Fields({}).number("p", 0.25, 0.0, 1.0) == 0.25
    assert refused(lambda: Fields({"p": value}).number("p", 0.25, 0.0, 1.0))[1] == "p"


def test_values_that_ask_for_nothing_are_those_of_their_own_type() -> None:
    """0 equals False, and is not what `store: false` means."""
    Fields({"store": False}).only("store", False)
    words = "store is not supported with 0"
    assert refused(lambda: Fields({"store": 0}).only("store", False))[::2] == (
        words,
        "unsupported_value",
    )


def test_messages_quote_no_more_than_a_line() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(deep) == "list"
    assert shown("x" * 1000) == '"' + "x" * 36 + "..."
    assert refused(lambda: Fields([1], "tools[0]")) == (
        "tools[0] must be an object, not [1]",
        "tools[0]",
        None,
    )
