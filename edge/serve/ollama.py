"""`/api/...`, Ollama's interface: from a request to what it wants, and its answers, as lines.

Names of models may end with `:latest`, as its clients write them. What Ollama does to its library
(`/api/pull`, `/api/create`, ...) is not here: `edgespec models` does it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import version
from itertools import chain
from time import monotonic, perf_counter, time
from typing import Any

from edgespec.decode.generation import Chunk, ToolCall, joined_calls
from edgespec.errors import EdgespecError
from edgespec.models.spec import ModelSpec
from edgespec.serve.chat import ChatRequest, answer_job, prompt_of, read_chat
from edgespec.serve.completions import Gap, fill_ids
from edgespec.serve.embeddings import EmbeddingService, Vectors, parse_vectors
from edgespec.serve.parsing import Fields, ServedModel
from edgespec.serve.pool import EMBED, Member, Pool
from edgespec.serve.serializers import Choice, Delta, Serializer, json_bytes
from edgespec.serve.service import AnswerJob, Service, Underway
from edgespec.serve.tool_formats import HARMONY, format_of, think_tags

# The interface's, and not this program's: clients refuse to talk to what is too old for them.
_VERSION = "0.13.0"
_FAR_S = 3.2e9  # a century: a model that stays has no time at which it leaves
_NOT_THERE = {
    "template": "send a whole prompt, with raw",
    "context": "send the conversation to /api/chat",
    **dict.fromkeys(("width", "height", "steps"), "answers are text"),
}
Prompt = tuple[ChatRequest, Gap, bool]


def read_talk(fields: Fields, setup: ServedModel) -> Prompt | None:
    """What `/api/chat` is asked for; None where the model alone is to be loaded. Raises ApiError.

    That is what a request without messages asks for.
    """
    if messages := fields.list("messages", setup.limits.messages):
        return _read(fields, setup, messages), Gap("", ""), False
    fields.take()
    return None


def read_prompt(fields: Fields, setup: ServedModel) -> Prompt | None:
    """What `/api/generate` is asked for; None where there is no prompt, as above.

    A prompt to be answered; or where it is raw, as the last value says, or has a text behind it, to
    be continued.
    """
    prompt, suffix = fields.text("prompt", ""), fields.text("suffix", "")
    raw, system = fields.flag("raw"), fields.text("system", "")
    images = fields.pop("images")
    if system and (raw or suffix):
        fields.refuse("system", "has no place in a prompt that is raw, or has a suffix")
    told = [{"role": "system", "content": system}] if system else []
    told.append({"role": "user", "content": prompt, "images": images})
    asked = _read(fields, setup, told)
    return (asked, Gap(prompt, suffix), raw) if prompt or suffix or images else None


def _read(fields: Fields, setup: ServedModel, messages: Sequence[Any]) -> ChatRequest:
    fields.refuse_set(_NOT_THERE)
    options = fields.object("options").take()
    return read_chat(fields.within(as_chat(fields.take(), options, messages)), setup)


def as_chat(
    body: Mapping[str, Any], options: Mapping[str, Any], messages: Sequence[Any]
) -> dict[str, Any]:
    """The chat that a request stands for; what is wrong in it stays, for the chat's reader."""
    most, form = options.get("num_predict"), body.get("format", "")
    if form == "json":
        form = {"type": "json_object"}
    elif form != "":
        form = {"type": "json_schema", "schema": form}
    return {
        **{name: value for name, value in options.items() if name != "num_predict"},
        "stream": True,
        **{name: value for name, value in body.items() if name != "format"},
        "messages": [*map(_message, messages)],
        "max_tokens": -1 if isinstance(most, int) and most < 0 else most,
        "response_format": form or None,
        "n": None,
    }


def _message(message: Any) -> Any:
    """One as a chat has it, whose images are parts of its content."""
    if not isinstance(message, dict):
        return message
    made = {name: value for name, value in message.items() if name != "tool_name"}
    made["name"] = message.get("tool_name")
    if isinstance(images := message.get("images"), list):
        parts = [{"type": "image", "source": {"type": "base64", "data": one}} for one in images]
        text = {"type": "text", "text": message.get("content")}
        made |= {"content": [*parts, text], "images": None}
    return made


# -- what is answered ----------------------------------------------------------------------


