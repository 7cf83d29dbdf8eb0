"""A server under attack: its peak beside its plan, others' waits, and whether answers get mixed up.

    python benchmarks/attacks.py peaks [MODEL] [--budget 500MiB] [--only WORD]
    python benchmarks/attacks.py chat [MODEL]
    python benchmarks/attacks.py soak [MODEL] [--requests 3000] [--seconds S]
    python benchmarks/attacks.py constants [MODEL]

peaks: for each attack a server of its own, asked by eight clients at once, twice. What the server
had resident at most and what its guests had of their own, together, beside its plan; it fails where
that is more. chat: seconds of a chat of one token, alone and beside four clients who send texts of
4 MB. soak: clients with two keys ask for answers that are known beforehand, in many ways, some
leaving early, while others attack; it fails where one is lost or another one's. constants: what
`memory/bytes/requests.py` counts with: what eight of the worst bodies at once add to a process, and
what tokenizing takes for each byte.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import cycle
from statistics import median
from typing import Any

import httpx
import psutil
from shared import running, stoppable

from edgespec.backends.llama.tokenizer import VocabularyTokenizer
from edgespec.memory.device.host import cpu_name
from edgespec.memory.device.track import peak_resident_bytes, resident_bytes
from edgespec.models.embedded import embedded_model

_AT_ONCE, _ASKED = 8, 16  # clients of an attack, and requests of them all
_CLIENTS = 16  # of a soak
_PATIENCE_S = 120.0
_LOOK_S = 0.02
_KEYS = ("first-key-of-two", "second-key-of-two")
_CHAT, _PROMPT, _TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"

# -- attacks -------------------------------------------------------------------------------

_LONG = "a " * 1_990_000
_NESTED = b'{"messages":[],"m":[' + b",".join([b"[[[[1]]]]"] * 418_000) + b"]}"


def _chat(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 1, **more}


def _chained(rule: str, size: int, atom: str = '"x"') -> str:
    rules = [f"a{i} ::= {rule.format(f'a{i + 1}')}" for i in range(size)]
    return "\n".join(["root ::= a0", *rules, f"a{size} ::= {atom}"])


def _many(size: int) -> dict[str, Any]:
    said = [{"role": one, "content": "a " * size} for one in ("user", "assistant") * 2000]
    return {"messages": said[:-1], "max_tokens": 1}


# What is sent where; texts of bytes are compressed.
_ATTACKS: dict[str, tuple[str, Any]] = {
    "a chat of 4 MB": (_CHAT, _chat(_LONG)),
    "a prompt of 4 MB": (_PROMPT, {"prompt": _LONG, "max_tokens": 1}),
    "4 MB with pieces": (_TOKENIZE, {"content": _LONG, "with_pieces": True}),
    "8 KB of gzip: 1.7 million lists": (_CHAT, gzip.compress(_NESTED, 9)),
    "1.7 million lists": (_CHAT, _NESTED),
    "200,000 values": (_CHAT, b'{"messages":[],"m":[' + b",".join([b"[[1]]"] * 65_000) + b"]}"),
    "4 MB in 3,999 messages": (_CHAT, _many(500)),
    "a text of 100 KB, with pieces": (_TOKENIZE, {"content": "a " * 50_000, "with_pieces": True}),
    "a chat of 100 KB": (_CHAT, _chat("a " * 50_000)),
    "a chat of 100 KB in 3,999 messages": (_CHAT, _many(12)),
    "a chain of 4,000 rules": (_CHAT, _chat("a", grammar=_chained("{}", 4000))),
    "rules that double": (_CHAT, _chat("a", grammar=_chained('{0} {0} | "x"', 3000))),
    "a grammar that repeats": (_CHAT, _chat("a", grammar=_chained('"x" {}', 300, "[a-z]{9999}"))),
}


def _bytes_of(body: Any) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


class _Own(threading.local):
    """What each thread has: a client, as making one takes 30 ms of the processor."""

    def __init__(self) -> None:
        self.client = httpx.Client(timeout=_PATIENCE_S)


_own = _Own()


def _send(address: str, path: str, body: Any, key: str = "") -> int:
    """The status of an answer; 0 where there is none."""
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    if isinstance(body, bytes) and body[:2] == b"\x1f\x8b":
        headers["content-encoding"] = "gzip"
    try:
        told = _own.client.post(address + path, content=_bytes_of(body), headers=headers)
        return told.status_code
    except httpx.HTTPError:
        return 0


@contextmanager
def _attacked(address: str, names: Sequence[str], clients: int, key: str = "") -> Iterator[None]:
    """Meanwhile these clients send these attacks, one after another.

    They have a process of their own: whoever is timed here would wait for their threads.
    """
    spawn = multiprocessing.get_context("spawn")
    is_there = spawn.Event()
    attackers = spawn.Process(
        target=_attack, args=(address, tuple(names), clients, key, is_there), daemon=True
    )
    attackers.start()
    try:
        if not is_there.wait(_PATIENCE_S):
            raise RuntimeError("nobody attacks")
        yield
    finally:
        attackers.kill()
        attackers.join()


def _attack(
    address: str, names: Sequence[str], clients: int, key: str, is_there: threading.Event
) -> None:
    bodies = [(path, _bytes_of(body)) for path, body in map(_ATTACKS.__getitem__, names)]

    def attack(number: int) -> None:
        for path, body in cycle(bodies[number % len(bodies) :] + bodies[: number % len(bodies)]):
            _send(address, path, body, key)

    for number in range(clients):
        threading.Thread(target=attack, args=(number,)).start()
    is_there.set()


# -- peaks ---------------------------------------------------------------------------------


class Guests:
    """The most that a server's own processes have at once, but for what they share with others."""

    def __init__(self, server: psutil.Process) -> None:
        self._server, self._is_over, self.most_bytes = server, threading.Event(), 0
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Guests:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            found = 0
            for one in self._server.children(recursive=True):
                with suppress(psutil.Error):
                    found += one.memory_full_info().uss
            self.most_bytes = max(self.most_bytes, found)


