"""What a language model keeps for each layer: heads, windows and recurrent state.

Follows llama.cpp's reading of the same keys (`llama.cpp: src/llama-model.cpp`, `load_hparams`, and
`src/models/*.cpp`): which layers slide, which are recurrent, which keep no cache of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

from edgespec.errors import ModelFileError
from edgespec.models.gguf.reader import Gguf, GgufSpan, GgufValue

# llama.cpp's LLAMA_MAX_LAYERS.
MAX_LAYERS = 512
_BLOCK = re.compile(r"blk\.(\d{1,4})\.(.+)")
_MAX_U31 = (1 << 31) - 1


class _Sliding(NamedTuple):
    """How an architecture slides: every `period`-th layer is global (first or last of the period).

    Period 0 slides in every layer. `window` is the default; `forced` replaces whatever window the
    file gives, as llama.cpp does.
    """

    period: int
    global_first: bool = False
    window: int = 0
    forced: int = 0


# From `load_arch_hparams` in `llama.cpp: src/models/`. Of other architectures llama.cpp ignores a
# window without a pattern (llama, mistral, qwen2, phi3): their layers are global.
_SLIDING = {
    "afmoe": _Sliding(4),
    "cohere2": _Sliding(4),
    "cohere2moe": _Sliding(4, global_first=True),
    "deepseek4": _Sliding(0),
    "exaone-moe": _Sliding(4, window=128),
    "exaone4": _Sliding(4, window=4096),
    "gemma-embedding": _Sliding(6),
    "gemma2": _Sliding(2, window=4096),
    "gemma3": _Sliding(6),
    "gemma3n": _Sliding(5),
    "gpt-oss": _Sliding(2),
    "laguna": _Sliding(4, global_first=True),
    "lfm2": _Sliding(0),
    "llama4": _Sliding(4, window=8192, forced=8192),
    "mellum": _Sliding(4),
    "modern-bert": _Sliding(3, global_first=True),
    "muse-glimmer": _Sliding(4),
    "olmo2": _Sliding(4),
    "plamo3": _Sliding(8),
    "smallthinker": _Sliding(4, global_first=True, forced=4096),
}
# Exaone 4 slides only in its 32B size, which llama.cpp tells by the number of layers.
_EXAONE4_SLIDING = 64
_GEMMA3N_CACHED_LAYERS = 20

# What layers with a recurrent state have: tensors of one of these sets.
_RECURRENT = (("ssm_",), ("time_mix_",), ("shortconv.",), ("attn_qkv.weight", "attn_gate.weight"))
_ATTENDS_TOO = "falcon-h1"  # of the layers with a state all have a cache as well
_OTHER_STATE = ("deepseek4",)  # compressed, in no layer's tensors
# Hybrids whose recurrent state llama.cpp can take back (`llm_arch_supports_rs_rollback`), as far as
# what they keep can be planned.
SNAPSHOTS = {
    "qwen35", "qwen35moe", "nemotron_h", "nemotron_h_moe", "lfm2", "lfm2moe", "kimi-k3",
    "bailingmoe3",
}  # fmt: skip


class Keys:
    """The keys of one architecture, `llama.block_count` asked for as `block_count`."""

    def __init__(self, gguf: Gguf) -> None:
        self.gguf = gguf
        self.arch = gguf.text("general.architecture")

    def value(self, name: str) -> GgufValue | None:
        return self.gguf.metadata.get(f"{self.arch}.{name}")

    def integer(self, name: str, default: int | None = None, *, low: int = 0) -> int:
        """Returns a number between `low` and 2^31 - 1; without a default the key is required."""
        if default is None and self.value(name) is None:
            raise ModelFileError(
                f"{self.gguf.path} has no '{self.arch}.{name}', so it is not a language model "
                "that llama.cpp runs",
                hint="look up what the file is for; edgespec needs a text-generation model",
            )
        value = self.gguf.integer(f"{self.arch}.{name}", default)
        return value if value == default else self._checked(name, value, low)

    def per_layer(self, name: str, num_layers: int, default: int | None) -> tuple[int, ...]:
        """Returns one number a layer; the file gives an array of them or one for all layers."""
        value = self.value(name)
        if not isinstance(value, tuple | GgufSpan):
            return (self.integer(name, default),) * num_layers
        values = value if isinstance(value, tuple) else ()
        if len(values) != num_layers:
            count = value.count if isinstance(value, GgufSpan) else len(values)
            raise ModelFileError(
                f"{self.gguf.path} has {count} values in '{self.arch}.{name}' for {num_layers} "
                "layers",
                hint="the file was converted wrongly; get it from another source",
            )
        return tuple(self._checked(name, value) for value in values)

    def _checked(self, name: str, value: float, low: int = 0) -> int:
        if not isinstance(value, int) or not low <= value <= _MAX_U31:
            raise ModelFileError(
                f"{self.gguf.path} gives '{self.arch}.{name}' the value {value}, which is not an "
                f"integer from {low} to {_MAX_U31}",
                hint="the file is damaged or was converted wrongly; get it from another source",
            )
        return int(value)


class Layers:
    """The per-layer facts of a model. Raises ModelFileError, some of them when they are asked."""

    def __init__(self, keys: Keys, tensors: Iterable[str]) -> None:
        self.keys = keys
        self.num = keys.integer("block_count", low=1)
        if self.num > MAX_LAYERS:
            raise ModelFileError(
                f"{keys.gguf.path} claims to have {self.num} layers, and llama.cpp runs up to "
                f"{MAX_LAYERS}",
                hint="the file is damaged; download it again",
            )
        self.num_prediction = keys.integer("nextn_predict_layers", 0)
        self.num_trunk = max(self.num - self.num_prediction, 0)
        self.embedding_size = keys.integer("embedding_length", low=1)
        self.feed_forward_size = keys.per_layer("feed_forward_length", self.num, 0)
        self.is_recurrent_layer = _recurrent_layers(self.num, tensors)
        self.keeps_state = any(self.is_recurrent_layer) or keys.arch in _OTHER_STATE

    # -- heads -----------------------------------------------------------------------------

    @cached_property
    def num_heads(self) -> tuple[int, ...]:
        """Query heads, by layer."""
        default = 0 if all(self.is_recurrent_layer) else None
        return self.keys.per_layer("attention.head_count", self.num, default)

    @cached_property
    def num_cached_heads(self) -> tuple[int, ...]:
        """Key-value heads where a layer has its own cache, else 0."""
        arch, kv_heads = self.keys.arch, self.num_heads
        if self.keys.value("attention.head_count_kv") is not None:
            kv_heads = self.keys.per_layer("attention.head_count_kv", self.num, None)
        end = self.num_trunk or self.num
        if arch == "gemma3n":
            end = min(end, _GEMMA3N_CACHED_LAYERS)
        if arch == "gemma4":
            end = min(end, self.num - self.keys.integer("attention.shared_kv_layers", 0))
        return tuple(
            heads if index < end and (arch == _ATTENDS_TOO or not recurs) else 0
            for index, (heads, recurs) in enumerate(
                zip(kv_heads, self.is_recurrent_layer, strict=True)
            )
        )

    # -- sliding windows -------------------------------------------------------------------

    @property
    def window(self) -> int:
        """Tokens that a sliding layer sees; 0 where none slides.

        A small Exaone 4 has the window of its file all the same, as in llama.cpp: it verifies
        chains alone.
        """
        if self.keys.arch == "exaone4" and self.num_trunk != _EXAONE4_SLIDING:
            return self.keys.integer("attention.sliding_window", 0)
        return self._window if any(self.is_sliding) else 0

    @cached_property
    def _window(self) -> int:
        rule = _SLIDING.get(self.keys.arch, _Sliding(0) if self._has_pattern else None)
        if rule is None or (self.keys.arch == "exaone4" and self.num_trunk != _EXAONE4_SLIDING):
            return 0
        window = self.keys.integer("attention.sliding_window", rule.window)
        return rule.forced or window if window else 0

    @property
    def _has_pattern(self) -> bool:
        """Whether the file says of each layer whether it slides."""
        pattern = self.keys.value("attention.sliding_window_pattern")
        return isinstance(pattern, tuple | GgufSpan)

    @cached_property
    def is_sliding(self) -> tuple[bool, ...]:
        """Which layers slide, by the file's pattern if it has one, else by the table's period."""
        if not self._window:
            return (False,) * self.num
        if self._has_pattern:  # llama.cpp takes a short one as ending in 0
            value = self.keys.value("attention.sliding_window_pattern")
            padded = (*(value if isinstance(value, tuple) else ()), *(0,) * self.num)
            return tuple(flag != 0 for flag in padded[: self.num])
        rule = _SLIDING[self.keys.arch]
        period = self.keys.integer("attention.sliding_window_pattern", rule.period)
        last = 0 if rule.global_first else period - 1
        return tuple(
            index < self.num_trunk
            and not (self.keys.arch == "lfm2" and self.is_recurrent_layer[index])
            and (period == 0 or index % period != last)
            for index in range(self.num)
        )

    @cached_property
    def key_length(self) -> tuple[int, ...]:
        """Values in a head's key, by layer."""
        return self._head_lengths("key")

    @cached_property
    def value_length(self) -> tuple[int, ...]:
        """Values in a head's value, by layer; latent attention keeps them in the key."""
        if self.keys.integer("attention.key_length_mla", 0):
            return (0,) * self.num
        return self._head_lengths("value")

    def _head_lengths(self, which: str) -> tuple[int, ...]:
        """Values in a head's key or value, by layer; sliding layers may have their own."""
        default = self.embedding_size // self.num_heads[0] if self.num_heads[0] else 0
        length = self.keys.integer(f"attention.{which}_length", default)
        sliding = self.keys.integer(f"attention.{which}_length_swa", length)
        return tuple(sliding if slides else length for slides in self.is_sliding)


def _recurrent_layers(num_layers: int, tensors: Iterable[str]) -> tuple[bool, ...]:
    """Which layers keep a recurrent state, by the names of their tensors."""
    names: list[list[str]] = [[] for _ in range(num_layers)]
    for tensor in tensors:
        match = _BLOCK.match(tensor)
        if match and int(match[1]) < num_layers:
            names[int(match[1])].append(match[2])

    def has(layer: list[str], part: str) -> bool:
        return any(name.startswith(part) for name in layer)

    return tuple(
        any(all(has(layer, part) for part in parts) for parts in _RECURRENT) for layer in names
    )
