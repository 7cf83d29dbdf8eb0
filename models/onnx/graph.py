"""A GGUF model as ONNX graphs for ONNX Runtime, in one of two flavours (`models/onnx/gqa.py`,
`models/onnx/split.py`), or cut into a shallow and a deep part.

Embeddings are looked up outside (in the GGUF itself), so the table is not stored twice, and rows of
logits are chosen before the head. Graphs that are written together share one file of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from edgespec.models.onnx.decoder import Decoder
from edgespec.models.onnx.facts import GQA, SPLIT, GraphFacts, GraphOptions
from edgespec.models.onnx.gqa import GqaDecoder
from edgespec.models.onnx.packing import check_supported
from edgespec.models.onnx.split import SplitDecoder
from edgespec.models.onnx.writer import WEIGHTS_FILE, WeightsFile, onnx_module
from edgespec.models.spec import ModelSpec

GRAPH_VERSION = 3
_FLAVOURS: dict[str, type[Decoder]] = {GQA: GqaDecoder, SPLIT: SplitDecoder}


def write_graphs(
    spec: ModelSpec,
    facts: GraphFacts,
    folder: Path,
    graphs: Mapping[str, GraphOptions],
    progress: Callable[[float], None] = lambda _fraction: None,
) -> None:
    """Write several graphs of one flavour, by file name, that share `weights.bin`.

    Both are written into an existing folder. Raises UnsupportedError for a model that cannot be
    expressed, OSError when the disk is full.
    """
    check_supported(spec)
    onnx = onnx_module()
    with (folder / WEIGHTS_FILE).open("w+b") as file:
        weights = WeightsFile(spec, file, progress)
        models = {
            name: _FLAVOURS[options.flavour](spec, facts, options, weights).build()
            for name, options in graphs.items()
        }
    for name, model in models.items():
        onnx.save_model(model, str(folder / name))


def bucket_graphs(
    steps: tuple[int, ...], capacity: int, options: GraphOptions
) -> dict[str, GraphOptions]:
    """Graphs of fixed shapes: one for each number of nodes, over a cache of `capacity` cells."""
    return {f"step-{step}.onnx": replace(options, step=step, capacity=capacity) for step in steps}
