"""`edgespec bench` as the tables of README and docs have it: 192 tokens, nothing known beforehand.

    python benchmarks/specbench.py MODEL --prompts FILE [--per-task K] [--exact] [--backend onnx]

Every option of `edgespec bench` is passed on. What this adds is an empty cache directory: step
times are measured anew, and no drafter knows what earlier runs counted.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile


def main() -> int:
    """Run the command; its exit status."""
    command = [sys.executable, "-m", "edgespec.cli.main", "bench", "--max-tokens", "192"]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "EDGESPEC_CACHE": folder}
        return subprocess.run([*command, *sys.argv[1:]], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
