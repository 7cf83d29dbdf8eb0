"""Step times with edgespec's matrix kernels and with llama.cpp's own, in turns.

    python benchmarks/kernels.py MODEL [--rounds 5] [--depth 128] [--sizes 1 4 8]
        [--kv-type q8_0] [--prompt 512] [--exact FILE] [--json OUT]

Both load the same file; steps of both alternate, and the median of the best of two counts. Beside
the times: what reading a prompt takes, how fast a plain step reads weights, and the divergence of
next-token distributions (KL, nats) over the tokens of a text, between the two and, with `--exact`
(the same weights: `edgespec quantize type MODEL FILE F32`), of each from that.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.context import LlamaSettings
from edgespec.backends.llama.kernels import attach
from edgespec.backends.tree import DraftTree
from edgespec.measure.timing import one_step, some_tokens
from edgespec.memory.bytes.footprint import multiplied_tensors
from edgespec.memory.device import host
from edgespec.memory.device.kernels import instruction_set
from edgespec.models.spec import ModelSpec, read_model_spec

SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)
_OURS, _THEIRS = "edgespec", "llama.cpp"
_TEXT = (
    "The train leaves at nine, and the station is far away. We should take the bus that stops "
    "behind the church, buy the tickets from the machine and look for seats on the left side, "
    "from where the sea can be seen after the second tunnel. def area(r): return 3.14159 * r * r"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--depth", type=int, default=128)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--kv-type", default="f16")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--exact", type=Path)
    parser.add_argument("--json", metavar="OUT")
    arguments = parser.parse_args()
    if reason := attach():
        raise SystemExit(f"no kernels here: {reason}")
    spec = read_model_spec(arguments.model)
    with ExitStack() as opened:
        backends = {
            name: opened.enter_context(closing(_open(spec, name == _OURS, arguments)))
            for name in (_THEIRS, _OURS)
        }
        document = {
            "model": arguments.model.name,
            "processor": host.cpu_name(),
            "instructions": instruction_set(),
            "threads": host.usable_cores(),
            "depth": arguments.depth,
            "kv_type": arguments.kv_type,
            "prompt": arguments.prompt,
            "step_ms": _step_ms(backends, arguments),
            "prompt_ms": _prompt_ms(backends, arguments.prompt),
            "kl": _divergences(backends, arguments),
        }
    read = sum(tensor.data_bytes for tensor in multiplied_tensors(spec))
    document["read_gb_per_s"] = {
        name: read / min(times.values()) / 1e6 for name, times in document["step_ms"].items()
    }
    _print(document)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(document, indent=1) + "\n")


def _open(spec: ModelSpec, ours: bool, arguments: argparse.Namespace) -> LlamaBackend:
    settings = LlamaSettings(
        context_size=max(arguments.prompt, arguments.depth) + 64,
        batch_size=128,
        max_nodes=max(arguments.sizes),
        max_leaves=1,
        threads=host.usable_cores(),
        gpu_layers=0,
        mapped=False,
        kv_type_k=arguments.kv_type,
        kv_type_v=arguments.kv_type,
        kernels=ours,
        tied=spec.tied_embeddings,
    )
    return LlamaBackend(spec.path, settings)


def _step_ms(
    backends: dict[str, LlamaBackend], arguments: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Milliseconds by step size, behind `--depth` tokens of context."""
    for backend in backends.values():
        _read(backend, some_tokens(backend, arguments.depth))
    sizes = arguments.sizes
    found: dict[str, dict[int, list[float]]] = {name: {n: [] for n in sizes} for name in backends}
    for _ in range(arguments.rounds):
        for nodes in sizes:
            for name, backend in backends.items():
                one_step(backend, nodes)
                found[name][nodes].append(min(_timed(backend, nodes) for _ in range(2)))
    return {
        name: {str(nodes): statistics.median(times) for nodes, times in by_size.items()}
        for name, by_size in found.items()
    }


def _timed(backend: LlamaBackend, nodes: int) -> float:
    start = perf_counter()
    one_step(backend, nodes)
    return (perf_counter() - start) * 1e3


def _prompt_ms(backends: dict[str, LlamaBackend], prompt: int) -> dict[str, float]:
    """Milliseconds to read a prompt: the best of two."""
    best = dict.fromkeys(backends, float("inf"))
    for _ in range(2):
        for name, backend in backends.items():
            start = perf_counter()
            _read(backend, some_tokens(backend, prompt))
            best[name] = min(best[name], (perf_counter() - start) * 1e3)
    return best


def _read(backend: LlamaBackend, tokens: Sequence[int]) -> None:
    backend.truncate(0)
    for start in range(0, len(tokens), backend.batch_size):
        backend.prefill(tokens[start : start + backend.batch_size])


def _divergences(
    backends: dict[str, LlamaBackend], arguments: argparse.Namespace
) -> dict[str, float]:
    """Mean KL divergence over the tokens of a text."""
    distributions = {name: _distributions(backend) for name, backend in backends.items()}
    result = {"between": _divergence(distributions[_THEIRS], distributions[_OURS])}
    if arguments.exact is not None:
        with closing(_open(read_model_spec(arguments.exact), False, arguments)) as backend:
            truth = _distributions(backend)
        result |= {name: _divergence(truth, one) for name, one in distributions.items()}
    return result


def _distributions(backend: LlamaBackend) -> NDArray[np.float64]:
    """Log-probabilities [tokens, V] behind every token of the text, token by token."""
    backend.truncate(0)
    tokens = backend.tokenizer.encode(_TEXT)
    backend.prefill(tokens[:1])
    rows = []
    for token in tokens[1:]:
        rows.append(np.array(backend.verify(DraftTree.chain((token,)))[0], np.float64))
        backend.commit((0,))
    logits = np.stack(rows)
    logits -= logits.max(axis=1, keepdims=True)
    log_sum: NDArray[np.float64] = np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logits - log_sum


def _divergence(of: NDArray[np.float64], by: NDArray[np.float64]) -> float:
    return float((np.exp(of) * (of - by)).sum(axis=1).mean())


def _print(document: dict[str, Any]) -> None:
    theirs, ours = (document["step_ms"][name] for name in (_THEIRS, _OURS))
    kind = f"{document['kv_type']} cache, {document['depth']} tokens in it"
    print(f"{document['model']}, {document['processor']}, {document['instructions']}, {kind}")
    print(f"{'tokens in a step':<18}" + "".join(f"{n:>8}" for n in theirs))
    for name, times in document["step_ms"].items():
        print(f"{name + ', ms':<18}" + "".join(f"{ms:>8.1f}" for ms in times.values()))
    print(f"{'times as fast':<18}" + "".join(f"{theirs[n] / ours[n]:>8.2f}" for n in theirs))
    for name, times in document["step_ms"].items():
        least = min(times.values())
        print(f"{name + ' / 1':<18}" + "".join(f"{ms / least:>8.2f}" for ms in times.values()))
    prompt = document["prompt_ms"]
    both = f"{prompt[_THEIRS]:.0f} and {prompt[_OURS]:.0f} ms"
    print(f"prompt of {document['prompt']}: {both}, {prompt[_THEIRS] / prompt[_OURS]:.2f}x")
    for name, speed in document["read_gb_per_s"].items():
        print(f"{name}: a plain step reads weights at {speed:.1f} GB/s")
    print("KL: " + ", ".join(f"{name} {nats:.5f}" for name, nats in document["kl"].items()))


if __name__ == "__main__":
    main()
