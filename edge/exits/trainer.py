"""Trains what drafts for a target on the target's own text: what exits and heads have in common.

A drafter reads states of the target, which were computed once with the frozen blocks; the loss is
the soft cross-entropy between the target's distribution and the drafter's, under the target's own
frozen head behind a linear map (a lens, arXiv 2303.08112). Only V' rows of that head are kept: the
target's distribution is restricted to those. A drafter that is unrolled learns from the 1st, 2nd,
... token that it would draft at each place, the later ones with less weight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import cos, pi
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import UnsupportedError
from edgespec.exits.eagle import Unrolled, first_parameters, head_shape, places_of
from edgespec.exits.files import read_head, values_of, write_exit, write_head
from edgespec.exits.network import (
    Tensor,
    Weights,
    causal_attention,
    fast_dtype,
    groups,
    hyperparameters_of,
    import_torch,
    padded,
    products_in,
    rms_norm,
    rotations,
    run_block,
    target_states,
    work_s,
)
from edgespec.exits.texts import (
    ANSWER,
    FORCED,
    TrainingText,
    is_held_out,
    load_training_texts,
    states_path,
    text_files,
)
from edgespec.models.early_exit import read_exit
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.models.writing import whole_file

LONGEST_RUN = 8  # drafted tokens whose chance of being right is counted
_MOST_CHECKED = 64  # held-out texts, enough to judge by
_PEAK_RATE, _LAST_RATE = 1.5e-3, 0.03
_AGAIN = 0.5  # of the rate, for what was trained before
_CLIP = 1.0
_OUTSIDE = ("output_norm.weight", "lens")  # parameters that every drafter has
_LENS_TOKENS, _RIDGE = 10_000, 1e-3
_HEAD_ROWS = 256  # places whose logits are made at once
_USER_WEIGHT = 0.3  # of the loss on a token of a user turn
_LATER = 0.8  # weight of a drafted token, of the one before it (as EAGLE-3, arXiv 2503.01840)
_CHECKS = 24  # validations of one training,
_LEAST_CHECK_S = 15.0  # and time between them
_PATIENCE = 8  # validations without a better loss, in the second half


@dataclass(frozen=True, slots=True)
class Quality:
    """How a drafter does on held-out answers.

    `agreement` is the part of places where its best token is the target's; `gains[i]` is what an
    i + 1st drafted token adds to the tokens of a round.
    """

    loss: float
    agreement: float
    gains: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Some texts side by side, padded to the longest. Place t is drafted from states[:, t]."""

    states: Tensor  # [B, T, values]
    tokens: Tensor  # [B, T]: the last token that is known at a place
    weights: Tensor  # [B, T]: 0 where nothing is learnt
    ids: Tensor  # [B, T, teacher]: rows of the head, 0 where the token has none
    shares: Tensor  # [B, T, teacher]: the target's distribution over the head's rows
    best: Tensor  # [B, T]: row of the target's best token, -1 where it has none
    answers: Tensor  # [B, T]: whether an answer's token follows


class Drafted(NamedTuple):
    """What one more drafted token is made from at the places where that is learnt."""

    states: Tensor  # [n, width], as the head takes them
    chosen: Tensor  # [B, T]: n places


class _Rows(NamedTuple):
    """The head's rows for the tokens that can be drafted, V' of the vocabulary's V."""

    head: Tensor  # [V', width]
    row_of: Tensor  # [V]; -1 for other tokens


