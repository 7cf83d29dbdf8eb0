"""Models come from a hub on this machine, through the real `huggingface_hub`."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hub_files import NAME, fetch, write
from hub_server import COMMIT, Hub

from edgespec.errors import (
    DoesNotFitError,
    DownloadError,
    MissingDependencyError,
    ModelFileError,
    ModelNotFoundError,
)
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.bytes.simulation import ContextRequest, simulated
from edgespec.models.hub import fetching, resolve
from edgespec.models.spec import ModelSpec, read_model_spec


def test_a_model_lands_where_llama_cpp_looks_for_it(
    repository: Hub, data: dict[str, bytes], home: Path
) -> None:
    told: list[tuple[str, float]] = []
    path = fetching.fetch(fetching.find(NAME), lambda what, part: told.append((what, part)))
    content = data["Tiny-Q8_0.gguf"]
    folder = home / "hub" / "models--owner--Tiny-GGUF"
    assert path == folder / "snapshots" / COMMIT / "Tiny-Q8_0.gguf"
    assert path.read_bytes() == content
    digest = hashlib.sha256(content).hexdigest()
    assert os.readlink(path) == os.path.join("..", "..", "blobs", digest)
    assert (folder / "refs" / "main").read_text() == COMMIT
    assert told[-1] == ("fetching Tiny-Q8_0.gguf", 1.0)
    assert resolve.model_file(f"hf:{NAME}") == path
    assert [one.name for one in resolve.local_models() if one.source == "Hugging Face hub"] == [
        f"hf:{NAME}:Q8_0"
    ]


def test_what_is_here_is_not_fetched_again(repository: Hub) -> None:
    path = fetch("F32")
    before = len(repository.sent("Tiny-F32.gguf"))
    assert fetching.here(fetching.find(NAME, "F32")) == path
    assert fetch("F32") == path
    assert len(repository.sent("Tiny-F32.gguf")) == before == 1


def test_a_link_to_nothing_is_made_anew(repository: Hub) -> None:
    path = fetch("F32")
    blob = Path(os.path.realpath(path))
    blob.unlink()
    assert fetch("F32") == path and path.is_symlink() and blob.is_file()


def test_the_library_finds_what_was_fetched(repository: Hub, home: Path) -> None:
    import huggingface_hub

    path = fetch()
    found = huggingface_hub.try_to_load_from_cache(NAME, path.name, cache_dir=home / "hub")
    assert found == str(path)


def test_an_older_library_is_named(repository: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra `export` brings one, with other calls."""
    monkeypatch.setattr("huggingface_hub.__version__", "0.36.2")
    with pytest.raises(MissingDependencyError, match=r"1\.0 or newer, not 0\.36\.2"):
        fetch()


def test_a_plan_reads_headers_alone(repository: Hub, data: dict[str, bytes]) -> None:
    with fetching.header_only(fetching.find(NAME, "F32")) as spec:
        assert (spec.file_type, spec.num_layers, spec.vocab_size) == ("F32", 4, 258)
        assert spec.file_bytes == len(data["Tiny-F32.gguf"])
    asked = repository.sent("Tiny-F32.gguf")
    assert [(one.first, one.last) for one in asked] == [(0, 2047), (2048, 8191)]


@pytest.mark.model
def test_a_header_alone_is_planned_to_the_same_bytes(repository: Hub) -> None:
    wanted, shape = fetching.find(NAME, "F32"), RunConfig(512, 64, 8)
    with fetching.header_only(wanted) as ahead:
        early = simulated([ContextRequest(ahead, shape)])
    whole = read_model_spec(fetching.fetch(wanted))
    assert simulated([ContextRequest(whole, shape)]) == early
    assert early[0]["host"].weights + early[0]["host"].packed >= whole.weight_bytes > 0


def test_what_does_not_fit_is_refused_before_its_weights_are_fetched(repository: Hub) -> None:
    def fits(spec: ModelSpec) -> None:
        if spec.file_type != "Q8_0":
            raise DoesNotFitError("needs 2 GiB; free: 1 GiB", hint="close a program")

    with pytest.raises(DoesNotFitError) as caught:
        fetching.check(fetching.find(NAME, "F32"), fits)
    assert str(caught.value) == f"hf:{NAME}:F32 would not fit: needs 2 GiB; free: 1 GiB"
    assert caught.value.hint == f"hf:{NAME}:Q8_0 fits; close a program"
    most = max((one.last or 1 << 60) for one in repository.sent("Tiny-F32.gguf"))
    assert most < 16384
    fetching.check(fetching.find(NAME, "Q8_0"), fits)


