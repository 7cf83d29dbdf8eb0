"""A Hugging Face folder as an ONNX model folder, through optimum's exporter.

Any decoder that transformers and optimum know: traced with an attention mask of its own for every
pair of tokens, so that trees can be verified, compared with transformers, cut to the contract of
`onnx_contract`, and quantized by ONNX Runtime in blocks of 32 (weights only: activations that share
one scale would make a token's logits depend on the others of its step). The folder appears whole or
not at all. torch, transformers and optimum are imported only here, and only when something is
exported.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
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
from edgespec.models.onnx_contract import cache_shapes, halve_tables, split_linear, to_contract
from edgespec.models.onnx_folder import (
    CONTRACT_VERSION,
    FACTS_FILE,
    GRAPH_FILE,
    TEXT_FILES,
    WEIGHTS_FILE,
)

Progress = Callable[[str, float], None]

_SMALL_MODEL = 500_000_000  # parameters; below, 4 bits cost too much quality
_BLOCK, _ACCURACY_LEVEL = 32, 4
_DISK_BYTES_PER_PARAMETER = 13  # two graphs in float32, a tied head written out, and the result
_EXTERNAL_FROM = 1024  # bytes; smaller tensors lie in the graph
_PROBE_TOKENS, _PROBE_PAST = 40, 23
_SAME = 1e-2  # of the spread of the logits; float32 rounds a hundred times finer
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
    target.parent.mkdir(parents=True, exist_ok=True)
    _require_space(parameters, target.parent)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        with _quiet():
            _Export(source, work, bits or (8 if parameters < _SMALL_MODEL else 4), progress).run()
        os.replace(work / "done", target)
    except OSError as problem:
        raise UnsupportedError(
            f"cannot write {target}: {problem.strerror or problem}", hint="make room, or use -o"
        ) from problem
    finally:
        shutil.rmtree(work, ignore_errors=True)


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
        import onnxruntime.quantization.matmul_nbits_quantizer
        import optimum.exporters.onnx
        import torch
        import transformers  # noqa: F401
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
        model = _load(self.source)
        windows = _windows(model)
        self.progress("comparing", 0.15)
        ids, expected = _reference(model)
        self.progress("tracing the model", 0.2)
        _trace(model, self.work / "traced.onnx", windows)
        facts = _facts(model, self.source, windows, self.bits)
        del model
        self.progress("cutting the graph", 0.5)
        graph = self._cut(windows)
        facts.update(_shapes(graph), vocab_size=expected.shape[1])
        self.progress("comparing", 0.6)
        _compare(_Runner(self.work / "exact" / GRAPH_FILE, facts), ids, expected)
        self.progress("quantizing", 0.7)
        self._quantize(graph, facts)
        self.progress("comparing", 0.95)
        _check_finite(_Runner(self.work / "done" / GRAPH_FILE, facts), ids)
        self.progress("exporting", 1.0)

    def _cut(self, windows: tuple[bool, ...]) -> Any:
        import onnx

        graph = onnx.load_model(str(self.work / "traced.onnx"))
        for file in self.work.glob("traced.onnx*"):
            file.unlink()
        split_linear(graph)
        to_contract(graph, windows)
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
        facts["table_bytes"] = _table_bytes(quantized)
        (folder / FACTS_FILE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


# -- the model in torch --------------------------------------------------------------------


def _load(source: Path) -> Any:
    """The model in float32. Raises UnsupportedError for an architecture nobody knows."""
    import optimum.exporters.onnx.model_configs  # noqa: F401  (registers the architectures)
    import torch
    from optimum.exporters.tasks import TasksManager
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True)
        TasksManager.get_exporter_config_constructor(
            "onnx",
            model_type=config.model_type,
            task="text-generation-with-past",
            library_name="transformers",
        )
    except (ValueError, KeyError) as error:
        named = json.loads((source / "config.json").read_text(encoding="utf-8"))
        raise UnsupportedError(
            f"optimum cannot export the architecture {named.get('model_type', '(none)')!r}",
            hint="convert this model to GGUF instead",
        ) from error
    # Only the plain implementation caps attention scores.
    eager = getattr(config, "attn_logit_softcapping", None)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=torch.float32,
            local_files_only=True,
            **({"attn_implementation": "eager"} if eager else {}),
        )
    except (ValueError, KeyError, RuntimeError, OSError) as error:
        raise BackendError(f"transformers cannot load {source}: {_line(error)}") from error
    return model.eval()


def _windows(model: Any) -> tuple[bool, ...]:
    """Whether each layer slides. Raises UnsupportedError for layers that do something else."""
    config = model.config
    kinds = getattr(config, "layer_types", None) or []
    odd = set(kinds) - {"full_attention", "sliding_attention"}
    if odd:
        raise UnsupportedError(
            f"{config.model_type} has layers of {', '.join(sorted(odd))}, which keep other states "
            f"than keys and values",
            hint="convert this model to GGUF instead",
        )
    if not getattr(config, "sliding_window", None):
        return (False,) * config.num_hidden_layers
    if kinds:
        return tuple(kind == "sliding_attention" for kind in kinds)
    slides = hasattr(_module(model), "create_sliding_window_causal_mask")
    return (slides,) * config.num_hidden_layers


def _module(model: Any) -> Any:
    return sys.modules[type(model).__module__]


def _reference(model: Any) -> tuple[Any, Any]:
    """Some tokens and transformers' logits for them, [n] and [n, V]."""
    import torch

    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, _PROBE_TOKENS)
    with torch.no_grad():
        logits = model(torch.from_numpy(ids)[None], use_cache=False).logits[0]
    return ids, logits.float().numpy()


