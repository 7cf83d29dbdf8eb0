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
from functools import cached_property
from itertools import islice
from math import cos, pi
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import UnsupportedError
from edgespec.exits.eagle import first_parameters, head_shape, places_of, unrolled, values_of
from edgespec.exits.files import Trained, read_head, write_exit, write_head
from edgespec.exits.network import (
    Tensor,
    Weights,
    causal_attention,
    fast_dtype,
    groups,
    padded,
    products_in,
    rms_norm,
    rotations,
    run_block,
    target_states,
)
from edgespec.exits.target import hyperparameters_of, import_torch
from edgespec.exits.texts import (
    TrainingText,
    is_held_out,
    load_training_texts,
    save_states,
    states_path,
    text_files,
    work_s,
)
from edgespec.models.early_exit import read_exit
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.models.writing import whole_file
from edgespec.quantize.texts import ANSWER, FORCED

LONGEST_RUN = 8  # drafted tokens whose chance of being right is counted


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


_MOST_CHECKED = 64  # held-out texts, enough to judge by
_PEAK_RATE, _LAST_RATE = 1.5e-3, 0.03
_AGAIN = 0.5  # of the rate, for what was trained before
_CLIP = 1.0
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


class Trainer(ABC):
    """One drafter in training, with the head's rows `token_ids`.

    `states[i]` are those that it reads of text i, [T, width] of each of the target's `layers`.
    Raises UnsupportedError where there is too little text to hold some out.
    """

    ahead = 0  # tokens that it knows besides the states
    warm_up = 0.02  # part of the training in which the rate rises

    def __init__(
        self,
        spec: ModelSpec,
        layers: Sequence[int],
        token_ids: NDArray[np.int32],
        texts: Sequence[TrainingText],
        states: Sequence[Sequence[Tensor]],
    ) -> None:
        torch = import_torch()
        self._spec, self._layers, self._token_ids = spec, layers, token_ids
        self._texts, self._states = texts, states
        numbers = range(len(texts))
        self._trained = [i for i in numbers if not is_held_out(i)]
        if not self._trained:
            raise UnsupportedError("there is too little text to train on", hint="write more of it")
        held_out = [i for i in numbers if is_held_out(i)][:_MOST_CHECKED]
        lengths = [len(text.tokens) for text in texts]
        self._batches, self._checks = groups(lengths, self._trained), groups(lengths, held_out)
        self._target_shape = hyperparameters_of(spec)
        weights = Weights(spec, torch.float32)
        self._all_rows = weights.head().to(fast_dtype())  # parameters are always float32
        self._norm = weights.tensor("output_norm.weight")
        begin = self._begin()
        begin["output_norm.weight"] = torch.ones(self._target_shape.width)
        begin["lens"] = torch.eye(self._target_shape.width)
        self.parameters = {name: value.requires_grad_() for name, value in begin.items()}
        self._has_begun = False
        ids = torch.from_numpy(token_ids.astype(np.int64))
        self._head = self._all_rows[ids]  # [V', width]: the tokens that can be drafted
        self._row_of = torch.full((spec.vocab_size,), -1)  # [V]; -1 for other tokens
        self._row_of[ids] = torch.arange(len(token_ids))

    @abstractmethod
    def _begin(self) -> dict[str, Tensor]:
        """What it begins with besides a norm and the lens, by name."""

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
        torch = import_torch()
        before = self._all_rows[torch.tensor(list(rows))].float()
        self._set({**values, "lens": torch.linalg.lstsq(before, head).solution})
        self._has_begun = True

    @cached_property
    def _final(self) -> dict[int, Tensor]:
        """The target's states after all blocks, [T, width], of some texts to train on, by number.

        They are as long as what is fitted to them needs.
        """
        lengths = np.cumsum([len(self._texts[number].tokens) for number in self._trained])
        some = self._trained[: 1 + int(np.searchsorted(lengths, _LENS_TOKENS))]
        tokens = [self._texts[number].tokens for number in some]
        last = self._spec.num_layers
        return dict(zip(some, target_states(self._spec, tokens, [last])[last], strict=True))

    def fit_lens(self) -> None:
        """Ridge regression from the first drafts' states to the target's last, on some texts."""
        torch = import_torch()
        width, epsilon = self._target_shape.width, self._target_shape.epsilon
        inner, outer, tokens = torch.zeros(width, width), torch.zeros(width, width), 0
        for number, last in self._final.items():
            batch = self._batch([number])
            with torch.inference_mode(), products_in(self._all_rows.dtype):
                ours = next(iter(self._drafted(batch)))[0].float()
            theirs = rms_norm(last[self.ahead :].float(), self._norm, epsilon)
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
        checkpoint: Path,
        progress: Callable[[float, Quality | None], None] = lambda _part, _quality: None,
    ) -> Quality:
        """Train for some time, beginning with the lens or a drafter; or go on from `checkpoint`.

        Stops early when the held-out loss stops falling, and at Ctrl-C. Returns what the best
        parameters reach, which are those that stay.
        """
        torch = import_torch()
        optimizer = torch.optim.AdamW(
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
        random = np.random.default_rng([0, int(spent)])
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
            self._save(checkpoint, optimizer, work_s() - start, best_values)
        self._set(best_values)
        return best

    def _step(
        self, optimizer: Any, rate: float, random: np.random.Generator, learnt: int | None
    ) -> None:
        torch = import_torch()
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = self._batch(self._batches[random.integers(len(self._batches))])
        states, gradients = [], []
        for depth, drafted in enumerate(self._outputs(batch, learnt)):
            states.append(drafted.states)
            gradients.append(_LATER**depth * self._gradient(drafted, batch))
        torch.autograd.backward(states, gradients)
        torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), _CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def _gradient(self, drafted: Drafted, batch: Batch) -> Tensor:
        """Of the loss, by what the head takes, [n, width].

        The head is frozen: its gradient is made at once, a part that fits the caches at a time,
        and [n, V'] never lies in memory.
        """
        torch = import_torch()
        gradient = torch.empty_like(drafted.states)
        weights = batch.weights[drafted.chosen]
        weights = weights / weights.sum().clamp(min=1.0)
        with torch.no_grad():
            for part, logits, ids, shares in self._parts(drafted, batch):
                difference = logits.softmax(1).scatter_add_(1, ids, -shares)
                difference *= weights[part][:, None]
                gradient[part] = difference.to(gradient.dtype) @ self._head
        return gradient

    def _outputs(self, batch: Batch, most: int | None = None) -> list[Drafted]:
        """What the head takes for the 1st, 2nd, ... drafted token, of so many at most."""
        torch = import_torch()
        lens = self.parameters["lens"]
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
            logits = (drafted.states[part] @ self._head.T).float()
            yield part, logits, ids[part], shares[part]

    def _batch(self, indices: Sequence[int]) -> Batch:
        torch = import_torch()
        ahead = self.ahead
        texts = [self._texts[index] for index in indices]

        def beside(rows: Sequence[NDArray[Any]]) -> Tensor:
            return padded([torch.from_numpy(row[ahead:]) for row in rows])

        kinds = beside([text.kinds for text in texts])
        teacher_ids = beside([text.teacher_ids for text in texts]).long()
        logits = beside([text.teacher_logits for text in texts]).float()
        rows = self._row_of[teacher_ids]
        shares = logits.softmax(-1) * (rows >= 0)
        mass = shares.sum(-1, keepdim=True)
        weights = torch.where(kinds == ANSWER, 1.0, _USER_WEIGHT) * (kinds != FORCED)
        states = [torch.cat(list(self._states[index]), 1) for index in indices]
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
        torch = import_torch()
        losses: list[list[Tensor]] = []  # of each batch, by drafted token
        hits: list[NDArray[np.bool_]] = []
        with torch.inference_mode():
            for indices in self._checks:
                batch = self._batch(indices)
                judged = [self._judged(drafted, batch) for drafted in self._outputs(batch)]
                losses.append([loss for loss, _ in judged])
                right = torch.stack([right for _, right in judged], 1)  # [B, drafted, T]
                hits += [
                    row[:, asked].numpy() for row, asked in zip(right, batch.answers, strict=True)
                ]
        means = [float(torch.cat(parts).mean()) for parts in zip(*losses, strict=True)]
        shares = _LATER ** np.arange(len(means))
        return Quality(float(np.average(means, weights=shares)), agreement_of(hits), gains_of(hits))

    def _judged(self, drafted: Drafted, batch: Batch) -> tuple[Tensor, Tensor]:
        """Cross-entropy against the target's distribution in answers, and who is right [B, T]."""
        torch = import_torch()
        loss, best = [], []
        for _, logits, ids, shares in self._parts(drafted, batch):
            loss.append(logits.logsumexp(1) - (logits.gather(1, ids) * shares).sum(1))
            best.append(logits.argmax(1))
        right = torch.zeros_like(drafted.chosen)
        right[drafted.chosen] = torch.cat(best) == batch.best[drafted.chosen]
        return torch.cat(loss)[batch.answers[drafted.chosen]], right

    @abstractmethod
    def go_on_from_file(self, path: Path) -> None:
        """Begin with what a drafter's file was trained to be: of the same target and layers."""

    @abstractmethod
    def write(self, path: Path, report: Mapping[str, Any]) -> None:
        """Write what was trained. Raises as `edgespec.exits.files.write_exit`."""

    def head(self) -> NDArray[np.float32]:
        """The head's rows after the lens, [V', width]."""
        rows = self._head.float() @ self.parameters["lens"].detach()
        return np.asarray(rows.numpy(), np.float32)

    def _tensors(self) -> Trained:
        """Of either kind of file."""
        block = {name: value.detach().numpy() for name, value in self.parameters.items()}
        del block["lens"]  # the head has it
        norm = block.pop("output_norm.weight")
        return Trained(self._token_ids, self.head(), block, norm)

    # -- checkpoints -----------------------------------------------------------------------

    def _values(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.parameters.items()}

    def _set(self, values: Mapping[str, Tensor]) -> None:
        torch = import_torch()
        with torch.no_grad():
            for name, value in self.parameters.items():
                value.copy_(values[name])

    def _save(self, path: Path, optimizer: Any, spent: float, best: Mapping[str, Tensor]) -> None:
        torch = import_torch()
        state = {
            "values": self._values(),
            "best": best,
            "optimizer": optimizer.state_dict(),
            "spent": spent,
        }
        with whole_file(path) as partial:
            torch.save(state, partial)

    def _load(self, path: Path, optimizer: Any) -> tuple[float, dict[str, Tensor] | None]:
        """Seconds of training that are done already, and the best parameters of them."""
        torch = import_torch()
        if not path.exists():
            return 0.0, None
        state = torch.load(path, weights_only=True)
        self._set(state["values"])
        optimizer.load_state_dict(state["optimizer"])
        return float(state["spent"]), state["best"]


