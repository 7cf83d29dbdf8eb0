"""`/v1/embeddings` and `/v1/rerank`, in the forms of OpenAI and of Jina and Cohere."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from edgespec.errors import ContextFullError, UnsupportedError
from edgespec.serve.parsing import (
    EMBEDDINGS_AT_ONCE,
    ApiError,
    Fields,
    ServedModel,
    api_error_of,
    shown,
)
from edgespec.serve.serializers import json_bytes
from edgespec.setup.embedding import Embedder, Embeddings, Text

if TYPE_CHECKING:
    from edgespec.serve.service import Underway

_MOST_TEXTS = 4096  # of a request


class EmbeddingService:
    """An embedder that answers requests in the name of a model; it is closed with this."""

    def __init__(self, embedder: Embedder, name: str = "edgespec") -> None:
        self.embedder, self.name, self.plan = embedder, name, embedder.chosen
        self._running = 0
        self._lock = threading.Lock()

    @property
    def is_busy(self) -> bool:
        return self._running > 0

    @property
    def is_full(self) -> bool:
        """Whether as many requests are under way as may be."""
        return self._running >= EMBEDDINGS_AT_ONCE

    def check(self) -> None:
        """Raise ApiError where no request can be answered."""
        try:
            self.embedder.check()
        except UnsupportedError as problem:
            raise ApiError(str(problem), status=503, code="engine_unusable") from problem

    def memory_bytes(self) -> dict[str, int]:
        return self.embedder.memory_bytes()

    @contextmanager
    def answering(self) -> Iterator[Embedder]:
        """What answers a request. Raises ApiError, also where too many others wait."""
        with self._lock:
            if self.is_full:
                problem = f"{EMBEDDINGS_AT_ONCE} requests are under way: try again later"
                raise ApiError(problem, status=429, code="queue_full")
            self._running += 1
        try:
            yield self.embedder
        except ContextFullError as problem:
            raise api_error_of(problem, "input") from problem
        finally:
            with self._lock:
                self._running -= 1

    def vectors(self, asked: Vectors, request: Underway) -> Embeddings:
        """Those of texts. Raises as `answering`, and as `Embedder.embed`."""
        texts, dimensions, _, truncate = asked
        with self.answering() as embedder:
            return embedder.embed(
                texts, dimensions=dimensions, truncate=truncate, cancel=request.cancel
            )

    def close(self) -> None:
        self.embedder.close()


class Vectors(NamedTuple):
    """What is asked for; long texts are cut off, or refused."""

    texts: list[Text]
    dimensions: int | None
    form: str
    truncate: bool


Scores = tuple[str, list[str], int, bool, bool]


def embeddings(service: EmbeddingService, asked: Vectors, request: Underway) -> Iterator[bytes]:
    """Vectors of texts, as OpenAI's interface has them: the answer in pieces.

    Raises ApiError, and as `Embedder.embed`.
    """
    return _vectors(service.vectors(asked, request), asked.form, service.name)


def read_embeddings(fields: Fields, _setup: ServedModel) -> Vectors:
    """Texts; vectors are lists of numbers, or their bytes in base64."""
    form = fields.text("encoding_format", "float")
    if form not in ("float", "base64"):
        fields.refuse("encoding_format", f"must be float or base64, not {shown(form)}")
    fields.ignore("user")
    return parse_vectors(fields, "input", form, truncate=False)


def parse_vectors(fields: Fields, field: str, form: str, *, truncate: bool) -> Vectors:
    """Texts of a field; whether they are `truncate`d where a request does not say so."""
    texts = _texts(fields, field)
    dimensions = fields.whole("dimensions", 0, 1, 1 << 20) if "dimensions" in fields else None
    return Vectors(texts, dimensions, form, fields.flag("truncate", truncate))


def _vectors(made: Embeddings, form: str, model: str) -> Iterator[bytes]:
    """The document, a vector at a time: as numbers in JSON all of them are ten times as large."""
    for index, row in enumerate(made.rows.astype("<f4")):
        told = base64.b64encode(row.tobytes()).decode() if form == "base64" else row.tolist()
        document = {"object": "embedding", "index": index, "embedding": told}
        yield (b"," if index else b'{"object":"list","data":[') + json_bytes(document)
    rest = json_bytes({"model": model, "usage": _usage(made.num_tokens)})
    yield b"]," + rest[1:]


def rerank(service: EmbeddingService, asked: Scores, request: Underway) -> dict[str, Any]:
    """Scores of documents, the best first, as Jina's and Cohere's interfaces have them.

    Raises as `embeddings`.
    """
    query, documents, most, tells, truncate = asked
    with service.answering() as embedder:
        made = embedder.rerank(query, documents, truncate=truncate, cancel=request.cancel)
    scores = made.rows[:, 0].tolist()
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[:most]
    told: list[dict[str, Any]] = [{"index": one, "relevance_score": scores[one]} for one in best]
    for one in told if tells else ():
        one["document"] = {"text": documents[one["index"]]}
    usage = _usage(made.num_tokens)
    return {"object": "list", "model": service.name, "results": told, "usage": usage}


def read_rerank(fields: Fields, _setup: ServedModel) -> Scores:
    """Query, documents, how many are told, whether with their texts, and whether they are cut."""
    query = fields.text("query")
    given = fields.list("documents", _MOST_TEXTS)
    documents: list[Any] = [one.get("text") if isinstance(one, dict) else one for one in given]
    for value, text in zip(given, documents, strict=True):
        if not isinstance(text, str):
            problem = f"must be texts, or objects with a text, not {shown(value)}"
            fields.refuse("documents", problem)
    if not documents:
        fields.refuse("documents", "must have a document", code="missing_required_parameter")
    most = fields.whole("top_n", len(documents), 1, 1 << 30)
    tells = fields.flag("return_documents")
    return query, documents, most, tells, fields.flag("truncate", True)


def _usage(num_tokens: Sequence[int]) -> dict[str, int]:
    return dict.fromkeys(("prompt_tokens", "total_tokens"), sum(num_tokens))


def _texts(fields: Fields, field: str) -> list[Text]:
    """One text or several, or their token ids."""
    value = fields.pop(field)
    one = isinstance(value, str) or (isinstance(value, list) and _is_id(next(iter(value), None)))
    texts = [value] if one else value
    if not isinstance(texts, list) or not texts:
        fields.refuse(field, "must be a text, a list of texts, or token ids")
    if len(texts) > _MOST_TEXTS:
        fields.refuse(field, f"has {len(texts)} texts, and at most {_MOST_TEXTS} are taken")
    for index, text in enumerate(texts):
        if isinstance(text, list) and text:
            if not all(map(_is_id, text)):
                fields.refuse(field, "must have texts or token ids")
        elif not isinstance(text, str) or not text:
            fields.refuse(
                f"{field}[{index}]", f"must be a text that is not empty, not {shown(text)}"
            )
    return texts


def _is_id(value: Any) -> bool:
    return type(value) is int
