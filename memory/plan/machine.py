"""The machine that a plan is made for: the memory that is free, GPUs, the processor."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from edgespec.memory.bytes.footprint import LIBRARY_BYTES
from edgespec.memory.device import host
from edgespec.memory.device.accelerators import Accelerator
from edgespec.memory.device.kernels import missing_kernels
from edgespec.memory.device.track import private_bytes, resident_bytes


@dataclass(frozen=True, slots=True)
class Machine:
    """What may be used: bytes that are free, the GPUs, and the processor's instruction sets.

    Of the free bytes some are taken already: by this process, which holds `process_bytes` before
    it loads anything.
    """

    free_bytes: int
    accelerators: tuple[Accelerator, ...] = ()
    features: frozenset[str] = frozenset()
    process_bytes: int = 0
    missing_kernels: str = "they were not looked for"  # empty where there are some

    @property
    def is_one_pool(self) -> bool:
        """Whether GPU and processor share their memory."""
        return any(gpu.shares_memory for gpu in self.accelerators)

    @property
    def gpu_free_bytes(self) -> int:
        """Free bytes of the GPU's own memory; all GPUs together."""
        return sum(gpu.free_bytes for gpu in self.accelerators if not gpu.shares_memory)


def this_machine() -> Machine:
    """The machine this process runs on."""
    from edgespec.memory.device.accelerators import accelerators

    found = accelerators()
    held = resident_bytes() + (0 if "llama_cpp" in sys.modules else LIBRARY_BYTES)
    return Machine(reachable_bytes(), found, host.cpu_features(), held, missing_kernels())


def reachable_bytes() -> int:
    """Memory that this process may hold altogether: what is free, and what it holds now."""
    return host.available_bytes() + private_bytes()
