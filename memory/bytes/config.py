"""How a model is loaded: one object from the plan to the backend, and names of what is in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HOST, GPU, WORKER = "host", "gpu", "worker"  # labels; of several with a number
# Bytes per value of a KV cache; block types store a 2-byte scale per 32 values.
KV_TYPE_BYTES = {
    **{"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32},
    **{"q4_1": 20 / 32, "iq4_nl": 18 / 32, "q4_0": 18 / 32},
}
KV_FLOATS = ("f32", "bf16", "f16")  # types that lose nothing that could be measured
MEBIBYTE = 1 << 20
PIECE_TOKENS = 512  # of a piece of a cache that is written to disk, at most
CELL_PADDING = 256  # llama.cpp rounds caches up to this many cells


def kv_name(key: str, value: str) -> str:
    """What a cache is called whose keys and values have these types: "q8_0", "q8_0/q4_0"."""
    return key if key == value else f"{key}/{value}"


def kv_pair(name: str) -> tuple[str, str]:
    """The types of keys and values of a cache that is called so."""
    key, _, value = name.partition("/")
    return key, value or key


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or a worker's device, that takes `layers` of a model, the head being one.

    `label` is what its bytes are reported under, `number` its place among a worker's devices.
    """

    label: str
    layers: int
    name: str
    worker: str = ""
    number: int = 0
    description: str = ""  # a GPU's own name: its number may be another one's the next time
    free_bytes: int = 0  # when it was planned with


@dataclass(frozen=True, slots=True)
class RunConfig:
    """How a model is loaded: all that decides its bytes and its step times. Sizes are in tokens.

    The cache has `cells` for `users` sequences, each of at most `context_size`; 0 cells are those
    of one such sequence. `batch_size` is the prefill chunk, which sizes the compute buffer;
    `max_nodes` bounds one step (roots included), and with it the rows of logits, `max_leaves` its
    branches.

    With `exact`, rows do not depend on others: each user has cells of its own, chains alone are
    verified where there are several, and ONNX Runtime computes single tokens as two rows.

    The last `gpu_layers` lie on `devices` by their shares, those of the first one first; without
    any, llama.cpp spreads them over the GPUs it sees. Of `overrides`, regular expressions with the
    label of a device or the host, the first one found in a tensor's name says where that one lies.

    `mapped` weights are pages of the file, which packed copies come on top of; others are read into
    memory once. With `kernels`, weights are packed for edgespec's own where these fit this
    llama.cpp; a `tied` table, which is the head, too, once. With `packed_file` they are kept in a
    file, of which they are pages; with `expert_bytes` memory has so many bytes of experts, and
    others are read from that file when a step uses them.
    """

    context_size: int
    batch_size: int = 256
    max_nodes: int = 32
    max_leaves: int = 1
    threads: int = 1
    kv_type_k: str = "f16"
    kv_type_v: str = "f16"
    gpu_layers: int = 0  # negative: all
    devices: tuple[Device, ...] = ()
    overrides: tuple[tuple[str, str], ...] = ()
    mapped: bool = True
    kernels: bool = False
    packed_file: bool = False
    expert_bytes: int = 0
    tied: bool = False
    users: int = 1
    cells: int = 0
    exact: bool = False
    drafter: str = "none"
    snapshots: int = 0  # of a recurrent state, besides the one behind the last token
    head: bool = False  # the block that predicts further tokens is loaded, too
    captured_layers: tuple[int, ...] = ()  # whose inputs a head in a file of its own reads
    drafts_itself: bool = False  # behind a window, under a sequence id of its own
    whole: bool = False  # layers that slide keep all cells, so that it can go back
    states: int = 0  # copies of recurrent or sliding layers' states that are kept at most
    disk_cache_bytes: int = 0  # for pieces of its cache, which have a sequence id of their own
    projector: Path | None = None  # with which it sees images
    image_tokens: int | None = None  # most of one, where the projector leaves it open
    lora: tuple[tuple[Path, float], ...] = ()  # adapters, and the scales that they begin with
    backend: str = "llamacpp"
    device: str = "cpu"  # where steps run: cpu, gpu or npu

    @property
    def cache_cells(self) -> int:
        """Tokens that the cache has room for, of all its sequences together."""
        return self.cells or self.context_size


def padded(cells: int) -> int:
    """Cells llama.cpp allocates for a context of `cells` tokens."""
    return -(-cells // CELL_PADDING) * CELL_PADDING
