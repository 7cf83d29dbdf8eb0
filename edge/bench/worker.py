"""A loaded model in a process of its own, so that its memory is its own and several take turns.

The parent asks for a method with its arguments and gets progress, and then a result or an error.
The process ends when its parent does.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from edgespec.bench.interleaving import Answer
from edgespec.decode.engine import Prompt
from edgespec.errors import BackendError, EdgespecError
from edgespec.memory.plan.request import Request
from edgespec.models.processes import importing_safely, leave_stdout_and_interrupts
from edgespec.sampling.params import SamplingParams

_PROGRESS, _RESULT, _ERROR = "progress", "result", "error"
_PATIENCE_S = 20.0


class Worker:
    """A process that has loaded a model. Raises what loading it raises."""

    def __init__(
        self,
        model: Path,
        request: Request,
        drafters: Sequence[str],
        report: Callable[[str, float], None] = lambda _what, _fraction: None,
    ) -> None:
        self._report = report
        context = multiprocessing.get_context("spawn")  # a fork would share what is loaded here
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        try:
            with theirs, importing_safely():
                self._process.start()
            self.drafters: list[str] = self.call("open", model, request, list(drafters))
        except BaseException:
            self.close(at_once=True)
            raise

    def call(self, method: str, *arguments: Any) -> Any:
        """What `LoadedModel.method` returns or raises."""
        try:
            self._connection.send((method, arguments))
            while True:
                kind, value = self._connection.recv()
                if kind == _PROGRESS:
                    self._report(*value)
                elif kind == _ERROR:
                    raise value
                else:
                    return value
        except (EOFError, ConnectionError) as problem:
            self.close()
            raise BackendError(
                f"the process that ran the model ended with status {self._process.exitcode}",
                hint="status -9 means that the system took its memory back: try --ctx or --budget",
            ) from problem

    def close(self, *, at_once: bool = False) -> None:
        """End the process: politely, or in the middle of what it does."""
        self._connection.close()
        if self._process.pid is None:  # it could not be started
            return
        if at_once:
            self._process.kill()
        self._process.join(_PATIENCE_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(at_once=kind is not None)


class WorkerContender:
    """One drafter of a worker's model, as a contender."""

    def __init__(
        self, name: str, worker: Worker, place: int, sampling: SamplingParams | None = None
    ) -> None:
        self.name = name
        self._worker = worker
        self._place = place
        self._sampling = sampling

    def renew(self) -> None:
        """Forget the answers that were given."""
        self._worker.call("renew", self._place)

    def answer(self, prompt: Prompt, max_tokens: int) -> Answer:
        """The answer to `prompt`."""
        answer = self._worker.call("answer", self._place, prompt, max_tokens, self._sampling)
        assert isinstance(answer, Answer)
        return answer


def _serve(parent: Connection) -> None:
    """What the process does: answer the parent's calls until it closes, or is gone."""
    from edgespec.bench.loaded_model import LoadedModel, open_model
    from edgespec.models.onnx.folder import read_model

    leave_stdout_and_interrupts()

    def report(what: str, fraction: float) -> None:
        parent.send((_PROGRESS, (what, fraction)))

    loaded: LoadedModel | None = None
    try:
        while True:
            method, arguments = parent.recv()
            try:
                if method == "open":
                    path, request, drafters = arguments
                    loaded, resolved = open_model(read_model(path), request, drafters, report)
                    parent.send((_RESULT, resolved))
                else:
                    parent.send((_RESULT, getattr(loaded, method)(*arguments)))
            except EdgespecError as problem:
                parent.send((_ERROR, problem))
    except (EOFError, ConnectionError):
        pass
    finally:
        if loaded is not None:
            loaded.close()
