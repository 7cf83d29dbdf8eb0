"""The engine: one loaded model that answers prompts.

As many generations run at once as its cache holds sequences; `edgespec.decode.scheduler` runs them
and `edgespec.decode.step` has the loop. The engine knows no inference library (the backend does)
and no probabilities (the drafter does).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeGuard

from edgespec.backends.base import (
    Backend,
    ImageRun,
    KeepsSnapshots,
    KeepsStates,
    SeesImages,
    sequences_of,
)
from edgespec.decode.generation import (
    Chunk,
    Counters,
    PartReader,
    Result,
    Stream,
    TextStream,
    chunks_of,
)
from edgespec.decode.kept import PrefixKeeper
from edgespec.decode.options import GenerationOptions
from edgespec.decode.scheduler import Scheduler, Slots
from edgespec.decode.step import Job, Target
from edgespec.drafting.combined import BelievedTimes, RoundHistory
from edgespec.drafting.proposal import Calibration, Drafter
from edgespec.errors import ContextFullError, UnsupportedError
from edgespec.memory.store.cells import PrefixStore
from edgespec.memory.times import NO_DIFFERENCE, CostCurve
from edgespec.models.chat import ChatMessage, Message, check_roles, prompt_text
from edgespec.models.images import Image, images_of, parts_of
from edgespec.models.spec import ModelSpec
from edgespec.prefix import common_prefix_length
from edgespec.sampling.params import SamplingParams
from edgespec.sampling.sampling import ConstrainedSampler, LimitedThought, Sampler, make_grammar

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from edgespec.decode.options import GenerationKeywords


# One sequence, for mypy to know a literal of messages; nobody mixes them with ids.
Prompt: TypeAlias = str | Sequence[ChatMessage | int]
AnyPrompt: TypeAlias = str | Sequence[Message | int]


class Engine(Target):
    """A loaded model. Use `edgespec.load` to make one from a file.

    Args:
        backend: the model, and its cache with all sequences.
        curve: measured step times; None where nothing is ever drafted.
        drafter: where drafts come from; None disables speculation.
        more_drafters: those of the cache's other sequences; without, these are never drafted for.
        max_nodes: largest step, roots included; None leaves it to the backend.
        history: counts how many tokens steps of each size emitted, for later plans.
        chat_template: Jinja source of the model's chat format, or None.
        tool_template: the same for conversations with tools, where the file has one.
        reuses_cache: whether a generation may go on from what the cache holds of its prompt.
        is_exact: the answer must be plain decoding's, so no setting may change it.
        snapshots_cost: how many times as long plain steps take because the backend keeps snapshots,
            which are given up between two answers where drafts were not worth them.
        cache_key: what a saved cache must have been made with to be read back; "" saves none.
        spec: what the model's file says; None where it is of no file.
        on_close: called once when the engine is closed.
    """

    # Prompts with tools, and what reads their answers, know chat formats as a server does; the
    # public face (`edgespec.load`) brings them: a `text`, its `options`, and `make_reader`.
    with_tools: ClassVar[Callable[[Engine, AnyPrompt, GenerationOptions], Any]]

    def __init__(
        self,
        backend: Backend,
        *,
        curve: CostCurve | None = None,
        drafter: Drafter | None = None,
        more_drafters: Sequence[Drafter] = (),
        max_nodes: int | None = None,
        history: RoundHistory | None = None,
        chat_template: str | None = None,
        tool_template: str | None = None,
        reuses_cache: bool = True,
        is_exact: bool = False,
        snapshots_cost: float = 1.0,
        cache_key: str = "",
        spec: ModelSpec | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.backend = backend
        self.curve = curve
        self.drafter = drafter if backend.capabilities.rollback and curve is not None else None
        self.more_drafters = more_drafters
        self.history = history if history is not None else RoundHistory()
        self.sequences = sequences_of(backend)
        self.max_nodes = min(backend.max_nodes, max_nodes or backend.max_nodes)
        self.times = BelievedTimes()
        self.forced = Calibration(1, [0], [0], [0.6])  # a guess
        self.snapshots_cost = snapshots_cost
        self.curves = {}
        self.chat_template = chat_template
        self.tool_template = tool_template
        self.reuses_cache = reuses_cache
        self._is_exact = is_exact
        self.cache_key, self.spec = cache_key, spec
        self._on_close = on_close
        self._is_freed = False
        self.slots = Slots(backend)
        self._scales = self.slots.scales  # of its adapters, if nothing else is asked for
        self.scheduler = Scheduler(self.slots, curve=curve, splits=reuses_cache)
        self._kept: PrefixKeeper | None = None

    @property
    def users(self) -> int:
        """Generations that may run at once."""
        return len(self.sequences)

    @property
    def vocab_size(self) -> int:
        """Tokens that may be picked."""
        return self.backend.tokenizer.vocab_size

    # -- public ----------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        options: GenerationOptions | None = None,
        **changes: Unpack[GenerationKeywords],
    ) -> Result:
        """Write the continuation of `prompt` and return it whole. Arguments as in `stream`."""
        stream = self.stream(prompt, options, **changes)
        for _ in stream:
            pass
        return stream.result

    def prepare(
        self,
        prompt: Prompt,
        options: GenerationOptions | None = None,
        **changes: Unpack[GenerationKeywords],
    ) -> int:
        """Read a prompt into the cache and write nothing; how many tokens were read.

        What begins with it, and is asked with `reuse=True`, begins at once: a `Session` does, and
        has a `prepare` of its own. 0 where the cache cannot go back, as one of a recurrent state
        that keeps none, or where all was there. Arguments as in `stream`; `cancel` stops it.
        """
        if not self.goes_back:
            return 0
        asked = GenerationOptions.of(options, **changes)
        return self.read(self.stream(prompt, replace(asked, max_tokens=1, reuse=True, ahead=True)))

    @property
    def goes_back(self) -> bool:
        """Whether the cache can keep a part of what it holds."""
        return self.backend.capabilities.truncate or isinstance(self.backend, KeepsStates)

    @staticmethod
    def read(stream: Stream) -> int:
        """Read the prompt of a stream that writes nothing of worth; how many tokens were read."""
        for _ in stream:
            pass
        processed, cached = stream.num_read
        return processed - cached

    def stream(
        self,
        prompt: Prompt,
        options: GenerationOptions | None = None,
        **changes: Unpack[GenerationKeywords],
    ) -> Stream:
        """Write the continuation of `prompt`, chunk by chunk.

        Args:
            prompt: text, a list of chat messages, or token ids. Text is one user message in the
                model's chat format; `raw=True` sends it as it is.
            options: how to; the defaults of `GenerationOptions` if None.
            changes: fields of `GenerationOptions`, in place of those of `options`.

        Raises:
            ContextFullError: the prompt leaves no room for an answer.
            UnsupportedError: an option cannot be honoured.
        """
        self.scheduler.check()
        asked = GenerationOptions.of(options, **changes)
        if self.uses_tools(prompt, asked):
            found = self.with_tools(prompt, asked)
            ids = self.shown("", found.options.shown).encode(found.text)
            return self.continued(ids, found.options, found.make_reader())
        ids = self.encode(prompt, raw=asked.raw, images=asked.shown)
        shown = images_of(_messages_of(prompt))
        return self.continued(ids, replace(asked, images=(*asked.shown, *shown)))

    def continued(
        self, ids: list[int], asked: GenerationOptions, reader: PartReader | None = None
    ) -> Stream:
        """The continuation of a prompt's ids. What finds calls in the answer is a `reader`."""
        job = self._job(ids, asked, self.shown("", asked.shown).places(ids))
        if self._kept is not None:
            self._kept.look_up(job)
        chunks = self.scheduler.chunks(job)
        return Stream(job, job.sampler.seed, chunks, self.scheduler.drop_cancelled, reader)

    @staticmethod
    def uses_tools(prompt: AnyPrompt, asked: GenerationOptions) -> bool:
        """Whether tools are offered or were called, so that `with_tools` makes the prompt."""
        return bool(asked.tools) or any(
            isinstance(one, Mapping) and (one.get("role") == "tool" or one.get("tool_calls"))
            for one in _messages_of(prompt)
        )

    def _bytes_with(self, markers: Sequence[str]) -> Callable[[int], bytes]:
        """The bytes of tokens, those of some control tokens being their texts."""
        tokenizer, shown = self.backend.tokenizer, dict[int, bytes]()
        for marker in markers:
            token, *more = tokenizer.encode(marker, add_special=False) or [-1]
            if token >= 0 and not more and not tokenizer.token_bytes(token):
                shown[token] = marker.encode()
        if not shown:
            return tokenizer.token_bytes
        return lambda token: shown.get(token) or tokenizer.token_bytes(token)

    def _job(
        self, ids: list[int], asked: GenerationOptions, images: Mapping[int, ImageRun] | None = None
    ) -> Job:
        """State of a generation that has not begun."""
        room = self.backend.context_size - len(ids)
        if room < 1:
            raise ContextFullError(
                f"the prompt has {len(ids)} tokens and the context {self.backend.context_size}",
                hint="raise context_size (--ctx), or shorten the prompt",
            )
        params = asked.sampling or SamplingParams()
        if self._is_exact and params.accept_typical:
            raise UnsupportedError(
                "typical acceptance changes what is written, and the model was loaded as exact",
                hint="leave out accept_typical (--accept typical), or exact",
            )
        scales, lora = self._scales, asked.lora
        if lora is not None:
            if unknown := [one for one in lora if not 0 <= one < len(scales)]:
                raise UnsupportedError(
                    f"there is no adapter {unknown[0]}: the model was loaded with {len(scales)}",
                    hint="--lora FILE loads one, which is number 0",
                )
            scales = tuple(float(lora.get(number, 0.0)) for number in range(len(scales)))
        tokenizer = self.backend.tokenizer
        texts = [one for one in ids if one >= 0] if images else ids
        sampler = Sampler(params, self.vocab_size, texts, tokenizer.token_bytes)
        grammar = make_grammar(tokenizer, asked.answer_format, asked.begun)
        is_free = params.draws_freely and grammar is None and asked.thought is None
        is_free = is_free and not (self._is_exact and self.draws_drafts)
        formed = sampler if grammar is None else ConstrainedSampler(sampler, grammar)
        picks: Sampler | ConstrainedSampler | LimitedThought = formed
        if asked.thought is not None:
            end_ids = tokenizer.encode(asked.thought.forced, add_special=False)
            picks = LimitedThought(formed, asked.thought, end_ids, self._bytes_with(asked.markers))
        prediction: tuple[int, ...] = ()
        if asked.prediction:
            # By the last eight tokens of the prompt a drafter finds where the answer begins.
            tokens = tokenizer.encode(asked.prediction, add_special=False)
            prediction = (*texts[-8:], *tokens[: self.backend.context_size])
        return Job(
            target=self,
            asked=asked,
            prompt=ids,
            text=TextStream(self._bytes_with(asked.markers), asked.stop),
            is_end=tokenizer.is_end,
            sampler=picks,
            draft_sampler=sampler.independent() if is_free else None,
            limit=min(asked.max_tokens, room),
            vocab_size=self.vocab_size,
            counters=Counters(prompt_tokens=len(ids)),
            salt=asked.cache_salt + (f" {scales}" if scales != self._scales else ""),
            scales=scales,
            prediction=prediction,
            images=images or {},
            grammar=grammar,
            reuse=asked.reuse and self.reuses_cache,
        )

    def astream(
        self,
        prompt: Prompt,
        options: GenerationOptions | None = None,
        **changes: Unpack[GenerationKeywords],
    ) -> AsyncGenerator[Chunk, None]:
        """`stream` for asynchronous code: the event loop goes on while the model computes.

        Cancelling the task, or `aclose`, stops the generation and gives the engine back. Tasks
        run at once or take turns, as threads do.
        """
        return chunks_of(self.stream(prompt, options, **changes))

    async def agenerate(
        self,
        prompt: Prompt,
        options: GenerationOptions | None = None,
        **changes: Unpack[GenerationKeywords],
    ) -> Result:
        """`generate` for asynchronous code."""
        stream = self.stream(prompt, options, **changes)
        async for _ in chunks_of(stream):
            pass
        return stream.result

    def encode(
        self, prompt: AnyPrompt, *, raw: bool = False, images: Sequence[Image] = ()
    ) -> list[int]:
        """Token ids of a prompt, in the model's chat format unless it is `raw` or ids already.

        Those of images are negative.
        """
        shown = self.shown(prompt, images)
        if not isinstance(prompt, str) and _are_ids(prompt):
            ids = [item for item in prompt if isinstance(item, int)]
        else:
            ids = shown.encode(self.prompt_text(prompt, raw=raw, images=images))
        if not ids:
            what = "one character" if isinstance(prompt, str) else "one message or token id"
            raise UnsupportedError("the prompt is empty", hint=f"give at least {what}")
        most = max(ids)
        if most >= self.vocab_size:
            raise UnsupportedError(f"token id {most} is not in the vocabulary")
        shown.places(ids)
        return ids

    def shown(self, prompt: AnyPrompt, images: Sequence[Image] = ()) -> ShownImages:
        """The images of a prompt. Raises as `ShownImages`."""
        self.scheduler.check()
        return ShownImages(self.backend, (*images, *images_of(_messages_of(prompt))))

    def prompt_text(
        self, prompt: AnyPrompt, *, raw: bool = False, images: Sequence[Image] = ()
    ) -> str:
        """The text that is sent for a prompt: messages in the model's chat format.

        Images come before a prompt that is a text.
        """
        if isinstance(prompt, str):
            messages: str | list[Message] = "".join(image.mark for image in images) + prompt
        else:
            check_roles(prompt, self.chat_template or "")
            messages = [message for message in prompt if not isinstance(message, int)]
        tokenizer = self.backend.tokenizer
        return prompt_text(
            messages,
            self.chat_template,
            bos_token=tokenizer.bos_text,
            eos_token=tokenizer.eos_text,
            control_texts=tokenizer.control_texts,
            raw=raw,
        )

    def keep_prefixes(self, store: PrefixStore) -> None:
        """Keep what the cache holds in a store from now on, and go on from what is there."""
        tokenizer = self.backend.tokenizer
        self._kept = PrefixKeeper(store, self.slots, self.scheduler, tokenizer)
        self._kept.begin()

    def ids_of(self, text: str, images: Sequence[Image] = (), *, salt: str = "") -> list[int]:
        """Ids of a prompt's text, with those of a text that a store has where it has most of it."""
        encode = self.shown("", images).encode
        return encode(text) if self._kept is None else self._kept.encode(text, encode, salt)

    @property
    def draws_drafts(self) -> bool:
        """Whether its drafter draws at random where tokens are drawn, unless it must be exact.

        A seed then gives another text than plain decoding's, of the same distribution.
        """
        return self.drafter is not None and self.drafter.draws

    def memory_bytes(self) -> dict[str, int]:
        """Bytes the engines of the model and of its drafter say they allocated, by component."""
        of_drafter: dict[str, int] = self.drafter.memory_bytes() if self.drafter is not None else {}
        return {**self.backend.memory_bytes(), **of_drafter}

    @property
    def draft_failure(self) -> str | None:
        """Why a draft model is not asked any more, or None; a DraftModelWarning said so."""
        return self.drafter.failure if self.drafter is not None else None

    def check(self) -> None:
        """Raise UnsupportedError where it is closed, or was loaded before this process forked."""
        self.scheduler.check()

    def close(self) -> None:
        """Free the model; safe to call twice, and from any thread.

        An unfinished stream ends, wherever it is read: after the step under way its reader gets no
        more chunks, and its result, as far as it goes, says "cancelled". One that still waits for
        its turn, and every later use, raises UnsupportedError. In a fork of the process that loaded
        it nothing is done: the model is the other one's, and what it learned.
        """
        if not self.scheduler.is_of_this_process:
            self.scheduler.is_closed = True
            return
        with self.scheduler.closed():
            if not self._is_freed:
                self._free()

    def _free(self) -> None:
        """Give everything back, whatever fails on the way; what failed is raised at the end."""
        with ExitStack() as stack:
            stack.callback(self._free_backend)
            if self._on_close is not None:
                stack.callback(self._on_close)
                self._on_close = None
            if self._kept is not None:
                stack.callback(self._kept.close)
                self._kept = None

    def _free_backend(self) -> None:
        self.backend.close()
        self._is_freed = True

    def __repr__(self) -> str:
        state = " closed" if self.scheduler.is_closed else ""
        return (
            f"<edgespec.Engine{state}: {self.vocab_size} tokens of vocabulary, "
            f"{self.backend.context_size} of context, {self.users} at once>"
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    # -- details ---------------------------------------------------------------------------

    def begin(self, job: Job) -> None:
        if self.users == 1:
            self._give_up_snapshots(job)
        if self._kept is not None:
            self._kept.put_back(job)
        super().begin(job)

    def end(self, job: Job) -> None:
        if self._kept is not None:
            self._kept.has_ended()

    def _give_up_snapshots(self, job: Job) -> None:
        """Keep none, and with that draft no more, where drafts were not worth what they cost.

        Not where this empties a cache that the prompt goes on from.
        """
        backend, cost = self.backend, self.snapshots_cost
        saved = self.drafter.saved_part if self.drafter is not None else None
        # None while too little is known.
        is_worth_it = saved is None or (1.0 - saved) * cost < NO_DIFFERENCE or cost < NO_DIFFERENCE
        if not isinstance(backend, KeepsSnapshots) or is_worth_it:
            return
        if job.reuse and common_prefix_length(backend.tokens, job.prompt) > 32:
            return  # fewer tokens are read again at once
        backend.keep_snapshots(0)
        self.drafter = None


def _are_ids(prompt: AnyPrompt) -> bool:
    """Whether a prompt is token ids: a moment for 32,000, of which to look at each takes 14 ms."""
    if isinstance(prompt, str):
        return False
    return set(map(type, prompt)) <= {int} or all(isinstance(item, int) for item in prompt)


def _messages_of(prompt: AnyPrompt) -> Sequence[Message | int]:
    """What may be messages of a prompt: nothing of a text and of ids."""
    return () if isinstance(prompt, str) or _are_ids(prompt) else prompt


def sees_images(backend: Backend) -> TypeGuard[SeesImages]:
    """Whether a model was loaded with a projector."""
    return isinstance(backend, SeesImages) and backend.sees_images


class ShownImages:
    """A backend's tokenizer that knows some images by their marks in texts.

    Raises UnsupportedError where there are images and the model sees none, or one is broken.
    """

    def __init__(self, backend: Backend, images: Iterable[Image]) -> None:
        self._tokenizer = backend.tokenizer
        self._pieces: dict[Image, Sequence[Sequence[int] | ImageRun]] = {}
        for image in dict.fromkeys(images):
            if not sees_images(backend):
                raise UnsupportedError(
                    f"this model reads text alone, and the prompt has {image}",
                    hint="--mmproj FILE names the projector of a model that sees or hears",
                )
            self._pieces[image] = backend.image_pieces(image)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of a text; an image has its own, which are negative but for those around it."""
        ids: list[int] = []
        for place, part in enumerate(parts_of(text, self._pieces)):
            if isinstance(part, Image):
                for piece in self._pieces[part]:
                    ids += piece.ids if isinstance(piece, ImageRun) else piece
            elif part or not place:
                ids += self._tokenizer.encode(part, add_special=add_special and not place)
        return ids

    def token_bytes(self, token: int) -> bytes:
        """As of `Tokenizer`; an image has none."""
        return self._tokenizer.token_bytes(token) if token >= 0 else b""

    def places(self, ids: Sequence[int]) -> dict[int, ImageRun]:
        """The runs of cells in a prompt, by where they begin.

        Raises UnsupportedError for ids of other images, and for images that the prompt lacks.
        """
        runs = {
            piece.ids[0]: piece
            for pieces in self._pieces.values()
            for piece in pieces
            if isinstance(piece, ImageRun)
        }
        found: dict[int, ImageRun] = {}
        place = 0 if runs or min(ids, default=0) < 0 else len(ids)
        while place < len(ids):
            if ids[place] >= 0:
                place += 1
                continue
            run = runs.get(ids[place])
            if run is None or tuple(ids[place : place + len(run.ids)]) != run.ids:
                raise UnsupportedError(f"token id {ids[place]} is not in the vocabulary")
            found[place] = run
            place += len(run.ids)
        if {run.image for run in found.values()} != set(self._pieces):
            raise UnsupportedError(
                "an image was given that the prompt does not show",
                hint='make it a part of a message: {"type": "image", "image": ...}',
            )
        if ids and ids[-1] < 0:
            raise UnsupportedError("the prompt ends with an image", hint="put a text behind it")
        return found
