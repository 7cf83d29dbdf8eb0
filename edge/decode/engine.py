"""The engine: one loaded model, and the loop that makes it write.

    prompt ids -> drafter proposes -> controller chooses a DraftTree -> backend verifies it in one
    step -> accept -> commit, roll back -> text

The engine knows no inference library (the backend does) and no probabilities (the drafter does).
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter
from types import TracebackType
from typing import Any

from edgespec.backends.base import Backend, Logits
from edgespec.backends.tree import DraftTree
from edgespec.common import common_length
from edgespec.decode.accept import accept, cut
from edgespec.decode.asynchronous import chunks_of
from edgespec.decode.generation import Cancel, Chunk, Result, Rounds, Run, Stream
from edgespec.decode.stats import Counters
from edgespec.decode.stream import TextStream
from edgespec.decode.verification import accept_sampled
from edgespec.drafting.controller import build_tree, choose_size, likeliest_chain
from edgespec.drafting.drafters.base import Drafter, Outcome, Successors
from edgespec.drafting.drafters.grammar import GrammarDrafter, new_counts
from edgespec.drafting.proposal import Stakes
from edgespec.drafting.successors import successors_of
from edgespec.errors import ContextFullError, UnsupportedError
from edgespec.memory.times.curve import CostCurve
from edgespec.memory.times.speed import RoundHistory
from edgespec.models.chat import Message, prompt_text
from edgespec.sampling.constrained import ConstrainedSampler, make_grammar
from edgespec.sampling.sampling import Sampler, SamplingParams

Prompt = str | Sequence[Message] | Sequence[int]
_PATIENCE_S = 0.05  # between two looks at whether a waiting generation was cancelled


class Engine:
    """A loaded model. Use `edgespec.load` to make one from a file.

    Args:
        backend: the model.
        curve: measured step times; None disables speculation.
        drafter: where drafts come from; None disables speculation.
        max_nodes: largest step, root included; None leaves it to the backend.
        history: counts how many tokens rounds of each size emitted, for later plans.
        chat_template: Jinja source of the model's chat format, or None.
        reuses_cache: whether a generation may go on from what the cache holds of its prompt.
        cache_key: what a saved cache must have been made with to be read back; "" saves none.
        on_close: called once when the engine is closed.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        curve: CostCurve | None = None,
        drafter: Drafter | None = None,
        max_nodes: int | None = None,
        history: RoundHistory | None = None,
        chat_template: str | None = None,
        special_tokens: tuple[str, str] = ("", ""),
        reuses_cache: bool = True,
        cache_key: str = "",
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.backend = backend
        self.vocab_size = backend.tokenizer.vocab_size  # tokens that may be picked
        self.curve = curve
        self._crowded: dict[float, CostCurve] = {}  # the curve, by how many times fewer threads
        self.drafter = drafter if backend.capabilities.rollback and curve is not None else None
        self._max_nodes = min(backend.max_nodes, max_nodes or backend.max_nodes)
        self.history = history if history is not None else RoundHistory()
        self.chat_template = chat_template
        self._special_tokens = special_tokens
        self.reuses_cache = reuses_cache
        self.cache_key = cache_key
        self._on_close = on_close
        self._lock = threading.Lock()
        self._forced_counts = new_counts()
        # The thread that took the lock, or ran its generation last: numbers are given again.
        self._owner: threading.Thread | None = None
        self._run: Run | None = None  # that generation
        self._closed = self._freed = False
        self._process = os.getpid()

    # -- public ----------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 512,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
        raw: bool = False,
        speculate: bool = True,
        reuse: bool = False,
        grammar: str | None = None,
        json_schema: str | None = None,
        cancel: threading.Event | None = None,
    ) -> Result:
        """Write the continuation of `prompt` and return it whole. Arguments as in `stream`."""
        stream = self.stream(
            prompt,
            max_tokens=max_tokens,
            sampling=sampling,
            stop=stop,
            raw=raw,
            speculate=speculate,
            reuse=reuse,
            grammar=grammar,
            json_schema=json_schema,
            cancel=cancel,
        )
        for _ in stream:
            pass
        return stream.result

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 512,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
        raw: bool = False,
        speculate: bool = True,
        reuse: bool = False,
        grammar: str | None = None,
        json_schema: str | None = None,
        cancel: threading.Event | None = None,
    ) -> Stream:
        """Write the continuation of `prompt`, chunk by chunk.

        Args:
            prompt: text, a list of chat messages, or token ids. Text is one user message in the
                model's chat format; `raw=True` sends it as it is.
            max_tokens: most tokens to generate.
            sampling: how tokens are picked; greedy by default.
            stop: strings that end the answer; they are not part of it.
            speculate: False decodes plainly, one token a step.
            reuse: start from what the cache holds of the prompt, as a `Session` does. Without
                settings of `--exact` its logits may be rounded differently from a fresh prefill's.
            grammar: GBNF text that the answer keeps to.
            json_schema: text of a JSON schema; the answer is a document that fits it, on one line.
            cancel: set it from another thread to stop after the current step.

        Raises:
            ContextFullError: the prompt leaves no room for an answer.
            UnsupportedError: an argument cannot be honoured.
        """
        self._check_open()
        self._check_process()
        if max_tokens < 1:
            raise UnsupportedError(f"max_tokens must be at least 1, not {max_tokens}")
        ids = self.encode(prompt, raw=raw)
        room = self.backend.context_size - len(ids)
        if room < 1:
            raise ContextFullError(
                f"the prompt has {len(ids)} tokens and the context {self.backend.context_size}",
                hint="raise --ctx, or shorten the prompt",
            )
        params = sampling or SamplingParams()
        sampler = Sampler(params, self.vocab_size, ids)
        run = Run(
            sampler=sampler,
            draft_sampler=sampler.independent() if params.draws_freely else None,
            limit=min(max_tokens, room),
            cancel=Cancel(cancel),
            vocab_size=self.vocab_size,
            counters=Counters(prompt_tokens=len(ids)),
            speculates=speculate,
            grammar=make_grammar(self.backend, grammar, json_schema),
            reuse=reuse and self.reuses_cache,
        )
        if run.grammar is not None:
            run.sampler, run.draft_sampler = ConstrainedSampler(sampler, run.grammar), None
        self._equip(run, len(ids))
        text = TextStream(self.backend.tokenizer.token_bytes, stop)
        rounds = self._locked(ids, run)
        return Stream(rounds, text, self.backend.tokenizer.is_end, run, max_tokens)

    def astream(self, prompt: Prompt, **options: Any) -> AsyncGenerator[Chunk, None]:
        """`stream` for asynchronous code: the event loop goes on while the model computes.

        Cancelling the task, or `aclose`, stops the generation and gives the engine back. Tasks
        take turns, as threads do.
        """
        return chunks_of(self.stream(prompt, **options))

    async def agenerate(self, prompt: Prompt, **options: Any) -> Result:
        """`generate` for asynchronous code."""
        stream = self.stream(prompt, **options)
        async for _ in chunks_of(stream):
            pass
        return stream.result

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Token ids of a prompt, in the model's chat format unless it is `raw` or ids already."""
        self._check_open()
        if not isinstance(prompt, str) and all(isinstance(item, int) for item in prompt):
            ids = [item for item in prompt if isinstance(item, int)]
        else:
            ids = self.backend.tokenizer.encode(self.prompt_text(prompt, raw=raw))
        if not ids:
            raise UnsupportedError("the prompt is empty", hint="give at least one character")
        outside = [i for i in ids if not 0 <= i < self.vocab_size]
        if outside:
            raise UnsupportedError(f"token id {outside[0]} is not in the vocabulary")
        return ids

    def prompt_text(self, prompt: Prompt, *, raw: bool = False) -> str:
        """The text that is sent for a prompt: messages in the model's chat format."""
        bos_token, eos_token = self._special_tokens
        messages = (
            prompt
            if isinstance(prompt, str)
            else [message for message in prompt if not isinstance(message, int)]
        )
        return prompt_text(
            messages, self.chat_template, bos_token=bos_token, eos_token=eos_token, raw=raw
        )

    def memory_bytes(self) -> dict[str, int]:
        """Bytes the engines of the model and of its drafter say they allocated, by component."""
        of_drafter = getattr(self.drafter, "memory_bytes", dict)
        return {**self.backend.memory_bytes(), **of_drafter()}

    @property
    def draft_failure(self) -> str | None:
        """Why a draft model is not asked any more, or None; a DraftModelWarning said so."""
        failure: str | None = getattr(self.drafter, "failure", None)
        return failure

    def close(self) -> None:
        """Free the model; safe to call twice, and from any thread.

        An unfinished stream ends, wherever it is read: after the step under way its reader gets no
        more chunks, and its result, as far as it goes, says "cancelled". One that still waits for
        its turn, and every later use, raises UnsupportedError. In a fork of the process that loaded
        it nothing is done: the model is the other one's, and what it learned.
        """
        self._closed = True
        if self._process != os.getpid():
            return
        self._take_over()
        try:
            if not self._freed:
                self._free()
        finally:
            self._release()

    def _free(self) -> None:
        """Give everything back, whatever fails on the way; what failed is raised at the end."""
        with ExitStack() as stack:
            stack.callback(self._free_backend)
            if self._on_close is not None:
                stack.callback(self._on_close)
                self._on_close = None

    def _free_backend(self) -> None:
        self.backend.close()
        self._freed = True

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- the loop --------------------------------------------------------------------------

    def _equip(self, run: Run, depth: int) -> None:
        """Let a generation draft with what this engine has."""
        run.drafter = self.drafter if run.speculates else None
        if run.drafter is not None and run.grammar is not None:
            run.drafter = GrammarDrafter(
                run.grammar, self.backend.tokenizer, run.drafter, self._forced_counts
            )
        if self.curve is not None and run.drafter is not None:
            run.min_probability = self.curve.least_useful_probability(depth)

    def _decode(self, prompt: list[int], run: Run) -> Rounds:
        """Yield the tokens of each round. The first "round" is the prompt's last logits.

        Ends before a token that is handed over.
        """
        logits = self._prefill(prompt, run)
        if logits is None or run.hands_over(logits):
            return
        root, previous = run.sampler.pick(logits), 0
        if run.drafter is not None:
            run.drafter.begin([*prompt, root])
        run.counters.add_first()
        yield [root]
        is_end = self.backend.tokenizer.is_end
        while run.counters.generated_tokens < run.limit and not is_end(root):
            if run.cancel.is_set():
                return
            start = perf_counter()
            stakes = self._stakes(run, previous)
            tree, draft_ms = self._draft(root, run, stakes)
            drafted = perf_counter()
            logits = self.backend.verify(tree)[:, : run.vocab_size]
            verified = perf_counter()
            path, emitted = _until_end(*self._accept(tree, logits, run), is_end)
            self.backend.commit(path)
            path = path[: len(emitted)]
            run.counters.crowded_rounds += self.backend.crowding > 1.0
            if run.drafter is not None and stakes is not None and emitted:
                run.drafter.observe(Outcome(tree, path, emitted, stakes, _successors(logits)))
                self.history.observe(len(tree), len(emitted))
                previous, last = len(tree) + stakes.extra, previous
                if stakes.curve is self._curve_now():  # else the team changed for this step
                    step_ms, round_ms = (verified - drafted) * 1e3, (perf_counter() - start) * 1e3
                    stakes.curve.observe(previous, stakes.depth, last, step_ms, round_ms - draft_ms)
            spent_s = perf_counter() - start
            run.counters.add_round(tree, path, verified - drafted, draft_ms / 1e3, spent_s)
            if not emitted:
                return
            root = emitted[-1]
            yield emitted

    def _curve_now(self) -> CostCurve | None:
        """Times of steps with as many threads as the last one had."""
        times = self.backend.crowding
        if times == 1.0 or self.curve is None:
            return self.curve
        if times not in self._crowded:
            self._crowded[times] = self.curve.crowded(times)
        return self._crowded[times]

    def _prefill(self, prompt: list[int], run: Run) -> Logits | None:
        """Logits after the prompt, or None when cancelled on the way."""
        began = perf_counter()
        known = common_length(self.backend.tokens, prompt[:-1]) if run.reuse else 0
        kept = self.backend.truncate(known)
        logits, size = None, self.backend.batch_size
        for start in range(kept, len(prompt), size):
            if run.cancel.is_set():
                return None
            logits = self.backend.prefill(prompt[start : start + size])
        run.counters.add_reading(len(prompt) - kept, kept, perf_counter() - began)
        return logits if logits is None else logits[: run.vocab_size]

    def _stakes(self, run: Run, previous: int) -> Stakes | None:
        """What the next round may draft and cost; None where nothing is ever drafted."""
        backend, curve = self.backend, self._curve_now()
        if run.drafter is None or curve is None:
            return None
        room = min(
            run.limit - run.counters.generated_tokens - 1,
            backend.context_size - backend.length - 1,
            self._max_nodes - 1,
            len(curve.base) - backend.pending - 2,  # drawn nodes cannot be left out later
        )
        return Stakes(
            max_nodes=max(0, room),
            min_probability=run.min_probability,
            curve=curve,
            depth=backend.length,
            previous=previous,
            extra=backend.pending,
            branches=backend.capabilities.tree,
            sampler=run.draft_sampler,
        )

    @staticmethod
    def _draft(root: int, run: Run, stakes: Stakes | None) -> tuple[DraftTree, float]:
        """The tree to verify next, and the ms that models took to draft it.

        That is the root, and drafts where they are worth their time.
        """
        if run.drafter is None or stakes is None or stakes.max_nodes == 0:
            return DraftTree.chain((root,)), 0.0
        proposal = run.drafter.propose(stakes)
        if run.goes_on < 1.0:
            proposal = proposal.cut_off(run.goes_on)
        if not stakes.branches:
            proposal = likeliest_chain(proposal)
        size, _ = choose_size(
            proposal.probabilities,
            stakes,
            kept=proposal.kept,
            spent_ms=proposal.draft_ms,
            tries=True,
        )
        return build_tree(root, proposal, size), proposal.draft_ms

    @staticmethod
    def _accept(tree: DraftTree, logits: Logits, run: Run) -> tuple[list[int], list[int]]:
        """Nodes to keep and tokens to emit: each rule where its proposals need it."""
        sampler = run.sampler
        if not tree.laws or isinstance(sampler, ConstrainedSampler):
            return accept(tree, logits, sampler.pick, run.hands_over)
        kept = accept_sampled(tree, tree.laws, lambda node: sampler.law(logits[node]), sampler)
        return cut(*kept, logits, run.hands_over)

    def _check_process(self) -> None:
        """A forked process has the memory, but none of the threads that wait for each step."""
        if self._process != os.getpid():
            raise UnsupportedError(
                "the engine was loaded by another process, of which this one is a fork",
                hint="load the model in the process that uses it",
            )

    def _check_open(self) -> None:
        if self._closed:
            raise UnsupportedError("the engine is closed", hint="load the model again")

    # -- details ---------------------------------------------------------------------------

    def _locked(self, prompt: list[int], run: Run) -> Rounds:
        """One generation at a time; only what the engine itself takes is timed."""
        if not self._acquire(run.cancel):
            return
        try:
            self._check_open()
            self._run = run
            rounds, counters = self._decode(prompt, run), run.counters
            start = perf_counter()
            for emitted in rounds:
                seconds = perf_counter() - start
                if counters.rounds == 0:
                    counters.time_to_first_token_s = seconds
                else:
                    counters.decode_s += seconds
                yield emitted
                self._owner = threading.current_thread()
                start = perf_counter()
        finally:
            self._release()

    @contextmanager
    def exclusive(self, cancel: Cancel | None = None) -> Iterator[bool]:
        """Hold the engine as a generation does, to work on its cache. Raises as `stream`.

        Yields False, without holding it, where `cancel` was set while it waited.
        """
        self._check_process()
        if not self._acquire(cancel or Cancel()):
            yield False
            return
        try:
            self._check_open()
            yield True
        finally:
            self._release()

    def _acquire(self, cancel: Cancel) -> bool:
        """Wait for other threads' generations; False when cancelled meanwhile."""
        if self._owner is threading.current_thread():
            raise UnsupportedError(
                "another stream of this engine is unfinished in this thread",
                hint="read it to its end or close() it first; one in another thread is waited for",
            )
        while not self._lock.acquire(timeout=_PATIENCE_S):
            if cancel.is_set():
                return False
            self._check_open()
        self._owner = threading.current_thread()
        return True

    def _take_over(self) -> None:
        """Acquire the engine from whoever has it: an unfinished stream ends.

        One that is not running, whoever reads it, ends here; a running one after its step.
        """
        while not self._lock.acquire(blocking=False):
            run = self._run
            has_ended = run is not None and run.end()
            if not has_ended and self._owner is threading.current_thread():
                raise UnsupportedError(
                    "the engine cannot be closed by what runs within its own step",
                    hint="close it in another thread, or when the stream has ended",
                )
            if self._lock.acquire(timeout=_PATIENCE_S):
                break
        self._owner = threading.current_thread()

    def _release(self) -> None:
        self._owner = self._run = None
        self._lock.release()


def _successors(logits: Logits) -> Callable[[int], Successors]:
    return lambda node: successors_of(logits[node])


def _until_end(
    path: list[int], emitted: list[int], is_end: Callable[[int], bool]
) -> tuple[list[int], list[int]]:
    """Drop what came after a token that ends the generation."""
    for place, token in enumerate(emitted):
        if is_end(token):
            return path[: place + 1], emitted[: place + 1]
    return path, emitted
