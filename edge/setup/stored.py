"""What is kept between runs: under which keys, in which form, and how runs add to it.

| kind | kept for | what |
| --- | --- | --- |
| curves | file, device, settings, library, snapshots | times of steps |
| the same | file, device, settings, library, "plain" | time of a step where nothing was drafted |
| snapshots | file, device, settings, library | how much longer they make plain steps, by number |
| invariance | file, device, settings, library | which steps round like single tokens |
| calibration | file | how often drafts of tables were right |
| learned | target and draft model, each with device and settings | how the draft model did |
| rounds | file and drafters | what rounds of each size emitted |
| kv_losses | file | what smaller cache types lose |

Whatever is missing or damaged is None or what is usual. Of counts the last process's are kept; what
several processes add to otherwise is read, changed and written under one lock (`cache.update`).
Texts, thresholds of two models and bandwidths have owners of their own: `memory.store.texts`,
`switching.planning`, `memory.device.bandwidth`.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from time import time
from typing import Any
from weakref import WeakSet

from edgespec.drafting import HEAD, MODEL
from edgespec.drafting.combined import TIME, RoundHistory, dated, is_recent
from edgespec.drafting.constants import TELLING_ROUNDS
from edgespec.memory.bytes.config import KV_TYPE_BYTES, Device, RunConfig, kv_pair
from edgespec.memory.device import host
from edgespec.memory.device.kernels import kernels_key
from edgespec.memory.plan.layout import DRAFT_SIZES
from edgespec.memory.plan.options import ONNX
from edgespec.memory.plan.plan import Plan, draft_config
from edgespec.memory.store import cache
from edgespec.memory.times import DEFAULT_ROUNDS, CostCurve, Round
from edgespec.models.gguf.reader import read_gguf
from edgespec.models.spec import ModelSpec

_CURVES, _INVARIANCE, _SNAPSHOTS = "curves", "invariance", "snapshots"
_CALIBRATION, _LEARNED, _ROUNDS, _KV_LOSSES = "calibration", "learned", "rounds", "kv_losses"
STEPS, PREFILLS = "steps", "prefills"  # what is compared with single tokens
# Packages that are ONNX Runtime, with one provider or another.
_RUNTIMES = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-openvino",
    "onnxruntime-directml",
)


def settings_key(spec: ModelSpec, config: RunConfig) -> str:
    """Under what batch invariance and the like are stored: device, file, settings, library."""
    is_onnx = config.backend == ONNX
    library = _onnx_runtime() if is_onnx else f"llama-cpp-python {host.llama_build()}"
    places = [
        *(f"{one.layers} on {_name(one)}" for one in config.devices),
        *(f"{pattern}={label}" for pattern, label in config.overrides),
    ]
    return (
        f"{host.device_key()} | {spec.fingerprint} | {config.threads} threads | "
        f"{config.kv_type_k}/{config.kv_type_v} | {config.gpu_layers} gpu layers | "
        f"{library}{' padded' * (is_onnx and config.exact)}"
        + (f" on {config.device}" if is_onnx and config.device != "cpu" else "")
        + (f" with {kernels_key()}" if config.kernels else "")
        + (f" | {', '.join(places)}" if places else "")
        + (" | experts on disk" if config.expert_bytes else "")
        + "".join(f" | {read_gguf(path).header_hash}" for path, _ in config.lora)
    )


def _name(device: Device) -> str:
    """A device in keys: a worker's address, a GPU's description, as numbers of GPUs change."""
    return device.name if device.worker else device.description


def curve_key(spec: ModelSpec, config: RunConfig) -> str:
    """Under what step times are stored: those with snapshots that steps write by themselves."""
    key = settings_key(spec, config)
    return f"{key} | {config.snapshots} snapshots" if config.snapshots else key


def plain_key(spec: ModelSpec, config: RunConfig) -> str:
    """Under what a run without drafts stores the time of one token's step, for plans."""
    return f"{settings_key(spec, config)} | plain"


def draft_key(spec: ModelSpec, plan: Plan, draft_spec: ModelSpec | None) -> str:
    """Under what step times are stored of what drafts beside a plan's target.

    A draft model's, which lies on the GPUs of its target, or of the head in the target's file.
    """
    if draft_spec is None:
        return f"{settings_key(spec, plan)} head"
    beside = ", ".join(_name(one) for one in plan.devices if not one.worker)
    key = settings_key(draft_spec, draft_config(plan, draft_spec))
    return f"{key} | {beside}" if beside else key


def rounds_key(spec: ModelSpec, drafter: str) -> str:
    """Under what is stored how much rounds with these drafters emitted."""
    return f"{spec.fingerprint} | {drafter}"


