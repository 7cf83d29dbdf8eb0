"""Models that are loaded when they are asked for: made-up models, and real threads."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from itertools import count
from math import inf
from typing import Any

import httpx
import pytest
from pool_cases import SIZE, Made, Start
from serving_cases import HELLO, TEMPLATE, Speaker
from waiting import PATIENCE_S, until

from edgespec.decode.engine import Engine
from edgespec.errors import DoesNotFitError, ModelFileError, UnsupportedError
from edgespec.serve.parsing import ApiError, Limits
from edgespec.serve.pool import ANY, Lease, Member, Pool, keep_alive_of
from edgespec.serve.server import Server
from edgespec.setup.planning import Capacity


def said(answer: httpx.Response) -> str:
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def test_a_request_picks_its_model_and_the_least_recently_used_one_leaves(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "edgespec.serve.pool")
    server = start()
    assert server.states() == dict.fromkeys("abc", "unloaded")
    for name in "aaab":
        assert said(server.ask(name)) == f"I am {name}."
    assert said(server.ask("c.gguf")) == "I am c."
    assert server.states() == {"a": "unloaded", "b": "ready", "c": "ready"}
    assert said(server.ask(None)) == "I am a.", "the first one is asked where none is named"
    told = [one.getMessage() for one in caplog.records]
    assert "a unloaded: for c" in told
    assert sum("loaded: 1 request waits" in line for line in told) == 4


def test_an_unknown_model_is_refused_with_the_names(start: Start) -> None:
    answer = start().ask("d")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == 'there is no model "d" here, only a, b, c'


def test_requests_for_one_model_are_answered_together(start: Start) -> None:
    server = start()
    server.models["a"].gate.clear()
    with ThreadsOf(lambda: said(server.ask("a")), 4) as asking:
        until(lambda: len(server.pool.members[0].tickets) == 4)
        assert server.states()["a"] == "loading"
        assert server.pool.planned_bytes == SIZE, "what is loading counts"
        server.models["a"].gate.set()
    assert asking.results == ["I am a."] * 4
    assert server.pool.members[0].loads == 1


def test_a_model_that_answers_does_not_leave(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.serve.pool._PATIENCE_S", 0.3)
    server = start(*(Member(Made(name)) for name in "ab"), room=SIZE)
    said(server.ask("a"))
    speaker = server.models["a"].backends[0]
    speaker.gate.clear()
    with ThreadsOf(lambda: said(server.ask("a")), 1) as first:
        until(lambda: server.pool.members[0].holders == 1)
        with ThreadsOf(lambda: said(server.ask("b")), 1) as second:
            until(lambda: len(server.pool.members[1].tickets) == 1)
            refused = httpx.post(f"{server.address}/models/unload", json={"model": "a"})
            assert refused.status_code == 409
            assert server.states() == {"a": "ready", "b": "unloaded"}
            # Patience for the second one is over: who asks for the first one waits behind it.
            until(lambda: server.pool.members[0] in server.pool._drained)
            with ThreadsOf(lambda: said(server.ask("a")), 1) as third:
                until(lambda: len(server.pool.members[0].tickets) == 1)
                speaker.gate.set()
    assert (*first.results, *second.results, *third.results) == ("I am a.", "I am b.", "I am a.")


def test_a_stream_has_headers_and_comments_while_its_model_is_loaded(start: Start) -> None:
    server = start(limits=Limits(comment_s=0.05))
    server.models["b"].gate.clear()
    body = {"model": "b", "messages": HELLO, "stream": True}
    url = f"{server.address}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        assert [next(lines) for _ in range(3)] == [": waiting", "", ": waiting"]
        server.models["b"].gate.set()
        events = [line for line in lines if line.startswith("data: {")]
    texts = [json.loads(line[6:])["choices"][0]["delta"].get("content", "") for line in events]
    assert "".join(texts) == "I am b."


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_stream_whose_model_cannot_be_loaded_ends_with_an_error(start: Start, path: str) -> None:
    server = start()
    server.models["a"].failure = UnsupportedError("it is odd", hint="take another one")
    body = {"model": "a", "messages": HELLO, "stream": True, "max_tokens": 5}
    answer = httpx.post(f"{server.address}{path}", json=body, timeout=PATIENCE_S)
    *_, last = (line for line in answer.text.splitlines() if line.startswith("data: "))
    error = json.loads(last[6:])["error"]
    assert error["message"] == "a cannot be loaded: it is odd (take another one)"
    assert ("event: error" in answer.text) == (path == "/v1/messages")


def test_a_response_whose_model_cannot_be_loaded_fails_with_its_event(start: Start) -> None:
    server = start()
    server.models["a"].failure = UnsupportedError("it is odd", hint="take another one")
    body = {"model": "a", "input": "Hi", "stream": True}
    answer = httpx.post(f"{server.address}/v1/responses", json=body, timeout=PATIENCE_S)
    *_, name, last = filter(lambda line: line and line[0] != ":", answer.text.splitlines())
    assert name == "event: response.failed"
    response = json.loads(last.removeprefix("data: "))["response"]
    assert response["status"] == "failed" and "it is odd" in response["error"]["message"]


@pytest.mark.parametrize("failure", [ModelFileError("no model"), RuntimeError("a bug")])
def test_a_model_that_fails_leaves_the_others_alone(start: Start, failure: Exception) -> None:
    server = start()
    assert said(server.ask("b")) == "I am b."
    server.models["a"].failure = failure
    answer = server.ask("a")
    assert answer.status_code == 500 and "Traceback" not in answer.text
    assert said(server.ask("b")) == "I am b." and server.pool.members[1].loads == 1
    card = httpx.get(f"{server.address}/v1/models/a").json()
    assert (card["state"], card["problem"]) == ("unloaded", str(failure))
    server.models["a"].failure = None
    assert said(server.ask("a")) == "I am a.", "it is tried again with the next request"


def test_what_cannot_be_planned_is_no_default_and_the_log_says_why(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Made("a")
    broken.failure = ModelFileError("bytes are missing")
    server = start(Member(broken), Member(Made("b")))
    until(lambda: server.pool.members[0].problem)
    assert said(server.ask(None)) == "I am b."
    assert server.ask("a").status_code == 500
    told = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert "a cannot be loaded: bytes are missing" in told


def test_what_never_fits_is_refused_at_once_with_its_numbers(start: Start) -> None:
    mebibyte = 1 << 20
    big = Member(Made("big", 900 * mebibyte))
    pinned = Member(Made("small", 200 * mebibyte), is_pinned=True)
    server = start(big, pinned, room=1000 * mebibyte)
    until(lambda: server.states()["small"] == "ready")
    answer = server.ask("big")
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "model_does_not_fit"
    message = answer.json()["error"]["message"]
    assert "big needs 900 MiB" in message and "of 1000 MiB" in message and "200 MiB" in message


def test_where_other_programs_took_the_memory_it_is_worth_asking_again(start: Start) -> None:
    """The plan had room for it."""
    server = start()
    server.models["a"].failure = DoesNotFitError("only 5 MiB are free", hint="ask later")
    answer = server.ask("a")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "a cannot be loaded: only 5 MiB are free" in answer.json()["error"]["message"]


def test_who_waits_too_long_is_told_to_come_again(start: Start) -> None:
    server = start(limits=Limits(model_s=0.1))
    server.models["a"].gate.clear()
    answer = server.ask("a")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "a was not loaded within" in answer.json()["error"]["message"]
    assert not server.pool.members[0].tickets


def test_only_so_many_requests_wait_for_models(start: Start) -> None:
    server = start(limits=Limits(waiting=1))
    server.models["a"].gate.clear()
    with ThreadsOf(lambda: said(server.ask("a")), 1) as asking:
        until(lambda: len(server.pool.members[0].tickets) == 1)
        answer = server.ask("b")
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        server.models["a"].gate.set()
    assert asking.results == ["I am a."]


def test_a_client_that_goes_away_waits_no_longer(start: Start) -> None:
    server = start()
    server.models["a"].gate.clear()
    body = {"model": "a", "messages": HELLO, "stream": True}
    url = f"{server.address}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=PATIENCE_S) as answer:
        lines = answer.iter_lines()  # which closes the connection when it goes
        assert next(lines) == ": waiting"
        until(lambda: server.states()["a"] == "loading")
        assert len(server.pool.members[0].tickets) == 1
    until(lambda: not server.pool.members[0].tickets)
    server.models["a"].gate.set()
    until(lambda: server.states()["a"] == "ready")
    assert server.pool.members[0].holders == 0
    assert said(server.ask("b")) == "I am b."


# -- how long a model stays ------------------------------------------------------------------------


def test_a_model_leaves_when_nobody_used_it_for_its_time(start: Start) -> None:
    server = start(Member(Made("a"), keep_alive_s=0.1), Member(Made("b")))
    said(server.ask("a"))
    said(server.ask("b"))
    until(lambda: server.states()["a"] == "unloaded")
    assert server.states()["b"] == "ready"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_request_says_how_long_its_model_stays(start: Start, path: str) -> None:
    """With every interface, as Ollama takes it."""
    server = start()
    body = {"model": "a", "max_tokens": 9, "keep_alive": 0}
    body["input" if path == "/v1/responses" else "messages"] = HELLO
    answer = httpx.post(f"{server.address}{path}", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    until(lambda: server.states()["a"] == "unloaded")
    wrong = httpx.post(f"{server.address}{path}", json={**body, "keep_alive": "soon"})
    assert wrong.status_code == 400 and "soon" in wrong.text


def test_pinned_models_are_loaded_at_once_and_stay(start: Start) -> None:
    server = start(
        Member(Made("a"), is_pinned=True, keep_alive_s=0.0), *(Member(Made(n)) for n in "bc")
    )
    until(lambda: server.states()["a"] == "ready")
    for name in "bcabc":
        said(server.ask(name, keep_alive=-1))
    assert server.pool.members[0].loads == 1


def test_nobody_holds_a_model_that_was_unloaded(start: Start) -> None:
    """Its memory is given back when nothing refers to it, at once and not with the next load."""
    server = start(collects=True)
    said(server.ask("a"))
    held = weakref.ref(server.pool.members[0].loaded)
    httpx.post(f"{server.address}/models/unload", json={"model": "a"})
    until(lambda: server.states()["a"] == "unloaded")
    until(lambda: held() is None)


def test_models_are_loaded_and_unloaded_by_name(start: Start) -> None:
    server = start()
    for path, state in (("load", "ready"), ("unload", "unloaded"), ("unload", "unloaded")):
        answer = httpx.post(f"{server.address}/models/{path}", json={"model": "b"})
        assert (answer.status_code, answer.json()["state"]) == (200, state)
        assert server.states()["b"] == state
    assert httpx.post(f"{server.address}/models/load", json={"model": "d"}).status_code == 404


def test_a_loaded_engine_stays(start: Start) -> None:
    """As of a server of one model."""
    with (
        Engine(Speaker(), chat_template=TEMPLATE) as engine,
        Server(engine, names=["one"]) as server,
    ):
        address = server.start()
        answer = httpx.post(f"{address}/models/unload", json={"model": "one"})
        assert answer.status_code == 409 and "stays" in answer.text
        assert httpx.get(f"{address}/v1/models").json()["data"][0]["state"] == "ready"


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("500ms", 0.5),
        (0, 0.0),
        ("0", 0.0),
        (90, 90.0),
        (2.5, 2.5),
        (-1, inf),
        ("-1", inf),
        ("-5m", inf),
    ],
)
def test_times_are_those_of_ollama(given: object, seconds: float) -> None:
    assert keep_alive_of(given) == seconds


@pytest.mark.parametrize("given", ["", "soon", "5x", "m", "5 m", True, [], {}, "1e400", "nan", "-"])
def test_what_is_no_time_is_refused(given: object) -> None:
    with pytest.raises(UnsupportedError, match="is no time such as 5m"):
        keep_alive_of(given)


# -- the end ---------------------------------------------------------------------------------------


def test_a_server_ends_while_a_model_is_loaded(start: Start) -> None:
    """The load ends, and who waits for it is told so."""
    server = start()
    server.models["a"].gate.clear()
    with ThreadsOf(lambda: server.ask("a").status_code, 1) as asking:
        until(lambda: server.states()["a"] == "loading")
        server.pool.close()
    assert asking.results == [503]
    assert not server.models["a"].backends


def run(what: Callable[[Pool], Awaitable[Any]], *members: Member, room: int = SIZE) -> Any:
    """In a loop of its own, with a pool that is closed at the end."""
    pool = Pool(members, Capacity({"host": room}, room))
    try:
        return asyncio.run(what(pool))  # type: ignore[arg-type]
    finally:
        pool.close()


def test_a_cancelled_wait_keeps_no_model_busy() -> None:
    """Also where it is cancelled when it has its model already."""
    model = Made("a")

    async def wait(pool: Pool) -> None:
        for delay_s in (0.0, 0.001, 0.01, 0.05):
            waits = asyncio.ensure_future(pool.lease(pool.members[0]))
            await asyncio.sleep(delay_s)
            waits.cancel()
            (found,) = await asyncio.gather(waits, return_exceptions=True)
            if isinstance(found, Lease):
                found.release()
            await asyncio.sleep(0.05)
        await pool.unload(pool.members[0])
        assert pool.members[0].holders == 0

    run(wait, Member(model))


def test_kinds_have_models_of_their_own() -> None:
    members = [Member(Made("talks")), Member(Made("points", kind="embed"))]

    async def find(pool: Pool) -> None:
        assert pool.find(None) is members[0] and pool.find(None, "embed") is members[1]
        assert pool.find("points", ANY) is members[1] and pool.find(None, ANY) is members[0]
        with pytest.raises(ApiError, match=r"talks writes text and .* such as points") as told:
            pool.find("talks", "embed")
        assert (told.value.status, told.value.code) == (404, "unsupported_endpoint")
        with pytest.raises(ApiError, match=r"points makes embeddings and .* such as talks"):
            pool.find("points")
        with pytest.raises(ApiError, match='there is no model "x" here, only points'):
            pool.find("x", "embed")

    run(find, *members)


def test_a_model_may_have_several_names_and_no_other() -> None:
    member = Member(Made("tiny"))

    async def find(pool: Pool) -> None:
        for name in ("tiny", "tiny.gguf", None):
            assert pool.find(name) is member
        for other in ("gpt", 7):
            with pytest.raises(ApiError, match=r"there is no model .* here, only tiny") as told:
                pool.find(other)
            assert (told.value.status, told.value.code) == (404, "model_not_found")
            assert "--any-model" in str(told.value)

    run(find, member)
    pool = Pool([member], any_model=True)
    assert pool.find("gpt") is member
    with pytest.raises(ApiError, match="there is no model 7"):
        pool.find(7)
    pool.close()


def test_who_waits_for_nothing_does_not_look_again_and_again() -> None:
    looks = count()
    pool = Pool([Member(Made("a"))], clock=lambda: float(next(looks)))
    time.sleep(0.05)  # thousands, without a wait
    assert next(looks) < 100
    pool.close()


class ThreadsOf:
    """Calls a function in some threads; `results` are there behind the body."""

    def __init__(self, what: Callable[[], Any], count: int) -> None:
        self.results: list[Any] = []
        self._threads = [
            threading.Thread(target=lambda: self.results.append(what())) for _ in range(count)
        ]

    def __enter__(self) -> ThreadsOf:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)
