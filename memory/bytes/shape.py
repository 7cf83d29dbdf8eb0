"""The settings that decide how many bytes llama.cpp allocates."""

from __future__ import annotations

from dataclasses import dataclass

HOST, GPU, WORKER = "host", "gpu", "worker"  # labels; of several with a number
# Bytes per value of a KV cache; block types store a 2-byte scale per 32 values.
KV_TYPE_BYTES = {
    **{"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32},
    **{"q4_1": 20 / 32, "iq4_nl": 18 / 32, "q4_0": 18 / 32},
}
KV_FLOATS = ("f32", "bf16", "f16")  # types that lose nothing that could be measured
_CELL_PADDING = 256  # llama.cpp rounds caches up to this many cells


def kv_name(key: str, value: str) -> str:
    """What a cache is called whose keys and values have these types: "q8_0", "q8_0/q4_0"."""
    return key if key == value else f"{key}/{value}"


def kv_pair(name: str) -> tuple[str, str]:
    """The types of keys and values of a cache that is called so."""
    key, _, value = name.partition("/")
    return key, value or key


@dataclass(frozen=True, slots=True)
class Device:
    """A device that takes `layers` of a model: a worker's, by its number, or a local one by name.

    `label` is what its bytes are reported under.
    """

    label: str
    layers: int
    name: str
    worker: str = ""
    number: int = 0


@dataclass(frozen=True, slots=True)
class RunShape:
    """How a model is loaded; sizes are in tokens.

    `context_size` is what the cache has room for, of all its sequences together; these share all
    cells if they are `unified`. `max_nodes` bounds one verification step, and with it the rows of
    logits. `mapped` weights are pages of the file, which repacked copies come on top of; others
    are read into memory once. The last `gpu_layers`, the head being one, lie on `devices` by their
    shares, those of the first one first. Of `overrides`, regular expressions with the label of a
    device or the host, the first one found in a tensor's name says where that one lies.
    """

    context_size: int
    batch_size: int
    max_nodes: int
    type_k: str = "f16"
    type_v: str = "f16"
    threads: int = 1
    gpu_layers: int = 0  # negative: all
    devices: tuple[Device, ...] = ()
    overrides: tuple[tuple[str, str], ...] = ()
    mapped: bool = True
    kernels: bool = False  # edgespec's own, where they fit
    snapshots: int = 0  # of a recurrent state, besides the one behind the last token
    sequences: int = 1  # that share the cache
    unified: bool = True
    leaves: int = 1  # of the largest tree: each but the first is a sequence for one step
    head: bool = False  # whether the block that predicts further tokens is loaded
    whole: bool = False  # whether layers that slide keep all cells
    captured: tuple[int, ...] = ()  # layers whose inputs a head in a file of its own reads


def padded(cells: int) -> int:
    """Cells llama.cpp allocates for a context of `cells` tokens."""
    return -(-cells // _CELL_PADDING) * _CELL_PADDING
