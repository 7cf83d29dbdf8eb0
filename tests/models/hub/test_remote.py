"""What a hub sends: parts of files, errors, and nothing at all."""

from __future__ import annotations

import errno
import hashlib
from pathlib import Path
from typing import Any

import pytest
from hub_files import NAME, fetch
from hub_server import COMMIT, Hub
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgespec.errors import DownloadError, EdgespecError, ModelNotFoundError
from edgespec.models.hub import fetching


def test_a_server_that_ignores_ranges_sends_all_of_it_again(
    repository: Hub, data: dict[str, bytes]
) -> None:
    wanted = fetching.find(NAME, "F32")
    content = data["Tiny-F32.gguf"]
    blob = fetching._blob(wanted.repository, "Tiny-F32.gguf")
    blob.parent.mkdir(parents=True)
    blob.with_name(blob.name + ".downloadInProgress").write_bytes(content[:5000])
    repository.ignores_ranges = True
    assert fetching.fetch(wanted).read_bytes() == content
    with pytest.raises(DownloadError, match="sends more than was asked for"):
        fetching.read_beginning(wanted.repository, "Tiny-F32.gguf", 0, 2048)


def test_a_disk_that_cannot_be_written_is_the_systems_own_error(
    repository: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fetching._Limited, "write", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        fetch()
    assert not isinstance(caught.value, DownloadError)
    assert str(caught.value.filename).endswith(".downloadInProgress")


# -- what a hub can say ------------------------------------------------------------------------
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("status", "code", "kind", "told"),
    [
        (404, "", ModelNotFoundError, f"the hub has no {NAME}"),
        (404, "RepoNotFound", ModelNotFoundError, f"the hub has no {NAME}"),
        (401, "", ModelNotFoundError, f"the hub has no {NAME}"),
        (401, "GatedRepo", DownloadError, "asks for its terms to be accepted first"),
        (403, "", DownloadError, "asks for its terms to be accepted first"),
        (429, "", DownloadError, "no more questions for now (429)"),
        (500, "", DownloadError, "status 500"),
    ],
)
def test_errors_are_one_sentence_and_a_hint(
    repository: Hub, status: int, code: str, kind: type[Exception], told: str
) -> None:
    repository.status[NAME], repository.error_code = status, code
    with pytest.raises(kind) as caught:
        fetching.find(NAME)
    assert told in str(caught.value) and "\n" not in str(caught.value)
    assert getattr(caught.value, "hint", "")


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(DownloadError, match="owner/Tiny-GGUF could not be fetched"):
        fetching.find(NAME)


def test_a_token_is_sent_to_the_hub(repository: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    repository.token = "hf_secret"
    with pytest.raises(ModelNotFoundError) as caught:
        fetching.find(NAME)
    assert "HF_TOKEN" in caught.value.hint
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert fetch().exists()


# -- listings that no hub sends ----------------------------------------------------------------
DATA = b"GGUF of a stranger"
GOOD = {"type": "file", "path": "x-Q8_0.gguf", "size": len(DATA), "oid": "0" * 40}


def lfs(digest: Any) -> dict[str, Any]:
    return {"lfs": {"oid": digest, "size": len(DATA), "pointerSize": 134}}


def files_below(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if not path.is_dir()}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"path": "../../../../out-Q8_0.gguf"}, "path"),
        ({"path": "/tmp/out-Q8_0.gguf"}, "path"),
        ({"path": "a/./out-Q8_0.gguf"}, "path"),
        ({"path": "a//out-Q8_0.gguf"}, "path"),
        ({"path": "C:\\out-Q8_0.gguf"}, "path"),
        ({"path": "C:out-Q8_0.gguf"}, "path"),
        ({"path": "..\\out-Q8_0.gguf"}, "path"),
        ({"path": "a\0-Q8_0.gguf"}, "path"),
        ({"path": "\x1b[2Ja-Q8_0.gguf"}, "path"),
        ({"path": "x" * 300 + "-Q8_0.gguf"}, "path"),
        ({"oid": "../../../../out"}, "digest"),
        ({"oid": "0" * 39}, "digest"),
        ({"oid": "0" * 40 + "\n"}, "digest"),
        ({"oid": None}, "digest"),
        (lfs("../../../../out"), "digest"),
        (lfs("A" * 64), "digest"),
        (lfs(7), "digest"),
        ({"size": -1}, "size"),
        ({"size": 1 << 70}, "size"),
        ({"size": True}, "size"),
        ({"size": "5"}, "size"),
    ],
)
def test_what_could_lead_out_of_the_cache_is_refused(
    repository: Hub, home: Path, change: dict[str, Any], what: str
) -> None:
    before = files_below(home.parent)
    repository.listing = [GOOD | change]
    with pytest.raises(DownloadError) as caught:
        fetch()
    assert f"the listing of {NAME} has the {what} " in str(caught.value)
    assert str(caught.value).isprintable() and files_below(home.parent) == before


