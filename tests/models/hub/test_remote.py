"""What a hub sends: parts of files, refusals, and nothing at all."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from hub_files import NAME, fetch
from hub_server import Hub

from edgespec.errors import DownloadError, ModelNotFoundError
from edgespec.models.hub import fetching, remote


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
        remote.read_beginning(wanted.repository, "Tiny-F32.gguf", 0, 2048)


def test_a_disk_that_cannot_be_written_is_the_systems_own_error(
    repository: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(remote._Limited, "write", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        fetch()
    assert not isinstance(caught.value, DownloadError)


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
def test_refusals_are_one_sentence_and_a_hint(
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
