"""Control tokens in somebody's words: how they are marked, and where a prompt is cut for them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgespec.models.control_texts import MARK, NO_CONTROLS, ControlTexts

CONTROLS = ControlTexts(("<s>", "<s><s>", "</s>", "[INST]", "~"))
PARTS = st.lists(st.sampled_from(["<s>", "</s>", "[INST]", "~", "a", " ", "<", "s>", MARK]))


def test_texts_without_control_tokens_are_the_same_objects() -> None:
    text = "x < y [and] </so>"
    assert CONTROLS.mark(text) is text and NO_CONTROLS.mark("<s>") == "<s>"


def test_all_texts_of_plain_data_are_marked() -> None:
    marked = CONTROLS.mark({"a": ["<s>", {"</s>": 1}], "b": None, "c": 1.5})
    assert marked == {"a": [f"<{MARK}s>", {f"<{MARK}/s>": 1}], "b": None, "c": 1.5}


def test_words_end_at_the_control_tokens_that_are_meant() -> None:
    words = CONTROLS.mark("say </s> and <s>!")
    text = f"<s>[INST] {words} [INST] more</s>"
    assert CONTROLS.pieces(text) == [
        ("<s>[INST]", True),
        (" say </s> and <s>! ", False),
        ("[INST] more</s>", True),
    ]


def test_somebodys_own_mark_stays() -> None:
    text = f"a{MARK}b<{MARK}x{MARK}{CONTROLS.mark('~')}"
    assert CONTROLS.plain(text) == f"a{MARK}b<{MARK}x{MARK}~"


@given(PARTS, PARTS)
def test_whatever_is_said_no_control_token_comes_of_it(said: list[str], more: list[str]) -> None:
    """`<MARK s>` in somebody's own words is the one text that changes: it loses its mark."""
    words, others = "".join(said), "".join(more)
    text = f"<s>{CONTROLS.mark(words)}</s>{CONTROLS.mark(others)}[INST]"
    pieces = CONTROLS.pieces(text)
    assert "".join(piece for piece, _ in pieces).replace(MARK, "") == (
        f"<s>{words}</s>{others}[INST]".replace(MARK, "")
    )
    assert sum(CONTROLS.count(piece) for piece, is_meant in pieces if is_meant) == 3


def test_many_marks_are_found_in_one_go() -> None:
    text = CONTROLS.mark("~" * 100_000)
    assert CONTROLS.pieces(f"</s>{text}") == [("</s>", True), ("~" * 100_000, False)]