def _rate(part: float, warm_up: float) -> float:
    """The learning rate after a part of the training, of its peak: warm-up, then a cosine."""
    if part < warm_up:
        return part / warm_up
    return _LAST_RATE + (1.0 - _LAST_RATE) * (1.0 + cos(pi * min(1.0, part))) / 2.0


# -- what is trained -------------------------------------------------------------------


class ExitTrainer(Trainer):
    """One exit in training, after so many blocks as its one layer says.

    Kangaroo's recipe (arXiv 2404.18911), but the adapter is a whole block with its feed-forward
    part. It begins as the target's next block, and the head as the target's after the lens that
    takes the adapter's states nearest to the target's last ones.
    """

    def _begin(self) -> dict[str, Tensor]:
        return Weights(self._spec, import_torch().float32).block(self._layers[0])

    def go_on_from_file(self, path: Path) -> None:
        torch = import_torch()
        drafter = read_model_spec(path)
        info = read_exit(drafter)
        assert info is not None, "the caller has looked"
        weights = Weights(drafter, torch.float32)
        values = weights.block(info.exit_layer)
        values["output_norm.weight"] = weights.tensor("output_norm.weight")
        self.go_on_from(values, weights.embedding(), info.token_ids)

    def write(self, path: Path, report: Mapping[str, Any]) -> None:
        write_exit(self._spec, path, self._tensors(), report, exit_layer=self._layers[0])

    def _drafted(self, batch: Batch) -> Iterator[Tensor]:
        torch = import_torch()
        shape, states = self._target_shape, batch.states
        angles = rotations(shape, torch.arange(states.shape[1])[None])
        x = run_block(shape, self.parameters, states, angles, causal_attention)
        yield rms_norm(x, self.parameters["output_norm.weight"], shape.epsilon)


