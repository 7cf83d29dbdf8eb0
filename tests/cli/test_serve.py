"""`edgespec serve` before there is a server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.cli.serve import _keys_of
from edgespec.errors import UnsupportedError

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
