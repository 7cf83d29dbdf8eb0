"""A conversation: messages that are kept, and a cache that is not computed twice.

A new turn prefills only what is new: `edgespec.decode.session` has the ids of what was said. So
`engine.generate(turn.prompt_ids)` is the turn computed from scratch, and with settings of
`--exact` it gives the same tokens.

When the context is full, the oldest turns are hidden from the model, whole, until half of it is
free, so that the shortened conversation is prefilled seldom. The system message stays.
"""

from __future__ import annotations

import base64
import os
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from edgespec.backends.base import KeepsCache, Tokenizer, sequences_of
from edgespec.decode.engine import Engine, ShownImages
from edgespec.decode.generation import Chunk, PartReader, Result, Stream, chunks_of
from edgespec.decode.options import GenerationOptions, Tool
from edgespec.errors import BackendError, ContextFullError, SessionFileError, UnsupportedError
from edgespec.memory.store.cells import read_session, write_session
from edgespec.models.chat import ChatMessage, Message, plain_message
from edgespec.models.images import (
    images_of,
    of_base64,
    parts_of,
    read_image,
    shown_in,
    with_parts,
)
from edgespec.prefix import common_prefix_length
from edgespec.sampling.params import SamplingParams

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from edgespec.decode.options import GenerationKeywords


Content: TypeAlias = str | Sequence[Mapping[str, Any]]
_FORMAT = 1  # of the document in a session file


