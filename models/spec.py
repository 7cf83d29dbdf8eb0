"""Turns a model file's metadata into what planning needs: layers, heads, vocabulary, bytes.

What a layer keeps is worked out in `edgespec.models.layers`. Deliberately knows nothing of
contexts, cache types, devices or time, and never reads a weight.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from edgespec.errors import ModelFileError
from edgespec.models.gguf.ggml_types import FILE_TYPE_NAMES
from edgespec.models.gguf.reader import Gguf, GgufSpan, GgufTensor, GgufValue
from edgespec.models.gguf.shards import read_gguf_shards
from edgespec.models.layers import SNAPSHOTS, Keys, Layers
from edgespec.models.pooling import Pooling, pooling_of

# Values of `ModelSpec.format`.
GGUF_FORMAT, ONNX_FORMAT = "gguf", "onnx"
# Beginnings of names of tensors of which a step reads rows.
LOOKUP_TABLES = ("token_embd.", "per_layer_token_embd.", "position_embd.", "token_types.")

# Added by llama.cpp when the type was guessed.
_FILE_TYPE_GUESSED = 1024


_EMBEDDING_ONLY = {
    "bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2",
    "jina-bert-v3", "eurobert", "gemma-embedding", "llama-embed", "t5encoder",
}  # fmt: skip
_ENCODER_DECODER = {"t5"}
_DIFFUSION = {"dream", "llada", "llada-moe", "rnd1"}
# Kinds of heads in files of their own: one that reads what three blocks of a model take in, a
# model's own last block, and one that looks into its model's cache.
EAGLE, MTP, ASSISTANT, DFLASH = "eagle3", "mtp", "gemma4-assistant", "dflash"
_DRAFT_HEADS = {EAGLE, DFLASH, ASSISTANT}
_DFLASH_BLOCK = 16  # tokens of a step, where a head's file does not say
_AUDIO = {"wavtokenizer-dec", "qwen3tts", "pockettts"}

_ARCH = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
_EXPERT = re.compile(r"blk\.\d{1,4}\..*(?:_exps|_chexps|ffn_(?:gate|up|down)\.\d)")
_TEXT_MODEL = "edgespec needs a text-generation model"
# Names of `SamplingParams`, by the file's, the least and the most.
_SAMPLING = {
    "temperature": ("temp", 0.0, 100.0),
    "top_k": ("top_k", 0, 1 << 30),
    "top_p": ("top_p", 1e-6, 1.0),
    "min_p": ("min_p", 0.0, 1.0),
}


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """What a head in a file of its own reads of the model that it drafts for."""

    kind: str  # EAGLE, MTP, ASSISTANT or DFLASH
    width: int  # of the model's embeddings
    layers: tuple[int, ...] = ()  # whose inputs it is fed; without any, what the last one gives
    block: int = 0  # tokens of a step, of a DFlash head; those to be drafted are `mask_id`
    mask_id: int = 0
    is_causal: bool = True  # whether such a token sees those before it alone


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What a model file says about itself. All per-layer tuples have `num_layers` entries.

    `path` is that of the first part, which llama.cpp takes for the whole.
    `num_kv_heads[i]` counts the heads whose keys and values layer i caches: 0 for recurrent layers,
    for layers that reuse another layer's cache and for unused prediction heads. `value_length` is 0
    where values are not cached, because they are computed from the keys (multi-head latent
    attention).
    `fingerprint` is the same for copies of a file wherever they lie; of the weights it holds
    samples, which tell fine-tunes with the same shapes and texts apart. `notes` are sentences about
    what cannot be done with this model.
    """

    path: Path
    files: tuple[Path, ...]
    file_bytes: int
    weight_bytes: int
    fingerprint: str
    arch: str
    name: str
    file_type: str
    notes: tuple[str, ...] = ()

    num_layers: int
    num_prediction_layers: int = 0
    embedding_size: int
    vocab_size: int
    context_length: int
    feed_forward_size: tuple[int, ...]
    num_heads: tuple[int, ...]
    num_kv_heads: tuple[int, ...]
    key_length: tuple[int, ...]
    value_length: tuple[int, ...]
    sliding_window: int
    is_sliding: tuple[bool, ...]
    num_experts: int = 0
    num_experts_used: int = 0
    expert_feed_forward_size: int = 0

    keeps_state: bool = False  # recurrent, in some of the layers
    is_recurrent_layer: tuple[bool, ...]
    tied_embeddings: bool = False

    table_bytes: int  # of embeddings, whatever else these are
    expert_bytes: int = 0
    type_bytes: tuple[tuple[str, int], ...]

    chat_template: str | None
    bos_id: int | None
    eos_id: int | None
    tokenizer_model: str
    tokenizer_hash: str

    # for conversations with tools, where it is not `chat_template`
    tool_template: str | None = None
    # how texts become vectors
    pooling: Pooling = field(default_factory=Pooling)
    # of the model's files: GGUF_FORMAT, or ONNX_FORMAT for a folder, whose tensors are not listed
    format: str = GGUF_FORMAT
    # of a head in a file of its own, which is no model
    reads: HeadSpec | None = None
    # how tokens are picked where nothing else is said: fields of `SamplingParams`
    sampling: Mapping[str, float] = field(default_factory=dict)
    # by name
    tensors: Mapping[str, GgufTensor] = field(default_factory=dict, repr=False)
    # entries of the file's header, as of `Gguf`
    settings: tuple[bytes, ...] = field(default=(), repr=False)
    # of the tokenizer in the file: its merges, and bytes of all texts of tokens
    num_merges: int = 0
    token_text_bytes: int = 0

    @property
    def num_parameters(self) -> int:
        """Values of all weights."""
        return sum(math.prod(one.dims) for one in self.tensors.values())

    @property
    def head_name(self) -> str:
        """The tensor that makes logits."""
        return "token_embd.weight" if self.tied_embeddings else "output.weight"

    @property
    def has_snapshots(self) -> bool:
        """Whether llama.cpp can take back the last tokens of its recurrent state."""
        return self.arch in SNAPSHOTS

    @property
    def bytes_per_token(self) -> int:
        """Bytes of weights that a step over one token reads: what it multiplies by.

        Of embeddings it reads a row, unless they are the head too, and of experts those it uses.
        """
        if self.format == ONNX_FORMAT:  # whose table is none of the weights
            return self.weight_bytes
        head = self.tensors.get(self.head_name) if self.tied_embeddings else None
        rows = self.table_bytes - (0 if head is None else head.data_bytes)
        idle = max(0, self.num_experts - (self.num_experts_used or self.num_experts))
        return self.weight_bytes - rows - self.expert_bytes * idle // max(1, self.num_experts)

    @property
    def kv_values_per_token(self) -> int:
        """Numbers cached for one token in all layers, a sliding layer counted as any other.

        SmolLM2-135M: 30 layers x 3 heads x (64 + 64) = 11,520, so 22.5 KiB a token in F16.
        """
        layers = zip(self.num_kv_heads, self.key_length, self.value_length, strict=True)
        return sum(heads * (key + value) for heads, key, value in layers)


