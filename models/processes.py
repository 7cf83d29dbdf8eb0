"""Processes of our own that do one job: how they start, what they say, what they may take.

They speak over what was their stdout. Whatever else prints there, such as a library, goes to their
stderr, so that it is never taken for a message. Ctrl-C is their parent's business, which ends them;
they end by themselves when nobody reads them any more.

What strangers wrote (headers, chat templates, grammars) is read in a `Guest`: it may end that
process, or fill it up to its limits, and no other.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from math import inf
from typing import IO, Any, BinaryIO, NamedTuple

from edgespec.errors import BackendError, EdgespecError
from edgespec.models.writing import reason

# The folder a person happens to be in is no place to import from.
_SAFE_PATH = {"PYTHONSAFEPATH": "1"}


def start_module(
    module: str, *arguments: str, environment: dict[str, str] | None = None, **streams: Any
) -> subprocess.Popen[bytes]:
    """Run a module, its messages in a pipe; `streams` say where stdin (nothing) and stderr go."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        env={**os.environ, **_SAFE_PATH, **(environment or {})},
        **{"stdin": subprocess.DEVNULL, **streams},
    )


@contextmanager
def importing_safely() -> Iterator[None]:
    """For what `multiprocessing` starts meanwhile: it passes this environment on."""
    before = {name: os.environ.get(name) for name in _SAFE_PATH}
    os.environ.update(_SAFE_PATH)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def leave_stdout_and_interrupts() -> None:
    """Called first of all in such a process: stdout and Ctrl-C are its parent's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


def messages_out() -> BinaryIO:
    """Called first of all in such a process: where it writes what its parent reads."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    leave_stdout_and_interrupts()
    return out


# -- jobs ----------------------------------------------------------------------------------


def messages_of(
    module: str, job: Any, environment: dict[str, str] | None = None, stderr: Any = None
) -> Generator[dict[str, Any], None, None]:
    """What a module says of its job, document by document; its exit status is the last one.

    It ends with whoever reads no more. Without a place for it its stderr is lost.
    """
    streams = {"stdin": subprocess.PIPE, "stderr": stderr or subprocess.DEVNULL}
    with start_module(module, environment=environment, **streams) as process:
        try:
            assert process.stdin is not None and process.stdout is not None
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write(json.dumps(job).encode())
            yield from map(json.loads, process.stdout)
            yield {"exit_status": process.wait()}
        finally:
            process.kill()


def do_job(work: Callable[[Any, Callable[..., None]], None]) -> None:
    """What such a process does: `work` on its job, with what says a document to its parent.

    The last one tells the `problem` where it fails, and of which `kind` or `errno` that is.
    """
    out = messages_out()
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # it ends when nobody reads any more

    def say(**said: Any) -> None:
        out.write(json.dumps(said).encode() + b"\n")
        out.flush()

    try:
        work(json.load(sys.stdin), say)
    except EdgespecError as problem:
        say(problem=str(problem), hint=problem.hint, kind=type(problem).__name__)
    except OSError as problem:
        say(problem=reason(problem), errno=problem.errno)


# -- guests --------------------------------------------------------------------------------

_LIMITS_ITSELF = sys.platform == "linux"  # macOS has no limit of memory, Windows none at all
_LONGEST_SIZE = 20  # digits
_LOOK_S = 0.1  # between looks at a guest that computes
_PIPE_BYTES = 1 << 20  # else a conversation of 200 KB goes in four parts: 2 ms more
# One arena, and what is freed is given back: a guest is as small after a large question.
_SMALL = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": "1048576",
    "MALLOC_MMAP_THRESHOLD_": "1048576",
}


class GuestLimits(NamedTuple):
    """What an answer of a guest may take.

    Args:
        data_bytes: of memory that is written to, the process itself included.
        seconds: of the processor, all threads together.
        patience_s: by the clock, without what the machine stood still. Only a guest that sleeps, or
            gets no processor, comes to that.
        bytes_per_byte: of memory, more for each byte of the question.
    """

    data_bytes: int
    seconds: float
    patience_s: float
    bytes_per_byte: int = 0

    def most_bytes(self, question_bytes: int) -> int:
        """Memory for a question of that size."""
        return self.data_bytes + self.bytes_per_byte * question_bytes


