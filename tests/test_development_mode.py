"""First answers in Python's development mode, whose allocator overwrites what was freed.

It finds addresses of what Python has freed already, and files and sockets that nobody closed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from command_line import start
from waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.model]

DEVELOPMENT = {
    "PYTHONDEVMODE": "1",
    "PYTHONMALLOC": "debug",
    "PYTHONWARNINGS": "always::ResourceWarning",
}
# The embedded head reads what layers take in, which changes the context's buffers.
LIBRARY = """
import edgespec
from edgespec.models.embedded import embedded_drafter_path
with edgespec.load(context_size=512, draft_model=embedded_drafter_path()) as engine:
    assert engine.generate("Name a colour.", max_tokens=3).text
    assert "".join(chunk.text for chunk in engine.stream("Name a river.", max_tokens=3))
"""

# A file that its package opens when it is imported, and never closes.
_OF_LLAMA_CPP_PYTHON = re.compile(
    r".*ResourceWarning: unclosed file <.* name='/dev/null' mode='w'.*\n"
)


def printed(process: subprocess.Popen[bytes], stdin: bytes = b"") -> str:
    """What a process printed that ended well and left nothing open."""
    out, err = (text.decode() for text in process.communicate(stdin, timeout=PATIENCE_S))
    err = _OF_LLAMA_CPP_PYTHON.sub("", err)
    assert process.returncode == 0, err
    assert "ResourceWarning" not in err and "Traceback" not in err, err
    return out


@pytest.mark.long
def test_the_library(tmp_path: Path) -> None:
    environment = {**os.environ, **DEVELOPMENT, "EDGESPEC_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", LIBRARY]
    printed(subprocess.Popen(command, stderr=subprocess.PIPE, stdout=-1, env=environment))


def test_run(tmp_path: Path) -> None:
    assert printed(start(["run", "-p", "hi", "-n", "3"], str(tmp_path), **DEVELOPMENT)).strip()


@pytest.mark.long
def test_chat_from_a_pipe(tmp_path: Path) -> None:
    chat = start(["chat", "-n", "3"], str(tmp_path), **DEVELOPMENT)
    assert printed(chat, b"hi\nand again\n").strip()


@pytest.mark.long
def test_bench(tmp_path: Path) -> None:
    bench = start(["bench", "--per-task", "1", "-n", "4"], str(tmp_path), **DEVELOPMENT)
    assert printed(bench).strip()


@pytest.mark.long
def test_serve_with_one_request(tmp_path: Path) -> None:
    server = start(["serve", "--port", "0"], str(tmp_path), **DEVELOPMENT)
    assert server.stderr is not None
    lines = iter(server.stderr.readline, b"")
    line = next(one for one in lines if b"listening on" in one)
    address = line.decode().split()[2].rstrip(";")
    answer = httpx.post(
        f"{address}/v1/completions", json={"prompt": "hi", "max_tokens": 3}, timeout=PATIENCE_S
    )
    server.send_signal(signal.SIGINT)
    printed(server)
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"]
