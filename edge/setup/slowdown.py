"""Whether steps take longer than before on this device, with what was installed then.

The time of a plain step is kept for each build of llama.cpp and edgespec, under the file, the
device and the settings. It is compared where step times are measured: once after every update. A
measurement is off by 8% on a busy machine, so the fastest of some more steps decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from warnings import warn

from edgespec.errors import SlowerWarning
from edgespec.memory.device import host
from edgespec.memory.device.kernels import kernels_key, missing_kernels
from edgespec.memory.plan.options import ONNX
from edgespec.memory.plan.settings import Settings
from edgespec.memory.store import cache
from edgespec.models.spec import ModelSpec
from edgespec.setup.stored import settings_key

_STEPS = "steps"
_LONGER = 1.1  # times as long, which is told
_MOST = 8  # builds that are kept


@dataclass(frozen=True, slots=True)
class Build:
    """What computes a step: `llama` and `kernels` change with a compiler's options, too."""

    llama: str  # version of llama-cpp-python, and a sample of its libraries
    edgespec: str  # version
    kernels: str  # edgespec's own, or "" where llama.cpp's compute

    @property
    def llama_version(self) -> str:
        """As pip knows it."""
        return self.llama.partition(" ")[0]


def build_in_use(settings: Settings) -> Build:
    """What is installed now."""
    try:
        ours = version("edgespec")
    except PackageNotFoundError:  # a checkout on the path
        ours = ""
    return Build(host.llama_build(), ours, kernels_key() if settings.kernels else "")


def compare_with_before(
    spec: ModelSpec, settings: Settings, step_ms: float, fastest_ms: Callable[[], float]
) -> None:
    """Keep the time of a plain step, and warn where other builds were faster.

    Args:
        step_ms: as it was just measured.
        fastest_ms: makes some more steps, and returns what the fastest one took.
    """
    if settings.backend == ONNX:
        return
    now, key = build_in_use(settings), _key(spec, settings)
    known = _known(cache.load(_STEPS, key))
    before = {
        build: ms
        for build, ms in known.items()
        # Without kernels it may be slower on purpose: --kernels off.
        if build != now and (bool(build.kernels) == bool(now.kernels) or missing_kernels())
    }
    fastest, ms = min(before.items(), key=lambda one: one[1], default=(now, math.inf))
    if step_ms > _LONGER * ms:
        step_ms = min(step_ms, fastest_ms())
    if step_ms > _LONGER * ms:
        warn(
            f"a step takes {step_ms:.3g} ms, {step_ms / ms - 1:.0%} longer than before on this "
            f"device ({ms:.3g} ms): {way_back(now, fastest)}",
            SlowerWarning,
            stacklevel=2,
        )
    kept = {**{build: ms for build, ms in known.items() if build != now}, now: step_ms}
    rows = [{**asdict(build), "ms": ms} for build, ms in [*kept.items()][-_MOST:]]
    cache.store(_STEPS, key, {"steps": rows})


def way_back(now: Build, before: Build) -> str:
    """What differs from the faster build, and how to have it again."""
    if before.kernels and not now.kernels:
        return f"edgespec's kernels were used then; now they are not: {missing_kernels()}"
    if now.llama_version != before.llama_version:
        return (
            f"llama-cpp-python was {before.llama_version} then; to go back: "
            f"pip install llama-cpp-python=={before.llama_version}"
        )
    if now.llama != before.llama:
        return (
            f"llama-cpp-python {now.llama_version} was built in another way then; to build it "
            "anew: pip install --force-reinstall --no-deps --no-cache-dir --no-binary "
            f"llama-cpp-python llama-cpp-python=={now.llama_version}"
        )
    if now.edgespec != before.edgespec:
        return (
            f"edgespec was {before.edgespec} then; to go back: pip install "
            f"edgespec=={before.edgespec}"
        )
    return "edgespec's kernels were of another build then"


def _key(spec: ModelSpec, settings: Settings) -> str:
    """Device, file and settings: what `settings_key` has, but for what is installed."""
    key = settings_key(spec, replace(settings, kernels=False))
    return key.replace(host.llama_build(), "any build")


def _known(document: dict[str, Any] | None) -> dict[Build, float]:
    """Times by build; what is damaged is left out."""
    rows = (document or {}).get("steps")
    known = {}
    for row in rows if isinstance(rows, list) else []:
        try:
            ms = float(row.pop("ms"))
            build = Build(**{name: str(value) for name, value in row.items()})
        except (AttributeError, KeyError, TypeError, ValueError):
            continue
        if 0 < ms < math.inf:
            known[build] = ms
    return known
