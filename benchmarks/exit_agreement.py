"""How often a drafter's best token is the target's, along the target's own greedy answers.

    python benchmarks/exit_agreement.py TARGET DRAFT --prompts FILE --every 5 --offset 2

The target answers every so many-th prompt (first turn, chat format); the drafter then reads the
answers. Agreement is the part of places where both best tokens are the same; tokens a round are
those of decoding with so many drafts in every round, walked along the answers.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import numpy as np

import edgespec
from edgespec.backends.llama.context import LlamaSettings
from edgespec.bench.switch_calibration import forced_rows
from edgespec.memory.device.host import usable_cores
from edgespec.models.exits.early_exit import CONTEXT, WINDOW, read_exit
from edgespec.models.exits.training import agreement_of, gains_of
from edgespec.models.pairing import check_pair
from edgespec.models.spec import read_model_spec
from edgespec.setup.draft_loading import open_draft_model

_CONTEXT, _NODES = 4096, 32
_STRETCH = CONTEXT - WINDOW  # tokens after which an exit begins anew


def main() -> None:
    """Print both numbers, over all places and by category."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--every", type=int, default=1, metavar="K")
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--window", type=int, help="tokens before the text; default: the exit's")
    arguments = parser.parse_args()
    lines = arguments.prompts.read_text().splitlines()[arguments.offset :: arguments.every]
    spec, draft_spec = read_model_spec(arguments.target), read_model_spec(arguments.draft)
    check_pair(spec, draft_spec)
    info = read_exit(draft_spec)
    assert info is not None, "not an early exit"
    window = arguments.window or info.window or _CONTEXT
    settings = LlamaSettings(_CONTEXT, 128, _NODES, 1, usable_cores())
    draft = open_draft_model(draft_spec, spec, settings)
    hits: dict[str, list[np.ndarray]] = defaultdict(list)
    with edgespec.load(spec.path, drafter="none", context_size=_CONTEXT) as engine:
        for line in lines:
            question = json.loads(line)
            prompt = engine.encode(question["turns"][0])
            text = engine.generate(prompt, max_tokens=arguments.max_tokens).token_ids
            best = [
                info.token_ids[row.argmax()]
                for start in range(0, len(text), _STRETCH)
                for row in forced_rows(
                    draft,
                    [*prompt, *text[:start]][-window:],
                    text[start : start + _STRETCH],
                )
            ]
            hits[question["category"]].append(np.array(best) == np.array(text))
    draft.close()
    everything = [row for rows in hits.values() for row in rows]
    lengths = 1.0 + np.cumsum(gains_of(everything))
    print(f"{len(everything)} answers, agreement {agreement_of(everything):.3f}")
    print("tokens a round:", ", ".join(f"{n}: {lengths[n - 1]:.2f}" for n in (1, 2, 4, 8)))
    for name, rows in hits.items():
        print(f"{name:<16} {agreement_of(rows):.2f}")


if __name__ == "__main__":
    main()
