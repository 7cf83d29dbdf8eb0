"""What many answers come to: speed, ratio, acceptance and agreement, by task and overall.

A ratio is tokens/s over tokens/s, each over the same prompts together. Its interval is the
percentile bootstrap over prompts (Efron 1979): prompts are what would differ in another run. Which
tasks there are and how many prompts each has was decided and not drawn, so prompts are drawn again
within their task: of n prompts n - 1, each counting n / (n - 1), because drawing n would take the
variance of a task with few prompts for smaller than it is (Rao and Wu 1988). Prompts that are alone
in their task are drawn from one pot. Fewer than five prompts have no interval: even the range of
four values misses the median behind them one time in eight.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgespec.bench.loaded_model import Answer
from edgespec.decode.generation import Counters

_RESAMPLES = 2000
_BLOCK = 200  # resamples at once: what they take together stays below some MiB
_LOW, _HIGH = 2.5, 97.5  # percentiles
_LEAST = 5  # prompts of an interval


@dataclass(frozen=True, slots=True)
class Timed:
    """How many tokens an answer had, and how long they took."""

    tokens: int
    seconds: float

    @property
    def per_s(self) -> float:
        """Tokens per second; 0 for an answer without any."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as fast, and the 95% interval; None is what the answers do not tell."""

    value: float | None
    low: float | None = None
    high: float | None = None


def together(answers: Sequence[Timed]) -> Timed:
    return Timed(sum(a.tokens for a in answers), sum(a.seconds for a in answers))


