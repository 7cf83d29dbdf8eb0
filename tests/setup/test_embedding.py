"""Vectors and scores of a small random BERT: against numpy, and against one text a step."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from bert_gguf import CLS, RANK, WORDS, random_weights, reference, write_random_bert
from random_gguf import F32, VOCABULARY, write_model
from waiting import until

import edgespec
from edgespec.errors import BackendError, ContextFullError, UnsupportedError
from edgespec.setup.embedding import Embedder

TEXTS = ["the cat sat on a mat", "dog", "the sun!", "rain. " * 30, "moon moon on the mats"]


def cosine(one: object, other: object) -> float:
    a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_bert(tmp_path_factory.mktemp("bert") / "bert.gguf")


def test_vectors_are_those_of_the_paper(bert: Path) -> None:
    """Of several texts in one step: 0.999 and better, against plain numpy."""
    with Embedder(bert) as embedder:
        made = embedder.embed(TEXTS)
        ids = [embedder.tokenizer.encode(text, is_whole=True) for text in TEXTS]
    weights = random_weights()
    assert made.rows.shape == (len(TEXTS), 64) and made.rows.dtype == np.float32
    assert np.allclose(np.linalg.norm(made.rows, axis=1), 1.0, atol=1e-5)
    assert list(made.num_tokens) == [len(one) for one in ids]
    for row, one in zip(made.rows, ids, strict=True):
        assert cosine(row, reference(weights, one).mean(0)) > 0.99999


def test_the_file_says_what_stands_for_a_text(tmp_path: Path, bert: Path) -> None:
    path = write_random_bert(tmp_path / "cls.gguf", pooling=CLS)
    own = edgespec.embed(TEXTS, path)
    asked = edgespec.embed(TEXTS, bert, pooling="cls")
    last = edgespec.embed(TEXTS, bert, pooling="last")
    assert np.allclose(own, asked, atol=1e-5)
    with Embedder(bert) as embedder:
        ids = embedder.tokenizer.encode(TEXTS[0], is_whole=True)
        again = embedder.embed([ids]).rows[0]
    states = reference(random_weights(), ids)
    assert cosine(own[0], states[0]) > 0.99999
    assert cosine(last[0], states[-1]) > 0.99999
    assert cosine(again, states.mean(0)) > 0.99999  # token ids are texts, too


def test_long_texts_are_refused_or_cut_off(bert: Path) -> None:
    long = " ".join(WORDS[:8]) + " " + "cat " * 100
    with Embedder(bert) as embedder:
        assert embedder.chosen.context_size == 64
        with pytest.raises(ContextFullError, match="text 2 has 110 tokens, and at most 64 fit"):
            embedder.embed(["cat", long])
        cut = embedder.embed([long], truncate=True)
        ids = embedder.tokenizer.encode(long, is_whole=True)
        same = embedder.embed([[*ids[:63], ids[-1]]])
    assert cut.num_tokens == [64] and np.array_equal(cut.rows, same.rows)


def test_what_is_no_text_is_refused_and_others_go_on(bert: Path) -> None:
    with Embedder(bert) as embedder:
        for wrong in ([], [-1], [99_999]):
            with pytest.raises(UnsupportedError, match="text 1 has"):
                embedder.embed([wrong])
        with pytest.raises(UnsupportedError, match="have 64 dimensions"):
            embedder.embed(["cat"], dimensions=32)
        with pytest.raises(UnsupportedError, match="no head that ranks"):
            embedder.rerank("cat", ["dog"])
        assert embedder.embed([]).rows.shape == (0, 64)
        assert embedder.embed(["cat"]).rows.shape == (1, 64)
    with pytest.raises(UnsupportedError, match="closed"):
        embedder.embed(["cat"])


def test_vectors_that_may_be_shortened(tmp_path: Path, bert: Path) -> None:
    """First parts of length 1, where the file says that it was trained for that."""
    path = write_random_bert(tmp_path / "m.gguf", more={"bert.matryoshka_dimensions": [16, 32]})
    whole = edgespec.embed(TEXTS, path)
    short = edgespec.embed(TEXTS, path, dimensions=16)
    first = whole[:, :16] / np.linalg.norm(whole[:, :16], axis=1, keepdims=True)
    assert np.allclose(short, first, atol=1e-6)
    with pytest.raises(UnsupportedError, match="100 dimensions are not possible"):
        edgespec.embed(TEXTS, path, dimensions=100)


def test_documents_are_ranked(tmp_path: Path) -> None:
    path = write_random_bert(tmp_path / "rank.gguf", pooling=RANK)
    documents = ["the dog", "a mat!", "sun on the moon"]
    with Embedder(path) as embedder:
        made = embedder.rerank("the cat", documents)
        pair = embedder._context.pair("the cat", documents[0])
        with pytest.raises(UnsupportedError, match="makes no vectors"):
            embedder.embed(["cat"])
    weights = random_weights(labels=1)
    assert pair == [2, 4, 5, 3, 4, 10, 3]  # [CLS] the cat [SEP] the dog [SEP]
    state = reference(weights, pair)[0]
    logit = float(state @ weights["cls.output.weight"][0] + weights["cls.output.bias"][0])
    assert made.rows.shape == (3, 1)
    assert made.rows[0, 0] == pytest.approx(1 / (1 + np.exp(-logit)), abs=1e-3)


def test_many_callers_share_steps_and_get_their_own(bert: Path) -> None:
    """Twelve threads with lists of other lengths: every row is that of its text alone."""
    words = [f"{a} {b} {c}" for a in WORDS[:7] for b in WORDS[3:7] for c in WORDS[:4]]
    with Embedder(bert) as embedder:
        alone = {word: embedder.embed([word]).rows[0] for word in words}
        found: dict[int, object] = {}

        def ask(number: int) -> None:
            found[number] = embedder.embed(words[number :: number % 4 + 1]).rows

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number in range(12):
        rows = np.asarray(found[number])
        for row, word in zip(rows, words[number :: number % 4 + 1], strict=True):
            assert cosine(row, alone[word]) > 0.999999


def test_a_text_ends_as_the_file_says(tmp_path: Path) -> None:
    """Models that embed by their last state were trained on that of the end token."""
    path = write_model(tmp_path / "llama.gguf", "llama", F32, reads_bytes=True, adds_end=True)
    with Embedder(path, pooling="last", context_size=512) as embedder:
        ended = [*embedder.tokenizer.encode("abc"), VOCABULARY - 1]
        text, ids, prompt = embedder.embed(["abc", ended, ended[:-1]]).rows
    assert cosine(text, ids) > 0.999999 > cosine(text, prompt)


def test_a_text_in_parts_is_the_text_at_once(tmp_path: Path) -> None:
    """A model that writes text embeds by its last state; a long text is read in several steps."""
    path = write_model(tmp_path / "llama.gguf", "llama", F32, reads_bytes=True)
    text = [token % 256 for token in range(7, 1500, 5)]
    with pytest.raises(UnsupportedError, match="was made to write text"):
        Embedder(path)
    with Embedder(path, pooling="last", context_size=512) as embedder:
        assert len(text) > embedder.chosen.batch_size
        long, short = embedder.embed([text, text[:5]]).rows
    with Embedder(path, pooling="mean", context_size=512) as embedder:
        mean = embedder.embed([text[:1]]).rows[0]
    with Embedder(path, pooling="last", context_size=512, threads=16) as embedder:
        assert embedder.chosen.batch_size > len(text)
        whole = embedder.embed([text]).rows[0]
        first = embedder.embed([text[:1]]).rows[0]
    assert cosine(long, whole) > 0.999999 > cosine(long, short)
    assert cosine(mean, first) > 0.999999  # of one token it is the same


def test_closing_ends_callers_that_wait(bert: Path) -> None:
    embedder = Embedder(bert)
    problems: list[BaseException] = []

    def ask() -> None:
        try:
            for _ in range(10_000):
                embedder.embed(TEXTS * 50)
        except UnsupportedError as problem:
            problems.append(problem)

    thread = threading.Thread(target=ask)
    thread.start()
    embedder.embed(["cat"])
    embedder.close()
    thread.join(30)
    assert not thread.is_alive() and "closed" in str(problems[0])


def test_a_text_in_line_can_be_cancelled(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another one is computed: it never is."""
    begun, goes_on, cancel = threading.Event(), threading.Event(), threading.Event()
    taken: list[int] = []

    def slow(batch: Sequence[object]) -> None:
        taken.append(len(batch))
        begun.set()
        goes_on.wait(10)

    with Embedder(bert) as embedder, ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(embedder, "_compute", slow)
        first = pool.submit(embedder.embed, ["cat"])
        assert begun.wait(10)
        second = pool.submit(embedder.embed, ["dog"], cancel=cancel)
        until(lambda: len(embedder._jobs) > 0)
        cancel.set()
        goes_on.set()
        with pytest.raises(BackendError, match="nobody waits"):
            second.result(10)
        assert first.result(10).num_tokens and taken == [1]


