"""From the bytes of a request to values that are safe to use: bodies, fields, limits, errors.

Fields of a JSON object are taken one by one. What nobody took changes no answer: it is ignored, and
the log names it once. Fields that ask for what is not there are refused by the request that they
are of. Everything beyond a limit is refused, with the number in it.

How tokens are picked, and what the answer has to look like, is said by the same fields in all
interfaces: `response_format` is OpenAI's, `structured_outputs` vLLM's, `json_schema` and
`grammar` llama.cpp's. What can be compiled is for the grammar engine to say.
"""

from __future__ import annotations

import json
import logging
import math
import re
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NoReturn

from edgespec.decode.options import GenerationOptions
from edgespec.errors import (
    BackendError,
    ContextFullError,
    EdgespecError,
    ModelFileError,
    UnsupportedError,
)
from edgespec.log import REQUEST_ID, places_of
from edgespec.memory.bytes import projector, requests
from edgespec.models.adapter import MOST_SCALE
from edgespec.option_fields import options_of, shown_number
from edgespec.sampling.params import FIELD_NAMES, LARGE, SAMPLER_WORDS, SamplingParams

LOGGER = logging.getLogger("edgespec.serve")

COME_AGAIN = (429, 503, 529)  # answers with these say when
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_supported_error",
    503: "overloaded_error",
}
_ANTHROPIC = ("/v1/messages/", "/messages/")  # at and below these errors have their form
OLLAMA = "/api/"  # below it errors have Ollama's form, and streams are lines
_ANTHROPIC_KINDS = {413: "request_too_large", 500: "api_error", 501: "api_error"}  # others alike


class ApiError(Exception):
    """A request that is not answered.

    Args:
        message: one sentence.
        param: the field that is wrong, as the client wrote it.
        code: a word that programs may compare.
        more: numbers that programs may read.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        more: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.more = status, param, code, more


def openai_error(problem: ApiError) -> dict[str, Any]:
    """The error object of OpenAI's interface."""
    kind = _KINDS.get(problem.status, "invalid_request_error")
    error = {"message": str(problem), "type": kind, "param": problem.param, "code": problem.code}
    return {"error": {**error, **problem.more}}


def anthropic_error(problem: ApiError) -> dict[str, Any]:
    """The error object of Anthropic's interface; it has what OpenAI's has as well."""
    error = openai_error(problem)["error"]
    kind = _ANTHROPIC_KINDS.get(problem.status, error["type"])
    return {"type": "error", "error": {**error, "type": kind}}


def error_form(path: str) -> Callable[[ApiError], dict[str, Any]]:
    """How errors are told at a path."""
    if path.startswith(OLLAMA):
        return lambda problem: {"error": str(problem)}
    return anthropic_error if f"{path}/".startswith(_ANTHROPIC) else openai_error


def api_error_of(problem: Exception, param: str | None = None) -> ApiError:
    """What a client is told of a failure. What is not the client's to mend has the status 500."""
    if isinstance(problem, ApiError):
        return problem
    if not isinstance(problem, EdgespecError):
        return _failed(problem, type(problem).__name__)
    hint = f" ({problem.hint})" if problem.hint else ""
    message = f"{problem}{hint}"
    if isinstance(problem, ContextFullError):
        return ApiError(message, param=param, code="context_length_exceeded")
    if isinstance(problem, UnsupportedError | ModelFileError):  # a template fails on its messages
        return ApiError(message, param=param)
    known = str(problem) if isinstance(problem, BackendError) else type(problem).__name__
    return _failed(problem, known)


def _failed(problem: Exception, known: str) -> ApiError:
    """Log a failure of the server, and name the request by which it is found in the log."""
    request_id = REQUEST_ID.get()
    LOGGER.error("%s failed: %s\n%s", request_id or "a request", known, places_of(problem))
    where = f" (request {request_id})" if request_id else ""
    return ApiError(f"the server failed: {known}{where}", status=500)


_SHOWN_CHARS = 40
_CACHE = "cache_control"
_MOST_NAMES = 256  # that the log is told of, while the process runs
_NAMED: set[str] = set()
_LOCK = threading.Lock()


