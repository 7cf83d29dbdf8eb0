"""Draft models of another vocabulary: what carrying text over takes, and how often they are right.

python benchmarks/translated.py cost TARGET DRAFT --text FILE
python benchmarks/translated.py useless TARGET [--draft-model FILE]
python benchmarks/translated.py priors TARGET DRAFT
"""

from __future__ import annotations

import argparse
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from math import inf
from pathlib import Path
from time import thread_time_ns
from typing import Any

import numpy as np
from shared import read_questions, run

import edgespec
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.kernels import refusal_of_kernels
from edgespec.backends.llama.tokenizer import open_tokenizer
from edgespec.decode.engine import Engine
from edgespec.drafting.model import SHARES
from edgespec.drafting.proposal import StepContext, VerifyResult
from edgespec.drafting.translated import (
    TranslatedChain,
    TranslatedText,
    TranslatingDrafter,
    Translation,
    new_calibration,
)
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.device.host import usable_cores
from edgespec.memory.times import CostCurve
from edgespec.models.spec import read_model_spec
from edgespec.prefix import common_prefix_length

_RIGHT, _SPAN = 0.65, 96  # of a draft model's tokens; characters of the text looked ahead


class _NoModel:
    """The cache of a draft model that is not there."""

    context_size, batch_size = 1 << 20, 1


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
        drafting, catch_up, called = (sum(row) / len(part) for row in zip(*part, strict=True))
        print(
            f"{name}: {(drafting + catch_up) / 1e3:.0f} us a round: {drafting / 1e3:.0f} drafting, "
            f"{catch_up / 1e3:.0f} catching up; {called:.2f} calls of tokenizers"
        )


def _counted(
    encode: Callable[..., list[int]], calls: Counter[str], name: str, text: str, **options: Any
) -> list[int]:
    calls[name] += 1
    return encode(text, **options)


# -- useless texts ---------------------------------------------------------------------------

_QUESTIONS = (
    "请用中文解释为什么天空是蓝色的。",
    "请写一个关于灯塔看守人的短故事。",
    "怎样才能学好一门外语?请给出五条建议。",
    "请用中文介绍一下长江。",
    "春天的早晨是什么样的?请写一段话。",
)


def _useless(words: Sequence[str]) -> dict[str, list[str]]:
    """Five prompts of each kind whose answers a draft model cannot know."""
    luck = random.Random(2)
    drawn = [" ".join(luck.choices(words, k=60)) for _ in range(5)]
    digits = [" ".join(str(luck.randrange(10**6)) for _ in range(30)) for _ in range(5)]
    return {
        "chinese": list(_QUESTIONS),
        "words": [f"Go on with 60 other words, in any order:\n{one}" for one in drawn],
        "digits": [f"Go on with 30 other random numbers:\n{one}" for one in digits],
    }


def useless() -> None:
    """The first answers over plain decoding, in turns, where a draft model knows nothing.

    A kind of text begins with an engine that has counted nothing. Times are those of writing: what
    the draft model reads of a prompt is part of them.
    """
    parser = argparse.ArgumentParser("translated.py useless")
    parser.add_argument("target", type=Path)
    parser.add_argument("--draft-model", type=Path)
    parser.add_argument("--words", type=Path, default=Path("docs/glossary.md"))
    parser.add_argument("--kinds", nargs="+", default=["chinese", "words", "digits"])
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    words = sorted(set(re.findall("[a-z]{4,}", options.words.read_text(encoding="utf-8"))))
    for kind in options.kinds:
        prompts = _useless(words)[kind]
        plain_s = drafted_s = 0.0
        same, by = 0, Counter[str]()
        loaded = edgespec.load(options.target, draft_model=options.draft_model, context_size=1024)
        with loaded as engine:
            for number, prompt in enumerate(prompts):
                turns = {}
                for drafts in (number % 2 == 0, number % 2 == 1):
                    turns[drafts] = engine.generate(
                        prompt, max_tokens=options.max_tokens, temperature=0.0, speculate=drafts
                    )
                plain_s += turns[False].counters.decode_s
                drafted_s += turns[True].counters.decode_s
                same += turns[True].token_ids == turns[False].token_ids
                by.update(turns[True].counters.drafted_by)
        print(f"{kind}: {plain_s / drafted_s:.3f}x of plain, same {same} of 5, drafted {dict(by)}")


# -- priors ----------------------------------------------------------------------------------


class _Counting(TranslatingDrafter):
    """It keeps what was right at each place of its chains."""

    def observe(self, result: VerifyResult) -> None:
        """Count."""
        for place, (token, written) in enumerate(
            zip(self._main_chain, result.emitted, strict=False)
        ):
            places[place, token == written] += 1
            if token != written:
                break
        super().observe(result)


places: Counter[tuple[int, bool]] = Counter()


def priors() -> None:
    """How often drafts of a pair are right, by place and by share, where each round has some.

    As `TRANSLATED_GAINS` and `TRANSLATED_HITS` in `edge/drafting/constants.py` have it.
    """
    parser = argparse.ArgumentParser("translated.py priors")
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--prompts", type=Path, default=Path("edge/measure/prompts.jsonl"))
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--drafts", type=int, default=4)
    options = parser.parse_args()
    spec, draft_spec = read_model_spec(options.target), read_model_spec(options.draft)
    with ExitStack() as opened:

        def backend(path: Path, **changes: Any) -> LlamaBackend:
            made = RunConfig(
                2048, 64, 16, 1, usable_cores(), kernels=not refusal_of_kernels(), **changes
            )
            return opened.enter_context(closing(LlamaBackend(str(path), made)))

        target = backend(options.target)
        draft = backend(options.draft, whole=any(draft_spec.is_sliding))
        templates = spec.chat_template, draft_spec.chat_template
        made = Translation(target.tokenizer, draft.tokenizer, *templates)
        free = _Free([inf, *[1e-4] * 16])
        drafter = _Counting(draft, free, made)
        curve = _Free([inf, *[1e6] * (options.drafts + 1)])
        engine = Engine(target, curve=curve, drafter=drafter, chat_template=spec.chat_template)
        for question in read_questions(options.prompts):
            engine.generate(question["turns"][0], max_tokens=options.max_tokens)
        gains, chance = [], 1.0
        for place in range(options.drafts):
            chance *= places[place, True] / max(1, places[place, True] + places[place, False])
            gains.append(round(chance, 3))
        print(f"{options.draft.name} for {options.target.name}: gains {gains}")
        cells = drafter.state()["cells"]
        for last in (0, 1):
            row = [cells.get(str(last * SHARES + share), [0, 0]) for share in range(SHARES)]
            print("last ones" if last else "others", [(round(a), round(b)) for a, b in row])


class _Free(CostCurve):
    """Steps that cost nothing more for more nodes, so that all are drafted."""

    def observe(self, *_measured: Any) -> None:
        """Learn nothing."""


if __name__ == "__main__":
    run(__doc__, cost=cost, useless=useless, priors=priors)
