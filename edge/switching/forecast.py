"""What a switching policy would do: shares, agreement and time, from entropies along known texts.

The rule itself is run (`edgespec.switching.policy.Switch`) over both models' entropies of the same
text. That is not quite what would be written, since who writes changes the text, but near enough to
choose thresholds by: they are quantiles of entropies, found by bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product, starmap
from math import inf
from typing import NamedTuple

from edgespec.decode.stats import LARGE, SMALL, ModelTurn
from edgespec.switching.policy import SwitchPolicy, SwitchPrices
from edgespec.switching.switch import Switch

_BISECTIONS = 9
_FASTER = 0.97  # of the large model's time: what is called faster
_NEAR = 0.03  # of a wanted share
DEFAULT_SHARE = 0.4  # of the large model, where nothing is wanted


class PolicyShape(NamedTuple):
    """What a policy has besides its threshold up.

    `way_down` is the part of the large model's entropies that is low enough to go down, where the
    small one's threshold is not low itself: both ends of the family are a model alone.
    """

    window: int
    min_stay: int
    way_down: float


_SHAPES = tuple(starmap(PolicyShape, product((1, 5), (0, 1, 4, 10), (0.5, 0.7, 0.9, 1.0))))


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
    small_stay: float  # tokens

    def as_json(self) -> dict[str, float | None]:
        """The numbers; a threshold that is never reached is None."""
        return {
            "large_share": self.large_share,
            "agreement": self.agreement,
            "quality": self.quality,
            "switches_per_token": self.switches_per_token,
            "tokens_per_s": 1e3 / self.ms_per_token,
            "small_stay_tokens": self.small_stay,
            **{name: self.policy.as_json()[name] for name in ("up_nats", "down_nats")},
        }


def writers(
    policy: SwitchPolicy, trace: Trace, prices: SwitchPrices
) -> tuple[list[str], list[ModelTurn]]:
    """Which model would write each token of a text, and the turns that this takes."""
    switch = Switch(policy, prices.saved_ms, trace.depth)
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


def forecast(policy: SwitchPolicy, traces: Sequence[Trace], prices: SwitchPrices) -> Forecast:
    """Run a policy over traces, every step at its price."""
    tokens = large = wrong = differing = switches = 0
    spent_ms, stays, all_turns = 0.0, [0], []
    for trace in traces:
        models, turns = writers(policy, trace, prices)
        all_turns.append(turns)
        tokens += len(models)
        large += models.count(LARGE)
        differing += len(models) - sum(trace.agrees)
        pairs = zip(models, trace.agrees, strict=True)
        wrong += sum(model == SMALL and not agrees for model, agrees in pairs)
        switches += len(turns) - 1
        stays += [count for model, count in turns if model == SMALL]
        spent_ms += prices.turns_ms(turns, trace.depth)
    return Forecast(
        policy,
        all_turns,
        large_share=large / tokens,
        agreement=1.0 - wrong / tokens,
        quality=1.0 - wrong / differing if differing else 1.0,
        switches_per_token=switches / tokens,
        ms_per_token=spent_ms / max(1, tokens - len(traces)),
        small_stay=sum(stays) / max(1, len(stays) - 1),
    )


def choose(
    traces: Sequence[Trace],
    prices: SwitchPrices,
    *,
    large_share: float | None = None,
    quality: float | None = None,
) -> tuple[Forecast, PolicyShape]:
    """The policy for a wanted share of the large model, or a wanted quality (both 0 to 1).

    Each shape (window, minimum stay, way down) gets the threshold that meets the wish. For a
    quality the fastest is taken, the large model alone if nothing is faster. For a share it is the
    one of the best quality, of those that are faster than the large model alone where there are
    any.

    Returns what it is expected to do, and its shape.
    """
    alone_ms = forecast(SwitchPolicy.always(LARGE), traces, prices).ms_per_token
    if quality is not None:
        met = [meet(s, traces, prices, lambda f: f.quality >= quality) for s in _SHAPES]
        best = min(met, key=lambda f: f.ms_per_token)
        if best.ms_per_token > alone_ms:
            best = met[0] = forecast(SwitchPolicy.always(LARGE), traces, prices)
    else:
        wanted = DEFAULT_SHARE if large_share is None else large_share
        met = [meet(s, traces, prices, lambda f: f.large_share >= wanted) for s in _SHAPES]
        near = [found for found in met if abs(found.large_share - wanted) <= _NEAR] or met
        fast = [found for found in near if found.ms_per_token <= _FASTER * alone_ms]
        best = max(fast or near, key=lambda f: f.quality)
    return best, _SHAPES[met.index(best)]


def meet(
    shape: PolicyShape,
    traces: Sequence[Trace],
    prices: SwitchPrices,
    suffices: Callable[[Forecast], bool],
) -> Forecast:
    """The highest threshold of a shape that suffices; ways down that do not pay are made too.

    Thresholds are quantiles: of the small model's entropies for the way up, of the large one's for
    the way down.
    """
    small = sorted(nats for trace in traces for nats in trace.small_nats)
    large = sorted(nats for trace in traces for nats in trace.large_nats)

    def tried(place: float) -> Forecast:
        part = min(shape.way_down, 2 * place)
        down = _quantile(large, part) if part < 1.0 else inf  # 1: the small one is always asked
        policy = SwitchPolicy(
            _quantile(small, place), down, shape.window, shape.min_stay, only_where_it_pays=False
        )
        return forecast(policy, traces, prices)

    low, high = 0.0, 1.0
    best = forecast(SwitchPolicy.always(LARGE), traces, prices)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        found = tried(middle)
        if suffices(found):
            low, best = middle, found
        else:
            high = middle
    return best


def sweep(
    shape: PolicyShape, traces: Sequence[Trace], prices: SwitchPrices, count: int
) -> list[Forecast]:
    """Policies of a shape from the small model alone to the large one alone, by equal shares."""
    between = [
        meet(shape, traces, prices, partial(_has_share, place / (count - 1)))
        for place in range(1, count - 1)
    ]
    ends = (forecast(SwitchPolicy.always(model), traces, prices) for model in (SMALL, LARGE))
    first, last = ends
    return [first, *between, last]


def accepted_drafts(traces: Sequence[Trace], most: int) -> list[float]:
    """How many of 1 to `most` greedy drafts of the small model the large one would accept."""
    runs = []
    for trace in traces:
        run = 0
        for agrees in reversed(trace.agrees):
            run = run + 1 if agrees else 0
            runs.append(run)
    return [sum(min(run, k) for run in runs) / max(1, len(runs)) for k in range(1, most + 1)]


def _has_share(share: float, found: Forecast) -> bool:
    return found.large_share >= share


def _quantile(ordered: Sequence[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