def test_bytes_are_those_that_were_planned(bert: Path) -> None:
    """llama.cpp's own buffers, to the rounding of its log; a step takes no more afterwards."""
    with Embedder(bert) as embedder:
        embedder.embed(TEXTS * 20, truncate=True)
        planned, allocated = embedder.chosen.component_bytes, embedder.memory_bytes()
    assert allocated["compute"] == pytest.approx(planned["compute"], abs=16_384)
    assert planned["logits"] == 4 * embedder.chosen.spec.vocab_size * 64


def test_all_who_wait_are_told_that_it_is_closed(
    bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While they are told, they take their texts out of the queue."""
    embedder = Embedder(bert)
    begun = threading.Event()

    def slow(_batch: object) -> None:
        begun.set()
        threading.Event().wait(0.2)

    monkeypatch.setattr(embedder, "_compute", slow)
    problems: list[BaseException] = []

    def ask() -> None:
        try:
            embedder.embed(["cat"] * 500)
        except UnsupportedError as problem:
            problems.append(problem)

    callers = [threading.Thread(target=ask, daemon=True) for _ in range(64)]
    for one in callers:
        one.start()
    assert begun.wait(10)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        embedder.close()
    finally:
        sys.setswitchinterval(before)
    for one in callers:
        one.join(10)
    assert len(problems) == len(callers)
