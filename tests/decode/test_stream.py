"""Text from tokens: every way to cut bytes into tokens, every place for a stop string."""

from __future__ import annotations

import codecs
import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgespec.decode.generation import TextStream
from edgespec.errors import UnsupportedError


def stream_of(pieces: Sequence[bytes], stop: Sequence[str] = ()) -> TextStream:
    """A stream whose token n has the bytes `pieces[n]`."""
    return TextStream(lambda token: pieces[token], stop)


def splits(data: bytes, most_cuts: int) -> Iterator[list[bytes]]:
    """All ways to cut `data` at up to `most_cuts` places."""
    for num_cuts in range(most_cuts + 1):
        for cuts in combinations(range(1, len(data)), num_cuts):
            edges = [0, *cuts, len(data)]
            yield [data[a:b] for a, b in pairwise(edges)]


# ------------------------------------------------------------------------- the slow, obvious stream


def slow_stop(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """Text before the stop string, and the stop string, found by trying every end in turn."""
    for end in range(len(text) + 1):
        completed = [s for s in stop if text[:end].endswith(s)]
        if completed:
            longest = max(completed, key=len)
            return text[: end - len(longest)], longest
    return text, None


def slow_num_held(text: str, stop: Sequence[str]) -> int:
    """How many of the last characters are the beginning of a stop string."""
    return max((n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)


def assert_like_slow(pieces: Sequence[bytes], stop: Sequence[str]) -> None:
    """After every token, what was given out is all that is decided, and no more.

    The slow way decodes all bytes so far from scratch and looks through all of the text.
    """
    stream = stream_of(pieces, stop)
    shown, data = "", b""
    for token, piece in enumerate(pieces):
        data += piece
        shown += stream.push(token)
        text, _ = codecs.utf_8_decode(data, "replace", False)
        before, found = slow_stop(text, stop)
        assert stream.stop_string == found
        if found is not None:
            assert (shown, stream._held, stream.finish()) == (before, "", "")
            return
        assert shown == text[: len(text) - slow_num_held(text, stop)]
        assert shown + stream._held == text
    shown += stream.finish()
    expected = slow_stop(data.decode(errors="replace"), stop)
    assert (shown, stream.stop_string) == expected
    assert (stream.text, stream._held) == (shown, "")


PIECES = st.lists(
    st.one_of(
        st.text("ab", max_size=4).map(str.encode),
        st.sampled_from(["é", "日", "😀", "\u0301", "\ufffd"]).map(str.encode),
        st.binary(max_size=3),
        st.sampled_from([b"\xe6", b"\x97", b"\xa5", b"\xf0\x9f", b"\x98\x80"]),
    ),
    max_size=12,
)
STOPS = st.lists(st.text("ab日\ufffd", min_size=1, max_size=4), max_size=3)


@settings(max_examples=200)
@given(pieces=PIECES, stop=STOPS)
@example(pieces=[b"aab", b"aaab"], stop=["aaaa", "aab", "baaa"])
@example(pieces=[b"\xe6\x97"], stop=["\ufffd"])
def test_every_push_equals_the_slow_stream(pieces: list[bytes], stop: list[str]) -> None:
    assert_like_slow(pieces, stop)


# ------------------------------------------------------------------------------ characters


@pytest.mark.parametrize(
    "text",
    ["naïve", "日本語", "👍🏽", "👩\u200d👩\u200d👧", "e\u0301o\u0308", "\ufeffa", "aé日😀"],
)
def test_cuts_inside_characters_do_not_change_the_text(text: str) -> None:
    """Up to three cuts anywhere, and one byte a token."""
    data = text.encode()
    bytewise = [data[i : i + 1] for i in range(len(data))]
    for pieces in [*splits(data, 3), bytewise]:
        stream = stream_of(pieces)
        parts = [stream.push(token) for token in range(len(pieces))]
        assert "".join(parts) == stream.text == text
        assert stream.finish() == ""


def test_characters_are_given_out_when_they_are_whole() -> None:
    stream = stream_of([b"a\xf0\x9f", b"\x98", b"\x80b", b"\xe6\x97\xa5"])
    assert [stream.push(token) for token in range(4)] == ["a", "", "😀b", "日"]


def test_combining_marks_are_not_normalised() -> None:
    stream = stream_of([b"e", "\u0301".encode()])
    assert [stream.push(0), stream.push(1)] == ["e", "\u0301"]


@pytest.mark.parametrize(
    ("pieces", "pushes", "rest"),
    [
        ([b"a\xff", b"b"], ["a\ufffd", "b"], ""),
        ([b"a\xe6", b"b"], ["a", "\ufffdb"], ""),
        ([b"a\xe6\x97"], ["a"], "\ufffd"),
        ([b"\x80", b"\x80"], ["\ufffd", "\ufffd"], ""),
        ([b"\xf0\x9f\x98", b"\xe6\x97\xa5"], ["", "\ufffd日"], ""),
    ],
)
def test_invalid_bytes_become_replacement_characters(
    pieces: list[bytes], pushes: list[str], rest: str
) -> None:
    stream = stream_of(pieces)
    assert [stream.push(token) for token in range(len(pieces))] == pushes
    assert stream.finish() == rest
    assert stream.text == b"".join(pieces).decode(errors="replace")


def test_tokens_without_bytes_are_no_text() -> None:
    stream = stream_of([b"", b"a", b""])
    assert [stream.push(token) for token in range(3)] == ["", "a", ""]


# ------------------------------------------------------------------------------ stop strings


@pytest.mark.parametrize("stop", ["###", "日本", "\n\nUser:", "é", "a😀a"])
def test_stop_string_cut_anywhere(stop: str) -> None:
    """Up to three cuts in the text."""
    before, after = "x日 #", " # tail"
    data = (before + stop + after).encode()
    for pieces in splits(data, 3 if len(data) < 20 else 2):
        stream = stream_of(pieces, [stop])
        shown = "".join(stream.push(token) for token in range(len(pieces)))
        expected = slow_stop(data.decode(), [stop])[0]
        assert shown == stream.text == expected
        assert (stream.stopped, stream.stop_string, stream.finish()) == (True, stop, "")


def test_worked_example_of_the_docstring() -> None:
    stream = stream_of([b"I", b" like", b"#", b"##", b"#"], ["###"])
    assert [stream.push(token) for token in range(5)] == ["I", " like", "", "", ""]
    assert (stream.stopped, stream.text) == (True, "I like")


def test_text_is_held_only_as_long_as_it_may_be_a_stop_string() -> None:
    stream = stream_of([b"a<", b"|", b"x", b"<|", b"end"], ["<|end|>"])
    assert [stream.push(token) for token in range(5)] == ["a", "", "<|x", "", ""]
    assert stream._held == "<|end"
    assert (stream.finish(), stream.stopped, stream._held) == ("<|end", False, "")
    assert stream.text == "a<|x<|end"


def test_a_failed_beginning_may_contain_the_real_one() -> None:
    """ "aab" in "aaab", and "abac" in "ababac": falling back must not skip a beginning."""
    stream = stream_of([b"a", b"a", b"a", b"b"], ["aab"])
    assert [stream.push(token) for token in range(4)] == ["", "", "a", ""]
    assert stream.stopped
    stream = stream_of([b"ababa", b"c"], ["abac"])
    assert [stream.push(0), stream.push(1)] == ["ab", ""]
    assert stream.stopped


def test_every_stop_string_of_two_letters_is_found_where_it_is() -> None:
    """All 510 of up to 8 letters, in a text that has most of their beginnings first."""
    letters = random.Random(1).choices("ab", k=400)
    text = "".join(letters)
    for length in range(1, 9):
        for stop in map("".join, product("ab", repeat=length)):
            stream = stream_of([letter.encode() for letter in letters], [stop])
            for token in range(len(letters)):
                stream.push(token)
            stream.finish()
            assert (stream.text, stream.stop_string) == slow_stop(text, [stop])


@pytest.mark.parametrize(
    ("stop", "text", "shown", "found"),
    [
        (["ab", "abc"], "xabc", "x", "ab"),
        (["abc", "ab"], "xabc", "x", "ab"),
        (["cd", "bcd"], "xabcde", "xa", "bcd"),
        (["bcd", "abcde"], "xabcde", "xa", "bcd"),
        (["abcde", "cx"], "abcx", "ab", "cx"),
        (["b", "b"], "ab", "a", "b"),
        (["later", "x"], "x later", "", "x"),
    ],
)
def test_overlapping_stop_strings_do_not_depend_on_the_cut(
    stop: list[str], text: str, shown: str, found: str
) -> None:
    """First completed wins; of several completed at once, the one that began first."""
    data = text.encode()
    for pieces in splits(data, len(data) - 1):
        stream = stream_of(pieces, stop)
        assert "".join(stream.push(token) for token in range(len(pieces))) == shown
        assert stream.stop_string == found


def test_nothing_is_given_out_after_the_stop() -> None:
    stream = stream_of([b"a.b", b"c"], ["."])
    assert [stream.push(0), stream.push(1), stream.push(0)] == ["a", "", ""]
    assert (stream.finish(), stream.text) == ("", "a")


def test_one_string_is_one_stop_string() -> None:
    """Not two of one character each."""
    stream = stream_of([b"a", b"b", b"ab"], "ab")
    assert [stream.push(0), stream.push(0)] == ["", "a"]
    assert (stream.push(1), stream.stop_string) == ("", "ab")


@pytest.mark.parametrize("stop", [[""], ["a", ""], ""])
def test_empty_stop_string_is_refused(stop: Sequence[str]) -> None:
    with pytest.raises(UnsupportedError, match="must not be empty") as caught:
        stream_of([], stop)
    assert caught.value.hint


def test_long_stop_string_that_nearly_matches_costs_linear_time() -> None:
    """60,000 pushes against 20,000 equal characters; a quadratic search is a timeout."""
    stream = stream_of([b"a"], ["a" * 20_000 + "b"])
    shown = sum(len(stream.push(0)) for _ in range(60_000))
    assert shown == 40_000
    assert len(stream.finish()) == 20_000
