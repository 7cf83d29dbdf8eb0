"""What a worker is worth behind a slow network, and what drafts add there.

    python benchmarks/worker_delays.py [MODEL] [--delays 0 0.2 1 5] [--layers all]

A worker on this machine is reached through a proxy that makes each trip there and back longer, by
so many milliseconds. Its times are those of two processes that share this processor. For each
delay: t(n) as measured at load and what a change of n adds, then decoding with and without drafts,
in turns, over three prompts of which two are repeated by the answer.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import edgespec

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from delaying import DelayingProxy
from rpc_workers import local_worker

from edgespec.memory.device.host import cpu_name, usable_cores
from edgespec.models.embedded import embedded_model

_SIZES = (1, 2, 4, 8, 16)
_PROMPTS = (  # sent as they are: two that go on as they were, one that does not
    "red, green, blue, yellow, black, white, orange, purple, " * 4,
    "The quick brown fox jumps over the lazy dog near the river. " * 4,
    "The sky is blue because",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", nargs="?", type=Path, default=embedded_model())
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 0.2, 1.0, 5.0])
    parser.add_argument("--layers", default="all")
    parser.add_argument("--tokens", type=int, default=96)
    arguments = parser.parse_args()
    os.environ["EDGESPEC_CACHE"] = tempfile.mkdtemp()  # each delay is measured anew
    print(f"{arguments.model.name}, worker and host on {cpu_name()}, {usable_cores()} cores\n")
    print("| trip, ms | " + " | ".join(f"t({n})" for n in _SIZES), end=" | ")
    print("change | plain, tokens/s | drafts | | drafted a round | acceptance length |")
    print("| --- " * (len(_SIZES) + 7) + "|")
    with local_worker("--threads", "1") as worker:
        for delay in arguments.delays:
            with DelayingProxy(("127.0.0.1", worker.port), delay / 1e3) as proxy:
                print(_row(arguments, delay, proxy.address), flush=True)


def _row(arguments: argparse.Namespace, delay: float, address: str) -> str:
    layers = -1 if arguments.layers == "all" else int(arguments.layers)
    with edgespec.load(
        arguments.model, workers=(address,), gpu_layers=layers, context_size=1024
    ) as engine:
        curve = engine.curve
        assert curve is not None
        times = [curve.base[n] if n < len(curve.base) else float("nan") for n in _SIZES]
        found = {True: [0.0, 0.0, 0.0, 0.0, 0.0], False: [0.0, 0.0, 0.0, 0.0, 0.0]}
        for prompt in _PROMPTS:
            for drafts in (False, True):
                counters = engine.generate(
                    prompt, raw=True, max_tokens=arguments.tokens, speculate=drafts
                ).counters
                numbers = (
                    *(counters.generated_tokens, counters.decode_s, counters.rounds),
                    *(counters.drafted_tokens, counters.accepted_tokens),
                )
                for i, number in enumerate(numbers):
                    found[drafts][i] += number
    plain, (tokens, seconds, rounds, drafted, accepted) = found[False], found[True]
    rates = plain[0] / plain[1], tokens / seconds
    cells = [f"{delay:g}", *(f"{time:.1f}" for time in (*times, curve.change_ms))]
    cells += [f"{rates[0]:.1f}", f"{rates[1]:.1f}", f"{rates[1] / rates[0]:.2f}x"]
    cells += [f"{drafted / rounds:.2f}", f"{1 + accepted / rounds:.2f}"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
