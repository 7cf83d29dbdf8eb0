"""Thresholds for a pair of models: `edgespec profile MODEL --switch SMALL`.

The models write to the same prompts in turn, both read all of the text, and the policy is chosen
that does what is wanted along it. Then both write together under that policy, and the choice is
made again with that text: who writes changes what is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgespec.backends.base import Backend, DraftTree, Logits
from edgespec.decode.engine import Engine
from edgespec.decode.generation import LARGE, SMALL, ModelTurn, Result
from edgespec.errors import UnsupportedError
from edgespec.measure.prompts import PROMPTS
from edgespec.memory.plan.plan import Request
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.progress import Progress
from edgespec.setup.loading import load_plan, plan_to_load
from edgespec.switching.engine import Switch, SwitchingEngine, entropy_nats
from edgespec.switching.planning import (
    Calibrated,
    Curves,
    SwitchPolicy,
    keep_switch,
    turns_ms,
)

_SECONDS = 60.0
_MOST_TOKENS, _LEAST_TOKENS = 96, 24  # of a text
_SETTINGS = 10
_MOST_DRAFTED = 8


def calibrate(
    spec: ModelSpec,
    request: Request,
    *,
    large_share: float | None = None,
    quality: float | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Find the policy for a wanted share of large-model tokens, or a wanted quality, and keep it.

    Args:
        request: names the small model (`switch`).
        large_share: part of the tokens that the large model is to write, 0 to 1.
        quality: part of the disagreement between the models that is to be removed, 0 to 1.

    Raises UnsupportedError for a wish out of range, and as `edgespec.load` does.
    """
    report = progress or (lambda _what, _fraction: None)
    if request.switch is None:
        raise UnsupportedError("there is no model to switch to", hint="name one with --switch")
    for name, wish in (("--large-share", large_share), ("--quality", quality)):
        if wish is not None and not 0.0 <= wish <= 1.0:
            raise UnsupportedError(f"{name} {wish} is not between 0 and 1")
    small_spec = read_model_spec(request.switch)
    wishes = {"large_share": large_share, "quality": quality}
    plan = plan_to_load(spec, request, report)
    traces, results, half = list[Trace](), list[Result](), len(PROMPTS) // 2
    with load_plan(spec, plan, progress=report) as engine:
        assert isinstance(engine, SwitchingEngine)
        curves = curves_of(engine)
        # As long as there is time for: texts are written by one model and read by both.
        both_ms = sum(curve.step_ms(1, 128) for curve in curves.values())
        tokens = round(_SECONDS * 1e3 / (len(PROMPTS) * both_ms))
        tokens = min(_MOST_TOKENS, max(_LEAST_TOKENS, tokens))
        for number, prompt in enumerate(PROMPTS[:half]):
            report("writing with both models", number / half)
            for model in (LARGE, SMALL):
                traces.append(_written(engine, SwitchPolicy.always(model), prompt.text, tokens)[0])
        found = choose(traces, curves, **wishes)
        for number, prompt in enumerate(PROMPTS[half:]):
            report("writing in turns", number / half)
            trace, result = _written(engine, found.policy, prompt.text, tokens)
            traces.append(trace)
            results.append(result)
    found = choose(traces, curves, **wishes)
    written = sum(len(result.token_ids) - 1 for result in results)  # by decoding
    drafted = accepted_drafts(traces, _MOST_DRAFTED)
    kept = Calibrated(found.policy, found.large_share, found.quality, found.turns, drafted)
    keep_switch(spec, small_spec, kept)
    depth = sum(trace.depth for trace in traces) // len(traces)
    return {
        "large": spec.path.name,
        "small": small_spec.path.name,
        "wanted": {name: wish for name, wish in wishes.items() if wish is not None},
        "policy": kept.policy.as_json(),
        "expected": found.as_json(),
        "alone": {
            model: forecast(SwitchPolicy.always(model), traces, curves).as_json()
            for model in (LARGE, SMALL)
        },
        "lossless": {"drafting_tokens_per_s": kept.drafting_tokens_per_s(curves, depth)},
        "tokens": sum(len(trace.agrees) for trace in traces),
        "points": [point.as_json() for point in sweep(traces, curves, _SETTINGS)],
        "measured": {
            "large_share": sum(result.large_share for result in results) / len(results),
            "tokens_per_s": written / sum(result.counters.decode_s for result in results),
        },
    }