@pytest.mark.parametrize("commit", ["../../../../out", "main", "0" * 39, "", None, 5, "0" * 41])
def test_a_commit_is_forty_digits(repository: Hub, home: Path, commit: Any) -> None:
    before = files_below(home.parent)
    repository.commit = commit
    with pytest.raises(DownloadError):
        fetch()
    assert files_below(home.parent) == before


def tree(hub: Hub) -> str:
    return f"{hub.address}/api/models/{NAME}/tree/{COMMIT}"


def test_pages_without_an_end(repository: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty ones count no files, and the library would ask for them for ever."""
    monkeypatch.setattr(fetching, "_MOST_PAGES", 5)
    repository.listing, repository.following = [], tree(repository)
    with pytest.raises(DownloadError, match="over 5 pages"):
        fetching.find(NAME)
    assert len(repository.asked) == 6


def test_a_page_without_an_end(repository: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_MOST_PAGE_BYTES", 1 << 20)
    repository.endless = True
    with pytest.raises(DownloadError, match="over 1 MiB a page"):
        fetching.find(NAME)


def test_no_listing_names_another_host(
    repository: Hub, hub_elsewhere: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would get the token, or have this machine ask in its own network."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    repository.following = f"{hub_elsewhere.address}/steal"
    with pytest.raises(DownloadError, match="has the address 'http://"):
        fetching.find(NAME)
    repository.following, repository.moved = "", f"{hub_elsewhere.address}/api/models/new/name"
    with pytest.raises(DownloadError, match="has the address 'http://"):
        fetching.find(NAME)
    assert hub_elsewhere.asked == []


def test_a_repository_that_was_renamed_is_found(repository: Hub) -> None:
    repository.moved, repository.written = "/api/models/new/name", "new/name"
    repository.repositories["new/name"] = repository.repositories[NAME]
    assert fetching.list_repository(NAME).files


def test_files_beside_the_models_are_nobodys_concern(repository: Hub) -> None:
    repository.repositories[NAME]["a:b\\c.md"] = b"notes"
    assert fetch().name == "Tiny-Q8_0.gguf"


_WORDS = st.sampled_from(
    [*("..", ".", "", "/", "a", "b.gguf", "x-Q8_0.gguf", "C:", "\\", "\0", "\x1b[2J", "out"),
     "-00001-of-00002.gguf"]
)  # fmt: skip
_PATHS = st.lists(_WORDS, max_size=5).map("/".join) | st.lists(_WORDS, max_size=4).map("".join)
_PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False)
_VALUES = st.recursive(
    _PLAIN | _PATHS | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_PATHS, inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
_DIGESTS = st.sampled_from([hashlib.sha256(DATA).hexdigest(), "0" * 64, "0" * 40, "../../out"])
_ENTRIES = st.fixed_dictionaries(
    {
        "type": st.just("file") | st.just("directory") | _VALUES,
        "path": _PATHS.map(lambda path: f"{path}.gguf") | _PATHS | _VALUES,
        "size": st.just(len(DATA)) | _VALUES,
        "oid": _DIGESTS | _PATHS | _VALUES,
    },
    optional={
        "lfs": st.fixed_dictionaries(
            {"oid": _DIGESTS | _VALUES, "size": st.just(len(DATA)), "pointerSize": st.just(134)}
        )
        | _VALUES
    },
)
_NEAR = st.fixed_dictionaries(  # as a hub sends them, but for one or two values
    {
        "type": st.just("file"),
        "path": st.sampled_from(["x-Q8_0.gguf", "a/b.gguf"]) | _PATHS.map("{}.gguf".format),
        "size": st.just(len(DATA)),
        "oid": st.sampled_from(["0" * 40, "../../out"]) | _PATHS,
    },
    optional={
        "lfs": st.fixed_dictionaries(
            {"oid": _DIGESTS, "size": st.just(len(DATA)), "pointerSize": st.just(134)}
        )
    },
)
_COMMITS = st.sampled_from([COMMIT] * 4) | st.just("../../out") | _PATHS | _VALUES
_LISTINGS = st.lists(_ENTRIES, max_size=3) | st.lists(_NEAR, max_size=3) | _VALUES


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
@given(
    listing=_LISTINGS, commit=_COMMITS, tag=st.sampled_from(["", "Q8_0", "a/b.gguf", "../b.gguf"])
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_listing_writes_beside_the_cache(
    repository: Hub, home: Path, listing: Any, commit: Any, tag: str
) -> None:
    repository.listing, repository.commit = listing, commit
    repository.repositories[NAME] = {"x-Q8_0.gguf": DATA, "a/b.gguf": DATA}
    try:
        fetch(tag)
    except (EdgespecError, OSError) as problem:
        assert "\n" not in str(problem)
    written = files_below(home.parent)
    folder = home / "hub"
    assert all(path.is_relative_to(folder) for path in written), written