def prepare(
    service: Service, found: Prompt | None, request: Underway, *, is_chat: bool
) -> AnswerJob | dict[str, Any]:
    """The next message of a conversation, an answer to a prompt, or its continuation.

    Raises ApiError, and as `Engine.stream`.
    """
    serializer = OllamaSerializer(service, request.began_s, is_chat=is_chat)
    if found is None:  # who asked for the model alone
        leaves = request.keep_alive_s == 0 and not request.member.is_pinned
        why = "unload" if leaves else "load"
        return {**serializer.part(Delta()), "done": True, "done_reason": why}
    asked, gap, raw = found
    has_format = is_chat or service.prompts.template(with_tools=False) is not None
    if has_format and not raw and not gap.suffix:
        talk, ids = prompt_of(service, asked)
        return answer_job(service, asked, talk, ids, serializer, request)
    service.prompts.check_length(gap.prefix, gap.suffix, param="prompt")
    if gap.suffix:
        ids = fill_ids(service.engine.backend.tokenizer, gap, None, "suffix")[0]
    else:
        ids = service.engine.encode(gap.prefix, raw=True)
    made = service.generations(request, "", ids, asked.options, 1)
    return AnswerJob(made, serializer, asked.streams, writes=asked.writes)


class OllamaSerializer(Serializer):
    """The answer to one request. Calls come whole, times are in nanoseconds.

    Args:
        began_s: when its request came, by `perf_counter`.
        is_chat: its parts are messages, else texts.
    """

    names_events = True

    def __init__(self, service: Service, began_s: float, *, is_chat: bool) -> None:
        self._model, self._tokens = service.setup.names[0], service.told_tokens
        self._began_s, self._is_chat = began_s, is_chat
        self._load_s = perf_counter() - began_s  # the wait for a model, if there was one
        self._begun: tuple[ToolCall, ...] = ()  # whose arguments are being written

    def add(self, index: int, delta: Delta, chunks: Sequence[Chunk]) -> list[dict[str, Any]]:
        self._begun = joined_calls([*self._begun, *delta.calls])
        over = tuple(one for one in self._begun if not one.is_open)
        self._begun = tuple(one for one in self._begun if one.is_open)
        told = self._tokens.entries([one for chunk in chunks for one in chunk.logprobs])
        part = Delta(delta.content, delta.reasoning, over)
        return [self.part(part, told)] if part or told else []

    def end(self, choice: Choice) -> list[dict[str, Any]]:
        return [self._final(choice, Delta())]

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        one = choices[0]
        part = Delta(one.content, one.reasoning, one.calls)
        return self._final(one, part, self._tokens.entries(one.result.logprobs))

    def part(self, delta: Delta, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
        told: dict[str, Any] = {"thinking": delta.reasoning} if delta.reasoning else {}
        if calls := [one for one in delta.calls if one.is_whole]:
            named = [{"name": one.name, "arguments": json.loads(one.arguments)} for one in calls]
            told["tool_calls"] = [{"function": function} for function in named]
        head = {"model": self._model, "created_at": _time(time())}
        if self._is_chat:
            told = {"message": {"role": "assistant", "content": delta.content, **told}}
        else:
            told = {"response": delta.content, **told}
        return {**head, **told, "done": False, **({"logprobs": logprobs} if logprobs else {})}

    def _final(self, choice: Choice, delta: Delta, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
        reason, counters = choice.reason, choice.result.counters
        return {
            **self.part(delta, logprobs),
            "done": True,
            "done_reason": "length" if reason == "length" else "stop",
            "total_duration": _ns(perf_counter() - self._began_s),
            "load_duration": _ns(self._load_s),
            "prompt_eval_count": counters.prompt_tokens,
            "prompt_eval_duration": _ns(counters.prompt_s),
            "eval_count": counters.generated_tokens,
            "eval_duration": _ns(counters.decode_s),
        }


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


# -- embeddings ----------------------------------------------------------------------------


def embed(service: EmbeddingService, asked: Vectors, request: Underway) -> Iterator[bytes]:
    """Vectors of texts; of a `prompt`, as `/api/embeddings` has it, the only one.

    The answer in pieces. Raises ApiError, and as `Embedder.embed`.
    """
    load_s = perf_counter() - request.began_s
    made = service.vectors(asked, request)
    rows = made.rows.astype("<f4")
    if asked.form == "prompt":
        return iter([json_bytes({"embedding": rows[0].tolist()})])
    told = {"model": service.name, "total_duration": _ns(perf_counter() - request.began_s)}
    told |= {"load_duration": _ns(load_s), "prompt_eval_count": sum(made.num_tokens)}
    vectors = (b","[:index] + json_bytes(row.tolist()) for index, row in enumerate(rows))
    return chain([b'{"embeddings":['], vectors, [b"]," + json_bytes(told)[1:]])


def read_embed(fields: Fields, _setup: ServedModel) -> Vectors:
    """Texts, of the field that names the form of the answer."""
    fields.ignore("options")
    form = "prompt" if "prompt" in fields else "input"
    return parse_vectors(fields, form, form, truncate=True)


# -- the models that there are -------------------------------------------------------------


def versions(_pool: Pool, _member: Member) -> dict[str, str]:
    """The version of the interface, and this program's."""
    return {"version": _VERSION, "edgespec": version("edgespec")}


def tags(pool: Pool, _member: Member) -> dict[str, Any]:
    return {"models": [_card(one, pool) for one in pool.members]}


def running(pool: Pool, _member: Member) -> dict[str, Any]:
    """The models that are loaded, what they take, and until when they stay."""
    models = []
    for one in pool.members:
        if one.loaded is not None:
            idle_s = monotonic() - one.idle_since_s if one.is_idle else 0.0
            until_s = time() + min(one.lives_s - idle_s, _FAR_S)
            gpu = sum(size for name, size in (one.model.sizes or {}).items() if "gpu" in name)
            models.append({**_card(one, pool), "expires_at": _time(until_s), "size": one.nbytes})
            models[-1] |= {"size_vram": gpu, "context_length": one.model.about["context_length"]}
    return {"models": models}


def show(pool: Pool, member: Member, document: Any) -> dict[str, Any]:
    """What a model is, can do, and how its answers are picked. Raises ApiError."""
    Fields(document)  # an object
    spec, sampling = _spec_of(member), member.model.setup.defaults.sampling
    template, info = "", dict[str, Any]()
    if spec is not None:
        of_arch = {
            "context_length": spec.context_length,
            "embedding_length": spec.embedding_size,
            "block_count": spec.num_layers,
            "attention.head_count": max(spec.num_heads, default=0),
            "attention.head_count_kv": max(spec.num_kv_heads, default=0),
        }
        info = {"general.architecture": spec.arch, "general.parameter_count": spec.num_parameters}
        info |= {f"{spec.arch}.{name}": value for name, value in of_arch.items()}
        template = spec.chat_template or ""
    can = ["embedding" if member.model.kind == EMBED else "completion"]
    if template:  # one that knows no tools is told of them in a message
        formats = [format_of(template)]
        thinks = HARMONY in formats or think_tags(template, formats).closing in template
        can += ["tools", *(["thinking"] if thinks else [])]
    can += [name for name, has in member.model.about.get("modalities", {}).items() if has]
    named = ("temperature", "top_k", "top_p", "min_p")
    return {
        "modelfile": f"FROM {member.name}\n",
        "parameters": "\n".join(f"{name} {getattr(sampling, name)}" for name in named),
        "template": template,
        "model_info": info,
        "capabilities": can,
        **{name: _card(member, pool)[name] for name in ("details", "modified_at")},
    }


def _spec_of(member: Member) -> ModelSpec | None:
    """What a model's file says; None for a broken one, which its load will tell."""
    spec: ModelSpec | None = None
    with suppress(EdgespecError):
        spec = member.model.spec
    return spec


def _card(member: Member, pool: Pool) -> dict[str, Any]:
    """A model of a list. Its digest is its fingerprint, which copies of the file share."""
    spec, details = _spec_of(member), dict[str, Any]()
    made_s, size, digest = float(pool.shared.started_s), member.nbytes, ""
    if spec is not None:
        count = spec.num_parameters
        said = f"{count / 1e9:.3g}B" if count >= 1e9 else f"{count / 1e6:.4g}M"
        details = {"format": spec.format, "family": spec.arch, "families": [spec.arch]}
        details |= {"parameter_size": said, "quantization_level": spec.file_type}
        made_s, size, digest = spec.path.stat().st_mtime, spec.file_bytes, spec.fingerprint
    told = {"name": member.name, "model": member.name, "modified_at": _time(made_s), "size": size}
    return {**told, "digest": digest, "details": details}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")