def _server_of(address: str) -> psutil.Process:
    """Which of the processes that this one started listens there."""
    port = int(address.rpartition(":")[2])
    for one in psutil.Process().children():
        if str(port) in one.cmdline():
            return one
    raise RuntimeError("the server is gone")


def _command(chosen: argparse.Namespace, *more: str) -> list[str]:
    named = [str(chosen.model)] if chosen.model else []
    return [sys.executable, "-m", "edgespec.cli.main", "serve", *named, *more]


def peaks(chosen: argparse.Namespace) -> bool:
    """Whether none of them took more than planned."""
    is_held = True
    for name, (path, body) in _ATTACKS.items():
        if chosen.only not in name:
            continue
        with running(_command(chosen, "--budget", chosen.budget)) as address:
            _send(address, _CHAT, _chat("Hello"))
            with Guests(_server_of(address)) as guests, ThreadPoolExecutor(_AT_ONCE) as clients:
                asked = [clients.submit(_send, address, path, body) for _ in range(_ASKED)]
                statuses = Counter(one.result() for one in asked)
            found = httpx.get(f"{address}/status").json()["memory"]
            is_there = _send(address, _CHAT, _chat("Hello")) == 200
        peak, planned = found["peak_bytes"] + guests.most_bytes, found["planned_peak_bytes"]
        is_held = is_held and is_there and peak <= planned and 0 not in statuses
        told = ", ".join(f"{number} x {status}" for status, number in statuses.items())
        print(
            f"{name}: {found['peak_bytes'] >> 20} + {guests.most_bytes >> 20} MiB of "
            f"{planned >> 20} planned; {told}",
            flush=True,
        )
    return is_held


# -- a chat beside long texts ----------------------------------------------------------------


def chat(chosen: argparse.Namespace) -> bool:
    """Seconds of chats of one token, each with words of its own."""

    def times(number: int) -> list[float]:
        found = []
        for place in range(number):
            began = time.perf_counter()
            assert _send(address, _CHAT, _chat(f"What is {place}?")) == 200
            found.append(time.perf_counter() - began)
        return found

    texts = ["a chat of 4 MB", "a prompt of 4 MB", "4 MB with pieces"]
    with running(_command(chosen)) as address:
        times(3)
        alone = times(20)
        with _attacked(address, texts, 4):
            beside = times(40)
    for what, found in (("alone", alone), ("beside four texts of 4 MB", beside)):
        print(f"a chat of one token {what}: median {median(found):.3f} s, longest {max(found):.3f}")
    return True


