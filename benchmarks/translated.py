"""Draft models of another vocabulary: what carrying text over takes, and how often they are right.

python benchmarks/translated.py cost TARGET DRAFT --text FILE
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path
from time import thread_time_ns
from typing import Any

import numpy as np
from shared import run

from edgespec.backends.llama.tokenizer import open_tokenizer
from edgespec.drafting.drafters.translated import (
    TranslatedChain,
    TranslatedText,
    Translation,
    new_calibration,
)
from edgespec.drafting.proposal import StepContext
from edgespec.memory.times.curve import CostCurve
from edgespec.prefix import common_prefix_length

_RIGHT, _SPAN = 0.65, 96  # of a draft model's tokens; characters of the text looked ahead


class _NoModel:
    """The cache of a draft model that is not there."""

    context_size = 1 << 20


def cost() -> None:
    """Processor time that carrying text over takes in a round, without any model's step.

    TARGET's text is FILE, from its middle on, behind the first half as a prompt. A draft model that
    is right at 0.65 of the places drafts up to three of its tokens, which become TARGET's; what the
    target keeps and writes is told. Told apart are the first rounds, whose words are new.
    """
    parser = argparse.ArgumentParser("translated.py cost")
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=400)
    options = parser.parse_args()
    words = options.text.read_text(encoding="utf-8")
    with open_tokenizer(options.target) as target, open_tokenizer(options.draft) as draft:
        calls: Counter[str] = Counter()
        for name, one in (("target", target), ("draft", draft)):
            one.encode = partial(_counted, one.encode, calls, name)  # type: ignore[method-assign]
        made = Translation(target, draft)
        ids = target.encode(words)
        place = len(ids) // 2
        ends = np.cumsum([len(target.token_bytes(one)) for one in ids])
        data, luck = b"".join(map(target.token_bytes, ids)), random.Random(1)
        text = TranslatedText(_NoModel(), made, 16)  # type: ignore[arg-type]
        context = StepContext(8, 0.0, CostCurve([inf, *[1.0] * 9]), 0)
        counts, rows = new_calibration(), list[tuple[float, int, int]]()
        text.begin(ids[: place + 1])
        while len(rows) < options.rounds and place + 16 < len(ids):
            ahead = data[ends[place] : ends[place] + _SPAN].decode(errors="ignore")
            known = draft.encode(ahead, add_special=False)[: options.drafts]
            for number in range(len(known)):
                if luck.random() > _RIGHT:
                    known[number] = luck.choice(text.tokens)
            before, began = calls.copy(), thread_time_ns()
            text.cached, text.shared = list(text.tokens), len(text.tokens)
            chain = TranslatedChain(context, counts, made, text)
            for token in known:
                if not chain.take(token, 0.7) or chain.is_full:
                    break
            proposal, _ = chain.proposal(0.0)
            drafting = thread_time_ns()
            truth = ids[place + 1 :]
            kept = common_prefix_length(proposal.tokens, truth)
            told = thread_time_ns()
            text.append(truth[: kept + 1])
            rows.append((drafting - began, thread_time_ns() - told, (calls - before).total()))
            place += kept + 1
    for name, part in (("first 100", rows[:100]), ("all", rows)):
        drafting, telling, called = (sum(row) / len(part) for row in zip(*part, strict=True))
        print(
            f"{name}: {(drafting + telling) / 1e3:.0f} us a round: {drafting / 1e3:.0f} drafting, "
            f"{telling / 1e3:.0f} telling; {called:.2f} calls of tokenizers"
        )


def _counted(
    encode: Callable[..., list[int]], calls: Counter[str], name: str, text: str, **options: Any
) -> list[int]:
    calls[name] += 1
    return encode(text, **options)


if __name__ == "__main__":
    run(__doc__, cost=cost)