def read_model_spec(path: str | os.PathLike[str], *, heads: bool = False) -> ModelSpec:
    """Reads the metadata of a GGUF model, by any of its parts: 30 ms for a vocabulary of 152,000.

    With `heads` also of a head in a file of its own. Raises ModelNotFoundError if there is no file,
    and ModelFileError if it cannot be read or holds something else (an adapter, a projector, ...).
    """
    shards = read_gguf_shards(path)
    first, tensors = shards[0], [tensor for shard in shards for tensor in shard.tensors]
    _refuse_other_kinds(first, tensors, heads)
    keys = Keys(first)
    layers = Layers(keys, [tensor.name for tensor in tensors])
    tables = (one.dims for one in tensors if one.name == "token_embd.weight")
    by_table = next((dims[1] for dims in tables if len(dims) > 1), 0)
    vocab_size = _span(first, "tokens").count or keys.integer("vocab_size", by_table)
    by_type: Counter[str] = Counter()
    for tensor in tensors:
        by_type[tensor.type.name] += tensor.data_bytes
    # An encoder makes no logits; a head in a file of its own may take both tables from its model.
    names = {tensor.name for tensor in tensors}
    makes_logits = keys.arch not in {*_EMBEDDING_ONLY, EAGLE}
    makes_logits &= keys.arch != DFLASH or "token_embd.weight" in names
    return ModelSpec(
        path=first.path,
        files=tuple(shard.path for shard in shards),
        file_bytes=sum(shard.file_bytes for shard in shards),
        weight_bytes=sum(by_type.values()),
        fingerprint=content_hash(
            ((shard.path, shard.file_bytes) for shard in shards), header_hash(shards)
        ),
        arch=keys.arch,
        name=_label(first.text("general.name")) or first.path.stem,
        file_type=_file_type(first, by_type),
        notes=tuple(_notes(keys.arch, layers.num_prediction)),
        num_layers=layers.num,
        num_prediction_layers=layers.num_prediction,
        embedding_size=layers.embedding_size,
        vocab_size=vocab_size,
        context_length=keys.integer("context_length", low=1),
        feed_forward_size=layers.feed_forward_size,
        num_heads=layers.num_heads,
        num_kv_heads=layers.num_cached_heads,
        key_length=layers.key_length,
        value_length=layers.value_length,
        sliding_window=layers.window,
        is_sliding=layers.is_sliding,
        num_experts=keys.integer("expert_count", 0),
        num_experts_used=max(keys.per_layer("expert_used_count", layers.num, 0)),
        expert_feed_forward_size=max(keys.per_layer("expert_feed_forward_length", layers.num, 0)),
        keeps_state=layers.keeps_state,
        is_recurrent_layer=layers.is_recurrent_layer,
        tied_embeddings=makes_logits and "output.weight" not in names,
        table_bytes=sum(one.data_bytes for one in tensors if one.name.startswith(LOOKUP_TABLES)),
        expert_bytes=sum(one.data_bytes for one in tensors if _EXPERT.match(one.name)),
        type_bytes=tuple(by_type.most_common()),
        chat_template=first.text("tokenizer.chat_template") or None,
        tool_template=first.text("tokenizer.chat_template.tool_use") or None,
        sampling=_sampling(first.metadata),
        bos_id=_token_id(first, "bos", vocab_size),
        eos_id=_token_id(first, "eos", vocab_size),
        tokenizer_model=_label(first.text("tokenizer.ggml.model")),
        tokenizer_hash=first.tokenizer_hash,
        num_merges=_span(first, "merges").count,
        token_text_bytes=_span(first, "tokens").text_bytes,
        reads=_reads(keys, tensors),
        pooling=pooling_of(first, is_encoder=keys.arch in _EMBEDDING_ONLY),
        tensors={tensor.name: tensor for tensor in tensors},
        settings=first.settings,
    )