class GuestEndedError(Exception):
    """There is no answer: the question took more than the limits, or the process crashed."""

    def __init__(self, reason: str, *, is_crash: bool = False) -> None:
        super().__init__(reason)
        self.is_crash = is_crash


class Guest:
    """A process that answers questions one after another, for any number of threads.

    It starts with the first question; where one ended it, another one is started for the next. A
    fork of this process gets its own. Questions and answers are what JSON has, as the process may
    come to do whatever a stranger wants.

    Args:
        module: calls `answer_questions` when it is run.
        environment: variables besides those of this process.
    """

    def __init__(
        self, module: str, limits: GuestLimits, environment: dict[str, str] | None = None
    ) -> None:
        self._module, self._limits = module, limits
        self._environment = {**_SMALL, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: weakref.finalize[..., Guest] | None = None
        self._lock = threading.RLock()
        _guests.add(self)

    def ask(self, question: Any, seconds: float = inf) -> Any:
        """The answer to a question, which may take less time than others.

        Raises GuestEndedError, BackendError where no process can be started, and as `json.dumps`.
        """
        data = json.dumps(question, ensure_ascii=False).encode("utf-8", "surrogatepass")
        limits = self._limits._replace(seconds=min(seconds, self._limits.seconds))
        answered, reasons = threading.Event(), list[str]()
        with self._lock:
            process = self._started()
            assert process.stdin is not None and process.stdout is not None
            watch = _watch, (process, answered, limits, limits.most_bytes(len(data)), reasons)
            threading.Thread(target=watch[0], args=watch[1], daemon=True).start()
            try:
                process.stdin.write(b"%g " % limits.seconds)
                _write(process.stdin, data)
                most = (1 << 20) + 8 * len(data)  # a template may repeat what it is given
                text = _read(process.stdout, most)
                if text is None:
                    reasons.append(f"it writes more than {most >> 10} KiB")
                answer: dict[str, Any] = json.loads((text or b"").decode("utf-8", "surrogatepass"))
            except (OSError, ValueError, RecursionError):  # no whole answer
                raise self._problem(process, limits, reasons) from None
            except BaseException:  # an answer that nobody reads would be taken for the next one
                self.end()
                raise
            finally:
                answered.set()
            if "problem" in answer:
                self.end()  # it has no memory left to be trusted with
                raise GuestEndedError(answer["problem"])
        return answer["answer"]

    def end(self) -> None:
        """End the process. The next question starts another one."""
        with self._lock:
            if self._ended is not None:
                self._ended()
            self._process = self._ended = None

    @property
    def pid(self) -> int | None:
        """Of the process, where there is one."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.end()
            try:
                self._process = start_module(
                    self._module,
                    json.dumps(self._limits),
                    environment=self._environment,
                    stdin=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            except OSError as problem:
                reason = problem.strerror or type(problem).__name__
                raise BackendError(f"no process could be started: {reason}") from problem
            self._ended = weakref.finalize(self, _end, self._process)
            if sys.platform == "linux":  # pipes that hold a whole conversation, where they may
                import fcntl

                for stream in (self._process.stdin, self._process.stdout):
                    with suppress(OSError):  # those of this user may have so many pages in all
                        fcntl.fcntl(stream or -1, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        return self._process

    def _problem(
        self, process: subprocess.Popen[bytes], limits: GuestLimits, reasons: list[str]
    ) -> GuestEndedError:
        """Why a process gave no answer; it is gone then."""
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK_S)
        status = process.returncode
        self.end()
        if sys.platform != "win32" and status == -signal.SIGPROF:
            reasons.append(_too_long(limits.seconds))
        if reasons:
            return GuestEndedError(reasons[0])
        reason = f"it ends the process that reads it (status {status})"
        return GuestEndedError(reason, is_crash=True)

    def _forget(self) -> None:
        """In a fork: the process is its parent's."""
        self._lock = threading.RLock()
        if self._process is not None and self._ended is not None:
            self._ended.detach()
            self._process.returncode = 0  # nobody waits for it here
            _close(self._process)
        self._process = self._ended = None


_guests: weakref.WeakSet[Guest] = weakref.WeakSet()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: [*map(Guest._forget, _guests)])


