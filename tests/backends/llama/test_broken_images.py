"""Mutated images through the checks of sizes and libmtmd's decoder: no crash, and no hang.

In a process of its own: a decoder that crashes takes its process with it. More of them:

    EDGESPEC_FUZZ=20 pytest tests/backends/llama/test_broken_images.py --slow
"""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from command_line import with_imports
from vision_cases import open_backend
from vision_gguf import bmp, jpeg, mutated, picture, png

from edgespec.errors import UnsupportedError
from edgespec.models.images import read_image

pytestmark = pytest.mark.model
COUNT = 120 * int(os.environ.get("EDGESPEC_FUZZ", "1"))


def whole_images() -> Iterator[bytes]:
    """Images of many kinds, each of which some decoder reads."""
    pixels = picture(3, 40, 30)
    yield from (png(pixels), bmp(pixels), jpeg(40, 30), jpeg(40, 30, progressive=True))
    image = PIL.Image.fromarray(pixels)
    forms = {
        "PNG": ("RGBA", "P", "L", "1", "I;16", "LA"),
        "JPEG": ("L", "CMYK"),
        "BMP": ("P", "L", "RGBA", "1"),
        "GIF": ("P", "L"),
        "WEBP": ("RGB",),
        "TIFF": ("RGB",),
    }
    for kind, modes in forms.items():
        for mode in modes:
            made = io.BytesIO()
            grey = PIL.Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) << 8)
            (grey if mode == "I;16" else image.convert(mode)).save(made, kind)
            yield made.getvalue()
    frames = [PIL.Image.fromarray(picture(seed, 40, 30)).convert("P") for seed in range(4)]
    moving = io.BytesIO()
    frames[0].save(moving, "GIF", save_all=True, append_images=frames[1:])
    yield moving.getvalue()


def look_at_all(folder: Path, count: int, seed: int) -> dict[str, int]:
    """How many of some mutated images were refused by their header, by the decoder, or read."""
    source, whole = random.Random(seed), list(whole_images())
    found = {"refused": 0, "broken": 0, "read": 0}
    backend = open_backend(folder, "llava")
    for number in range(count):
        data = mutated(whole[number % len(whole)], source)
        try:
            image = read_image(data)
        except UnsupportedError:
            found["refused"] += 1
            continue
        try:
            backend.image_pieces(image)
            found["read"] += 1
        except UnsupportedError:
            found["broken"] += 1
    backend.close()
    return found


def test_mutated_images_are_read_or_refused(vision_folder: Path) -> None:
    """Its seed is fixed, and its time is 10 times what it takes alone on a slow machine."""
    command = [sys.executable, __file__, str(vision_folder), str(COUNT)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60 + COUNT * 0.5,
        env=with_imports(),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    counts = dict(part.split("=") for part in done.stdout.split())
    assert sum(map(int, counts.values())) == COUNT
    assert min(map(int, counts.values())) > COUNT // 20, counts


if __name__ == "__main__":
    told = look_at_all(Path(sys.argv[1]), int(sys.argv[2]), 11)
    print(*(f"{name}={count}" for name, count in told.items()))
