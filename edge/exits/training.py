"""Makes an early-exit drafter: the target writes text, exits are compared by speed, one is trained.

Everything is kept in a folder beside the result: started again, the same command goes on where it
was stopped, and a longer one adds to it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import UnsupportedError
from edgespec.exits.texts import (
    FULL_MINUTES,
    Job,
    Note,
    begun,
    check_head_size,
    fitting,
    told,
    write_training_texts,
)
from edgespec.memory.times.curve import CostCurve
from edgespec.memory.times.speed import predicted_speedup
from edgespec.models.exits.early_exit import ExitInfo, check_exit, read_exit
from edgespec.models.exits.network import Tensor, Weights, check_architecture, import_torch
from edgespec.models.exits.training_texts import load_training_texts
from edgespec.models.exits.writer import choose_tokens, write_exit
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.progress import Progress
from edgespec.setup.draft_loading import draft_step_ms
from edgespec.setup.loading import load

if TYPE_CHECKING:
    from edgespec.models.exits.trainer import ExitTrainer, Quality
    from edgespec.models.exits.training_texts import TrainingText

# Of the time: writing text, comparing exits, training one.
_WRITING, _SEARCHING, _TRAINING = 0.5, 0.15, 0.35
_LAYER_PARTS = (1 / 15, 1 / 10, 1 / 5)  # of the target's blocks
_HEAD_SIZES = (2048, 4096, 8192, 16384)
_SEARCH_TEXTS = 800
_CONTEXT = 1024  # of the models whose steps are timed


@dataclass(frozen=True, slots=True)
class Candidate:
    """An exit after so many blocks with so many rows of the head, and what it is worth here."""

    exit_layer: int
    head_size: int
    agreement: float
    acceptance_length: float  # tokens per round at the draft length that is predicted best
    draft_step_ms: float
    predicted_speedup: float  # over plain decoding, on this device


def train_draft(
    spec: ModelSpec,
    output: Path,
    *,
    minutes: float = FULL_MINUTES,
    exit_layer: int | None = None,
    head_size: int | None = None,
    data: Path | None = None,
    begin: Path | None = None,
    progress: Progress = lambda _what, _part: None,
    note: Note = lambda _text: None,
) -> dict[str, Any]:
    """Train a drafter for `spec` into `output`; returns the report that is kept in the file.

    Args:
        minutes: how long it takes in all, from text to file, with the cores for itself: only time
            in which it computes counts.
        exit_layer: blocks of the target; None compares some.
        head_size: tokens that can be drafted; None compares some.
        data: prompts to be answered besides what the target thinks of.
        begin: an earlier drafter of this target, which is trained further: its exit and head.

    Raises:
        MissingDependencyError: torch or gguf is not installed.
        UnsupportedError: the architecture is unknown to the trainer, or an option is impossible.
    """
    check_architecture(spec)
    earlier = _earlier(spec, begin)
    if earlier is not None:
        exit_layer, head_size = _same(exit_layer, head_size, *earlier)
    layers, sizes = _choices(spec, exit_layer, head_size)
    with begun(spec, output, minutes, progress, note) as job:
        return _trained(job, output, layers, sizes, data, earlier)


def _trained(
    job: Job,
    output: Path,
    layers: Sequence[int],
    sizes: Sequence[int],
    data: Path | None,
    earlier: tuple[ModelSpec, ExitInfo] | None,
) -> dict[str, Any]:
    """Write text, compare exits, train the best one and write it."""
    spec, folder, progress, note = job.spec, job.folder, job.progress, job.note
    costs = _ExitTimes(spec, layers, sizes, progress)
    write_training_texts(job, _WRITING, data)
    texts = load_training_texts(folder)
    counts = np.bincount(np.concatenate([t.tokens for t in texts]), minlength=spec.vocab_size)
    rows = {size: choose_tokens(spec, counts, size) for size in sizes}
    candidates = _candidates(job, texts, layers, rows, costs)
    best = max(candidates, key=lambda candidate: candidate.predicted_speedup)
    note(f"exit after block {best.exit_layer} with {best.head_size} tokens is predicted best")
    trainer, quality = _train(job, texts, best, rows[best.head_size], earlier)
    report = {
        "text_tokens": sum(len(text.tokens) for text in texts),
        "minutes": job.minutes,
        **_result(costs.candidate(best.exit_layer, best.head_size, quality), quality, candidates),
    }
    write_exit(
        spec,
        output,
        exit_layer=best.exit_layer,
        token_ids=rows[best.head_size],
        head=trainer.head(),
        adapter=trainer.block(),
        norm=trainer.norm(),
        report=report,
    )
    return report


def _result(
    trained: Candidate, quality: Quality, candidates: Sequence[Candidate]
) -> dict[str, Any]:
    return {
        "loss": quality.loss,
        "agreement": quality.agreement,
        "gains": quality.gains,
        "result": asdict(trained),
        "compared": [asdict(candidate) for candidate in candidates if len(candidates) > 1],
    }


def _earlier(spec: ModelSpec, path: Path | None) -> tuple[ModelSpec, ExitInfo] | None:
    """The drafter to begin with. Raises UnsupportedError for one that was not trained for this."""
    if path is None:
        return None
    drafter = read_model_spec(path)
    info = read_exit(drafter)
    if info is None:
        raise UnsupportedError(
            f"{path.name} is not a trained early exit", hint="name a file of `edgespec draft train`"
        )
    check_exit(spec, drafter, info)
    return drafter, info


def _same(
    exit_layer: int | None, head_size: int | None, drafter: ModelSpec, info: ExitInfo
) -> tuple[int, int]:
    """The exit of an earlier drafter, and the size of its head unless another one is asked for."""
    if exit_layer not in (None, info.exit_layer):
        raise UnsupportedError(
            f"--exit-layer {exit_layer} cannot begin with an exit after block {info.exit_layer}",
            hint="leave out --exit-layer, or --from",
        )
    return info.exit_layer, head_size or drafter.vocab_size


def _choices(
    spec: ModelSpec, exit_layer: int | None, head_size: int | None
) -> tuple[list[int], list[int]]:
    """Exits and head sizes to compare. Raises UnsupportedError for impossible ones."""
    most = spec.num_layers - 1
    if exit_layer is not None and not 1 <= exit_layer <= most:
        raise UnsupportedError(
            f"--exit-layer {exit_layer} is not possible", hint=f"use 1 to {most}"
        )
    check_head_size(spec, head_size)
    layers = {min(most, max(1, round(part * spec.num_layers))) for part in _LAYER_PARTS}
    sizes = {min(size, spec.vocab_size) for size in _HEAD_SIZES}
    return (
        sorted(layers) if exit_layer is None else [exit_layer],
        sorted(sizes) if head_size is None else [head_size],
    )


def _joined(numbers: Sequence[int]) -> str:
    return "-".join(map(str, numbers))


def _candidates(
    job: Job,
    texts: Sequence[TrainingText],
    layers: Sequence[int],
    rows: Mapping[int, NDArray[np.int32]],
    costs: _ExitTimes,
) -> list[Candidate]:
    """What each exit is worth: compared by an earlier run in this folder, or now."""
    name = f"compared-{_joined(layers)}-{_joined(list(rows))}"
    candidates = _read_candidates(job.folder, name, job.minutes)
    if not candidates:
        candidates = _compare(job, texts, layers, rows, costs)
        kept = job.folder / f"{name}-{job.minutes:g}.json"
        kept.write_text(json.dumps([asdict(candidate) for candidate in candidates]))
    return candidates


def _read_candidates(folder: Path, name: str, minutes: float) -> list[Candidate]:
    """What an earlier run compared in as many minutes or more; nothing where there was none."""
    for path in folder.glob(f"{name}-*.json"):
        try:
            if float(path.stem.removeprefix(f"{name}-")) >= minutes:
                return [Candidate(**candidate) for candidate in json.loads(path.read_text())]
        except (OSError, ValueError, TypeError):
            continue
    return []


class _ExitTimes:
    """Times of the target's steps and of untrained exits on this device."""

    def __init__(
        self, spec: ModelSpec, layers: Sequence[int], sizes: Sequence[int], progress: Progress
    ) -> None:
        with load(spec.path, drafter="suffix", context_size=_CONTEXT, progress=progress) as engine:
            assert engine.curve is not None
            self._target: CostCurve = engine.curve
        first, last = layers[0], layers[-1]
        small, large = sizes[0], sizes[-1]
        self._origin = first, small
        self._ms = _exit_step_ms(spec, first, small, progress)
        deep = _exit_step_ms(spec, last, small, progress) if last > first else self._ms
        wide = _exit_step_ms(spec, first, large, progress) if large > small else self._ms
        self._block_ms = max(0.0, deep - self._ms) / max(1, last - first)
        self._row_ms = max(0.0, wide - self._ms) / max(1, large - small)

    def candidate(self, layer: int, size: int, quality: Quality | None) -> Candidate:
        """What an exit is worth that does so well; None is not known yet."""
        gains = quality.gains if quality else [0.0]
        ms = self._ms + self._block_ms * (layer - self._origin[0])
        ms += self._row_ms * (size - self._origin[1])
        best, length = predicted_speedup(gains, self._target.base, ms)
        return Candidate(layer, size, quality.agreement if quality else 0.0, length, ms, best)