def ratio_of(
    answers: Sequence[Timed], baseline: Sequence[Timed], tasks: Sequence[str] | None = None
) -> Ratio:
    """`answers` over `baseline`, prompt by prompt the same questions; `tasks` are theirs, if known.

    A prompt that one of the two answered in no time (a single token is not decoded) tells nothing.

    >>> ratio_of([Timed(8, 1.0)] * 5, [Timed(4, 1.0)] * 5)
    Ratio(value=2.0, low=2.0, high=2.0)
    """
    rows = zip(answers, baseline, tasks or [""] * len(answers), strict=True)
    told = [(a, b, task) for a, b, task in rows if a.per_s > 0 and b.per_s > 0]
    if not told:
        return Ratio(None)
    # [4, prompts]: tokens and seconds of both.
    table = np.array([(a.tokens, a.seconds, b.tokens, b.seconds) for a, b, _ in told]).T
    value, number = float(_ratios(table.sum(axis=1))), len(told)
    if number < _LEAST:
        return Ratio(value)
    chooser = np.random.default_rng(0)
    places = _places([task for _, _, task in told])
    resampled = []
    for _ in range(_RESAMPLES // _BLOCK):
        weights = np.empty((number, _BLOCK))
        for some in places:
            n = len(some)
            drawn = chooser.multinomial(n - 1, [1 / n] * n, size=_BLOCK)
            weights[some] = drawn.T * (n / (n - 1))
        resampled.append(_ratios(table @ weights))
    low, high = np.percentile(np.concatenate(resampled), (_LOW, _HIGH))
    return Ratio(value, min(float(low), value), max(float(high), value))


def ratio_text(value: float | None) -> str:
    """The ratio with its unit; a dash where there is none."""
    return "-" if value is None else f"{value:.2f}x"


def interval_text(low: float | None, high: float | None) -> str:
    """The interval in brackets; a dash where there is none."""
    return "-" if low is None or high is None else f"[{low:.2f}, {high:.2f}]"


def _places(tasks: Sequence[str]) -> list[list[int]]:
    """Which of at least two prompts are drawn together: those of a task, and all that are alone.

    A single one that is alone joins the largest task.
    """
    by_task: dict[str, list[int]] = {}
    for place, task in enumerate(tasks):
        by_task.setdefault(task, []).append(place)
    groups = [some for some in by_task.values() if len(some) > 1]
    alone = [place for some in by_task.values() if len(some) == 1 for place in some]
    if len(alone) > 1:
        return [*groups, alone]
    if alone:
        max(groups, key=len).extend(alone)
    return groups


def _ratios(sums: np.ndarray) -> np.ndarray:
    tokens, seconds, base_tokens, base_seconds = sums
    return np.asarray((tokens / seconds) / (base_tokens / base_seconds))


def middle_repeats(answers: Sequence[Timed], baseline: Sequence[Timed]) -> list[int]:
    """Which repeats of one prompt count: the one with the median ratio, or both of an even number.

    Both sides of a pair were measured one after the other, so pairs are kept together. Ratios of a
    baseline over itself are all alike: then it is the one of median speed.
    """
    pairs = [(a.per_s, b.per_s) for a, b in zip(answers, baseline, strict=True)]
    order = sorted(
        range(len(pairs)), key=lambda i: (pairs[i][0] / max(1e-9, pairs[i][1]), pairs[i][0])
    )
    return order[(len(order) - 1) // 2 : len(order) // 2 + 1]


@dataclass(slots=True)
class Prompted:
    """One prompt's answers by one contender, and how they agree with what they are held against.

    `gap` is the distance of the two best logits where an answer parts; None when none does.
    """

    answers: list[Answer]  # by repeat
    gap: float | None = None


def decoding(counters: Counters) -> Timed:
    """Tokens after the first one, and the time after it."""
    return Timed(counters.accepted_tokens + counters.rounds, counters.decode_s)


def end_to_end(counters: Counters) -> Timed:
    """All tokens, and all time: the prompt's too."""
    return Timed(counters.generated_tokens, counters.time_to_first_token_s + counters.decode_s)


def summary(
    ours: Sequence[Prompted],
    baseline: Sequence[Prompted],
    noise: float,
    tasks: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Numbers of one contender over some prompts; `baseline` answered the same ones.

    `tasks` are those of the prompts, where they differ. Of several repeats of a prompt the one with
    the median ratio counts, of an even number the two of them together; what is not a time is that
    of the first of these. `unexplained` are answers that part where the two best logits are
    further apart than `noise`.
    """
    pairs = []
    for both in zip(ours, baseline, strict=True):  # the repeats of each prompt that count
        sides = [[answer.counters for answer in one.answers] for one in both]
        places = middle_repeats(*([decoding(counters) for counters in side] for side in sides))
        pairs.append([[side[place] for place in places] for side in sides])
    counters = [sides[0][0] for sides in pairs]
    timed, whole = (
        [[together(list(map(part, sides[place]))) for sides in pairs] for place in (0, 1)]
        for part in (decoding, end_to_end)
    )
    total = Counters.total(counters)
    gaps = [one.gap for one in ours if one.gap is not None]
    given = [answer for one in ours for answer in one.answers]
    joules = [one.joules for one in given if one.joules is not None]
    tokens = sum(one.counters.generated_tokens for one in given)
    return {
        "prompts": len(pairs),
        "tokens": total.generated_tokens,
        "tokens_per_s": together(timed[0]).per_s,
        **_ratio_json("ratio", ratio_of(timed[0], timed[1], tasks)),
        "end_to_end_tokens_per_s": together(whole[0]).per_s,
        **_ratio_json("end_to_end_ratio", ratio_of(whole[0], whole[1], tasks)),
        "time_to_first_token_s": statistics.median(c.time_to_first_token_s for c in counters),
        "rounds": total.rounds,
        "drafted_tokens": total.drafted_tokens,
        "accepted_tokens": total.accepted_tokens,
        "acceptance_length": total.acceptance_length,
        "drafted_by": dict(total.drafted_by),
        "accepted_by": dict(total.accepted_by),
        "draft_s": total.draft_s,
        "host_share": total.host_share,
        # Of the whole machine, prompts included; None where nothing counts them.
        "j_per_token": sum(joules) / tokens if tokens and len(joules) == len(given) else None,
        "identical": len(pairs) - len(gaps),
        "unexplained": sum(gap > noise for gap in gaps),
        "largest_gap": max(gaps, default=0.0),
    }


def table_rows(variant: Mapping[str, Any], baseline: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A line of text for each task and one for all: task, the baseline's and this one's tokens/s,
    ratio, its interval, acceptance length, time to the first token, identical answers."""
    rows: list[tuple[str, ...]] = []
    for task, row in {**variant["tasks"], "overall": variant["overall"]}.items():
        other = baseline["tasks"].get(task, baseline["overall"])
        rows.append(
            (
                task,
                f"{other['tokens_per_s']:.1f}",
                f"{row['tokens_per_s']:.1f}",
                ratio_text(row["ratio"]),
                interval_text(row["ratio_low"], row["ratio_high"]),
                f"{row['acceptance_length']:.2f}",
                f"{row['time_to_first_token_s']:.2f} s",
                f"{row['identical']} of {row['prompts']}",
            )
        )
    return rows


def _ratio_json(name: str, ratio: Ratio) -> dict[str, float | None]:
    return {name: ratio.value, f"{name}_low": ratio.low, f"{name}_high": ratio.high}
