"""Embeddings and reranking over HTTP, by OpenAI's client and as Jina and Cohere ask for it."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import ollama
import pytest
from bert_gguf import RANK, write_random_bert
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_cases import Connect
from waiting import until

from edgespec.errors import BackendError, ContextFullError, EdgespecError
from edgespec.memory.plan.machine import this_machine
from edgespec.memory.plan.plan import Request
from edgespec.serve.embeddings import (
    EmbeddingService,
    embeddings,
    read_embeddings,
    read_rerank,
    rerank,
)
from edgespec.serve.model_file import ModelFile
from edgespec.serve.parsing import ApiError, Defaults, Fields, Limits, ServedModel
from edgespec.serve.pool import Member, Pool
from edgespec.serve.server import Server
from edgespec.setup.embedding import Embedder
from edgespec.setup.planning import Capacity

Start = Callable[..., str]
TASK: Any = SimpleNamespace(cancel=None)
TEXTS = ["the cat sat", "a dog!", "sun"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("embeddings")
    write_random_bert(made / "bert.gguf", more={"bert.matryoshka_dimensions": [16]})
    write_random_bert(made / "rank.gguf", pooling=RANK)
    return made


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Serves a file of the folder; returns an address."""
    with ExitStack() as opened:

        def begin(file: str = "bert.gguf", **options: Any) -> str:
            model = ModelFile(["bert"], folder / file, Request(), this_machine())
            capacity = Capacity({"host": 1 << 40}, 1 << 40)
            pool = Pool([Member(model, is_pinned=True)], capacity)
            server = Server(pool, **options)
            return opened.enter_context(server).start()

        yield begin


def test_openais_client_gets_the_vectors(start: Start, client: Connect, folder: Path) -> None:
    """It asks for base64 unless told otherwise; texts, one text and token ids are the same."""
    api = client(start())
    with Embedder(folder / "bert.gguf") as embedder:
        expected = embedder.embed(TEXTS)
        ids = [embedder.tokenizer.encode(text, is_whole=True) for text in TEXTS]
    asked: list[Any] = [TEXTS, ids]
    for one in asked:
        made = api.embeddings.create(model="bert", input=one)
        assert [row.index for row in made.data] == [0, 1, 2] and made.model == "bert"
        assert np.allclose([row.embedding for row in made.data], expected.rows, atol=1e-6)
        assert made.usage.prompt_tokens == made.usage.total_tokens == sum(expected.num_tokens)
    single: list[Any] = [TEXTS[0], ids[0]]
    for one in single:
        (row,) = api.embeddings.create(model="bert", input=one, encoding_format="float").data
        assert np.allclose(row.embedding, expected.rows[0], atol=1e-6)
    short = api.embeddings.create(model="bert", input=TEXTS, dimensions=16).data[0].embedding
    assert len(short) == 16 and np.linalg.norm(short) == pytest.approx(1.0, abs=1e-5)


def test_base64_is_of_little_endian_floats(start: Start) -> None:
    address = start()
    told = httpx.post(
        f"{address}/v1/embeddings", json={"input": "sun", "encoding_format": "base64"}
    ).json()
    data = base64.b64decode(told["data"][0]["embedding"])
    plain = httpx.post(f"{address}/embeddings", json={"input": "sun"}).json()
    assert np.allclose(np.frombuffer(data, "<f4"), plain["data"][0]["embedding"], atol=1e-7)


def test_documents_are_ranked_best_first(start: Start) -> None:
    """Texts or objects with a text; with and without them in the answer."""
    address = start("rank.gguf")
    documents: list[Any] = ["a dog", {"text": "the sun on a mat"}, "moon!"]
    body = {"model": "bert", "query": "cat", "documents": documents, "return_documents": True}
    told = httpx.post(f"{address}/v1/rerank", json=body).json()
    scores = [one["relevance_score"] for one in told["results"]]
    assert scores == sorted(scores, reverse=True) and all(0 < one < 1 for one in scores)
    texts = ["a dog", "the sun on a mat", "moon!"]
    assert all(one["document"]["text"] == texts[one["index"]] for one in told["results"])
    assert told["usage"]["total_tokens"] > 10
    body |= {"top_n": 1, "return_documents": False}
    best = httpx.post(f"{address}/rerank", json=body).json()["results"]
    assert best == [{"index": told["results"][0]["index"], "relevance_score": scores[0]}]
    refused = httpx.post(f"{address}/v1/embeddings", json={"input": "a"})
    assert refused.status_code == 400 and "ranks documents" in refused.text


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ({}, 400, "input must be a text"),
        ({"input": []}, 400, "input must be a text"),
        ({"input": [""]}, 400, "input[0] must be a text that is not empty"),
        ({"input": ["a", 3]}, 400, "input[1] must be a text"),
        ({"input": [[1, "a"]]}, 400, "must have texts or token ids"),
        ({"input": [[99]]}, 400, "has token ids that the model does not have (use 0 to 16)"),
        ({"input": ["a"] * 5000}, 400, "has 5000 texts, and at most 4096"),
        ({"input": "cat " * 100}, 400, "text 1 has 102 tokens, and at most 64 fit"),
        ({"input": "a", "dimensions": 100}, 400, "100 dimensions are not possible"),
        ({"input": "a", "encoding_format": "int8"}, 400, "must be float or base64"),
        ({"input": "a", "model": "gpt-4"}, 404, "there is no model"),
    ],
)
def test_what_cannot_be_is_refused(
    start: Start, body: dict[str, Any], status: int, sentence: str
) -> None:
    told = httpx.post(f"{start()}/v1/embeddings", json=body)
    assert told.status_code == status and sentence in told.json()["error"]["message"]


