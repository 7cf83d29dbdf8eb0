"""Step times and rounding of what computes a step, on one file.

python benchmarks/backends.py kernels MODEL [--rounds 5] [--depth 128] [--sizes 1 4 8]
    [--kv-type q8_0] [--prompt 512] [--exact FILE] [--json OUT]
python benchmarks/backends.py onnx MODEL [--json OUT]
python benchmarks/backends.py logits MODEL... [--tokens 500]
python benchmarks/backends.py provider MODEL [--provider NAME] [--kind cpu|gpu|npu]
    [--option KEY=VALUE]
python benchmarks/backends.py mixture OUT.gguf [--like qwen3moe] [--layers 2] [--type Q4_K]
    [--skew 1.35]
python benchmarks/backends.py streams [--types Q4_0 Q6_K] [--sizes 1 4 8]
python benchmarks/backends.py cycles [--llama SOURCE] [--mca llvm-mca-16]
python benchmarks/backends.py loop [MODEL] [--tokens 64] [--rounds 9]

`kernels`: edgespec's beside llama.cpp's; `onnx`: ONNX Runtime beside llama.cpp; `streams`:
products beside what memory and instructions allow; `loop`: plain answers beside a bare loop.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from shared import run
from streams import ReadLoop, cycles, streams

import edgespec
from edgespec.backends.base import DraftTree
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.batch import Batch
from edgespec.backends.llama.kernels import refusal_of_kernels
from edgespec.backends.ort.backend import OrtBackend
from edgespec.backends.ort.cache import converted
from edgespec.backends.ort.providers import (
    CPU_PROVIDER,
    STEPS,
    OnnxDevice,
    devices,
    graphs_for,
)
from edgespec.measure.prompts import PROMPTS
from edgespec.measure.timing import one_step, some_tokens
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.bytes.footprint import multiplied_tensors
from edgespec.memory.device import host
from edgespec.memory.device.kernels import instruction_set
from edgespec.memory.plan.options import BackendName
from edgespec.memory.store import cache
from edgespec.models.onnx.facts import GQA, SPLIT, GraphOptions, read_facts
from edgespec.models.onnx.folder import GRAPH_FILE
from edgespec.models.onnx.graph import bucket_graphs
from edgespec.models.spec import ModelSpec, read_model_spec

# -- kernels ---------------------------------------------------------------------------------


_KERNEL_SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)
_LOOP_BYTES, _CHANGED = 256 << 20, 1.1
_OURS, _THEIRS = "edgespec", "llama.cpp"
_TEXT = (
    "The train leaves at nine, and the station is far away. We should take the bus that stops "
    "behind the church, buy the tickets from the machine and look for seats on the left side, "
    "from where the sea can be seen after the second tunnel. def area(r): return 3.14159 * r * r"
)


def kernels() -> None:
    """Step times with edgespec's matrix kernels and with llama.cpp's own, in turns.

    Both load the same file; steps of both alternate, and the median of the best of two counts.
    A bare read loop before and behind each pair tells how fast the memory was, and how often it
    changed by a tenth meanwhile.
    Beside the times: what reading a prompt takes, how fast a plain step reads weights, and the
    divergence of next-token distributions (KL, nats) over the tokens of a text, between the two
    and, with `--exact` (the same weights: `edgespec quantize type MODEL FILE F32`), of each
    from that.
    """
    parser = argparse.ArgumentParser("backends.py kernels")
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--depth", type=int, default=128)
    parser.add_argument("--sizes", type=int, nargs="+", default=_KERNEL_SIZES)
    parser.add_argument("--kv-type", default="f16")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--exact", type=Path)
    parser.add_argument("--json", metavar="OUT")
    arguments = parser.parse_args()
    if reason := refusal_of_kernels():
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
            **dict(zip(("step_ms", "read_loop"), _step_ms(backends, arguments), strict=True)),
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
    settings = RunConfig(
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
) -> tuple[dict[str, dict[str, float]], dict[str, list[float]]]:
    """Milliseconds by step size, behind `--depth` tokens of context.

    By step size, too: the read loop's GB/s, and the share of pairs meanwhile it changed.
    """
    for backend in backends.values():
        backend.truncate(0)
        _fill(backend, some_tokens(backend, arguments.depth))
    sizes, loop = arguments.sizes, ReadLoop(_LOOP_BYTES)
    found: dict[str, dict[int, list[float]]] = {name: {n: [] for n in sizes} for name in backends}
    speeds: dict[int, list[tuple[float, float]]] = {n: [] for n in sizes}
    for _ in range(arguments.rounds):
        for nodes in sizes:
            before = loop.bytes_per_s()
            for name, backend in backends.items():
                one_step(backend, nodes)
                found[name][nodes].append(min(_timed(backend, nodes) for _ in range(2)))
            speeds[nodes].append((before, loop.bytes_per_s()))
    times = {
        name: {str(nodes): statistics.median(times) for nodes, times in by_size.items()}
        for name, by_size in found.items()
    }
    read = {
        str(nodes): [
            statistics.mean(sum(pair) / 2e9 for pair in pairs),
            statistics.mean(max(pair) > _CHANGED * min(pair) for pair in pairs),
        ]
        for nodes, pairs in speeds.items()
    }
    return times, read


def _timed(backend: LlamaBackend, nodes: int) -> float:
    start = perf_counter()
    one_step(backend, nodes)
    return (perf_counter() - start) * 1e3


def _prompt_ms(backends: dict[str, LlamaBackend], prompt: int) -> dict[str, float]:
    """Milliseconds to read a prompt: the best of two."""
    best = dict.fromkeys(backends, float("inf"))
    for _ in range(2):
        for name, backend in backends.items():
            tokens = some_tokens(backend, prompt)
            start = perf_counter()
            backend.truncate(0)
            _fill(backend, tokens)
            best[name] = min(best[name], (perf_counter() - start) * 1e3)
    return best


def _divergences(
    backends: dict[str, LlamaBackend], arguments: argparse.Namespace
) -> dict[str, float]:
    """Mean KL divergence over the tokens of a text."""
    distributions = {name: _distributions(backend) for name, backend in backends.items()}
    result = {"between": compared(distributions[_THEIRS], distributions[_OURS])[0]}
    if arguments.exact is not None:
        with closing(_open(read_model_spec(arguments.exact), False, arguments)) as backend:
            truth = _distributions(backend)
        result |= {name: compared(truth, one)[0] for name, one in distributions.items()}
    return result


def _distributions(backend: LlamaBackend) -> Any:
    """Log probabilities [tokens, V] behind every token of the text, token by token."""
    tokens = backend.tokenizer.encode(_TEXT)
    return log_probabilities(backend, tokens[:1], tokens[1:])


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
    loop = document["read_loop"]
    print(f"{'read loop, GB/s':<18}" + "".join(f"{speed:>8.1f}" for speed, _ in loop.values()))
    print(f"{'it changed':<18}" + "".join(f"{share:>8.0%}" for _, share in loop.values()))
    prompt = document["prompt_ms"]
    both = f"{prompt[_THEIRS]:.0f} and {prompt[_OURS]:.0f} ms"
    print(f"prompt of {document['prompt']}: {both}, {prompt[_THEIRS] / prompt[_OURS]:.2f}x")
    for name, speed in document["read_gb_per_s"].items():
        print(f"{name}: a plain step reads weights at {speed:.1f} GB/s")
    print("KL: " + ", ".join(f"{name} {nats:.5f}" for name, nats in document["kl"].items()))


# -- onnx ------------------------------------------------------------------------------------


_SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
_PAST = 256
_REPEATS = 9
_TURNS = 2
_TOKENS = 96


def onnx() -> None:
    """Step times of both backends on one file, and what speculation makes of them.

    Each backend is measured in processes of its own, alternating A B A B, because their thread
    pools wait in busy loops and would disturb each other: t(n) after 256 tokens of context
    (median of 9), and plain and speculative tokens/s over the built-in prompts.
    """
    parser = argparse.ArgumentParser("backends.py onnx")
    parser.add_argument("model", type=Path)
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(_measure(arguments.model, arguments.one)))
        return
    runs: dict[str, list[dict[str, Any]]] = {"llamacpp": [], "onnx": []}
    for turn in range(_TURNS):
        for backend in sorted(runs, reverse=bool(turn % 2)):
            runs[backend].append(_in_own_process(arguments.model, backend))
    theirs, ours = runs["llamacpp"], runs["onnx"]
    print(f"{arguments.model.name}: ms a step after {_PAST} tokens, best of {_TURNS} medians")
    for size in map(str, _SIZES):
        llama = min(run["step_ms"][size] for run in theirs)
        onnx = min(run["step_ms"][size] for run in ours)
        print(
            f"n={size:<3} llama.cpp {llama:7.2f}   ONNX Runtime {onnx:7.2f}   {onnx / llama:.2f}x"
        )
    for name in ("plain_tokens_per_s", "tokens_per_s"):
        pairs = [(a[name], b[name]) for a, b in zip(theirs, ours, strict=True)]
        ratio = statistics.mean(b / a for a, b in pairs)
        print(f"{name}: {', '.join(f'{a:.1f} / {b:.1f}' for a, b in pairs)}   {ratio:.2f}x")
    if arguments.json:
        arguments.json.write_text(json.dumps(runs, indent=1) + "\n")


def _in_own_process(model: Path, backend: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "onnx", str(model), "--one", backend]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _measure(model: Path, name: BackendName) -> dict[str, Any]:
    with edgespec.load(model, backend=name, context_size=2048, draft_max=15) as engine:
        backend = engine.backend
        times = {str(size): ms for size, ms in _step_times(backend, _SIZES, _REPEATS).items()}
        speeds = {}
        for key, speculate in (("plain_tokens_per_s", False), ("tokens_per_s", True)):
            runs = [
                engine.generate(prompt.text, max_tokens=_TOKENS, speculate=speculate).counters
                for prompt in PROMPTS[:10]
            ]
            tokens = sum(c.accepted_tokens + c.rounds for c in runs)
            speeds[key] = tokens / sum(c.decode_s for c in runs)
    return {"step_ms": times, **speeds}


# -- logits ----------------------------------------------------------------------------------


def logits() -> None:
    """How far the ONNX Runtime backend's logits are from llama.cpp's on the same file.

    Both decode the same text token by token (the target's own greedy words); printed are the
    mean Kullback-Leibler divergence of their distributions and how often the best token is the
    same.
    """
    parser = argparse.ArgumentParser("backends.py logits")
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--tokens", type=int, default=500)
    arguments = parser.parse_args()
    for model in arguments.models:
        prompt, text, theirs = reference(model, arguments.tokens)
        options: dict[str, Any] = {"context_size": context_for(arguments.tokens)}
        with edgespec.load(model, backend="onnx", drafter="none", **options) as engine:
            ours = log_probabilities(engine.backend, prompt, text)
        divergence, agreement = compared(theirs, ours)
        print(f"{model.name}: KL {divergence:.4f}, top-1 {agreement:.3f}", flush=True)


def context_for(tokens: int) -> int:
    """Tokens of context for the prompt and so many more."""
    return tokens + 64


def reference(model: Path, count: int) -> tuple[list[int], list[int], Any]:
    """A prompt, llama.cpp's greedy answer, and its log probabilities over that, [count, V]."""
    options: dict[str, Any] = {"context_size": context_for(count), "drafter": "none"}
    with edgespec.load(model, backend="llamacpp", **options) as engine:
        prompt = engine.encode("Tell a long story about a lighthouse and the people around it.")
        text = list(engine.generate(prompt, max_tokens=count).token_ids)
        return prompt, text, log_probabilities(engine.backend, prompt, text)


def compared(theirs: Any, ours: Any) -> tuple[float, float]:
    """Mean Kullback-Leibler divergence, and how often the best token is the same."""
    divergence = (np.exp(theirs) * (theirs - ours)).sum(axis=-1)
    agreement = theirs.argmax(axis=-1) == ours.argmax(axis=-1)
    return float(divergence.mean()), float(agreement.mean())


def log_probabilities(backend: Any, prompt: list[int], text: list[int]) -> Any:
    """Of each next token, [len(text), V], the text forced."""
    backend.truncate(0)
    _fill(backend, prompt)
    rows = []
    for token in text:
        row = backend.verify(DraftTree.chain((token,)))[0].astype(np.float64)
        backend.commit([0])
        row -= row.max()
        rows.append((row - np.log(np.exp(row).sum())).astype(np.float32))
    return np.array(rows)


# -- provider --------------------------------------------------------------------------------


_PROVIDER_SIZES = (1, 2, 4, 8, 16)
# 13 nodes with 3 branchings.
_TREE = (-1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 7, 8, 10)


def provider() -> None:
    """A model on an execution provider of ONNX Runtime: is it there, is it right, how fast is it?

    Needs one of these beside edgespec and `onnx`, each in an environment of its own:

        pip install onnxruntime                    # CPUExecutionProvider
        pip install onnxruntime-openvino           # OpenVINOExecutionProvider; no `onnxruntime`
        pip install onnxruntime onnxruntime-qnn    # QNNExecutionProvider; x86 has an emulator:
            --provider QNNExecutionProvider --kind cpu --fixed --plain --tokens 16 --repeats 2
            --option backend_path=emulator --option htp_arch=73 --option soc_model=60
        pip install onnxruntime-gpu                # CUDAExecutionProvider
        pip install onnxruntime-directml           # DmlExecutionProvider (Windows)

    Prints the share of the graph's nodes that the provider runs, the distance to llama.cpp on
    the same file (teacher-forced greedy text), how far a tree's logits are from those of its
    paths as chains, and ms a step (median).
    """
    arguments = _arguments()
    spec = read_model_spec(arguments.model)
    context = max(context_for(arguments.tokens), _PAST + 2 * max(_PROVIDER_SIZES))
    options = dict(option.split("=", 1) for option in arguments.option)
    wanted = arguments.provider, arguments.kind
    place = next((one for one in devices() if (one.provider, one.kind) == wanted), None)
    if place is None:
        sys.exit(f"{arguments.provider} has no {arguments.kind} here: `edgespec doctor` lists them")
    place = replace(place, options=_resolved(options))
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
    for size, milliseconds in _step_times(backend, _PROVIDER_SIZES, arguments.repeats).items():
        print(f"n={size:<3} {milliseconds:8.2f} ms", flush=True)
    backend.close()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("backends.py provider")
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
        steps = [size for size in STEPS if size <= max(_PROVIDER_SIZES)]
        wanted = (
            bucket_graphs(tuple(steps), context, options) if is_fixed else {GRAPH_FILE: options}
        )
    folder = converted(spec, cache.cache_directory() / "onnx", host.cpu_name(), graphs=wanted)
    settings = RunConfig(context, 64, max(_PROVIDER_SIZES), threads=arguments.threads)
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


def _fill(backend: Any, tokens: Sequence[int]) -> None:
    for start in range(0, len(tokens), backend.batch_size):
        backend.prefill(tokens[start : start + backend.batch_size])


def _step_times(backend: Any, sizes: Sequence[int], repeats: int) -> dict[int, float]:
    """Median ms of a step over so many tokens, behind _PAST tokens."""
    backend.truncate(0)
    _fill(backend, list(range(100, 100 + _PAST)))
    times = {}
    for size in sizes:
        tree, found = DraftTree.chain(range(100, 100 + size)), []
        for _ in range(repeats + 1):
            start = perf_counter()
            backend.verify(tree)
            found.append((perf_counter() - start) * 1e3)
            backend.truncate(backend.length)
        times[size] = statistics.median(found[1:])
    return times


# -- mixture ---------------------------------------------------------------------------------


VOCABULARY = 4096
_SHAPES: dict[str, dict[str, int]] = {
    "qwen3moe": {"width": 2048, "heads": 32, "kv": 4, "size": 128, "experts": 128, "used": 8,
                 "hidden": 768},
    "gpt-oss": {"width": 2880, "heads": 64, "kv": 8, "size": 64, "experts": 32, "used": 4,
                "hidden": 2880},
}  # fmt: skip
# Where the f16 scales of a block of random bytes are, which become finite and small.
_SCALES = {
    "Q4_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q3_K": (108,),
    "Q2_K": (80, 82), "IQ4_XS": (0,), "IQ4_NL": (0,), "MXFP4": (),
}  # fmt: skip
# The high byte of these scales, and of embeddings', which routers would not tell apart otherwise:
# attention adds to all tokens of a text much the same.
_SMALL, _LARGE = 0x0C, 0x34


def mixture() -> None:
    """A file of a mixture's layer shapes with random weights, to time kernels with.

    `qwen3moe` has the shapes of Qwen3-30B-A3B, `gpt-oss` those of gpt-oss-20b, whose experts
    are MXFP4 where `--type` says so. What it writes means nothing; llama.cpp loads it. Routers send
    tokens to experts evenly, or with `--skew` by weights that are lognormal with this sigma: with
    1.35, of tokens that have nothing to do with each other, 86% of the experts are among the 27%
    that were used last. Public counts of real ones say 81% and a quarter.
    """
    parser = argparse.ArgumentParser("backends.py mixture")
    parser.add_argument("out", type=Path)
    parser.add_argument("--like", choices=_SHAPES, default="qwen3moe")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--type", choices=_SCALES, default="Q4_K", help="of the experts")
    parser.add_argument("--dense-type", choices=_SCALES, help="of other matrices; default: Q8_0")
    parser.add_argument("--skew", type=float, default=0.0, help="of the routers")
    arguments = parser.parse_args()
    write(
        arguments.out,
        arguments.like,
        arguments.layers,
        Kind[arguments.type],
        Kind[arguments.dense_type or "Q8_0"],
        arguments.skew,
    )


def write(path: Path, like: str, layers: int, kind: Kind, dense: Kind, skew: float) -> None:
    """Write the file, a tensor at a time; `dense` is the type of what is no expert's."""
    s, writer = _SHAPES[like], gguf.GGUFWriter(path, like)
    _write_keys(writer, like, s, layers)
    rng, made = np.random.default_rng(7), list[Callable[[], NDArray[Any]]]()

    def matrix(name: str, *shape: int, of: Kind = dense, scale: int = _SMALL) -> None:
        columns = shape[-1]
        size, nbytes = gguf.GGML_QUANT_SIZES[of]
        stored = (*shape[:-1], columns // size * nbytes)
        writer.add_tensor_info(name, stored, np.dtype(np.uint8), prod(stored), of)
        made.append(lambda: _random(rng, of, shape, scale))

    def floats(name: str, *shape: int, scale: float = 0.0) -> None:
        values = rng.standard_normal(shape).astype(np.float32) * scale
        if name.endswith("gate_inp.weight"):
            values -= values.mean(axis=1, keepdims=True)  # what all tokens have in common
            values *= np.exp(skew * rng.standard_normal((shape[0], 1), np.float32))
        writer.add_tensor_info(name, shape, values.dtype, values.nbytes)
        made.append(lambda: values if scale else np.ones(shape, np.float32))

    width, inner, kv = s["width"], s["heads"] * s["size"], s["kv"] * s["size"]
    matrix("token_embd.weight", VOCABULARY, width, scale=_LARGE)
    matrix("output.weight", VOCABULARY, width)
    floats("output_norm.weight", width)
    for layer in range(layers):
        at, oss = f"blk.{layer}.", like == "gpt-oss"
        floats(at + "attn_norm.weight", width)
        floats(at + ("post_attention_norm.weight" if oss else "ffn_norm.weight"), width)
        for name, rows, columns in (
            ("attn_q", inner, width),
            ("attn_k", kv, width),
            ("attn_v", kv, width),
            ("attn_output", width, inner),
        ):
            matrix(f"{at}{name}.weight", rows, columns)
            if oss:
                floats(f"{at}{name}.bias", rows, scale=0.01)
        if oss:
            floats(at + "attn_sinks.weight", s["heads"], scale=1.0)
            floats(at + "ffn_gate_inp.bias", s["experts"], scale=0.01)
        else:
            floats(at + "attn_q_norm.weight", s["size"])
            floats(at + "attn_k_norm.weight", s["size"])
        floats(at + "ffn_gate_inp.weight", s["experts"], width, scale=0.02)
        for name, rows, columns in (
            ("ffn_gate_exps", s["hidden"], width),
            ("ffn_up_exps", s["hidden"], width),
            ("ffn_down_exps", width, s["hidden"]),
        ):
            matrix(f"{at}{name}.weight", s["experts"], rows, columns, of=kind)
            if oss:
                floats(f"{at}{name}.bias", s["experts"], rows, scale=0.01)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for make in made:
        writer.write_tensor_data(make())
    writer.close()


def _write_keys(writer: Any, like: str, s: dict[str, int], layers: int) -> None:
    writer.add_context_length(4096)
    writer.add_embedding_length(s["width"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(s["hidden"])
    writer.add_expert_feed_forward_length(s["hidden"])
    writer.add_expert_count(s["experts"])
    writer.add_expert_used_count(s["used"])
    writer.add_head_count(s["heads"])
    writer.add_head_count_kv(s["kv"])
    writer.add_key_length(s["size"])
    writer.add_value_length(s["size"])
    writer.add_layer_norm_rms_eps(1e-6)
    if like == "gpt-oss":
        writer.add_sliding_window(128)
        writer.add_rope_freq_base(150000.0)
    tokens = [f"<{i}>" for i in range(VOCABULARY - 256)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<0x{i:02X}>" for i in range(256)] + tokens)
    writer.add_token_scores([0.0] * VOCABULARY)
    writer.add_token_types([6] * 256 + [1] * len(tokens))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def _random(
    rng: np.random.Generator, kind: Kind, shape: tuple[int, ...], scale: int
) -> NDArray[np.uint8]:
    """Random blocks, as bytes: rows of one matrix, tiled where there are many."""
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = shape[-2], shape[-1]
    if columns % size:
        raise SystemExit(f"{kind.name} has blocks of {size} columns, and {columns} are none of it")
    blocks = rng.integers(0, 256, (rows * columns // size, nbytes), np.uint8)
    for at in _SCALES[kind.name]:
        blocks[:, at + 1] = scale | (blocks[:, at + 1] & 0x80)
    if kind.name == "MXFP4":
        blocks[:, 0] = 118
    one = blocks.reshape(rows, columns // size * nbytes)
    return one if len(shape) == 2 else np.tile(one, (shape[0], 1, 1))


# -- loop ------------------------------------------------------------------------------------


def loop() -> None:
    """Tokens a second of plain answers, as a part of those of a bare loop of llama_decode.

    In turns, in one context, each behind the same prompt: `engine` makes its steps in the thread
    that reads its chunks, `thread` in the one that makes the steps of several users.
    """
    parser = argparse.ArgumentParser("backends.py loop")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    shares: dict[str, list[float]] = {"engine": [], "thread": []}
    with ExitStack() as opened:
        engines = {
            name: opened.enter_context(
                edgespec.load(arguments.model, drafter="none", users=users, context_size=1024)
            )
            for name, users in (("engine", 1), ("thread", 2))
        }
        for _ in range(arguments.rounds):
            for name, engine in engines.items():
                ids = engine.backend.tokenizer.encode(_TEXT)
                bare_s = [_bare_s(engine.backend, ids, arguments.tokens)]
                token_s = _token_s(engine, ids, arguments.tokens)
                bare_s.append(_bare_s(engine.backend, ids, arguments.tokens))
                shares[name].append(statistics.mean(bare_s) / token_s)
    for name, found in shares.items():
        low, middle, high = statistics.quantiles(found, n=4)
        print(f"{name}: {middle:.3f} of the bare loop, quartiles {low:.3f} and {high:.3f}")


def _token_s(engine: Any, ids: list[int], tokens: int) -> float:
    """Seconds of a token behind the first ones of an answer."""
    chunks = engine.stream(ids, max_tokens=tokens)
    next(chunks)
    began = perf_counter()
    count = sum(len(chunk.token_ids) for chunk in chunks)
    return (perf_counter() - began) / count


def _bare_s(backend: Any, ids: list[int], tokens: int) -> float:
    """Seconds of a token, of so many steps, each with the likeliest token of the last one."""
    backend.truncate(0)
    row, at, context = backend.prefill(ids), len(ids), backend._context
    batch = Batch(context.lib, 1, 1, None, 0)
    batch.outputs[0] = 1
    began = perf_counter()
    for position in range(at, at + tokens):
        batch.put_chain([int(row.argmax())], position)
        batch.struct.n_tokens = 1
        context.lib.llama_decode(context.handle, batch.struct)
        row = context.logits.rows(context.handle, 1)[0]
    token_s = (perf_counter() - began) / tokens
    context.remove(0, at)
    backend.truncate(0)
    backend.release_threads()  # else threads of another caller's steps do not spin
    return token_s


if __name__ == "__main__":
    run(
        __doc__,
        kernels=kernels,
        onnx=onnx,
        logits=logits,
        provider=provider,
        mixture=mixture,
        streams=streams,
        cycles=cycles,
        loop=loop,
    )
