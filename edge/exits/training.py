"""Makes a drafter: the target writes text, and an early exit or a head learns from its states.

Everything is kept in a folder beside the result: started again, the same command goes on where it
was stopped, and a longer one adds to it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgespec.errors import UnsupportedError
from edgespec.exits.files import check_made_for, choose_tokens, read_head
from edgespec.exits.target import check_target, import_torch, layers_read
from edgespec.exits.texts import alone_in, load_training_texts, write_training_texts
from edgespec.memory.device import host
from edgespec.models.early_exit import check_exit, file_hash, read_exit
from edgespec.models.heads import READABLE
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.progress import Progress

if TYPE_CHECKING:
    from edgespec.exits.trainer import Quality

EXIT, HEAD = KINDS = ("exit", "eagle3")
QUICK_MINUTES, FULL_MINUTES = 12.0, 120.0
_WRITING = _TRAINING = 0.5  # of the time
# Which block an exit begins behind hardly matters, nor how many tokens it may draft.
_EXIT_PART = 1 / 6  # of the target's blocks
_HEAD_SIZES = {EXIT: 4096, HEAD: 8192}  # tokens that can be drafted, unless others are asked for


def best_kind(spec: ModelSpec, begin: Path | None = None) -> str:
    """A head where the model's states can be read: it is right more often than an exit, for less.

    To go on with an earlier drafter, its kind. Raises UnsupportedError where neither can be
    trained, and ModelNotFoundError.
    """
    if begin is not None:
        return EXIT if read_head(begin) is None else HEAD
    check_target(spec, of_head=False)
    return HEAD if spec.arch in READABLE else EXIT


def output_of(spec: ModelSpec, kind: str) -> Path:
    """Where a drafter goes: a head beside its model, where plans look for it."""
    return spec.path.with_name(f"{HEAD}-{spec.path.name}") if kind == HEAD else Path("drafter.gguf")


def train_drafter(
    spec: ModelSpec,
    output: Path,
    kind: str,
    *,
    minutes: float = FULL_MINUTES,
    exit_layer: int | None = None,
    head_size: int | None = None,
    data: Path | None = None,
    begin: Path | None = None,
    progress: Progress = lambda _what, _part: None,
    note: Callable[[str], None] = lambda _text: None,
) -> dict[str, Any]:
    """Train a drafter for `spec` into `output`; returns the report that is kept in the file.

    Args:
        kind: of KINDS.
        minutes: how long it takes in all, from text to file, with the cores for itself: only time
            in which it computes counts.
        exit_layer: how many of the target's blocks an exit begins with.
        head_size: tokens that can be drafted.
        data: prompts to be answered besides what the target thinks of.
        begin: an earlier drafter of this target, which is trained further: its exit and head.

    Raises:
        MissingDependencyError: torch or gguf is not installed.
        UnsupportedError: the architecture is unknown to the trainer, or an option is impossible.
        DoesNotFitError: there is no memory to write text in.
    """
    check_target(spec, of_head=kind == HEAD)
    for option, number, most in (
        ("--exit-layer", exit_layer, spec.num_layers - 1),
        ("--head-size", head_size, spec.vocab_size),
    ):
        if number is not None and not 1 <= number <= most:
            raise UnsupportedError(f"{option} {number} is not possible", hint=f"use 1 to {most}")
    layers: tuple[int, ...] = layers_read(spec.num_layers)
    if kind == EXIT:
        layers = (exit_layer or max(1, int(_EXIT_PART * spec.num_layers)),)
    size = head_size or min(_HEAD_SIZES[kind], spec.vocab_size)
    before = ""
    if begin is not None:
        layers, earlier_size = _earlier(spec, kind, begin, exit_layer)
        size, before = head_size or earlier_size, f"-from-{file_hash(begin)[:8]}"
    import_torch().set_num_threads(host.usable_cores())
    from edgespec.exits.trainer import ExitTrainer, HeadTrainer, stored_states

    folder = output.with_name(f"{output.name}.{file_hash(spec.path)[:8]}.training")
    folder.mkdir(parents=True, exist_ok=True)

    def report(part: float, quality: Quality | None) -> None:
        if quality is None:
            progress("training", part)
        else:
            note(f"{part:4.0%}  loss {quality.loss:.3f}, agreement {quality.agreement:.3f}")

    with alone_in(folder):
        handed_out = layers if spec.arch in READABLE else ()
        seconds = _WRITING * 60 * minutes
        write_training_texts(spec, folder, seconds, data=data, layers=handed_out, progress=progress)
        texts = load_training_texts(folder)
        states = stored_states(spec, folder, layers, partial(progress, "reading the text"))
        tokens = np.concatenate([text.tokens for text in texts])
        ids = choose_tokens(spec, np.bincount(tokens, minlength=spec.vocab_size), size)
        trainer_class = HeadTrainer if kind == HEAD else ExitTrainer
        trainer = trainer_class(spec, layers, ids, texts, states)
        if begin is not None:
            trainer.go_on_from_file(begin)
        layer = f"-{layers[0]}" * (kind == EXIT)
        checkpoint = folder / f"{kind}{layer}-{size}{before}.pt"
        quality = trainer.train(_TRAINING * 60 * minutes, checkpoint, report)
    made = {
        "text_tokens": len(tokens),
        "minutes": minutes,
        "head_size": len(ids),
        "loss": quality.loss,
        "agreement": quality.agreement,
        "gains": quality.gains,
    }
    trainer.write(output, made)
    return made


def _earlier(
    spec: ModelSpec, kind: str, path: Path, exit_layer: int | None
) -> tuple[tuple[int, ...], int]:
    """What an earlier drafter reads, and how many tokens it drafts.

    Raises UnsupportedError for one that was not trained for this target, or behind another block.
    """
    if kind == HEAD:
        head = read_head(path)
        if head is None:
            raise UnsupportedError(
                f"{path.name} is not a trained head",
                hint="name a file of `edgespec draft train --kind eagle3`",
            )
        check_made_for(spec, head)
        return head.layers, len(head.token_ids)
    drafter = read_model_spec(path)
    info = read_exit(drafter)
    if info is None:
        raise UnsupportedError(
            f"{path.name} is not a trained early exit", hint="name a file of `edgespec draft train`"
        )
    check_exit(spec, drafter, info)
    if exit_layer not in (None, info.exit_layer):
        raise UnsupportedError(
            f"--exit-layer {exit_layer} cannot begin with an exit after block {info.exit_layer}",
            hint="leave out --exit-layer, or --from",
        )
    return (info.exit_layer,), drafter.vocab_size
