"""A model on an execution provider of ONNX Runtime: is it there, is it right, how fast is it?

    python benchmarks/providers.py MODEL [--provider NAME] [--kind cpu|gpu|npu] [--option KEY=VALUE]

Needs one of these beside edgespec and `onnx`, each in an environment of its own:

    pip install onnxruntime                          # CPUExecutionProvider
    pip install onnxruntime-openvino                 # OpenVINOExecutionProvider; no `onnxruntime`
    pip install onnxruntime onnxruntime-qnn          # QNNExecutionProvider; x86 has an emulator:
        --provider QNNExecutionProvider --kind cpu --fixed --plain --tokens 16 --repeats 2
        --option backend_path=emulator --option htp_arch=73 --option soc_model=60
    pip install onnxruntime-gpu                      # CUDAExecutionProvider
    pip install onnxruntime-directml                 # DmlExecutionProvider (Windows)

Prints the share of the graph's nodes that the provider runs, the distance to llama.cpp on the same
file (teacher-forced greedy text), how far a tree's logits are from those of its paths as chains,
and ms a step (median).
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from logits import compared, context_for, log_probabilities, reference

from edgespec.backends.ort.backend import OrtBackend, OrtSettings
from edgespec.backends.ort.cache import converted
from edgespec.backends.ort.providers import (
    CPU_PROVIDER,
    STEPS,
    OnnxDevice,
    graphs_for,
    named,
)
from edgespec.backends.tree import DraftTree
from edgespec.memory.device import host
from edgespec.memory.store import cache
from edgespec.models.onnx.facts import GQA, SPLIT, GraphOptions, read_facts
from edgespec.models.onnx.folder import GRAPH_FILE
from edgespec.models.onnx.graph import bucket_graphs
from edgespec.models.spec import ModelSpec, read_model_spec

_SIZES = (1, 2, 4, 8, 16)
_PAST = 256
# 13 nodes with 3 branchings.
_TREE = (-1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 7, 8, 10)


def main() -> None:
    arguments = _arguments()
    spec = read_model_spec(arguments.model)
    context = max(context_for(arguments.tokens), _PAST + 2 * max(_SIZES))
    options = dict(option.split("=", 1) for option in arguments.option)
    place = named(arguments.provider, arguments.kind, _resolved(options))
    prompt, text, theirs = reference(arguments.model, arguments.tokens)
    start = perf_counter()
    backend = _opened(spec, place, context, arguments)
    took = perf_counter() - start
    print(f"{arguments.model.name} on {place.provider} ({place.kind}), {context} tokens of context")
    print(f"nodes on the provider: {backend.node_share:.1%}; ready after {took:.1f} s", flush=True)
    divergence, agreement = compared(theirs, log_probabilities(backend, prompt, text))
    print(f"against llama.cpp: KL {divergence:.4f}, top-1 {agreement:.3f}", flush=True)
    error, same = _tree_error(backend, prompt, text)
    print(f"a tree against its paths: largest difference {error:.2g}, top-1 {same:.3f}", flush=True)
    for size, milliseconds in _step_times(backend, arguments.repeats).items():
        print(f"n={size:<3} {milliseconds:8.2f} ms", flush=True)
    backend.close()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--provider", default=CPU_PROVIDER)
    parser.add_argument("--kind", default="cpu", choices=("cpu", "gpu", "npu"))
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--flavour", choices=(GQA, SPLIT), help="default: what the device wants")
    parser.add_argument("--fixed", action="store_true", help="graphs of fixed shapes")
    parser.add_argument("--plain", action="store_true", help="float32 weights, no MatMulNBits")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=host.usable_cores())
    return parser.parse_args()


def _resolved(options: dict[str, str]) -> dict[str, str]:
    """The library behind `backend_path=emulator`: the one QNN's package has for this processor."""
    if options.get("backend_path") == "emulator":
        import onnxruntime_qnn

        options["backend_path"] = onnxruntime_qnn.get_qnn_htp_path()
    return options


def _opened(
    spec: ModelSpec, place: OnnxDevice, context: int, arguments: argparse.Namespace
) -> OrtBackend:
    wanted = graphs_for(place, context)
    if arguments.flavour or arguments.fixed or arguments.plain:
        options = GraphOptions(arguments.flavour or SPLIT, plain=arguments.plain)
        is_fixed = arguments.fixed
        steps = [size for size in STEPS if size <= max(_SIZES)]
        wanted = (
            bucket_graphs(tuple(steps), context, options) if is_fixed else {GRAPH_FILE: options}
        )
    folder = converted(spec, cache.cache_directory() / "onnx", host.cpu_name(), graphs=wanted)
    settings = OrtSettings(context, 64, max(_SIZES), threads=arguments.threads)
    return OrtBackend(spec, read_facts(spec), folder, settings, place)


def _tree_error(backend: Any, prompt: list[int], text: list[int]) -> tuple[float, float]:
    """Largest difference of a logit, and how often the best token is the same."""
    nodes = (text * len(_TREE))[: len(_TREE)]
    tree = DraftTree(nodes, _TREE)
    backend.truncate(0)
    _fill(backend, prompt)
    rows = backend.verify(tree).copy()
    errors, same = [], []
    for leaf in tree.leaves():
        path = tree.path(leaf)
        chain = backend.verify(DraftTree.chain([nodes[node] for node in path]))
        errors.append(float(np.abs(chain - rows[path]).max()))
        same += list(chain.argmax(axis=-1) == rows[path].argmax(axis=-1))
    return max(errors), float(np.mean(same))


def _fill(backend: Any, tokens: list[int]) -> None:
    for start in range(0, len(tokens), backend.batch_size):
        backend.prefill(tokens[start : start + backend.batch_size])


def _step_times(backend: Any, repeats: int) -> dict[int, float]:
    """Median ms of a step over so many tokens, behind _PAST tokens."""
    backend.truncate(0)
    _fill(backend, list(range(100, 100 + _PAST)))
    times = {}
    for size in _SIZES:
        tree, found = DraftTree.chain(range(100, 100 + size)), []
        for _ in range(repeats + 1):
            start = perf_counter()
            backend.verify(tree)
            found.append((perf_counter() - start) * 1e3)
        times[size] = statistics.median(found[1:])
    return times


if __name__ == "__main__":
    main()
