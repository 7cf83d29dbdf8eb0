"""How many bytes a run will allocate, by component, before anything is loaded.

What llama.cpp allocates it says itself (`simulation`). What it does not know is added here: rows
of logits, scratch of kernels, drafters' tables, the process. A component is an allocation
(llama.cpp takes exactly that and touches it) or a ceiling (it may grow to that, or is touched as
it is used).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from edgespec.memory.bytes.config import HOST, KV_FLOATS, RunConfig
from edgespec.memory.bytes.experts import experts_of
from edgespec.memory.bytes.simulation import Allocation, DeviceBytes
from edgespec.memory.device.kernels import packed_bytes
from edgespec.memory.device.track import MOST_FREED_BYTES
from edgespec.models.gguf.ggml_types import GGML_NUMBERS
from edgespec.models.gguf.reader import GgufTensor
from edgespec.models.spec import LOOKUP_TABLES, ModelSpec

# What edgespec's kernels keep as it is. They read such matrices beside quantized ones, and none
# of a file that has no others.
_FLOATS = ("F32", "F16", "BF16")
_MULTIPLIED_VECTOR = "ffn_gate_inp_shexp.weight"  # the gate of a shared expert
F32 = 4
TABLE, HEAD = "token_embd.weight", "output.weight"
# Architectures with tables that llama.cpp marks (`TENSOR_READ_LAZY`).
_READS_ROWS = ("gemma4", "qwen4exp")
# Interpreter, numpy, the command line and llama.cpp's library, on Linux x86-64 with Python 3.11,
# where all pages of the libraries are in the page cache, and what the C library keeps of freed
# memory. Measured: 58 MiB without that (benchmarks/LOG.md).
RUNTIME_BYTES = (58 << 20) + MOST_FREED_BYTES
# Of that llama.cpp's library and our modules that decode, which come with the first load: with 25
# and 28 a plan was exceeded by 2; and by how much a process grows with which they came already.
LIBRARY_BYTES, GROWTH_BYTES = (30 << 20) + MOST_FREED_BYTES, (4 << 20) + MOST_FREED_BYTES
NUMPY_BYTES = 14 << 20  # of these, which are there already where numpy is: 16 MiB were measured
# Of each token of a context, its text and its ids, which are kept in several lists. Measured behind
# 30,000 tokens: 620 bytes, drafters' tables included.
TEXT_TOKEN_BYTES = 640
# What llama.cpp keeps of a token and of a merge (`llama.cpp: src/llama-vocab.cpp`): entries of
# vectors, and nodes of hash tables as glibc rounds them. Such a table has one of these numbers of
# buckets. Texts of over 15 bytes lie apart, three times: six tenths of all in the worst case. Of 20
# vocabularies that were measured this is 0 to 5 MiB more than each takes.
_TOKEN_BYTES, _MERGE_BYTES, _BUCKET_BYTES = 136, 96, 8
_BUCKETS = (0, 20753, 42043, 85229, 172933, 351061, 712697, 1447153, 2938679, 5967347)
_LONG_TEXTS = 3 * 0.6
_MERGING_BYTES = 9 << 18  # tables of letters, where words are taken apart
# Of the header that llama.cpp reads, as long as it loads: texts, scores and types.
_HEADER_TOKEN_BYTES, _HEADER_MERGE_BYTES = 40, 32
# Trees of letters: 352 were measured. The last are the tokenizers package's own tables.
_OTHER_TOKEN_BYTES = {"t5": 370, "rwkv": 370, "plamo2": 370, "tokenizers": 860}
# Of a vocabulary, to pick a token of it: work arrays, the sorted row and its weights where filters
# keep nearly all tokens, and what a grammar asks of each. Measured: up to 53 bytes a token.
SAMPLING_TOKEN_BYTES = 64
# Of a vocabulary, for schemas and grammars: what is known of each token and of usual strings, built
# at the first use. Measured: 285 to 403 bytes a token. The state of an answer: of 464 public
# schemas 11 MiB at most, one in a hundred over 3.2; 13 MiB with as many states as may be.
GRAMMAR_TOKEN_BYTES = 410
GRAMMAR_STATE_BYTES = 13 << 20


@dataclass(frozen=True, slots=True)
class Component:
    """Some bytes with a name and a place: `host`, or the label of another device.

    Mapped ones are pages of a file: resident once they are used, shared, and the system may drop
    them.
    """

    name: str
    nbytes: int
    is_ceiling: bool = False
    device: str = HOST
    is_mapped: bool = False


def kv_type_fits(spec: ModelSpec, kind: str) -> bool:
    """Whether the heads of all layers are whole blocks of a cache type."""
    lengths = (*spec.key_length, *spec.value_length)
    # 32 values have a scale of their own.
    return kind in KV_FLOATS or all(length % 32 == 0 for length in lengths)


def weights_parts(spec: ModelSpec, config: RunConfig, answer: Allocation) -> Iterator[Component]:
    """The weights: in the file's format, as kernels read them, and on other devices."""
    devices = {label: one.weights + one.packed for label, one in answer.items() if label != HOST}
    here = answer.get(HOST, DeviceBytes())
    if config.mapped:
        host = spec.weight_bytes - sum(devices.values())
        yield Component("weights", max(0, host), is_ceiling=True, is_mapped=True)
    else:  # what is looked up by row stays pages of the file in any case
        table = spec.tensors.get("per_layer_token_embd.weight")
        looked_up = 0
        if table is not None and spec.arch in _READS_ROWS:
            looked_up = min(here.weights, table.data_bytes)
        yield Component("weights", here.weights - looked_up)
        yield Component("table_weights", looked_up, is_ceiling=True, is_mapped=True)
    experts = experts_of(spec) if config.expert_bytes else None
    if experts is None:
        yield Component("weights_repacked", here.packed, is_mapped=config.packed_file)
    else:
        yield Component("weights_repacked", max(0, here.packed - experts.nbytes))
        yield Component("experts", config.expert_bytes, is_ceiling=True)
    for label, size in devices.items():
        yield Component("weights", size, device=label)
    for label, one in answer.items():
        yield Component("adapters", one.adapters, device=label)


