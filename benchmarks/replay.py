"""Drafters and rules against a step-time curve of another machine.

    python benchmarks/replay.py record MODEL --prompts FILE --out RECORDING
    python benchmarks/replay.py run RECORDING --curve cpu2-smollm2-q4_0
    python benchmarks/replay.py learn RECORDING... --out edge/drafting/priors.json
    python benchmarks/replay.py compare RECORDING... --on RECORDING [--first 39]
    python benchmarks/replay.py live MODEL --prompts FILE --curve h200-8b-q4_0 --drafter suffix

`record` decodes every prompt plainly and keeps the token ids and the best tokens of each place;
`run` lets the real drafters and the real controller work through them in seconds: greedy
verification accepts exactly what the recording says, so only the step times are taken from a table
(`curves.json`). Rows of rejected nodes are not in a recording: for drafters that learn from them,
`live` decodes for real and prices every step by the table. Use both to compare drafters and rules;
publish numbers from `specbench.py`.

`learn` writes how often drafts of recordings held, by cell: what a drafter begins with. `compare`
says what that is worth on a recording that is not among them, of another model: the mean log-loss
of the probabilities, and the speed, with nothing known and with the counts.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from math import exp, log
from operator import eq
from pathlib import Path
from typing import Any

from shared import read_questions

import edgespec
from edgespec.backends.base import Backend, DraftTree
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.decode.engine import Engine
from edgespec.drafting import combined as combined_module
from edgespec.drafting import make_drafter, suffix
from edgespec.drafting.combined import BelievedTimes, CombinedDrafter
from edgespec.drafting.constants import REQUIRED_GAIN
from edgespec.drafting.model import top_tokens_of
from edgespec.drafting.proposal import (
    EMPTY,
    Calibration,
    Counts,
    StepContext,
    TopTokens,
    VerifyResult,
    build_tree,
    choose_size,
)
from edgespec.drafting.suffix import SuffixDrafter, cautious
from edgespec.measure.timing import measure_curve, one_step
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.device.host import usable_cores
from edgespec.memory.times import CostCurve
from edgespec.models.spec import read_model_spec
from edgespec.sampling.params import SamplingParams

_CURVES = Path(__file__).with_name("curves.json")
_HOST_MS = 0.1  # drafting, choosing and counting, per round that may draft
_STEP_NOISE = 0.08  # relative, of a step that teaches a curve
_SLOPE_NOISE = 0.7  # of the logarithm of a slope, where a curve is unsure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(required=True)
    record = commands.add_parser("record")
    record.add_argument("model")
    record.add_argument("--prompts", type=Path, required=True)
    record.add_argument("--out", type=Path, required=True)
    record.add_argument("--max-tokens", type=int, default=192)
    record.add_argument("--temperature", type=float, default=0.0)
    record.set_defaults(action=_record)
    run = commands.add_parser("run")
    run.add_argument("recording", type=Path)
    run.add_argument("--curve", default="cpu2-smollm2-q4_0")
    run.add_argument("--drafter", default="suffix", help="a list, such as suffix,recycling")
    run.add_argument("--first", type=int, help="so many answers at random, from nothing each time")
    run.add_argument("--times", type=int, default=1, help="with --first")
    run.add_argument(
        "--unsure", type=float, default=0.0, help="relative error of the curve that is believed"
    )
    run.set_defaults(action=_run)
    live = commands.add_parser("live")
    live.add_argument("model")
    live.add_argument("--prompts", type=Path, required=True)
    live.add_argument("--per-category", type=int, default=10**9)
    live.add_argument("--max-tokens", type=int, default=192)
    live.add_argument("--temperature", type=float, default=0.0)
    live.add_argument("--curve", default="cpu2-smollm2-q4_0")
    live.add_argument("--drafter", default=["suffix"], nargs="+", help="lists to compare")
    live.add_argument(
        "--here", action="store_true", help="the curve's shape with this machine's plain step"
    )
    live.set_defaults(action=_live)
    learn = commands.add_parser("learn")
    learn.add_argument("recordings", nargs="+", type=Path)
    learn.add_argument("--curve", default="cpu2-smollm2-q4_0-kernels")
    learn.add_argument("--out", type=Path, required=True)
    learn.set_defaults(action=_learn)
    compare = commands.add_parser("compare")
    compare.add_argument("recordings", nargs="+", type=Path)
    compare.add_argument("--curve", default="cpu2-smollm2-q4_0-kernels")
    compare.add_argument("--on", type=Path, required=True)
    compare.add_argument("--first", type=int)
    compare.set_defaults(action=_compare)
    arguments = parser.parse_args()
    arguments.action(arguments)


def _record(arguments: argparse.Namespace) -> None:
    questions = [json.loads(line) for line in arguments.prompts.read_text().splitlines()]
    with edgespec.load(arguments.model, drafter="none") as engine, arguments.out.open("w") as out:
        for number, question in enumerate(questions, 1):
            prompt = engine.encode(question["turns"][0])
            params = SamplingParams(temperature=arguments.temperature, seed=number)
            result = engine.generate(prompt, max_tokens=arguments.max_tokens, sampling=params)
            row = {
                "category": question["category"],
                "prompt": prompt,
                "output": list(result.token_ids),
                "successors": _top_tokens(engine.backend, prompt, result.token_ids),
            }
            out.write(json.dumps(row) + "\n")
            if sys.stderr.isatty():
                print(f"{number}/{len(questions)}", end="\r", file=sys.stderr)


def _top_tokens(backend: Backend, prompt: list[int], output: Sequence[int]) -> list[TopTokens]:
    """The best tokens at each place of the output, [len(output)]."""
    backend.truncate(0)
    for start in range(0, len(prompt), backend.batch_size):
        logits = backend.prefill(prompt[start : start + backend.batch_size])
    found = [top_tokens_of(logits)]
    for token in output[:-1]:
        found.append(top_tokens_of(backend.verify(DraftTree.chain((token,)))[0]))
        backend.commit((0,))
    return found


def _run(arguments: argparse.Namespace) -> None:
    curve = _curve(arguments.curve)
    plain_ms: dict[str, float] = defaultdict(float)
    speculative_ms: dict[str, float] = defaultdict(float)
    sizes: Counter[int] = Counter()
    ratios = []
    rows = [json.loads(line) for line in arguments.recording.read_text().splitlines()]
    for seed in range(arguments.times):
        drafter, believed = _replayed_drafter(arguments), _unsure(curve, arguments.unsure, seed)
        order = rows
        if arguments.first:
            order = random.Random(seed).sample(rows, min(arguments.first, len(rows)))
        for row in order:
            plain, speculative = _replay(row, drafter, curve, sizes, believed)
            for name in (row["category"], "overall"):
                plain_ms[name] += plain
                speculative_ms[name] += speculative
            ratios.append(plain / speculative if speculative else 1.0)
    for name in plain_ms:
        print(f"{name:<20} {plain_ms[name] / speculative_ms[name]:.3f}")
    ratios.sort()
    print(f"one answer in twenty is below {ratios[len(ratios) // 20]:.3f}")
    print("nodes a step:", ", ".join(f"{n}: {count}" for n, count in sizes.most_common(8)))


def _replayed_drafter(arguments: argparse.Namespace) -> CombinedDrafter:
    drafter = make_drafter(arguments.drafter)
    assert drafter is not None, "plain decoding is what the ratio is over"
    # Asking takes what every round is charged.
    combined_module.thread_time = lambda: 0.0  # type: ignore[attr-defined]
    return drafter


def _unsure(curve: CostCurve, error: float, seed: int) -> CostCurve | None:
    """What somebody may believe who has just measured the curve; None: the curve itself."""
    if not error:
        return None
    draw = random.Random(seed)
    base = [*curve.base[:2], *(ms * exp(draw.gauss(0.0, error)) for ms in curve.base[2:])]
    slopes = [
        ms * exp(draw.gauss(0.0, _SLOPE_NOISE))
        for ms in (curve.depth_ms, curve.depth_node_ms, curve.change_ms)
    ]
    return CostCurve(base, *slopes)


class PricedCurve(CostCurve):
    """Step times of a table; adds up what the steps of a generation would have taken."""

    spent_ms = 0.0

    def observe(
        self, num_nodes: int, depth: int, previous: int, ms: float, round_ms: float | None = None
    ) -> None:
        """Take the time from the table, whatever the clock of this machine says."""
        PricedCurve.spent_ms += self.step_ms(num_nodes, depth, previous)


def _curve(name: str, plain_ms: float | None = None) -> PricedCurve:
    """A table's curve; sizes that were not measured cannot be chosen.

    With a `plain_ms` it is the table's shape for plain steps of that time: decoding for real then
    has steps and time outside them of one machine.
    """
    table = json.loads(_CURVES.read_text())[name]
    factor = plain_ms / table["base_ms"]["1"] if plain_ms else 1.0
    sizes = {int(n): factor * ms for n, ms in table["base_ms"].items()}
    base = [sizes.get(n, float("inf")) for n in range(max(sizes) + 1)]
    slopes = (table["depth_ms"], table["depth_node_ms"], table["change_ms"])
    return PricedCurve(base, *(factor * ms for ms in slopes))


def _live(arguments: argparse.Namespace) -> None:
    questions = read_questions(arguments.prompts, arguments.per_category)
    curve = _curve(arguments.curve, _plain_ms(arguments.model) if arguments.here else None)
    texts: list[tuple[int, ...]] = []
    for drafters in arguments.drafter:
        found = _live_run(arguments, curve, questions, drafters)
        texts = texts or found
        print(f"texts as with {arguments.drafter[0]}: {sum(map(eq, texts, found))} of {len(texts)}")


def _target_settings(curve: CostCurve) -> RunConfig:
    """With keys in bf16 steps of all sizes round alike: all drafters write the same text."""
    nodes = len(curve.base) - 1
    return RunConfig(4096, 128, nodes, max(1, nodes - 1), usable_cores(), kv_type_k="bf16")


def _plain_ms(model: str) -> float:
    """What a plain step takes on this machine."""
    backend = LlamaBackend(model, RunConfig(4096, 128, 1, 1, usable_cores(), kv_type_k="bf16"))
    ms = measure_curve(lambda nodes: one_step(backend, nodes), 1, seconds=2.0).base[1]
    backend.close()
    print(f"a plain step takes {ms:.2f} ms here")
    return ms


def _live_run(
    arguments: argparse.Namespace, curve: PricedCurve, questions: list[Any], drafters: str
) -> list[tuple[int, ...]]:
    """Print what the drafters bring; the token ids of the answers."""
    spec = read_model_spec(arguments.model)
    drafter = make_drafter(drafters)
    plain_ms: dict[str, float] = defaultdict(float)
    speculative_ms: dict[str, float] = defaultdict(float)
    drafted: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    texts: list[tuple[int, ...]] = []
    params = SamplingParams(temperature=arguments.temperature, seed=1)
    backend = LlamaBackend(spec.path, _target_settings(curve))
    with Engine(
        backend,
        curve=curve,
        drafter=drafter,
        chat_template=spec.chat_template,
    ) as engine:
        for number, question in enumerate(questions, 1):
            prompt = engine.encode(question["turns"][0])
            PricedCurve.spent_ms = 0.0
            result = engine.generate(prompt, max_tokens=arguments.max_tokens, sampling=params)
            depths = range(len(prompt), len(prompt) + len(result.token_ids) - 1)
            host_s = result.counters.host_s
            for name in (question["category"], "overall"):
                plain_ms[name] += sum(curve.step_ms(1, depth, 1) for depth in depths)
                speculative_ms[name] += PricedCurve.spent_ms + 1e3 * host_s
            texts.append(result.token_ids)
            drafted += result.counters.drafted_by
            accepted += result.counters.accepted_by
            if sys.stderr.isatty():
                print(f"{number}/{len(questions)}", end="\r", file=sys.stderr)
    print(f"{arguments.curve}, {drafters}")
    for name in plain_ms:
        print(f"{name:<20} {plain_ms[name] / speculative_ms[name]:.3f}")
    print("drafted:", dict(drafted), "accepted:", dict(accepted))
    return texts


def _replay(
    row: dict[str, Any],
    drafter: CombinedDrafter,
    curve: CostCurve,
    sizes: Counter[int],
    believed: CostCurve | None = None,
) -> tuple[float, float]:
    """Milliseconds of decoding a recorded output plainly and speculatively.

    Where another curve is `believed`, drafts are chosen by that, and its steps teach it.
    """
    prompt, output, rows = row["prompt"], row["output"], row.get("successors", ())
    first = len(prompt)
    depths = range(first, first + len(output) - 1)
    plain_ms = sum(curve.step_ms(1, depth, 1) for depth in depths)
    seen, noise, steps = believed or curve, random.Random(len(prompt)), BelievedTimes()
    floor, cooldown = seen.least_useful_probability(first), 0
    drafter.begin([*prompt, output[0]])
    done, previous, speculative_ms = 1, 0, 0.0
    while done < len(output):
        depth = first + done - 1
        context = StepContext(len(output) - done - 1, floor, seen, depth, previous)
        cooldown = 0 if drafter.has_hit() else cooldown - 1
        proposal = EMPTY if cooldown > 0 else drafter.propose(context)
        if not len(proposal) and cooldown <= 0:
            cooldown = drafter.cooldown()
        draft_ms = proposal.draft_ms
        required = 1.0 if draft_ms else REQUIRED_GAIN
        size, _ = choose_size(
            proposal.probabilities, context, spent_ms=draft_ms, required_gain=required
        )
        tree = build_tree(output[done - 1], proposal, size)
        step_ms = curve.step_ms(len(tree), depth, previous)
        speculative_ms += step_ms + draft_ms + _HOST_MS
        sizes[len(tree)] += 1
        node, path, start = 0, [], done
        while node >= 0 and done < len(output):
            path.append(node)
            node = tree.child(node, output[done])
            done += 1
        known = dict(zip(path, rows[start:done], strict=False))  # not of rejected nodes
        noisy_ms = step_ms * exp(noise.gauss(0.0, _STEP_NOISE)) if believed else step_ms
        node_ms = None
        if size:
            believed_ms = steps.believed_ms(noisy_ms, context.ms[1 + size])
            node_ms = (believed_ms - context.ms[1]) / size
        emitted = output[start:done]
        drafter.observe(VerifyResult(tree, path, emitted, context, known.get, node_ms=node_ms))
        if believed is not None:
            believed.observe(len(tree), depth, previous, noisy_ms)
        previous = len(tree)
    return plain_ms, speculative_ms


# -- learn and compare -----------------------------------------------------------------------

_MOST = 1000.0  # tries of a cell that are written: more say no more
_LEAST = 2.0


class _Watched(Calibration):
    """Counts that keep what was counted, and how likely it had seemed."""

    counted: list[tuple[int, bool, float]]

    def count(self, cell: int, hit: bool) -> None:
        chance = min(max(self.probability(cell), 1e-3), 1 - 1e-3)
        self.counted.append((cell, hit, -log(chance if hit else 1 - chance)))
        super().count(cell, hit)


def _drafter(known: Counts) -> tuple[CombinedDrafter, _Watched]:
    """A new drafter that begins with these counts."""
    watched = suffix.new_calibration(known, _Watched)
    assert isinstance(watched, _Watched)
    watched.counted = []
    drafter = SuffixDrafter()
    drafter._calibration = watched
    return CombinedDrafter([drafter]), watched


def _rows(path: Path) -> list[dict[str, Any]]:
    """Answers of two tokens and more, in an order in which categories take turns."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    random.Random(0).shuffle(rows)
    by_category: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if len(row["output"]) > 1:
            by_category[row["category"]].append(row)
    turns = [
        (place, category, row)
        for category, some in by_category.items()
        for place, row in enumerate(some)
    ]
    return [row for _, _, row in sorted(turns, key=lambda turn: turn[:2])]