def _watch(
    process: subprocess.Popen[bytes],
    answered: threading.Event,
    limits: GuestLimits,
    most_bytes: int,
    reasons: list[str],
) -> None:
    """End a process that takes longer than anybody waits, or more than the system limits.

    Looks are counted: where the whole machine stood still for a minute, the guest did as well.
    """
    looks, first_s = 0, None
    while not answered.wait(_LOOK_S):
        looks += 1
        if looks * _LOOK_S > limits.patience_s:
            reasons.append(_too_long(limits.patience_s))
        elif not _LIMITS_ITSELF:
            resident, spent_s = _taken(process.pid)
            first_s = spent_s if first_s is None else first_s
            if resident > most_bytes:
                reasons.append(_too_much(most_bytes))
            elif spent_s - first_s > limits.seconds:
                reasons.append(_too_long(limits.seconds))
        if reasons:
            if not answered.is_set():  # it may have come while this thread had no processor
                process.kill()
            return


def _too_long(seconds: float) -> str:
    return f"it takes more than {seconds:g} s"


def _too_much(num_bytes: int) -> str:
    return f"it takes more than {num_bytes >> 20} MiB"


def _taken(pid: int) -> tuple[int, float]:
    """Resident bytes of a process, and seconds of the processor so far."""
    import psutil

    with suppress(psutil.Error):
        process = psutil.Process(pid)
        times = process.cpu_times()
        return int(process.memory_info().rss), times.user + times.system
    return 0, 0.0


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    _close(process)
    process.wait()


def _close(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()


def _write(file: BinaryIO | IO[bytes], data: bytes) -> None:
    file.write(b"%d\n" % len(data))
    file.write(data)
    file.flush()


def _read(file: BinaryIO | IO[bytes], most_bytes: int) -> bytes | None:
    """What `_write` wrote; None where that is more. Raises ValueError at the end of the file."""
    size = int(file.readline(_LONGEST_SIZE))
    return file.read(size) if 0 <= size <= most_bytes else None


def answer_questions(answer: Callable[[Any], Any]) -> None:
    """What a guest does: answer until nobody asks any more, each within the limits it was given."""
    out, questions = messages_out(), sys.stdin.buffer
    limits = GuestLimits(*json.loads(sys.argv[1]))
    while head := questions.readline():
        seconds, size = head.split()
        most_bytes = limits.most_bytes(int(size))
        limit_memory(most_bytes)
        limit_time(float(seconds))
        try:
            data = _answered(answer, questions.read(int(size)))
        except MemoryError:
            data = json.dumps({"problem": _too_much(most_bytes)}).encode()
        _write(out, data)
        del data


def _answered(answer: Callable[[Any], Any], question: bytes) -> bytes:
    told = {"answer": answer(json.loads(question.decode("utf-8", "surrogatepass")))}
    return json.dumps(told, ensure_ascii=False).encode("utf-8", "surrogatepass")


def limit_memory(most_bytes: int) -> None:
    """Limit what this process may write to, without mapped files and address space in reserve."""
    if sys.platform == "linux":
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        end = most_bytes if most == resource.RLIM_INFINITY else min(most_bytes, most)
        resource.setrlimit(resource.RLIMIT_DATA, (end, most))


def limit_time(seconds: float) -> None:
    """End this process when it has computed for so long from now on, whatever it does then.

    Time of the processor, not of the clock: it is as long where the machine is busy. The limit of
    the system (RLIMIT_CPU) counts whole seconds. A process that ends so leaves no core file.
    """
    if sys.platform != "win32":
        import resource

        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
