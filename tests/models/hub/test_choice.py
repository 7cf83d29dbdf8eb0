"""Which file of a repository is meant: the same as llama.cpp's `-hf` takes."""

from __future__ import annotations

import pytest

from edgespec.models.hub import choice

FILES = [
    ".gitattributes",
    "Tiny-BF16-00001-of-00002.gguf",
    "Tiny-BF16-00002-of-00002.gguf",
    "Tiny-Q3_K_S.gguf",
    "Tiny-Q4_K_M.gguf",
    "Tiny-Q8_0.gguf",
    "eagle3-Tiny-Q8_0.gguf",
    "imatrix-Tiny-Q4_K_M.gguf",
    "mmproj-Tiny-F16.gguf",
    "mtp-Tiny-F16.gguf",
    "mtp-Tiny-Q4_0.gguf",
]


@pytest.mark.parametrize(
    ("tag", "chosen"),
    [
        ("", "Tiny-Q4_K_M.gguf"),
        ("Q8_0", "Tiny-Q8_0.gguf"),
        ("q3_k_s", "Tiny-Q3_K_S.gguf"),
        ("BF16", "Tiny-BF16-00001-of-00002.gguf"),
        ("mtp-Tiny-F16.gguf", "mtp-Tiny-F16.gguf"),
        ("Q2_K", None),
        ("F16", None),  # projectors and heads are no models
        ("Q8.0", None),  # a tag is no pattern
        ("no.gguf", None),
    ],
)
def test_a_tag_means_one_model(tag: str, chosen: str | None) -> None:
    assert choice.choose(FILES, tag) == chosen


def test_without_a_tag_it_is_q4_k_m_then_q8_0_then_the_first() -> None:
    without = [path for path in FILES if "Q4_K_M" not in path]
    assert choice.choose(without) == "Tiny-Q8_0.gguf"
    without = [path for path in without if "Q8_0" not in path]
    assert choice.choose(without) == "Tiny-BF16-00001-of-00002.gguf"
    assert choice.choose(["README.md", "mmproj-F16.gguf"]) is None


def test_all_parts_of_a_split_model_are_taken() -> None:
    first, second = "Tiny-BF16-00001-of-00002.gguf", "Tiny-BF16-00002-of-00002.gguf"
    assert choice.parts_of(FILES, first) == [first, second]
    assert choice.is_whole(FILES, first)
    assert not choice.is_whole([first], first)
    assert choice.parts_of(FILES, "Tiny-Q8_0.gguf") == ["Tiny-Q8_0.gguf"]


def test_heads_are_those_nearest_in_bits_and_folder() -> None:
    assert choice.heads_of(FILES, "Tiny-Q4_K_M.gguf") == [
        "mtp-Tiny-Q4_0.gguf",
        "eagle3-Tiny-Q8_0.gguf",
    ]
    folders = ["a/mtp-x-Q8_0.gguf", "b/mtp-x-Q8_0.gguf", "mtp-x-Q4_0.gguf"]
    assert choice.heads_of(folders, "b/x-Q4_0.gguf") == ["b/mtp-x-Q8_0.gguf"]


def test_what_a_name_says() -> None:
    assert choice.read_name("dir/Tiny-1.5B.Q4_0.gguf") == ("dir/Tiny-1.5B.Q4_0", "Q4_0", 1, 1)
    assert choice.read_name("x-IQ2_XXS-00003-of-00007.gguf") == ("x-IQ2_XXS", "IQ2_XXS", 3, 7)
    assert choice.read_name("weights.gguf").tag == ""
