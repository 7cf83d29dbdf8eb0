"""The `gqa` flavour: ONNX Runtime's own fused operations, for its CPU kernels.

GroupQueryAttention with the KV cache shared in place, positions and an additive attention bias as
inputs. Inputs, n tokens of which r want logits, over `total` cells of a cache with room for C:

    embeddings [1, n, E], positions [1, n], rows [r], seqlens_k [1] = total - 1,
    total_sequence_length [], attention_bias [1, 1, n, total] (and one for sliding windows),
    cos, sin [C, rotary / 2] (and a pair for sliding windows), past_key.i, past_value.i [1, H, C, D]

Outputs: logits [r, V], present_key.i and present_value.i (bind them to the past's memory).
"""

from __future__ import annotations

from typing import Any

from edgespec.models.onnx.decoder import Decoder
from edgespec.models.onnx.writer import CONTRIB


class GqaDecoder(Decoder):
    """One graph for prompts, chains and trees, with the cache updated inside."""

    def norm(self, hidden: str, weight: str) -> str:
        return self.op(
            "SimplifiedLayerNormalization",
            hidden,
            self.floats(weight),
            axis=-1,
            epsilon=self.facts.epsilon,
        )

    def add_norm(self, hidden: str, skip: str, weight: str) -> tuple[str, str]:
        if not skip:
            return self.norm(hidden, weight), hidden
        normed, total = self.fresh("normed"), self.fresh("stream")
        self.node(
            "SkipSimplifiedLayerNormalization",
            (hidden, skip, self.floats(weight)),
            (normed, "", "", total),
            domain=CONTRIB,
            epsilon=self.facts.epsilon,
        )
        return normed, total

    def attend(self, layer: int, query: str, key: str, value: str) -> str:
        window = "_window" if self.spec.is_sliding[layer] else ""
        facts, out = self.facts, f"attended.{layer}"
        attributes = {"softcap": facts.softcap} if facts.softcap else {}
        self.node(
            "GroupQueryAttention",
            (
                query,
                key,
                value,
                f"past_key.{layer}",
                f"past_value.{layer}",
                "seqlens_k",
                "total_sequence_length",
                f"cos{window}",
                f"sin{window}",
                "positions",
                f"attention_bias{window}",
            ),
            (out, f"present_key.{layer}", f"present_value.{layer}"),
            domain=CONTRIB,
            num_heads=self.spec.num_heads[layer],
            kv_num_heads=self.spec.num_kv_heads[layer],
            scale=facts.attention_scale,
            do_rotary=1,
            rotary_interleaved=int(facts.rotary_interleaved),
            **attributes,
        )
        return out

    def activate(self, gate: str) -> str:
        if self.facts.activation == "gelu":
            return self.op("FastGelu", gate, domain=CONTRIB)
        return self.op("QuickGelu", gate, domain=CONTRIB, alpha=1.0)  # x sigmoid(x)

    def inputs(self) -> list[Any]:
        infos = [
            self.floats_info("embeddings", 1, "n", self.spec.embedding_size),
            self.integers_info("positions", 1, "n"),
            self.integers_info("rows", "r"),
            self.integers_info("seqlens_k", 1, bits=32),
            self.integers_info("total_sequence_length", bits=32),
        ]
        for window in self.windows():
            infos.append(self.floats_info(f"attention_bias{window}", 1, 1, "n", "total"))
            infos += [self.floats_info(f"{name}{window}", "C", "half") for name in ("cos", "sin")]
        return [*infos, *self.cache_infos("past", "C")]

    def outputs(self) -> list[Any]:
        return [self.main_output("r"), *self.cache_infos("present", "C")]
