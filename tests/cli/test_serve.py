"""`edgespec serve` before there is a server."""

from __future__ import annotations

import subprocess
import sys

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
