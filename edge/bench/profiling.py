"""Measures this device with one model: time by step size and depth, prompts, memory, speed.

Everything a plan predicts is measured beside it. The result is one JSON document
(`edgespec profile --json`), which the memory-profile report draws.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

from edgespec.backends.base import Backend
from edgespec.bench.loaded_model import memory_facts
from edgespec.decode.engine import Engine
from edgespec.decode.generation import Counters
from edgespec.errors import DoesNotFitError
from edgespec.measure.noise import largest_invariant_step
from edgespec.measure.prompts import PROMPTS
from edgespec.measure.timing import in_turns, one_step, reading_ms, some_tokens
from edgespec.memory.device import host
from edgespec.memory.device.accelerators import gpu_kinds
from edgespec.memory.device.bandwidth import measured_bandwidth
from edgespec.memory.device.energy import Energy, energy_meter
from edgespec.memory.device.neighbours import Neighbours
from edgespec.memory.device.track import MemoryTracker
from edgespec.memory.plan.plan import Plan, Request
from edgespec.memory.times import SpeedModel
from edgespec.models.spec import ModelSpec
from edgespec.progress import Progress, time_text
from edgespec.setup.loading import load_plan, plan_to_load
from edgespec.setup.planning import make_run_plan, speed_model

_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32)
_DEPTHS = (0, 512, 2048)
_REPEATS = 3
_DEPTH_SECONDS = 6.0  # for the deeper curves together
_SPEED_SECONDS = 20.0  # for the answers together
_MOST_TOKENS, _LEAST_TOKENS = 96, 16
_FRONTIER_STEPS = 24


def profile(
    spec: ModelSpec, request: Request, *, progress: Progress | None = None
) -> dict[str, Any]:
    """Measure `spec` under the plan of `request`. Raises as `edgespec.load` does.

    Times are in ms or seconds, memory in bytes, as the keys say. A `progress` that raises
    KeyboardInterrupt ends it: what was measured by then is there, and it is not `complete`.
    """
    report = progress or (lambda _what, _fraction: None)
    plan = plan_to_load(spec, request, report)
    neighbours = Neighbours()
    with MemoryTracker() as tracker:
        tracker.mark("load")
        with load_plan(spec, plan, progress=report) as engine:
            half = len(PROMPTS) // 2
            curve = engine.curve
            step_s = 0.02 if curve is None else curve.step_ms(1, 256) / 1e3
            tokens = int(_SPEED_SECONDS / (3 * half * step_s))
            tokens = max(_LEAST_TOKENS, min(_MOST_TOKENS, tokens))  # of each answer
            rounds_s = (1 + (plan.drafter != "none")) * half * tokens * step_s
            about_s = _DEPTH_SECONDS + half * tokens * step_s + rounds_s
            report(f"measuring, about {time_text(about_s)} left", 0.0)
            tracker.mark("step times")
            curves = _measure_steps(engine.backend, report)
            prefill = invariant = None
            speeds: list[dict[str, Any]] = []
            complete = False
            with suppress(KeyboardInterrupt):
                tracker.mark("prompt")
                report("reading a prompt", 0.0)  # of one batch after the other
                read_ms = reading_ms(engine.backend)
                size = engine.backend.batch_size
                prefill = {"batch_size": size, "tokens_per_s": 1e3 / read_ms}
                tracker.mark("batch invariance")
                invariant = largest_invariant_step(
                    engine.backend, progress=lambda part: report("comparing step sizes", part)
                )
                tracker.mark("answers")
                speeds, complete = _measure_speed(spec, plan, engine, tokens, report)
            busy = neighbours.share()
            memory = memory_facts(plan, engine, tracker)
    return {
        "model": model_facts(spec),
        "machine": machine_facts(),
        "complete": complete,
        "busy_neighbours": busy,
        "plan": plan.as_json(),
        "memory": memory,
        "step_ms": curves,
        "draft_max": plan.draft_max,
        "prefill": prefill,
        "bandwidth": _bandwidth(spec, plan, curves),
        "largest_invariant_step": invariant,
        "speed": speeds,
        "frontier": frontier(spec, request) if speeds else [],  # seconds, for the report alone
    }


def model_facts(spec: ModelSpec) -> dict[str, Any]:
    return {
        "file": spec.path.name,
        "name": spec.name,
        "type": spec.file_type,
        "bytes": spec.file_bytes,
    }


def machine_facts() -> dict[str, Any]:
    return {
        "measured_at": time.strftime("%Y-%m-%d %H:%M %z"),
        "cpu": host.cpu_name(),
        "cores": host.usable_cores(),
        "features": host.cpu_features(),
        "memory_bytes": host.total_bytes(),
        "available_bytes": host.available_bytes(),
        "gpu_kinds": list(gpu_kinds()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "edgespec": version("edgespec"),
        "llama_cpp_python": version("llama-cpp-python"),
    }


def frontier(spec: ModelSpec, request: Request) -> list[dict[str, Any]]:
    """Predicted tokens/s of the best plan by budget, from what refuses to what changes nothing."""
    most = make_run_plan(spec, request).predicted_peak_bytes
    low, high = min(spec.weight_bytes, most), int(most * 1.15)
    points: list[dict[str, Any]] = []
    for step in range(_FRONTIER_STEPS + 1):
        budget = low + (high - low) * step // _FRONTIER_STEPS
        point: dict[str, Any] = {"budget_bytes": budget, "tokens_per_s": None, "context_size": None}
        with suppress(DoesNotFitError):
            plan = make_run_plan(spec, replace(request, budget_bytes=budget))
            point |= {"tokens_per_s": plan.tokens_per_s, "context_size": plan.context_size}
        points.append(point)
    return points


# -- steps ---------------------------------------------------------------------------------


def _measure_steps(backend: Backend, report: Progress) -> list[dict[str, Any]]:
    """Best time of each step size at a few depths; deeper ones only while there is time."""
    sizes = [size for size in _SIZES if size <= backend.max_nodes]
    depths = [depth for depth in _DEPTHS if depth + max(sizes) <= backend.context_size]
    curves: list[dict[str, Any]] = []
    deadline = time.perf_counter() + _DEPTH_SECONDS
    for number, depth in enumerate(depths):
        if number and time.perf_counter() > deadline:
            break
        report("measuring step times", number / len(depths))
        while backend.length < depth:
            count = min(backend.batch_size, depth - backend.length)
            backend.prefill(some_tokens(backend, count))
        least = dict[str, float]()
        for size in sizes:
            [times] = in_turns([partial(one_step, backend, size)], _REPEATS + 1)  # one: the graph
            least[str(size)] = min(times)
        curves.append({"depth": depth, "ms": least})
    backend.truncate(0)
    return curves


def _bandwidth(spec: ModelSpec, plan: Plan, curves: Sequence[dict[str, Any]]) -> dict[str, float]:
    """How fast one-token steps read weights, and the ceiling, where the processor reads them all.

    A step that is faster than memory was ever seen to be shows that the ceiling is no lower.
    """
    used = spec.bytes_per_token / (curves[0]["ms"]["1"] / 1e3)
    if plan.devices:
        return {"used_bytes_per_s": used}
    ceiling = max(measured_bandwidth(), used)
    return {
        "memory_bytes_per_s": ceiling,
        "used_bytes_per_s": used,
        "ceiling_tokens_per_s": ceiling / spec.bytes_per_token,
    }


# -- speed ---------------------------------------------------------------------------------


def _measure_speed(
    spec: ModelSpec, plan: Plan, engine: Engine, tokens: int, report: Progress
) -> tuple[list[dict[str, Any]], bool]:
    """Predicted and measured tokens/s, plain and with the plan's drafter; whether all answered.

    Drafts are learned on the first half of the prompts and predicted for the second one, in answers
    of so many `tokens`.
    """
    half = len(PROMPTS) // 2
    model = speed_model(spec, plan)
    for number, prompt in enumerate(PROMPTS[:half]):
        report("learning what drafts are worth", number / half)
        engine.generate(prompt.text, max_tokens=tokens)
    if engine.curve is not None:
        curve = engine.curve.resized(engine.curve.max_nodes)
        curve.level = engine.curve.scale  # what the next plan would take over half of
        model = SpeedModel(curve, True, tuple(engine.history.rounds()) or model.rounds)
    modes = [("plain", False)] + [(plan.drafter, True)] * (plan.drafter != "none")
    results: dict[str, list[Counters]] = {name: [] for name, _ in modes}
    joules = dict.fromkeys(results, 0.0)
    with energy_meter() as (meter, missing):
        for number, prompt in enumerate(PROMPTS[half:]):
            try:
                report("answering", number / half)
            except KeyboardInterrupt:
                if not number:
                    raise
                break
            for name, speculate in modes[:: 1 if number % 2 else -1]:
                before = meter.joules() if meter is not None else 0.0
                result = engine.generate(prompt.text, max_tokens=tokens, speculate=speculate)
                results[name].append(result.counters)
                joules[name] += meter.joules() - before if meter is not None else 0.0
    rows, complete = [], all(len(counters) == half for counters in results.values())
    for name, speculate in modes:
        given, total = results[name], Counters.total(results[name])
        depth = round((total.prompt_tokens + total.generated_tokens / 2) / len(given))
        row = {
            "drafter": name,
            "predicted_tokens_per_s": model.tokens_per_s(plan.draft_max * speculate, depth),
            "measured_tokens_per_s": total.tokens_per_s,
            "acceptance_length": total.acceptance_length,
            "by_task": {
                prompt.task: c.tokens_per_s
                for prompt, c in zip(PROMPTS[half:], given, strict=False)
            },
        }
        energy = Energy(missing=missing)
        if meter is not None:
            energy = Energy(meter.source.name, joules=joules[name])
        rows.append(row | energy.as_json(total.generated_tokens))
    return rows, complete
