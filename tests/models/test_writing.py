"""Every file that is written: whoever dies or finds the disk full leaves the old one or the new."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from dying import Program

from edgespec.memory.store import cache, texts
from edgespec.models.writing import making, put_in_place, remove_dead, whole_file

needs_kills = pytest.mark.skipif(os.name == "nt", reason="needs signals and limits of POSIX")

_DOCUMENT = f"{{'a': [{'7' * 9}] * 800}}"
# What writes, by name: code to be run in `folder`, and the file it writes.
_WRITERS = {
    "cache": (
        f"from edgespec.memory.store import cache\ncache.store('curves', 'key', {_DOCUMENT})",
        "cache/curves",
    ),
    "counts": (
        "from edgespec.memory.store import cache\n"
        f"cache.update('curves', 'key', lambda now: {_DOCUMENT})",
        "cache/curves",
    ),
    "texts": (
        "from edgespec.memory.store import texts\n"
        "texts.add_texts('m', 'm.gguf', [('', list(range(3000)))])",
        "cache/texts",
    ),
    "page": (
        "from pathlib import Path\nfrom edgespec.memory.report.page import write_page\n"
        "write_page('<p>' * 3000, Path('page.html'))",
        "page.html",
    ),
    "session": (
        "from pathlib import Path\nfrom edgespec.memory.store.cells import write_session\n"
        "def cache(path):\n    return Path(path).write_bytes(b'k' * 9000)\n"
        "write_session(Path('talk.session'), {'messages': ['hello'] * 99}, cache)",
        "talk.session",
    ),
    "piece": (
        "from pathlib import Path\nfrom edgespec.quantize.pieces import _write\n"
        "_write(Path('00001.Q4_0.gguf'), 0, b'', [('t', (4096,), 0, bytes(16384))])",
        "00001.Q4_0.gguf",
    ),
    "training text": (
        "from pathlib import Path\nimport numpy as np\n"
        "from edgespec.exits.texts import TrainingText, save_training_texts\n"
        "text = TrainingText(*[np.arange(3000)] * 4)\n"
        "save_training_texts(Path('texts-00000.npz'), [text], 1.0)",
        "texts-00000.npz",
    ),
}


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder but the lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def partials(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*.partial")]


@pytest.fixture(scope="module", params=_WRITERS)
def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Program, str, Path]]:
    code, place = _WRITERS[request.param]
    folder = tmp_path_factory.mktemp("here")
    with closing(Program(f"import os\nos.chdir({str(folder)!r})\n{code}", folder)) as program:
        yield program, place, folder


@pytest.fixture
def writer(started: tuple[Program, str, Path]) -> tuple[Program, str, Path]:
    """A program that writes, the file or the folder it writes to, and where that lies: empty."""
    for path in started[2].iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return started


@needs_kills
def test_a_process_that_dies_before_any_call_leaves_the_old_file_or_the_new_one(
    writer: tuple[Program, str, Path],
) -> None:
    """And what it leaves besides is gone after the next one that writes."""
    program, _, folder = writer
    assert program.finishes()
    new = contents(folder)
    assert new and partials(folder) == []
    files = [folder / name for name in new]
    old = {name: data[: len(data) // 2] + b"old" for name, data in new.items()}
    deaths = 0
    for number in range(1, 60):
        for path in files:
            path.write_bytes(old[str(path.relative_to(folder))])
        died = program.dies_before_call(number)
        found = {name: data for name, data in contents(folder).items() if "partial" not in name}
        assert found in (old, new), f"half written before call {number}"
        deaths += died
        if not died:
            break
    assert not died and deaths >= 2 and found == new
    assert partials(folder) == []


@needs_kills
def test_a_process_that_dies_in_the_middle_of_a_write_leaves_the_old_file(
    writer: tuple[Program, str, Path],
) -> None:
    program, _, folder = writer
    assert program.finishes()
    new = contents(folder)
    old = {name: b"old" for name in new}
    largest = max(len(data) for data in new.values())
    for size in (0, 1, largest // 2, largest - 1):
        for name, data in old.items():
            (folder / name).write_bytes(data)
        assert program.dies_in_a_write(size)
        found = {name: data for name, data in contents(folder).items() if "partial" not in name}
        assert found == old
    assert program.finishes()
    assert contents(folder) == new and partials(folder) == []


@needs_kills
def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    writer: tuple[Program, str, Path],
) -> None:
    """Where the file was asked for it is an error; what is only kept for later is left out."""
    program, place, folder = writer
    assert program.finishes()
    old = {name: b"old" for name in contents(folder)}
    for name, data in old.items():
        (folder / name).write_bytes(data)
    status, said = program.on_a_full_disk(1500), program.said()
    assert contents(folder) == old
    if place.startswith("cache"):
        assert status == 0
        is_asked_for = "texts" in place
        assert ("nothing was remembered" in said) is is_asked_for and "Traceback" not in said
    else:
        assert "File too large" in said.splitlines()[-1]


# -------------------------------------------------------------------------- the mechanism


def test_a_block_that_raises_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("old")
    with pytest.raises(KeyboardInterrupt), whole_file(target) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    assert target.read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_two_writers_of_one_file_do_not_mix(tmp_path: Path) -> None:
    """Not in one process, where they would have its number in common."""
    target = tmp_path / "file"
    with whole_file(target) as first:
        first.write_text("first")
        with whole_file(target) as second:
            second.write_text("second")
        assert target.read_text() == "second"
        assert first.read_text() == "first"
    assert target.read_text() == "first" and os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(os.name == "nt", reason="needs links and modes of POSIX")
def test_a_link_stays_one_and_modes_are_as_asked(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    with whole_file(tmp_path / "link") as partial:
        partial.write_text("new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"
    with whole_file(tmp_path / "mine", private=True) as partial:
        partial.write_text("new")
    assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == 0o600


@pytest.mark.skipif(os.name == "nt", reason="needs pipes of POSIX")
def test_what_is_no_ordinary_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with whole_file(pipe) as place:
        place.write_text("through the pipe")
    assert os.read(reader, 99) == b"through the pipe"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode) and os.listdir(tmp_path) == ["pipe"]
    with whole_file(Path(os.devnull)) as place:
        assert place == Path(os.devnull)


def test_folders_come_whole(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with making(target) as work:
        (work / "done").mkdir(parents=True)
        (work / "done" / "weights").write_bytes(b"w")
        put_in_place(work / "done", target)
    assert os.listdir(tmp_path) == ["model"] and os.listdir(target) == ["weights"]


def test_only_what_dead_processes_left_is_removed(tmp_path: Path) -> None:
    gone = [".a.2147483646-0.partial", ".a.0123456789ab.partial", ".a.0123456789ab.partial.lock"]
    gone += [".a.77.partial", ".a.ba9876543210.partial.lock"]
    kept = [".b.2147483646-0.partial", ".a.partial", "a", ".a.x.partial"]
    for name in (*gone, *kept):
        (tmp_path / name).write_text("half")
    with making(tmp_path / "a") as partial:
        partial.write_text("being written")
        remove_dead(tmp_path, "a")
        assert set(os.listdir(tmp_path)) == {*kept, partial.name, f"{partial.name}.lock"}
    remove_dead(tmp_path)
    assert set(os.listdir(tmp_path)) == set(kept[1:])
    remove_dead(tmp_path / "no such folder")


WRITING = """
import sys
from pathlib import Path
from edgespec.models.writing import making
with making(Path(sys.argv[1])) as folder:
    folder.mkdir()
    print(folder.name, flush=True)
    sys.stdin.read()