def learned_key(spec: ModelSpec, plan: Plan, draft_spec: ModelSpec | None) -> str:
    """Under what is stored how a draft model did beside a plan's target; None is its own head."""
    return f"{draft_key(spec, plan, draft_spec)} | for {settings_key(spec, plan)}"


def stored_curve(spec: ModelSpec, config: RunConfig) -> CostCurve | None:
    """The step-time curve measured earlier under this configuration, or None."""
    return curve_at(curve_key(spec, config))


def curve_at(key: str) -> CostCurve | None:
    """The step-time curve that is stored under a key, or None."""
    return curve_of(cache.load(_CURVES, key))


def keep_curve(key: str, curve: CostCurve, *, replaced: bool) -> None:
    """Keep a measurement: in the place of what is stored, or added to what runs learned since."""
    curve.measured_s = time()

    def change(now: dict[str, Any] | None) -> dict[str, Any]:
        found = None if replaced else curve_of(now)
        return (curve if found is None else found.updated(curve)).as_json()

    cache.update(_CURVES, key, change)


def learn_curve(spec: ModelSpec, config: RunConfig, curve: CostCurve) -> None:
    """Add what a run's steps took to what is stored; forget a curve that stopped fitting."""
    key = curve_key(spec, config)
    if curve.stopped_fitting:
        cache.remove(_CURVES, key)
        return

    def change(now: dict[str, Any] | None) -> dict[str, Any] | None:
        stored = curve_of(now)
        return None if stored is None else stored.updated(curve).as_json()

    cache.update(_CURVES, key, change)


def curve_of(document: dict[str, Any] | None) -> CostCurve | None:
    """The curve of a stored document; None from anything else."""
    try:
        return CostCurve.from_json(document) if document else None
    except (KeyError, TypeError, ValueError):
        return None


def stored_snapshot_costs(spec: ModelSpec, config: RunConfig) -> dict[int, float]:
    """How many times as long plain steps take with so many snapshots as without, as measured."""
    document = cache.load(_SNAPSHOTS, settings_key(spec, config)) or {}
    return {
        int(count): float(times)
        for count, times in document.items()
        if count.isdecimal() and isinstance(times, (int, float)) and 1.0 <= times <= 10.0
    }


def keep_snapshot_cost(spec: ModelSpec, config: RunConfig, count: int, times: float) -> None:
    """Keep what so many snapshots were measured to cost, beside what others do."""
    key = settings_key(spec, config)
    cache.update(_SNAPSHOTS, key, lambda now: {**(now or {}), str(count): times})


def stored_calibration(spec: ModelSpec) -> dict[str, Any]:
    """How often drafts of tables were right, by drafter."""
    return cache.load(_CALIBRATION, spec.fingerprint) or {}


def keep_calibration(spec: ModelSpec, state: Mapping[str, Any]) -> None:
    """Keep what drafters of tables have counted; others are kept with their own settings."""
    counts = {name: part for name, part in state.items() if name not in (MODEL, HEAD)}
    cache.update(_CALIBRATION, spec.fingerprint, lambda now: {**(now or {}), **counts})


def stored_learned(spec: ModelSpec, plan: Plan, draft_spec: ModelSpec | None) -> dict[str, Any]:
    """How a draft model or a head did beside this target; empty where nothing is known."""
    return cache.load(_LEARNED, learned_key(spec, plan, draft_spec)) or {}


def keep_learned(
    spec: ModelSpec,
    plan: Plan,
    draft_spec: ModelSpec | None,
    state: Mapping[str, Any],
    began_s: float,
) -> None:
    """Keep how a draft model, or a head, did in a run that `began_s` (see `dated`)."""
    key = learned_key(spec, plan, draft_spec)
    cache.update(_LEARNED, key, lambda now: dated(state, now, began_s))


def stored_history(spec: ModelSpec, drafter: str) -> RoundHistory:
    """What rounds emitted in earlier runs; none that kept a model from drafting for too long."""
    found = cache.load(_ROUNDS, rounds_key(spec, drafter)) or {}
    is_over = spec.has_snapshots and TIME in found and not is_recent(found[TIME])
    return RoundHistory.from_json(None if is_over else found.get("rounds"))


def keep_rounds(spec: ModelSpec, drafter: str, rounds: Sequence[Round]) -> None:
    """Keep what rounds with these drafters emitted."""
    cache.store(_ROUNDS, rounds_key(spec, drafter), {"rounds": rounds, TIME: time()})


def stored_rounds(spec: ModelSpec, drafter: str) -> tuple[tuple[int, int, float], ...]:
    """What rounds of earlier runs emitted; what is usual as long as there are few of them."""
    history = stored_history(spec, drafter)
    return tuple(history.rounds()) if len(history) >= TELLING_ROUNDS else DEFAULT_ROUNDS


