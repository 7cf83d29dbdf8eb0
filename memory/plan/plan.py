"""The plan of a run: every choice with its reason, and the bytes it will allocate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgespec.memory.bytes.footprint import Component, is_block_type, kv_type_fits
from edgespec.memory.bytes.shape import GPU, HOST, Device, kv_name
from edgespec.memory.device.accelerators import Accelerator
from edgespec.memory.plan.request import Choice
from edgespec.models.pairing import is_translated
from edgespec.models.spec import ModelSpec

# A draft model writes one token a step; a few more catch up with what others drafted.
DRAFT_MODEL_NODES = 8
DRAFT_MODEL_BATCH = 64
# Cells of one with a vocabulary of its own: the first 64 tokens of a text, the last 1,024, and
# room for drafts up to a multiple of 256. With the last 512 tokens alone a 135M model keeps 95%
# of what it has right (LOG.md).
TRANSLATED_CONTEXT = 64 + 1024 + 192
# And of each of several users: with the last 256 it keeps 94%.
TRANSLATED_SHARE = 64 + 256 + 192


@dataclass(frozen=True, slots=True)
class Alternative:
    """A plan that somebody could prefer: the options that make it, and what they would bring."""

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


@dataclass(frozen=True, slots=True)
class Share:
    """The layers that one device takes, the head being one; `label` names its components."""

    label: str
    layers: int
    device: Accelerator


def devices_of(shares: Sequence[Share]) -> tuple[Device, ...]:
    """How llama.cpp is told of them."""
    return tuple(
        Device(one.label, one.layers, one.device.name, one.device.worker, one.device.number)
        for one in shares
    )


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
    kernels: bool
    choices: tuple[Choice, ...]
    components: tuple[Component, ...]
    limit_bytes: int
    available_bytes: int
    plain_tokens_per_s: float
    plain_range: tuple[float, float]  # tokens/s, between which it is likely to lie
    tokens_per_s: float
    speed_range: tuple[float, float]
    goal: Goal
    speed_source: str
    # plans them, and therefore only if asked
    find_alternatives: Callable[[], Iterable[Alternative]] = field(default=tuple, compare=False)
    users: int = 1  # generations at once
    cells: int = 0  # of the cache, for all of them; 0: a context
    shares: tuple[Share, ...] = ()  # of devices that have any layers
    overrides: tuple[tuple[str, str], ...] = ()  # as of `RunShape`
    snapshots: int = 0  # of a recurrent state, besides the one behind the last token
    switch_snapshots: int = 0
    projector: Path | None = None  # with which it sees images
    image_tokens: int | None = None  # most of one, where the projector leaves it open
    states: int = 0  # of prefixes that are kept, where the cache cannot go back without
    drafter_is_asked: bool = True  # for by name, and not one that was chosen
    kv_loss: float | None = None  # nats that the type of the cache loses, as measured

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """What a person could prefer: less memory, more context, more speed."""
        return tuple(self.find_alternatives())

    @property
    def kv_type(self) -> str:
        """The type of the cache, or those of its keys and values: "q8_0/q4_0"."""
        return kv_name(self.kv_type_k, self.kv_type_v)

    @property
    def max_leaves(self) -> int:
        """Branches of the largest draft tree."""
        return most_leaves(self.drafter, self.draft_max)

    @property
    def max_nodes(self) -> int:
        """Nodes of a step, the roots of all users included."""
        return self.draft_max + self.users

    def of_small(self) -> Plan:
        """How the small model of a switching plan is loaded: as the large one."""
        names = [
            name for name in self.drafter.split(",") if name not in ("model", "head", "window")
        ]
        return replace(
            self,
            switch=None,
            draft_model=None,
            projector=None,
            drafter=",".join(names) or "suffix",
            mapped=self.switch_mapped,
            snapshots=self.switch_snapshots,
            overrides=(),
            states=0,
            switch_snapshots=0,
        )

    def with_choice(self, choice: Choice) -> Plan:
        """The same plan, which says this first."""
        return replace(self, choices=(choice, *self.choices))

    def with_reason(self, name: str, reason: str) -> Plan:
        """The same plan, which gives another reason for one of its choices."""
        choices = [replace(c, reason=reason) if c.name == name else c for c in self.choices]
        return replace(self, choices=tuple(choices))

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
        """Ceiling of what is allocated on GPUs of this machine."""
        return sum(part.nbytes for part in self.components if part.device.startswith(GPU))

    def predicted_bytes_of(self, label: str) -> int:
        """Ceiling of what is allocated on one device."""
        return sum(part.nbytes for part in self.components if part.device == label)

    @property
    def draft_gpu_layers(self) -> int:
        """Layers of a draft model on a GPU: all of them where the target uses one."""
        return -1 if any(not one.device.worker for one in self.shares) else 0

    @property
    def component_bytes(self) -> dict[str, int]:
        """Bytes by component; those on another device begin with its label, such as `gpu_`."""
        return component_bytes(self.components)

    def as_json(self) -> dict[str, Any]:
        """Choices by name, each with value and reason."""
        return {c.name: {"value": c.value, "reason": c.reason} for c in self.choices}


def most_leaves(drafter: str, draft_max: int) -> int:
    """Drafts of the text and of a window are chains; others may branch anywhere."""
    is_chain = set(drafter.split(",")) <= {"suffix", "window"}
    return 1 if is_chain else max(1, draft_max)


def component_bytes(components: Sequence[Component]) -> dict[str, int]:
    """Bytes by component; those on another device begin with its label, such as `gpu_`."""
    names = (c.name if c.device == HOST else f"{c.device}_{c.name}" for c in components)
    return {name: c.nbytes for name, c in zip(names, components, strict=True)}


def draft_context(
    spec: ModelSpec, context: int, target: ModelSpec, users: int, cells: int
) -> tuple[int, int]:
    """Tokens of a text that a draft model sees, and of its cache, where its target has these."""
    known = spec.context_length or context
    if not is_translated(target, spec):
        return min(context, known), cells if users > 1 else min(context, known)
    context = min(context, known, TRANSLATED_CONTEXT if users == 1 else TRANSLATED_SHARE)
    return context, users * context


def draft_kv_type(spec: ModelSpec, kind: str) -> str:
    """Type of a draft model's cache whose target keeps values as `kind`: as small, if it can be."""
    return kind if is_block_type(kind) and kv_type_fits(spec, kind) else "f16"
