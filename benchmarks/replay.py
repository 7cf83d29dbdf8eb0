"""Drafters and rules against a step-time curve of another machine.

    python benchmarks/replay.py record MODEL --prompts FILE --out RECORDING
    python benchmarks/replay.py run RECORDING --curve cpu2-smollm2-q4_0
    python benchmarks/replay.py all RECORDING
    python benchmarks/replay.py live MODEL --prompts FILE --curve h200-8b-q4_0 --drafter suffix

`record` decodes every prompt plainly and keeps the token ids and the best tokens of each place;
`run` lets the real drafters and the real controller work through them in seconds: greedy
verification accepts exactly what the recording says, so only the step times are taken from a table
(`curves.json`). `all` compares all drafters on step times of five machines. Rows of rejected nodes
are not in a recording: for drafters that learn from them, `live` decodes for real and prices every
step by the table. Use both to compare drafters and rules; publish numbers from `specbench.py`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, inf, log
from operator import eq
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from shared import read_questions

import edgespec
from edgespec.backends.base import Backend, Logits
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.context import LlamaSettings
from edgespec.backends.tree import DraftTree
from edgespec.decode.engine import Engine
from edgespec.drafting import constants
from edgespec.drafting.constants import LONGEST, REQUIRED_GAIN
from edgespec.drafting.drafters import combined as combined_module
from edgespec.drafting.drafters import make_drafter
from edgespec.drafting.drafters import model as model_module
from edgespec.drafting.drafters.base import Drafter, TopTokens, VerifyResult
from edgespec.drafting.drafters.combined import CombinedDrafter
from edgespec.drafting.drafters.model import HeadDrafter, HeadText, ModelDrafter, ModelText
from edgespec.drafting.drafters.proposal_builder import top_tokens_of
from edgespec.drafting.drafters.recycling import RecyclingDrafter
from edgespec.drafting.drafters.suffix import SuffixDrafter
from edgespec.drafting.ledger import StepTimes
from edgespec.drafting.proposal import EMPTY, StepContext, build_tree, choose_size
from edgespec.measure.timing import measure_curve, one_step
from edgespec.memory.device.host import usable_cores
from edgespec.memory.plan.plan import DRAFT_MODEL_BATCH, DRAFT_MODEL_NODES, draft_context
from edgespec.memory.times.curve import CostCurve
from edgespec.memory.times.speed import predicted_speedup
from edgespec.models.early_exit import WINDOW, read_exit
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.setup.candidates import _FLAT, _HOLDS, _MANY, _WORTH_A_WINDOW
from edgespec.setup.draft_loading import open_draft_model

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
    live.add_argument("--draft-model", type=Path, metavar="FILE")
    live.add_argument(
        "--here", action="store_true", help="the curve's shape with this machine's plain step"
    )
    live.add_argument("--draft-step", type=float, help="plain steps; default: by bytes")
    live.set_defaults(action=_live)
    everything = commands.add_parser("all")
    everything.add_argument("recording", type=Path)
    everything.set_defaults(action=_all)
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
    combined_module.perf_counter = lambda: 0.0  # type: ignore[attr-defined]
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


class PricedText(ModelText):
    """Before a draft model whose steps take what a table says; `model_s` is what they took."""

    model_s = 0.0

    def __init__(self, backend: Backend, prices: CostCurve, readable: int, window: int | None):
        super().__init__(backend, readable, window, LONGEST)
        self._prices = prices

    def catch_up(self) -> Logits:
        depth = len(self.tokens)
        read_ms = self._prices.read_ms(self.num_missing, depth)
        PricedCurve.spent_ms += read_ms - self._prices.step_ms(1, depth)  # `_feed` adds one step
        start, before = perf_counter(), PricedText.model_s
        logits = super().catch_up()
        PricedText.model_s = before + perf_counter() - start
        return logits

    def _feed(self, tokens: Sequence[int]) -> Logits:
        PricedCurve.spent_ms += self._prices.step_ms(1, len(self.tokens))
        start = perf_counter()
        logits = super()._feed(tokens)
        PricedText.model_s += perf_counter() - start
        return logits


def _priced_model(arguments: argparse.Namespace, spec: ModelSpec, curve: CostCurve) -> ModelDrafter:
    """The draft model, and a clock that moves by its price."""
    draft_spec = read_model_spec(arguments.draft_model)
    share = arguments.draft_step or draft_spec.weight_bytes / spec.weight_bytes
    print(f"{draft_spec.path.name}: {share:.3f} plain steps a draft step")
    context = draft_context(draft_spec, 4096)
    settings = LlamaSettings(context, DRAFT_MODEL_BATCH, DRAFT_MODEL_NODES, 1, usable_cores())
    most = min(DRAFT_MODEL_NODES, len(curve.base) - 1)
    prices = CostCurve([ms * share for ms in curve.base[: most + 1]])
    backend = open_draft_model(draft_spec, spec, settings)
    early_exit = read_exit(draft_spec)
    model = ModelDrafter(backend, prices, spec.vocab_size, early_exit=early_exit)
    window = WINDOW if early_exit else None
    model._text = PricedText(backend, prices, spec.vocab_size, window)

    def clock() -> float:
        return PricedCurve.spent_ms / 1e3 + perf_counter() - PricedText.model_s

    model_module.perf_counter = clock  # type: ignore[attr-defined]
    return model


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


def _target_settings(curve: CostCurve) -> LlamaSettings:
    """With keys in bf16 steps of all sizes round alike: all drafters write the same text."""
    nodes = len(curve.base) - 1
    return LlamaSettings(4096, 128, nodes, max(1, nodes - 1), usable_cores(), kv_type_k="bf16")


def _plain_ms(model: str) -> float:
    """What a plain step takes on this machine."""
    backend = LlamaBackend(model, LlamaSettings(4096, 128, 1, 1, usable_cores(), kv_type_k="bf16"))
    ms = measure_curve(lambda nodes: one_step(backend, nodes), 1, seconds=2.0).base[1]
    backend.close()
    print(f"a plain step takes {ms:.2f} ms here")
    return ms


def _live_run(
    arguments: argparse.Namespace, curve: PricedCurve, questions: list[Any], drafters: str
) -> list[tuple[int, ...]]:
    """Print what the drafters bring; the token ids of the answers."""
    spec = read_model_spec(arguments.model)
    model = _priced_model(arguments, spec, curve) if arguments.draft_model else None
    drafter = make_drafter(drafters, model)
    plain_ms: dict[str, float] = defaultdict(float)
    speculative_ms: dict[str, float] = defaultdict(float)
    drafted: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    texts: list[tuple[int, ...]] = []
    params = edgespec.SamplingParams(temperature=arguments.temperature, seed=1)
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
            if model is not None:  # whose time in the counters is that of the table
                host_s = max(0.0, host_s + result.counters.draft_s - PricedText.model_s)
                PricedText.model_s = 0.0
            for name in (question["category"], "overall"):
                plain_ms[name] += sum(curve.step_ms(1, depth, 1) for depth in depths)
                speculative_ms[name] += PricedCurve.spent_ms + 1e3 * host_s
            texts.append(result.token_ids)
            drafted += result.counters.drafted_by
            accepted += result.counters.accepted_by
            if sys.stderr.isatty():
                print(f"{number}/{len(questions)}", end="\r", file=sys.stderr)
        if model is not None:
            model.close()
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
    before: int = 0,
) -> tuple[float, float]:
    """Milliseconds of decoding a recorded output plainly and speculatively.

    Where another curve is `believed`, drafts are chosen by that, and its steps teach it. Steps are
    as dear as behind so many tokens `before` the prompt.
    """
    prompt, output, rows = row["prompt"], row["output"], row.get("successors", ())
    first = before + len(prompt)
    depths = range(first, first + len(output) - 1)
    plain_ms = sum(curve.step_ms(1, depth, 1) for depth in depths)
    seen, noise, steps = believed or curve, random.Random(len(prompt)), StepTimes()
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
            believed_ms = steps.believed_ms(noisy_ms, context.estimated_ms(1 + size))
            node_ms = (believed_ms - context.estimated_ms(1)) / size
        emitted = output[start:done]
        drafter.observe(VerifyResult(tree, path, emitted, context, known.get, node_ms=node_ms))
        if believed is not None:
            believed.observe(len(tree), depth, previous, noisy_ms)
        previous = len(tree)
    return plain_ms, speculative_ms


# -- all drafters on five machines -----------------------------------------------------------

_SIZES = 32  # nodes of a step on simulated machines
_SLOPE_ERROR = 0.1  # relative, of what depth adds: as behind some long texts


@dataclass(frozen=True, slots=True)
class Stepping:
    """What drafts with steps of its own: right `agrees` of the time, for `step` plain steps."""

    agrees: float
    step: float
    bytes_part: float  # of what a plan may take: what `auto` asks it to bring besides


# Measured with SmolLM2 (LOG.md): the shipped early exit, and a head trained for 25 minutes. A
# smaller model of the same family is a guess.
ENGINES = {
    "early exit": Stepping(0.520, 0.12, 0.01),
    "head": Stepping(0.592, 0.10, 0.01),
    "draft model (assumed)": Stepping(0.7, 0.2, 0.1),
}
WINDOW_AGREES = 0.85  # LOG.md: SmolLM2 over 512 cells behind 7,500 tokens
DEPTHS = (8_000, 16_000)


def simulated(first_ms: float, more_ms: float, depth_ms: float = 0.0) -> PricedCurve:
    """A step reads the weights once, and multiplies for each of its tokens."""
    return PricedCurve(
        [inf, *(first_ms + more_ms * n for n in range(_SIZES))], depth_ms, depth_ms / 2
    )


# Name, curve, and whether attention passes over cells that a sequence does not see.
MACHINES: dict[str, tuple[Callable[[], PricedCurve], bool]] = {
    "2 cores, SmolLM2 Q4_0 (measured)": (lambda: _curve("cpu2-smollm2-q4_0-kernels"), True),
    # 0.94 GB at 60 GB/s; a token takes an eighth of the time that it does on one core of a Xeon
    # with AVX-512, twice as long without.
    "8-core laptop, 1.5B Q4_0 (arithmetic)": (lambda: simulated(15.7, 1.5, 0.0005), True),
    # 0.94 GB at 0.7 of 68 GB/s; 3.1 thousand million multiplications at 2.5e12 a second.
    "Orin Nano, 1.5B Q4_0 (arithmetic)": (lambda: simulated(19.8, 1.2, 0.0006), False),
    # 4.7 GB at 0.85 of 272 GB/s; 16 thousand million at 30e12.
    "8 GB GPU, 8B Q4_0 (arithmetic)": (lambda: simulated(20.3, 0.55, 0.0005), False),
    "H200, 8B Q4_0 (measured)": (lambda: _curve("h200-8b-q4_0"), False),
}


class Simulated:
    """A head that is right at random places of a recorded answer; its steps move the clock."""

    context_size, num_unread, block, token_ids = 1 << 20, 0, 0, None
    reads_prompts = False
    spent_ms = 0.0

    def __init__(self, agrees: float, step_ms: float, vocab_size: int) -> None:
        self.text = HeadText(self)
        self.agrees, self._step_ms, self._vocab_size = agrees, step_ms, vocab_size
        self._right: list[tuple[int, float, bool]] = []
        self._at = self._start = 0

    def answers(self, row: dict[str, Any], power: float) -> None:
        """The answer that is replayed next; shares to this power are how often it is right."""
        source = random.Random(len(row["prompt"]))
        self._start = len(row["prompt"])
        self._right = []
        for token, (_, shares) in zip(row["output"], row["successors"], strict=True):
            chance = shares[0] ** power
            self._right.append((token, chance, source.random() < chance))

    def power_for(self, rows: Sequence[dict[str, Any]]) -> float:
        """The power at which it is right as often as it should be."""
        shares = np.array([one[1][0] for row in rows for one in row["successors"]])
        powers = np.linspace(0.0, 8.0, 801)
        means = np.array([(shares**power).mean() for power in powers])
        return float(powers[np.abs(means - self.agrees).argmin()])

    def begin(self, token: int) -> Logits:
        self._at = len(self.text.tokens) - self._start
        return self._row()

    def go_on(self, token: int) -> Logits:
        self._at += 1
        return self._row()

    def _row(self) -> Logits:
        Simulated.spent_ms += self._step_ms
        token, chance, is_right = self._right[min(self._at, len(self._right) - 1)]
        row = np.full(self._vocab_size, -30.0, np.float32)
        said = token if is_right else (token + 1) % self._vocab_size
        row[said] = log(max(chance, 1e-4))
        row[(token + 2) % self._vocab_size] = log(max(1.0 - chance, 1e-4))
        return row

    def memory_bytes(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass


def _all(arguments: argparse.Namespace) -> None:
    """All drafters on step times of five machines: what each brings over plain decoding.

    The real drafters, estimators and ledgers work through recorded answers (`replay.py`). What
    drafts with an engine is simulated: it is right at a recorded token as often as was measured,
    likelier where the model is sure, and its steps take as many plain steps as were measured. Two
    curves are measured; three are arithmetic: bytes of weights over bandwidth, and multiplications
    over a rate. Marked with * is what `--drafter auto` takes there, by its own rules, with nothing
    counted yet.
    """
    rows = [json.loads(line) for line in arguments.recording.read_text().splitlines()]
    vocab_size = 1 + max(max(*row["prompt"], *row["output"]) for row in rows)
    for module in (combined_module, model_module):
        module.perf_counter = lambda: Simulated.spent_ms / 1e3  # type: ignore[attr-defined]
    lines: dict[str, list[str]] = {}

    def add(name: str, cell: str) -> None:
        lines.setdefault(name, []).append(cell)

    for make, skips in MACHINES.values():
        curve = make()
        flat = curve.step_ms(_MANY, 0) <= _FLAT * curve.base[1]
        tables: list[Callable[[], Drafter]] = [SuffixDrafter, RecyclingDrafter]
        add("suffix", cell(speed(rows, make, [tables[0]]), is_auto=not flat))
        add("suffix, recycling", cell(speed(rows, make, tables), is_auto=flat))
        for name, engine in ENGINES.items():
            made = Simulated(engine.agrees, engine.step * curve.base[1], vocab_size)
            promised, _ = predicted_speedup(
                [_HOLDS * engine.agrees ** (place + 1) for place in range(constants.LONGEST)],
                curve.base,
                engine.step * curve.base[1],
            )
            takes = promised > constants.NO_DIFFERENCE + engine.bytes_part
            found = speed(rows, make, [SuffixDrafter], made)
            add(f"suffix, {name}", cell(found, is_auto=takes))
        for depth in DEPTHS:
            name = f"suffix, window, behind {depth:,} tokens"
            if not skips or not curve.depth_ms:
                add(name, "")
                continue
            step_ms = curve.step_ms(1, constants.WINDOW_FIRST + constants.WINDOW_LAST)
            steps = [curve.step_ms(size, depth) for size in range(len(curve.base))]
            promised, _ = predicted_speedup(constants.WINDOW_GAINS, steps, step_ms)
            made = Simulated(WINDOW_AGREES, step_ms, vocab_size)
            found = speed(rows, make, [SuffixDrafter], made, before=depth)
            add(name, cell(found, is_auto=promised > _WORTH_A_WINDOW))
            add(
                f"suffix, behind {depth:,} tokens",
                cell(speed(rows, make, tables[:1], before=depth)),
            )
    print("| | " + " | ".join(MACHINES) + " |")
    print("| --- |" + " --- |" * len(MACHINES))
    for name, cells in lines.items():
        print(f"| {name} | " + " | ".join(cells + [""] * (len(MACHINES) - len(cells))) + " |")


def cell(speed_up: float, *, is_auto: bool = False) -> str:
    return f"{speed_up:.2f}x" + "*" * is_auto


def speed(
    rows: Sequence[dict[str, Any]],
    make: Callable[[], CostCurve],
    tables: Sequence[Callable[[], Drafter]],
    engine: Simulated | None = None,
    before: int = 0,
) -> float:
    """Times plain decoding, over all answers together."""
    curve, drafters = make(), [one() for one in tables]
    curve.expect_slopes(curve.depth_ms, curve.depth_node_ms, _SLOPE_ERROR)
    power = 1.0
    if engine is not None:
        steps = CostCurve([inf, *[engine._step_ms] * 8])
        promised = [engine.agrees ** (place + 1) for place in range(constants.LONGEST)]
        drafters.append(HeadDrafter(engine.text, steps, engine._vocab_size, promised))
        power = engine.power_for(rows)
    drafter, plain_ms, spent_ms = CombinedDrafter(drafters), 0.0, 0.0
    for row in rows:
        if engine is not None:
            engine.answers(row, power)
        plain, spent = _replay(row, drafter, curve, Counter(), before=before)
        plain_ms, spent_ms = plain_ms + plain, spent_ms + spent
    return plain_ms / spent_ms


if __name__ == "__main__":
    main()
