"""Conversations: what keeping the cache saves, and that long ones stay in bounds.

    python benchmarks/sessions.py reuse MODEL
    python benchmarks/sessions.py turns MODEL --prompts FILE [--per-category K] [--exact]
    python benchmarks/sessions.py shift MODEL
    python benchmarks/sessions.py json MODEL
    python benchmarks/sessions.py kill

reuse: time to the first token of the second turn of a 3,000-token conversation, with the cache and
without. turns: both turns of Spec-Bench prompts in one session, speculative against plain,
alternating; only decoding is timed. shift: 200 turns in 2,048 tokens of context. json: 100
documents of a schema with ten fields, with drafts and without. kill: a writer of session files is
killed 100 times.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import edgespec
from edgespec.decode.session import read_session
from edgespec.decode.stats import Counters
from edgespec.measure.prompts import PROMPTS
from edgespec.memory.device.track import resident_bytes

_REPEATS = 5
_NAMES = ("Ada", "Tomas", "Wen", "Rosa", "Imre", "Noor", "Jonas", "Lea", "Omar", "Britt")
_PLACES = ("Lagos", "Oslo", "Lima", "Osaka", "Tunis", "Cork", "Graz", "Quito", "Pune", "Riga")
_SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "age": {"type": "integer"},
            "city": {"type": "string", "maxLength": 24},
            "occupation": {"type": "string", "maxLength": 32},
            "married": {"type": "boolean"},
            "favourite_colour": {"enum": ["red", "green", "blue", "yellow"]},
            "years_of_experience": {"type": "integer"},
            "languages": {
                "type": "array",
                "items": {"type": "string", "maxLength": 16},
                "minItems": 1,
                "maxItems": 3,
            },
            "email_address": {"type": "string", "maxLength": 32},
            "membership_level": {"enum": ["basic", "silver", "gold"]},
        },
        "required": [
            "name",
            "age",
            "city",
            "occupation",
            "married",
            "favourite_colour",
            "years_of_experience",
            "languages",
            "email_address",
            "membership_level",
        ],
    }
)
_WRITER = """
import sys
from pathlib import Path
from edgespec.decode.session import write_session
def cache(name):
    Path(name).write_bytes(b"c" * 4_000_000)
    return 4_000_000
print("ready", flush=True)
for number in range(10**9):
    write_session(Path(sys.argv[1]), {"number": number, "text": "x" * 50_000}, cache)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("what", choices=("reuse", "turns", "shift", "json", "kill"))
    parser.add_argument("model", nargs="?")
    parser.add_argument("--prompts", help="JSON lines with `category` and `turns`")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--per-category", type=int, default=3, metavar="K")
    parser.add_argument("--count", type=int, help="turns, documents or kills")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--backend", default="llamacpp")
    arguments = parser.parse_args()
    {"reuse": _reuse, "turns": _turns, "shift": _shift, "json": _json, "kill": _kill}[
        arguments.what
    ](arguments)


def _engine(arguments: argparse.Namespace, context: int) -> edgespec.Engine:
    return edgespec.load(
        arguments.model, backend=arguments.backend, exact=arguments.exact, context_size=context
    )


def _reuse(arguments: argparse.Namespace) -> None:
    with _engine(arguments, 4096) as engine:
        text = " ".join(prompt.text for prompt in PROMPTS)
        ids = engine.backend.tokenizer.encode(text * 3)
        pieces = b"".join(map(engine.backend.tokenizer.token_bytes, ids[:2900]))
        long = pieces.decode(errors="ignore")
        kept, fresh = [], []
        for _ in range(_REPEATS):
            session = edgespec.Session(engine, max_tokens=32)
            session.send(long)
            turn = session.stream("Which of these is the shortest?")
            list(turn)
            counters = turn.result.counters
            kept.append(counters.time_to_first_token_s)
            again = engine.generate(list(turn.prompt_ids), max_tokens=32)
            fresh.append(again.counters.time_to_first_token_s)
        reused_s, fresh_s = statistics.median(kept), statistics.median(fresh)
        print(
            f"{counters.prompt_tokens} tokens of prompt, {counters.reused_tokens} reused: first "
            f"token after {reused_s:.3f} s, prefilled again {fresh_s:.3f} s, "
            f"{reused_s / fresh_s:.3f}x"
        )


