"""How long a person waits for the first token of an answer.

python benchmarks/first_token.py restart MODEL [--tokens 8000] [--kv-type f16] [--folder KEPT]
python benchmarks/first_token.py repl MODEL [--tokens 1450] [--wait 15] [--count 20]
python benchmarks/first_token.py page MODEL [--tokens 1450] [--wait 15] [--count 20]
python benchmarks/first_token.py beside MODEL [--tokens 1450] [--count 10]
python benchmarks/first_token.py busy MODEL [--count 5]

`restart`: the next message of a conversation, asked of a server that was killed and started again,
beside one that never stopped, the texts compared; with it what the page has read ahead is known.
`repl` and `page`: a text is pasted, and Enter follows so many seconds later; the page needs
Chromium and playwright. `beside`: another client's answer, with and without somebody who types
meanwhile. `busy`: a message after a pause, with and without a program that keeps one core busy.
Texts are of docs/; --folder keeps the cache of `restart`: its text is read once.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from urllib.request import Request, urlopen

from shared import free_port, is_there, run, streamed

_ROOT = Path(__file__).parents[1]
_CHARACTERS = 3.7  # of a token of these pages, about
_ASKED = "Name one command of it, and say what it does."
_BETWEEN_S = 0.3  # of typing, at which the page reads


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(f"first_token.py {sys.argv[0]}")
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--kv-type", default="f16")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--wait", type=float, default=15.0)
    parser.add_argument("--count", type=int)
    return parser.parse_args()


def _text(tokens: int, number: int = 0) -> str:
    """Of about so many tokens; each number has another beginning."""
    pages = "\n".join(one.read_text() for one in sorted((_ROOT / "docs").glob("*.md")))
    count = round(tokens * _CHARACTERS)
    start = number * 4001 % len(pages)
    return f"Text {number}: " + (pages[start:] + pages * (1 + count // len(pages)))[:count]


@contextmanager
def _server(model: Path, *options: str, folder: Path | None = None) -> Iterator[str]:
    """A server, which is killed at the end of the block."""
    port = free_port()
    command = [sys.executable, "-m", "edgespec", "serve", str(model), "--port", str(port), *options]
    environment = os.environ | ({} if folder is None else {"EDGESPEC_CACHE": str(folder)})
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)
    try:
        address = f"http://127.0.0.1:{port}"
        while not is_there(address):
            assert process.poll() is None, "the server did not start"
            time.sleep(0.05)
        yield address
    finally:
        process.kill()
        process.wait()


def _post(address: str, body: dict[str, Any]) -> None:
    sent = json.dumps(body).encode()
    url, head = f"{address}/v1/chat/completions", {"content-type": "application/json"}
    with urlopen(Request(url, sent, head), timeout=3600) as answer:
        answer.read()


def _asked(address: str, messages: Sequence[Any], most: int) -> tuple[float, float, str, Any]:
    """Seconds to the first token and to the last, the text and the usage of an answer."""
    began, first, text, usage = time.perf_counter(), 0.0, "", None
    body = {"messages": messages, "max_tokens": most, "temperature": 0}
    body["stream_options"] = {"include_usage": True}
    for event in streamed(address, "chat/completions", body):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            first = first or (time.perf_counter() - began) * bool(choice["delta"].get("content"))
            text += choice["delta"].get("content") or ""
    return first, time.perf_counter() - began, text, usage


def _tell(what: str, seconds: Sequence[float]) -> None:
    late = quantiles(seconds, n=20)[-1] if len(seconds) > 1 else seconds[0]
    print(f"{what}: median {median(seconds):.2f} s, p95 {late:.2f}, of {len(seconds)}", flush=True)


# -- after a restart -------------------------------------------------------------------------


def restart() -> None:
    """The same question of a server that never stopped, and of one that was killed."""
    one = _arguments()
    tokens, count = one.tokens or 8000, one.count or 3
    options = ["--users", "1", "--ctx", str(tokens * 115 // 100 + 500), "--kv-type", one.kv_type]
    options += ["--disk-cache", "8GiB"]
    with tempfile.TemporaryDirectory() as made, tempfile.TemporaryDirectory() as copies:
        folder = one.folder or Path(made)
        messages = [{"role": "user", "content": f"{_text(tokens)}\n\nWhat is this about?"}]
        with _server(one.model, *options, folder=folder) as address:
            text = _asked(address, messages, 32)[2]
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": _ASKED},
            ]
            before = -1
            while before != (before := _kept_bytes(folder)):
                time.sleep(1)
            first, _, expected, usage = _asked(address, messages, 32)
        print(f"{usage['prompt_tokens']} tokens, {before >> 20} MiB kept; ", end="")
        print(f"a server that never stopped: {first:.2f} s")
        for is_ahead in (False, True):
            waits = []
            for number in range(count):
                copy = Path(copies) / f"{is_ahead}{number}"
                shutil.copytree(folder, copy)
                with _server(one.model, *options, folder=copy) as address:
                    if is_ahead:
                        ahead = {"messages": messages, "prompt_cache_options": {"prewarm": True}}
                        _post(address, ahead)
                    first, _, text, _ = _asked(address, messages, 32)
                    assert text == expected, "another text"
                    waits.append(first)
                shutil.rmtree(copy)
            _tell(f"killed and started again{', read ahead' * is_ahead}", waits)


def _kept_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("prefixes/*/*.cells"))


# -- pasted before it is sent ----------------------------------------------------------------


def repl() -> None:
    """From Enter to the end of an answer of one token, in a terminal."""
    one = _arguments()
    tokens, count = one.tokens or 1450, one.count or 20
    command = [sys.executable, "-m", "edgespec", "chat", str(one.model), "--read-ahead", "on"]
    command += [
        "--ctx",
        str(2 * tokens + 600),
        "--temperature",
        "0",
        "-n",
        "1",
        "--disk-cache",
        "0",
    ]
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS="200", LINES="50")
        os.execv(sys.executable, command)
    try:
        _until(terminal, b"Ctrl-D leaves", 120.0)
        waits = []
        for number in range(count):
            os.write(terminal, b"/clear\r")
            _until(terminal, None, 1.0)
            pasted = " ".join(_text(tokens, number).split()).encode()
            for start in range(0, len(pasted), 2048):
                edge = b"\x1b[200~" * (start == 0), b"\x1b[201~" * (start + 2048 >= len(pasted))
                os.write(terminal, edge[0] + pasted[start : start + 2048] + edge[1])
                _until(terminal, None, 0.01)
            _until(terminal, None, one.wait)
            began = time.perf_counter()
            os.write(terminal, b"\r")
            _until(terminal, b"cut off after 1", 120.0)
            waits.append(time.perf_counter() - began)
        _tell("REPL", waits)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _until(terminal: int, expected: bytes | None, seconds: float) -> None:
    """Take what a terminal shows until a text, or for so long; it answers where its cursor is."""
    shown, end = b"", time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if select.select([terminal], [], [], min(left, 0.05))[0]:
            new = os.read(terminal, 1 << 16)
            shown += new
            if b"\x1b[6n" in new:
                os.write(terminal, b"\x1b[1;1R")
            if expected is not None and expected in shown:
                return
    assert expected is None, f"{expected!r} did not come: {shown[-300:]!r}"


_WATCH = """() => {
  const $ = (one) => document.querySelector(one);
  window.seen = 0;
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter") window.entered = performance.now(); }, true);
  new MutationObserver(() => {
    const text = [...document.querySelectorAll("article.assistant .text")].at(-1);
    if (text?.innerText && !window.seen) window.seen = performance.now();
  }).observe($("#talk"), {subtree: true, childList: true, characterData: true});
}"""


def page() -> None:
    """From Enter to the first word that is seen, in Chromium."""
    from playwright.sync_api import sync_playwright

    one = _arguments()
    tokens, count = one.tokens or 1450, one.count or 20
    options = ["--users", "1", "--ctx", str(2 * tokens + 600)]
    with _server(one.model, *options) as address, sync_playwright() as api:
        found = shutil.which("chromium") or shutil.which("google-chrome")
        flags = ["--no-sandbox", "--disable-dev-shm-usage"]
        with api.chromium.launch(executable_path=found, args=flags) as browser:
            tab = browser.new_page()
            tab.goto(address)
            tab.wait_for_selector("#server dd")
            tab.click("#settings > summary")
            tab.select_option("#ahead", "always")
            tab.fill("#most", "4")
            waits = []
            for number in range(count):
                tab.click("#clear")
                tab.evaluate(_WATCH)
                tab.focus("#message")
                tab.keyboard.insert_text(_text(tokens, number))
                tab.wait_for_timeout(1000 * one.wait)
                tab.press("#message", "Enter")
                tab.wait_for_selector("#send:visible", timeout=120_000)
                tab.wait_for_timeout(100)
                waits.append(tab.evaluate("(window.seen - window.entered) / 1000"))
            _tell("page", waits)


# -- beside somebody who types ---------------------------------------------------------------


def beside() -> None:
    """Answers of 96 tokens, every other one beside a text that grows and is read at each pause."""
    one = _arguments()
    tokens, count = one.tokens or 1450, one.count or 10
    with _server(one.model, "--users", "2", "--ctx", str(2 * tokens + 600)) as address:
        told = [{"role": "user", "content": "Write a long story about a fox."}]
        _asked(address, told, 16)
        firsts: dict[bool, list[float]] = {False: [], True: []}
        took: dict[bool, list[float]] = {False: [], True: []}
        for number in range(2 * count):
            is_over = threading.Event()
            typist = threading.Thread(target=_type, args=(address, tokens, number, is_over))
            if is_ahead := number % 2 == 1:
                typist.start()
            time.sleep(1 + 0.37 * (number % 3))
            first, end, _, _ = _asked(address, told, 96)
            firsts[is_ahead].append(first)
            took[is_ahead].append(end - first)
            is_over.set()
            if is_ahead:
                typist.join()
        for is_ahead in took:
            _tell(f"first token{' beside reading' * is_ahead}", firsts[is_ahead])
            _tell(f"the rest{' beside reading' * is_ahead}", took[is_ahead])
        print(f"the rest takes {median(took[True]) / median(took[False]):.3f} times as long")


def _type(address: str, tokens: int, number: int, is_over: threading.Event) -> None:
    """A text that grows at each pause, and is read ahead then, as by the page."""
    text = _text(tokens, number)
    while not is_over.is_set():
        text += " and"
        messages = [{"role": "user", "content": text}]
        _post(address, {"messages": messages, "prompt_cache_options": {"prewarm": True}})
        is_over.wait(_BETWEEN_S)


# -- beside another program ------------------------------------------------------------------


def busy() -> None:
    """Messages of some twenty tokens, each after a pause; every other one beside a busy core."""
    one, waits = _arguments(), dict[bool, list[float]]({False: [], True: []})
    spin = "print(flush=True)\nwhile True: pass"
    with _server(one.model, "--users", "1") as address:
        for number in range(2 * (one.count or 5) + 1):
            told = {"role": "user", "content": f"Say why {number} + 4 is {number + 4}, in a word."}
            if is_busy := number % 2 == 1:
                program = subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE)
                assert program.stdout is not None
                program.stdout.readline()
            time.sleep(2)
            first = _asked(address, [told], 4)[0]
            if number:  # the first one loads what is left
                waits[is_busy].append(first)
            if is_busy:
                program.kill()
                program.communicate()
    for is_busy, seconds in waits.items():
        _tell(f"first token{' beside a busy core' * is_busy}", seconds)


if __name__ == "__main__":
    assert __doc__ is not None
    run(__doc__, restart=restart, repl=repl, page=page, beside=beside, busy=busy)
