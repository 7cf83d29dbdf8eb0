"""The plan of a run: every choice with its reason, and the bytes it will allocate.

Made from the file's metadata and the device alone, so it costs milliseconds and loads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgespec.errors import DoesNotFitError, UnsupportedError
from edgespec.memory import device
from edgespec.memory.footprint import KV_TYPE_BYTES, footprint
from edgespec.models.spec import ModelSpec

DEFAULT_CONTEXT = 4096
_BATCH_SIZE = 256
_DRAFT_MAX = 31
_MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Choice:
    """One setting, its value and why it has it."""

    name: str
    value: str | int
    reason: str


@dataclass(frozen=True, slots=True)
class Request:
    """What a person asked for; None leaves the choice to the planner."""

    context_size: int | None = None
    threads: int | None = None
    kv_type: str | None = None
    gpu_layers: int | None = None
    draft_max: int | None = None
    drafter: str = "auto"
    exact: bool = False
    prompt_tokens: int = 0  # a ceiling is enough
    max_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of one run. Sizes are in tokens; `components` are bytes, each a ceiling."""

    context_size: int
    batch_size: int
    threads: int
    kv_type_k: str
    kv_type_v: str
    gpu_layers: int
    draft_max: int
    drafter: str
    exact: bool
    choices: tuple[Choice, ...]
    components: dict[str, int]
    available_bytes: int

    @property
    def predicted_peak_bytes(self) -> int:
        """Ceiling of what the process will allocate."""
        return sum(self.components.values())

    def as_json(self) -> dict[str, Any]:
        """Choices by name, each with value and reason."""
        return {c.name: {"value": c.value, "reason": c.reason} for c in self.choices}


def make_plan(
    spec: ModelSpec,
    request: Request = Request(),
    *,
    drafter_bytes: int = 0,
    available_bytes: int | None = None,
) -> Plan:
    """Choose all settings of a run.

    Raises:
        UnsupportedError: an option is not possible with this model.
        DoesNotFitError: the context cannot fit; says the largest that does.
    """
    available = device.available_bytes() if available_bytes is None else available_bytes
    choices: dict[str, Choice] = {}

    def choose(name: str, value: Any, reason: str) -> Any:
        choices[name] = Choice(name, value, reason)
        return value

    key_type, value_type = _kv_types(request, choose)
    threads = choose("threads", *_threads(request))
    drafter = choose("drafter", *_drafter(spec, request))
    draft_max = choose("draft_max", *_draft_max(spec, request, drafter))
    gpu_layers = choose("gpu_layers", *_gpu_layers(request))
    batch_size = choose("batch_size", _BATCH_SIZE, "keeps the compute buffer small")

    def components(context_size: int) -> dict[str, int]:
        return footprint(
            spec,
            context_size=context_size,
            batch_size=batch_size,
            max_nodes=draft_max + 1,
            type_k=key_type,
            type_v=value_type,
            gpu_layers=gpu_layers,
            drafter_bytes=drafter_bytes if drafter != "none" else 0,
        )

    context_size = choose("context_size", *_context_size(spec, request))
    needed = components(context_size)
    if sum(needed.values()) > available:
        fitting = _largest_context(components, context_size, available)
        if request.context_size is not None or fitting < max(256, request.prompt_tokens):
            raise _does_not_fit(needed, available, context_size, fitting)
        context_size = choose("context_size", fitting, "the largest that fits in free memory")
        needed = components(context_size)
    return Plan(
        context_size=context_size,
        batch_size=batch_size,
        threads=threads,
        kv_type_k=key_type,
        kv_type_v=value_type,
        gpu_layers=gpu_layers,
        draft_max=draft_max,
        drafter=drafter,
        exact=request.exact,
        choices=tuple(choices.values()),
        components=needed,
        available_bytes=available,
    )