def _turns(arguments: argparse.Namespace) -> None:
    taken: dict[str, int] = defaultdict(int)
    counters: dict[bool, list[Counters]] = {False: [], True: []}
    identical = total = 0
    with _engine(arguments, 4096) as engine:
        for line in Path(arguments.prompts).read_text().splitlines():
            question = json.loads(line)
            category = question["category"]
            if len(question["turns"]) < 2 or taken[category] >= arguments.per_category:
                continue
            taken[category] += 1
            outputs = {}
            for speculate in (False, True) if total % 2 else (True, False):
                session = edgespec.Session(engine, max_tokens=arguments.max_tokens)
                results = [session.send(t, speculate=speculate) for t in question["turns"]]
                counters[speculate] += [result.counters for result in results]
                outputs[speculate] = [result.token_ids for result in results]
            total += 1
            identical += outputs[False] == outputs[True]
    plain, drafted = _speed(counters[False]), _speed(counters[True])
    rounds = sum(c.rounds for c in counters[True])
    length = sum(c.accepted_tokens + c.rounds for c in counters[True]) / rounds
    print(
        f"{total} conversations of two turns ({dict(taken)}): plain {plain:.1f} tokens/s, "
        f"speculative {drafted:.1f}, {drafted / plain:.3f}x, acceptance length {length:.2f}, "
        f"{identical} identical"
    )


def _speed(counters: list[Counters]) -> float:
    tokens = sum(c.accepted_tokens + c.rounds for c in counters)
    return tokens / max(1e-9, sum(c.decode_s for c in counters))


def _shift(arguments: argparse.Namespace) -> None:
    chooser = random.Random(0)
    with _engine(arguments, 2048) as engine:
        session = edgespec.Session(engine, max_tokens=96)
        dropped, sizes, reasons = 0, [], set()
        for number in range(arguments.count or 200):
            turn = session.stream(f"{number}. {chooser.choice(PROMPTS).text[:300]}")
            list(turn)
            dropped += turn.dropped_turns > 0
            reasons.add(turn.result.finish_reason)
            sizes.append(resident_bytes())
        early, late = sizes[len(sizes) // 4] / 2**20, sizes[-1] / 2**20
        print(
            f"{len(sizes)} turns, shifted {dropped} times, {session.hidden_turns} turns hidden; "
            f"answers ended by {sorted(reasons)}; resident {early:.1f} MiB after a "
            f"quarter, {late:.1f} MiB at the end"
        )


def _json(arguments: argparse.Namespace) -> None:
    counters: dict[bool, list[Counters]] = {False: [], True: []}
    valid = total = identical = 0
    names = [f"{name} from {place}" for name in _NAMES for place in _PLACES]
    with _engine(arguments, 1024) as engine:
        for number, name in enumerate(names[: arguments.count or 100]):
            prompt = f"Describe {name}, an invented person, as JSON."
            outputs = {}
            for speculate in (False, True) if number % 2 else (True, False):
                result = engine.generate(
                    prompt, json_schema=_SCHEMA, max_tokens=400, speculate=speculate
                )
                counters[speculate].append(result.counters)
                outputs[speculate] = result.token_ids
            total += 1
            valid += _is_valid(result.text)
            identical += outputs[False] == outputs[True]
    plain, drafted = _speed(counters[False]), _speed(counters[True])
    print(
        f"{valid} of {total} valid, {identical} identical: without drafts {plain:.1f} tokens/s, "
        f"with {drafted:.1f}, {drafted / plain:.3f}x"
    )


def _is_valid(text: str) -> bool:
    try:
        found = json.loads(text)
    except ValueError:
        return False
    properties = json.loads(_SCHEMA)["properties"]
    kinds = {"string": str, "integer": int, "boolean": bool, "array": list}
    if list(found) != list(properties):
        return False
    for key, rule in properties.items():
        fits = found[key] in rule["enum"] if "enum" in rule else True
        if not fits or type(found[key]) is not kinds[rule.get("type", "string")]:
            return False
    return True


def _kill(arguments: argparse.Namespace) -> None:
    intact, missing = 0, 0
    count = arguments.count or 100
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.session"
        for number in range(count):
            process = subprocess.Popen(
                [sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE
            )
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.01 + 0.0007 * number)
            process.send_signal(signal.SIGKILL)
            process.wait()
            if not path.exists():
                missing += 1
                continue
            document, cache_bytes = read_session(path)
            intact += cache_bytes == 4_000_000 and len(document["text"]) == 50_000
    print(f"{intact} of {count} intact, {missing} killed before the first file was complete")


if __name__ == "__main__":
    main()
