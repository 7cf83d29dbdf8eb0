"""A file of a mixture's layer shapes with random weights, to time kernels with.

    python benchmarks/random_mixture.py OUT.gguf [--like qwen3moe] [--layers 2] [--type Q4_K]
    python benchmarks/kernels.py OUT.gguf --sizes 1 4 8 32

`qwen3moe` has the shapes of Qwen3-30B-A3B, `gpt-oss` those of gpt-oss-20b, whose experts are MXFP4
where `--type` says so. What it writes means nothing; llama.cpp loads it, and routers send tokens to
experts evenly.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--like", choices=_SHAPES, default="qwen3moe")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--type", choices=_SCALES, default="Q4_K", help="of the experts")
    parser.add_argument("--dense-type", choices=_SCALES, help="of other matrices; default: Q8_0")
    arguments = parser.parse_args()
    write(
        arguments.out,
        arguments.like,
        arguments.layers,
        Kind[arguments.type],
        Kind[arguments.dense_type or "Q8_0"],
    )


def write(path: Path, like: str, layers: int, kind: Kind, dense: Kind) -> None:
    """Write the file; `dense` is the type of what is no expert's."""
    s, writer = _SHAPES[like], gguf.GGUFWriter(path, like)
    _write_keys(writer, like, s, layers)
    rng = np.random.default_rng(7)

    def matrix(name: str, *shape: int, of: Kind = dense) -> None:
        writer.add_tensor(name, _random(rng, of, shape), raw_dtype=of)

    def floats(name: str, *shape: int, scale: float = 0.0) -> None:
        values = rng.standard_normal(shape).astype(np.float32) * scale
        writer.add_tensor(name, values if scale else np.ones(shape, np.float32))

    width, inner, kv = s["width"], s["heads"] * s["size"], s["kv"] * s["size"]
    matrix("token_embd.weight", VOCABULARY, width)
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
    writer.write_tensors_to_file()
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


def _random(rng: np.random.Generator, kind: Kind, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Random blocks, as bytes: rows of one matrix, tiled where there are many."""
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = shape[-2], shape[-1]
    if columns % size:
        raise SystemExit(f"{kind.name} has blocks of {size} columns, and {columns} are none of it")
    blocks = rng.integers(0, 256, (rows * columns // size, nbytes), np.uint8)
    for at in _SCALES[kind.name]:
        blocks[:, at + 1] = 0x0C | (blocks[:, at + 1] & 0x80)
    if kind.name == "MXFP4":
        blocks[:, 0] = 118
    one = blocks.reshape(rows, columns // size * nbytes)
    return one if len(shape) == 2 else np.tile(one, (shape[0], 1, 1))


if __name__ == "__main__":
    main()
