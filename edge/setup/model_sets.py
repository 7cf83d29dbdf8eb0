"""Several models in one process: how much each adds to it, and which of them fit together.

What a process has once (interpreter, libraries, the interface) is counted once. Sizes are those of
plans: nothing is loaded to know them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TypeVar

from edgespec.errors import DoesNotFitError, EdgespecError
from edgespec.memory.bytes.config import HOST, WORKER
from edgespec.memory.bytes.footprint import Component, beside_another
from edgespec.memory.plan.embedding import EmbeddingPlan, embeds, plan_embedding
from edgespec.memory.plan.machine import Machine
from edgespec.memory.plan.plan import Plan, PlanBase
from edgespec.memory.plan.request import Request
from edgespec.models.spec import ModelSpec
from edgespec.setup.planning import make_run_plan

# Of a process, whatever it loads; its runtime, too.
_ONCE = ("interface", "requests", "guests", "process")

Sizes = Mapping[str, int]  # bytes by label of a device
AnyPlan = TypeVar("AnyPlan", bound=Plan | EmbeddingPlan)


def own_bytes(spec: ModelSpec, plan: PlanBase) -> Sizes:
    """What a model adds to a process that has a runtime already."""
    parts = [part for part in plan.components if part.name not in _ONCE]
    sizes = Counter[str]()
    for part in beside_another("", spec, parts):
        sizes[part.device] += part.nbytes
    return sizes


def shared_bytes(spec: ModelSpec, plan: PlanBase) -> int:
    """What the process has once: the rest of a plan."""
    return plan.predicted_peak_bytes - own_bytes(spec, plan)[HOST]


def beside(plan: AnyPlan, others: Sequence[Sizes]) -> AnyPlan:
    """The plan of a model that is loaded beside others: as its own, with their bytes in it."""
    held = sum(sizes.get(HOST, 0) for sizes in others)
    parts = (*plan.components, Component("other_models", held)) if held else plan.components
    return replace(plan, components=parts)


@dataclass(frozen=True)
class Capacity:
    """What the models of a process may take: of each device, and together.

    `shared_bytes` is what it has once.
    """

    there: Sizes
    limit_bytes: int
    shared_bytes: int = 0

    @classmethod
    def of(cls, machine: Machine, budget_bytes: int | None, shared: int = 0) -> Capacity:
        """Of a machine, and of a budget if there is one."""
        gpus = zip(machine.labels, machine.accelerators, strict=True)
        there = {HOST: machine.free_bytes, **{label: gpu.free_bytes for label, gpu in gpus}}
        return cls(there, min(budget_bytes or 1 << 62, 1 << 62), shared)

    def fits(self, models: Sequence[Sizes]) -> bool:
        """Whether all of them may be there at once."""
        total = Counter({HOST: self.shared_bytes})
        for sizes in models:
            total.update(sizes)
        local = sum(size for label, size in total.items() if not label.startswith(WORKER))
        free = self.there
        return local <= self.limit_bytes and all(n <= free.get(i, 0) for i, n in total.items())

    @property
    def host_bytes(self) -> int:
        """The most that the process may hold."""
        return min(self.limit_bytes, self.there[HOST])


def plan_beside(
    spec: ModelSpec,
    request: Request,
    machine: Machine,
    pinned: Sequence[Sizes] = (),
    others: Sequence[Sizes] = (),
) -> tuple[Plan | EmbeddingPlan, bool]:
    """A plan in what pinned models leave, and others as well, where that costs no context.

    Also whether it fits beside all of them. Raises as `make_run_plan` where the pinned ones leave
    too little.
    """
    alone = _made(spec, request, machine, pinned)
    try:
        plan = _made(spec, request, machine, [*pinned, *others]) if others else alone
    except DoesNotFitError:
        return alone, False
    return (alone, False) if plan.context_size < alone.context_size else (plan, True)


def _made(
    spec: ModelSpec, request: Request, machine: Machine, taken: Sequence[Sizes]
) -> Plan | EmbeddingPlan:
    """A plan beside models with these sizes, told with the limits of all of them."""
    total = Counter[str]()
    for sizes in taken:
        total.update(sizes)
    gpus = [
        replace(gpu, free_bytes=max(0, gpu.free_bytes - total[label]))
        for label, gpu in zip(machine.labels, machine.accelerators, strict=True)
    ]
    free = max(0, machine.free_bytes - total[HOST])
    left, asked = replace(machine, free_bytes=free, accelerators=tuple(gpus)), request
    if request.budget_bytes:
        asked = replace(request, budget_bytes=max(1, request.budget_bytes - total.total()))
    limit = min(machine.free_bytes, request.budget_bytes or machine.free_bytes)
    if embeds(spec, request.pooling):
        made = plan_embedding(spec, _for_embedding(spec, asked), request.pooling, left)
        return replace(made, limit_bytes=limit)
    plan = make_run_plan(spec, asked, left)
    return replace(plan, limit_bytes=limit, available_bytes=machine.free_bytes)


def _for_embedding(spec: ModelSpec, request: Request) -> Request:
    """What a request for all models says to one that makes embeddings."""
    asked = request.context_size
    return Request(
        budget_bytes=request.budget_bytes,
        context_size=None if asked is None else min(asked, spec.context_length),
        threads=request.threads,
        gpu_layers=request.gpu_layers,
        kernels=request.kernels,
        interface_bytes=request.interface_bytes,
        serves=request.serves,
    )


@dataclass(frozen=True)
class Planned:
    """A model of a set: its plan and what it adds to the process, or why it cannot be there."""

    spec: ModelSpec
    plan: Plan | EmbeddingPlan | None
    sizes: Sizes
    problem: EdgespecError | None = None

    @classmethod
    def of(cls, spec: ModelSpec, plan: Plan | EmbeddingPlan) -> Planned:
        """Of a plan."""
        return cls(spec, plan, own_bytes(spec, plan))


def plan_set(
    specs: Sequence[ModelSpec],
    request: Request,
    machine: Machine,
    pinned: Collection[int] = (),
) -> tuple[list[Planned], Capacity]:
    """Models that one process loads when they are asked for, and what it has for all of them.

    The numbers of `pinned` ones say which stay: these are planned first. Each of the others is
    planned beside those before it where that costs it no context; else it takes turns with them.
    """
    found: dict[int, Planned] = {}
    kept: list[Sizes] = []
    together: list[Sizes] = []
    shared = 0
    for number in sorted(range(len(specs)), key=lambda i: (i not in pinned, i)):
        spec = specs[number]
        try:
            plan, fits = plan_beside(spec, request, machine, kept, together)
        except EdgespecError as problem:
            found[number] = Planned(spec, None, {}, problem)
            continue
        found[number] = one = Planned.of(spec, plan)
        shared = max(shared, shared_bytes(spec, plan))
        if number in pinned:
            kept.append(one.sizes)
        elif fits:
            together.append(one.sizes)
    capacity = Capacity.of(machine, request.budget_bytes, shared)
    return [found[number] for number in range(len(specs))], capacity


def largest_sets(models: Sequence[Sizes], capacity: Capacity) -> Iterator[tuple[int, ...]]:
    """Sets of models that fit together, to which no other can be added; the largest ones first.

    Of more than a dozen models those that follow are left out.
    """
    found: list[set[int]] = []
    numbers = range(min(len(models), 12))
    for count in range(len(numbers), 0, -1):
        for one in combinations(numbers, count):
            is_new = not any(set(one) <= larger for larger in found)
            if is_new and capacity.fits([models[i] for i in one]):
                found.append(set(one))
                yield one