class Fields:
    """An object of a request.

    A field that is null counts as left out, and so does `cache_control` wherever it stands: the
    cache is reused without being asked. Every method takes one field and raises ApiError for a
    value that cannot be. Who reads a request ends it; objects within it end with what they are in.

    Args:
        value: what was sent in its place.
        path: its own name, for messages; "" for the whole request.
    """

    def __init__(self, value: Any, path: str = "") -> None:
        if not isinstance(value, dict):
            raise ApiError(
                f"{path or 'the body'} must be an object, not {shown(value)}", param=path
            )
        self.path = path
        self._inner: list[Fields] = []
        self._left = {
            name: item for name, item in value.items() if item is not None and name != _CACHE
        }

    def name(self, field: str) -> str:
        """The whole name of a field."""
        return f"{self.path}.{field}" if self.path else field

    def __contains__(self, field: str) -> bool:
        return field in self._left

    def peek(self, field: str) -> Any:
        """A field, whatever it is; it stays."""
        return self._left.get(field)

    def pop(self, field: str, default: Any = None) -> Any:
        """A field, whatever it is, which is gone then."""
        return self._left.pop(field, default)

    def text(self, field: str, default: str | None = None) -> str:
        """A text; it has to be there where there is no default."""
        value = self.pop(field, default)
        if value is None:
            self.refuse(field, "is missing", code="missing_required_parameter")
        if not isinstance(value, str):
            self.refuse(field, f"must be a text, not {shown(value)}")
        return value

    def number(self, field: str, default: float, low: float, high: float) -> float:
        value = self.pop(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(field, f"must be a number, not {shown(value)}")
        if not low <= value <= high:
            self.refuse(
                field, f"must be {shown_number(low)} to {shown_number(high)}, not {shown(value)}"
            )
        return float(value)

    def whole(self, field: str, default: int, low: int, high: int) -> int:
        value = self.pop(field, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(field, f"must be a whole number, not {shown(value)}")
        if not low <= value <= high:
            self.refuse(field, f"must be {low} to {high}, not {shown(value)}")
        return value

    def flag(self, field: str, default: bool = False) -> bool:
        value = self.pop(field, default)
        if not isinstance(value, bool):
            self.refuse(field, f"must be true or false, not {shown(value)}")
        return value

    def list(self, field: str, most: int) -> list[Any]:
        value = self.pop(field, [])
        if not isinstance(value, list):
            self.refuse(field, f"must be a list, not {shown(value)}")
        if len(value) > most:
            self.refuse(field, f"has {len(value)} items, and at most {most} are taken")
        return value

    def object(self, field: str) -> Fields:
        """An object; an empty one where there is none."""
        return self.within(self.pop(field, {}), self.name(field))

    def objects(self, field: str, most: int) -> Iterator[Fields]:
        """The objects of a list of at most `most`, one at a time: each ends when the next comes."""
        for index, value in enumerate(self.list(field, most)):
            yield (one := Fields(value, f"{self.name(field)}[{index}]"))
            one.end()

    def within(self, value: Any, path: str = "") -> Fields:
        """An object that is read in place of a part of this one, and ends with it."""
        self._inner.append(Fields(value, path))
        return self._inner[-1]

    def ignore(self, *fields: str) -> None:
        """Fields that change no answer."""
        for field in fields:
            self._left.pop(field, None)

    def take(self) -> dict[str, Any]:
        """All that is left, whatever it is, which is gone then."""
        left, self._left = self._left, {}
        return left

    def only(self, field: str, *values: Any) -> None:
        """A field of which only values are supported that ask for nothing."""
        value = self._left.pop(field, None)
        same = [one for one in values if type(one) is type(value) and one == value]
        if value is not None and not same:
            self.refuse(field, f"is not supported with {shown(value)}", code="unsupported_value")

    def refuse_set(self, hints: Mapping[str, str]) -> None:
        """Refuse fields that ask for what is not there, unless they are false or empty.

        Args:
            hints: what to do instead, by field.
        """
        for field, hint in hints.items():
            if self._left.pop(field, None):
                self.refuse(field, f"is not supported: {hint}", code="unsupported_parameter")

    def end(self) -> None:
        """Ignore what nobody took; the log names it."""
        for field in self._left:
            note_ignored(self.name(field[:_SHOWN_CHARS]))
        for one in self._inner:
            one.end()
        self._left, self._inner = {}, []

    def refuse(self, field: str, problem: str, *, code: str | None = None) -> NoReturn:
        """Raise ApiError for a field."""
        raise ApiError(f"{self.name(field)} {problem}", param=self.name(field), code=code)


def note_ignored(name: str) -> None:
    """Tell the log, once, what is ignored: its name, which a stranger wrote, and no value."""
    name = ascii(re.sub(r"\d+(?=\])", "", name[:200]))[1:-1]
    with _LOCK:
        if name in _NAMED or len(_NAMED) >= _MOST_NAMES:
            return
        _NAMED.add(name)
    LOGGER.warning("requests have the field %s, which is ignored", name)


def shown(value: Any) -> str:
    """A value as it is quoted in a message."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."


# By their names in Content-Encoding, with zlib's number of each format's header.
_GZIP, _ZLIB, _NO_HEADER = 31, 15, -15
_ENCODINGS = {"gzip": _GZIP, "x-gzip": _GZIP, "deflate": _ZLIB}


def read_json(
    body: bytes | bytearray, limits: Limits, encoding: str = "", most: int | None = None
) -> Any:
    """The document of a body. Raises ApiError for anything else.

    `encoding` is the request's Content-Encoding, `most` bytes are what it may have without.
    Halves of surrogate pairs, which no UTF-8 has, become U+FFFD; a byte order mark is passed by.
    """
    most = most or limits.body_bytes
    data = _decompressed(body, encoding.strip().lower(), most)
    _check_count(data, limits.values)
    try:
        text = _HALF.sub(lambda found: found[1] or "\\ufffd", data.decode("utf-8-sig"))
        del body, data  # nobody else has a body that was compressed
        document = json.loads(text, parse_float=_finite, parse_constant=_refuse_constant)
    except UnicodeDecodeError as problem:
        raise ApiError(f"the body is not UTF-8: {problem.reason}") from problem
    except RecursionError as problem:
        raise ApiError(f"the body is nested deeper than {limits.json_depth}") from problem
    except ValueError as problem:  # digits beyond what Python converts are told this way, too
        raise ApiError(f"the body is no JSON: {str(problem)[:100]}") from problem
    level = [document] if isinstance(document, dict | list) else []
    for _ in range(limits.json_depth):
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
    if level:
        raise ApiError("the body is nested too deep")
    return document


# Escapes of halves of surrogate pairs; a backslash's own escape and whole pairs are passed over.
_HALF = re.compile(
    r"(\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
)
_NO_STRUCTURE = bytes(set(range(256)) - set(b",:[{"))
_STRUCTURE = re.compile(rb'"[^"]*"?|[,:\[{]')  # strings are passed over, also one without an end


def _check_count(data: bytes | bytearray, most: int) -> None:
    """Raise ApiError for more values than are taken, before any is made.

    Each but the first comes behind a comma, a colon or what opens a list or an object. Only where
    there are many of these are those within strings told apart.
    """
    if len(data.translate(None, _NO_STRUCTURE)) < most:  # 2.6 ms for 4 MB
        return
    count = 0
    data = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # which end no string
    for found in _STRUCTURE.finditer(data):
        count += data[found.start()] != _QUOTE
        if count >= most:
            raise ApiError(f"the body has more than {most} values", status=413)


_QUOTE = ord('"')


def _decompressed(body: bytes | bytearray, encoding: str, most: int) -> bytes | bytearray:
    """The body without its encoding, of at most `most` bytes."""
    if encoding in ("", "identity"):
        return body
    if encoding not in _ENCODINGS:
        raise ApiError(
            f"the content encoding {shown(encoding)} is not supported, only gzip and deflate",
            status=415,
            code="unsupported_encoding",
        )
    header = _ENCODINGS[encoding]
    has_header = len(body) > 1 and body[0] & 15 == 8 and int.from_bytes(body[:2], "big") % 31 == 0
    if header == _ZLIB and not has_header:  # as some clients send it
        header = _NO_HEADER
    part = zlib.decompressobj(header)
    try:
        data = part.decompress(body, most + 1)
    except zlib.error as problem:
        raise ApiError(f"the body is not {encoding}") from problem
    if len(data) > most:
        raise ApiError(f"the body has more than {most} bytes", status=413)
    if not part.eof or part.unused_data:
        where = "after" if part.eof else "before"
        raise ApiError(f"the body ends {where} its {encoding} data does")
    return data


def _refuse_constant(name: str) -> NoReturn:
    raise ApiError(f"the body is no JSON: {name} is no number")


def _finite(digits: str) -> float:
    """A number; one beyond all others, such as 1e999, would be told back as what is no JSON."""
    number = float(digits)
    if not math.isfinite(number):
        raise ApiError(f"the body has a number that is too large: {digits[:_SHOWN_CHARS]}")
    return number


EMBEDDINGS_AT_ONCE = 32  # requests for vectors: each waits in a thread


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes are of one request."""

    body_bytes: int = requests.BODY_BYTES
    image_body_bytes: int = projector.BODY_BYTES  # where a model sees, in place of `body_bytes`
    held_bodies: int = requests.HELD_BODIES  # times the largest body, of all large ones together
    values: int = requests.MOST_VALUES  # of a body
    json_depth: int = 64
    messages: int = 4096
    choices: int = 8
    stops: int = 16
    stop_chars: int = 256
    biases: int = 1024
    logprobs: int = 20  # best tokens told at each place
    tools: int = 128
    format_chars: int = 256 << 10  # of a schema, an expression or a grammar
    format_choices: int = 1024  # texts of which an answer is one
    waiting: int = 16  # generations in the queue, of all requests
    connections: int = 256
    header_s: float = 15.0  # to send a request's line and headers
    body_s: float = 30.0  # to send its body
    write_s: float = 60.0  # until a client takes what it is sent
    model_s: float = 300.0  # until a request has the model that it waits for
    comment_s: float = 10.0  # of a stream without an event, before a comment is sent


_MOST_ADAPTERS = 64
_MOST_SEED = (1 << 63) - 1
_LEAST_TOP_P = 1e-9  # the best token alone, as 0 means
_MOST_COUNT = 1 << 31
_GREEDY = SamplingParams()
_INFILL = "infill"  # what this sampler would pick at the end of a gap's filling is the model's here


def parse_sampling(fields: Fields, defaults: SamplingParams, limits: Limits) -> SamplingParams:
    """How tokens are picked. Raises ApiError."""
    if "repetition_penalty" in fields:
        fields.refuse_set({"repeat_penalty": "repetition_penalty is there, too"})
    seed = fields.whole("seed", -1 if defaults.seed is None else defaults.seed, -1, _MOST_SEED)
    more: dict[str, Any] = {"seed": None if seed < 0 else seed}
    for name, known in options_of(SamplingParams).items():
        field = name if name in fields else FIELD_NAMES.get(name, name)
        if known.low is None or known.read is not None or field not in fields:
            continue
        default = getattr(defaults, name)
        if isinstance(getattr(_GREEDY, name), int):  # -1 means all of them in every API
            more[name] = fields.whole(field, default, -1, int(known.high or _MOST_COUNT))
        else:
            more[name] = fields.number(field, default, known.low, known.high or LARGE)
    if "top_k" in more:
        more["top_k"] = max(0, more["top_k"])
    if "top_p" in more:
        more["top_p"] = max(_LEAST_TOP_P, more["top_p"])
    if "logit_bias" in fields:
        more["logit_bias"] = _biases(fields, limits)
    if "dry_sequence_breakers" in fields:
        more["dry_sequence_breakers"] = _texts(fields, "dry_sequence_breakers", limits)
    if "samplers" in fields:  # in order
        names = (one.replace("-", "_") for one in _texts(fields, "samplers", limits))
        more["samplers"] = tuple(SAMPLER_WORDS.get(one, one) for one in names if one != _INFILL)
    return replace(defaults, **more)


def seed_of_choice(params: SamplingParams, index: int) -> SamplingParams:
    """Of several answers to one request each has a seed of its own."""
    return (
        params if params.seed is None or index == 0 else replace(params, seed=params.seed + index)
    )


def _texts(fields: Fields, field: str, limits: Limits) -> tuple[str, ...]:
    value = fields.pop(field, [])
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        fields.refuse(field, f"must be a text or a list of texts, not {shown(value)}")
    if len(texts) > limits.stops:
        fields.refuse(field, f"has {len(texts)} texts, and at most {limits.stops} are taken")
    if any(len(text) > limits.stop_chars for text in texts):
        fields.refuse(field, f"has a text of more than {limits.stop_chars} characters")
    return tuple(text for text in texts if text)


def parse_options(fields: Fields, setup: ServedModel, most: int, **more: Any) -> GenerationOptions:
    """How an answer of at most so many tokens is written, and what else a request said of it.

    0 tokens read the prompt alone, as what is read `ahead` does; an engine writes one, which
    nobody is told. Raises ApiError.
    """
    return GenerationOptions(
        max_tokens=1 if more.get("ahead") else max(1, most),
        sampling=parse_sampling(fields, setup.defaults.sampling, setup.limits),
        stop=_texts(fields, "stop", setup.limits),
        lora=scales_of(fields, "lora") if "lora" in fields else None,
        **parse_format(fields, setup.limits),
        **{"raw": True, "reuse": True, **more},
    )


def parse_max_tokens(
    fields: Fields, default: int | None, context: int, *names: str, low: int = -1
) -> int:
    """Most tokens of an answer, by the first of `names` that is there.

    -1, as some clients write it, goes on to the end of the context. 0 only reads the prompt.
    """
    values = [fields.whole(name, -1, low, 1 << 31) for name in names if name in fields]
    most = values[0] if values else default
    return context if most is None or most < 0 else most


def takes_prewarm(fields: Fields) -> bool:
    """OpenAI's `prompt_cache_options.prewarm`: the prompt is read while nobody else waits."""
    options = fields.object("prompt_cache_options")
    prewarms = options.flag("prewarm")
    options.ignore("mode", "ttl")
    return prewarms


def _biases(fields: Fields, limits: Limits) -> tuple[tuple[int, float], ...]:
    """Biases by token id."""
    value = fields.pop("logit_bias")
    if not isinstance(value, dict):
        fields.refuse("logit_bias", f"must be an object, not {shown(value)}")
    if len(value) > limits.biases:
        fields.refuse("logit_bias", f"has more than {limits.biases} tokens")
    for token, bias in value.items():
        is_id = token.isascii() and token.isdigit() and len(token) <= len(str(_MOST_COUNT))
        if not is_id or int(token) >= _MOST_COUNT:
            fields.refuse(
                "logit_bias", f"must name token ids, not {shown(token)}: /tokenize has them"
            )
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            fields.refuse("logit_bias", f"must be -100 to 100, not {shown(bias)}")
    return tuple((int(token), float(bias)) for token, bias in value.items())


_ANY_OBJECT = '{"type": "object"}'
_VLLM = {"json": "json_schema", "regex": "regex", "grammar": "grammar", "choice": "regex"}
_SILENT = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")


def parse_format(fields: Fields, limits: Limits) -> dict[str, Any]:
    """The form that a request asks for, if any: a keyword of `GenerationOptions` and its value.

    Raises ApiError for two of them.
    """
    found: dict[str, dict[str, str]] = {}
    if "response_format" in fields:
        found["response_format"] = typed_format(fields.object("response_format"), limits)
    if "structured_outputs" in fields:
        inner = fields.object("structured_outputs")
        for name, keyword in _VLLM.items():
            if name in inner:
                read = _schema if name == "json" else _choice if name == "choice" else _text
                found[inner.name(name)] = {keyword: read(inner, name, limits)}
        if inner.flag("json_object"):
            found[inner.name("json_object")] = {"json_schema": _ANY_OBJECT}
        inner.ignore(*_SILENT)
        inner.refuse_set({"structural_tag": "use json, regex, choice or grammar"})
    fields.refuse_set({f"guided_{name}": "use structured_outputs" for name in _VLLM})
    if "json_schema" in fields:
        found["json_schema"] = {"json_schema": _schema(fields, "json_schema", limits)}
    if "grammar" in fields and (grammar := _text(fields, "grammar", limits)):
        found["grammar"] = {"grammar": grammar}
    asked = [name for name, form in found.items() if form]
    if len(asked) > 1:
        raise ApiError(f"{asked[0]} and {asked[1]} cannot both be kept to", param=asked[1])
    return found[asked[0]] if asked else {}


def typed_format(fields: Fields, limits: Limits) -> dict[str, str]:
    """The form that an object with a type asks for: text, json_object or json_schema."""
    kind, form = fields.text("type"), dict[str, str]()
    if kind == "json_object":
        form["json_schema"] = _ANY_OBJECT
        if "schema" in fields:  # as llama.cpp takes it
            form["json_schema"] = _schema(fields, "schema", limits)
    elif kind == "json_schema":
        named = fields.object("json_schema") if "json_schema" in fields else fields
        named.ignore("name", "description", "strict")  # answers always keep to it
        form["json_schema"] = _schema(named, "schema", limits)
    elif kind != "text":
        fields.refuse("type", f"must be text, json_object or json_schema, not {shown(kind)}")
    return form


def schema_text(schema: Any, param: str, limits: Limits) -> str:
    """The text of a schema. Raises ApiError for one that is too large."""
    if schema is not True and not isinstance(schema, dict):
        raise ApiError(f"{param} must be an object", param=param)
    return _sized(json.dumps(schema), param, limits)


def _schema(fields: Fields, field: str, limits: Limits) -> str:
    """A schema, or the text of one."""
    value, name = fields.pop(field), fields.name(field)
    is_text = isinstance(value, str)
    return _sized(value, name, limits) if is_text else schema_text(value, name, limits)


def _text(fields: Fields, field: str, limits: Limits) -> str:
    return _sized(fields.text(field), fields.name(field), limits)


def _choice(fields: Fields, field: str, limits: Limits) -> str:
    """A regular expression of some texts, of which one is the answer."""
    values = fields.list(field, limits.format_choices)
    if not values or not all(isinstance(one, str) for one in values):
        fields.refuse(field, "must be a list of texts, with one at least")
    escaped = (re.sub(r"[^A-Za-z0-9]", lambda c: f"\\x{{{ord(c[0]):x}}}", one) for one in values)
    return _sized("|".join(escaped), fields.name(field), limits)


def _sized(text: str, param: str, limits: Limits) -> str:
    """The text. Raises ApiError where it is too long."""
    if (size := len(text)) > limits.format_chars:
        problem = f"has {size:,} characters, and {limits.format_chars:,} are the most"
        raise ApiError(f"{param} {problem}", param=param)
    return text


@dataclass(frozen=True, slots=True)
class Defaults:
    """Settings of answers.

    `max_tokens` None goes on to the end of the context; a completion, by OpenAI's rule, ends after
    16 tokens then. `think_budget` tokens of thoughts come before an answer; None is no limit.
    """

    sampling: SamplingParams = _GREEDY
    max_tokens: int | None = None
    think_budget: int | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that answers, as requests are held against it.

    `names` are its own, the first one being what answers call it.
    """

    names: tuple[str, ...]
    context_size: int
    defaults: Defaults
    limits: Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A request, as far as it says how its answer is sent.

    `usage` adds the usage to a stream; `sources` says in it which drafter wrote what; `progress`
    says how much of the prompt was read until the first token comes.
    """

    choices: int = 1
    streams: bool = False
    usage: bool = False
    sources: bool = False
    progress: bool = False


def parse_output(fields: Fields, limits: Limits) -> dict[str, Any]:
    """How an answer is sent, as keywords of `Output`. Raises ApiError."""
    options = fields.object("stream_options")
    options.ignore("include_obfuscation")  # padding; an answer without it is read alike
    return {
        "choices": fields.whole("n", 1, 1, limits.choices),
        "streams": fields.flag("stream"),
        "usage": options.flag("include_usage"),
        "sources": options.flag("include_sources"),
        "progress": fields.flag("return_progress"),
    }


def scales_of(fields: Fields, field: str) -> dict[int, float]:
    """How much of each adapter an answer has, by number, as llama.cpp's server takes it.

    Raises ApiError.
    """
    found = {}
    for one in fields.objects(field, _MOST_ADAPTERS):
        if "id" not in one:
            one.refuse("id", "is missing")
        number = one.whole("id", 0, 0, _MOST_ADAPTERS)
        found[number] = one.number("scale", 1.0, -MOST_SCALE, MOST_SCALE)
    return found
