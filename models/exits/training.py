"""Trains the adapter block of an early exit on the target's own text.

Kangaroo's recipe (arXiv 2404.18911): the states after the exit layer are computed once with the
frozen blocks; the loss is the soft cross-entropy between the target's distribution and the
adapter's, under the target's own frozen head. Unlike there, the adapter is a whole block with its
feed-forward part, begins as the target's last block, and the head keeps only V' rows: the target's
distribution is restricted to those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import cos, pi
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import UnsupportedError
from edgespec.models.exits.early_exit import ExitInfo
from edgespec.models.exits.network import (
    Tensor,
    Weights,
    causal_attention,
    hyperparameters_of,
    import_torch,
    rms_norm,
    rotations,
    run_block,
    work_s,
)
from edgespec.models.exits.training_texts import ANSWER, FORCED, TrainingText, is_held_out
from edgespec.models.spec import ModelSpec
from edgespec.models.writing import whole_file

LONGEST_RUN = 8  # drafted tokens whose chance of being right is counted
_MOST_CHECKED = 64  # held-out texts, enough to judge by
_BATCH_TOKENS = 2048
_PEAK_RATE, _LAST_RATE, _WARM_UP = 1.5e-3, 0.03, 0.02
_AGAIN = 0.5  # of the rate, for what was trained before
_CLIP = 1.0
_OUTSIDE = ("output_norm.weight", "lens")  # parameters that are not the block's
_LENS_TOKENS, _RIDGE = 10_000, 1e-3
_HEAD_ROWS = 256  # places whose logits are made at once
_USER_WEIGHT = 0.3  # of the loss on a token of a user turn
_MIXTURES = (1.0, 0.75, 0.5, 0.25)  # of the last parameters with the best ones
_CHECKS = 24  # validations of one training,
_LEAST_CHECK_S = 15.0  # and time between them
_PATIENCE = 8  # validations without a better loss, in the second half


@dataclass(frozen=True, slots=True)
class ExitQuality:
    """How an exit does on held-out answers.

    `agreement` is the part of places where its best token is the target's; `gains[i]` is what an
    i + 1st drafted token adds to the tokens of a round.
    """

    loss: float
    agreement: float
    gains: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Batch:
    """Some texts side by side, padded to the longest."""

    states: Tensor  # [B, T, width]
    weights: Tensor  # [B, T]: 0 where nothing is learnt
    ids: Tensor  # [B, T, teacher]: rows of the head, 0 where the token has none
    shares: Tensor  # [B, T, teacher]: the target's distribution over the head's rows
    best: Tensor  # [B, T]: row of the target's best token, -1 where it has none
    answers: Tensor  # [B, T]: whether an answer's token follows


def exit_states(
    spec: ModelSpec,
    texts: Sequence[TrainingText],
    layers: Sequence[int],
    progress: Callable[[float], None] = lambda _part: None,
) -> dict[int, list[Tensor]]:
    """The states of each text after so many blocks, [T, width] in bfloat16, by number of blocks."""
    torch = import_torch()
    shape, weights = hyperparameters_of(spec), Weights(spec, torch.bfloat16)
    blocks = [weights.block(number) for number in range(max(layers))]
    embedding = weights.embedding()
    states: dict[int, list[Tensor]] = {layer: [torch.empty(0)] * len(texts) for layer in layers}
    done = 0
    with torch.inference_mode():
        for group in _groups(texts):
            x = embedding[_padded([torch.from_numpy(texts[i].tokens.astype(int)) for i in group])]
            angles = rotations(shape, torch.arange(x.shape[1])[None])
            for number in range(max(layers) + 1):
                for row, index in enumerate(group if number in layers else ()):
                    states[number][index] = x[row, : len(texts[index].tokens)].clone()
                if number < len(blocks):
                    x = run_block(shape, blocks[number], x, angles, causal_attention)
            done += len(group)
            progress(done / len(texts))
    return states


def _groups(texts: Sequence[TrainingText]) -> list[list[int]]:
    """Texts of about one length, some thousand tokens together."""
    order = sorted(range(len(texts)), key=lambda index: len(texts[index].tokens))
    groups: list[list[int]] = []
    for index in order:
        longest = len(texts[index].tokens)
        if not groups or longest * (len(groups[-1]) + 1) > _BATCH_TOKENS:
            groups.append([])
        groups[-1].append(index)
    return groups


def _padded(rows: Sequence[Tensor]) -> Tensor:
    return import_torch().nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


class _Rows(NamedTuple):
    """The head's rows for the tokens that can be drafted, V' of the vocabulary's V."""

    head: Tensor  # [V', width]
    row_of: Tensor  # [V]; -1 for other tokens