def test_a_full_disk_is_told_before(
    repository: Hub, data: dict[str, bytes], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = len(data["Tiny-Q8_0.gguf"]) + (256 << 20)  # which stay for everybody else
    usage: Any = type("usage", (), {"free": room})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    fetching.check(fetching.find(NAME, "Q8_0"), None)
    with pytest.raises(DoesNotFitError) as caught:
        fetching.check(fetching.find(NAME, "F32"), None)
    assert caught.value.hint == f"hf:{NAME}:Q8_0 fits, or set HF_HUB_CACHE to another disk"
    monkeypatch.setenv("LLAMA_CACHE", str(home))  # counts more than the other
    with pytest.raises(DoesNotFitError, match="home has room") as caught:
        fetching.check(fetching.find(NAME, "F32"), None)
    assert caught.value.hint.endswith("set LLAMA_CACHE to another disk")
    assert repository.sent("Tiny-F32.gguf") == []


def test_a_cache_that_cannot_be_written_is_told_before(
    repository: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(write(tmp_path / "a file") / "hub"))
    with pytest.raises(DownloadError, match="a file cannot be written") as caught:
        fetching.check(fetching.find(NAME), None)
    assert caught.value.hint == "set HF_HUB_CACHE to a folder that can"


@pytest.mark.usefixtures("patient")
def test_a_broken_connection_is_taken_up_where_it_broke(
    repository: Hub, data: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    repository.breaks = [100_500]
    assert fetch("F32").read_bytes() == data["Tiny-F32.gguf"]
    first, second = repository.sent("Tiny-F32.gguf")
    assert first.first is None
    assert second.first is not None and 90_000 < second.first <= 100_500


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_the_next_command_goes_on_where_one_broke_for_good(
    repository: Hub, data: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    repository.breaks = [200_000, *[0] * 20]
    with pytest.raises(DownloadError) as caught:
        fetch("F32")
    assert caught.value.hint.endswith("the same command goes on where it stopped")
    repository.breaks, repository.asked = [], []
    assert fetch("F32").read_bytes() == data["Tiny-F32.gguf"]
    (asked,) = repository.sent("Tiny-F32.gguf")
    assert asked.first is not None and asked.first > 190_000


@pytest.mark.parametrize("kind", ["SHA-256", "git's SHA-1"])
def test_other_bytes_than_announced_are_not_kept(repository: Hub, home: Path, kind: str) -> None:
    if kind != "SHA-256":
        repository.small.add("Tiny-Q8_0.gguf")
    repository.damaged = True
    with pytest.raises(DownloadError) as caught:
        fetch()
    assert f"came with other bytes than announced ({kind})" in str(caught.value)
    folder = home / "hub" / "models--owner--Tiny-GGUF"
    assert [path for path in folder.rglob("*") if path.is_file() or path.is_symlink()] == []
    repository.damaged = False
    assert read_model_spec(fetch()).file_type == "Q8_0"


def test_the_hub_says_how_a_repository_is_written(repository: Hub, home: Path) -> None:
    repository.written = NAME
    path = fetching.fetch(fetching.find("OWNER/tiny-gguf", "q8_0"))
    assert path.is_relative_to(home / "hub" / "models--owner--Tiny-GGUF")
    assert fetching.find("Owner/TINY-gguf", "Q8_0").name == f"hf:{NAME}:Q8_0"
    repository.written = "owner/renamed"
    assert fetching.find(NAME).name == f"hf:{NAME}:Q8_0"


def test_the_same_bytes_under_an_older_commit_are_here(repository: Hub, home: Path) -> None:
    path = fetch("Q8_0")
    older = home / "hub" / "models--owner--Tiny-GGUF" / "snapshots" / ("a" * 40)
    path.parent.rename(older)
    assert fetching.here(fetching.find(NAME, "Q8_0")) == older / path.name
    path = fetch("F32")
    assert resolve.model_file(f"hf:{NAME}:F32") == path
    assert resolve.model_file(f"hf:{NAME}:Q8_0") == older / "Tiny-Q8_0.gguf", "found with it"
    (older / "Tiny-F32.gguf").write_bytes(b"older")
    (home / "hub" / "models--owner--Tiny-GGUF" / "refs" / "main").write_text("a" * 40)
    assert resolve.model_file(f"hf:{NAME}:F32") == older / path.name
    assert fetching.here(fetching.find(NAME, "F32")) == path
    assert resolve.model_file(f"hf:{NAME}:F32") == path, "the newest by the hub's word"
    path.unlink()
    assert fetching.here(fetching.find(NAME, "F32")) is None


def test_offline_nothing_is_asked(repository: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch()
    repository.asked = []
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve.model_file(f"hf:{NAME}", lambda *_: fetch()) == path
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE forbids asking"):
        resolve.model_file(f"hf:{NAME}:F32", lambda name, tag: fetch(tag))
    assert repository.asked == []


def test_a_tag_that_is_not_there_names_those_that_are(repository: Hub) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        fetching.find(NAME, "Q4_0")
    assert (str(caught.value), caught.value.hint) == (
        f"there is no Q4_0 in {NAME}",
        "it has F32, Q8_0",
    )
    repository.repositories[NAME] = {"README.md": b"nothing"}
    with pytest.raises(ModelNotFoundError, match=f"there is no GGUF model in {NAME}"):
        fetching.find(NAME)


def test_a_repository_that_lacks_a_part_is_refused(repository: Hub) -> None:
    repository.repositories[NAME] = {"x-Q8_0-00001-of-00002.gguf": b"1"}
    with pytest.raises(ModelNotFoundError, match="has 1 parts of 2"):
        fetching.find(NAME)


def test_a_web_page_in_place_of_a_model(repository: Hub) -> None:
    repository.repositories[NAME] = {"x-Q8_0.gguf": b"<!doctype html>" * 1000}
    with (
        pytest.raises(ModelFileError, match="is a web page"),
        fetching.header_only(fetching.find(NAME)),
    ):
        pass


def test_all_parts_are_fetched_and_planned(repository: Hub, tmp_path: Path) -> None:
    paths = [f"big/x-Q8_0-0000{n}-of-00002.gguf" for n in (1, 2)]
    repository.repositories[NAME] = {path: os.urandom(3000 + len(path)) for path in paths}
    first = fetch()
    assert first.name == "x-Q8_0-00001-of-00002.gguf"
    for path in paths:
        here = first.with_name(Path(path).name)
        assert here.read_bytes() == repository.repositories[NAME][path]
    assert resolve.model_file(f"hf:{NAME}:Q8_0") == first


# -- removing ----------------------------------------------------------------------------------
def test_removing_takes_the_bytes_that_nobody_else_has(repository: Hub) -> None:
    q8, f32 = fetch("Q8_0"), fetch("F32")
    local = next(one for one in resolve.local_models() if one.path == q8)
    assert fetching.files_of(local) == ([q8, Path(os.path.realpath(q8))], [])
    q8.with_name("copy-Q8_0.gguf").symlink_to(os.readlink(q8))
    assert fetching.files_of(local) == ([q8], [])
    assert read_model_spec(f32).file_type == "F32"


def test_what_a_link_in_the_cache_means_elsewhere_stays(home: Path, tmp_path: Path) -> None:
    mine, folder = write(tmp_path / "mine.gguf"), home / "hub" / "models--owner--Tiny-GGUF"
    blob = folder / "blobs" / ("0" * 64)
    store = write(home / "hub" / "shared" / "bytes")
    links = [folder / "snapshots" / COMMIT / f"Tiny-{tag}.gguf" for tag in ("Q4_0", "Q8_0", "F32")]
    for link, target in zip((*links, blob), (mine, blob, mine, store), strict=True):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
    links[2].unlink()
    links[2].symlink_to(links[2])  # and one that has no end
    for link, gone, kept in (
        (links[0], [links[0]], [mine]),
        (links[1], [links[1], blob], [store]),
        (links[2], [links[2]], []),
    ):
        local = resolve.Local("hf:name", link, "Hugging Face hub")
        assert fetching.files_of(local) == (gone, kept)


def test_a_folder_that_is_a_link_out_of_the_cache_is_left_alone(home: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "mine" / "Tiny-Q8_0.gguf")
    link = home / "hub" / "models--owner--Tiny-GGUF" / "snapshots" / COMMIT
    link.parent.mkdir(parents=True)
    link.symlink_to(path.parent)
    (local,) = (one for one in resolve.local_models() if one.name == f"hf:{NAME}:Q8_0")
    with pytest.raises(ModelNotFoundError, match="is not in the hub's cache"):
        fetching.files_of(local)


def test_files_of_others_are_theirs(tmp_path: Path) -> None:
    local = resolve.Local("~/x.gguf", tmp_path / "x.gguf", "LM Studio")
    with pytest.raises(ModelNotFoundError) as caught:
        fetching.files_of(local)
    assert caught.value.hint == f"it is LM Studio's: {tmp_path / 'x.gguf'}"