class Session:
    """A conversation with one engine. Not to be used from two threads at once.

    Args:
        system: the system message; None leaves it to the model's chat format.
        messages: what was said before, as `{"role": ..., "content": ...}`.
        sampling, max_tokens, stop, tools: as in `Engine.stream`, for every turn; they may be
            changed between turns. Files of sessions have no tools.
        shift: False refuses a turn for which the context is too short, with ContextFullError,
            where True hides the oldest turns from the model.

    Raises UnsupportedError when the model has no chat format.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        system: str | None = None,
        messages: Sequence[ChatMessage] = (),
        sampling: SamplingParams | None = None,
        max_tokens: int = 512,
        stop: Sequence[str] = (),
        tools: Sequence[Tool] = (),
        shift: bool = True,
    ) -> None:
        if engine.chat_template is None:
            raise UnsupportedError(
                "this model has no chat format, so it cannot hold a conversation",
                hint="use Engine.generate, or `edgespec run`",
            )
        self.engine = engine
        self.system = system
        self.sampling = sampling or SamplingParams()
        self.max_tokens = max_tokens
        self.stop = tuple(stop)
        self.tools = tuple(tools)
        self.shift = shift
        self._images = {image.digest: image for image in images_of(messages)}
        self._messages = [plain_message(message) for message in messages]
        if self._messages and self._messages[0]["role"] == "system" and system is None:
            self.system = self._messages.pop(0)["content"]
        self._hidden = 0  # messages that the model does not see any more
        self._known = KnownText()
        self._encoded: tuple[str, list[int]] | None = None  # the last prompt: it may come again

    # -- what was said ---------------------------------------------------------------------

    @property
    def messages(self) -> list[ChatMessage]:
        """All messages, the system message first; a copy. Those with images have parts."""
        images = self._images.values()
        said = [*self._system_message(), *(with_parts(one, images) for one in self._messages)]
        return cast("list[ChatMessage]", said)

    @property
    def hidden_turns(self) -> int:
        """Turns that were dropped from the model's view because the context was full."""
        return sum(message["role"] == "user" for message in self._messages[: self._hidden])

    @property
    def used_tokens(self) -> int:
        """Tokens of the context that the conversation takes."""
        return len(self._known.ids)

    def undo(self) -> str:
        """Take the last user message and its answer back; returns the message's text.

        Raises UnsupportedError when there is none.
        """
        cut = parts_of(self._take_back(), self._images.values())
        return "".join(part for part in cut if isinstance(part, str))

    def _take_back(self) -> str:
        """As `undo`, with marks of images in the text that is returned."""
        places = [i for i, message in enumerate(self._messages) if message["role"] == "user"]
        if not places:
            raise UnsupportedError("there is nothing to take back", hint="say something first")
        text = self._messages[places[-1]]["content"]
        del self._messages[places[-1] :]
        if self._hidden >= len(self._messages):
            self._hidden = 0
        return str(text)

    def clear(self) -> None:
        """Forget all messages but the system message."""
        self._messages.clear()
        self._hidden = 0

    # -- turns -----------------------------------------------------------------------------

    def stream(
        self,
        content: Content,
        **changes: Unpack[GenerationKeywords],
    ) -> Turn:
        """Say something and get the answer chunk by chunk.

        Message and answer join the conversation when the answer ends, also by cancelling; a turn
        that fails, or ends before its first token, changes nothing.

        Args:
            content: text, or a list of `{"type": "text", "text": ...}` and of images, as
                `{"type": "image", "image": "photo.jpg"}`. After calls of tools, the list of their
                results: `call.result(value)`, or OpenAI's messages of the role "tool".
            changes: fields of `GenerationOptions`, in place of those of the session.

        Raises as `Engine.stream`.
        """
        said = self._said(content)
        self._images |= {image.digest: image for image in images_of(said)}
        plain = [plain_message(one) for one in said]
        options = GenerationOptions(
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            stop=self.stop,
            tools=self.tools,
            reuse=True,
        )
        asked = GenerationOptions.of(options, **changes)
        prompt = self._fit([*self._messages, *plain], asked)
        reader = None if prompt.make_reader is None else prompt.make_reader()
        stream = self.engine.continued(prompt.ids, prompt.options, reader)
        return Turn(self, stream, plain, prompt)

    def prepare(self, content: Content = "", *, cancel: threading.Event | None = None) -> int:
        """Read what is going to be said, as far as it is known; how many tokens were read.

        Behind an answer, without `content`, what the chat format puts before the next message. The
        conversation does not change. `cancel` stops it after a small piece, and what was read
        stays. Raises as `Engine.stream`.
        """
        if not self.engine.goes_back:
            return 0
        said, hidden, images = self._said(content), self._hidden, self._images
        options = GenerationOptions(
            max_tokens=1, tools=self.tools, reuse=True, ahead=True, cancel=cancel
        )
        try:
            self._images = images | {image.digest: image for image in images_of(said)}
            prompt = self._fit([*self._messages, *map(plain_message, said)], options)
        finally:
            self._hidden, self._images = hidden, images
        return self.engine.read(self.engine.continued(prompt.ids, prompt.options))

    def _said(self, content: Content) -> list[Message]:
        """The messages of a turn: the user's, or the results of all calls that were made."""
        parts = () if isinstance(content, str) or not isinstance(content, Sequence) else content
        results = [one for one in parts if isinstance(one, Mapping) and "role" in one]
        if not results:
            return [{"role": "user", "content": content}]
        last = self._messages[-1] if self._messages else {}
        made = [str(call.get("id")) for call in last.get("tool_calls", ())]
        given = [str(one.get("tool_call_id")) for one in results if one["role"] == "tool"]
        if not len(results) == len(given) == len(parts):
            raise UnsupportedError(
                "the messages of a turn are results of tools, and nothing else",
                hint='send a text, or [{"role": "tool", "tool_call_id": ..., "content": ...}]',
            )
        if sorted(given) != sorted(made):
            raise UnsupportedError(
                f"the results are those of {', '.join(given)[:200]}, and the calls that were made "
                f"are {', '.join(made) or 'none'}",
                hint="send one result of each call of the last answer: call.result(value)",
            )
        return results

    def send(self, content: Content, **changes: Unpack[GenerationKeywords]) -> Result:
        """Say something and get the whole answer. Arguments as in `stream`."""
        turn = self.stream(content, **changes)
        for _ in turn:
            pass
        return turn.result

    def retry(self, content: Content | None = None, **changes: Unpack[GenerationKeywords]) -> Turn:
        """Answer the last user message again, or `content` in its place.

        The old turn is gone when the new one ends, and stays when that fails.
        """
        messages, hidden = list(self._messages), self._hidden
        try:
            last = self._take_back()
            turn = self.stream(last if content is None else content, **changes)
            turn.replaced = len(messages) - len(self._messages)
        finally:
            self._messages, self._hidden = messages, hidden
        turn.num_before = len(messages)
        return turn

    def moved_to(self, engine: Engine) -> Session:
        """The same conversation with another engine."""
        session = Session(
            engine,
            system=self.system,
            messages=self.messages[len(self._system_message()) :],
            sampling=self.sampling,
            max_tokens=self.max_tokens,
            stop=self.stop,
            tools=self.tools,
            shift=self.shift,
        )
        session._hidden = self._hidden
        return session

    def astream(
        self, content: Content, **changes: Unpack[GenerationKeywords]
    ) -> AsyncGenerator[Chunk, None]:
        """`stream` for asynchronous code: the event loop goes on while the model computes."""
        return chunks_of(self.stream(content, **changes))

    async def asend(self, content: Content, **changes: Unpack[GenerationKeywords]) -> Result:
        """`send` for asynchronous code."""
        turn = self.stream(content, **changes)
        async for _ in chunks_of(turn):
            pass
        return turn.result

    # -- files -----------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], *, cache: bool = True) -> None:
        """Write the conversation, its settings and, where the backend can, its cache.

        The file is replaced as a whole or not at all. Raises SessionFileError.
        """
        with self.engine.scheduler.exclusive():
            backend = max(
                sequences_of(self.engine.backend),
                key=lambda one: common_prefix_length(one.tokens, self._known.ids),
            )
            ids = list(backend.tokens[: backend.length - backend.pending])
            keeps = cache and bool(self.engine.cache_key) and isinstance(backend, KeepsCache)
            keeps = keeps and common_prefix_length(ids, self._known.ids) > 0
            kept, write = None, None
            if keeps and isinstance(backend, KeepsCache):
                kept = {"key": self.engine.cache_key, "token_ids": ids}
                kept["images"], write = list(backend.images), backend.save_cache
            write_session(Path(path), {**self._document(), "cache": kept}, write)

    @classmethod
    def load(cls, engine: Engine, path: str | os.PathLike[str]) -> Session:
        """The conversation of a file, with its cache where model and settings are the same.

        Raises SessionFileError for a file that is missing, damaged, or no session.
        """
        document, cache_bytes = read_session(Path(path))
        session = cls._from_document(engine, document, Path(path))
        cache = document.get("cache")
        if cache_bytes and isinstance(cache, dict) and cache.get("key") == engine.cache_key:
            session._load_cache(Path(path), cache.get("token_ids"), cache.get("images", []))
        return session

    def _document(self) -> dict[str, Any]:
        sampling = asdict(replace(self.sampling, seed=None))
        if self.sampling.seed is not None:
            sampling["seed"] = self.sampling.seed
        return {
            "format": _FORMAT,
            "system": self.system,
            "messages": self._messages,
            "hidden": self._hidden,
            "sampling": sampling,
            "max_tokens": self.max_tokens,
            "stop": list(self.stop),
            "shift": self.shift,
            "known": asdict(self._known),
            "images": [base64.b64encode(one.data).decode() for one in self._images.values()],
        }

    @classmethod
    def _from_document(cls, engine: Engine, document: dict[str, Any], path: Path) -> Session:
        if document.get("format") != _FORMAT:
            raise SessionFileError(
                f"{path} has format {document.get('format')}, this version reads {_FORMAT}"
            )
        try:
            names = {field.name for field in fields(SamplingParams)}
            values = {k: v for k, v in document["sampling"].items() if k in names}
            values["logit_bias"] = tuple(map(tuple, values.get("logit_bias", ())))
            known = document["known"]
            session = cls(
                engine,
                system=document["system"],
                sampling=SamplingParams(**values),
                max_tokens=int(document["max_tokens"]),
                stop=[str(text) for text in document["stop"]],
                shift=bool(document["shift"]),
            )
            images = [read_image(of_base64(one)) for one in document.get("images", ())]
            session._images = {image.digest: image for image in images}
            session._messages = [plain_message(message) for message in document["messages"]]
            session._hidden = min(max(0, int(document["hidden"])), len(session._messages))
            if document.get("cache") and document["cache"]["key"] == engine.cache_key:
                places = [(int(chars), int(ids)) for chars, ids in known["places"]]
                session._known = KnownText(str(known["text"]), list(map(int, known["ids"])), places)
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            if isinstance(problem, UnsupportedError) and "chat format" in str(problem):
                raise
            raise SessionFileError(f"{path} is damaged: {problem}") from problem
        return session

    def _load_cache(self, path: Path, ids: Any, images: Any) -> None:
        if not isinstance(ids, list) or not isinstance(images, list):
            return
        with self.engine.scheduler.exclusive():
            backend = self.engine.slots.spare(len(ids))
            if not isinstance(backend, KeepsCache):
                return
            are_ids = all(isinstance(one, int) for one in ids)
            if 0 < len(ids) <= backend.context_size and are_ids and _are_cells(images, ids):
                try:
                    backend.load_cache(str(path), ids, images)
                except BackendError:
                    backend.truncate(0)  # it is computed again

    # -- prompts ---------------------------------------------------------------------------

    def _system_message(self) -> list[dict[str, Any]]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def _fit(self, messages: list[dict[str, Any]], asked: GenerationOptions) -> _Prompt:
        """The prompt, with as many messages hidden as it takes for it to fit."""
        size = self.engine.backend.context_size
        room = min(self.max_tokens, size // 4)  # that an answer should have
        prompt = self._encode(messages, self._hidden, asked)
        if len(prompt.ids) + room <= size:
            return prompt
        if not self.shift:
            raise ContextFullError(
                f"the conversation takes {len(prompt.ids)} of {size} tokens, which leaves too few "
                "for an answer",
                hint="raise --ctx, start anew, or let the oldest turns be dropped",
            )
        for start, message in enumerate(messages):
            if message["role"] == "user" and start > self._hidden:
                prompt = self._encode(messages, start, asked)
                if len(prompt.ids) <= size // 2:
                    break
        return prompt

    def _encode(
        self, messages: list[dict[str, Any]], hidden: int, asked: GenerationOptions
    ) -> _Prompt:
        """The prompt without the hidden messages; known ids where the text is the same."""
        engine, make_reader = self.engine, None
        said = [*self._system_message(), *messages[hidden:]]
        if engine.uses_tools(said, asked):
            found = engine.with_tools(said, asked)
            text, asked, make_reader = found.text, found.options, found.make_reader
        else:
            text = engine.prompt_text(said)
        images = shown_in(text, self._images.values())
        if self._encoded is None or text != self._encoded[0]:
            anew = partial(engine.ids_of, images=images, salt=asked.cache_salt)
            ids = self._known.encode(text, engine.shown("", images), anew)
            self._encoded = text, engine.encode(ids, images=images)
        ids = [*self._encoded[1]]
        asked = replace(asked, images=(*asked.images, *images))
        return _Prompt(text, ids, hidden, asked, make_reader)

    def _end_turn(self, turn: Turn) -> None:
        """Take message and answer into the conversation."""
        result = turn.result
        if not result.token_ids:
            return
        if turn.replaced:
            del self._messages[-turn.replaced :]
        self._messages += [*turn.said, plain_message(result.message)]
        self._hidden = turn.prompt.hidden
        tokenizer = self.engine.backend.tokenizer
        self._known.learn(
            turn.prompt.text, turn.prompt_ids, turn.written, result.token_ids, tokenizer
        )


class _Prompt(NamedTuple):
    """What the model is asked in a turn, how, and what finds calls in its answer."""

    text: str
    ids: list[int]
    hidden: int  # messages before it that the model does not see
    options: GenerationOptions
    make_reader: Callable[[], PartReader] | None


def _are_cells(images: list[Any], ids: list[int]) -> bool:
    """Whether images of a file are the runs of negative ids in it, each with its positions."""
    shown = [place for place, one in enumerate(ids) if one < 0]
    try:
        if sum(count for _, count, _ in images) != len(shown):
            return False
        takes = all(0 < positions <= count <= len(shown) for _, count, positions in images)
        cells = (range(first, first + count) for first, count, _ in images)
        return takes and [place for one in cells for place in one] == shown
    except (TypeError, ValueError):
        return False


class Turn:
    """One answer in a session: chunks to iterate over, then a `result`.

    `prompt_ids` is what the model was asked. `dropped_turns` counts the turns that were hidden from
    the model for this one. `replaced` counts the messages it takes the place of, `num_before` those
    there were.
    """

    def __init__(
        self, session: Session, stream: Stream, said: list[dict[str, Any]], prompt: _Prompt
    ) -> None:
        self.said = said
        self.prompt = prompt
        self.prompt_ids, self.seed = stream.prompt_ids, stream.seed
        self.replaced = 0
        self._session = session
        self._stream = stream
        self.num_before = len(session._messages)
        self._ended = False
        before = session.hidden_turns
        shown = session._messages[: prompt.hidden]
        self.dropped_turns = sum(message["role"] == "user" for message in shown) - before

    @property
    def written(self) -> str:
        return self._stream.written

    @property
    def num_read(self) -> tuple[int, int]:
        return self._stream.num_read

    @property
    def result(self) -> Result:
        """The answer so far."""
        return self._stream.result

    def __iter__(self) -> Iterator[Chunk]:
        if len(self._session._messages) != self.num_before and not self._ended:
            raise UnsupportedError(
                "the conversation went on since this turn was made", hint="make a new one"
            )
        failed = False
        try:
            yield from self._stream
        except Exception:
            failed = True
            raise
        finally:
            if not failed and not self._ended:
                self._ended = True
                self._session._end_turn(self)

    def close(self) -> None:
        """Stop; see `Stream.close`."""
        self._stream.close()


@dataclass(slots=True)
class KnownText:
    """A text, its ids, and the places at which both may be cut."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    # (characters, ids), ascending; at the ends of prompts and answers
    places: list[tuple[int, int]] = field(default_factory=list)

    def encode(
        self,
        text: str,
        tokenizer: Tokenizer | ShownImages,
        anew: Callable[[str], list[int]],
    ) -> list[int]:
        """Ids of a prompt's text: known ones where it is the same, `anew` where none of it is."""
        common = common_prefix_length(self.text, text)
        places = [place for place in self.places if place[0] <= common]
        chars, count = places[-1] if places else (0, 0)
        ids = self.ids[:count]
        rest = tokenizer.encode(text[chars:], add_special=False) if chars else []
        if chars and (not rest or tokenizer.token_bytes(rest[0]) == b""):
            return [*ids, *rest]  # text is cut alike on both sides of a control token
        return anew(text)

    def learn(
        self,
        text: str,
        prompt_ids: Sequence[int],
        answer: str,
        answer_ids: Sequence[int],
        tokenizer: Tokenizer,
    ) -> None:
        """Keep the ids of a prompt's text and of what the model answered."""
        self._cut(common_prefix_length(self.text, text))
        while self.ids != list(prompt_ids[: len(self.ids)]):  # this prompt was encoded anew
            self._cut(len(self.text) - 1)
        self._add(text[len(self.text) :], prompt_ids[len(self.ids) :])
        ids = [token for token in answer_ids if not tokenizer.is_end(token)]
        pieces = [(tokenizer.token_bytes(token), token) for token in ids]
        plain = b"".join(data for data, _ in pieces).decode(errors="replace")
        named = b"".join(data or tokenizer.token_text(token).encode() for data, token in pieces)
        if answer in (plain, named.decode(errors="replace")):
            self._add(answer, ids)

    def _cut(self, num_chars: int) -> None:
        """Forget what goes beyond a common text of `num_chars`."""
        while self.places and self.places[-1][0] > num_chars:
            self.places.pop()
        chars, ids = self.places[-1] if self.places else (0, 0)
        self.text, self.ids = self.text[:chars], self.ids[:ids]

    def _add(self, text: str, ids: Sequence[int]) -> None:
        self.text += text
        self.ids += ids
        self.places.append((len(self.text), len(self.ids)))
