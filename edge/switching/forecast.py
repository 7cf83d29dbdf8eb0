"""What a switching policy would do: shares, agreement and time, from entropies along known texts.

The rule itself is run (`edgespec.switching.engine.Switch`) over both models' entropies of the same
text. That is not quite what would be written, since who writes changes the text, but near enough to
choose thresholds by: they are two quantiles of entropies, found by bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgespec.decode.generation import LARGE, SMALL, ModelTurn
from edgespec.switching.engine import Switch
from edgespec.switching.planning import Curves, SwitchPolicy, turns_ms

DEFAULT_SHARE = 0.4  # of the large model, where nothing is wanted
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
    wanted = DEFAULT_SHARE if large_share is None else large_share
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
