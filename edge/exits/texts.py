"""The text that a drafter is trained on: written by its target, for a part of the time there is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgespec.backends.llama.tokenizer import open_tokenizer
from edgespec.backends.llama.writing import Places
from edgespec.errors import DoesNotFitError, UnsupportedError
from edgespec.exits.chat import chat_of, read_prompts
from edgespec.memory.device import host
from edgespec.models.exits.early_exit import target_hash
from edgespec.models.exits.network import import_torch
from edgespec.models.exits.text_writer import LONG_LENGTH, TextWriter, write_texts
from edgespec.models.exits.training_texts import alone_in, text_files, written
from edgespec.models.spec import ModelSpec
from edgespec.progress import Progress

if TYPE_CHECKING:
    from edgespec.models.exits.trainer import Quality
    from edgespec.models.exits.training_texts import TrainingText

QUICK_MINUTES, FULL_MINUTES = 12.0, 120.0
Note = Callable[[str], None]

_BF16 = _F16 = 2  # bytes
_PLACES, _LEAST_PLACES = 128, 4  # conversations written at once
_MOST_MEMORY = 0.8  # of what is free
_LEAST_S = 1.0  # of writing, where only prompts are missing


@dataclass(frozen=True, slots=True)
class Job:
    """A drafter being made: of which target, where its parts are kept, and how long it may take."""

    spec: ModelSpec
    folder: Path
    minutes: float
    progress: Progress
    note: Note

    def seconds_for(self, part: float) -> float:
        """Of the whole time, in seconds."""
        return self.minutes * 60 * part


def check_head_size(spec: ModelSpec, size: int | None) -> None:
    """Raise UnsupportedError for more tokens than there are, or none."""
    if size is not None and not 1 <= size <= spec.vocab_size:
        raise UnsupportedError(
            f"--head-size {size} is not possible", hint=f"use 1 to {spec.vocab_size}"
        )


@contextmanager
def begun(
    spec: ModelSpec, output: Path, minutes: float, progress: Progress, note: Note
) -> Iterator[Job]:
    """A drafter being made into `output`, in a folder beside it that nobody else may use."""
    import_torch().set_num_threads(host.usable_cores())
    folder = output.with_name(f"{output.name}.{target_hash(spec)[:8]}.training")
    folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder):
        yield Job(spec, folder, minutes, progress, note)


def write_training_texts(
    job: Job, part: float, data: Path | None, layers: Sequence[int] = ()
) -> None:
    """Write text until that took its part of the time, earlier runs included.

    The states after so many blocks as `layers` say are kept beside it.
    """
    spec, folder = job.spec, job.folder
    num_written, spent = written(folder)
    missing = job.seconds_for(part) - spent
    if missing <= 0 and data is None:
        return
    with open_tokenizer(spec.path) as tokenizer:
        chat = chat_of(spec, tokenizer)
        prompts = read_prompts(data, tokenizer) if data else []
    digest = blake2b(json.dumps(prompts).encode(), digest_size=4).hexdigest()
    answered = folder / f"answered-{digest}"
    if answered.exists():
        prompts = []
    if missing <= 0 and not prompts:
        return
    threads = host.usable_cores()
    with closing(
        Places(spec, places=places_of(spec), length=LONG_LENGTH, layers=layers, threads=threads)
    ) as target:
        writer = TextWriter(target, chat, seed=len(text_files(folder)), written=num_written)
        writer.answer_first(prompts)
        write_texts(
            writer,
            folder,
            seconds=max(missing, _LEAST_S),
            at_least=max(64, len(prompts)),
            progress=lambda part, tokens: job.progress(f"writing text, {tokens} tokens", part),
        )
    if prompts:
        answered.touch()


def places_of(spec: ModelSpec) -> int:
    """As many conversations at once as fit. Raises DoesNotFitError where too few do."""
    weights = spec.file_bytes
    free = int(_MOST_MEMORY * host.available_bytes()) - weights
    fitting = int(free / (_F16 * LONG_LENGTH * spec.kv_values_per_token))
    if fitting < _LEAST_PLACES:
        raise DoesNotFitError(
            f"writing text with {spec.path.name} takes its weights, {weights >> 20} MiB, and the "
            f"caches of {_LEAST_PLACES} conversations, which is more than is free",
            hint="train on a machine with more memory; the drafter's file runs on this one",
        )
    return min(_PLACES, fitting)


def fitting(
    spec: ModelSpec, texts: Sequence[TrainingText], num_layers: int = 1
) -> Sequence[TrainingText]:
    """As many texts as there is memory for: states after so many layers are kept in 16 bits.

    Raises DoesNotFitError where there is memory for none.
    """
    room = _MOST_MEMORY * host.available_bytes() / (_BF16 * spec.embedding_size * num_layers)
    ends = np.cumsum([len(text.tokens) for text in texts])
    count = int(np.searchsorted(ends, room))
    if count == 0:
        raise DoesNotFitError(
            f"there is no memory for what training reads of {spec.path.name}",
            hint="train on a machine with more memory; the drafter's file runs on this one",
        )
    return texts[:count]


def told(job: Job) -> Callable[[float, Quality | None], None]:
    """Shows how far a training has come, and how well what it trains does."""

    def report(part: float, quality: Quality | None) -> None:
        if quality is None:
            job.progress("training", part)
        else:
            job.note(f"{part:4.0%}  loss {quality.loss:.3f}, agreement {quality.agreement:.3f}")

    return report