def _trace(model: Any, path: Path, windows: tuple[bool, ...]) -> None:
    from optimum.exporters.onnx.convert import export_pytorch

    config = _exporter_config(model, num_masks=len(set(windows)))
    try:
        with _several_masks(model) if any(windows) else contextlib.nullcontext():
            export_pytorch(
                model,
                config,
                opset=config.DEFAULT_ONNX_OPSET,
                output=path,
                input_shapes={"batch_size": 1},
            )
    except Exception as error:  # whatever tracing runs into
        raise BackendError(
            f"optimum cannot export this {model.config.model_type} model: {_line(error)}",
            hint="convert it to GGUF instead",
        ) from error


def _exporter_config(model: Any, num_masks: int) -> Any:
    """Optimum's description of the architecture, with masks for pairs of tokens."""
    import inspect
    from functools import partial

    import torch
    from optimum.exporters.tasks import TasksManager

    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedError(
            f"{model.config.model_type} models count positions themselves, so drafts cannot be "
            f"verified",
            hint="convert this model to GGUF instead",
        )
    known = TasksManager.get_exporter_config_constructor(
        "onnx", model=model, task="text-generation-with-past", library_name="transformers"
    )
    base: Any = known.func if isinstance(known, partial) else known

    class WithMasks(base):  # type: ignore[misc]
        @property
        def inputs(self) -> dict[str, dict[int, str]]:
            inputs = dict(super().inputs)
            inputs["attention_mask"] = {2: "n", 3: "total"}
            inputs["position_ids"] = {1: "n"}
            return inputs

        def generate_dummy_inputs(self, framework: str = "pt", **shapes: Any) -> dict[str, Any]:
            inputs: dict[str, Any] = super().generate_dummy_inputs(framework, **shapes)
            count, past = inputs["input_ids"].shape[1], inputs["past_key_values"][0][0].shape[2]
            inputs["position_ids"] = torch.arange(past, past + count)[None]
            inputs["attention_mask"] = torch.zeros(1, num_masks, count, past + count)
            return inputs

    return WithMasks(model.config, task="text-generation", use_past=True, use_past_in_inputs=True)


@contextlib.contextmanager
def _several_masks(model: Any) -> Iterator[None]:
    """Let layers take their mask from those given: the first one, or the last one if they slide."""
    module, saved = _module(model), {}
    for name, place in (
        ("create_causal_mask", slice(0, 1)),
        ("create_sliding_window_causal_mask", slice(-1, None)),
    ):
        if hasattr(module, name):
            saved[name] = getattr(module, name)
            setattr(module, name, _chosen_mask(place))
    if "create_sliding_window_causal_mask" not in saved:
        raise UnsupportedError(
            f"{model.config.model_type} makes the masks of its sliding layers in a way that cannot "
            f"be exported",
            hint="convert this model to GGUF instead",
        )
    try:
        yield
    finally:
        for name, function in saved.items():
            setattr(module, name, function)


def _chosen_mask(place: slice) -> Callable[..., Any]:
    def choose(*_arguments: Any, attention_mask: Any, **_others: Any) -> Any:
        return attention_mask[:, place]

    return choose


# -- facts ---------------------------------------------------------------------------------


def _facts(model: Any, source: Path, windows: tuple[bool, ...], bits: int) -> dict[str, Any]:
    """What the graph itself does not tell; sizes are in tokens and numbers."""
    config = model.config
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


def _table_bytes(graph: Any) -> int:
    """Bytes of tables of which only rows are read."""
    looked_up = {node.input[0] for node in graph.graph.node if node.op_type == "Gather"}
    tables = [t for t in graph.graph.initializer if t.name in looked_up and len(t.dims) == 2]
    width = {10: 2}  # float16
    return sum(int(np.prod(t.dims)) * width.get(t.data_type, 4) for t in tables)


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


# -- comparing -----------------------------------------------------------------------------


class _Runner:
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
                f"ONNX Runtime cannot load the export: {_line(error)}",
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
                inputs[name] = np.where(seen, 0, -1e4).astype(np.float32)[None, None]
        names = ["logits", *(name.replace("past", "new") for name in past)]
        logits, *new = self.session.run(names, inputs)
        grown = [np.concatenate((old, rows), 2) for old, rows in zip(past.values(), new)]
        return logits, dict(zip(past, grown, strict=True))


def _compare(runner: _Runner, ids: Any, expected: Any) -> None:
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


def _check_finite(runner: _Runner, ids: Any) -> None:
    sees = np.tril(np.ones((len(ids), len(ids)), bool))
    logits, _ = runner.step(ids, range(len(ids)), sees, runner.past)
    if not np.isfinite(logits).all():
        raise BackendError(
            "the quantized graph gives logits that are no numbers", hint="try --bits 8"
        )


def _line(error: Exception) -> str:
    """The first line of an exception's own words."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
