"""Tiny models with random weights and their heads, of all kinds: in the same file, or beside it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dflash_gguf import DFlash, write_dflash
from eagle3_gguf import Head as Eagle
from eagle3_gguf import write_eagle
from gemma4_gguf import (
    write_assistant,
    write_gemma4,
)
from hybrid_gguf import Shape, write_hybrid

from edgespec.backends.llama.head import BackendWithHead, RecurrentBackendWithHead, open_head_file
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.plan.plan import Plan, Request
from edgespec.models.spec import read_model_spec
from edgespec.setup.planning import make_run_plan

INSIDE = {
    "qwen35": Shape("qwen35", predicting=1),
    "qwen35moe": Shape("qwen35moe", predicting=1),
    "glm4moe": Shape("glm4moe", interval=1, predicting=1),
}
EVEN = tuple(range(0, 258, 2))  # tokens of a head that has a vocabulary of its own
EAGLES = {
    "qwen3moe": (Shape("qwen3moe", interval=1), Eagle(ids=EVEN)),
    "qwen3": (Shape("qwen3", interval=1), Eagle(has_output=False, keeps_normed=False)),
    "llama's own tables": (
        Shape("llama", interval=1),
        Eagle(width=96, has_table=True, norms_before_fc=True),
    ),
}
DFLASHES = {
    "dflash for llama": (Shape("llama", interval=1), DFlash(ids=EVEN)),
    "dflash for qwen3": (
        Shape("qwen3", interval=1),
        DFlash(has_tables=True, is_causal=True),
    ),
}
# Last blocks in files of their own, beside a file without them.
BLOCKS = {f"{name} beside it": shape for name, shape in INSIDE.items()}
ASSISTED = "gemma4"
BESIDE = (*EAGLES, *DFLASHES, *BLOCKS, ASSISTED)
DRAFTS = 4


class Files(NamedTuple):
    """A model, and its head where that has a file of its own."""

    model: Path
    head: Path | None = None


def opened(files: Files, *, has_head: bool = True, **changes: Any) -> BackendWithHead:
    """A model, and its head unless there is none."""
    values = {"batch_size": 64, "max_nodes": DRAFTS + 1, "gpu_layers": 0, **changes}
    settings = RunConfig(512, head=files.head is None, **values)
    if read_model_spec(files.model).has_snapshots:
        settings = replace(settings, snapshots=settings.max_nodes - 1)
        backend: BackendWithHead = RecurrentBackendWithHead(files.model, settings)
    else:
        backend = BackendWithHead(files.model, settings)
    if has_head and files.head is None:
        backend.open_head()
    elif has_head and files.head is not None:
        spec = read_model_spec(files.head, heads=True)
        backend.open_head(partial(open_head_file, spec, settings))
    return backend


def written(folder: Path, name: str, kind: Any, say: float = 1.0) -> Files:
    """The files of a name in `INSIDE` or `BESIDE`, with a `say` as of `write_hybrid`."""
    model = folder / "model.gguf"
    if name in INSIDE:
        return Files(write_hybrid(model, INSIDE[name], kind, say=say))
    if name in EAGLES:
        shape, made = EAGLES[name]
        write_hybrid(model, shape, kind, say=say)
        head = folder / "eagle3-model.gguf"
        return Files(model, write_eagle(head, model, shape, made, kind, knows=say < 0.1))
    if name in DFLASHES:
        shape, block = DFLASHES[name]
        write_hybrid(model, shape, kind, say=say)
        head = folder / "dflash-model.gguf"
        return Files(model, write_dflash(head, model, shape, block, kind, knows=say < 0.1))
    head = folder / "mtp-model.gguf"
    if name in BLOCKS:
        for path, part in ((model, "trunk"), (head, "head")):
            write_hybrid(path, BLOCKS[name], kind, say=say, part=part)
        return Files(model, head)
    write_gemma4(model, kind=kind, say=say)
    return Files(model, write_assistant(head, model, kind=kind, say=say))


def plan_of(model: Path, **changes: Any) -> Plan:
    request = Request(context_size=512, draft_max=3, kernels="off", threads=1, **changes)
    return make_run_plan(read_model_spec(model), request)
