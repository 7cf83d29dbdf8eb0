"""What a person asks of a plan, and what follows from that alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import UnsupportedError
from edgespec.memory.bytes.footprint import KV_TYPE_BYTES
from edgespec.memory.device import device
from edgespec.models.spec import ModelSpec

DEFAULT_CONTEXT = 4096
LLAMACPP, ONNX = "llamacpp", "onnx"
PREFERENCES = ("speed", "context", "quality")
DEVICES = ("auto", "cpu", "gpu", "npu")
CONTEXT_STEP = 256


@dataclass(frozen=True, slots=True)
class Request:
    """What a person asked for; None leaves the choice to the planner."""

    budget_bytes: int | None = None
    prefer: str = "speed"
    backend: str = "auto"  # or "llamacpp" or "onnx"
    device: str = "auto"  # or "cpu", "gpu" or "npu"
    context_size: int | None = None
    threads: int | None = None
    kv_type: str | None = None
    gpu_layers: int | None = None
    draft_max: int | None = None
    drafter: str = "auto"
    draft_model: Path | None = None
    switch: Path | None = None  # a smaller model that writes where it is sure
    exact: bool = False
    remember: bool = False  # generated texts, for the drafters of later runs
    prompt_tokens: int = 0  # a ceiling is enough
    max_tokens: int = 0
    interface_bytes: int = 0  # of what the process holds besides, such as a line editor
    is_plain_greedy: bool = False  # no answer is sampled, penalised or kept to a grammar


def check(request: Request) -> None:
    """Refuse values that no model could honour."""
    if request.kv_type is not None and request.kv_type not in KV_TYPE_BYTES:
        raise UnsupportedError(
            f"there is no KV cache type {request.kv_type!r}",
            hint=f"use one of {', '.join(KV_TYPE_BYTES)}",
        )
    if request.prefer not in PREFERENCES:
        raise UnsupportedError(
            f"there is no preference {request.prefer!r}", hint=f"use {', '.join(PREFERENCES)}"
        )
    if request.device not in DEVICES:
        raise UnsupportedError(
            f"there is no device {request.device!r}", hint=f"use {', '.join(DEVICES)}"
        )
    for option, value, low, high in (
        ("--threads", request.threads, 1, 1 << 16),
        ("--draft-max", request.draft_max, 0, 255),
        ("--ctx", request.context_size, 1, 1 << 31),
        ("--budget", request.budget_bytes, 1, 1 << 62),
    ):
        if value is not None and not low <= value <= high:
            raise UnsupportedError(f"{option} {value} is not possible", hint=f"use {low} to {high}")


def threads_of(request: Request) -> tuple[int, str]:
    if request.threads is not None:
        return request.threads, "as asked"
    return device.usable_cores(), "physical cores this process may use"


def drafter_of(spec: ModelSpec, request: Request) -> tuple[str, str]:
    if spec.is_recurrent or spec.is_hybrid:
        if request.drafter not in ("auto", "none"):
            raise UnsupportedError(
                f"{spec.arch} models keep a recurrent state that cannot be rolled back, "
                f"so drafts cannot be verified",
                hint="leave out --drafter",
            )
        return "none", f"{spec.arch} keeps a recurrent state that cannot be rolled back"
    if request.drafter != "auto":
        return ",".join(name.strip() for name in request.drafter.split(",")), "as asked"
    if request.draft_model is not None:
        return "suffix,model", "the draft model writes where it is worth its time"
    return "suffix", "free: repeats what the text repeats, used only where it pays"


def wanted_context(spec: ModelSpec, request: Request) -> tuple[int, str]:
    trained = spec.context_length or DEFAULT_CONTEXT
    if request.context_size is not None:
        if request.context_size > trained:
            raise UnsupportedError(
                f"--ctx {request.context_size} exceeds the {trained} tokens the model is made for",
                hint=f"use --ctx {trained} or less",
            )
        return request.context_size, "as asked"
    wanted = request.prompt_tokens + request.max_tokens
    if wanted > DEFAULT_CONTEXT:
        return min(trained, rounded(wanted)), "room for the prompt and the answer"
    return min(trained, DEFAULT_CONTEXT), "enough for most prompts; --ctx changes it"


def rounded(tokens: int) -> int:
    return -(-tokens // CONTEXT_STEP) * CONTEXT_STEP