def _exit_step_ms(spec: ModelSpec, layer: int, size: int, progress: Progress) -> float:
    """Milliseconds of one step of an exit; its adapter is the target's next block, untrained."""
    weights = Weights(spec, import_torch().float32)
    ids = choose_tokens(spec, np.zeros(spec.vocab_size, np.int64), size)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "untrained.gguf"
        write_exit(
            spec,
            path,
            exit_layer=layer,
            token_ids=ids,
            head=weights.head()[ids.astype(np.int64)].numpy(),
            adapter={name: value.numpy() for name, value in weights.block(layer).items()},
            norm=weights.tensor("output_norm.weight").numpy(),
            report={},
        )
        return draft_step_ms(read_model_spec(path), spec, progress)


def _compare(
    job: Job,
    texts: Sequence[TrainingText],
    layers: Sequence[int],
    rows: Mapping[int, NDArray[np.int32]],
    costs: _ExitTimes,
) -> list[Candidate]:
    """Each exit after a short training, with each size of the head; nothing where one is asked.

    The head's rows are frozen, so that one training serves all sizes.
    """
    from edgespec.models.exits.trainer import ExitTrainer

    if len(layers) == len(rows) == 1:
        return [costs.candidate(layers[0], next(iter(rows)), None)]
    some = fitting(job.spec, texts[:_SEARCH_TEXTS], len(layers))
    states = _states(job, some, layers)
    middle = sorted(rows)[len(rows) // 2]
    candidates = []
    for layer in layers:
        trainer = ExitTrainer(job.spec, layer, rows[middle], some, states.pop(layer))
        what = f"trying an exit after block {layer}"

        def report(part: float, _quality: Quality | None, what: str = what) -> None:
            job.progress(what, part)

        trainer.train(job.seconds_for(_SEARCHING) / len(layers), progress=report)
        candidates += [
            costs.candidate(layer, size, trainer.quality(ids)) for size, ids in rows.items()
        ]
    return candidates


def _states(
    job: Job, texts: Sequence[TrainingText], layers: Sequence[int]
) -> dict[int, list[Tensor]]:
    """What exits after so many blocks are fed, by number of blocks."""
    from edgespec.models.exits.target_states import target_states

    progress = partial(job.progress, "reading the text")
    return target_states(job.spec, [text.tokens for text in texts], layers, progress)


def _train(
    job: Job,
    texts: Sequence[TrainingText],
    best: Candidate,
    ids: NDArray[np.int32],
    earlier: tuple[ModelSpec, ExitInfo] | None,
) -> tuple[ExitTrainer, Quality]:
    """Train the best exit, or train it further from an earlier one."""
    from edgespec.models.exits.trainer import ExitTrainer

    layer, some = best.exit_layer, fitting(job.spec, texts)
    if len(some) < len(texts):
        job.note(f"memory for {len(some)} of {len(texts)} texts: the others are not trained on")
    states = _states(job, some, [layer])
    trainer = ExitTrainer(job.spec, layer, ids, some, states.pop(layer))
    if earlier is not None:
        trainer.go_on_from_file(*earlier)
    before = f"-from-{earlier[0].fingerprint[:8]}" if earlier else ""
    checkpoint = job.folder / f"exit-{layer}-{best.head_size}{before}.pt"
    seconds = job.seconds_for(_TRAINING)
    return trainer, trainer.train(seconds, checkpoint=checkpoint, progress=told(job))
