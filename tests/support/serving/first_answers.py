"""A program that gets first answers from the library and from commands, with a small model.

Its argument is the model's file.
"""

from __future__ import annotations

import io
import os
import signal
import socket
import sys
import threading
import time

import httpx

import edgespec
from edgespec.cli.main import main
from edgespec.models.embedded import embedded_drafter_path
from edgespec.setup import loading


def from_the_library(model: str) -> None:
    """The embedded head reads what layers take in, which changes the context's buffers."""
    with edgespec.load(context_size=256, draft_model=embedded_drafter_path()) as engine:
        assert engine.generate("Name a colour.", max_tokens=3).text
        assert "".join(chunk.text for chunk in engine.stream("Name a river.", max_tokens=3))
    with edgespec.load(model) as engine:
        assert engine.generate("Name a colour.", max_tokens=3).token_ids


def command(*arguments: str, stdin: bytes = b"") -> None:
    sys.argv, sys.stdin = ["edgespec", *arguments], io.TextIOWrapper(io.BytesIO(stdin))
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code


def serve(model: str) -> None:
    """`edgespec serve` in the main thread, which gets signals, until there was one answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def ask() -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as server:
            while True:
                try:
                    server.get("/health").raise_for_status()
                    break
                except httpx.HTTPError:
                    time.sleep(0.05)
            answer = server.post(
                "/v1/completions", json={"prompt": "hi", "max_tokens": 3, "temperature": 0}
            )
        print("served", answer.json()["usage"]["completion_tokens"])
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=ask, daemon=True).start()
    command("serve", model, "--port", str(port))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # where a shell ignores it
    loading._CURVE_SECONDS = 0.1  # as in the tests' own process
    model = sys.argv[1]
    from_the_library(model)
    command("run", "-m", model, "-p", "hi", "-n", "3")
    command("chat", model, "-n", "3", stdin=b"hi\nand again\n")
    command("bench", model, "--per-task", "1", "-n", "4", "--ctx", "2048")
    serve(model)
