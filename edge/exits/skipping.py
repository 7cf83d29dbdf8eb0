"""Makes a drafter without training: the target with some of its blocks left out.

SWIFT (arXiv 2410.06916) drafts with the target's own layers, of which a set is skipped that was
found by trying sets on the target's own text. Here whole blocks are skipped, because that is what a
model file can express, and the set grows by one block at a time: of the blocks that change their
input least (by cosine) the one without which the target's next words are met most often. What is
left out where is decided by the speed that this device's step times predict.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llama.context import LlamaSettings
from edgespec.backends.llama.skipping import SkippingBackend
from edgespec.backends.tree import DraftTree
from edgespec.errors import UnsupportedError
from edgespec.measure.prompts import PROMPTS
from edgespec.measure.timing import measure_curve, one_step
from edgespec.memory.device import host
from edgespec.memory.times.speed import predicted_speedup
from edgespec.models.exits.trainer import LONGEST_RUN, agreement_of, gains_of
from edgespec.models.exits.writer import choose_tokens, import_gguf, write_pruned
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.progress import Progress
from edgespec.setup.draft_loading import draft_step_ms
from edgespec.setup.loading import load

MINUTES = 5.0
HEAD_SIZE = 16_384
_LONGEST_PROMPT = 400  # bytes: reading it takes time that words to compare with do not
_ANSWER = 64  # tokens of each
_TRIED = 6  # blocks, before one is left out
_CONTEXT = 1024
_CURVE_SECONDS = 5.0
_HOPELESS = 0.02  # agreement


@dataclass(frozen=True, slots=True)
class AnsweredPrompt:
    """A prompt and the target's greedy answer, in tokens."""

    prompt: Sequence[int]
    answer: Sequence[int]


@dataclass(frozen=True, slots=True)
class Skipping:
    """Some blocks left out, and what the rest is worth: see `edgespec.exits.training.Candidate`.

    `exit_layer` counts the blocks that are kept.
    """

    skipped: tuple[int, ...]
    exit_layer: int
    head_size: int
    agreement: float
    gains: tuple[float, ...]
    acceptance_length: float
    draft_step_ms: float
    predicted_speedup: float

    def kept_of(self, spec: ModelSpec) -> list[int]:
        """The blocks of a target that are kept."""
        return [block for block in range(spec.num_layers) if block not in self.skipped]


def build_skipping(
    spec: ModelSpec,
    output: Path,
    *,
    skip: Sequence[int] | None = None,
    head_size: int | None = None,
    minutes: float = MINUTES,
    progress: Progress = lambda _what, _part: None,
    note: Callable[[str], None] = lambda _text: None,
) -> dict[str, Any]:
    """Write a drafter for `spec` into `output`; returns the report that is kept in the file.

    Args:
        skip: the blocks to leave out, numbered from 0; None searches.
        head_size: tokens that can be drafted.
        minutes: how long the search may take; interrupted, it keeps the best so far.

    Raises:
        MissingDependencyError: the gguf package is not installed.
        UnsupportedError: blocks of this model, or these blocks, cannot be left out, or nothing was
            found in time.
    """
    import_gguf()  # what is missing is said before the search
    _check(spec, skip)
    seen, unseen, target_ms = _texts(spec, progress)
    counts = np.bincount(np.concatenate([t.answer for t in seen]), minlength=spec.vocab_size)
    ids = choose_tokens(spec, counts, min(head_size or HEAD_SIZE, spec.vocab_size))
    with closing(BlockTrial(spec, ids, target_ms)) as trial:
        if skip is None:
            tried = search(trial, seen, 60 * minutes, progress, note)
        else:
            tried = [trial.score(seen, skip)]
        if not tried:
            raise UnsupportedError(
                "no block could be left out in this time", hint="search longer with --minutes"
            )
        best = max(tried, key=lambda skipping: skipping.predicted_speedup)
        result = trial.score(unseen, best.skipped)
    result = _timed(spec, result, ids, target_ms, progress)
    report = {
        "text_tokens": sum(len(text.answer) for text in seen),
        "minutes": minutes,
        "skipped": list(result.skipped),
        "agreement": result.agreement,
        "gains": result.gains,
        "result": asdict(result),
        "compared": [asdict(skipping) for skipping in tried],
    }
    write_pruned(spec, output, blocks=result.kept_of(spec), token_ids=ids, report=report)
    return report


