"""The machine that a plan is made for: the memory that is free, GPUs, the processor."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.memory.bytes.config import GPU, HOST, WORKER
from edgespec.memory.bytes.footprint import GROWTH_BYTES, LIBRARY_BYTES, NUMPY_BYTES
from edgespec.memory.bytes.simulation import Simulate, simulated
from edgespec.memory.device import host, reservations
from edgespec.memory.device.accelerators import Accelerator
from edgespec.memory.device.kernels import missing_kernels
from edgespec.memory.device.track import give_back_memory, private_bytes, resident_bytes
from edgespec.memory.plan.options import LLAMACPP
from edgespec.memory.plan.plan import PlanBase


@dataclass(frozen=True, slots=True)
class Machine:
    """What may be used: bytes that are free, and the GPUs.

    Of the free bytes some are taken already: by this process, which holds `process_bytes` before
    it loads anything. `sizes` says what llama.cpp would allocate here.
    """

    free_bytes: int
    accelerators: tuple[Accelerator, ...] = ()
    process_bytes: int = 0
    missing_kernels: str = "they were not looked for"  # empty where there are some
    bytes_per_s: float = 0.0  # of the processor's memory; 0 where nobody measured it
    missing_gpu: str = "llama.cpp sees no GPU"  # why, where there is none
    reserved_bytes: int = 0  # by other programs, and therefore not free
    sizes: Simulate = simulated

    @property
    def is_one_pool(self) -> bool:
        """Whether GPU and processor share their memory."""
        return any(gpu.shares_memory for gpu in self.accelerators)

    @property
    def maps_files(self) -> bool:
        """Whether devices compute with the pages of a mapped file, so that nothing is copied."""
        return self.is_one_pool and all(one.maps_files for one in self.accelerators)

    @property
    def is_split(self) -> bool:
        """Whether there are devices to share layers among, besides the host and one GPU."""
        return len(self.accelerators) > 1 or any(one.worker for one in self.accelerators)

    @property
    def labels(self) -> tuple[str, ...]:
        """What the bytes of each accelerator are reported under, in their order."""
        workers, gpus = itertools.count(1), itertools.count(1)
        is_only = sum(not one.worker for one in self.accelerators) == 1
        return tuple(
            f"{WORKER}{next(workers)}" if one.worker else GPU if is_only else f"{GPU}{next(gpus)}"
            for one in self.accelerators
        )


def this_machine(workers: Sequence[str] = ()) -> Machine:
    """The machine this process runs on, and workers that it may use.

    Workers come before GPUs, so that the last layers, and with them the logits, are on this machine
    where it has one. Raises as `worker_devices`, and UnsupportedError where llama.cpp has no RPC.
    """
    from edgespec.memory.device.accelerators import accelerators, missing_gpu, require_rpc

    found, bytes_per_s = accelerators(), 0.0
    if workers:
        from edgespec.memory.device.bandwidth import memory_bandwidth
        from edgespec.memory.device.workers import worker_devices

        require_rpc()
        found, bytes_per_s = (*worker_devices(workers), *found), memory_bandwidth()
    give_back_memory()  # what reading headers took
    held = resident_bytes()
    if "llama_cpp" in sys.modules:
        held += GROWTH_BYTES
    else:
        held += LIBRARY_BYTES - NUMPY_BYTES * ("numpy" in sys.modules)
    # Never planned with is what is free by then no more, and what the kernel's tables grow by.
    slack = 4 << 20
    return Machine(
        max(0, reachable_bytes() - slack),
        found,
        held,
        missing_kernels(),
        bytes_per_s,
        missing_gpu(),
        max(0, host.available_bytes() - reservations.unreserved_bytes()),
    )


def reachable_bytes() -> int:
    """Memory that this process may hold altogether: what it holds now, and what is free.

    What other programs have reserved is not free.
    """
    return reservations.unreserved_bytes() + private_bytes()


def reserve(plan: PlanBase) -> bool:
    """Keep other programs from planning with a plan's memory; False if it is not free any more."""
    kept = _reserved_bytes(plan)
    return reservations.reserve(kept, lambda: plan.predicted_peak_bytes <= reachable_bytes())


def reserve_unmapped(plan: PlanBase) -> None:
    """From now on reserve what is left: packed weights have become pages of a file."""
    packed = sum(part.nbytes for part in plan.components if part.is_mapped and not part.is_ceiling)
    reservations.reserve(_reserved_bytes(plan) - packed, lambda: True)


def _reserved_bytes(plan: PlanBase) -> int:
    return sum(
        part.nbytes
        for part in plan.components
        if part.device == HOST
        and not part.name.startswith(GPU)
        # Mapped weights can be given up, and programs share them.
        and not (plan.backend == LLAMACPP and part.is_ceiling and part.name.endswith("weights"))
    )
