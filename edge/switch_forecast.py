"""What a switching policy would do: shares, agreement and time, from entropies along known texts.

The rule itself is run (`edgespec.switch_policy.Switch`) over both models' entropies of the same
text. That is not quite what would be written, since who writes changes the text, but near enough to
choose thresholds by: they are quantiles of entropies, found by bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from edgespec.switch_policy import LARGE, SMALL, Switch, SwitchPolicy, SwitchPrices, Turn

_WINDOWS, _STAYS, _WAYS_DOWN = (1, 5), (1, 4, 10), (0.3, 0.5, 0.7, 0.9)
_BISECTIONS = 9
_FASTER = 0.97  # of the large model's time: what is called faster
_NEAR = 0.03  # of a wanted share


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
    large_share: float  # of the tokens
    agreement: float  # tokens that are the large model's best
    quality: float
    switches_per_token: float
    ms_per_token: float  # of decoding, without drafts
    small_stay: float  # tokens

    def as_json(self) -> dict[str, float]:
        """The numbers without the policy."""
        return {
            "large_share": self.large_share,
            "agreement": self.agreement,
            "quality": self.quality,
            "switches_per_token": self.switches_per_token,
            "ms_per_token": self.ms_per_token,
            "small_stay_tokens": self.small_stay,
        }


def writers(policy: SwitchPolicy, trace: Trace, prices: SwitchPrices) -> list[str]:
    """Which model would write each token of a text."""
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
    return chosen


def turns_of(models: Sequence[str]) -> list[Turn]:
    """Runs of equal writers."""
    turns: list[Turn] = []
    for model in models:
        count = turns.pop()[1] if turns and turns[-1][0] == model else 0
        turns.append((model, count + 1))
    return turns


def forecast(policy: SwitchPolicy, traces: Sequence[Trace], prices: SwitchPrices) -> Forecast:
    """Run a policy over traces, every step at its price."""
    tokens = large = wrong = differing = switches = 0
    spent_ms, stays = 0.0, [0]
    for trace in traces:
        models = writers(policy, trace, prices)
        turns = turns_of(models)
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
        large_share=large / tokens,
        agreement=1.0 - wrong / tokens,
        quality=1.0 - wrong / differing if differing else 1.0,
        switches_per_token=switches / tokens,
        ms_per_token=spent_ms / max(1, tokens - len(traces)),
        small_stay=max(1.0, sum(stays) / max(1, len(stays) - 1)),
    )


def choose(
    traces: Sequence[Trace],
    prices: SwitchPrices,
    *,
    large_share: float | None = None,
    quality: float | None = None,
) -> tuple[Forecast, list[Forecast]]:
    """The policy for a wanted share of the large model, or a wanted quality (both 0 to 1).

    Each shape (window, minimum stay, way down) gets the threshold that meets the wish. For a
    quality the fastest is taken. For a share it is the one of the best quality, of those that are
    faster than the large model alone where there are any.

    Returns the choice, and what each shape would bring.
    """
    shapes = list(product(_WINDOWS, _STAYS, _WAYS_DOWN))
    if quality is not None:
        met = [_meet(s, traces, prices, lambda f: f.quality >= quality) for s in shapes]
        return min(
            met, key=lambda found: (max(0.0, quality - found.quality), found.ms_per_token)
        ), met
    wanted = 0.4 if large_share is None else large_share
    met = [_meet(s, traces, prices, lambda f: f.large_share >= wanted) for s in shapes]
    alone = forecast(SwitchPolicy.always(LARGE), traces, prices).ms_per_token
    near = [found for found in met if abs(found.large_share - wanted) <= _NEAR] or met
    fast = [found for found in near if found.ms_per_token <= _FASTER * alone]
    return max(fast or near, key=lambda found: found.quality), met


def _meet(
    shape: tuple[int, int, float],
    traces: Sequence[Trace],
    prices: SwitchPrices,
    suffices: Callable[[Forecast], bool],
) -> Forecast:
    """The highest threshold of a shape (window, minimum stay, way down) that suffices.

    Thresholds are quantiles: of the small model's entropies for the way up, of the large one's for
    the way down.
    """
    window, stay, way_down = shape
    small = sorted(nats for trace in traces for nats in trace.small_nats)
    large = sorted(nats for trace in traces for nats in trace.large_nats)

    def tried(place: float) -> Forecast:
        policy = SwitchPolicy(
            _quantile(small, place),
            _quantile(large, way_down),
            window,
            stay,
            only_where_it_pays=False,
        )
        return forecast(policy, traces, prices)

    low, high = 0.0, 1.0
    best = tried(low)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        found = tried(middle)
        if suffices(found):
            low, best = middle, found
        else:
            high = middle
    return best


def _quantile(ordered: Sequence[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
