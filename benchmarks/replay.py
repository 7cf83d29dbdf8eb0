"""Replay recorded greedy outputs against a step-time curve: seconds instead of an hour.

    python benchmarks/replay.py record MODEL --prompts FILE --out RECORDING
    python benchmarks/replay.py run RECORDING --curve cpu2-smollm2-q4_0 [--max-children 2]

`record` decodes every prompt plainly and keeps the token ids. `run` lets the real drafter and the
real controller work through them: greedy verification accepts exactly what the recording says, so
only the step times are taken from a table (`curves.json`). Use it to compare drafters and rules;
publish numbers from `specbench.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import edgespec
from edgespec.controller import build_tree, choose_size
from edgespec.drafters.suffix import SuffixDrafter
from edgespec.memory.curve import CostCurve

_CURVES = Path(__file__).with_name("curves.json")
_HOST_MS = 0.04  # drafting and accepting, per speculative round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(required=True)
    record = commands.add_parser("record")
    record.add_argument("model")
    record.add_argument("--prompts", type=Path, required=True)
    record.add_argument("--out", type=Path, required=True)
    record.add_argument("--max-tokens", type=int, default=192)
    record.set_defaults(action=_record)
    run = commands.add_parser("run")
    run.add_argument("recording", type=Path)
    run.add_argument("--curve", default="cpu2-smollm2-q4_0")
    run.add_argument("--max-children", type=int, default=1)
    run.set_defaults(action=_run)
    arguments = parser.parse_args()
    arguments.action(arguments)


def _record(arguments: argparse.Namespace) -> None:
    questions = [json.loads(line) for line in arguments.prompts.read_text().splitlines()]
    with edgespec.load(arguments.model, drafter="none") as engine, arguments.out.open("w") as out:
        for number, question in enumerate(questions, 1):
            prompt = engine.encode(question["turns"][0])
            result = engine.generate(prompt, max_tokens=arguments.max_tokens)
            row = {
                "category": question["category"],
                "prompt": prompt,
                "output": list(result.token_ids),
            }
            out.write(json.dumps(row) + "\n")
            if sys.stderr.isatty():
                print(f"{number}/{len(questions)}", end="\r", file=sys.stderr)


def _run(arguments: argparse.Namespace) -> None:
    curve = _curve(json.loads(_CURVES.read_text())[arguments.curve])
    drafter = SuffixDrafter(max_children=arguments.max_children)
    plain_ms: dict[str, float] = defaultdict(float)
    speculative_ms: dict[str, float] = defaultdict(float)
    sizes: Counter[int] = Counter()
    for line in arguments.recording.read_text().splitlines():
        row = json.loads(line)
        plain, speculative = _replay(row["prompt"], row["output"], drafter, curve, sizes)
        for name in (row["category"], "overall"):
            plain_ms[name] += plain
            speculative_ms[name] += speculative
    for name in plain_ms:
        print(f"{name:<20} {plain_ms[name] / speculative_ms[name]:.3f}")
    print("nodes a step:", ", ".join(f"{n}: {count}" for n, count in sizes.most_common(8)))


def _curve(table: dict[str, Any]) -> CostCurve:
    sizes = {int(n): ms for n, ms in table["base_ms"].items()}
    base = [sizes.get(n, float("inf")) for n in range(max(sizes) + 1)]
    return CostCurve(base, table["depth_ms"], table["depth_node_ms"], table["change_ms"])


def _replay(
    prompt: list[int],
    output: list[int],
    drafter: SuffixDrafter,
    curve: CostCurve,
    sizes: Counter[int],
) -> tuple[float, float]:
    """Milliseconds of decoding `output` plainly and speculatively."""
    depths = range(len(prompt), len(prompt) + len(output) - 1)
    plain_ms = sum(curve.step_ms(1, depth, 1) for depth in depths)
    floor = curve.least_useful_probability(len(prompt))
    drafter.begin([*prompt, output[0]])
    done, previous, speculative_ms = 1, 0, 0.0
    while done < len(output):
        depth, left = len(prompt) + done - 1, len(output) - done - 1
        proposal = drafter.propose(len(curve.base) - 2, floor)
        size = choose_size(proposal.probabilities, curve, depth, previous, left)
        tree = build_tree(output[done - 1], proposal, size)
        speculative_ms += curve.step_ms(len(tree), depth, previous) + _HOST_MS
        previous = len(tree)
        sizes[previous] += 1
        node, start = 0, done
        while node >= 0 and done < len(output):
            node = tree.child(node, output[done])
            done += 1
        drafter.observe(output[start:done])
    return plain_ms, speculative_ms


if __name__ == "__main__":
    main()
