"""A Hugging Face folder as an ONNX model folder, through optimum's exporter.

Any decoder that transformers and optimum know: traced with an attention mask of its own for every
pair of tokens, so that trees can be verified, compared with transformers, cut to the contract of
`contract`, and quantized by ONNX Runtime in blocks of 32 (weights only: activations that share
one scale would make a token's logits depend on the others of its step). The folder appears whole or
not at all. torch, transformers and optimum are imported only when something is exported.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.errors import (
    BackendError,
    MissingDependencyError,
    ModelFileError,
    ModelNotFoundError,
    UnsupportedError,
)
from edgespec.models.onnx.folder import (
    CONTRACT_VERSION,
    FACTS_FILE,
    GRAPH_FILE,
    TEXT_FILES,
    WEIGHTS_FILE,
)
from edgespec.models.onnx_export.contract import (
    cache_shapes,
    freeze_shapes,
    halve_tables,
    split_linear,
    to_contract,
)
from edgespec.models.onnx_export.torch_decoder import (
    first_line,
    load_model,
    reference_logits,
    sliding_layers,
    trace_model,
)
from edgespec.models.writing import making, put_in_place, refusing
from edgespec.progress import Progress

_PROBE_PAST = 23
_SAME = 1e-2  # of the spread of the logits; float32 rounds a hundred times finer
_MASKED = -1e4


class ExportedGraph:
    """One step of a graph after the other, with all keys and values kept here."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        try:
            self.session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            raise BackendError(
                f"ONNX Runtime cannot load the export: {first_line(error)}",
                hint="convert this model to GGUF instead",
            ) from error
        self.window = facts["sliding_window"]
        self.past = {
            f"past_{what}.{layer}": np.zeros((1, heads, 0, length), np.float32)
            for layer, heads in enumerate(facts["num_kv_heads"])
            for what, length in (
                ("key", facts["key_length"][layer]),
                ("value", facts["value_length"][layer]),
            )
        }

    def step(self, ids: Any, positions: Any, sees: Any, past: dict[str, Any]) -> tuple[Any, Any]:
        """Logits [n, V] and the past with the new rows; `sees` is [n, past + n], true or false."""
        inputs = {
            "input_ids": np.asarray(ids, np.int64)[None],
            "position_ids": np.asarray(positions, np.int64)[None],
            "rows": np.arange(len(ids)),
            **past,
        }
        cells = np.concatenate((np.arange(sees.shape[1] - len(ids)), positions))
        near = np.asarray(positions)[:, None] - cells[None] < self.window
        wanted = {value.name for value in self.session.get_inputs()}
        for name, seen in (
            ("attention_bias", sees),
            ("attention_bias_window", sees & near),
        ):
            if name in wanted:
                inputs[name] = np.where(seen, 0, _MASKED).astype(np.float32)[None, None]
        names = ["logits", *(name.replace("past", "new") for name in past)]
        logits, *new = self.session.run(names, inputs)
        grown = [
            np.concatenate((old, rows), 2) for old, rows in zip(past.values(), new, strict=True)
        ]
        return logits, dict(zip(past, grown, strict=True))


def require_same_logits(runner: ExportedGraph, ids: Any, expected: Any) -> None:
    """Refuse a graph that computes anything else than transformers, on a chain or on a tree."""
    limit = _SAME * float(expected.std())
    count, past = len(ids), _PROBE_PAST
    causal = np.tril(np.ones((count, count), bool))
    first, cache = runner.step(ids[:past], range(past), causal[:past, :past], runner.past)
    second, _ = runner.step(ids[past:], range(past, count), causal[past:], cache)
    chain = float(np.abs(np.concatenate((first, second)) - expected).max())
    # Two copies of the rest as branches: node after node of one, then of the other.
    rest = count - past
    sees = np.zeros((2 * rest, past + 2 * rest), bool)
    sees[:, :past] = True
    sees[:rest, past : past + rest] = sees[rest:, past + rest :] = causal[:rest, :rest]
    places = [*range(past, count)] * 2
    branches, _ = runner.step([*ids[past:], *ids[past:]], places, sees, cache)
    tree = float(np.abs(branches - np.concatenate((expected[past:],) * 2)).max())
    if not max(chain, tree) <= limit:
        raise UnsupportedError(
            f"the exported graph does not compute what transformers does: logits differ by "
            f"{chain:.3g} on a chain and {tree:.3g} on a tree, where {limit:.3g} is rounding",
            hint="convert this model to GGUF instead",
        )


