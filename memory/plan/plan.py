"""The plan of a run: every choice with its reason, and the bytes it will allocate."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgespec.memory.bytes.footprint import (
    GPU,
    HOST,
    LIBRARY_BYTES,
    Component,
    is_block_type,
    kv_type_fits,
)
from edgespec.memory.device import device
from edgespec.memory.device.accelerators import Accelerator
from edgespec.memory.device.track import private_bytes, resident_bytes
from edgespec.memory.plan.request import LLAMACPP
from edgespec.models.spec import ModelSpec

# A draft model writes one token a step; a few more catch up with what others drafted.
DRAFT_MODEL_NODES = 8
DRAFT_MODEL_BATCH = 64


@dataclass(frozen=True, slots=True)
class Choice:
    """One setting, its value and why it has it."""

    name: str
    value: str | int
    reason: str


@dataclass(frozen=True, slots=True)
class Device:
    """What may be used: bytes that are free, the GPUs, and the processor's instruction sets.

    Of the free bytes some are taken already: by this process, which holds `process_bytes` before
    it loads anything.
    """

    free_bytes: int
    accelerators: tuple[Accelerator, ...] = ()
    features: frozenset[str] = frozenset()
    process_bytes: int = 0

    @property
    def is_one_pool(self) -> bool:
        """Whether GPU and processor share their memory."""
        return any(gpu.shares_memory for gpu in self.accelerators)

    @property
    def gpu_free_bytes(self) -> int:
        """Free bytes of the GPU's own memory; all GPUs together."""
        return sum(gpu.free_bytes for gpu in self.accelerators if not gpu.shares_memory)


def this_device() -> Device:
    """The machine this process runs on."""
    from edgespec.memory.device.accelerators import accelerators

    found = accelerators()
    held = resident_bytes() + (0 if "llama_cpp" in sys.modules else LIBRARY_BYTES)
    return Device(reachable_bytes(), found, device.cpu_features(), held)


def reachable_bytes() -> int:
    """Memory that this process may hold altogether: what is free, and what it holds now."""
    return device.available_bytes() + private_bytes()


@dataclass(frozen=True, slots=True)
class Alternative:
    """A plan that somebody could prefer: the options that make it, and what it would bring."""

    name: str  # "smaller", "longer context", "faster"
    options: str
    peak_bytes: int
    context_size: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Goal:
    """What a plan would have if memory were no limit."""

    context_size: int
    draft_max: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of one run. Sizes are in tokens; speeds are predictions."""

    backend: str
    device: str
    context_size: int
    batch_size: int
    threads: int
    kv_type_k: str
    kv_type_v: str
    gpu_layers: int
    draft_max: int
    drafter: str
    draft_model: Path | None
    draft_mapped: bool
    switch: Path | None
    switch_mapped: bool
    exact: bool
    remember: bool
    mapped: bool
    choices: tuple[Choice, ...]
    components: tuple[Component, ...]
    limit_bytes: int
    available_bytes: int
    plain_tokens_per_s: float
    tokens_per_s: float
    goal: Goal
    speed_source: str
    alternatives: tuple[Alternative, ...] = ()

    def of_small(self) -> Plan:
        """How the small model of a switching plan is loaded: as the large one."""
        names = [name for name in self.drafter.split(",") if name != "model"]
        return replace(
            self,
            switch=None,
            draft_model=None,
            drafter=",".join(names) or "suffix",
            mapped=self.switch_mapped,
        )

    @property
    def is_limited(self) -> bool:
        """Whether more memory would bring a longer context or a larger draft."""
        reached = self.context_size, self.draft_max
        return reached < (self.goal.context_size, self.goal.draft_max)

    @property
    def predicted_peak_bytes(self) -> int:
        """Ceiling of the process's resident memory, GPU memory not counted unless it is shared."""
        return sum(part.nbytes for part in self.components if part.device == HOST)

    @property
    def predicted_gpu_bytes(self) -> int:
        """Ceiling of what is allocated on the GPU."""
        return sum(part.nbytes for part in self.components if part.device == GPU)

    @property
    def component_bytes(self) -> dict[str, int]:
        """Bytes by component; those on the GPU are called `gpu_...`."""
        return component_bytes(self.components)

    def as_json(self) -> dict[str, Any]:
        """Choices by name, each with value and reason."""
        return {c.name: {"value": c.value, "reason": c.reason} for c in self.choices}


def component_bytes(components: Sequence[Component]) -> dict[str, int]:
    """Bytes by component; those on the GPU are called `gpu_...`."""
    names = (c.name if c.device == HOST else f"gpu_{c.name}" for c in components)
    return {name: c.nbytes for name, c in zip(names, components, strict=True)}


@dataclass(frozen=True, slots=True)
class Settings:
    """What decides step times; a cost curve is stored under these."""

    threads: int
    kv_type_k: str
    kv_type_v: str
    gpu_layers: int
    drafter: str
    backend: str = LLAMACPP
    padded: bool = False  # one-token steps take two rows
    device: str = "cpu"  # of ONNX Runtime; with llama.cpp the layers on the GPU say it


def draft_context(spec: ModelSpec, context: int) -> int:
    """Tokens of context of a draft model whose target has `context`."""
    return min(context, spec.context_length or context)


def draft_kv_type(spec: ModelSpec, kind: str) -> str:
    """Type of a draft model's cache whose target keeps values as `kind`: as small, if it can be."""
    return kind if is_block_type(kind) and kv_type_fits(spec, kind) else "f16"