def _kv_types(request: Request, choose: Any) -> tuple[str, str]:
    """Types of K and V. A type that costs quality is never chosen unasked."""
    kind = request.kv_type or "f16"
    if kind not in KV_TYPE_BYTES:
        raise UnsupportedError(
            f"there is no KV cache type {kind!r}", hint=f"use one of {', '.join(KV_TYPE_BYTES)}"
        )
    reason = "as asked" if request.kv_type else "half precision costs no measurable quality"
    if request.exact and kind == "f16":
        # llama.cpp's CPU attention sums a single row in two parts from 512 cells on, and rounds
        # differently from a batch, unless K and V have different types. bf16 for K costs nothing
        # in decoding; prefill loses its tiled path (1.25x slower at 800 tokens, 1.7x at 3000).
        choose("kv_type", "bf16/f16", "--exact: makes one-token steps round like batches")
        return "bf16", "f16"
    choose("kv_type", kind, reason)
    return kind, kind


def _threads(request: Request) -> tuple[int, str]:
    if request.threads is not None:
        if request.threads < 1:
            raise UnsupportedError(
                f"--threads {request.threads} is not possible", hint="use 1 or more"
            )
        return request.threads, "as asked"
    return device.usable_cores(), "physical cores this process may use"


def _gpu_layers(request: Request) -> tuple[int, str]:
    if request.gpu_layers is not None:
        return request.gpu_layers, "as asked"
    if kinds := device.llama_accelerators():
        return -1, f"all layers: llama.cpp was built for {', '.join(kinds)}"
    return 0, "llama.cpp was built for the CPU alone"


def _drafter(spec: ModelSpec, request: Request) -> tuple[str, str]:
    if spec.is_recurrent or spec.is_hybrid:
        if request.drafter not in ("auto", "none"):
            raise UnsupportedError(
                f"{spec.arch} models keep a recurrent state that cannot be rolled back, "
                f"so drafts cannot be verified",
                hint="leave out --drafter",
            )
        return "none", f"{spec.arch} keeps a recurrent state that cannot be rolled back"
    if request.drafter != "auto":
        return request.drafter, "as asked"
    return "suffix", "free: repeats what the text repeats, used only where it pays"


def _draft_max(spec: ModelSpec, request: Request, drafter: str) -> tuple[int, str]:
    if drafter == "none":
        return 0, "no drafter"
    if request.draft_max is None:
        return _DRAFT_MAX, "measured step times decide how much of it is used"
    if not 0 <= request.draft_max <= 255:
        raise UnsupportedError(
            f"--draft-max {request.draft_max} is not possible", hint="use 0 to 255"
        )
    return request.draft_max, "as asked"


def _context_size(spec: ModelSpec, request: Request) -> tuple[int, str]:
    trained = spec.context_length or DEFAULT_CONTEXT
    if request.context_size is not None:
        if request.context_size < 1:
            raise UnsupportedError(
                f"--ctx {request.context_size} is not possible", hint="use 256 or more"
            )
        if request.context_size > trained:
            raise UnsupportedError(
                f"--ctx {request.context_size} exceeds the {trained} tokens the model is made for",
                hint=f"use --ctx {trained} or less",
            )
        return request.context_size, "as asked"
    wanted = request.prompt_tokens + request.max_tokens
    if wanted > DEFAULT_CONTEXT:
        return min(trained, -(-wanted // 256) * 256), "room for the prompt and the answer"
    return min(trained, DEFAULT_CONTEXT), "enough for most prompts; --ctx changes it"


def _largest_context(components: Any, upper: int, available: int) -> int:
    """Largest context that fits, in steps of 256 tokens; 0 when none does."""
    low, high = 0, upper // 256
    while low < high:
        middle = (low + high + 1) // 2
        if sum(components(middle * 256).values()) <= available:
            low = middle
        else:
            high = middle - 1
    return low * 256


def _does_not_fit(
    needed: dict[str, int], available: int, context_size: int, fitting: int
) -> DoesNotFitError:
    largest = sorted(needed.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{name} {size // _MEBIBYTE}" for name, size in largest)
    total = -(-sum(needed.values()) // _MEBIBYTE)
    return DoesNotFitError(
        f"needs {total} MiB for {context_size} tokens of context ({parts} MiB); "
        f"free: {available // _MEBIBYTE} MiB",
        hint=f"`--ctx {fitting}` fits" if fitting else "use a smaller model file",
    )
