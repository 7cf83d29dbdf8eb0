"""edgespec beside other programs that run the same file: same prompts, same tokens, in turns.

    python benchmarks/peers.py MODEL --prompts FILE --out answers.jsonl [--server llama-server]
    python benchmarks/peers.py --report answers.jsonl

Every prompt is answered by all contenders in turn (the order changes), greedily, from the same
token ids, with the same number of threads and most new tokens. One line for each prompt is
appended to --out; the same command goes on where it was stopped, and --minutes ends it in time.

decode: tokens after the first one over the time after it; end to end: all tokens over all time.
llama-server's decode time is the one it reports itself, so its HTTP does not count there. Idle
contenders must not compute: what they take from the processor in a second is printed first. An
answer during which other programs kept the machine busy is given again (edgespec and
llama-cpp-python then know no text, a server's n-gram tables know the first try); a prompt where
that did not help does not count, and is asked again by the next run.

Peers that are not installed are left out, with the reason. llama-server is built from the source
that llama-cpp-python carries, with its compiler options:

    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36 && tar xf llama_cpp_python-*
    cmake -B build -S llama_cpp_python-0.3.36/vendor/llama.cpp -DCMAKE_BUILD_TYPE=Release \\
        -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
    cmake --build build --target llama-server

Where the Makefile leaves kernels out (`make -pn | grep LEFT_OUT`), so must this build, with the
same -DCMAKE_C_FLAGS and -DCMAKE_CXX_FLAGS.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from peers_llama import CONTEXT, LlamaPython, LlamaServer
from peers_report import Line, document_of, read_lines, text_of
from peers_transformers import Transformers

from edgespec.bench.interleaving import Answer, Contender, order_of
from edgespec.bench.summary import decoding
from edgespec.bench.worker import Worker, WorkerContender
from edgespec.decode.engine import Prompt
from edgespec.errors import BackendError, UnsupportedError
from edgespec.measure.prompts import PROMPTS, TaskPrompt, read_prompts
from edgespec.memory.device.host import cpu_name, usable_cores
from edgespec.memory.device.neighbours import BUSY, Neighbours
from edgespec.memory.plan.request import Request

_IDLE_S = 1.0
_TRIES = 3
_MOST_WAITS = 60
_KERNELS_OFF = "edgespec kernels off"  # with llama.cpp's
_LEARNT = 64  # tokens of each of ten answers that edgespec counts acceptance on beforehand
# What follows --spec-type and its options; a name of llama.cpp's and two shapes of each kind,
# because the defaults look for repetitions of 12 and 24 tokens that are rare in short answers.
SERVERS = {
    "server": (),
    "server ngram-simple": ("--spec-type", "ngram-simple"),
    "server ngram-simple 4/8": (
        *("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "4"),
        *("--spec-ngram-simple-size-m", "8"),
    ),
    "server ngram-mod": ("--spec-type", "ngram-mod"),
    "server ngram-mod 6/8": (
        *("--spec-type", "ngram-mod", "--spec-ngram-mod-n-match", "6"),
        *("--spec-ngram-mod-n-min", "2", "--spec-ngram-mod-n-max", "8"),
    ),
    "server ngram-map-k 4/8": (
        *("--spec-type", "ngram-map-k", "--spec-ngram-map-k-size-n", "4"),
        *("--spec-ngram-map-k-size-m", "8"),
    ),
    "server ngram-cache": ("--spec-type", "ngram-cache"),
}
_LOOKUPS = {"python": 0, "python lookup 10": 10, "python lookup 3": 3}


def main() -> None:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # servers are ended on the way out
    if arguments.report is None:
        _measure(arguments)
    lines = read_lines(arguments.report or arguments.out)
    if not lines:
        print("nothing was measured without busy neighbours")
        return
    document = document_of(lines, arguments.baseline)
    if arguments.summary is not None:
        arguments.summary.write_text(json.dumps(document, indent=1) + "\n")
    print(text_of(document))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--prompts", type=Path, help="JSON lines with `category` and `turns`")
    parser.add_argument("--per-category", type=int, default=10**9, metavar="K")
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--server", type=Path, help="llama-server's executable")
    parser.add_argument("--draft-model", type=Path, help="for llama-server and edgespec")
    parser.add_argument("--only", nargs="*", help="contenders, by name; default: all")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no prompt after this")
    parser.add_argument("--out", type=Path, help="JSON lines, appended to")
    parser.add_argument("--report", type=Path, help="only show what was measured earlier")
    parser.add_argument("--summary", type=Path, help="write all ratios here, as JSON")
    parser.add_argument("--baseline", help="what ratios are relative to; default: best plain peer")
    arguments = parser.parse_args()
    if arguments.report is None and not (arguments.model and arguments.prompts and arguments.out):
        parser.error("name a model, --prompts and --out, or --report")
    return arguments


# -- contenders ----------------------------------------------------------------------------


@contextmanager
def _contenders(arguments: argparse.Namespace) -> Iterator[tuple[list[Quiet], Worker]]:
    """All contenders that are there and asked for; the reason of each that is not, on stderr."""
    chosen: list[Quiet] = []
    with ExitStack() as stack:

        def add(name: str, make: Callable[[], Any]) -> None:
            if arguments.only and name not in arguments.only:
                return
            try:
                contender = make()
            except (ImportError, OSError, ValueError, BackendError, UnsupportedError) as problem:
                print(f"without {name}: {problem}", file=sys.stderr)
                return
            if hasattr(contender, "close"):
                stack.callback(contender.close)
            chosen.append(Quiet(contender))

        request = Request(
            backend="llamacpp",
            context_size=CONTEXT,
            threads=arguments.threads,
            draft_model=arguments.draft_model,
        )
        worker = stack.enter_context(Worker(arguments.model, request, ["none", "auto"]))
        for place, name in enumerate(("edgespec plain", "edgespec")):
            add(name, partial(WorkerContender, name, worker, place))
        if not arguments.only or _KERNELS_OFF in arguments.only:
            request = replace(request, kernels="off")
            other = stack.enter_context(Worker(arguments.model, request, ["auto"]))
            add(_KERNELS_OFF, partial(WorkerContender, _KERNELS_OFF, other, 0))
        for name, number in _LOOKUPS.items():
            add(name, partial(LlamaPython, name, arguments.model, arguments.threads, number))
        for name, settings in _transformers(arguments).items():
            add(name, partial(Transformers, name, arguments.model, **settings))
        for name, options in _servers(arguments).items():
            add(name, partial(_server, name, arguments, options))
        yield chosen, worker


def _servers(arguments: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    if arguments.draft_model is None:
        return SERVERS
    draft = ("--spec-type", "draft-simple", "-md", str(arguments.draft_model))
    return {**SERVERS, "server draft": draft}


def _transformers(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {
        "transformers": {},
        "transformers lookup 10": {"lookup": 10},
    }
    if arguments.draft_model is not None:
        found["transformers assisted"] = {"draft_model": arguments.draft_model}
    return {name: {"threads": arguments.threads, **some} for name, some in found.items()}


def _server(name: str, arguments: argparse.Namespace, options: Sequence[str]) -> LlamaServer:
    if arguments.server is None:
        raise UnsupportedError("no --server was named")
    return LlamaServer(name, arguments.server, arguments.model, arguments.threads, options)


class Quiet:
    """A contender that answers again where other programs kept the machine busy meanwhile.

    Texts it has seen stay known from prompt to prompt; from one try to the next only where the
    program behind it cannot forget them.
    """

    def __init__(self, contender: Contender, tries: int = _TRIES) -> None:
        self.name = contender.name
        self.busy = 0.0  # cores that others took during the answer that counts
        self._contender = contender
        self._tries = tries
        self._neighbours = Neighbours()

    def answer(self, prompt: Prompt, max_tokens: int) -> Answer:
        """The answer of the first quiet try, or of the last one."""
        for left in range(self._tries - 1, -1, -1):
            self._neighbours.share()
            answer = self._contender.answer(prompt, max_tokens)
            self.busy = self._neighbours.share()
            if self.busy <= BUSY or not left:
                break
            self._contender.renew()
        return answer


# -- measuring -----------------------------------------------------------------------------


def _measure(arguments: argparse.Namespace) -> None:
    deadline = time.monotonic() + 60 * arguments.minutes
    prompts = in_rounds(read_prompts(arguments.prompts), arguments.per_category)
    asked = {
        "model": arguments.model.name,
        "machine": f"{cpu_name()}, {arguments.threads} threads",
        "prompts": arguments.prompts.name,
        "max_tokens": arguments.max_tokens,
    }
    lines = read_lines(arguments.out)
    other = f"{arguments.out} holds lines of other settings: name another --out"
    if any(line[key] != value for line in lines for key, value in asked.items()):
        sys.exit(other)
    known = {line["prompt"] for line in lines}
    left = [(number, one) for number, one in prompts if number not in known]
    if not left:
        return
    _wait_until_quiet()
    with _contenders(arguments) as (contenders, worker):
        names = {contender.name for contender in contenders}
        if any(set(line["answers"]) != names for line in lines):
            sys.exit(other)
        _warm_up(contenders, worker, arguments)
        for number, prompt in left:
            if time.monotonic() > deadline:
                print(f"out of time: {len(known)} of {len(prompts)} prompts", file=sys.stderr)
                return
            line = {
                **asked,
                **one_prompt(contenders, worker, number, prompt, arguments.max_tokens),
            }
            with arguments.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            known |= {number} if line["busy_neighbours"] <= BUSY else set()
            told = f"{len(known)} of {len(prompts)} prompts, others {line['busy_neighbours']:.2f}"
            print(f"{told} of a core", file=sys.stderr, flush=True)


def _wait_until_quiet() -> None:
    """Step times are measured when a model is loaded, so that must not happen beside others."""
    neighbours = Neighbours()
    for _ in range(_MOST_WAITS):
        time.sleep(_IDLE_S)
        if neighbours.share() <= BUSY:
            return


def in_rounds(prompts: Sequence[TaskPrompt], most: int) -> list[tuple[int, TaskPrompt]]:
    """At most `most` prompts of each task by their place in the file: one of each, then again.

    So a run that is stopped has asked about as many of every task.
    """
    places: dict[str, list[tuple[int, TaskPrompt]]] = {}
    for number, prompt in enumerate(prompts):
        places.setdefault(prompt.task, []).append((number, prompt))
    rounds = zip_longest(*(some[:most] for some in places.values()))
    return [one for some in rounds for one in some if one is not None]


def _warm_up(contenders: Sequence[Quiet], worker: Worker, arguments: argparse.Namespace) -> None:
    """One short answer each, and for edgespec ten: only its very first run knows nothing.

    Then nobody may compute.
    """
    import psutil

    ids = worker.call("encode", "Count from one to twenty in words.")
    for contender in contenders:
        contender.answer(ids, 16)
        learns = contender.name in ("edgespec", _KERNELS_OFF)
        for prompt in PROMPTS[: len(PROMPTS) // 2] if learns else ():
            contender.answer(prompt.text, _LEARNT)
    processes = [psutil.Process(), *psutil.Process().children()]
    before = [sum(process.cpu_times()[:2]) for process in processes]
    time.sleep(_IDLE_S)
    spent = [sum(process.cpu_times()[:2]) - b for process, b in zip(processes, before, strict=True)]
    names = ", ".join(contender.name for contender in contenders)
    print(f"{names}; idle ones took {max(spent) / _IDLE_S:.1%} of a core", file=sys.stderr)


def one_prompt(
    contenders: Sequence[Quiet],
    worker: Worker,
    number: int,
    prompt: TaskPrompt,
    max_tokens: int,
) -> Line:
    """What is kept of the answers to one prompt, given in turns."""
    ids: list[int] = worker.call("encode", prompt.text)
    answers = {}
    for place in order_of(number, len(contenders)):
        answer = contenders[place].answer(ids, max_tokens)
        counters = answer.counters
        answers[contenders[place].name] = {
            "token_ids": answer.token_ids,
            "generated_tokens": counters.generated_tokens,
            "decoded_tokens": decoding(counters).tokens,
            "decode_s": counters.decode_s,
            "time_to_first_token_s": counters.time_to_first_token_s,
            "drafted_tokens": counters.drafted_tokens,
            "accepted_tokens": counters.accepted_tokens,
        }
    return {
        "prompt": number,
        "task": prompt.task,
        "prompt_tokens": len(ids),
        "busy_neighbours": max(contender.busy for contender in contenders),
        "answers": {one.name: answers[one.name] for one in contenders},
    }


if __name__ == "__main__":
    main()