def _refuse_other_kinds(gguf: Gguf, tensors: list[GgufTensor], heads: bool) -> None:
    """Raises ModelFileError for files that are well-formed and not a language model, or a head."""
    kind, arch = gguf.text("general.type"), gguf.text("general.architecture")
    names = {tensor.name for tensor in tensors}
    mtp = _is_last_block(Keys(gguf), names)
    if heads and (mtp or arch in _DRAFT_HEADS):
        return
    give_model = "name the language model it belongs to"
    if kind == "imatrix" or "imatrix.datasets" in gguf.metadata:
        problem, hint = "an importance matrix", "it is an input of `edgespec quantize`"
    elif kind == "adapter" or "adapter.type" in gguf.metadata:
        problem, hint = (
            f"an adapter for {_label(arch) or 'a model'}",
            "merge it with llama-export-lora",
        )
    elif kind == "mmproj" or arch == "clip":
        problem, hint = "an image or audio projector", give_model
    elif arch == "controlvector":
        problem, hint = "a control vector", give_model
    elif arch in _DRAFT_HEADS or mtp:
        problem = f"a draft head ({arch}) that reads another model's states"
        hint = f"{give_model}, and this file with --draft-model"
    elif arch in _AUDIO:
        problem, hint = f"a speech model ({arch})", _TEXT_MODEL
    elif not arch:
        problem, hint = "without 'general.architecture'", _TEXT_MODEL
    elif not _ARCH.fullmatch(arch):
        problem, hint = f"of the impossible architecture {arch[:32]!r}", _TEXT_MODEL
    elif not names:
        problem, hint = "only a vocabulary", "name the file with the weights"
    elif "token_embd.weight" not in names:
        problem, hint = f"without token_embd.weight (architecture {arch})", _TEXT_MODEL
    else:
        return
    raise ModelFileError(f"{gguf.path} is not a language model: it is {problem}", hint=hint)


def _span(gguf: Gguf, which: str) -> GgufSpan:
    """One of the tokenizer's arrays, empty where there is none."""
    value = gguf.metadata.get(f"tokenizer.ggml.{which}")
    return value if isinstance(value, GgufSpan) else GgufSpan("string", 0, 0, 0)


def _file_type(gguf: Gguf, by_type: Counter[str]) -> str:
    """The file's own word for its quantization, else the type that most bytes have."""
    number = gguf.integer("general.file_type", -1)
    if number >= _FILE_TYPE_GUESSED:
        number -= _FILE_TYPE_GUESSED
    return FILE_TYPE_NAMES.get(number) or by_type.most_common(1)[0][0]


