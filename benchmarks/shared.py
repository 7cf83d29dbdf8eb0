"""What scripts share: commands, prompts, servers, and results that name their machine."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import Request, urlopen

from edgespec.decode.engine import Engine
from edgespec.errors import BackendError
from edgespec.memory.device.host import cpu_name

_START_S = 120.0


def run(about: str, **commands: Callable[[], Any]) -> None:
    """Call what the first word names; `about` is printed where it names nothing."""
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    if word in ("-h", "--help"):
        print(about)
    elif word not in commands:
        sys.exit(about)
    else:
        del sys.argv[1]
        sys.exit(commands[word]())


def read_questions(path: Path, per_category: int = 10**9) -> list[dict[str, Any]]:
    """The first ones of each category of a file of prompts."""
    taken: Counter[str] = Counter()
    questions = []
    for line in path.read_text(encoding="utf-8").splitlines():
        question = json.loads(line)
        taken[question["category"]] += 1
        if taken[question["category"]] <= per_category:
            questions.append(question)
    return questions


# -- servers ---------------------------------------------------------------------------------


def free_port() -> int:
    """One from which on ports are likely to be free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: Sequence[str], port: int | None = None) -> Iterator[str]:
    """A server at an address, until the end of the block. Raises BackendError."""
    port = port or free_port()
    address = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until = time.monotonic() + _START_S
        while not is_there(address):
            if process.poll() is not None or time.monotonic() > until:
                raise BackendError(f"it does not start: {' '.join(command)}")
            time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def is_there(address: str) -> bool:
    try:
        with urlopen(f"{address}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def streamed(address: str, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of an answer below /v1 as they come. Raises OSError, BackendError."""
    sent = json.dumps({**body, "stream": True}).encode()
    asked = Request(f"{address}/v1/{path}", sent, {"content-type": "application/json"})
    with urlopen(asked, timeout=600) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                event: dict[str, Any] = json.loads(line[6:])
                if "error" in event:
                    raise BackendError(f"{address} gave up: {event['error']}")
                yield event


# -- answers that are read meanwhile ---------------------------------------------------------


class Reader:
    """Answers that are read one after another, and how long each of their chunks took to come."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._is_over = engine, threading.Event()
        self._waits: list[float] = []
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _read(self) -> None:
        while not self._is_over.is_set():
            last = time.perf_counter()
            for number, _ in enumerate(self._engine.stream("Tell me a story.", max_tokens=200)):
                now = time.perf_counter()
                if number > 1:  # the prompt is read before
                    self._waits.append(now - last)
                last = now
                if self._is_over.is_set():
                    break

    def tell(self, when: str) -> None:
        """Print the median, one in a hundred, and the longest waits."""
        waits = [round(one * 1e3, 1) for one in sorted(self._waits)]
        print(f"{when}: {len(waits)} waits, median {median(waits)} ms, ", end="")
        print(f"1% over {waits[-len(waits) // 100]}, longest {waits[-5:]} ms", flush=True)


# -- results ---------------------------------------------------------------------------------


@contextmanager
def stoppable() -> Iterator[None]:
    """Ctrl-C or SIGTERM ends what is inside, not the script: it shows what was measured so far."""

    def stop(_number: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        print("stopped: what follows was measured until now", file=sys.stderr, flush=True)
    finally:
        signal.signal(signal.SIGTERM, before)


def record(prompts: Path, *others: Path) -> dict[str, str]:
    """What a measurement is of: when, by which commits and compiler, on which prompts.

    Args:
        others: programs beside it, which say their versions.
    """
    from llama_cpp import llama_print_system_info

    root = Path(__file__).parent.parent
    found = {
        "date": date.today().isoformat(),
        "edgespec": first_line("git", "-C", str(root), "describe", "--always", "--dirty"),
        "llama_cpp_python": version("llama-cpp-python"),
        "llama_cpp_features": llama_print_system_info().decode(),
        "compiler": first_line("c++", "--version"),
        "prompts_sha256": sha256(prompts.read_bytes()).hexdigest(),
    }
    return found | {one.name: first_line(str(one), "--version") for one in others}


def first_line(*command: str) -> str:
    """Of what a command says; empty where it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return (done.stdout + done.stderr).strip().partition("\n")[0]


def results_file(folder: Path, what: str, model: str) -> Path:
    """NAME.json in the folder, which is made: what was measured, the model and the processor."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{what} {Path(model).stem} {cpu_name()}"
    return folder / f"{re.sub('[^a-z0-9._]+', '-', name.lower()).strip('-')}.json"


def write_results(path: Path, document: dict[str, Any]) -> None:
    """As JSON, the machine's name included."""
    found = {"machine": cpu_name(), **document}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"results: {path}", file=sys.stderr)
