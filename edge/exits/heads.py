"""Makes a draft head (EAGLE-3): the target writes text, and a head learns from its states there.

Kept and gone on with as early exits are (`edgespec.exits.training`).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgespec.errors import UnsupportedError
from edgespec.exits.texts import (
    FULL_MINUTES,
    Job,
    Note,
    begun,
    check_head_size,
    told,
    write_training_texts,
)
from edgespec.models.exits.eagle import (
    HeadInfo,
    check_made_for,
    check_target,
    layers_read,
    read_head,
    write_head,
)
from edgespec.models.exits.early_exit import file_hash
from edgespec.models.exits.training_texts import load_training_texts
from edgespec.models.exits.writer import choose_tokens
from edgespec.models.spec import ModelSpec
from edgespec.progress import Progress

if TYPE_CHECKING:
    from edgespec.models.exits.trainer import Quality

_HEAD_SIZE = 8192  # tokens that can be drafted, unless others are asked for
_WRITING, _TRAINING = 0.5, 0.5  # of the time


def train_head(
    spec: ModelSpec,
    output: Path,
    *,
    minutes: float = FULL_MINUTES,
    head_size: int | None = None,
    data: Path | None = None,
    begin: Path | None = None,
    progress: Progress = lambda _what, _part: None,
    note: Note = lambda _text: None,
) -> dict[str, Any]:
    """Train a head for `spec` into `output`; returns the report that is kept in the file.

    Arguments and errors as those of `edgespec.exits.training.train_draft`.
    """
    check_target(spec)
    check_head_size(spec, head_size)
    earlier = _earlier(spec, begin)
    with begun(spec, output, minutes, progress, note) as job:
        return _trained(job, output, head_size, data, earlier)


def _earlier(spec: ModelSpec, path: Path | None) -> HeadInfo | None:
    """The head to begin with. Raises UnsupportedError for one that was not trained for this."""
    if path is None:
        return None
    info = read_head(path)
    if info is None:
        raise UnsupportedError(
            f"{path.name} is not a trained head",
            hint="name a file of `edgespec draft train --kind eagle3`",
        )
    check_made_for(spec, info)
    return info


def _trained(
    job: Job, output: Path, head_size: int | None, data: Path | None, earlier: HeadInfo | None
) -> dict[str, Any]:
    """Write text, train a head and write it."""
    from edgespec.models.exits.target_states import StoredStates
    from edgespec.models.exits.trainer import EagleTrainer

    spec = job.spec
    layers = earlier.layers if earlier else layers_read(spec.num_layers)
    write_training_texts(job, _WRITING, data, layers)
    texts = load_training_texts(job.folder)
    states = StoredStates(spec, job.folder, layers, partial(job.progress, "reading the text"))
    counts = np.bincount(np.concatenate([t.tokens for t in texts]), minlength=spec.vocab_size)
    size = head_size or (len(earlier.token_ids) if earlier else min(_HEAD_SIZE, spec.vocab_size))
    ids = choose_tokens(spec, counts, size)
    trainer = EagleTrainer(spec, ids, texts, states)
    before = ""
    if earlier is not None:
        trainer.go_on_from_file(earlier)
        before = f"-from-{file_hash(earlier.file.path)[:8]}"
    checkpoint = job.folder / f"eagle3-{size}{before}.pt"
    quality = trainer.train(job.seconds_for(_TRAINING), checkpoint=checkpoint, progress=told(job))
    report = _report(job, sum(len(text.tokens) for text in texts), len(ids), quality)
    write_head(
        spec,
        output,
        shape=trainer.shape,
        layers=layers,
        token_ids=ids,
        head=trainer.head(),
        block=trainer.block(),
        norm=trainer.norm(),
        report=report,
    )
    return report


def _report(job: Job, text_tokens: int, head_size: int, quality: Quality) -> dict[str, Any]:
    return {
        "text_tokens": text_tokens,
        "minutes": job.minutes,
        "head_size": head_size,
        "loss": quality.loss,
        "agreement": quality.agreement,
        "gains": quality.gains,
    }
