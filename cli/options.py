"""Options that several commands share, and how their texts become values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from edgespec.drafters import NAMES
from edgespec.memory.footprint import KV_TYPE_BYTES
from edgespec.memory.plan import LLAMACPP, ONNX, PREFERENCES, Request

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?b)", re.IGNORECASE)
_UNITS = {
    f"{letter}{infix}b": base**power
    for infix, base in (("", 1000), ("i", 1024))
    for power, letter in enumerate("kmgt", 1)
}

BudgetOption = Annotated[
    str | None,
    typer.Option("--budget", help="Most memory to take: 512MiB, 1.5GiB, 800MB. Default: free."),
]
PreferOption = Annotated[
    str, typer.Option("--prefer", help="speed, context (may take q8_0 for KV) or quality (never).")
]
ContextOption = Annotated[
    int | None,
    typer.Option("--ctx", "-c", min=1, help="Tokens of context. Default: chosen to fit."),
]
DrafterOption = Annotated[
    str, typer.Option("--drafter", help="auto, none, or a drafter's name. Example: suffix.")
]
DraftMaxOption = Annotated[
    int | None,
    typer.Option("--draft-max", min=0, max=255, help="Most tokens drafted at once. Default: 31."),
]
KvTypeOption = Annotated[
    str, typer.Option("--kv-type", help="KV cache type: f16, q8_0, q4_0 or auto (f16).")
]
GpuLayersOption = Annotated[
    str, typer.Option("--gpu-layers", "-ngl", help="Layers on the GPU: a number or auto (all).")
]
ThreadsOption = Annotated[
    int | None,
    typer.Option("--threads", "-t", min=1, help="CPU threads. Default: physical cores."),
]
BackendOption = Annotated[str, typer.Option("--backend", help="auto, llamacpp or onnx.")]
ExactOption = Annotated[
    bool, typer.Option("--exact", help="Only settings whose output equals plain decoding's.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


def make_request(
    *,
    budget: str | None = None,
    prefer: str = "speed",
    ctx: int | None,
    drafter: str,
    draft_max: int | None,
    kv_type: str,
    gpu_layers: str,
    threads: int | None,
    backend: str,
    exact: bool,
    prompt_tokens: int = 0,
    max_tokens: int = 0,
) -> Request:
    """A planner's request from option texts; a text that is no value of its option is misuse."""
    _one_of("--backend", backend, ("auto", LLAMACPP, ONNX))
    _one_of("--drafter", drafter, ("auto", "none", *NAMES))
    _one_of("--kv-type", kv_type, ("auto", *KV_TYPE_BYTES))
    if gpu_layers != "auto" and not gpu_layers.lstrip("-").isdigit():
        raise typer.BadParameter(f"--gpu-layers {gpu_layers} is neither a number nor auto")
    _one_of("--prefer", prefer, PREFERENCES)
    return Request(
        budget_bytes=None if budget is None else _size_bytes(budget),
        prefer=prefer,
        backend=backend,
        context_size=ctx,
        drafter=drafter,
        draft_max=draft_max,
        kv_type=None if kv_type == "auto" else kv_type,
        gpu_layers=None if gpu_layers == "auto" else int(gpu_layers),
        threads=threads,
        exact=exact,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
    )


def _size_bytes(text: str) -> int:
    """Bytes of a size such as 1.5GiB; a number alone has no unit and is misuse."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"--budget {text} is no size such as 512MiB, 1.5GiB or 800MB")
    size = float(match[1]) * _UNITS[match[2].lower()]
    if not 1 <= size < 1 << 62:
        raise typer.BadParameter(f"--budget {text} is out of range")
    return int(size)


def _one_of(option: str, value: str, values: tuple[str, ...]) -> None:
    if value not in values:
        raise typer.BadParameter(f"{option} {value} is none of {', '.join(values)}")


def model_path(model: str | None) -> Path:
    """The file that was named, or the embedded model."""
    from edgespec.models.embedded import embedded_model

    return embedded_model() if model is None else Path(model).expanduser()
