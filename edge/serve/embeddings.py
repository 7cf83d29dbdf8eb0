"""`/v1/embeddings` and `/v1/rerank`, in the forms of OpenAI and of Jina and Cohere."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from edgespec.errors import ContextFullError, UnsupportedError
from edgespec.serve.api_error import ApiError
from edgespec.serve.parsing import Fields, shown
from edgespec.setup.embedding import Embedder, Text

_MOST_TEXTS = 4096  # of a request
_AT_ONCE = 32  # requests: each waits in a thread


class EmbeddingService:
    """An embedder that answers requests; it is closed with this.

    Args:
        name: what answers call the model.
    """

    def __init__(self, embedder: Embedder, name: str = "edgespec") -> None:
        self.embedder, self.name, self.plan = embedder, name, embedder.chosen
        self._running = 0
        self._lock = threading.Lock()

    @property
    def is_busy(self) -> bool:
        """Whether an answer is under way."""
        return self._running > 0

    sees_images = False

    def check(self) -> None:
        """Raise ApiError where no request can be answered."""
        try:
            self.embedder.check()
        except UnsupportedError as problem:
            raise ApiError(str(problem), status=503, code="engine_unusable") from problem

    def memory_bytes(self) -> dict[str, int]:
        """What was allocated, by component."""
        return self.embedder.memory_bytes()

    @contextmanager
    def answering(self) -> Iterator[Embedder]:
        """What answers a request. Raises ApiError, also where too many others wait."""
        with self._lock:
            if self._running >= _AT_ONCE:
                problem = f"{_AT_ONCE} requests are under way: try again later"
                raise ApiError(problem, status=429, code="queue_full")
            self._running += 1
        try:
            yield self.embedder
        except ContextFullError as problem:
            message = f"{problem} ({problem.hint})"
            raise ApiError(message, param="input", code="context_length_exceeded") from problem
        finally:
            with self._lock:
                self._running -= 1

    def close(self) -> None:
        """Free the model; safe to call twice."""
        self.embedder.close()


def embeddings(service: EmbeddingService, body: Any) -> dict[str, Any]:
    """Vectors of texts, as OpenAI's interface has them. Raises ApiError and as `Embedder.embed`."""
    fields = Fields(body)
    fields.ignore("model")  # by which this one was found
    texts = _texts(fields, "input", service.embedder.tokenizer.vocab_size)
    dimensions = fields.whole("dimensions", 0, 1, 1 << 20) if "dimensions" in fields else None
    form = fields.text("encoding_format", "float")
    if form not in ("float", "base64"):
        fields.refuse("encoding_format", f"must be float or base64, not {shown(form)}")
    truncate = fields.flag("truncate")
    fields.ignore("user")
    fields.end()
    with service.answering() as embedder:
        made = embedder.embed(texts, dimensions=dimensions, truncate=truncate)
    rows: Sequence[Any] = (
        [base64.b64encode(row.tobytes()).decode() for row in made.rows.astype("<f4")]
        if form == "base64"
        else made.rows.tolist()
    )
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": row}
            for index, row in enumerate(rows)
        ],
        "model": service.name,
        "usage": _usage(made.num_tokens),
    }


def rerank(service: EmbeddingService, body: Any) -> dict[str, Any]:
    """Scores of documents, the best first, as Jina's and Cohere's interfaces have them.

    Raises as `embeddings`.
    """
    fields = Fields(body)
    fields.ignore("model")  # by which this one was found
    query = fields.text("query")
    documents = [_document(fields, one) for one in fields.list("documents", _MOST_TEXTS)]
    if not documents:
        fields.refuse("documents", "must have a document", code="missing_required_parameter")
    most = fields.whole("top_n", len(documents), 1, 1 << 30)
    tells = fields.flag("return_documents")
    truncate = fields.flag("truncate", True)
    fields.end()
    with service.answering() as embedder:
        made = embedder.rerank(query, documents, truncate=truncate)
    scores = made.rows[:, 0].tolist()
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[:most]
    told = [
        {"index": index, "relevance_score": scores[index]}
        | ({"document": {"text": documents[index]}} if tells else {})
        for index in best
    ]
    return {
        "object": "list",
        "model": service.name,
        "results": told,
        "usage": _usage(made.num_tokens),
    }


def _usage(num_tokens: Sequence[int]) -> dict[str, int]:
    total = sum(num_tokens)
    return {"prompt_tokens": total, "total_tokens": total}


def _texts(fields: Fields, field: str, vocab_size: int) -> list[Text]:
    """One text or several, or their token ids."""
    value = fields.any(field)
    one = isinstance(value, str) or (isinstance(value, list) and _is_id(next(iter(value), None)))
    texts = [value] if one else value
    if not isinstance(texts, list) or not texts:
        fields.refuse(field, "must be a text, a list of texts, or token ids")
    if len(texts) > _MOST_TEXTS:
        fields.refuse(field, f"has {len(texts)} texts, and at most {_MOST_TEXTS} are taken")
    for index, text in enumerate(texts):
        if isinstance(text, list) and text:
            if not all(_is_id(token) and 0 <= token < vocab_size for token in text):
                fields.refuse(field, f"has token ids that are not from 0 to {vocab_size - 1}")
        elif not isinstance(text, str) or not text:
            fields.refuse(
                f"{field}[{index}]", f"must be a text that is not empty, not {shown(text)}"
            )
    return texts


def _is_id(value: Any) -> bool:
    return type(value) is int


def _document(fields: Fields, value: Any) -> str:
    """A document's text."""
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        fields.refuse("documents", f"must be texts, or objects with a text, not {shown(value)}")
    return text
