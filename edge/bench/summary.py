"""What many answers come to: speed, ratio, acceptance and agreement, by task and overall."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.bench.interleaving import Answer
from edgespec.bench.ratios import (
    Ratio,
    Timed,
    interval_text,
    middle_repeats,
    rate,
    ratio_of,
    ratio_text,
    together,
)
from edgespec.decode.stats import Counters, host_share


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
    pairs = [_middle(one, other) for one, other in zip(ours, baseline, strict=True)]
    counters = [sides[0][0] for sides in pairs]
    timed = [_timed(sides, decoding) for sides in pairs]
    whole = [_timed(sides, end_to_end) for sides in pairs]
    rounds = sum(c.rounds for c in counters)
    accepted = sum(c.accepted_tokens for c in counters)
    gaps = [one.gap for one in ours if one.gap is not None]
    return {
        "prompts": len(pairs),
        "tokens": sum(c.generated_tokens for c in counters),
        "tokens_per_s": rate([one for one, _ in timed]),
        **_ratio_json("ratio", ratio_of(*_columns(timed), tasks)),
        "end_to_end_tokens_per_s": rate([one for one, _ in whole]),
        **_ratio_json("end_to_end_ratio", ratio_of(*_columns(whole), tasks)),
        "time_to_first_token_s": statistics.median(c.time_to_first_token_s for c in counters),
        "rounds": rounds,
        "drafted_tokens": sum(c.drafted_tokens for c in counters),
        "accepted_tokens": accepted,
        "acceptance_length": (accepted + rounds) / rounds if rounds else 1.0,
        "drafted_by": _total(c.drafted_by for c in counters),
        "accepted_by": _total(c.accepted_by for c in counters),
        "draft_s": sum(c.draft_s for c in counters),
        "host_share": host_share(counters),
        "j_per_token": _joules_a_token(answer for one in ours for answer in one.answers),
        "identical": len(pairs) - len(gaps),
        "unexplained": sum(gap > noise for gap in gaps),
        "largest_gap": max(gaps, default=0.0),
    }


def _joules_a_token(answers: Iterable[Answer]) -> float | None:
    """Of the whole machine, prompts included; None where nothing counts them."""
    counted = [(one.joules, one.counters.generated_tokens) for one in answers]
    tokens = sum(count for _, count in counted)
    joules = [taken for taken, _ in counted if taken is not None]
    return sum(joules) / tokens if tokens and len(joules) == len(counted) else None


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


def _middle(ours: Prompted, baseline: Prompted) -> tuple[list[Counters], list[Counters]]:
    """The repeats of one prompt that count, of both."""
    sides = [[answer.counters for answer in one.answers] for one in (ours, baseline)]
    places = middle_repeats(*([decoding(counters) for counters in side] for side in sides))
    first, second = ([side[place] for place in places] for side in sides)
    return first, second


def _timed(
    sides: tuple[list[Counters], list[Counters]], part: Callable[[Counters], Timed]
) -> tuple[Timed, Timed]:
    first, second = (together([part(one) for one in side]) for side in sides)
    return first, second


def _columns(pairs: Sequence[tuple[Timed, Timed]]) -> tuple[list[Timed], list[Timed]]:
    return [one for one, _ in pairs], [other for _, other in pairs]


def _ratio_json(name: str, ratio: Ratio) -> dict[str, float | None]:
    return {name: ratio.value, f"{name}_low": ratio.low, f"{name}_high": ratio.high}


def _total(counts: Iterable[Counter[str]]) -> dict[str, int]:
    return dict(sum(counts, Counter()))