def _timed(
    spec: ModelSpec,
    result: Skipping,
    ids: NDArray[np.int32],
    target_ms: Sequence[float],
    progress: Progress,
) -> Skipping:
    """`result` with the measured time of a step instead of the one that its bytes have it take."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timed.gguf"
        write_pruned(spec, path, blocks=result.kept_of(spec), token_ids=ids, report={})
        draft_ms = draft_step_ms(read_model_spec(path), spec, progress)
    speed, length = predicted_speedup(result.gains, target_ms, draft_ms)
    return replace(
        result, draft_step_ms=draft_ms, predicted_speedup=speed, acceptance_length=length
    )


def search(
    trial: BlockTrial,
    texts: Sequence[AnsweredPrompt],
    seconds: float,
    progress: Progress = lambda _what, _part: None,
    note: Callable[[str], None] = lambda _text: None,
) -> list[Skipping]:
    """The best sets that were found, one block more each; Ctrl-C ends it early."""
    started = monotonic()
    found = [trial.score(texts, ())]
    try:
        while len(trial.candidates(found[-1].skipped)) > 0:
            best: Skipping | None = None
            for block in trial.candidates(found[-1].skipped)[:_TRIED]:
                part = (monotonic() - started) / seconds
                if part > 1.0:
                    return found[1:]
                progress(f"leaving out {len(found)} of {trial.num_blocks} blocks", part)
                tried = trial.score(texts, (*found[-1].skipped, block))
                if best is None or tried.agreement > best.agreement:
                    best = tried
            assert best is not None
            trial.settle(best.skipped)
            found.append(best)
            note(
                f"without {len(best.skipped)} blocks: agreement {best.agreement:.3f}, predicted "
                f"{best.predicted_speedup:.2f}x"
            )
            if best.agreement < _HOPELESS:
                break
    except KeyboardInterrupt:
        note("interrupted: the best so far is written")
    return found[1:]


class BlockTrial:
    """The target, loaded to try which blocks it can do without."""

    def __init__(self, spec: ModelSpec, ids: NDArray[np.int32], target_ms: Sequence[float]) -> None:
        settings = LlamaSettings(
            context_size=_CONTEXT,
            batch_size=_ANSWER,
            max_nodes=_ANSWER,
            max_leaves=1,
            threads=host.usable_cores(),
        )
        self._ids = ids
        self._target_ms = target_ms
        self._costs = _SkippedTimes(spec, len(ids), target_ms[1])
        self._similar: dict[tuple[int, ...], dict[int, float]] = {}
        self._arch = spec.arch
        self.num_blocks = spec.num_layers
        self._backend = SkippingBackend(spec.path, settings)  # at the end: nothing fails after it

    def score(self, texts: Sequence[AnsweredPrompt], skipped: Sequence[int]) -> Skipping:
        """What is left without these blocks, on answers of the target."""
        skipped = tuple(sorted(skipped))
        self._backend.skipped = frozenset(skipped)
        hits = [self._hits(text) for text in texts]
        self._similar[skipped] = self._backend.take_similarities()
        if len(self._similar[skipped]) + len(skipped) < self.num_blocks - 2:
            raise UnsupportedError(
                f"blocks of {self._arch} models cannot be left out: llama.cpp does not show what "
                "goes through them"
            )
        agreement, gains = agreement_of(hits), gains_of(hits)
        ms = self._costs.step_ms(skipped)
        speed, length = predicted_speedup(gains, self._target_ms, ms)
        kept = self.num_blocks - len(skipped)
        return Skipping(skipped, kept, len(self._ids), agreement, gains, length, ms, speed)

    def candidates(self, skipped: Sequence[int]) -> list[int]:
        """Blocks that may be left out besides, those that change their input least first.

        Never the first, which makes states of words, nor the last, which makes words of states.
        """
        similar = self._similar[tuple(skipped)]
        kept = [n for n in range(1, self.num_blocks - 1) if n not in skipped]
        return sorted(kept, key=lambda block: -similar.get(block, -inf))

    def settle(self, skipped: Sequence[int]) -> None:
        """Forget what other sets than this one changed."""
        self._similar = {tuple(skipped): self._similar[tuple(skipped)]}

    def close(self) -> None:
        """Free the model."""
        self._backend.close()

    def _hits(self, text: AnsweredPrompt) -> NDArray[np.bool_]:
        """Which tokens of the answer would be drafted right behind those before them."""
        backend, prompt, answer = self._backend, text.prompt, text.answer
        backend.truncate(0)
        for start in range(0, len(prompt) - 1, backend.batch_size):
            backend.prefill(prompt[start : min(start + backend.batch_size, len(prompt) - 1)])
        rows = backend.verify(DraftTree.chain([prompt[-1], *answer[:-1]]))
        backend.commit(range(len(answer)))
        best = self._ids[rows[:, self._ids].argmax(1)]
        hits: NDArray[np.bool_] = best == np.array(answer)
        return hits


class _SkippedTimes:
    """Step times of a model without some blocks, as the bytes it still reads have it."""

    def __init__(self, spec: ModelSpec, head_size: int, plain_ms: float) -> None:
        self._blocks = [0] * spec.num_layers
        head = spec.tensors[spec.head_name]
        for name, tensor in spec.tensors.items():
            parts = name.split(".")
            if parts[0] == "blk":
                self._blocks[int(parts[1])] += tensor.data_bytes
        whole = sum(self._blocks) + head.data_bytes
        self._head_bytes = head.data_bytes * head_size / spec.vocab_size
        self._ms_per_byte = plain_ms / whole

    def step_ms(self, skipped: Sequence[int]) -> float:
        """Of one step, in ms."""
        kept = sum(size for block, size in enumerate(self._blocks) if block not in skipped)
        return (kept + self._head_bytes) * self._ms_per_byte


def _check(spec: ModelSpec, skip: Sequence[int] | None) -> None:
    if spec.keeps_state or any(spec.is_sliding):
        raise UnsupportedError(
            f"{spec.path.name} cannot draft for itself: its cache cannot go back to an earlier "
            "token"
        )
    possible = range(1, spec.num_layers - 1)
    wrong = [block for block in skip or () if block not in possible]
    if wrong or (skip is not None and not skip):
        raise UnsupportedError(
            f"--skip {','.join(map(str, wrong)) or 'without a block'} is not possible",
            hint=f"use blocks from 1 to {spec.num_layers - 2}, such as --skip 4,7-9, or auto",
        )


def _texts(
    spec: ModelSpec, progress: Progress
) -> tuple[list[AnsweredPrompt], list[AnsweredPrompt], list[float]]:
    """Answers to search with, answers to judge the result by, and the target's step times."""
    texts: tuple[list[AnsweredPrompt], list[AnsweredPrompt]] = ([], [])
    with load(
        spec.path,
        backend="llamacpp",
        drafter="suffix",
        draft_max=LONGEST_RUN,
        context_size=_CONTEXT,
        progress=progress,
    ) as engine:
        for number, prompt in enumerate(PROMPTS):
            progress("answering prompts", number / len(PROMPTS))
            if len(prompt.text) > _LONGEST_PROMPT:
                continue
            ids = engine.encode(prompt.text)
            answer = engine.generate(ids, max_tokens=_ANSWER).token_ids
            if len(answer) > 1:
                texts[2 * number >= len(PROMPTS)].append(AnsweredPrompt(ids, answer))
        backend = engine.backend
        curve = measure_curve(
            lambda nodes: one_step(backend, nodes), LONGEST_RUN + 1, seconds=_CURVE_SECONDS
        )
        return *texts, curve.base