def test_a_long_text_says_what_it_is_and_may_be_cut(start: Start) -> None:
    address = start()
    body = {"input": "cat " * 100}
    told = httpx.post(f"{address}/v1/embeddings", json=body).json()["error"]
    assert told["code"] == "context_length_exceeded" and told["param"] == "input"
    cut = httpx.post(f"{address}/v1/embeddings", json={**body, "truncate": True})
    assert cut.json()["usage"]["prompt_tokens"] == 64


def test_a_server_of_embeddings_writes_no_text(start: Start) -> None:
    address = start(keys=["secret"])
    key = {"authorization": "Bearer secret"}
    assert httpx.post(f"{address}/v1/embeddings", json={"input": "a"}).status_code == 401
    told = httpx.post(f"{address}/v1/chat/completions", json={}, headers=key)
    assert told.status_code == 404 and "writes no text: ask /v1/embeddings" in told.text
    cards = partial(httpx.get, f"{address}/v1/models", headers=key)
    until(lambda: cards().json()["data"][0]["state"] == "ready")  # it is planned beside the server
    (card,) = cards().json()["data"]
    assert (card["id"], card["embedding_length"], card["context_length"]) == ("bert", 64, 64)
    assert httpx.get(f"{address}/health", headers=key).status_code == 200


SETUP = ServedModel(("bert",), 64, Defaults(), Limits())


def test_more_than_fit_are_told_to_come_again(folder: Path) -> None:
    service = EmbeddingService(Embedder(folder / "bert.gguf"))
    service._running = 32
    with pytest.raises(ApiError, match="32 requests are under way") as told:
        embeddings(service, read_embeddings(Fields({"input": "a"}), SETUP), TASK)
    assert told.value.status == 429
    service.close()
    with pytest.raises(ApiError, match="closed"):
        service.check()


VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 20) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    ["input", "model", "dimensions", "encoding_format", "truncate", "query", "documents", "top_n"]
)


def test_ollamas_client_gets_vectors(start: Start) -> None:
    with ollama.Client(host=start()) as api:
        both = api.embed("bert", TEXTS[:2])
        assert len(both.embeddings) == 2 and both.prompt_eval_count > 4
        one = api.embeddings("bert", TEXTS[0])
        assert one.embedding == pytest.approx(both.embeddings[0], abs=1e-6)
        assert api.show("bert").capabilities == ["embedding"]


@pytest.fixture(scope="module")
def services(folder: Path) -> Iterator[list[EmbeddingService]]:
    files = [folder / "bert.gguf", folder / "rank.gguf"]
    found = [EmbeddingService(Embedder(file)) for file in files]
    yield found
    for one in found:
        one.close()


@settings(max_examples=150)
@given(body=st.dictionaries(FIELDS, VALUES) | VALUES, ranks=st.booleans())
def test_no_body_makes_it_fail(services: list[EmbeddingService], body: Any, ranks: bool) -> None:
    """Whatever is sent: an answer or one sentence."""
    try:
        fields = Fields(body)
        if ranks:
            told: Any = rerank(services[ranks], read_rerank(fields, SETUP), TASK)
        else:
            told = embeddings(services[ranks], read_embeddings(fields, SETUP), TASK)
    except (ApiError, EdgespecError) as problem:
        assert str(problem) and "\n" not in str(problem)
    else:
        document = told if isinstance(told, dict) else json.loads(b"".join(told))
        assert document["object"] == "list"


@pytest.mark.parametrize(
    ("documents", "sentence"),
    [([], "documents must have a document"), (["a", {"title": "b"}], "objects with a text, not")],
)
def test_documents_that_cannot_be_are_refused(documents: list[Any], sentence: str) -> None:
    with pytest.raises(ApiError, match=sentence):
        read_rerank(Fields({"query": "cat", "documents": documents}), SETUP)


def test_nobody_computes_for_who_left(folder: Path) -> None:
    """Neither what is in line nor what is not tokenized yet."""
    with Embedder(folder / "bert.gguf") as embedder:
        context: Any = embedder._context
        cancel, read = threading.Event(), context.read

        def leaves(*arguments: Any) -> None:
            cancel.set()
            read(*arguments)

        context.read = leaves
        with pytest.raises(BackendError, match="nobody waits"):
            embedder.embed(["the cat sat"] * 500, cancel=cancel)
        context.read = read
        assert not embedder._jobs
        assert len(embedder.embed(TEXTS).rows) == 3, "others go on"
        with pytest.raises(BackendError, match="nobody waits"):
            embedder.embed(TEXTS, cancel=cancel)


def test_a_text_far_too_long_is_cut_before_it_is_tokenized(folder: Path) -> None:
    with Embedder(folder / "bert.gguf") as embedder:
        words = "the cat sat " * 10_000
        with pytest.raises(ContextFullError, match="at least"):
            embedder.embed([words])
        cut = embedder.embed([words, "the cat sat " * 100], truncate=True)
        assert np.allclose(*cut.rows), "the same as of a text that was tokenized whole"