class ExitTrainer:
    """One exit in training: after `exit_layer` blocks, with the head's rows `token_ids`.

    `states` are those of `texts` after `exit_layer` blocks. The adapter begins as the target's next
    block, and the head as the target's after the linear map (a lens, arXiv 2303.08112) that takes
    the adapter's states nearest to the target's last ones. Raises UnsupportedError where there is
    too little text to hold some out.
    """

    def __init__(
        self,
        spec: ModelSpec,
        exit_layer: int,
        token_ids: NDArray[np.int32],
        texts: Sequence[TrainingText],
        states: Sequence[Tensor],
    ) -> None:
        torch = self._torch = import_torch()
        self._hyperparameters = hyperparameters_of(spec)
        self._texts, self._states = texts, states
        weights = Weights(spec, torch.float32)
        self._all_rows = weights.head().to(torch.bfloat16)
        parameters = weights.block(exit_layer)
        parameters["output_norm.weight"] = torch.ones(self._hyperparameters.width)
        parameters["lens"] = torch.eye(self._hyperparameters.width)
        self._parameters = {name: value.requires_grad_() for name, value in parameters.items()}
        self._has_begun = False
        self._spec, self._norm = spec, weights.tensor("output_norm.weight")
        self._use_rows(token_ids)
        held_out = [i for i in range(len(texts)) if is_held_out(i)]
        trained = [i for i in range(len(texts)) if not is_held_out(i)]
        if not trained:
            raise UnsupportedError("there is too little text to train on", hint="write more of it")
        self._batches = [
            [trained[i] for i in group] for group in _groups([texts[i] for i in trained])
        ]
        checked = held_out[:_MOST_CHECKED]
        self._checks = [
            [checked[i] for i in group] for group in _groups([texts[i] for i in checked])
        ]

    def go_on_from(self, drafter: ModelSpec, info: ExitInfo) -> None:
        """Begin with what a drafter's file was trained to be: of the same target and exit."""
        torch, weights = self._torch, Weights(drafter, self._torch.float32)
        values = weights.block(info.exit_layer)
        values["output_norm.weight"] = weights.tensor("output_norm.weight")
        # The file's head is the target's rows after the lens, which least squares gives back.
        rows = self._all_rows[torch.tensor(info.token_ids)].float()
        values["lens"] = torch.linalg.lstsq(rows, weights.embedding()).solution
        self._set(values)
        self._has_begun = True

    def fit_lens(self) -> None:
        """Ridge regression from the adapter's normalized states to the target's, on some texts."""
        torch, spec, width = self._torch, self._spec, self._hyperparameters.width
        lengths = np.cumsum([len(text.tokens) for text in self._texts])
        some = 1 + int(np.searchsorted(lengths, _LENS_TOKENS))
        final = exit_states(spec, self._texts[:some], [spec.num_layers])[spec.num_layers]
        inner, outer, tokens = torch.zeros(width, width), torch.zeros(width, width), 0
        for states, last in zip(self._states[:some], final, strict=True):
            with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
                ours = self._normalized(states[None].float())[0].float()
            theirs = rms_norm(last.float(), self._norm, self._hyperparameters.epsilon)
            inner += ours.T @ ours
            outer += theirs.T @ ours
            tokens += len(ours)
        inner += _RIDGE * tokens * torch.eye(width)
        with torch.no_grad():
            self._parameters["lens"].copy_(torch.linalg.solve(inner, outer, left=False))

    def _use_rows(self, token_ids: NDArray[np.int32]) -> None:
        ids = self._torch.from_numpy(token_ids.astype(np.int64))
        row_of = self._torch.full((self._spec.vocab_size,), -1)
        row_of[ids] = self._torch.arange(len(token_ids))
        self._rows = _Rows(self._all_rows[ids], row_of)

    # -- training --------------------------------------------------------------------------

    def train(
        self,
        seconds: float,
        *,
        checkpoint: Path | None = None,
        progress: Callable[[float, ExitQuality | None], None] = lambda _part, _quality: None,
        seed: int = 0,
    ) -> ExitQuality:
        """Train for some time, beginning with the lens or a drafter; or go on from `checkpoint`.

        Stops early when the held-out loss stops falling, and with a checkpoint at Ctrl-C, too.
        Returns what the best parameters reach, which are those that stay. At the end means of the
        best and the last ones are tried, too (model soups, arXiv 2203.05482).
        """
        torch = self._torch
        optimizer = torch.optim.AdamW(
            list(self._parameters.values()), lr=_PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.01
        )
        spent, best_values = self._load(checkpoint, optimizer)
        if not spent and not self._has_begun:
            self.fit_lens()
        peak = _PEAK_RATE * (_AGAIN if self._has_begun else 1.0)
        last, since_best = self._values(), 0
        best_values = best_values or last
        self._set(best_values)
        best = self.quality()
        self._set(last)
        random, between = (
            np.random.default_rng([seed, int(spent)]),
            max(seconds / _CHECKS, _LEAST_CHECK_S),
        )
        next_check = spent + between
        start = work_s() - spent
        try:
            while (now := work_s() - start) < seconds and since_best < _PATIENCE:
                self._step(optimizer, peak * _rate(now / seconds), random)
                progress(now / seconds, None)
                if work_s() - start >= next_check:
                    next_check += between
                    quality = self.quality()
                    progress(now / seconds, quality)
                    since_best += now > seconds / 2  # before, the rate is what keeps it high
                    if quality.loss < best.loss:
                        best, best_values, since_best = quality, self._values(), 0
                    self._save(checkpoint, optimizer, work_s() - start, best_values)
        except KeyboardInterrupt:
            if checkpoint is None:
                raise
        last, kept = self._values(), best_values
        for part in _MIXTURES if spent < seconds else ():  # they were tried when that time was up
            mixed = {name: kept[name].lerp(value, part) for name, value in last.items()}
            self._set(mixed)
            if (quality := self.quality()).loss < best.loss:
                best, best_values = quality, mixed
        self._set(last)
        self._save(checkpoint, optimizer, work_s() - start, best_values)
        self._set(best_values)
        return best

    def _step(self, optimizer: Any, rate: float, random: np.random.Generator) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = self._batch(self._batches[random.integers(len(self._batches))])
        x = self._adapted(batch)
        gradient = self._torch.empty_like(x)
        weights = batch.weights[batch.weights > 0]
        total = weights.sum().clamp(min=1.0)
        with self._torch.no_grad():
            # The head is frozen: its gradient is made at once, a part that fits the caches at a
            # time, and [n, V'] never lies in memory.
            for part, logits, ids, shares in self._parts(x, batch):
                difference = logits.softmax(1).scatter_add_(1, ids, -shares)
                difference *= (weights[part] / total)[:, None]
                gradient[part] = difference.to(x.dtype) @ self._rows.head
        x.backward(gradient)
        self._torch.nn.utils.clip_grad_norm_(list(self._parameters.values()), _CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def _normalized(self, states: Tensor) -> Tensor:
        """The adapter's normalized states, [B, T, width]."""
        angles = rotations(self._hyperparameters, self._torch.arange(states.shape[1])[None])
        x = run_block(self._hyperparameters, self._parameters, states, angles, causal_attention)
        return rms_norm(x, self._parameters["output_norm.weight"], self._hyperparameters.epsilon)

    def _adapted(self, batch: _Batch) -> Tensor:
        """What the head takes where something is learnt or asked, [n, width]."""
        torch = self._torch
        with torch.autocast("cpu", torch.bfloat16):
            x = self._normalized(batch.states)[batch.weights > 0]
            return torch.nn.functional.linear(x, self._parameters["lens"])

    def _parts(self, x: Tensor, batch: _Batch) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Logits [n, V'] of some places at a time, and what they should be."""
        chosen = batch.weights > 0
        ids, shares = batch.ids[chosen], batch.shares[chosen]
        for start in range(0, len(x), _HEAD_ROWS):
            part = slice(start, start + _HEAD_ROWS)
            yield part, (x[part] @ self._rows.head.T).float(), ids[part], shares[part]

    def _batch(self, indices: Sequence[int]) -> _Batch:
        torch = self._torch
        texts = [self._texts[index] for index in indices]
        kinds = _padded([torch.from_numpy(text.kinds) for text in texts])
        teacher_ids = _padded([torch.from_numpy(text.teacher_ids) for text in texts]).long()
        logits = _padded([torch.from_numpy(text.teacher_logits) for text in texts]).float()
        rows = self._rows.row_of[teacher_ids]
        shares = logits.softmax(-1) * (rows >= 0)
        mass = shares.sum(-1, keepdim=True)
        weights = torch.where(kinds == ANSWER, 1.0, _USER_WEIGHT) * (kinds != FORCED)
        return _Batch(
            states=_padded([self._states[index] for index in indices]).float(),
            weights=weights * (mass[..., 0] > 0),
            ids=rows.clamp(min=0),
            shares=shares / mass.clamp(min=1e-6),
            best=rows[..., 0],
            answers=kinds == ANSWER,
        )

    # -- what came of it -------------------------------------------------------------------

    def quality(self, token_ids: NDArray[np.int32] | None = None) -> ExitQuality:
        """On the texts held out; with other rows of the head, if they are named."""
        kept = self._rows
        if token_ids is not None:
            self._use_rows(token_ids)
        losses, hits = [], []
        with self._torch.inference_mode():
            for indices in self._checks:
                batch = self._batch(indices)
                chosen = batch.weights > 0
                loss, best = [], []
                for _, logits, ids, shares in self._parts(self._adapted(batch), batch):
                    # Cross-entropy against the target's distribution.
                    loss.append(logits.logsumexp(1) - (logits.gather(1, ids) * shares).sum(1))
                    best.append(logits.argmax(1))
                losses.append(self._torch.cat(loss)[batch.answers[chosen]])
                right = self._torch.zeros_like(chosen)
                right[chosen] = self._torch.cat(best) == batch.best[chosen]
                hits += [
                    row[asked].numpy() for row, asked in zip(right, batch.answers, strict=True)
                ]
        self._rows = kept
        mean = float(self._torch.cat(losses).mean())
        return ExitQuality(mean, agreement_of(hits), gains_of(hits))

    def adapter(self) -> dict[str, NDArray[np.float32]]:
        """The tensors of the trained block, by name within it."""
        return {name: values for name, values in self._arrays() if name not in _OUTSIDE}

    def head(self) -> NDArray[np.float32]:
        """The head's rows after the lens, [V', width]."""
        rows: NDArray[np.float32] = (
            self._rows.head.float() @ self._parameters["lens"].detach()
        ).numpy()
        return rows

    def norm(self) -> NDArray[np.float32]:
        """The trained final norm, [width]."""
        return dict(self._arrays())["output_norm.weight"]

    def _arrays(self) -> list[tuple[str, NDArray[np.float32]]]:
        return [(name, value.detach().numpy()) for name, value in self._parameters.items()]

    # -- checkpoints -----------------------------------------------------------------------

    def _values(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self._parameters.items()}

    def _set(self, values: dict[str, Tensor]) -> None:
        with self._torch.no_grad():
            for name, value in self._parameters.items():
                value.copy_(values[name])

    def _save(
        self, path: Path | None, optimizer: Any, spent: float, best: dict[str, Tensor]
    ) -> None:
        if path is None:
            return
        state = {
            "values": self._values(),
            "best": best,
            "optimizer": optimizer.state_dict(),
            "spent": spent,
        }
        with whole_file(path) as partial:
            self._torch.save(state, partial)

    def _load(self, path: Path | None, optimizer: Any) -> tuple[float, dict[str, Tensor] | None]:
        """Seconds of training that are done already, and the best parameters of them."""
        if path is None or not path.exists():
            return 0.0, None
        state = self._torch.load(path, weights_only=True)
        self._set(state["values"])
        optimizer.load_state_dict(state["optimizer"])
        return float(state["spent"]), state["best"]


def _rate(part: float) -> float:
    """The learning rate after a part of the training, of its peak: warm-up, then a cosine."""
    if part < _WARM_UP:
        return part / _WARM_UP
    return _LAST_RATE + (1.0 - _LAST_RATE) * (1.0 + cos(pi * min(1.0, part))) / 2.0


def agreement_of(hits: Sequence[NDArray[np.bool_]]) -> float:
    """The part of all places that are right, over texts' places [n]."""
    return sum(int(row.sum()) for row in hits) / max(1, sum(map(len, hits)))


def gains_of(hits: Sequence[NDArray[np.bool_]]) -> tuple[float, ...]:
    """What the 1st, 2nd, ... drafted token adds to the tokens of a round.

    Texts are walked in rounds as they are decoded, with so many drafts in each: hits[t] says
    whether the draft for place t is right where all before it were. Counting every place alike
    would flatter: what was accepted is skipped, so rounds begin where the text is hard.
    """
    lengths = [1.0]
    for most in range(1, LONGEST_RUN + 1):
        rounds = 0
        for row in hits:
            place = 0
            while place < len(row):
                wrong = np.flatnonzero(~row[place : place + most])
                place += 1 + (int(wrong[0]) if len(wrong) else most)
                rounds += 1
        lengths.append(sum(map(len, hits)) / max(1, rounds))
    return tuple(float(gain) for gain in np.diff(lengths))