# -- soak ------------------------------------------------------------------------------------


class Soak:
    """Requests whose answers are known. Counts what came: `right`, `lost` or `crossed`.

    Who is told that the server is busy asks again, as its answer says.
    """

    def __init__(self, address: str, requests: int, seconds: float) -> None:
        self._address, self._left, self._lock = address, iter(range(requests)), threading.Lock()
        self.end_s = time.monotonic() + seconds
        self.counts, self.wrong = Counter[str](), list[str]()

    def client(self, number: int) -> None:
        """Ask until all of them are done, or the time is over."""
        draw, key = random.Random(number), _KEYS[number % 2]
        headers = {"authorization": f"Bearer {key}"}
        with httpx.Client(base_url=self._address, headers=headers, timeout=_PATIENCE_S) as one:
            while True:
                with self._lock:
                    place = next(self._left, None)
                if place is None or time.monotonic() > self.end_s:
                    return
                kind = draw.choice(list(_KINDS))
                marker = f"m{place}k{number % 2}"
                try:
                    told = _KINDS[kind](one, marker)
                except httpx.HTTPError as problem:
                    told = f"{type(problem).__name__}: {problem}"
                is_right = told == marker
                outcome = "right" if is_right else "crossed" if _is_marker(told) else "lost"
                with self._lock:
                    self.counts[outcome] += 1
                    self.counts[kind] += 1
                    if not is_right:
                        self.wrong.append(f"{kind} {marker}: {told[:200]}")


def _is_marker(told: str) -> bool:
    return told.startswith("m") and "k" in told and len(told) < 12