class Trainer(ABC):
    """One drafter in training, with the head's rows `token_ids`.

    `states` are those that it reads of each of the `texts`, [T, values]; `parameters` is what it
    begins with besides a norm and the lens. Raises UnsupportedError where there is too little text
    to hold some out.
    """

    ahead = 0  # tokens that it knows besides the states
    _final: Mapping[int, Tensor] | None = None  # as `final_states`, where they are known
    warm_up = 0.02  # part of the training in which the rate rises

    def __init__(
        self,
        spec: ModelSpec,
        token_ids: NDArray[np.int32],
        texts: Sequence[TrainingText],
        states: Sequence[Tensor],
        parameters: Mapping[str, Tensor],
    ) -> None:
        torch = self._torch = import_torch()
        shape = self._hyperparameters = hyperparameters_of(spec)
        self._texts, self._states, self._spec = texts, states, spec
        self.token_ids = token_ids
        weights = Weights(spec, torch.float32)
        self._all_rows = weights.head().to(fast_dtype())  # parameters are always float32
        self._norm = weights.tensor("output_norm.weight")
        begin = dict(parameters)
        begin["output_norm.weight"] = torch.ones(shape.width)
        begin["lens"] = torch.eye(shape.width)
        self.parameters = {name: value.requires_grad_() for name, value in begin.items()}
        self._has_begun = False
        ids = torch.from_numpy(token_ids.astype(np.int64))
        row_of = torch.full((spec.vocab_size,), -1)
        row_of[ids] = torch.arange(len(token_ids))
        self._rows = _Rows(self._all_rows[ids], row_of)
        self._batches, self._checks = self._split()

    def _split(self) -> tuple[list[list[int]], list[list[int]]]:
        """Numbers of the texts that are trained on together, and of those that are held out."""
        numbers = range(len(self._texts))
        trained = [i for i in numbers if not is_held_out(i)]
        if not trained:
            raise UnsupportedError("there is too little text to train on", hint="write more of it")
        held_out = [i for i in numbers if is_held_out(i)][:_MOST_CHECKED]
        return self._grouped(trained), self._grouped(held_out)

    def _grouped(self, numbers: Sequence[int]) -> list[list[int]]:
        found = groups([len(self._texts[number].tokens) for number in numbers])
        return [[numbers[place] for place in group] for group in found]

    @abstractmethod
    def _drafted(self, batch: Batch) -> Iterator[Tensor]:
        """The normalized states of the 1st, 2nd, ... drafted token, [B, T, width] each."""

    def _learnt(self, part: float) -> int | None:
        """Tokens of a chain to learn from, after a part of the training; None: all of them."""
        return None

    # -- beginning -------------------------------------------------------------------------

    def go_on_from(self, values: Mapping[str, Tensor], head: Tensor, rows: Sequence[int]) -> None:
        """Begin with what an earlier drafter of this target was trained to be.

        The rows of its `head` are the target's after the lens, which least squares gives back.
        """
        torch = self._torch
        before = self._all_rows[torch.tensor(list(rows))].float()
        self._set({**values, "lens": torch.linalg.lstsq(before, head).solution})
        self._has_begun = True

    def fit_lens(self) -> None:
        """Ridge regression from the first drafts' states to the target's last, on some texts."""
        torch, spec, width = self._torch, self._spec, self._hyperparameters.width
        final = self._final or final_states(spec, self._texts)
        inner, outer, tokens = torch.zeros(width, width), torch.zeros(width, width), 0
        for number, last in final.items():
            batch = self._batch([number])
            with torch.inference_mode(), products_in(self._all_rows.dtype):
                ours = next(iter(self._drafted(batch)))[0].float()
            theirs = rms_norm(last[self.ahead :].float(), self._norm, self._hyperparameters.epsilon)
            inner += ours.T @ ours
            outer += theirs.T @ ours
            tokens += len(ours)
        inner += _RIDGE * tokens * torch.eye(width)
        with torch.no_grad():
            self.parameters["lens"].copy_(torch.linalg.solve(inner, outer, left=False))

    # -- training --------------------------------------------------------------------------

    def train(
        self,
        seconds: float,
        *,
        checkpoint: Path | None = None,
        progress: Callable[[float, Quality | None], None] = lambda _part, _quality: None,
        seed: int = 0,
    ) -> Quality:
        """Train for some time, beginning with the lens or a drafter; or go on from `checkpoint`.

        Stops early when the held-out loss stops falling, and with a checkpoint at Ctrl-C, too.
        Returns what the best parameters reach, which are those that stay.
        """
        optimizer = self._torch.optim.AdamW(
            list(self.parameters.values()), lr=_PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.01
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
        random = np.random.default_rng([seed, int(spent)])
        between = max(seconds / _CHECKS, _LEAST_CHECK_S)
        next_check, start = spent + between, work_s() - spent
        try:
            while (now := work_s() - start) < seconds and since_best < _PATIENCE:
                rate = peak * _rate(now / seconds, self.warm_up)
                self._step(optimizer, rate, random, self._learnt(now / seconds))
                progress(now / seconds, None)
                if (spent := work_s() - start) >= min(next_check, seconds):
                    next_check += between
                    quality = self.quality()
                    progress(now / seconds, quality)
                    since_best += now > seconds / 2  # before, the rate is what keeps it high
                    if quality.loss < best.loss:
                        best, best_values, since_best = quality, self._values(), 0
                    self._save(checkpoint, optimizer, spent, best_values)
        except KeyboardInterrupt:
            if checkpoint is None:
                raise
            self._save(checkpoint, optimizer, work_s() - start, best_values)
        self._set(best_values)
        return best

    def _step(
        self, optimizer: Any, rate: float, random: np.random.Generator, learnt: int | None
    ) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = self._batch(self._batches[random.integers(len(self._batches))])
        states, gradients = [], []
        for depth, drafted in enumerate(self._outputs(batch, learnt)):
            states.append(drafted.states)
            gradients.append(_LATER**depth * self._gradient(drafted, batch))
        self._torch.autograd.backward(states, gradients)
        self._torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), _CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def _gradient(self, drafted: Drafted, batch: Batch) -> Tensor:
        """Of the loss, by what the head takes, [n, width].

        The head is frozen: its gradient is made at once, a part that fits the caches at a time,
        and [n, V'] never lies in memory.
        """
        gradient = self._torch.empty_like(drafted.states)
        weights = batch.weights[drafted.chosen]
        weights = weights / weights.sum().clamp(min=1.0)
        with self._torch.no_grad():
            for part, logits, ids, shares in self._parts(drafted, batch):
                difference = logits.softmax(1).scatter_add_(1, ids, -shares)
                difference *= weights[part][:, None]
                gradient[part] = difference.to(gradient.dtype) @ self._rows.head
        return gradient

    def _outputs(self, batch: Batch, most: int | None = None) -> list[Drafted]:
        """What the head takes for the 1st, 2nd, ... drafted token, of so many at most."""
        torch, lens = self._torch, self.parameters["lens"]
        learnt = batch.weights > 0
        places = torch.arange(learnt.shape[1])[None]
        outputs = []
        with products_in(self._all_rows.dtype):
            for depth, normed in enumerate(islice(self._drafted(batch), most)):
                chosen = learnt & (places >= depth)  # a 2nd one is drafted behind a 1st one
                states = torch.nn.functional.linear(normed[chosen], lens)
                outputs.append(Drafted(states, chosen))
        return outputs

    def _parts(
        self, drafted: Drafted, batch: Batch
    ) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Logits [n, V'] of some places at a time, and what they should be."""
        ids, shares = batch.ids[drafted.chosen], batch.shares[drafted.chosen]
        for start in range(0, len(ids), _HEAD_ROWS):
            part = slice(start, start + _HEAD_ROWS)
            logits = (drafted.states[part] @ self._rows.head.T).float()
            yield part, logits, ids[part], shares[part]

    def _batch(self, indices: Sequence[int]) -> Batch:
        torch, ahead = self._torch, self.ahead
        texts = [self._texts[index] for index in indices]

        def beside(rows: Sequence[NDArray[Any]]) -> Tensor:
            return padded([torch.from_numpy(row[ahead:]) for row in rows])

        kinds = beside([text.kinds for text in texts])
        teacher_ids = beside([text.teacher_ids for text in texts]).long()
        logits = beside([text.teacher_logits for text in texts]).float()
        rows = self._rows.row_of[teacher_ids]
        shares = logits.softmax(-1) * (rows >= 0)
        mass = shares.sum(-1, keepdim=True)
        weights = torch.where(kinds == ANSWER, 1.0, _USER_WEIGHT) * (kinds != FORCED)
        states = [self._states[index] for index in indices]
        return Batch(
            states=padded([rows[: len(rows) - ahead] for rows in states]).float(),
            tokens=beside([text.tokens for text in texts]).long(),
            weights=weights * (mass[..., 0] > 0),
            ids=rows.clamp(min=0),
            shares=shares / mass.clamp(min=1e-6),
            best=rows[..., 0],
            answers=kinds == ANSWER,
        )

    # -- what came of it -------------------------------------------------------------------

    def quality(self) -> Quality:
        """On the texts held out."""
        losses: list[list[Tensor]] = []  # of each batch, by drafted token
        hits: list[NDArray[np.bool_]] = []
        with self._torch.inference_mode():
            for indices in self._checks:
                batch = self._batch(indices)
                judged = [self._judged(drafted, batch) for drafted in self._outputs(batch)]
                losses.append([loss for loss, _ in judged])
                right = self._torch.stack([right for _, right in judged], 1)  # [B, drafted, T]
                hits += [
                    row[:, asked].numpy() for row, asked in zip(right, batch.answers, strict=True)
                ]
        means = [float(self._torch.cat(parts).mean()) for parts in zip(*losses, strict=True)]
        shares = _LATER ** np.arange(len(means))
        return Quality(float(np.average(means, weights=shares)), agreement_of(hits), gains_of(hits))

    def _judged(self, drafted: Drafted, batch: Batch) -> tuple[Tensor, Tensor]:
        """Cross-entropy against the target's distribution in answers, and who is right [B, T]."""
        loss, best = [], []
        for _, logits, ids, shares in self._parts(drafted, batch):
            loss.append(logits.logsumexp(1) - (logits.gather(1, ids) * shares).sum(1))
            best.append(logits.argmax(1))
        right = self._torch.zeros_like(drafted.chosen)
        right[drafted.chosen] = self._torch.cat(best) == batch.best[drafted.chosen]
        return self._torch.cat(loss)[batch.answers[drafted.chosen]], right

    @property
    def text_tokens(self) -> int:
        """Tokens of the texts, of which some are held out."""
        return sum(len(text.tokens) for text in self._texts)

    @abstractmethod
    def go_on_from_file(self, path: Path) -> None:
        """Begin with what a drafter's file was trained to be: of the same target and layers."""

    @abstractmethod
    def write(self, path: Path, report: Mapping[str, Any]) -> None:
        """Write what was trained. Raises as `edgespec.exits.files.write_exit`."""

    def block(self) -> dict[str, NDArray[np.float32]]:
        """The trained tensors besides head and final norm, by name."""
        return {name: values for name, values in self._arrays() if name not in _OUTSIDE}

    def head(self) -> NDArray[np.float32]:
        """The head's rows after the lens, [V', width]."""
        rows: NDArray[np.float32] = (
            self._rows.head.float() @ self.parameters["lens"].detach()
        ).numpy()
        return rows

    def norm(self) -> NDArray[np.float32]:
        """The trained final norm, [width]."""
        return dict(self._arrays())["output_norm.weight"]

    def _arrays(self) -> list[tuple[str, NDArray[np.float32]]]:
        return [(name, value.detach().numpy()) for name, value in self.parameters.items()]

    # -- checkpoints -----------------------------------------------------------------------

    def _values(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.parameters.items()}

    def _set(self, values: Mapping[str, Tensor]) -> None:
        with self._torch.no_grad():
            for name, value in self.parameters.items():
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


def _rate(part: float, warm_up: float) -> float:
    """The learning rate after a part of the training, of its peak: warm-up, then a cosine."""
    if part < warm_up:
        return part / warm_up
    return _LAST_RATE + (1.0 - _LAST_RATE) * (1.0 + cos(pi * min(1.0, part))) / 2.0


def agreement_of(hits: Sequence[NDArray[np.bool_]]) -> float:
    """The part of all places whose first draft is right, over texts [n] or [drafts, n]."""
    first = [np.atleast_2d(row)[0] for row in hits]
    return sum(int(row.sum()) for row in first) / max(1, sum(map(len, first)))


def gains_of(hits: Sequence[NDArray[np.bool_]]) -> tuple[float, ...]:
    """What the 1st, 2nd, ... drafted token adds to the tokens of a round.

    Texts are walked in rounds as they are decoded, with so many drafts in each: hits[t] says
    whether the draft for place t is right where all before it were. Of a drafter that follows its
    own drafts, hits[i, t] says it of the i + 1st of a round; those after the last row are taken to
    be right as often as it. Counting every place alike would flatter: what was accepted is skipped,
    so rounds begin where the text is hard.
    """
    rows = [np.atleast_2d(row) for row in hits]
    tokens = sum(row.shape[1] for row in rows)
    lengths = [1.0]
    for most in range(1, LONGEST_RUN + 1):
        rounds = 0
        for row in rows:
            place, last = 0, len(row) - 1
            while place < row.shape[1]:
                behind = range(place, min(place + most, row.shape[1]))
                wrong = (t for t in behind if not row[min(t - place, last), t])
                place = 1 + next(wrong, place + most)
                rounds += 1
        lengths.append(tokens / max(1, rounds))
    return tuple(float(gain) for gain in np.diff(lengths))


# -- what is trained -------------------------------------------------------------------


class ExitTrainer(Trainer):
    """One exit in training: after `exit_layer` blocks, with the head's rows `token_ids`.

    Kangaroo's recipe (arXiv 2404.18911), but the adapter is a whole block with its feed-forward
    part and begins as one of the target's.

    `states` are those of `texts` after `exit_layer` blocks. The adapter begins as the target's next
    block, and the head as the target's after the lens that takes the adapter's states nearest to
    the target's last ones. Raises as Trainer.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layers: Sequence[int],
        token_ids: NDArray[np.int32],
        texts: Sequence[TrainingText],
        states: Sequence[Tensor],
    ) -> None:
        (self._exit_layer,) = layers
        parameters = Weights(spec, import_torch().float32).block(self._exit_layer)
        super().__init__(spec, token_ids, texts, states, parameters)

    def go_on_from_file(self, path: Path) -> None:
        drafter = read_model_spec(path)
        info = read_exit(drafter)
        assert info is not None, "the caller has looked"
        weights = Weights(drafter, self._torch.float32)
        values = weights.block(info.exit_layer)
        values["output_norm.weight"] = weights.tensor("output_norm.weight")
        self.go_on_from(values, weights.embedding(), info.token_ids)

    def write(self, path: Path, report: Mapping[str, Any]) -> None:
        write_exit(
            self._spec,
            path,
            exit_layer=self._exit_layer,
            token_ids=self.token_ids,
            head=self.head(),
            adapter=self.block(),
            norm=self.norm(),
            report=report,
        )

    def _drafted(self, batch: Batch) -> Iterator[Tensor]:
        shape, states = self._hyperparameters, batch.states
        angles = rotations(shape, self._torch.arange(states.shape[1])[None])
        x = run_block(shape, self.parameters, states, angles, causal_attention)
        yield rms_norm(x, self.parameters["output_norm.weight"], shape.epsilon)


_DRAFTED = 4  # tokens of a chain that it learns from at last,
_FIRST, _SECOND = 0.5, 0.8  # parts of the training before which it learns from one, and from two


class HeadTrainer(Trainer):
    """One head in training, with the head's rows `token_ids`.

    EAGLE-3's recipe (arXiv 2503.01840): the head learns from the first tokens of a chain that it
    drafts from its own states (training-time test), by the target's distribution alone and not by
    its states.

    `states` are the target's of `texts`, those of its layers side by side. Raises as Trainer.
    """

    ahead = 1
    warm_up = 0.06  # its later drafts begin far off

    def __init__(
        self,
        spec: ModelSpec,
        layers: Sequence[int],
        token_ids: NDArray[np.int32],
        texts: Sequence[TrainingText],
        states: Sequence[Tensor],
    ) -> None:
        target = hyperparameters_of(spec)
        self.shape, self._layers = head_shape(target), layers
        final = final_states(spec, texts)
        known = [texts[i] for i in final], [states[i] for i in final], [*final.values()]
        parameters = first_parameters(spec, target, places_of(spec, target, *known))
        super().__init__(spec, token_ids, texts, states, parameters)
        self._final = final
        self._embedding = Weights(spec, import_torch().bfloat16).embedding()

    def go_on_from_file(self, path: Path) -> None:
        info = read_head(path)
        assert info is not None, "the caller has looked"
        values = values_of(info)
        self.go_on_from(values, values["output.weight"], info.token_ids.tolist())

    def write(self, path: Path, report: Mapping[str, Any]) -> None:
        write_head(
            self._spec,
            path,
            shape=self.shape,
            layers=self._layers,
            token_ids=self.token_ids,
            head=self.head(),
            block=self.block(),
            norm=self.norm(),
            report=report,
        )

    def _learnt(self, part: float) -> int:
        """Each token of a chain costs as much as the first one, and is worth little before it."""
        return 1 if part < _FIRST else 2 if part < _SECOND else _DRAFTED

    def _drafted(self, batch: Batch) -> Iterator[Tensor]:
        embeddings = self._embedding[batch.tokens].float()
        unrolled = Unrolled(self.shape, self.parameters, embeddings, batch.states)
        for state in unrolled.states(_DRAFTED):
            yield rms_norm(state, self.parameters["output_norm.weight"], self.shape.epsilon)


# -- what is read --------------------------------------------------------------------------


def bits_of(states: Tensor) -> NDArray[np.uint16]:
    """States as the bits of bfloat16, which numpy does not know."""
    bits: NDArray[np.uint16] = states.bfloat16().view(import_torch().uint16).numpy()
    return bits


def final_states(spec: ModelSpec, texts: Sequence[TrainingText]) -> dict[int, Tensor]:
    """The target's states after all blocks, [T, width], of some texts to be trained on, by number.

    They are as long as what is fitted to them needs.
    """
    numbers = [number for number in range(len(texts)) if not is_held_out(number)]
    lengths = np.cumsum([len(texts[number].tokens) for number in numbers])
    some = numbers[: 1 + int(np.searchsorted(lengths, _LENS_TOKENS))]
    tokens = [texts[number].tokens for number in some]
    found = target_states(spec, tokens, [spec.num_layers])[spec.num_layers]
    return dict(zip(some, found, strict=True))


class StoredStates(Sequence[Tensor]):
    """The states of a folder's texts, those after some blocks side by side: [T, blocks x width].

    What is not there yet is computed and kept.
    """

    def __init__(
        self,
        spec: ModelSpec,
        folder: Path,
        layers: Sequence[int],
        progress: Callable[[float], None] = lambda _part: None,
    ) -> None:
        self._torch = import_torch()
        self._rows: list[tuple[list[NDArray[np.uint16]], int, int]] = []
        files = text_files(folder)
        for number, path in enumerate(files):
            missing = [layer for layer in layers if not states_path(path, layer).exists()]
            texts = load_training_texts(path)
            if missing:
                _keep_states(spec, path, texts, missing)
            progress((number + 1) / len(files))
            bits = [np.load(states_path(path, layer), mmap_mode="r") for layer in layers]
            ends = np.cumsum([len(text.tokens) for text in texts]).tolist()
            self._rows += [(bits, *part) for part in zip([0, *ends], ends, strict=False)]

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        """Those of one text, in bfloat16."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        bits, start, end = self._rows[index]
        rows = np.concatenate([layer[start:end] for layer in bits], axis=1)
        return self._torch.from_numpy(rows).view(self._torch.bfloat16)


def _keep_states(
    spec: ModelSpec, path: Path, texts: Sequence[TrainingText], layers: Sequence[int]
) -> None:
    states = target_states(spec, [text.tokens for text in texts], layers)
    for layer in layers:
        with whole_file(states_path(path, layer)) as partial, partial.open("wb") as file:
            np.save(file, np.concatenate([bits_of(rows) for rows in states[layer]]))
