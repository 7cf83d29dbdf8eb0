"""Speculative against plain decoding over Spec-Bench prompts, alternating within one process.

    python benchmarks/specbench.py MODEL --prompts FILE --max-tokens 192 --per-category 5

Prompts go through the model's chat template (first turn). Greedy. Each prompt is decoded plainly
and speculatively, in alternating order; only decoding is timed (not the prompt). A ratio is
tokens/s speculative over tokens/s plain over the same prompts, with a 95% bootstrap interval over
prompts. `unexplained` counts outputs that part from plain decoding at a position where the two
best logits are further apart than the measured batch noise.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import edgespec
from edgespec.compare import find_divergence
from edgespec.drafters import make_drafter
from edgespec.drafters.base import Drafter
from edgespec.memory.device import cpu_name, usable_cores
from edgespec.noise import measure_batch_noise

_RESAMPLES = 2000


class Sample:
    """Both outputs of one prompt."""

    def __init__(self, plain: edgespec.Result, speculative: edgespec.Result) -> None:
        self.plain, self.speculative = plain.counters, speculative.counters
        self.identical = plain.token_ids == speculative.token_ids
        self.gap = 0.0  # between the two best logits where the outputs part
        self.unexplained = False


def main() -> None:
    arguments = _arguments()
    engine = edgespec.load(
        arguments.model,
        backend=arguments.backend,
        exact=arguments.exact,
        drafter=arguments.drafter,
        draft_model=arguments.draft_model,
        threads=arguments.threads,
    )
    with engine:
        drafters = (make_drafter(arguments.baseline), engine.drafter)
        categories = _run(engine, drafters, _prompts(arguments), arguments.max_tokens)
        engine.drafter = drafters[1]
        noise = measure_batch_noise(engine.backend)
    everything = [sample for samples in categories.values() for sample in samples]
    document = {
        "model": Path(arguments.model).name,
        "settings": _settings(arguments),
        "batch_noise": noise,
        "overall": _summary(everything),
        "categories": {name: _summary(samples) for name, samples in categories.items()},
    }
    print(_table(document))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(document, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model")
    parser.add_argument("--prompts", required=True, help="JSON lines with `category` and `turns`")
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--per-category", type=int, default=10**9, metavar="K")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--backend", default="llamacpp", help="llamacpp, onnx or auto")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--draft-model", metavar="FILE")
    parser.add_argument("--baseline", default="none", help="drafters to compare with; none: plain")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", metavar="OUT")
    return parser.parse_args()


def _prompts(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    taken: dict[str, int] = defaultdict(int)
    prompts = []
    for line in Path(arguments.prompts).read_text().splitlines():
        question = json.loads(line)
        category = question["category"]
        if taken[category] < arguments.per_category:
            taken[category] += 1
            prompts.append((category, question["turns"][0]))
    return prompts


def _run(
    engine: edgespec.Engine,
    drafters: tuple[Drafter | None, Drafter | None],
    prompts: list[tuple[str, str]],
    max_tokens: int,
) -> dict[str, list[Sample]]:
    categories: dict[str, list[Sample]] = defaultdict(list)
    noise = None
    for number, (category, prompt) in enumerate(prompts):
        order = (False, True) if number % 2 else (True, False)
        results = {}
        for tried in order:
            engine.drafter = drafters[tried]
            results[tried] = engine.generate(prompt, max_tokens=max_tokens)
        sample = Sample(results[False], results[True])
        if not sample.identical:
            if noise is None:
                noise = measure_batch_noise(engine.backend)
            ids = (results[False].token_ids, results[True].token_ids)
            divergence = find_divergence(engine.backend, engine.encode(prompt), *ids)
            sample.gap = divergence.gap if divergence else 0.0
            sample.unexplained = sample.gap > noise
        categories[category].append(sample)
        _progress(number + 1, len(prompts), categories)
    return dict(categories)


def _progress(done: int, total: int, categories: dict[str, list[Sample]]) -> None:
    if sys.stderr.isatty() or done % 20 == 0 or done == total:
        ratio = _ratio([sample for samples in categories.values() for sample in samples])
        end = "\r" if sys.stderr.isatty() and done < total else "\n"
        print(f"{done}/{total} prompts, {ratio:.3f}x so far", end=end, file=sys.stderr, flush=True)


def _speed(counters: list[Any]) -> float:
    tokens: int = sum(c.accepted_tokens + c.rounds for c in counters)
    seconds: float = sum(c.decode_s for c in counters)
    return tokens / max(1e-9, seconds)


def _ratio(samples: list[Sample]) -> float:
    plain = _speed([sample.plain for sample in samples])
    return _speed([sample.speculative for sample in samples]) / max(1e-9, plain)


def _summary(samples: list[Sample]) -> dict[str, Any]:
    chooser = random.Random(0)
    resampled = sorted(_ratio(chooser.choices(samples, k=len(samples))) for _ in range(_RESAMPLES))
    speculative = [sample.speculative for sample in samples]
    rounds = sum(c.rounds for c in speculative)
    accepted = sum(c.accepted_tokens for c in speculative)
    return {
        "ratio": _ratio(samples),
        "ratio_low": resampled[int(0.025 * _RESAMPLES)],
        "ratio_high": resampled[int(0.975 * _RESAMPLES) - 1],
        "plain_tokens_per_s": _speed([sample.plain for sample in samples]),
        "tokens_per_s": _speed(speculative),
        "acceptance_length": (accepted + rounds) / max(1, rounds),
        "tokens": accepted + rounds,
        "rounds": rounds,
        "drafted_tokens": sum(c.drafted_tokens for c in speculative),
        "accepted_tokens": accepted,
        "drafted_by": dict(sum((c.drafted_by for c in speculative), Counter())),
        "accepted_by": dict(sum((c.accepted_by for c in speculative), Counter())),
        "draft_s": sum(c.draft_s for c in speculative),
        "host_share": sum(c.host_s for c in speculative)
        / max(1e-9, sum(c.host_s + c.draft_s + c.step_s for c in speculative)),
        "prompts": len(samples),
        "identical": sum(sample.identical for sample in samples),
        "unexplained": sum(sample.unexplained for sample in samples),
        "largest_gap": max(sample.gap for sample in samples),
    }


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    from importlib.metadata import version

    return {
        "max_tokens": arguments.max_tokens,
        "exact": arguments.exact,
        "backend": arguments.backend,
        "drafter": arguments.drafter,
        "draft_model": arguments.draft_model and Path(arguments.draft_model).name,
        "baseline": arguments.baseline,
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "llama_cpp_python": version("llama-cpp-python"),
        "edgespec": version("edgespec"),
    }


def _table(document: dict[str, Any]) -> str:
    head = (
        "category           prompts  plain t/s   spec t/s  ratio [95% interval]   accept.  same  ?"
    )
    lines = [f"{document['model']}  {document['settings']}", head]
    rows = {**document["categories"], "overall": document["overall"]}
    for name, row in rows.items():
        lines.append(
            f"{name:<18} {row['prompts']:>7} {row['plain_tokens_per_s']:>10.1f} "
            f"{row['tokens_per_s']:>10.1f}  {row['ratio']:.3f} [{row['ratio_low']:.3f}, "
            f"{row['ratio_high']:.3f}] {row['acceptance_length']:>8.2f} {row['identical']:>5} "
            f"{row['unexplained']:>2}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