def _asked(client: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    end = time.monotonic() + _PATIENCE_S
    while True:
        told = client.post(path, json=body)
        if told.status_code not in (429, 503) or time.monotonic() > end:
            return told
        time.sleep(float(told.headers.get("retry-after", 1)))


def _form(marker: str) -> dict[str, Any]:
    schema = {"name": "a", "schema": {"const": marker}}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _whole(client: httpx.Client, marker: str) -> str:
    told = _asked(client, _CHAT, {**_chat(f"Say {marker}"), **_form(marker), "max_tokens": 40})
    return _content(told, lambda found: found["choices"][0]["message"]["content"])


def _content(told: httpx.Response, of: Callable[[Any], str]) -> str:
    """The text of an answer without the quotes of a JSON string, or what is wrong."""
    if told.status_code != 200:
        return f"{told.status_code} {told.text}"
    return of(told.json()).strip('"')


def _streamed(client: httpx.Client, marker: str, most: int = 10**9) -> str:
    body = {**_chat(f"Say {marker}"), **_form(marker), "max_tokens": 40, "stream": True}
    end, text = time.monotonic() + _PATIENCE_S, ""
    while time.monotonic() < end:
        with client.stream("POST", _CHAT, json=body) as told:
            if told.status_code in (429, 503):
                time.sleep(1)
                continue
            if told.status_code != 200:
                return f"{told.status_code} {told.read().decode()}"
            for number, line in enumerate(told.iter_lines()):
                if line.startswith("data: {"):
                    choices = json.loads(line[6:]).get("choices") or [{}]
                    text += choices[0].get("delta", {}).get("content") or ""
                if number > most:
                    break
        return text.strip('"')
    return "it was always busy"


def _left(client: httpx.Client, marker: str) -> str:
    """Somebody who leaves early; what he saw is the beginning of his own."""
    told = _streamed(client, marker, most=4)
    return marker if marker.startswith(told) else told


def _completion(client: httpx.Client, marker: str) -> str:
    body = {"prompt": f"Say {marker}:", "max_tokens": 40, "structured_outputs": {"regex": marker}}
    return _content(_asked(client, _PROMPT, body), lambda found: found["choices"][0]["text"])


def _response(client: httpx.Client, marker: str) -> str:
    text = {"format": {"type": "json_schema", "name": "a", "schema": {"const": marker}}}
    body = {"input": f"Say {marker}", "text": text, "max_output_tokens": 40}
    told = _asked(client, "/v1/responses", body)
    if told.status_code == 200:
        other = next(key for key in _KEYS if key not in client.headers["authorization"])
        path, headers = f"/v1/responses/{told.json()['id']}", {"authorization": f"Bearer {other}"}
        if (status := client.get(path, headers=headers).status_code) != 404:
            return f"another key got {status}"
    return _content(told, lambda found: found["output"][-1]["content"][0]["text"])


def _message(client: httpx.Client, marker: str) -> str:
    form = {"format": {"type": "json_schema", "schema": {"const": marker}}}
    body = {**_chat(f"Say {marker}"), "output_config": form, "max_tokens": 40}
    return _content(
        _asked(client, "/v1/messages", body), lambda found: found["content"][-1]["text"]
    )


def _tokens(client: httpx.Client, marker: str) -> str:
    told = _asked(client, _TOKENIZE, {"content": marker})
    if told.status_code != 200:
        return f"{told.status_code} {told.text}"
    back = _asked(client, "/detokenize", {"tokens": told.json()["tokens"]})
    return _content(back, lambda found: found["content"])


_KINDS: dict[str, Callable[[httpx.Client, str], str]] = {
    "whole": _whole,
    "streamed": _streamed,
    "left": _left,
    "completion": _completion,
    "response": _response,
    "message": _message,
    "tokens": _tokens,
}


def soak(chosen: argparse.Namespace) -> bool:
    """Whether each client got its own answer."""
    keys = [word for key in _KEYS for word in ("--api-key", key)]
    began = time.monotonic()
    with running(_command(chosen, "--budget", chosen.budget, *keys)) as address:
        asked = Soak(address, chosen.requests, chosen.seconds)
        names = [name for name in _ATTACKS if "repeats" not in name]
        threads = ThreadPoolExecutor(_CLIENTS)
        with stoppable(), _attacked(address, names, 4, _KEYS[1]), threads as clients:
            try:
                list(clients.map(asked.client, range(_CLIENTS)))
            finally:
                asked.end_s = 0.0
        headers = {"authorization": f"Bearer {_KEYS[0]}"}
        found = httpx.get(f"{address}/status", headers=headers).json()["memory"]
    kinds = {kind: asked.counts.pop(kind) for kind in _KINDS}
    print(f"{sum(kinds.values())} requests in {time.monotonic() - began:.0f} s: {kinds}")
    print(f"right {asked.counts['right']}, lost {asked.counts['lost']}, ", end="")
    print(f"crossed {asked.counts['crossed']}; ", end="")
    print(f"peak {found['peak_bytes'] >> 20} MiB of {found['planned_peak_bytes'] >> 20} planned")
    print("\n".join(asked.wrong[:20]))
    return asked.counts["right"] == sum(kinds.values())


# -- what the plan counts with ---------------------------------------------------------------


def constants(chosen: argparse.Namespace) -> bool:
    """Each is compared with what a plan has for it by whoever reads this."""
    worst = 0
    for name in ("200,000 values", "8 KB of gzip: 1.7 million lists", "a chat of 4 MB"):
        path, body = _ATTACKS[name]
        with running(_command(chosen)) as address:
            _send(address, _CHAT, _chat("Hello"))
            before = httpx.get(f"{address}/status").json()["memory"]["resident_bytes"]
            with ThreadPoolExecutor(_AT_ONCE) as clients:
                list(clients.map(lambda _: _send(address, path, body), range(_ASKED)))  # noqa: B023
            peak = httpx.get(f"{address}/status").json()["memory"]["peak_bytes"]
        worst = max(worst, peak - before)
        print(f"{name}, eight at once: {(peak - before) / 2**20:.1f} MiB more", flush=True)
    tokenizer = VocabularyTokenizer(chosen.model or embedded_model())
    tokenizer.encode("a")
    size = 1 << 20
    for what, text in (("letters", "a " * (size // 2)), ("one word", "a" * size)):
        before = max(resident_bytes(), peak_resident_bytes())
        tokenizer.encode(text)
        print(f"tokenizing {what}: {(peak_resident_bytes() - before) / size:.0f} bytes a byte")
    tokenizer.close()
    return True


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("peaks", "chat", "soak", "constants"))
    parser.add_argument("model", nargs="?")
    parser.add_argument("--budget", default="500MiB")
    parser.add_argument("--only", default="", help="attacks with this word")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--seconds", type=float, default=1e9, help="that a soak takes at most")
    chosen = parser.parse_args()
    print(cpu_name())
    if not globals()[chosen.what](chosen):
        sys.exit(1)


if __name__ == "__main__":
    main()