def curves_of(engine: SwitchingEngine) -> Curves:
    """Step times of both models as they are now; raises UnsupportedError without any."""
    large, small = engine.curve, engine.small.curve
    if large is None or small is None:
        raise UnsupportedError(
            "without drafters step times are not measured, and nothing says how fast turns are",
            hint="leave out --drafter none",
        )
    return {LARGE: large.resized(large.max_nodes), SMALL: small.resized(small.max_nodes)}


def forced_rows(backend: Backend, prompt: Sequence[int], text: Sequence[int]) -> Iterator[Logits]:
    """Logits of each token of a text behind a prompt, as if the model had written it.

    Rows are views that the next step overwrites.
    """
    backend.truncate(0)
    before, size = len(prompt) - 1, backend.batch_size
    for start in range(0, before, size):
        backend.prefill(prompt[start : min(start + size, before)])
    tokens = [prompt[-1], *text[:-1]]
    for start in range(0, len(tokens), backend.max_nodes):
        nodes = tokens[start : start + backend.max_nodes]
        yield from backend.verify(DraftTree.chain(nodes))
        backend.commit(range(len(nodes)))


def trace_of(engine: SwitchingEngine, prompt: Sequence[int], text: Sequence[int]) -> Trace:
    """What both models make of a text."""
    large, small = (_read(one, prompt, text) for one in (engine, engine.small))
    agrees = [a[1] == b[1] for a, b in zip(large, small, strict=True)]
    return Trace([a[0] for a in large], [b[0] for b in small], agrees, len(prompt))


def _read(engine: Engine, prompt: Sequence[int], text: Sequence[int]) -> list[tuple[float, int]]:
    """Entropy in nats and best token at each place of a text."""
    with engine.scheduler.exclusive():
        rows = forced_rows(engine.backend, prompt, text)
        return [(entropy_nats(row), int(np.argmax(row))) for row in rows]


def _written(
    engine: SwitchingEngine, policy: SwitchPolicy, prompt: str, tokens: int
) -> tuple[Trace, Result]:
    """A text of a policy under both models, and how it came about."""
    engine.policy = policy
    ids = engine.encode(prompt)
    result = engine.generate(ids, max_tokens=tokens)
    return trace_of(engine, ids, result.token_ids), result


# -- what a policy would do: shares, agreement and time, from entropies along known texts --------
#
# The rule itself is run (`Switch`) over both models' entropies of the same text. That is not quite
# what would be written, since who writes changes the text, but near enough to choose thresholds by:
# they are two quantiles of entropies, found by bisection.

# Part of the large model's entropies that is low enough to go down. With windows of one token and
# stays of none the share that goes down says most of quality and speed (benchmarks/LOG.md, "Rules,
# and what they are worth": 0.5 to 1.0 keep 70% to 80% and 49 to 59 tokens/s of SmolLM2).
_WAY_DOWN = 0.7