def _reads(keys: Keys, tensors: list[GgufTensor]) -> HeadSpec | None:
    """Raises ModelFileError for a head that does not say what it reads, or drafts with."""
    if _is_last_block(keys, [tensor.name for tensor in tensors]):
        return HeadSpec(MTP, keys.integer("embedding_length", low=1))
    if keys.arch == ASSISTANT:
        return HeadSpec(ASSISTANT, keys.integer("embedding_length_out", low=1))
    if keys.arch not in (EAGLE, DFLASH):
        return None
    layers = keys.value("target_layers")
    if not isinstance(layers, tuple) or not all(isinstance(one, int) for one in layers):
        raise ModelFileError(
            f"{keys.gguf.path} does not say which layers of its model it reads",
            hint="convert it again with llama.cpp's convert_hf_to_gguf.py",
        )
    numbers = tuple(int(one) for one in layers)
    if keys.arch == EAGLE:
        return HeadSpec(EAGLE, keys.integer("target_hidden_size", low=1), numbers)
    mask_id = keys.gguf.integer("tokenizer.ggml.mask_token_id", -1)
    if mask_id < 0:
        raise ModelFileError(
            f"{keys.gguf.path} does not say which token is its mask",
            hint="convert it again with llama.cpp's convert_hf_to_gguf.py",
        )
    return HeadSpec(
        DFLASH,
        keys.integer("embedding_length", low=1),
        numbers,
        block=keys.integer("block_size", _DFLASH_BLOCK, low=2),
        mask_id=mask_id,
        is_causal=keys.value("attention.causal") is True,
    )


def _is_last_block(keys: Keys, names: Collection[str]) -> bool:
    """Whether a file has of a model's blocks only the last one, which predicts further tokens."""
    return keys.integer("nextn_predict_layers", 0) > 0 and not any(
        name.startswith("blk.0.") for name in names
    )


def _token_id(gguf: Gguf, which: str, vocab_size: int) -> int | None:
    """A special token of the file; as in llama.cpp one outside the vocabulary counts as none."""
    key = f"tokenizer.ggml.{which}_token_id"
    value = gguf.integer(key, -1)
    return value if 0 <= value < vocab_size else None


def _label(text: str) -> str:
    """A text of the file that is fit to print: one line, no control characters, not endless."""
    return "".join(letter for letter in text[:200] if letter.isprintable())


def _sampling(metadata: Mapping[str, GgufValue]) -> dict[str, float]:
    """The settings of a file that can be used; whoever made the file wrote them."""
    found = {}
    for name, (key, low, high) in _SAMPLING.items():
        value = metadata.get(f"general.sampling.{key}")
        if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
            found[name] = int(value) if name == "top_k" else float(value)
    return found


def header_hash(shards: Sequence[Gguf]) -> str:
    """Tells files apart by their headers and sizes alone."""
    digest = blake2b(digest_size=8)
    for shard in shards:
        digest.update(f"{shard.header_hash} {shard.file_bytes}\n".encode())
    return digest.hexdigest()


def _notes(arch: str, num_prediction: int) -> Iterator[str]:
    if arch in _EMBEDDING_ONLY:
        yield f"{arch} is an embedding model: it does not generate text"
    if arch in _ENCODER_DECODER:
        yield f"{arch} reads the prompt with an encoder, which edgespec does not use"
    if arch in _DIFFUSION:
        yield f"{arch} writes by diffusion, not token by token"
    if num_prediction:
        layers = "layer predicts" if num_prediction == 1 else f"{num_prediction} layers predict"
        yield f"the last {layers} further tokens, for drafts alone"


# Of each file, all over it: fine-tunes of one model differ everywhere.
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 10


def content_hash(files: Iterable[tuple[Path, int]], *more: str) -> str:
    """16 hexadecimal digits for files and their sizes in bytes, and for `more` about them.

    Reads 64 KiB of each: below a millisecond once they are cached. Raises ModelFileError for a file
    that cannot be read.
    """
    digest = blake2b("\n".join(more).encode(), digest_size=8)
    for path, size in files:
        digest.update(f"{size}\n".encode())
        try:
            with path.open("rb", buffering=0) as file:
                for sample in range(_SAMPLES):
                    file.seek(size * sample // _SAMPLES)
                    digest.update(file.read(_SAMPLE_BYTES))
        except OSError as error:
            raise ModelFileError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()
