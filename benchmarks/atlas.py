"""Bytes that llama.cpp says models would take, against what they take when they are loaded.

    python benchmarks/atlas.py FOLDER [--kernels] [--users 4] [--kv-type q8_0]

FOLDER has GGUF files, such as llama.cpp's `test-llama-archs -s 7 -o FOLDER` writes: one or two tiny
random models of every architecture it can build. Each is asked about by its skeleton, then loaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from edgespec.backends.base import Capabilities
from edgespec.backends.llama.context import LlamaContext
from edgespec.backends.llama.simulator import SimulatedContext, allocated
from edgespec.errors import BackendError, ModelFileError
from edgespec.memory.bytes.shape import RunShape
from edgespec.memory.bytes.simulation import Bytes, Wanted, simulated, simulating
from edgespec.models.spec import ModelSpec, read_model_spec

_REFUSED = "refused"  # such as a cache of blocks that no head is a multiple of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--users", type=int, default=1)
    parser.add_argument("--kv-type", default="f16")
    options = parser.parse_args()
    kinds = {"type_k": options.kv_type, "type_v": options.kv_type}
    shape = RunShape(
        1024, 64, 8, threads=2, kernels=options.kernels, sequences=options.users, **kinds
    )
    right = wrong = 0
    with simulating():
        for spec in _models(options.folder):
            said, taken = _said(spec, shape), _taken(spec, shape)
            right, wrong = right + (said == taken), wrong + (said != taken)
            if said != taken:
                print(f"{spec.path.name}: said {said}, took {taken}")
    print(f"{right} of {right + wrong} files right to the byte")


def _models(folder: Path) -> Iterator[ModelSpec]:
    for path in sorted(folder.glob("*.gguf")):
        try:
            yield read_model_spec(path, heads=True)
        except ModelFileError as problem:
            print(f"{path.name}: {problem}")


def _said(spec: ModelSpec, shape: RunShape) -> dict[str, Bytes] | str:
    try:
        return dict(simulated([Wanted(spec, shape)])[0])
    except BackendError:
        return _REFUSED


def _taken(spec: ModelSpec, shape: RunShape) -> dict[str, Bytes] | str:
    """Of the file itself, loaded and allocated."""
    settings = replace(SimulatedContext(shape, 0).settings, tied=spec.tied_embeddings, mapped=False)
    context = LlamaContext(settings)
    try:
        context._load(str(spec.path), None)
        context.capabilities = Capabilities(True, False, True)
        context._make_context(lambda _params: None)
        return allocated(context)
    except BackendError:
        return _REFUSED
    finally:
        context.close()


if __name__ == "__main__":
    main()