_DRAFTED = 4  # tokens of a chain that it learns from at last,
_FIRST, _SECOND = 0.5, 0.8  # parts of the training before which it learns from one, and from two


class HeadTrainer(Trainer):
    """One head in training.

    EAGLE-3's recipe (arXiv 2503.01840): the head learns from the first tokens of a chain that it
    drafts from its own states (training-time test), by the target's distribution alone and not by
    its states.
    """

    ahead = 1
    warm_up = 0.06  # its later drafts begin far off

    def _begin(self) -> dict[str, Tensor]:
        torch = import_torch()
        spec, target, final = self._spec, self._target_shape, self._final
        self.shape = head_shape(target)
        self._embedding = Weights(spec, torch.bfloat16).embedding()
        texts = [self._texts[number] for number in final]
        states = [torch.cat(list(self._states[number]), 1) for number in final]
        places = places_of(spec, target, texts, states, [*final.values()])
        return first_parameters(spec, target, places)

    def go_on_from_file(self, path: Path) -> None:
        info = read_head(path)
        assert info is not None, "the caller has looked"
        values = values_of(info)
        self.go_on_from(values, values["output.weight"], info.token_ids.tolist())

    def write(self, path: Path, report: Mapping[str, Any]) -> None:
        trained, shape = self._tensors(), self.shape
        write_head(self._spec, path, trained, report, shape=shape, layers=self._layers)

    def _learnt(self, part: float) -> int:
        """Each token of a chain costs as much as the first one, and is worth little before it."""
        return 1 if part < _FIRST else 2 if part < _SECOND else _DRAFTED

    def _drafted(self, batch: Batch) -> Iterator[Tensor]:
        embeddings = self._embedding[batch.tokens].float()
        for state in unrolled(self.shape, self.parameters, embeddings, batch.states, _DRAFTED):
            yield rms_norm(state, self.parameters["output_norm.weight"], self.shape.epsilon)


# -- what is read --------------------------------------------------------------------------


def stored_states(
    spec: ModelSpec,
    folder: Path,
    layers: Sequence[int],
    progress: Callable[[float], None] = lambda _part: None,
) -> list[Sequence[Tensor]]:
    """The states of each of a folder's texts after so many blocks, [T, width] in bfloat16 each.

    What is not there yet is computed and kept; what is there is mapped, and read when it is used.
    """
    torch = import_torch()
    found: list[Sequence[Tensor]] = []
    files = text_files(folder)
    for number, path in enumerate(files):
        texts = load_training_texts(path)
        missing = [layer for layer in layers if not states_path(path, layer).exists()]
        if missing:
            computed = target_states(spec, [text.tokens for text in texts], missing)
            for layer, rows in computed.items():
                bits = torch.cat(rows).view(torch.uint16).numpy()
                save_states(path, layer, bits)
        lengths = [len(text.tokens) for text in texts]
        kept = (np.load(states_path(path, layer), mmap_mode="c") for layer in layers)
        parts = [torch.from_numpy(bits).view(torch.bfloat16).split(lengths) for bits in kept]
        found += zip(*parts, strict=True)
        progress((number + 1) / len(files))
    return found
