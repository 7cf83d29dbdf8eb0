"""Sessions in files: they come back as they were, or are refused with a sentence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from session_cases import engine_of

from edgespec.decode.session import Session
from edgespec.errors import SessionFileError
from edgespec.sampling.params import SamplingParams


def test_a_session_comes_back_as_it_was(tmp_path: Path) -> None:
    engine = engine_of()
    sampling = SamplingParams(temperature=0.5, seed=3, logit_bias={5: float("-inf")})
    session = Session(
        engine, system="be", sampling=sampling, max_tokens=77, stop=["!"], shift=False
    )
    session.send("hello")
    session.save(tmp_path / "a.session")
    again = Session.load(engine, tmp_path / "a.session")
    assert again.messages == session.messages
    assert (again.sampling, again.max_tokens, again.stop, again.shift) == (
        sampling,
        77,
        ("!",),
        False,
    )
    assert os.listdir(tmp_path) == ["a.session"]


def test_damaged_and_foreign_files_are_refused_with_a_sentence(tmp_path: Path) -> None:
    engine = engine_of()
    session = Session(engine)
    session.send("hello")
    session.save(tmp_path / "a.session")
    good = (tmp_path / "a.session").read_bytes()
    broken: dict[str, bytes | None] = {
        "missing": None,
        "empty": b"",
        "foreign": b"GGUF" * 100,
        "cut": good[:-1],
        "cut early": good[: len(good) // 2],
        "longer": good + b"x",
    }
    for i in range(0, len(good), 7):
        broken[f"flipped {i}"] = good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :]
    for name, data in broken.items():
        path = tmp_path / "b.session"
        path.unlink(missing_ok=True)
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(SessionFileError) as caught:
            Session.load(engine, path)
        assert "\n" not in str(caught.value), name
    with pytest.raises(SessionFileError, match="cannot read"):
        Session.load(engine, tmp_path)
    with pytest.raises(SessionFileError, match="cannot write"):
        session.save(tmp_path / "no" / "folder")


_WRITER = """
import sys
from pathlib import Path
from edgespec.memory.store.cells import write_session
path = Path(sys.argv[1])
def cache(name):
    Path(name).write_bytes(b"c" * 300_000)
    return 300_000
print("ready", flush=True)
for number in range(10**9):
    write_session(path, {"number": number, "text": "x" * 50_000}, cache)
"""


def test_killing_a_writer_leaves_an_intact_file(tmp_path: Path) -> None:
    from edgespec.memory.store.cells import read_session

    path = tmp_path / "a.session"
    for attempt in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        threading.Event().wait(0.02 + 0.013 * attempt)
        while attempt == 5 and not path.exists():  # a busy machine writes late
            threading.Event().wait(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        if path.exists():
            document, cache_bytes = read_session(path)
            assert cache_bytes == 300_000 and len(document["text"]) == 50_000
    assert path.exists()
