"""Plain against speculative decoding by category, with nothing known beforehand.

    python benchmarks/specbench.py MODEL --prompts FILE [--per-task K] [--exact] [--backend onnx]
    python benchmarks/specbench.py MODEL --runs 5          (the prompts of `edgespec bench`)

Each run begins with an empty cache directory: step times are measured anew, and no drafter knows
what earlier runs counted. Both answer every prompt in turns, A B B A, prompts of all categories in
turns, too. Each prompt is a line of progress and, with `--out`, of a file. A run that is stopped
shows what it has; results lie in FOLDER by the name of the processor.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from peers import Line, Quiet, document_of, in_rounds, one_prompt
from shared import results_file, stoppable, write_results

from edgespec.bench.loaded_model import Worker, WorkerContender
from edgespec.bench.summary import interval_text
from edgespec.measure.prompts import PROMPTS, TaskPrompt, read_prompts
from edgespec.memory.device.host import cpu_name
from edgespec.memory.device.neighbours import BUSY
from edgespec.memory.plan.plan import Request
from edgespec.models.spec import read_model_spec
from edgespec.sampling.params import SamplingParams
from edgespec.setup.planning import most_prompt_tokens

_PLAIN, _OURS = "edgespec plain", "edgespec"
_WARM_UP, _WARM_TOKENS = "Count from one to twenty in words.", 16


def measure(
    arguments: argparse.Namespace,
    request: Request,
    prompts: list[tuple[int, TaskPrompt]],
    lines: list[Line],
    out: Path | None,
) -> None:
    """Answer all prompts with one load; each is a line, at once, with the step times known then."""
    sampling = SamplingParams(temperature=arguments.temperature, seed=1)
    with Worker(arguments.model, request, ["none", arguments.drafter]) as worker:
        both = [
            Quiet(WorkerContender(name, worker, place, sampling), tries=1)
            for place, name in enumerate((_PLAIN, _OURS))
        ]
        for contender in both:
            contender.answer(_WARM_UP, _WARM_TOKENS)
        for place, (number, prompt) in enumerate(prompts, 1):
            line = {
                "model": arguments.model.name,
                "max_tokens": arguments.max_tokens,
                "temperature": arguments.temperature,
                **one_prompt(both, worker, number, prompt, arguments.max_tokens),
            }
            step_ms = worker.call("facts")["step_ms"]
            lines.append({"machine": cpu_name(), "step_ms": step_ms, **line})
            if out is not None:
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(lines[-1]) + "\n")
            told = f"{place} of {len(prompts)} prompts: {prompt.task} {_ratio(line):.2f}x, others "
            print(f"{told}{line['busy_neighbours']:.2f} of a core", file=sys.stderr, flush=True)


def _ratio(line: Line) -> float:
    plain, ours = (line["answers"][name] for name in (_PLAIN, _OURS))
    per_s = [one["decoded_tokens"] / max(1e-9, one["decode_s"]) for one in (plain, ours)]
    return float(per_s[1] / max(1e-9, per_s[0]))


def show(document: dict[str, Any], lines: list[Line]) -> None:
    """The table: by category, and altogether."""
    plain, ours = document["contenders"]
    print(
        f"{document['model']} on {document['machine']}: {len(lines)} prompts, at most "
        f"{document['max_tokens']} tokens each, temperature {lines[0]['temperature']:g}, "
        f"{document['busy']} of them beside other programs"
    )
    print(f"{'category':<16}{'prompts':>8}{'plain':>8}{'ours':>8}{'ratio':>8}  95%")
    for task, found in document["categories"].items():
        before, after = found[_PLAIN], found[_OURS]
        interval = interval_text(after["low"], after["high"])
        speeds = f"{before['tokens_per_s']:>8.1f}{after['tokens_per_s']:>8.1f}"
        print(f"{task:<16}{after['prompts']:>8}{speeds}{after['ratio']:>8.3f}  {interval}")
    print(
        f"end to end {ours['end_to_end']['ratio']:.3f}, drafts accepted {ours['accepted_tokens']} "
        f"of {ours['drafted_tokens']}, same text {ours['identical']} of {len(lines)}; "
        f"{plain['end_to_end']['tokens_per_s']:.1f} tokens/s end to end without drafts\n",
        flush=True,
    )


def run(arguments: argparse.Namespace, number: int) -> bool:
    """One load from nothing; whether it came to its end."""
    chosen = list(PROMPTS) if arguments.prompts is None else read_prompts(arguments.prompts)
    prompts = in_rounds(chosen, arguments.per_task)
    longest = most_prompt_tokens(
        read_model_spec(arguments.model), (prompt.text for _, prompt in prompts)
    )
    request = Request(
        backend=arguments.backend,
        threads=arguments.threads,
        exact=arguments.exact,
        kernels=arguments.kernels,
        draft_model=arguments.draft_model,
        prompt_tokens=longest,
        max_tokens=arguments.max_tokens,
        is_plain_greedy=arguments.temperature == 0.0,
    )
    lines: list[Line] = []
    what = f"specbench t{arguments.temperature:g} run {number}"
    path = results_file(arguments.out, what, arguments.model) if arguments.out else None
    out = path.with_suffix(".jsonl") if path else None
    if out is not None:
        out.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder, stoppable():
        os.environ["EDGESPEC_CACHE"] = folder
        measure(arguments, request, prompts, lines, out)
    if lines:
        busy = sum(line["busy_neighbours"] > BUSY for line in lines)
        steps = {"step_ms": lines[-1]["step_ms"]}
        document = {**document_of(lines, _PLAIN), "busy": busy, **steps}
        show(document, lines)
        if path is not None:
            write_results(path, document)
    return len(lines) == len(prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=Path, help="JSON lines with `category` and `turns`")
    parser.add_argument("--per-task", type=int, default=10**9, metavar="K")
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--draft-model", type=Path)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--runs", type=int, default=1, help="loads from nothing, one after another")
    parser.add_argument("--out", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    for number in range(1, arguments.runs + 1):
        if not run(arguments, number):
            sys.exit(130)


if __name__ == "__main__":
    main()