def require_finite_logits(runner: ExportedGraph, ids: Any) -> None:
    sees = np.tril(np.ones((len(ids), len(ids)), bool))
    logits, _ = runner.step(ids, range(len(ids)), sees, runner.past)
    if not np.isfinite(logits).all():
        raise BackendError(
            "the quantized graph gives logits that are no numbers", hint="try --bits 8"
        )


_QUANTIZER = "onnxruntime.quantization.matmul_nbits_quantizer"

_PACKAGES = ("torch", "transformers", "optimum.exporters.onnx", "onnx", _QUANTIZER)

_SMALL_MODEL = 500_000_000  # parameters; below, 4 bits cost too much quality
_BLOCK, _ACCURACY_LEVEL = 32, 4
_DISK_BYTES_PER_PARAMETER = 13  # two graphs in float32, a tied head written out, and the result
_EXTERNAL_FROM = 1024  # bytes; smaller tensors lie in the graph
# Positions beyond what these were first trained for are rotated differently from there on, which
# a traced graph cannot decide.
_SWITCHING_ROTATIONS = ("dynamic", "longrope")


def export_model(
    source: Path,
    target: Path,
    *,
    bits: int | None = None,
    progress: Progress = lambda _what, _fraction: None,
) -> None:
    """Export a local Hugging Face folder to a new folder `target`.

    Args:
        bits: 4 or 8 for a weight; None takes 8 below half a billion parameters, else 4.
        progress: called with what is being done and which part of everything is done.

    Raises:
        ModelNotFoundError, ModelFileError: there is no Hugging Face model in the folder.
        MissingDependencyError: the `export` extra is not installed.
        UnsupportedError: optimum does not know the architecture or the graph differs from it;
            the target exists already; the disk is too full.
        BackendError: the exporter failed, with its own words.
    """
    _require_source(source)
    _require_packages()
    if target.exists():
        raise UnsupportedError(
            f"{target} exists already", hint="name another folder with -o, or remove it"
        )
    parameters = count_parameters(source)
    bits = bits or (8 if parameters < _SMALL_MODEL else 4)
    with refusing(target, "make room, or use -o"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with making(target) as work:
            _require_space(parameters, target.parent)
            work.mkdir()
            with _quiet():
                _Export(source, work, bits, progress).run()
            put_in_place(work / "done", target)


def count_parameters(source: Path) -> int:
    """Numbers in the safetensors files of a folder, from their headers.

    A file begins with the length of its header, u64 little-endian, and the header as JSON.
    """
    total = 0
    for path in sorted(source.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
            total += sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes)
        except (ValueError, KeyError, TypeError, AttributeError, MemoryError, OverflowError) as bad:
            raise ModelFileError(
                f"{path} is not a safetensors file", hint="download it again"
            ) from bad
    return total


def _require_source(source: Path) -> None:
    if not source.is_dir():
        raise ModelNotFoundError(
            f"{source} is not a folder", hint="name the folder that holds config.json"
        )
    for name, hint in (
        ("config.json", "name the folder of a Hugging Face model"),
        ("tokenizer.json", "save it there with transformers: AutoTokenizer...save_pretrained"),
    ):
        if not (source / name).is_file():
            raise ModelFileError(f"{source} has no {name}", hint=hint)
    if not any(source.glob("*.safetensors")):
        raise ModelFileError(
            f"{source} has no weights (*.safetensors)", hint="download them, or save them there"
        )


def _require_packages() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported
    try:
        for name in _PACKAGES:
            importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError(
            f"exporting needs torch, transformers and optimum-onnx ({error})",
            hint="pip install 'edgespec[export]'",
        ) from error


def _require_space(parameters: int, folder: Path) -> None:
    needed, free = _DISK_BYTES_PER_PARAMETER * parameters, shutil.disk_usage(folder).free
    if free < needed:
        raise UnsupportedError(
            f"exporting this model takes {needed >> 20} MiB of disk for a moment, and "
            f"{free >> 20} MiB are free in {folder}",
            hint="make room, or name a folder on a larger disk with -o",
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Tracing warns about everything it cannot prove; the result is compared instead."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class _Export:
    def __init__(self, source: Path, work: Path, bits: int, progress: Progress) -> None:
        self.source, self.work, self.bits, self.progress = source, work, bits, progress

    def run(self) -> None:
        self.progress("loading the weights", 0.0)
        model = load_model(self.source)
        windows = sliding_layers(model)
        self.progress("comparing", 0.15)
        ids, expected = reference_logits(model)
        self.progress("tracing the model", 0.2)
        trace_model(model, self.work / "traced.onnx", windows)
        facts = _facts(model, self.source, windows, self.bits)
        del model
        self.progress("cutting the graph", 0.5)
        graph = self._cut(windows)
        facts.update(_shapes(graph), vocab_size=expected.shape[1])
        self.progress("comparing", 0.6)
        require_same_logits(ExportedGraph(self.work / "exact" / GRAPH_FILE, facts), ids, expected)
        self.progress("quantizing", 0.7)
        self._quantize(graph, facts)
        self.progress("comparing", 0.95)
        require_finite_logits(ExportedGraph(self.work / "done" / GRAPH_FILE, facts), ids)
        self.progress("exporting", 1.0)

    def _cut(self, windows: tuple[bool, ...]) -> Any:
        import onnx

        graph = onnx.load_model(str(self.work / "traced.onnx"))
        for file in self.work.glob("traced.onnx*"):
            file.unlink()
        split_linear(graph)
        to_contract(graph, windows)
        freeze_shapes(graph)
        _save(graph, self.work / "exact")
        return onnx.load_model(str(self.work / "exact" / GRAPH_FILE))

    def _quantize(self, graph: Any, facts: dict[str, Any]) -> None:
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

        quantizer = MatMulNBitsQuantizer(
            graph,
            bits=self.bits,
            block_size=_BLOCK,
            is_symmetric=True,
            accuracy_level=_ACCURACY_LEVEL,
        )
        quantizer.process()
        quantized = quantizer.model.model
        halve_tables(quantized)
        folder = self.work / "done"
        _save(quantized, folder)
        for name in TEXT_FILES:
            if (self.source / name).is_file():
                shutil.copyfile(self.source / name, folder / name)
        # Of tables only rows are read.
        looked_up = {node.input[0] for node in quantized.graph.node if node.op_type == "Gather"}
        found = (tensor for tensor in quantized.graph.initializer if tensor.name in looked_up)
        width = {10: 2}  # float16
        facts["table_bytes"] = sum(
            int(np.prod(one.dims)) * width.get(one.data_type, 4)
            for one in found
            if len(one.dims) == 2
        )
        (folder / FACTS_FILE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


# -- facts ---------------------------------------------------------------------------------


def _facts(model: Any, source: Path, windows: tuple[bool, ...], bits: int) -> dict[str, Any]:
    """What the graph itself does not tell; sizes are in tokens and numbers."""
    config = model.config.get_text_config()
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return {
        "contract": CONTRACT_VERSION,
        "arch": config.model_type,
        "name": source.resolve().name,
        "bits": bits,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "context_length": _context_length(config),
        "embedding_size": config.hidden_size,
        "feed_forward_size": inner if isinstance(inner, int) else max(inner),
        "num_heads": config.num_attention_heads,
        "sliding_window": config.sliding_window if any(windows) else 0,
        "is_sliding": list(windows),
    }


def _context_length(config: Any) -> int:
    trained = int(getattr(config, "max_position_embeddings", 0) or 0) or 2048
    scaling = getattr(config, "rope_scaling", None) or {}
    if scaling.get("rope_type", scaling.get("type")) in _SWITCHING_ROTATIONS:
        before = getattr(config, "original_max_position_embeddings", None)
        before = before or scaling.get("original_max_position_embeddings")
        return int(before or trained)
    return trained


def _shapes(graph: Any) -> dict[str, list[int]]:
    heads, keys, values = zip(*cache_shapes(graph), strict=True)
    return {
        "num_kv_heads": list(heads),
        "key_length": list(keys),
        "value_length": list(values),
    }


def _save(graph: Any, folder: Path) -> None:
    """Write the graph and, beside it, its weights, which can be mapped."""
    import onnx

    folder.mkdir()
    onnx.save_model(
        graph,
        str(folder / GRAPH_FILE),
        save_as_external_data=True,
        all_tensors_to_one_file=True,
        location=WEIGHTS_FILE,
        size_threshold=_EXTERNAL_FROM,
    )
