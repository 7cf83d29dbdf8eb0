"""A small ONNX model folder in edgespec's contract, its tokenizer, and the same model in numpy.

Two layers of attention over learned positions, the second of which sees a window; the second has
heads of its own size. Weights are random and float32, so that what is the same is the same to
rounding.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

WIDTH, POSITIONS, WINDOW = 16, 512, 12
HEADS, LENGTHS = (2, 2), (8, 4)  # by layer
END = 257

Array = NDArray[np.float32]


@dataclass
class TinyModel:
    """Weights by name, and what they compute."""

    vocab_size: int = 258
    seed: int = 3
    weights: dict[str, Array] = field(init=False)

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)

        def normal(*shape: int) -> Array:
            values: Array = random.normal(0, shape[-2] ** -0.5, shape).astype(np.float32)
            return values

        self.weights = {
            "embed": normal(self.vocab_size, WIDTH) * 8,
            "place": normal(POSITIONS, WIDTH) * 8,
            "head": normal(WIDTH, self.vocab_size) * 3,
        }
        for layer, (heads, length) in enumerate(zip(HEADS, LENGTHS, strict=True)):
            for name in ("q", "k", "v"):
                self.weights[f"{name}.{layer}"] = normal(WIDTH, heads * length)
            self.weights[f"o.{layer}"] = normal(heads * length, WIDTH)

    def logits(self, ids: list[int]) -> Array:
        """Of every token of a text, [n, V]."""
        count, get = len(ids), self.weights.__getitem__
        hidden = get("embed")[ids] + get("place")[:count]
        ago = np.arange(count)[:, None] - np.arange(count)[None]
        for layer, (heads, length) in enumerate(zip(HEADS, LENGTHS, strict=True)):
            sees = (ago >= 0) & (ago < (WINDOW if layer == 1 else count))
            query, key, value = (
                (hidden @ get(f"{name}.{layer}")).reshape(count, heads, length).swapaxes(0, 1)
                for name in ("q", "k", "v")
            )
            scores = query @ key.swapaxes(1, 2) + np.where(sees, 0, -1e4).astype(np.float32)
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            shares /= shares.sum(-1, keepdims=True)
            attended = (shares @ value).swapaxes(0, 1).reshape(count, heads * length)
            hidden = hidden + attended @ get(f"o.{layer}")
        return np.asarray(hidden @ get("head"), np.float32)

    def graph(self, *, exported: bool = False) -> Any:
        """The ONNX model: in the contract, or as an exporter writes it, before it was cut."""
        return _Graph(self, exported).model()


class _Graph:
    def __init__(self, tiny: TinyModel, exported: bool) -> None:
        import onnx

        self.helper, self.types = onnx.helper, onnx.TensorProto
        self.tiny, self.exported = tiny, exported
        self.nodes: list[Any] = []
        self.constants = [
            onnx.numpy_helper.from_array(array, name) for name, array in tiny.weights.items()
        ]
        self.make_constant = onnx.numpy_helper.from_array

    def model(self) -> Any:
        helper = self.helper
        embedded = self.op("Gather", "embed", "input_ids")
        hidden = self.op("Add", embedded, self.op("Gather", "place", "position_ids"))
        for layer in range(len(HEADS)):
            hidden = self.op("Add", hidden, self.attention(layer, hidden))
        if self.exported:
            self.op("MatMul", hidden, "head", output="logits")
        else:
            chosen = self.op("Gather", hidden, "rows", axis=1)
            all_rows = self.op("MatMul", chosen, "head")
            self.op("Squeeze", all_rows, self.integers(0), output="logits")
        inputs, outputs = self.values()
        graph = helper.make_graph(self.nodes, "tiny", inputs, outputs, self.constants)
        opsets = [helper.make_opsetid("", 18)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9)

    def attention(self, layer: int, hidden: str) -> str:
        """Keys of the past and of the tokens joined, as exporters do it."""
        old, new = ("past_key_values.{}.{}", "") if self.exported else ("past_{1}.{0}", "new_{}.{}")
        query = self.heads(layer, "q", hidden)
        joined = []
        for name, what in (("k", "key"), ("v", "value")):
            row = self.heads(layer, name, hidden, output=new.format(what, layer))
            present = f"present.{layer}.{what}" if self.exported else ""
            past = old.format(layer, what)
            joined.append(self.op("Concat", past, row, axis=2, output=present))
        keys = self.op("Transpose", joined[0], perm=[0, 1, 3, 2])
        scores = self.op("Add", self.op("MatMul", query, keys), self.mask(layer))
        attended = self.op("MatMul", self.op("Softmax", scores, axis=-1), joined[1])
        attended = self.op("Transpose", attended, perm=[0, 2, 1, 3])
        # The size of a text that is asked for and put into a shape again, as tracing leaves it.
        count = self.op("Gather", self.op("Shape", hidden), self.integers(1))
        width = HEADS[layer] * LENGTHS[layer]
        shape = self.op("Concat", self.integers(1), count, self.integers(width), axis=0)
        return self.op("MatMul", self.op("Reshape", attended, shape), f"o.{layer}")

    def mask(self, layer: int) -> str:
        if not self.exported:
            return ("attention_bias", "attention_bias_window")[layer]
        ends = (self.integers(layer), self.integers(layer + 1), self.integers(1))
        return self.op("Slice", "attention_mask", *ends)

    def heads(self, layer: int, name: str, hidden: str, output: str = "") -> str:
        product = self.op("MatMul", hidden, f"{name}.{layer}")
        apart = self.op("Reshape", product, self.integers(1, -1, HEADS[layer], LENGTHS[layer]))
        return self.op("Transpose", apart, perm=[0, 2, 1, 3], output=output)

    def values(self) -> tuple[list[Any], list[Any]]:
        info, real, whole = self.helper.make_tensor_value_info, self.types.FLOAT, self.types.INT64
        inputs = [info(name, whole, [1, "n"]) for name in ("input_ids", "position_ids")]
        if self.exported:
            inputs.append(info("attention_mask", real, [1, 2, "n", "total"]))
            outputs = [info("logits", real, [1, "n", self.tiny.vocab_size])]
        else:
            inputs.append(info("rows", whole, ["r"]))
            for name in ("attention_bias", "attention_bias_window"):
                inputs.append(info(name, real, [1, 1, "n", "total"]))
            outputs = [info("logits", real, ["r", self.tiny.vocab_size])]
        for layer, (heads, length) in enumerate(zip(HEADS, LENGTHS, strict=True)):
            for what in ("key", "value"):
                theirs = (f"past_key_values.{layer}.{what}", f"present.{layer}.{what}")
                past, new = (
                    theirs if self.exported else (f"past_{what}.{layer}", f"new_{what}.{layer}")
                )
                behind = "total" if self.exported else "n"
                inputs.append(info(past, real, [1, heads, "past", length]))
                outputs.append(info(new, real, [1, heads, behind, length]))
        return inputs, outputs

    def op(self, kind: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        name = output or f"{kind}.{len(self.nodes)}"
        self.nodes.append(self.helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def integers(self, *values: int) -> str:
        name = f"integers.{len(self.constants)}"
        self.constants.append(self.make_constant(np.array(values, np.int64), name))
        return name


def write_tokenizer(path: Path) -> None:
    """One token a byte, a BOS that is put first, and an end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokenizer.save(str(path))


def write_folder(folder: Path, tiny: TinyModel | None = None, **changes: Any) -> Path:
    """The whole model folder; `changes` go into its facts."""
    import onnx

    tiny = tiny or TinyModel()
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save_model(
        tiny.graph(),
        str(folder / "model.onnx"),
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=256,
    )
    write_tokenizer(folder / "tokenizer.json")
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    documents = {
        "tokenizer_config.json": settings,
        "config.json": {"eos_token_id": 0},
        "generation_config.json": {"eos_token_id": [END], "bos_token_id": 256},
        "edgespec.json": {
            "contract": 1,
            "arch": "tiny",
            "name": "tiny model",
            "bits": 8,
            "context_length": POSITIONS,
            "embedding_size": WIDTH,
            "feed_forward_size": WIDTH,
            "num_heads": 2,
            "sliding_window": WINDOW,
            "is_sliding": [False, True],
            "num_kv_heads": list(HEADS),
            "key_length": list(LENGTHS),
            "value_length": list(LENGTHS),
            "vocab_size": tiny.vocab_size,
            "table_bytes": 4 * tiny.vocab_size * WIDTH,
            **changes,
        },
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document), encoding="utf-8")
    return folder
