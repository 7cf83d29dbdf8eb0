"""Vectors of texts, and scores of documents for a query: one model, one thread that computes.

Callers make ids of their texts and wait. The thread takes texts of all callers in turns and fills
each step with them, so that neither a long list keeps a single text waiting nor single texts waste
steps.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llama.embedding import EmbeddingContext
from edgespec.backends.vocabulary import TextBound
from edgespec.errors import BackendError, ContextFullError, DoesNotFitError, UnsupportedError
from edgespec.memory.device.reservations import release
from edgespec.memory.plan.embedding import EmbeddingPlan, plan_embedding
from edgespec.memory.plan.machine import reserve
from edgespec.memory.plan.options import LoadOptions, said_as_arguments
from edgespec.models.hub.resolve import model_file
from edgespec.models.pooling import RANK, joined
from edgespec.models.spec import read_model_spec
from edgespec.progress import Progress
from edgespec.setup.stored import close_at_exit

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from edgespec.memory.plan.options import LoadKeywords

Pooling: TypeAlias = Literal["mean", "cls", "last", "rank"]
Text: TypeAlias = str | Sequence[int]


class Embeddings(NamedTuple):
    """Rows of texts, [n, size], and how many tokens each text had."""

    rows: NDArray[np.float32]
    num_tokens: Sequence[int]


@dataclass(eq=False)
class _Job:
    """The texts of one caller: those whose ids are known, and how many were taken.

    Each caller waits for its own future: one condition would wake up all of them for every step.
    """

    rows: NDArray[np.float32]
    texts: list[Sequence[int]] = field(default_factory=list)
    taken: int = 0
    done: int = 0
    future: Future[None] = field(default_factory=Future)
    cancel: threading.Event | None = None

    @property
    def is_cancelled(self) -> bool:
        return self.cancel is not None and self.cancel.is_set()


class Embedder:
    """A model that makes vectors or scores, for any number of threads.

        with edgespec.Embedder("embed.gguf") as embedder:
            vectors = embedder.embed(["one text", "another text"]).rows

    Its memory is kept from other programs until it is closed.

    Args:
        model: a GGUF file, or the name of one on this machine; or what `plan` made of it.
        pooling: "mean", "cls", "last" or "rank": which state stands for a text. None takes what the
            file says.
        options: how to load; `changes` are fields of it.
        progress: called while it is loaded.

    Raises as `plan`, and BackendError where llama.cpp cannot load it.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | EmbeddingPlan,
        *,
        pooling: Pooling | None = None,
        options: LoadOptions | None = None,
        progress: Progress | None = None,
        **changes: Unpack[LoadKeywords],
    ) -> None:
        report = progress or (lambda _what, _fraction: None)
        if isinstance(model, EmbeddingPlan):
            plan = model
        else:
            plan = self.plan(model, pooling=pooling, options=options, **changes)
        if not reserve(plan):
            raise DoesNotFitError(
                f"the plan needs {plan.predicted_peak_bytes >> 20} MiB, which are not free now",
                hint="start it again: the plan will be made for what is free now",
            )
        with ExitStack() as failed:
            failed.callback(release)
            self.chosen = plan
            self.ranks = plan.pooling == RANK
            self._context = EmbeddingContext(
                str(plan.spec.path),
                plan,
                plan.parameters,
                ranks=self.ranks,
                progress=lambda fraction: report("loading", fraction),
            )
            self._on_close = failed.pop_all()
        self.size = self._context.size
        self.tokenizer = self._context.tokenizer
        self._bound = TextBound(self.tokenizer, plan.context_size)
        self._jobs: deque[_Job] = deque()
        self._change = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="edgespec-embedder", daemon=True)
        self._thread.start()
        close_at_exit(self)

    @staticmethod
    def plan(
        model: str | os.PathLike[str],
        *,
        pooling: Pooling | None = None,
        options: LoadOptions | None = None,
        **changes: Unpack[LoadKeywords],
    ) -> EmbeddingPlan:
        """What loading would allocate and choose, and why; loads nothing. Arguments as above.

        Raises ModelNotFoundError or ModelFileError for what is no model, UnsupportedError for what
        is not possible with this one, and DoesNotFitError.
        """
        asked = LoadOptions.of(options, **changes)
        with said_as_arguments():
            return plan_embedding(read_model_spec(model_file(os.fspath(model))), asked, pooling)

    # -- what it makes ---------------------------------------------------------------------

    def embed(
        self,
        texts: Sequence[Text],
        *,
        dimensions: int | None = None,
        truncate: bool = False,
        cancel: threading.Event | None = None,
    ) -> Embeddings:
        """Vectors of length 1 [n, dimensions] of texts, or of their token ids.

        Args:
            dimensions: keep the first ones alone, where the model was made for that.
            truncate: cut off texts that are too long, which are refused else.
            cancel: set it from another thread to stop after the current step, with BackendError.

        Raises ContextFullError for a text that is too long, UnsupportedError where this is not
        possible with the model, and BackendError.
        """
        if self.ranks:
            raise UnsupportedError(
                "this model ranks documents and makes no vectors", hint="ask it to rerank"
            )
        size = self._size(dimensions)
        made = self._computed(texts, truncate, cancel)
        rows = np.zeros((len(made.rows), size), np.float32)
        lengths = np.linalg.norm(made.rows[:, :size], axis=1, keepdims=True)
        np.divide(made.rows[:, :size], lengths, out=rows, where=lengths > 0)  # one of zeros stays
        return Embeddings(rows, made.num_tokens)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        truncate: bool = False,
        cancel: threading.Event | None = None,
    ) -> Embeddings:
        """How well each document answers a query, [n, 1]: from 0 to 1.

        Arguments and errors as in `embed`.
        """
        if not self.ranks:
            raise UnsupportedError(
                "this model makes vectors and has no head that ranks documents",
                hint="use a reranking model",
            )
        made = self._computed([self._pair(query, one) for one in documents], truncate, cancel)
        # Of several labels llama.cpp has made shares of 1 already.
        if self.size == 1:
            np.divide(1.0, 1.0 + np.exp(-made.rows), out=made.rows)
        return Embeddings(made.rows[:, :1], made.num_tokens)

    def check(self) -> None:
        """Raise UnsupportedError once it is closed."""
        if self._is_closed:
            raise _closed()

    def memory_bytes(self) -> dict[str, int]:
        """What llama.cpp says it allocated, by component."""
        return dict(self._context.buffer_bytes)

    def _size(self, dimensions: int | None) -> int:
        """Dimensions of a vector, as asked for. Raises UnsupportedError."""
        if dimensions is None or dimensions == self.size:
            return self.size
        if not self.chosen.spec.pooling.shortens:
            raise UnsupportedError(
                f"this model's vectors have {self.size} dimensions, and it was not made for fewer",
                hint="leave out dimensions",
            )
        if not 1 <= dimensions <= self.size:
            raise UnsupportedError(
                f"{dimensions} dimensions are not possible", hint=f"use 1 to {self.size}"
            )
        return dimensions

    def _pair(self, query: str, document: str) -> Sequence[int]:
        template = self.chosen.spec.pooling.template
        if not template:
            return self._context.pair(query, document)
        mark = self.tokenizer.control_texts.mark
        return self.tokenizer.encode(
            joined(template, mark(query), mark(document)), add_special=False
        )

    # -- callers ---------------------------------------------------------------------------

    def _computed(
        self, texts: Sequence[Text], truncate: bool, cancel: threading.Event | None
    ) -> Embeddings:
        """Rows of texts as the model gives them."""
        self.check()
        job = _Job(np.zeros((len(texts), self.size), np.float32), cancel=cancel)
        num_tokens: list[int] = []
        try:
            at_once = 64  # whose ids are handed on: the first ones are computed meanwhile
            for start in range(0, len(texts), at_once):
                if job.is_cancelled:
                    raise _cancelled()
                part = [
                    self._ids(text, place, truncate)
                    for place, text in enumerate(texts[start : start + at_once], start)
                ]
                num_tokens += map(len, part)
                with self._change:
                    self.check()
                    job.texts += part
                    if job not in self._jobs:
                        self._jobs.append(job)
                    self._change.notify()
            if texts:
                job.future.result()
        finally:  # nobody waits for what is left of it
            with self._change:
                if job in self._jobs:
                    self._jobs.remove(job)
        if not np.isfinite(job.rows).all():
            raise BackendError("the model gives rows that are no numbers")
        return Embeddings(job.rows, num_tokens)

    def _ids(self, text: Text, place: int, truncate: bool) -> Sequence[int]:
        """The ids of a text that fit. Raises ContextFullError, and UnsupportedError for others."""
        ids = self._encoded(text, place, truncate) if isinstance(text, str) else list(text)
        if not ids:
            raise UnsupportedError(f"text {place + 1} has no tokens", hint="leave it out")
        if min(ids) < 0 or max(ids) >= self.tokenizer.vocab_size:
            raise UnsupportedError(
                f"text {place + 1} has token ids that the model does not have",
                hint=f"use 0 to {self.tokenizer.vocab_size - 1}",
            )
        most = self.chosen.context_size
        if len(ids) <= most:
            return ids
        if truncate:  # what ends a text stays at its end
            return [*ids[: most - 1], ids[-1]] if isinstance(text, str) else ids[:most]
        raise self._too_long(f"text {place + 1} has {len(ids)} tokens", len(ids))

    def _encoded(self, text: str, place: int, truncate: bool) -> Sequence[int]:
        """The ids of a text; of one that is far too long those of as much as may fit."""
        least = self._bound.least_tokens(text)
        if least and not truncate:
            raise self._too_long(f"text {place + 1} has at least {least} tokens", least)
        return self.tokenizer.encode(
            text[: self._bound.most_bytes] if least else text, is_whole=True
        )

    def _too_long(self, what: str, num_tokens: int) -> ContextFullError:
        most, trained = self.chosen.context_size, self.chosen.spec.context_length
        longer = f"; --ctx {min(trained, num_tokens)} takes longer ones" if most < trained else ""
        return ContextFullError(
            f"{what}, and at most {most} fit",
            hint=f"split it, or ask for it to be truncated{longer}",
        )

    # -- the thread that computes ----------------------------------------------------------

    def _work(self) -> None:
        while batch := self._next():
            try:
                self._compute(batch)
            except Exception as problem:  # their callers are told; others go on
                for job in {job for job, _ in batch if not job.future.done()}:
                    job.future.set_exception(problem)
            for job, _ in batch:
                job.done += 1
                if job.done == len(job.rows) and not job.future.done():
                    job.future.set_result(None)
        with self._change:  # who is told takes its own out
            waiting = list(self._jobs)
        for job in waiting:
            if not job.future.done():
                job.future.set_exception(_closed())

    def _next(self) -> list[tuple[_Job, int]]:
        """Texts of the next step, by job and place: those of all callers in turns."""
        with self._change:
            # Threads of steps end half a second after the last text: to start them takes time.
            if not self._change.wait_for(self._has_work, 0.5):
                self._context.release_threads()
                self._change.wait_for(self._has_work)
            if self._is_closed:
                return []
            batch: list[tuple[_Job, int]] = []
            tokens = 0
            while self._jobs and len(batch) < self.chosen.users:
                job = self._jobs[0]
                size = len(job.texts[job.taken])
                if batch and tokens + size > self.chosen.step_tokens:
                    break
                batch.append((job, job.taken))
                tokens += size
                job.taken += 1
                self._jobs.popleft()
                if job.taken < len(job.texts):
                    self._jobs.append(job)
            return batch

    def _has_work(self) -> bool:
        """Whether there is a text to compute, or it is closed; cancelled jobs are let go."""
        for job in [one for one in self._jobs if one.is_cancelled]:
            self._jobs.remove(job)
            if not job.future.done():
                job.future.set_exception(_cancelled())
        return bool(self._jobs) or self._is_closed

    def _compute(self, batch: Sequence[tuple[_Job, int]]) -> None:
        texts = [job.texts[place] for job, place in batch]
        into = [job.rows.ctypes.data + place * job.rows.strides[0] for job, place in batch]
        if self.chosen.goes_on and len(texts[0]) > self.chosen.step_tokens:
            self._context.read_long(texts[0], self.chosen.step_tokens, into[0])
        else:
            self._context.read(texts, into)

    def close(self) -> None:
        """Free everything; safe to call twice. Callers that wait are refused."""
        with self._change:
            self._is_closed = True
            self._change.notify_all()
        self._thread.join()
        self._context.close()
        self._on_close.close()

    def __enter__(self) -> Embedder:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def embed(
    texts: Sequence[Text],
    model: str | os.PathLike[str],
    *,
    pooling: Pooling | None = None,
    dimensions: int | None = None,
    truncate: bool = False,
    options: LoadOptions | None = None,
    **changes: Unpack[LoadKeywords],
) -> NDArray[np.float32]:
    """Vectors of texts [n, dimensions]: a model is loaded for them, and closed again.

    Arguments and errors as in `Embedder` and `Embedder.embed`.
    """
    with Embedder(model, pooling=pooling, options=options, **changes) as embedder:
        return embedder.embed(texts, dimensions=dimensions, truncate=truncate).rows


def _cancelled() -> BackendError:
    return BackendError("nobody waits for these vectors any more")


def _closed() -> UnsupportedError:
    return UnsupportedError("the model is closed", hint="load the model again")
