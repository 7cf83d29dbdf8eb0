"""Mixtures whose experts memory has no room for: which of them it keeps, and what reading costs.

All else is in memory: attention, shared experts, the cache. What a plan leaves of the budget goes
to experts, and others are read from the packed file when a router chooses them.
"""

from __future__ import annotations

import mmap
import sys
from dataclasses import dataclass, replace

from edgespec.errors import DoesNotFitError
from edgespec.memory.bytes.config import MEBIBYTE
from edgespec.memory.bytes.experts import EVEN, PAGE, USUAL, Experts, experts_of, exponent_of
from edgespec.memory.device.disk import disk_bandwidth
from edgespec.memory.plan.layout import Layout
from edgespec.memory.plan.request import Choice
from edgespec.memory.store import cache
from edgespec.memory.times.curve import CostCurve
from edgespec.memory.times.speed import SpeedModel
from edgespec.models.spec import ModelSpec

_KIND = "experts"
# Of what was counted in one text, for others.
_OTHER_TEXTS = 1.2


def with_experts_on_disk(layout: Layout) -> Layout:
    """A layout as it is, if it fits or could not read experts; else with the fewest in memory.

    These are all of one layer, which the tokens of a prompt use together.
    """
    is_elsewhere = layout.gpu_layers != 0 or bool(layout.overrides) or bool(layout.lora)
    # Other systems give memory back by larger pages, or not at once: nobody has tried them.
    gives_back = sys.platform == "linux" and mmap.PAGESIZE == PAGE
    is_off = layout.request.packed_file == "off" or not gives_back
    if not layout.spec.num_experts or is_elsewhere or is_off or layout.switch_spec is not None:
        return layout
    experts = experts_of(layout.spec) if layout.kernels else None
    if experts is None or layout.fits(layout.contexts.least, layout.least_batch, 0):
        return layout
    return replace(layout, expert_bytes=experts.layer_bytes)


def with_experts_kept(layout: Layout, excess_bytes: int) -> Layout:
    """A layout that keeps as many experts as its sizes leave room for."""
    kept = layout.expert_bytes + max(0, -excess_bytes)
    return replace(layout, expert_bytes=min(kept, _experts(layout.spec).nbytes))


def _experts(spec: ModelSpec) -> Experts:
    found = experts_of(spec)
    assert found is not None, "a layout reads them"
    return found


@dataclass(frozen=True, slots=True)
class ExpertReads:
    """What steps read of experts, of which memory has so many bytes.

    `exponents` say how evenly routers choose: least, as counted or as is usual, and most.
    """

    experts: Experts
    kept: int
    exponents: tuple[float, float, float]
    bytes_per_s: float
    source: str

    def choice(self) -> Choice:
        """How many experts a plan keeps, with what the others cost."""
        few, _, many = (self.experts.read_bytes(self.kept, one) for one in self.exponents)
        return Choice(
            "experts",
            f"{self.kept / self.experts.nbytes:.0%} in memory",
            f"all do not fit: {few / MEBIBYTE:.0f} to {many / MEBIBYTE:.0f} MiB a token are read, "
            + self.source,
        )

    def added_to(self, speed: SpeedModel) -> SpeedModel:
        """A model of speeds whose steps take what reading takes on top."""

        def added(exponent: float) -> CostCurve:
            read = (
                self.experts.read_bytes(self.kept, exponent, size)
                for size in range(len(speed.curve.base))
            )
            return speed.curve.longer([1e3 * nbytes / self.bytes_per_s for nbytes in read])

        fast, usual, slow = map(added, self.exponents)
        return replace(speed, curve=usual, likely=(slow, fast))


def reads_of(layout: Layout) -> ExpertReads:
    """What a layout reads, by counts of earlier runs of its file where there are any."""
    spec, experts = layout.spec, _experts(layout.spec)
    document = cache.load(_KIND, spec.fingerprint) or {}
    exponents, source = (USUAL / 2, USUAL, EVEN), "by how evenly routers are known to choose"
    if isinstance(counted := document.get("exponent"), float):
        exponents = counted / _OTHER_TEXTS, counted, min(EVEN, counted * _OTHER_TEXTS)
        source = "as counted"
    slabs = spec.num_layers * spec.num_experts * 3  # gate, up and down
    # Where a disk cannot be measured: what a virtual one gave for pieces of 864 KiB.
    speed = disk_bandwidth(spec.path, experts.nbytes // slabs) or 550e6
    return ExpertReads(experts, layout.expert_bytes, exponents, speed, source)


def require_speed(layout: Layout, speeds: tuple[float, float]) -> None:
    """Raises DoesNotFitError for a speed, at best, that nobody would wait for unasked."""
    if speeds[1] < 0.5 and layout.request.packed_file != "on":
        raise DoesNotFitError(
            f"its experts do not fit into memory, and reading them leaves {speeds[1]:.2f} tokens/s "
            f"at best, with {layout.expert_bytes // MEBIBYTE} MiB of "
            f"{_experts(layout.spec).nbytes // MEBIBYTE} in memory",
            hint="`--packed-file on` does so all the same; or use a smaller model file",
        )


def keep_counts(spec: ModelSpec, expert_bytes: int, used: int, read: int) -> None:
    """Store how often experts that a router chose were in memory, for later plans of this file."""
    experts = experts_of(spec)
    least = 32 * spec.num_layers * spec.num_experts_used  # of so many tokens it is worth a count
    if experts is not None and used >= least:
        found = exponent_of(1.0 - read / used, expert_bytes / experts.nbytes)
        cache.store(_KIND, spec.fingerprint, {"exponent": found})
