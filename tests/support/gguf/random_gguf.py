"""Small GGUF files with random weights, for tests of what reads or converts them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from edgespec.exits.files import Trained, write_exit
from edgespec.models.onnx.weights import float_rows
from edgespec.models.spec import ModelSpec, read_model_spec

WIDTH, HIDDEN, VOCABULARY, LAYERS = 64, 128, 258, 4
IDS = np.array(sorted({*range(0, VOCABULARY, 2), VOCABULARY - 1}), np.int32)  # of an exit's head
Q4_0, Q4_1, Q8_0, F16, F32 = (
    getattr(gguf.GGMLQuantizationType, name) for name in ("Q4_0", "Q4_1", "Q8_0", "F16", "F32")
)


def byte_tokens() -> list[str]:
    """The 256 tokens of a byte-level BPE, as GPT-2 names them."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = {byte: chr(byte) for byte in shown}
    hidden = (byte for byte in range(256) if byte not in names)
    names |= {byte: chr(256 + place) for place, byte in enumerate(hidden)}
    return [names[byte] for byte in range(256)]


def finish(writer: Any) -> None:
    """Write a file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_model(
    path: Path,
    arch: str,
    kind: Any,
    seed: int = 5,
    *,
    reads_bytes: bool = False,
    tensors_per_part: int = 0,
    name: str = "",
    controls: Sequence[str] = (),
    template: str = "",
    width: int = WIDTH,
    layers: int = LAYERS,
    deepstack: int = 2,
    adds_end: bool = False,
) -> Path:
    """Random weights of type `kind`; gemma3 layers slide over 48 tokens, every other one.

    No text has tokens, unless it `reads_bytes`. Parts lie beside `path`, by llama.cpp's names.
    The vocabulary ends with the `controls`.
    """
    vocabulary = VOCABULARY + len(controls)
    source = np.random.default_rng(seed)

    def normal(rows: int, columns: int) -> NDArray[np.float32]:
        return source.normal(0.0, columns**-0.5, (rows, columns)).astype(np.float32)

    writer = gguf.GGUFWriter(path, arch, split_max_tensors=tensors_per_part)
    if name:
        writer.add_name(name)
    integers = {
        "context_length": 4096,
        "embedding_length": width,
        "block_count": layers,
        "feed_forward_length": HIDDEN,
        "attention.head_count": width // 32,
        "attention.head_count_kv": 1,
        "rope.dimension_count": 32,
    }
    if arch == "gemma3":
        integers |= {
            "attention.key_length": 32,
            "attention.value_length": 32,
            "attention.sliding_window": 48,
            "attention.sliding_window_pattern": 2,
        }
    if arch == "qwen3vl":
        integers |= {"attention.key_length": 32, "attention.value_length": 32}
        integers |= {"n_deepstack_layers": deepstack}
    for key, value in integers.items():
        writer.add_uint32(f"{arch}.{key}", value)
    if arch in ("qwen2vl", "qwen3vl"):
        writer.add_rope_dimension_sections([4, 6, 6, 0])
    if template:
        writer.add_chat_template(template)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32(f"{arch}.rope.freq_base", 10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    tokens = [*(byte_tokens() if reads_bytes else ()), *(f"<{i}>" for i in range(VOCABULARY))]
    writer.add_token_list([*tokens[:VOCABULARY], *controls])
    types = [gguf.TokenType.NORMAL] * VOCABULARY + [gguf.TokenType.CONTROL] * len(controls)
    writer.add_token_types(types)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(VOCABULARY - 1)
    if adds_end:
        writer.add_add_eos_token(True)
    matrices = {"token_embd": normal(vocabulary, width), "output": 8 * normal(vocabulary, width)}
    vectors = {"output_norm.weight": width}
    for layer in range(layers):
        for name, rows, columns in (
            ("attn_q", width, width),
            ("attn_k", 32, width),
            ("attn_v", 32, width),
            ("attn_output", width, width),
            ("ffn_gate", HIDDEN, width),
            ("ffn_up", HIDDEN, width),
            ("ffn_down", width, HIDDEN),
        ):
            matrices[f"blk.{layer}.{name}"] = normal(rows, columns)
            if arch in ("qwen2", "qwen2vl") and name in ("attn_q", "attn_k", "attn_v"):
                writer.add_tensor(f"blk.{layer}.{name}.bias", normal(1, rows)[0])
        vectors |= {f"blk.{layer}.{name}.weight": width for name in ("attn_norm", "ffn_norm")}
        if arch == "gemma3":
            names = ("post_attention_norm", "post_ffw_norm")
            vectors |= {f"blk.{layer}.{name}.weight": width for name in names}
        if arch in ("gemma3", "qwen3vl"):
            vectors |= {f"blk.{layer}.attn_{name}_norm.weight": 32 for name in "qk"}
    for name, values in matrices.items():
        data = gguf.quants.quantize(values, kind)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
    for name, size in vectors.items():
        writer.add_tensor(name, source.uniform(0.5, 1.5, size).astype(np.float32))
    finish(writer)
    return path


def floats(spec: ModelSpec, name: str) -> Any:
    values = np.concatenate(list(float_rows(spec.path, spec.tensors[name])))
    return values.reshape(tuple(reversed(spec.tensors[name].dims)))


def write_untrained(
    target: ModelSpec, path: Path, exit_layer: int, ids: Any = IDS, report: Any = None
) -> ModelSpec:
    """A drafter whose adapter is the target's next block."""
    start = f"blk.{exit_layer}."
    block = {
        name.removeprefix(start): floats(target, name)
        for name in target.tensors
        if name.startswith(start)
    }
    norm = floats(target, "output_norm.weight")
    tied = "output.weight" not in target.tensors
    head = floats(target, "token_embd.weight" if tied else "output.weight")[ids]
    report = {"agreement": 0.5} if report is None else report
    write_exit(target, path, Trained(ids, head, block, norm), report, exit_layer=exit_layer)
    return read_model_spec(path)
