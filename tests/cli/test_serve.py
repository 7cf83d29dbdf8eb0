"""`edgespec serve` before there is a server."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from command_line import Command, start
from waiting import PATIENCE_S

from edgespec.cli.serve import _keys_of
from edgespec.errors import UnsupportedError
from edgespec.models.gguf.reader import read_gguf
from edgespec.models.gguf.writer import i32, keys_of, text

# As where the extra was not installed: these packages are found nowhere.
PROGRAM = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("starlette", "uvicorn"):
            raise ModuleNotFoundError(name)
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: (
    None if name in ("starlette", "uvicorn") else find(name, *rest)
)
sys.meta_path.insert(0, Missing())
sys.argv = ["edgespec", "serve"]
from edgespec.cli.main import main
main()
"""


def test_missing_packages_are_a_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "a server needs the package starlette" in done.stderr
    assert "hint: pip install 'edgespec[serve]'" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_keys_are_read_whatever_wrote_the_file(tmp_path: Path, encoding: str) -> None:
    """The mark of a file was a part of its first key."""
    file = tmp_path / "keys"
    file.write_bytes("first\r\nschlüssel\r\n".encode(encoding))
    assert _keys_of(file) == ["first", "schlüssel"]


def test_a_file_of_other_bytes_has_no_keys(tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(b"caf\xe9\n")
    with pytest.raises(UnsupportedError, match="keys is not UTF-8 text: byte 3 is 0xe9"):
        _keys_of(tmp_path / "keys")


def f32(key: str, value: float) -> bytes:
    """A key of a GGUF file with a number."""
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<If", 6, value)


KEYS = "EDGESPEC_API_KEY"


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The keys that a server would have had."""
    found: list[tuple[str, ...]] = []

    def bind(_host: str, _port: int, keys: Sequence[str]) -> socket.socket:
        found.append(tuple(keys))
        raise UnsupportedError("no further")

    monkeypatch.setattr("edgespec.serve.server.bind", bind)
    return found


def test_tools_that_other_pages_could_call_are_refused(say: Command, tmp_path: Path) -> None:
    """Before anything is started or loaded."""
    for option in ("--cors=*", "--allowed-host=*"):
        asked = ("serve", "--mcp", str(tmp_path / "mcp.json"), option)
        assert "hint: give --api-key" in say(*asked).err
        assert "cannot read" in say(*asked, "--api-key", "secret").err


@pytest.mark.model
def test_the_variable_is_one_key(
    say: Command, given: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the places where keys may stand the first one holds, as for every option."""
    monkeypatch.setenv(KEYS, "three words here")
    say("serve")
    say("serve", "--api-key", "one", "--api-key", "other")
    monkeypatch.delenv(KEYS)
    say("serve")
    assert given == [("three words here",), ("one", "other"), ()]


@pytest.mark.parametrize("where", ["option", "variable", "file of keys"])
def test_a_blank_key_opens_no_server(
    say: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """As where a variable in a script is not set."""
    arguments: list[str] = []
    if where == "option":
        arguments = ["--host", "0.0.0.0", "--api-key", ""]
    elif where == "variable":
        monkeypatch.setenv(KEYS, "")
    else:
        (tmp_path / "keys").write_text("  \n\n")
        arguments = ["--api-key-file", str(tmp_path / "keys")]
    status, _, err = say("serve", *arguments)
    assert status == 1 and "hint: " in err
    assert "an API key is blank" in err or "there is no key in" in err


@pytest.mark.slow
@pytest.mark.model
def test_a_server_logs_and_a_second_one_is_told_at_once(
    measured: str, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", measured)
    asked = [sys.executable, "-m", "edgespec.cli.main", "serve", tiny, "--ctx", "256", "--port"]
    first = subprocess.Popen(
        [*asked, "0", "-v", "--api-key", "right", "--allowed-host", "proxy.example"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert first.stderr is not None
    try:
        lines = iter(first.stderr.readline, "")
        address = next(line for line in lines if "listening on" in line).split()[2].rstrip(";")
        port = address.rpartition(":")[2]
        second = subprocess.run([*asked, port], capture_output=True, text=True, timeout=PATIENCE_S)
        assert second.returncode == 1 and f"port {port} of 127.0.0.1 is in use" in second.stderr
        assert "listening" not in second.stderr and "tokens of context" not in second.stderr
        headers = {"host": "proxy.example", "x-api-key": "wrong"}
        name = httpx.get(f"{address}/v1/models", headers=headers).headers["x-request-id"]
        line = next(line for line in lines if name in line)
        assert f"{name} GET /v1/models 401" in line and line.endswith("from 127.0.0.1\n")
    finally:
        first.terminate()
        rest = first.communicate(timeout=PATIENCE_S)[1]
    assert first.returncode == 0 and "stopped" in rest


@pytest.fixture(scope="module")
def with_sampling(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with settings of sampling in its file."""
    source = Path(tiny)
    document = read_gguf(source)
    data = source.read_bytes()
    head = data[: document.data_offset]
    count, keys = keys_of(document, head)
    key = i32("general.sampling.top_k", 33) + f32("general.sampling.temp", 0.25)
    key += f32("general.sampling.top_p", 0.75)
    key += text("filler", "x" * (-(len(key) + 8 + 6 + 4 + 8) % 32))  # data stays aligned
    more = struct.pack("<Q", count + 4)
    model = tmp_path_factory.mktemp("sampling") / "model.gguf"
    model.write_bytes(
        head[:16] + more + keys + key + head[24 + len(keys) :] + data[document.data_offset :]
    )
    return model


@pytest.mark.model
def test_a_chat_samples_as_the_file_says(command: Command, with_sampling: Path, tiny: str) -> None:
    """It was greedy, and small models wrote in loops. The command line comes first."""

    def shown(*arguments: str) -> dict[str, float]:
        done = command("chat", *arguments, "--ctx", "256", stdin="/params\n")
        told = dict(line.split() for line in done.err.splitlines() if len(line.split()) == 2)
        return {name: float(told[name]) for name in ("temperature", "top_k", "top_p")}

    file = str(with_sampling)
    assert shown(file) == pytest.approx({"temperature": 0.25, "top_k": 33, "top_p": 0.75})
    given = shown(file, "--temperature", "0", "--top-p", "0.5")
    assert given == {"temperature": 0, "top_k": 33, "top_p": 0.5}
    assert shown() == {"temperature": 0.8, "top_k": 0, "top_p": 1}


@pytest.mark.slow
@pytest.mark.model
def test_the_defaults_of_requests_are_those_of_the_file(with_sampling: Path, measured: str) -> None:
    """Unless the command line says otherwise."""
    server = start(
        ["serve", str(with_sampling), "--ctx", "256", "--port", "0", "--top-p", "0.5"],
        measured,
    )
    assert server.stderr is not None
    try:
        lines = iter(server.stderr.readline, b"")
        address = next(one for one in lines if b"listening on" in one).split()[2].rstrip(b";")
        told = httpx.get(f"{address.decode()}/props").json()["default_generation_settings"]
        found = {name: told["params"][name] for name in ("temperature", "top_k", "top_p")}
        assert found == pytest.approx({"temperature": 0.25, "top_k": 33, "top_p": 0.5})
    finally:
        server.terminate()
        server.communicate(timeout=PATIENCE_S)
