"""Which file of a repository is meant: the same as llama.cpp's `-hf` takes."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.errors import ModelNotFoundError
from edgespec.models.hub import choice

NAME = "owner/Tiny-GGUF"
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
    assert choice.choose(FILES, tag, NAME) == chosen


def test_without_a_tag_it_is_q4_k_m_then_q8_0_then_the_first() -> None:
    without = [path for path in FILES if "Q4_K_M" not in path]
    assert choice.choose(without, "", NAME) == "Tiny-Q8_0.gguf"
    without = [path for path in without if "Q8_0" not in path]
    assert choice.choose(without, "", NAME) == "Tiny-BF16-00001-of-00002.gguf"
    assert choice.choose(["README.md", "mmproj-F16.gguf"], "", NAME) is None


def test_a_tag_is_all_that_follows_the_repositorys_name() -> None:
    plain, other = "Tiny-Q4_K_M.gguf", "Tiny-UD-Q4_K_M.gguf"
    for paths in ([plain, other], [other, plain]):
        assert choice.choose(paths, "Q4_K_M", NAME) == plain
        assert choice.choose(paths, "ud-q4_k_m", NAME) == other
        assert choice.choose(paths, "", NAME) == plain
    assert choice.choose([other], "Q4_K_M", NAME) == other, "all that the hub has with it"
    assert choice.choose([other], "Q4_K_M", NAME, is_listing=False) is None


@pytest.mark.parametrize(
    ("paths", "tag", "names"),
    [
        (["Tiny-I-Compact.gguf", "Tiny-X-Compact.gguf"], "COMPACT", [":I-COMPACT", ":X-COMPACT"]),
        (["a-1b-Q8_0.gguf", "a-4b-Q8_0.gguf"], "Q8_0", ["/a-1b-Q8_0.gguf", "/a-4b-Q8_0.gguf"]),
        (["a/Tiny-F16.gguf", "b/Tiny-F16.gguf"], "F16", ["/a/Tiny-F16.gguf", "/b/Tiny-F16.gguf"]),
    ],
)  # fmt: skip
def test_several_files_that_a_tag_may_mean_are_named(
    paths: list[str], tag: str, names: list[str]
) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        choice.choose(paths, tag, NAME)
    assert str(caught.value) == f"{tag} means 2 files of {NAME}"
    assert caught.value.hint == f"name one: hf:{NAME}{names[0]}, hf:{NAME}{names[1]}"


_STEMS = st.sampled_from(
    ["Tiny", "tiny", "Tiny-UD", "Tiny-I", "Tiny-X", "Other", "Tiny.i1", "Tiny-1b"]
)
_TAGS = st.sampled_from(["Q4_K_M", "q8_0", "Compact", "BF16", "IQ4_XS-imat", "it"])
_FOLDERS = st.sampled_from(["", "", "Q8_0/", "old/"])
_PARTS = st.sampled_from(["", "-00001-of-00002"])
_PATHS = st.lists(
    st.builds("{}{}-{}{}.gguf".format, _FOLDERS, _STEMS, _TAGS, _PARTS),
    min_size=1,
    max_size=8,
    unique_by=str.lower,
)
_REPOSITORIES = st.sampled_from([NAME, "o/tiny", "o/Tiny-UD-GGUF", "o/Tiny-I-Compact-GGUF"])


@given(_PATHS, _PATHS, _REPOSITORIES)
@settings(max_examples=100)
def test_the_name_of_a_file_means_no_other_one_elsewhere(
    here: list[str], elsewhere: list[str], repository: str
) -> None:
    for path in here:
        _, _, tag = choice.name_of(path, repository).removeprefix(repository).partition(":")
        tag = tag or path
        assert choice.choose([path], tag, repository, is_listing=False) == path
        with contextlib.suppress(ModelNotFoundError):  # several are named instead
            assert choice.choose({*elsewhere, path}, tag, repository) == path


def test_all_parts_of_a_split_model_are_taken() -> None:
    first, second = "Tiny-BF16-00001-of-00002.gguf", "Tiny-BF16-00002-of-00002.gguf"
    assert choice.parts_of(FILES, first) == [first, second]
    assert choice.is_whole(FILES, first)
    assert not choice.is_whole([first], first)
    assert choice.parts_of(FILES, "Tiny-Q8_0.gguf") == ["Tiny-Q8_0.gguf"]


def test_the_projector_of_a_model_is_the_nearest() -> None:
    files = [*FILES, "mmproj-Tiny-Q8_0.gguf", "b/x-Q4_0.gguf", "c/mmproj-F16.gguf"]
    assert choice.projector_of(files, "Tiny-Q8_0.gguf") == "mmproj-Tiny-Q8_0.gguf"
    assert choice.projector_of(files, "b/x-Q4_0.gguf") == "mmproj-Tiny-Q8_0.gguf"
    assert choice.projector_of(["a-Q8_0.gguf", "mmproj.txt"], "a-Q8_0.gguf") is None


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