@dataclass(frozen=True, slots=True)
class Trace:
    """One text under both models: by token, entropies in nats and whether their best tokens agree.

    `depth` is the length of the prompt before it, in tokens.
    """

    large_nats: Sequence[float]  # [n]
    small_nats: Sequence[float]  # [n]
    agrees: Sequence[bool]  # [n]
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a policy is expected to do.

    `quality` is the part of the disagreement between the models that it removes: 0 is the small
    model alone, 1 the large one.
    """

    policy: SwitchPolicy
    turns: Sequence[Sequence[ModelTurn]]  # by text
    large_share: float  # of the tokens
    agreement: float  # tokens that are the large model's best
    quality: float
    switches_per_token: float
    ms_per_token: float  # of decoding, without drafts

    def as_json(self) -> dict[str, float | None]:
        """The numbers; a threshold that is never reached is None."""
        return {
            "large_share": self.large_share,
            "agreement": self.agreement,
            "quality": self.quality,
            "switches_per_token": self.switches_per_token,
            "tokens_per_s": 1e3 / self.ms_per_token,
            **{name: self.policy.as_json()[name] for name in ("up_nats", "down_nats")},
        }


def writers(policy: SwitchPolicy, trace: Trace) -> tuple[list[str], list[ModelTurn]]:
    """Which model would write each token of a text, and the turns that this takes."""
    switch = Switch(policy)
    chosen = []
    for large_nats, small_nats in zip(trace.large_nats, trace.small_nats, strict=True):
        if switch.is_due:
            switch.change()
        if switch.writer == SMALL and switch.sees(small_nats):
            switch.change()
        if switch.writer == LARGE:
            switch.sees(large_nats)
        chosen.append(switch.writer)
    return chosen, switch.turns


def forecast(policy: SwitchPolicy, traces: Sequence[Trace], curves: Curves) -> Forecast:
    """Run a policy over traces, with the step times of the pair."""
    tokens = large = wrong = differing = switches = 0
    spent_ms, all_turns = 0.0, []
    for trace in traces:
        models, turns = writers(policy, trace)
        all_turns.append(turns)
        tokens += len(models)
        large += models.count(LARGE)
        differing += len(models) - sum(trace.agrees)
        pairs = zip(models, trace.agrees, strict=True)
        wrong += sum(model == SMALL and not agrees for model, agrees in pairs)
        switches += len(turns) - 1
        spent_ms += turns_ms(turns, curves, trace.depth)
    return Forecast(
        policy,
        all_turns,
        large_share=large / tokens,
        agreement=1.0 - wrong / tokens,
        quality=1.0 - wrong / differing if differing else 1.0,
        switches_per_token=switches / tokens,
        ms_per_token=spent_ms / max(1, tokens - len(traces)),
    )


def choose(
    traces: Sequence[Trace],
    curves: Curves,
    *,
    large_share: float | None = None,
    quality: float | None = None,
) -> Forecast:
    """The policy for a wanted share of the large model, or a wanted quality (both 0 to 1).

    For a quality it is the large model alone where switching would not be faster.
    """
    if quality is not None:
        found = meet(traces, curves, lambda one: one.quality >= quality)
        alone = forecast(SwitchPolicy.always(LARGE), traces, curves)
        return found if found.ms_per_token <= alone.ms_per_token else alone
    wanted = 0.4 if large_share is None else large_share  # where nothing is asked for
    return meet(traces, curves, lambda one: one.large_share >= wanted)


def meet(traces: Sequence[Trace], curves: Curves, suffices: Callable[[Forecast], bool]) -> Forecast:
    """The highest threshold up that suffices, with the way down that belongs to it.

    Thresholds are quantiles: of the small model's entropies for the way up, of the large one's for
    the way down. Where the way up is low, the way down is too: both ends are a model alone.
    """
    small = sorted(nats for trace in traces for nats in trace.small_nats)
    large = sorted(nats for trace in traces for nats in trace.large_nats)
    low, high = 0.0, 1.0
    best = forecast(SwitchPolicy.always(LARGE), traces, curves)
    for _ in range(9):  # within 1/512 of the quantile
        middle = (low + high) / 2
        down = _quantile(large, min(_WAY_DOWN, 2 * middle))
        found = forecast(SwitchPolicy(_quantile(small, middle), down), traces, curves)
        if suffices(found):
            low, best = middle, found
        else:
            high = middle
    return best


def sweep(traces: Sequence[Trace], curves: Curves, count: int) -> list[Forecast]:
    """Policies from the small model alone to the large one alone, by equal shares."""
    small, large = (
        forecast(SwitchPolicy.always(model), traces, curves) for model in (SMALL, LARGE)
    )
    shares = [place / (count - 1) for place in range(1, count - 1)]
    return [small, *(choose(traces, curves, large_share=share) for share in shares), large]


def accepted_drafts(traces: Sequence[Trace], most: int) -> list[float]:
    """How many of 1 to `most` greedy drafts of the small model the large one would accept."""
    runs = []
    for trace in traces:
        run = 0
        for agrees in reversed(trace.agrees):
            run = run + 1 if agrees else 0
            runs.append(run)
    return [sum(min(run, k) for run in runs) / max(1, len(runs)) for k in range(1, most + 1)]


def _quantile(ordered: Sequence[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
