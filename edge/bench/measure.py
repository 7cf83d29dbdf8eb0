"""`edgespec bench`: drafters and settings against each other, as one JSON document.

The first drafter of the first settings is the baseline of every ratio. Whether answers are
identical is asked within each load: against its first drafter, which runs the same kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from time import perf_counter
from typing import Any

from edgespec.bench.loaded_model import Worker, WorkerContender, interleaved
from edgespec.bench.profiling import machine_facts, model_facts
from edgespec.bench.summary import Prompted, summary
from edgespec.errors import UnsupportedError
from edgespec.measure.prompts import TaskPrompt
from edgespec.memory.device.bandwidth import measured_bandwidth
from edgespec.memory.device.energy import EnergyMeter, energy_meter
from edgespec.memory.device.neighbours import Neighbours
from edgespec.memory.plan.plan import Request
from edgespec.models.spec import ModelSpec
from edgespec.progress import Progress, time_text

_WARM_UP = "Count from one to twenty in words."
_WARM_TOKENS = 16
_COUNTED = (
    *("prompt_tokens", "generated_tokens", "time_to_first_token_s", "decode_s", "tokens_per_s"),
    *("acceptance_length", "drafted_tokens", "accepted_tokens"),
)


def bench(
    spec: ModelSpec,
    settings: Sequence[tuple[str, Request]],
    drafters: Sequence[str],
    prompts: Sequence[TaskPrompt],
    *,
    max_tokens: int,
    repeats: int = 1,
    progress: Progress = lambda _what, _fraction: None,
) -> dict[str, Any]:
    """Measure every drafter under all settings, in turns.

    Args:
        settings: what each load is called, "" if there is one alone, and its request.
        drafters: lists as `--drafter` takes them; "none" decodes plainly.
        max_tokens: most tokens of an answer; an end token ends one earlier.
        repeats: how often all prompts are answered.

    A `progress` that raises KeyboardInterrupt ends it: prompts that all have answered count, and it
    is not `complete`. Raises as `edgespec.load`, and where a prompt cannot be answered.
    """
    if not prompts:
        raise UnsupportedError("there are no prompts to answer", hint="name others with --prompts")
    moved = measured_bandwidth()
    with ExitStack() as stack:
        meter, missing = stack.enter_context(energy_meter())
        if meter is not None:
            meter.measure_idle()
        workers = [
            stack.enter_context(Worker(spec.path, request, drafters, progress))
            for _, request in settings
        ]
        contenders = [
            WorkerContender(_name(drafter, label), worker, place)
            for worker, (label, _) in zip(workers, settings, strict=True)
            for place, drafter in enumerate(worker.drafters)
        ]
        for worker in workers:
            worker.call("mark", "warm-up")
        warm = [one.answer(_WARM_UP, _WARM_TOKENS).counters for one in contenders]
        each_s = (c.time_to_first_token_s + max_tokens / max(1e-3, c.tokens_per_s) for c in warm)
        left_s = repeats * len(prompts) * sum(each_s)
        progress(f"answering, about {time_text(left_s)} left", 0.0)
        for worker in workers:
            worker.call("mark", "answers")
        neighbours = Neighbours()
        answered = _answers(contenders, prompts, max_tokens, repeats, progress, meter)
        busy = neighbours.share()
        total = repeats * len(prompts) * len(contenders)
        complete = sum(len(one.answers) for ours in answered for one in ours) == total
        prompts = _keep_common(prompts, answered)
        if not prompts:
            raise KeyboardInterrupt
        facts = [worker.call("facts") for worker in workers]  # before what comparing allocates
        tasks, baseline = [prompt.task for prompt in prompts], answered[0]
        places = {one: [i for i, task in enumerate(tasks) if task == one] for one in tasks}
        taken, loads, variants = iter(answered), list[dict[str, Any]](), list[dict[str, Any]]()
        for number, (worker, (label, _)) in enumerate(zip(workers, settings, strict=True)):
            own = [next(taken) for _ in worker.drafters]
            noise = _compare(worker, prompts, own)
            loads.append({"settings": label, "batch_noise": noise, **facts[number]})
            for drafter, ours in zip(worker.drafters, own, strict=True):
                head = {"name": _name(drafter, label), "drafter": drafter, "settings": label}
                overall = summary(ours, baseline, noise, tasks)
                by_task = {
                    task: summary([ours[i] for i in chosen], [baseline[i] for i in chosen], noise)
                    for task, chosen in places.items()
                }
                variants.append({**head, "load": number, "overall": overall, "tasks": by_task})
    plain = next((one["overall"] for one in variants if one["drafter"] == "none"), None)
    return {
        "model": model_facts(spec),
        "machine": machine_facts(),
        "settings": {
            "max_tokens": max_tokens,
            "repeats": repeats if complete else len(answered[0][0].answers),
            "prompts": len(prompts),
            "tasks": len(places),
        },
        "complete": complete,
        "busy_neighbours": busy,  # cores that other programs kept meanwhile
        "energy": {
            "source": meter and meter.source.name,
            "missing": missing,
            "idle_w": meter and meter.idle_w,
        },
        "ceiling": _ceiling(spec, moved, plain and plain["tokens_per_s"]),
        "loads": loads,
        "variants": variants,
        "answers": _rows(prompts, [one["name"] for one in variants], answered),
    }


def _rows(
    prompts: Sequence[TaskPrompt], names: Sequence[str], answered: Sequence[list[Prompted]]
) -> list[dict[str, Any]]:
    """One flat row for every answer, of variants of these names."""
    return [
        {
            "prompt": number + 1,
            "task": prompt.task,
            "variant": name,
            "repeat": repeat + 1,
            **{counted: getattr(answer.counters, counted) for counted in _COUNTED},
            "identical": ours[number].gap is None,
        }
        for number, prompt in enumerate(prompts)
        for name, ours in zip(names, answered, strict=True)
        for repeat, answer in enumerate(ours[number].answers)
    ]


def _keep_common(
    prompts: Sequence[TaskPrompt], answered: Sequence[list[Prompted]]
) -> list[TaskPrompt]:
    """Drop answers that not all contenders have given, and prompts that have none; what is left.

    All prompts have as many answers: of each repeat that all have ended, or of the first one.
    """
    counts = [min(len(ours[i].answers) for ours in answered) for i in range(len(prompts))]
    least = max(1, min(counts))
    kept = [place for place, count in enumerate(counts) if count >= least]
    for ours in answered:
        ours[:] = [Prompted(ours[place].answers[:least]) for place in kept]
    return [prompts[place] for place in kept]


def _name(drafter: str, label: str) -> str:
    shown = "plain" if drafter == "none" else drafter
    return f"{shown} {label}".strip()


def _ceiling(spec: ModelSpec, moved: float, plain: float | None) -> dict[str, float]:
    """What plain decoding could reach: every token reads its weights once.

    `moved` is what was measured of memory (bytes/s). Plain decoding (tokens/s) that reads more
    shows that the ceiling is no lower.
    """
    moved = max(moved, (plain or 0.0) * spec.bytes_per_token)
    found = {
        "bytes_per_token": spec.bytes_per_token,
        "memory_bytes_per_s": moved,
        "tokens_per_s": moved / spec.bytes_per_token,
    }
    return found if plain is None else {**found, "plain_tokens_per_s": plain}


# -- answers -------------------------------------------------------------------------------


def _answers(
    contenders: Sequence[WorkerContender],
    prompts: Sequence[TaskPrompt],
    max_tokens: int,
    repeats: int,
    progress: Progress,
    meter: EnergyMeter | None,
) -> list[list[Prompted]]:
    """Answers by contender and prompt."""
    taken = [[Prompted([]) for _ in prompts] for _ in contenders]
    texts = [prompt.text for prompt in prompts]
    total = repeats * len(prompts) * len(contenders)
    answers = interleaved(contenders, texts, max_tokens=max_tokens, repeats=repeats)
    done, start = 0, perf_counter()
    before = meter.joules() if meter is not None else 0.0
    for _, number, place, answer in answers:
        if meter is not None:
            now = meter.joules()
            answer, before = replace(answer, joules=now - before), now
        taken[place][number].answers.append(answer)
        done += 1
        left_s = (perf_counter() - start) / done * (total - done)
        try:
            progress(f"answer {done} of {total}, {time_text(left_s)} left", done / total)
        except KeyboardInterrupt:
            break
    return taken


def _compare(
    worker: Worker, prompts: Sequence[TaskPrompt], taken: Sequence[Sequence[Prompted]]
) -> float:
    """Where answers part from those of the first drafter, note how close it was; the batch noise.

    The noise is 0.0 where nothing parts and nobody asks.
    """
    parted = False
    for ours in taken[1:]:
        for prompt, one, other in zip(prompts, ours, taken[0], strict=True):
            pairs = zip(one.answers, other.answers, strict=True)  # of each repeat
            texts = {(first.token_ids, second.token_ids) for first, second in pairs}
            for first, second in (pair for pair in texts if pair[0] != pair[1]):
                gap = worker.call("gap", prompt.text, second, first)
                one.gap, parted = max(gap, one.gap or 0.0), True
    return float(worker.call("noise")) if parted else 0.0
