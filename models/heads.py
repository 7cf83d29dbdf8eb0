"""Heads that predict further tokens from a model's own states: in its file, or beside it.

A file's last layers may be such a head (multi-token prediction, called MTP or NextN); others are
files of their own, next to the model and named after their kind. Knows files alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from edgespec.errors import UnsupportedError
from edgespec.models.hub.choice import heads_of
from edgespec.models.spec import ASSISTANT, DFLASH, EAGLE, MTP, HeadSpec, ModelSpec

# Architectures whose head edgespec drafts with: llama.cpp computes it, it has a cache of keys and
# values of its own, and it was tried. llama.cpp computes that of some others, too
# (`LLM_GRAPH_TYPE_DECODER_MTP` in `src/models/*.cpp`).
MTP_ARCHITECTURES = {"qwen35", "qwen35moe", "glm4moe"}
# Architectures that hand out what their blocks take in, which EAGLE-3 and DFlash heads read.
# llama.cpp has some others (`t_layer_inp` in `src/models/*.cpp`), and ends the process for the
# rest.
HANDS_OUT = {"llama", "qwen3", "qwen3moe"}
# Others, of which edgespec's kernels read it while a step computes, by the names of its values.
NAMES_OUTPUTS = {"qwen2"}
READABLE = HANDS_OUT | NAMES_OUTPUTS
DRAFTED = "d2t"  # the tensor of the tokens that a head's rows stand for; without it, all
_BLOCKS_READ = 3  # by an EAGLE-3 head
_ASSISTED = "gemma4"
# Tensors of later kinds of DFlash heads, and what they have.
_NOT_DRAFTED = {
    "markov_w1.weight": "a Markov chain (DSpark)",
    "selector_hidden.weight": "a selector (DFlash 2)",
    "hc_head_fn.weight": "hyper-connections",
}


def has_head(spec: ModelSpec) -> bool:
    """Whether a file has a head that drafts."""
    if spec.num_prediction_layers != 1 or spec.arch not in MTP_ARCHITECTURES:
        return False
    names = (f"blk.{spec.num_layers - 1}.attn_{part}.weight" for part in ("k", "v"))
    return all(name in spec.tensors and len(spec.tensors[name].dims) == 2 for name in names)


def require_head(spec: ModelSpec) -> None:
    """Raise UnsupportedError for a file without a head that drafts."""
    if has_head(spec):
        return
    kind = "no head that predicts further tokens"
    if spec.num_prediction_layers:
        kind = f"a head that {spec.arch} files are not drafted with"
    raise UnsupportedError(
        f"{spec.path.name} has {kind}",
        hint="name one with --draft-model, or leave out the drafter 'head'",
    )


def check_head(target: ModelSpec, head: ModelSpec) -> None:
    """Raise UnsupportedError unless a head in a file of its own can read this model's states."""
    assert head.reads is not None, "a head"
    if head.vocab_size != target.vocab_size:
        problem = f"it is made for {head.vocab_size} tokens, and the model has {target.vocab_size}"
    else:
        problem = _PROBLEMS[head.reads.kind](target, head, head.reads)
    if problem:
        raise UnsupportedError(
            f"{head.path.name} cannot draft for {target.path.name}: {problem}",
            hint="name a head that was trained for this model, or leave out --draft-model",
        )


def _problem_of_eagle(target: ModelSpec, head: ModelSpec, reads: HeadSpec) -> str:
    """What keeps it from reading a model's states, or ""."""
    if problem := _not_handed_out(target, reads):
        return problem
    if len(reads.layers) != _BLOCKS_READ:
        return f"it reads {len(reads.layers)} layers, and EAGLE-3 heads read {_BLOCKS_READ}"
    # Else it takes embeddings, or its last product, from its model.
    is_complete = {"token_embd.weight", "output.weight"} <= head.tensors.keys()
    if not is_complete and head.embedding_size != target.embedding_size:
        return "it has no table of its own, and the model's has another width"
    return ""


def _problem_of_dflash(target: ModelSpec, head: ModelSpec, reads: HeadSpec) -> str:
    """As `_problem_of_eagle`, for a head that drafts a block of tokens in one step."""
    other = next((word for name, word in _NOT_DRAFTED.items() if name in head.tensors), "")
    if other or any(head.is_sliding):
        return f"it is a DFlash head with {other or 'a sliding window'}, which none was tried with"
    return _not_handed_out(target, reads)


def _not_handed_out(target: ModelSpec, reads: HeadSpec) -> str:
    """What a head that reads some blocks' inputs would look for in vain, or ""."""
    if target.arch not in READABLE:
        return f"{target.arch} models do not hand out the states that it reads"
    if problem := _other_width(target, reads):
        return problem
    least = 1 if target.arch in NAMES_OUTPUTS else 0  # a layer's output is the next one's input
    if not reads.layers or not set(reads.layers) <= {*range(least, target.num_layers)}:
        numbers = ", ".join(map(str, reads.layers))
        return f"it reads layers {numbers} of a model that has {target.num_layers}"
    return ""


def layers_to_read(target: ModelSpec, layers: Sequence[int]) -> tuple[int, ...]:
    """Those of some layers that a model is to be loaded for, as llama.cpp hands nothing out."""
    return tuple(layers) if target.arch in NAMES_OUTPUTS else ()


def _problem_of_block(target: ModelSpec, head: ModelSpec, reads: HeadSpec) -> str:
    """As `_problem_of_eagle`, for a model's own last block."""
    if head.arch not in MTP_ARCHITECTURES:
        return f"heads of {head.arch} files are not drafted with"
    if target.arch != head.arch:
        return f"it is the last block of a {head.arch} model, and this one is {target.arch}"
    if not has_head(head):
        return "it is more or less than one block that attends"
    return _other_width(target, reads)


def _problem_of_assistant(target: ModelSpec, head: ModelSpec, reads: HeadSpec) -> str:
    """As `_problem_of_eagle`, for one that looks into its model's cache: its last two layers'."""
    if target.arch != _ASSISTED:
        return f"it looks into the cache of a {_ASSISTED} model, and this one is {target.arch}"
    if target.num_layers < 2 or target.is_sliding[-2:] != (True, False):
        return "the model's last two layers are not one that slides and one that does not"
    kept = {target.is_sliding[i]: one for i, one in enumerate(_caches(target)) if one[0]}
    if any(kept.get(head.is_sliding[i]) != one for i, one in enumerate(_caches(head))):
        return "the model's cache has heads of other sizes than it looks for"
    return _other_width(target, reads)


def _caches(spec: ModelSpec) -> Iterator[tuple[int, int, int]]:
    """Of each layer: heads that it keeps, 0 where it looks into another's; their lengths."""
    return zip(spec.num_kv_heads, spec.key_length, spec.value_length, strict=True)


def _other_width(target: ModelSpec, reads: HeadSpec) -> str:
    if reads.width == target.embedding_size:
        return ""
    return f"it reads {reads.width} values a layer, and the model has {target.embedding_size}"


_PROBLEMS = {
    EAGLE: _problem_of_eagle,
    MTP: _problem_of_block,
    ASSISTANT: _problem_of_assistant,
    DFLASH: _problem_of_dflash,
}


def heads_beside(spec: ModelSpec) -> list[Path]:
    """Files of heads in a model's folder, one of each kind, the nearest in bits."""
    folder = spec.path.parent
    names = sorted(one.name for one in folder.glob("*.gguf"))
    return [folder / name for name in heads_of(names, spec.path.name)]
