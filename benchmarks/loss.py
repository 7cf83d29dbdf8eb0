"""Where the time of answers with drafts goes, against plain decoding in turns, from nothing.

    python benchmarks/loss.py MODEL --prompts FILE [--per-task K] [--temperature T] [--rows OUT]
                              [--out FOLDER]

A model is loaded with an empty cache directory and answers every prompt twice, with drafts and
without, whoever is first in turn. Each round of an answer with drafts is set against plain steps
of the same depth, which are those of the plain answers, and the difference is accounted for, in
per cent of the plain time (losses are positive):

    won, lost   rounds with drafts that were faster and slower than plain steps would have been
    promised    what the same rounds were chosen for
    plain       steps of one token beside drafts, over those of plain answers
    host        drafting, choosing, counting: time beside the steps, over that of plain answers
    first       time to the first token

`prediction` is real over predicted step times where drafts were verified. With `--rows` every round
is written to a file. Steps that took three times as long as they usually do were disturbed: they
count as what is usual, in both answers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from partial import results_file, stoppable, write_results
from peers import in_rounds

from edgespec.bench.interleaving import order_of
from edgespec.bench.ratios import Timed, interval_text, ratio_of, ratio_text
from edgespec.decode.engine import Engine
from edgespec.drafting.drafters.base import Drafter, VerifyResult
from edgespec.drafting.proposal import EMPTY, Proposal, StepContext
from edgespec.measure.prompts import read_prompts
from edgespec.sampling.params import SamplingParams
from edgespec.setup.loading import load

_DISTURBED = 3.0  # times as long as usual
_COLUMNS = ("won", "lost", "promised", "plain", "host", "first")


@dataclass(slots=True)
class Step:
    """One round: what was verified, promised and predicted, and what it brought and took, in ms."""

    prompt: int
    task: str
    with_drafts: bool
    depth: int
    nodes: int
    emitted: int
    step_ms: float
    host_ms: float
    promised: float = 1.0  # tokens
    predicted_ms: float = 0.0
    source: str = ""


class Watched(Drafter):
    """A drafter that tells what the last round promised; all else is the drafter's own."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._probabilities: Sequence[float] = ()
        self.promised, self.predicted_ms, self.source = 1.0, 0.0, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, context: StepContext, base: Proposal = EMPTY) -> Proposal:
        proposal = self._drafter.propose(context, base)
        self._probabilities = proposal.probabilities
        return proposal

    def observe(self, outcome: VerifyResult) -> None:
        nodes = len(outcome.tree)
        self.promised = 1.0 + sum(self._probabilities[: nodes - 1])
        context = outcome.context
        self.predicted_ms = context.estimated_ms(nodes)
        self.source = outcome.tree.sources[1] if outcome.tree.sources else ""
        self._drafter.observe(outcome)


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer: its rounds, and the time to its first token."""

    steps: list[Step]
    first_s: float
    decode_s: float
    ids: tuple[int, ...]


def answer(engine: Engine, number: int, task: str, text: str, options: dict[str, Any]) -> Answered:
    """The answer to a prompt, round by round."""
    watched, with_drafts = engine.drafter, options["speculate"]
    stream = engine.stream(text, **options)
    counters = stream._run.counters
    steps: list[Step] = []
    before = (0, 0, 0.0, 0.0)
    for _ in stream:
        now = (counters.drafted_tokens, counters.rounds, counters.step_s, counters.host_s)
        if now[1] > before[1]:
            drafted, _, step_s, host_s = (b - a for a, b in zip(before, now, strict=True))
            emitted = counters.generated_tokens - sum(one.emitted for one in steps) - 1
            depth = counters.prompt_tokens + counters.generated_tokens - emitted - 1
            step = Step(
                number, task, with_drafts, depth, 1 + int(drafted), emitted, 1e3 * step_s,
                1e3 * host_s,
            )  # fmt: skip
            if with_drafts and isinstance(watched, Watched):
                step.promised, step.predicted_ms = watched.promised, watched.predicted_ms
                step.source = watched.source
            steps.append(step)
        before = now
    result = stream.result
    return Answered(steps, counters.time_to_first_token_s, counters.decode_s, result.token_ids)


class PlainTimes:
    """What plain steps take at a depth: a line through those of plain answers."""

    def __init__(self, steps: Iterable[Step]) -> None:
        rows = [(one.depth, one.step_ms, one.host_ms) for one in steps if one.nodes == 1]
        depths, times, hosts = np.array(rows).T
        kept = times < _DISTURBED * np.median(times)
        self._slope, self._base = np.polyfit(depths[kept], times[kept], 1)
        self.host_ms = float(np.median(hosts))

    def ms(self, depth: int) -> float:
        return float(self._base + self._slope * depth)


def account(drafted: Answered, plain: Answered, times: PlainTimes) -> dict[str, float]:
    """Milliseconds by kind, and of the plain answer."""
    found: dict[str, float] = defaultdict(float)
    level = _level(plain.steps, times)  # the machine at this moment
    for one in drafted.steps:
        usual_ms = level * times.ms(one.depth)
        ms = min(one.step_ms, _DISTURBED * max(usual_ms, one.predicted_ms))
        if one.nodes == 1:
            found["plain"] += ms - usual_ms
        else:
            difference = ms - one.emitted * usual_ms
            found["won" if difference < 0 else "lost"] += difference
            found["promised"] += one.predicted_ms - one.promised * usual_ms
            found["drafted ms"] += ms
            found["predicted ms"] += one.predicted_ms
            found["promised tokens"] += one.promised - 1.0
            found["held tokens"] += one.emitted - 1
        found["host"] += one.host_ms - one.emitted * times.host_ms
    found["first"] = 1e3 * (drafted.first_s - plain.first_s)
    found["plain ms"] = sum(level * times.ms(one.depth) for one in plain.steps)
    return found


def _level(steps: Sequence[Step], times: PlainTimes) -> float:
    return float(np.median([one.step_ms / times.ms(one.depth) for one in steps])) if steps else 1.0


def undisturbed(steps: Sequence[Step], times: PlainTimes) -> Timed:
    """Tokens and time of the rounds, where disturbed steps take what is usual."""
    level = _level([one for one in steps if one.nodes == 1], times)
    seconds = 0.0
    for one in steps:
        usual = max(level * times.ms(one.depth), one.predicted_ms)
        ms = usual if one.step_ms > _DISTURBED * usual else one.step_ms
        seconds += (ms + min(one.host_ms, 20 * times.host_ms)) / 1e3
    return Timed(sum(one.emitted for one in steps), seconds)


Pair = tuple[str, Answered, Answered]  # the task, and the answers with drafts and without


def accounts(pairs: Sequence[Pair], times: PlainTimes) -> dict[str, dict[str, Any]]:
    """By task, and altogether: the ratio of speeds, and where the time went."""
    by_task: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        by_task[pair[0]].append(pair)
    return {
        task: _account_of(some, times)
        for task, some in [*by_task.items(), ("overall", list(pairs))]
    }


def _account_of(pairs: Sequence[Pair], times: PlainTimes) -> dict[str, Any]:
    found: dict[str, float] = defaultdict(float)
    for _, drafted, plain in pairs:
        for name, amount in account(drafted, plain, times).items():
            found[name] += amount
    ratio = ratio_of(
        [undisturbed(drafted.steps, times) for _, drafted, _ in pairs],
        [undisturbed(plain.steps, times) for _, _, plain in pairs],
        [task for task, _, _ in pairs],
    )
    return {
        "prompts": len(pairs),
        **{"ratio": ratio.value, "low": ratio.low, "high": ratio.high},
        "percent": {name: 100 * found[name] / found["plain ms"] for name in _COLUMNS},
        "held_tokens": found["held tokens"],
        "promised_tokens": found["promised tokens"],
        "prediction": found["drafted ms"] / found["predicted ms"] if found["predicted ms"] else 0.0,
    }


def show(found: dict[str, dict[str, Any]], times: PlainTimes) -> None:
    """The table."""
    print(f"plain steps: {times.ms(0):.2f} ms, behind 1000 tokens {times.ms(1000):.2f}")
    head = " ".join(f"{name:>9}" for name in _COLUMNS)
    print(f"{'task':<16}{'prompts':>8} {'ratio':>6} {'95%':>13} {head}  hold promised prediction")
    for task, one in found.items():
        shares = " ".join(f"{one['percent'][name]:>8.1f}%" for name in _COLUMNS)
        print(
            f"{task:<16}{one['prompts']:>8} {ratio_text(one['ratio']):>6} "
            f"{interval_text(one['low'], one['high']):>13} {shares} "
            f"{one['held_tokens']:>5.0f} {one['promised_tokens']:>8.1f} {one['prediction']:>10.2f}"
        )


def answer_all(arguments: argparse.Namespace, pairs: list[Pair]) -> None:
    """Load, and answer every prompt with drafts and without."""
    sampling = SamplingParams(temperature=arguments.temperature, seed=1)
    with load(arguments.model, context_size=2048, threads=arguments.threads) as engine:
        assert engine.drafter is not None
        engine.drafter = Watched(engine.drafter)
        prompts = in_rounds(read_prompts(arguments.prompts), arguments.per_task)
        for number, (_, prompt) in enumerate(prompts):
            if len(engine.encode(prompt.text)) + arguments.max_tokens >= arguments.most_tokens:
                continue
            answers = {}
            for place in order_of(number, 2):
                options = {
                    "max_tokens": arguments.max_tokens,
                    "sampling": sampling,
                    "speculate": place == 0,
                    "reuse": False,
                }
                answers[place] = answer(engine, number, prompt.task, prompt.text, options)
            if answers[0].steps and answers[1].steps:
                pairs.append((prompt.task, answers[0], answers[1]))
            told = f"{number + 1} of {len(prompts)} prompts: {prompt.task}"
            print(told, file=sys.stderr, flush=True)


def run(arguments: argparse.Namespace) -> None:
    """Answer, show, write."""
    pairs: list[Pair] = []
    with stoppable():
        answer_all(arguments, pairs)
    if arguments.rows:
        steps = [asdict(step) for _, *both in pairs for one in both for step in one.steps]
        arguments.rows.write_text("".join(json.dumps(step) + "\n" for step in steps))
    if not pairs:
        return
    times = PlainTimes(step for _, _, plain in pairs for step in plain.steps)
    found = accounts(pairs, times)
    show(found, times)
    if arguments.out is not None:
        path = results_file(arguments.out, f"loss t{arguments.temperature:g}", arguments.model)
        plain_ms = {str(depth): times.ms(depth) for depth in (0, 1000)}
        asked = {"model": Path(arguments.model).name, "max_tokens": arguments.max_tokens}
        write_results(path, {**asked, "plain_ms_behind": plain_ms, "tasks": found})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--per-task", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--most-tokens", type=int, default=2000, help="longer prompts are left out")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--out", type=Path, metavar="FOLDER")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EDGESPEC_CACHE"] = folder
        run(parser.parse_args())


if __name__ == "__main__":
    main()