def stored_kv_losses(spec: ModelSpec) -> dict[str, float]:
    """KL divergence that cache types cause with this file, as far as it was measured."""
    document = cache.load(_KV_LOSSES, spec.fingerprint) or {}
    return {
        kind: float(loss)
        for kind, loss in document.items()
        if {*kv_pair(kind)} <= KV_TYPE_BYTES.keys()
        and isinstance(loss, (int, float))
        and loss == loss
    }


def keep_kv_losses(spec: ModelSpec, losses: Mapping[str, float]) -> None:
    """Keep what cache types were measured to lose, beside those that were before."""
    cache.update(_KV_LOSSES, spec.fingerprint, lambda now: {**(now or {}), **losses})


def compared(spec: ModelSpec, config: RunConfig, what: str) -> dict[tuple[int, ...], int]:
    """Which `STEPS` or `PREFILLS` were seen to round like single tokens under these settings.

    Steps are the largest that do, by how many nodes were tried up to which depth of cache. Prefills
    are whether those in pieces do, by the sizes that were compared.
    """
    return _compared(cache.load(_INVARIANCE, settings_key(spec, config)), what)


def _compared(document: Mapping[str, Any] | None, what: str) -> dict[tuple[int, ...], int]:
    rows = (document or {}).get(what)
    found = {}
    for row in rows if isinstance(rows, list) else []:
        is_ours = isinstance(row, list) and len(row) == (3 if what == STEPS else 4)
        if is_ours and all(isinstance(one, int) and one >= 0 for one in row):
            found[tuple(row[:-1])] = row[-1]
    return found


def keep_compared(
    spec: ModelSpec, config: RunConfig, what: str, sizes: tuple[int, ...], found: int
) -> None:
    """Add a comparison to those of plans of other sizes."""

    def change(now: dict[str, Any] | None) -> dict[str, Any]:
        rows = [[*key, value] for key, value in {**_compared(now, what), sizes: found}.items()]
        return {**(now or {}), what: rows[-32:]}  # each is of one plan's sizes

    cache.update(_INVARIANCE, settings_key(spec, config), change)


def known_exact_step(spec: ModelSpec, config: RunConfig) -> int | None:
    """The largest step that rounds alike, where an earlier run found that there is a limit."""
    known = compared(spec, config, STEPS).items()
    least = min((size for (tried, *_), size in known if size < tried), default=1)
    return least if least > 1 else None  # loading refuses a model without such steps


@functools.cache
def _onnx_runtime() -> str:
    for name in _RUNTIMES:
        with suppress(PackageNotFoundError):
            return f"{name} {version(name)}"
    return f"{_RUNTIMES[0]} missing"


def snapshot_cost(spec: ModelSpec, config: RunConfig, count: int) -> float | None:
    """How many times as long plain steps take with so many snapshots as without; None: unknown.

    A step may write a part of every snapshot, whatever it drafts. Each costs as much as each of
    those that were measured, in turns with none: the machine's speed drifts by more than it is.
    """
    costs = stored_snapshot_costs(spec, config)
    if not count or not costs:
        return None if count else 1.0
    nearest = min(costs, key=lambda known: abs(known - count))
    return 1.0 + (costs[nearest] - 1.0) * count / nearest


def curve_with(spec: ModelSpec, config: RunConfig) -> CostCurve | None:
    """Step times with the snapshots of `config`, as far as anything was measured.

    Those without any are compared with those with some: both follow from the latter, so that only
    what was measured in turns makes a difference between them.
    """
    curve = stored_curve(spec, config)
    if not spec.has_snapshots or (curve is not None and config.snapshots):
        return curve
    for known in DRAFT_SIZES:
        found = stored_curve(spec, replace(config, snapshots=known))
        theirs = snapshot_cost(spec, config, known)
        ours = snapshot_cost(spec, config, config.snapshots)
        if found is not None and theirs is not None and ours is not None:
            return found.scaled(ours / theirs)
    return curve


# -- models that nobody closed, so that what they learned is kept -------------------------

_OPEN: WeakSet[Any] = WeakSet()


def close_at_exit(model: Any) -> None:
    """Close a model, if it is still there, while Python can import and write; twice does no harm.

    Later, in a destructor at the interpreter's end, what it learned could not be kept.
    """
    atexit.unregister(_close_all)
    atexit.register(_close_all)  # before what was registered earlier, as a log's end
    _OPEN.add(model)


def _close_all() -> None:
    for model in [*_OPEN]:
        with suppress(Exception):
            model.close()