def runtime_bytes(spec: ModelSpec) -> int:
    """Bytes of the interpreter, the libraries and llama.cpp's vocabulary."""
    return RUNTIME_BYTES + vocabulary_bytes(spec)


def vocabulary_bytes(spec: ModelSpec) -> int:
    """Bytes of llama.cpp's tables of tokens and merges: a ceiling, up to 5 MiB too high."""
    each = _TOKEN_BYTES + _OTHER_TOKEN_BYTES.get(spec.tokenizer_model, 0)
    texts = round(_LONG_TEXTS * spec.token_text_bytes)
    merging = _MERGING_BYTES + _MERGE_BYTES * spec.num_merges if spec.num_merges else 0
    buckets = _buckets(spec.vocab_size) + _buckets(spec.num_merges)
    return each * spec.vocab_size + texts + merging + _BUCKET_BYTES * buckets


def _buckets(entries: int) -> int:
    return next((count for count in _BUCKETS if count >= entries), 2 * entries)


def footprint(
    spec: ModelSpec, config: RunConfig, answer: Allocation, *, drafter_bytes: int = 0
) -> tuple[Component, ...]:
    """The components of a whole run, of which llama.cpp gives `answer`."""
    parts = (
        *weights_parts(spec, config, answer),
        *context_parts(answer),
        Component("logits", config.max_nodes * spec.vocab_size * F32, is_ceiling=True),
        Component("drafter_tables", drafter_bytes, is_ceiling=True),
        Component("text", TEXT_TOKEN_BYTES * config.cache_cells, is_ceiling=True),
    )
    here = sum(part.nbytes for part in parts if part.device == HOST)
    loading = max(0, loading_bytes(spec, config, answer.get(HOST, DeviceBytes())) - here)
    parts += (
        Component("loading", loading, is_ceiling=True),
        Component("runtime", runtime_bytes(spec), is_ceiling=True),
    )
    return tuple(part for part in parts if part.nbytes)