"""


def test_what_another_container_writes_is_kept_until_it_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process cannot be seen from here, as with a folder that two containers share."""
    monkeypatch.setattr(os, "kill", lambda *_: (_ for _ in ()).throw(ProcessLookupError))
    target = tmp_path / "model"
    command = [sys.executable, "-c", WRITING, str(target)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout is not None
        name = other.stdout.readline().strip()
        with making(target):
            assert name in os.listdir(tmp_path)
        assert sorted(os.listdir(tmp_path)) == [name, f"{name}.lock"]
        monkeypatch.undo()
        other.kill()
    remove_dead(tmp_path)
    assert os.listdir(tmp_path) == []


def test_documents_and_texts_are_readable_for_their_owner_alone(cache_folder: Path) -> None:
    cache.store("curves", "key", {"a": 1})
    texts.add_texts("model", "model.gguf", [("", [1, 2])])
    for path in cache_folder.rglob("*.json"):
        assert sys.platform == "win32" or stat.S_IMODE(path.stat().st_mode) == 0o600
        assert json.loads(path.read_text())


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    """The lock beside a partial file made it: a mistyped name was a new folder."""
    with pytest.raises(FileNotFoundError), whole_file(tmp_path / "no" / "file") as part:
        part.write_text("x")
    assert not (tmp_path / "no").exists()
