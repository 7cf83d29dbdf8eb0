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
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from shared import record, running

from edgespec.bench.loaded_model import Answer, Contender, Worker, WorkerContender, order_of
from edgespec.bench.summary import Timed, decoding, end_to_end, interval_text, ratio_of, together
from edgespec.decode.engine import Prompt
from edgespec.decode.generation import Counters
from edgespec.errors import BackendError, UnsupportedError
from edgespec.measure.prompts import PROMPTS, TaskPrompt, read_prompts
from edgespec.memory.device.host import cpu_name, usable_cores
from edgespec.memory.device.neighbours import BUSY, Neighbours
from edgespec.memory.plan.plan import Request

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
CONTEXT = 4096
Line = dict[str, Any]  # one prompt and its answers by all contenders
_PLAIN = ("server", "python")  # peers, and the names of their plain settings


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
        for name, options in _servers(arguments).items():
            add(name, partial(_server, name, arguments, options))
        yield chosen, worker


def _servers(arguments: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    if arguments.draft_model is None:
        return SERVERS
    draft = ("--spec-type", "draft-simple", "-md", str(arguments.draft_model))
    return {**SERVERS, "server draft": draft}


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
    made = record(arguments.prompts, *filter(None, [arguments.server]))
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
                "made": made,
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


# -- llama.cpp, through llama-cpp-python's class and as its own server ----------------


class LlamaPython:
    """llama-cpp-python's high-level class, plain or with its prompt lookup."""

    def __init__(self, name: str, model: Path, threads: int, num_pred_tokens: int) -> None:
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        draft = LlamaPromptLookupDecoding(num_pred_tokens=num_pred_tokens)
        self.name = name
        self._llama = Llama(
            str(model),
            n_ctx=CONTEXT,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=True,
            draft_model=draft if num_pred_tokens else None,
            logits_all=num_pred_tokens > 0,  # or a prompt of two batches has no room for its rows
            verbose=False,
        )
        self._is_end = {self._llama.token_eos(), self._llama._model.token_eot()}

    def renew(self) -> None:
        """It remembers no text."""

    def answer(self, prompt: Prompt, max_tokens: int) -> Answer:
        """The greedy answer; its tokens come one by one."""
        self._llama.reset()
        tokens: list[int] = []
        times: list[float] = []
        start = time.perf_counter()
        for token in self._llama.generate(_ids(prompt), temp=0.0, repeat_penalty=1.0):
            times.append(time.perf_counter())
            tokens.append(token)
            if len(tokens) >= max_tokens or token in self._is_end:
                break
        counters = _counters(prompt, len(tokens), times[0] - start, times[-1] - times[0])
        return Answer(tuple(tokens), counters)

    def close(self) -> None:
        """Free the model."""
        self._llama.close()


class LlamaServer:
    """llama.cpp's server in a process of its own, asked for token ids over HTTP."""

    def __init__(
        self, name: str, server: Path, model: Path, threads: int, options: Sequence[str]
    ) -> None:
        self.name = name
        command = [str(server), "-m", str(model)]
        command += ["-c", str(CONTEXT), "-np", "1", "-fa", "on"]
        command += ["-t", str(threads), "-tb", str(threads)]
        self._process = running([*command, "--cache-ram", "0", *options])
        self._url = self._process.__enter__()

    def renew(self) -> None:
        """What its n-gram pools hold of earlier answers stays there, as it does for its users."""

    def answer(self, prompt: Prompt, max_tokens: int) -> Answer:
        """The greedy answer, with the server's own decode time and the whole time as seen here."""
        request = {
            "prompt": _ids(prompt),
            "n_predict": max_tokens,
            "temperature": 0.0,
            "top_k": 1,  # the cheapest way to be greedy here: no other sampler looks at the logits
            "samplers": ["top_k"],
            "cache_prompt": False,
            "return_tokens": True,
            "stream": False,
        }
        start = time.perf_counter()
        body = json.dumps(request).encode()
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{self._url}/completion", body, headers)
        try:
            with urllib.request.urlopen(asked) as reply:
                found = json.load(reply)
        except urllib.error.HTTPError as problem:
            raise BackendError(f"{self.name}: {problem.read().decode()[:200]}") from problem
        total_s = time.perf_counter() - start
        timings = found["timings"]
        decode_s = timings["predicted_ms"] / 1e3
        if timings["prompt_n"] != len(_ids(prompt)):
            raise BackendError(f"{self.name} read {timings['prompt_n']} tokens of another prompt")
        counters = _counters(prompt, timings["predicted_n"], total_s - decode_s, decode_s)
        counters.drafted_tokens = timings.get("draft_n", 0)
        counters.accepted_tokens = timings.get("draft_n_accepted", 0)
        counters.rounds -= counters.accepted_tokens
        return Answer(tuple(found["tokens"]), counters)

    def close(self) -> None:
        """End the process."""
        self._process.__exit__(None, None, None)


def _counters(prompt: Prompt, generated: int, first_s: float, decode_s: float) -> Counters:
    """Counters of an answer whose tokens came one by one."""
    return Counters(
        prompt_tokens=len(_ids(prompt)),
        generated_tokens=generated,
        rounds=max(0, generated - 1),
        time_to_first_token_s=first_s,
        decode_s=decode_s,
    )


def _ids(prompt: Prompt) -> list[int]:
    return [token for token in prompt if isinstance(token, int)]


# -- what the lines come to: ratios by contender and by category ------------------


def read_lines(path: Path) -> list[Line]:
    """Lines of an earlier run; those with a busy neighbour are measured again.

    A last line that was cut off while it was written is taken out of the file.
    """
    if not path.exists():
        return []
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    lines = (json.loads(line) for line in whole.splitlines())
    return [line for line in lines if line["busy_neighbours"] <= BUSY]


def document_of(lines: Sequence[Line], baseline: str | None) -> dict[str, Any]:
    """All ratios: over the baseline, and of edgespec over itself without drafts and over the best
    setting of each peer.

    Which setting is the best is asked in each category anew, which is in the peer's favour.
    """
    names = list(lines[0]["answers"])
    plain = [name for name in _PLAIN if name in names]
    best = baseline or _fastest(lines, plain or names[:1])
    tasks: dict[str, list[Line]] = {}
    for line in lines:
        tasks.setdefault(line["task"], []).append(line)
    tasks["overall"] = list(lines)
    return {
        **{key: lines[0][key] for key in ("model", "machine", "max_tokens")},
        "made": lines[-1].get("made", {}),
        "prompts": len(lines),
        "baseline": best,
        "contenders": [_row(lines, name, best) for name in names],
        "categories": {
            task: {name: _ratio(some, name, best, decoding) for name in names}
            for task, some in tasks.items()
        },
        "over_own_plain": {
            task: _ratio(some, "edgespec", "edgespec plain", decoding)
            for task, some in tasks.items()
            if {"edgespec", "edgespec plain"} <= set(names)
        },
        "best_drafts": {
            peer: _fastest(lines, settings)
            for peer in _PLAIN
            if (settings := [one for one in names if one.startswith(f"{peer} ")])
        },
        "best_of_peers": {
            peer: {task: _over_best(some, settings) for task, some in tasks.items()}
            for peer in _PLAIN
            if "edgespec" in names
            and (settings := [name for name in names if name.split()[0] == peer])
        },
    }


def _fastest(lines: Sequence[Line], names: Sequence[str]) -> str:
    return max(names, key=lambda name: together(_timed(lines, name, decoding)).per_s)


def _over_best(lines: Sequence[Line], settings: Sequence[str]) -> dict[str, Any]:
    best = _fastest(lines, settings)
    return {"name": best, **_ratio(lines, "edgespec", best, decoding)}


def _row(lines: Sequence[Line], name: str, best: str) -> dict[str, Any]:
    found = [line["answers"][name] for line in lines]
    theirs = [line["answers"][best]["token_ids"] for line in lines]
    pairs = zip(theirs, found, strict=True)
    return {
        "name": name,
        "decode": _ratio(lines, name, best, decoding),
        "end_to_end": _ratio(lines, name, best, end_to_end),
        "drafted_tokens": sum(one["drafted_tokens"] for one in found),
        "accepted_tokens": sum(one["accepted_tokens"] for one in found),
        "identical": sum(ids == one["token_ids"] for ids, one in pairs),
    }


def _ratio(
    lines: Sequence[Line], name: str, best: str, part: Callable[[Counters], Timed]
) -> dict[str, Any]:
    ours = _timed(lines, name, part)
    ratio = ratio_of(ours, _timed(lines, best, part), [line["task"] for line in lines])
    return {
        "tokens_per_s": together(ours).per_s,
        "ratio": ratio.value,
        "low": ratio.low,
        "high": ratio.high,
        "prompts": len(lines),
    }


def text_of(found: dict[str, Any]) -> str:
    """The document of `document_of` as tables."""
    row = "{:<26} {:>8} {:>22} {:>8} {:>22} {:>8} {:>8} {:>5}".format
    parts = [
        f"{found['model']} on {found['machine']}: {found['prompts']} prompts, at most "
        f"{found['max_tokens']} tokens each; ratios over {found['baseline']}",
        "",
        row("", "decode/s", "ratio [95%]", "whole/s", "ratio [95%]", "drafted", "accepted", "same"),
    ]
    for one in found["contenders"]:
        decode, whole = one["decode"], one["end_to_end"]
        parts.append(
            row(
                *(one["name"], f"{decode['tokens_per_s']:.1f}", _shown(decode)),
                *(f"{whole['tokens_per_s']:.1f}", _shown(whole)),
                *(one["drafted_tokens"], one["accepted_tokens"], one["identical"]),
            )
        )
    parts += ["", "decode ratio by category"]
    for task, ratios in found["categories"].items():
        parts.append(f"{task} ({next(iter(ratios.values()))['prompts']})")
        parts += [f"  {name:<26} {_shown(one)}" for name, one in ratios.items()]
    if found["over_own_plain"]:
        parts += ["", "edgespec over its own plain decoding, by category"]
        parts += [f"  {task:<18} {_shown(one)}" for task, one in found["over_own_plain"].items()]
    for peer, ratios in found["best_of_peers"].items():
        parts += ["", f"edgespec over the best setting of {peer}, by category"]
        parts += [f"  {task:<18} {_shown(one)} {one['name']}" for task, one in ratios.items()]
    return "\n".join(parts)


def _shown(one: dict[str, Any]) -> str:
    return f"{one['ratio']:.3f} {interval_text(one['low'], one['high'])}"


def _timed(lines: Sequence[Line], name: str, part: Callable[[Counters], Timed]) -> list[Timed]:
    return [part(_timed_counters(line["answers"][name])) for line in lines]


def _timed_counters(one: dict[str, Any]) -> Counters:
    """What is timed of an answer; every decoded token counts as a round."""
    return Counters(
        generated_tokens=one["generated_tokens"],
        rounds=one["decoded_tokens"],
        time_to_first_token_s=one["time_to_first_token_s"],
        decode_s=one["decode_s"],
    )


if __name__ == "__main__":
    main()
