"""A subject in a process of its own, so that its memory is its own and several take turns.

The two processes send each other pickled tuples over the child's standard streams: a method's name
and arguments one way; progress, and then a result or an error, the other way. The child ends when
its parent does.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from edgespec.bench.turns import Answer
from edgespec.decode.engine import Prompt
from edgespec.errors import BackendError, EdgespecError
from edgespec.memory.plan.request import Request
from edgespec.models.processes import messages_out, start_module

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
        self._process = start_module("edgespec.bench.worker", stdin=subprocess.PIPE)
        try:
            self.drafters: list[str] = self.call("open", model, request, list(drafters))
        except BaseException:
            self.close(at_once=True)
            raise

    def call(self, method: str, *arguments: Any) -> Any:
        """What `Subject.method` returns or raises."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            pickle.dump((method, arguments), self._process.stdin)
            self._process.stdin.flush()
            while True:
                kind, value = pickle.load(self._process.stdout)
                if kind == _PROGRESS:
                    self._report(*value)
                elif kind == _ERROR:
                    raise value
                else:
                    return value
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as problem:
            self.close()  # which ends one that waits for a question, too
            raise BackendError(
                f"the process that ran the model ended with status {self._process.returncode}",
                hint="status -9 means that the system took its memory back: try --ctx or --budget",
            ) from problem

    def close(self, *, at_once: bool = False) -> None:
        """End the process: politely, or in the middle of what it does."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            if at_once:
                self._process.kill()
            self._process.stdin.close()
            self._process.wait(_PATIENCE_S)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(at_once=kind is not None)


class WorkerContender:
    """One drafter of a worker's model, as a contender."""

    def __init__(self, name: str, worker: Worker, place: int) -> None:
        self.name = name
        self._worker = worker
        self._place = place

    def renew(self) -> None:
        """Forget the answers that were given."""
        self._worker.call("renew", self._place)

    def answer(self, prompt: Prompt, max_tokens: int) -> Answer:
        """The greedy answer to `prompt`."""
        answer = self._worker.call("answer", self._place, prompt, max_tokens)
        assert isinstance(answer, Answer)
        return answer


def _serve(requests: BinaryIO, replies: BinaryIO) -> None:
    from edgespec.bench.subject import open_subject
    from edgespec.models.onnx.folder import read_model

    def reply(kind: str, value: Any) -> None:
        pickle.dump((kind, value), replies)
        replies.flush()

    def report(what: str, fraction: float) -> None:
        reply(_PROGRESS, (what, fraction))

    subject = None
    try:
        while True:
            method, arguments = pickle.load(requests)
            try:
                if method == "open":
                    model, request, drafters = arguments
                    subject, resolved = open_subject(read_model(model), request, drafters, report)
                    reply(_RESULT, resolved)
                else:
                    reply(_RESULT, getattr(subject, method)(*arguments))
            except EdgespecError as problem:
                reply(_ERROR, problem)
    except EOFError:  # the parent has closed, or is gone
        pass
    finally:
        if subject is not None:
            subject.close()


def _main() -> None:
    try:
        _serve(sys.stdin.buffer, messages_out())
    except BrokenPipeError:
        pass


if __name__ == "__main__":
    _main()