def loading_bytes(spec: ModelSpec, config: RunConfig, here: DeviceBytes) -> int:
    """Most bytes of weights while they are read: a tensor lies beside its packed copy.

    The header is there as well until then. llama.cpp first reads what stays as it is, then what is
    packed, the largest first, each into a buffer of its size; what goes to workers comes last
    (`llama.cpp: src/llama-model-loader.cpp`, `load_all_data`). A tied table that is not packed is
    read to where it stays. Where experts stay in a file, what is packed leaves memory at once.
    """
    has_workers = any(one.worker for one in config.devices)
    if config.mapped or not (here.packed or has_workers):
        return 0
    tensors = {tensor.name: tensor for tensor in multiplied_tensors(spec)}
    head = tensors.get(spec.head_name)
    if head is not None and not (_packed_bytes(head) if config.kernels else head.name == HEAD):
        del tensors[spec.head_name]
    sizes = sorted((tensor.data_bytes for tensor in tensors.values()), reverse=True)
    kept = min(MOST_FREED_BYTES, max(sizes, default=0))
    if config.expert_bytes:
        return here.weights + 2 * max(sizes, default=0) + kept
    packed = [min(size, here.packed) for size in itertools.accumulate(sizes)]
    peak = max((sum(one) for one in zip(sizes, packed, strict=True)), default=0)
    if has_workers:
        peak = max(peak, here.packed + max(sizes, default=0))
    header = _HEADER_TOKEN_BYTES * spec.vocab_size + _HEADER_MERGE_BYTES * spec.num_merges
    header += spec.token_text_bytes
    return header + here.weights + max(peak, here.packed + kept)


def context_parts(answer: Allocation) -> Iterator[Component]:
    """What a context takes on each device: its cache, recurrent state included, and buffers.

    `work` is what CPU kernels share: activations in the weights' number format, and scratch.
    """
    for label, one in answer.items():
        yield Component("kv_cache", one.cache, device=label)
        yield Component("compute", one.compute, is_ceiling=True, device=label)
        yield Component("work", one.work, is_ceiling=True, device=label)


def beside_another(role: str, spec: ModelSpec, parts: Iterable[Component]) -> tuple[Component, ...]:
    """The components that a model in some `role` adds to a run: there is a runtime already."""
    vocabulary = Component("vocabulary", vocabulary_bytes(spec), is_ceiling=True)
    added = (*(part for part in parts if part.name != "runtime"), vocabulary)
    return tuple(replace(part, name=f"{role}_{part.name}") for part in added)


def multiplied_tensors(spec: ModelSpec) -> Iterator[GgufTensor]:
    """Matrices that every step multiplies by: a tied table as well, which is the head."""
    for tensor in spec.tensors.values():
        is_matrix = len(tensor.dims) > 1 and "norm." not in tensor.name
        is_multiplied = is_matrix or tensor.name.endswith(_MULTIPLIED_VECTOR)
        is_looked_up = tensor.name.startswith(LOOKUP_TABLES)
        is_head = spec.tied_embeddings and tensor.name == TABLE
        if is_head or (is_multiplied and not is_looked_up):
            yield tensor


def has_packed_weights(spec: ModelSpec) -> bool:
    """Whether edgespec's kernels read any quantized matrix of this file."""
    multiplied = multiplied_tensors(spec)
    return any(_packed_bytes(one) for one in multiplied if one.type.name not in _FLOATS)


def _packed_bytes(tensor: GgufTensor) -> int:
    """As edgespec's kernels read it; 0 for a matrix that they leave to llama.cpp."""
    columns, rows, *others = *tensor.dims, 1
    return packed_bytes(GGML_NUMBERS[tensor.type.name], rows, columns) * prod(others)
