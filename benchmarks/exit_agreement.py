"""How often a drafter's best token is the target's, along the target's own greedy answers.

    python benchmarks/exit_agreement.py TARGET DRAFT --prompts FILE --every 5 --offset 2

DRAFT is an early exit or a head. The target answers every so many-th prompt (first turn, chat
format); the drafter then reads the answers. Agreement is the part of places where both best tokens
are the same; tokens a round are those of decoding with so many drafts in every round, walked along
the answers. A head is computed in torch, from states of the target in bfloat16.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import edgespec
from edgespec.backends.llama.context import LlamaSettings
from edgespec.bench.switch_calibration import forced_rows
from edgespec.exits.eagle import Unrolled, head_shape
from edgespec.exits.files import (
    HeadInfo,
    check_made_for,
    read_head,
    values_of,
)
from edgespec.exits.network import (
    Tensor,
    Weights,
    hyperparameters_of,
    import_torch,
    rms_norm,
    target_states,
)
from edgespec.exits.trainer import LONGEST_RUN, agreement_of, gains_of
from edgespec.memory.device.host import usable_cores
from edgespec.models.early_exit import CONTEXT, WINDOW, read_exit
from edgespec.models.pairing import check_pair
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.setup.draft_loading import open_draft_model

_CONTEXT, _NODES = 4096, 32
_STRETCH = CONTEXT - WINDOW  # tokens after which an exit begins anew

Hits = NDArray[np.bool_]
Answer = tuple[list[int], list[int]]  # tokens of a prompt, and of what follows


class _Exit:
    """An early exit, or any other model that drafts."""

    def __init__(self, spec: ModelSpec, path: Path, window: int | None) -> None:
        draft_spec = read_model_spec(path)
        check_pair(spec, draft_spec)
        info = read_exit(draft_spec)
        assert info is not None, "not an early exit"
        self._ids, self._window = info.token_ids, window or WINDOW
        settings = LlamaSettings(_CONTEXT, 128, _NODES, 1, usable_cores())
        self._draft = open_draft_model(draft_spec, spec, settings)
        self.close = self._draft.close

    def hits(self, answers: Sequence[Answer]) -> list[Hits]:
        """Whether its best token is that of each answer, [n]."""
        found: list[Hits] = []
        for prompt, text in answers:
            best = [
                self._ids[row.argmax()]
                for start in range(0, len(text), _STRETCH)
                for row in forced_rows(
                    self._draft,
                    [*prompt, *text[:start]][-self._window :],
                    text[start : start + _STRETCH],
                )
            ]
            found.append(np.array(best) == np.array(text))
        return found


class _Head:
    """A head of `edgespec draft train --kind eagle3`."""

    def __init__(self, spec: ModelSpec, info: HeadInfo) -> None:
        check_made_for(spec, info)
        torch = import_torch()
        torch.set_num_threads(usable_cores())
        self._spec, self._info = spec, info
        self._shape = head_shape(hyperparameters_of(spec))
        self._embedding = Weights(spec, torch.float32).embedding()
        self._values = values_of(info)

    def hits(self, answers: Sequence[Answer]) -> list[Hits]:
        """Whether the 1st, 2nd, ... token that it drafts is that of each answer, [drafts, n].

        The target's blocks are made numbers of once, for all answers.
        """
        torch, layers = import_torch(), self._info.layers
        tokens = [np.array([*prompt, *text], np.int32) for prompt, text in answers]
        states = target_states(self._spec, tokens, layers)
        return [
            self._hits(answer, torch.cat([states[layer][number] for layer in layers], 1))
            for number, answer in enumerate(answers)
        ]

    def _hits(self, answer: Answer, rows: Tensor) -> Hits:
        torch, values, (prompt, text) = import_torch(), self._values, answer
        tokens = torch.tensor([*prompt, *text])
        embeddings = self._embedding[tokens[1:-1]][None]
        found = []
        with torch.inference_mode():
            drafted = Unrolled(self._shape, values, embeddings, rows[None, :-2].float())
            for state in drafted.states(LONGEST_RUN):
                asked = state[0, len(prompt) - 2 :]
                normed = rms_norm(asked, values["output_norm.weight"], self._shape.epsilon)
                best = (normed @ values["output.weight"].T).argmax(1).numpy()
                found.append(self._info.token_ids[best] == np.array(text))
        return np.stack(found)

    def close(self) -> None:
        """Nothing is held."""


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
    spec, path = read_model_spec(arguments.target), Path(arguments.draft)
    head, answers, categories = read_head(path), list[Answer](), list[str]()
    with edgespec.load(spec.path, drafter="none", context_size=_CONTEXT) as engine:
        for line in lines:
            question = json.loads(line)
            prompt = engine.encode(question["turns"][0])
            text = engine.generate(prompt, max_tokens=arguments.max_tokens).token_ids
            answers.append((list(prompt), list(text)))
            categories.append(question["category"])
    made = _Exit(spec, path, arguments.window) if head is None else _Head(spec, head)
    with closing(made) as draft:
        found = draft.hits(answers)
    hits: dict[str, list[Hits]] = defaultdict(list)
    for category, row in zip(categories, found, strict=True):
        hits[category].append(row)
    everything = [row for rows in hits.values() for row in rows]
    lengths = 1.0 + np.cumsum(gains_of(everything))
    print(f"{len(everything)} answers, agreement {agreement_of(everything):.3f}")
    print("tokens a round:", ", ".join(f"{n}: {lengths[n - 1]:.2f}" for n in (1, 2, 4, 8)))
    for name, rows in hits.items():
        print(f"{name:<16} {agreement_of(rows):.2f}")


if __name__ == "__main__":
    main()