def _counts_of(paths: Sequence[Path], curve: str) -> Counts:
    """Hits and tries by cell."""
    hits: Counter[int] = Counter()
    tries: Counter[int] = Counter()
    for path in paths:
        drafter, watched = _drafter({})
        for row in _rows(path):
            _replay(row, drafter, _curve(curve), Counter())
        for cell, hit, _ in watched.counted:
            hits[cell] += hit
            tries[cell] += 1
    return {cell: (float(hits[cell]), float(tries[cell])) for cell in sorted(tries)}


def _learn(arguments: argparse.Namespace) -> None:
    cells = {}
    for cell, (hits, tries) in _counts_of(arguments.recordings, arguments.curve).items():
        part = min(1.0, _MOST / tries)
        if tries >= _LEAST:
            cells[str(cell)] = [round(part * hits), round(part * tries)]
    text = json.dumps({"cells": cells}, separators=(",", ":"))
    arguments.out.write_text(text + "\n", encoding="utf-8")
    print(f"{len(cells)} cells, {sum(tries for _, tries in cells.values())} tries")


def _compare(arguments: argparse.Namespace) -> None:
    known = _counts_of(arguments.recordings, arguments.curve)
    rows = _rows(arguments.on)[: arguments.first]
    for name, counts in (("nothing known", {}), ("with the counts", cautious(known))):
        drafter, watched = _drafter(counts)
        times = [_replay(row, drafter, _curve(arguments.curve), Counter()) for row in rows]
        ratios = sorted(plain / drafted for plain, drafted in times)
        plain_ms, drafted_ms = (sum(column) for column in zip(*times, strict=True))
        losses = [loss for _, _, loss in watched.counted]
        print(
            f"{name:<16} {len(rows)} answers: log-loss {sum(losses) / len(losses):.4f} of "
            f"{len(losses)}, speed {plain_ms / drafted_ms:.3f}, "
            f"a tenth of the answers below {ratios[len(ratios) // 10]:.3f}"
        )


if __name__ == "__main__":
    main()
