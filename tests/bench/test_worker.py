"""The process that runs a model for a bench: what it raises, how it ends, what it prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import dying
import pytest
from random_gguf import Q8_0, write_model

from edgespec.bench.loaded_model import Worker
from edgespec.errors import BackendError, ModelNotFoundError
from edgespec.memory.plan.plan import Request


def test_what_loading_raises_comes_through(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        Worker(tmp_path / "none.gguf", Request(), ["none"])
    assert "none.gguf" in str(caught.value)


def test_a_worker_that_ends_by_itself_is_an_error_and_not_a_deadlock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("edgespec.bench.loaded_model._serve", dying.ends_with_status_3)
    with pytest.raises(BackendError, match=r"^the process that ran the model ended with status 3$"):
        Worker(Path("none.gguf"), Request(), ["none"])


_CHATTING = f"""
import sys
sys.path.append({str(Path(dying.__file__).parent)!r})
import dying
import edgespec.bench.loaded_model as worker
from edgespec.memory.plan.plan import Request
if __name__ == "__main__":
    worker._serve = dying.chatters
    with worker.Worker("none.gguf", Request(), []) as one:
        pass
    print(one.drafters, one._process.exitcode)
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs PYTHONSAFEPATH")
def test_a_worker_neither_prints_on_stdout_nor_imports_from_the_folder(tmp_path: Path) -> None:
    folder, script = tmp_path / "here", tmp_path / "script.py"
    folder.mkdir()
    (folder / "pickle.py").write_text("raise SystemExit('the wrong one')\n")
    script.write_text(_CHATTING)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, cwd=folder
    )
    assert (done.returncode, done.stdout) == (0, "['none.gguf'] 0\n"), done.stderr
    assert done.stderr.count("welcome") == 20_000


@pytest.mark.model
def test_a_worker_tells_how_far_a_load_is_and_one_that_dies_is_an_error(tmp_path: Path) -> None:
    request = Request(context_size=256, threads=1)
    model = write_model(tmp_path / "model.gguf", "llama", Q8_0, reads_bytes=True)
    told: list[str] = []
    with Worker(model, request, ["none"], lambda what, _: told.append(what)) as worker:
        assert "loading" in told
        worker._process.kill()
        with pytest.raises(BackendError, match="ended with status"):
            worker.call("noise")
