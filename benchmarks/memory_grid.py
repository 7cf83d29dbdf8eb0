"""Predicted against real memory: every component, and the peak of the whole process.

    python benchmarks/memory_grid.py MODEL... [--json OUT] [--quick]

Each row loads a model in a process of its own with one context size, KV type and largest draft,
reads a prompt of more than one batch, verifies one step of the largest size and answers. Columns
are the footprint's prediction and what llama.cpp says it allocated, in MiB, and at the end the
predicted and measured peak resident set. `worst` lines sum up; the exit status is 1 when a
component is off by more than 2% and 1 MiB, or the peak by more than 4% and 8 MiB.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

_CONTEXTS = (512, 4096, 16384)
_KV_TYPES = ("f16", "q8_0", "q4_0")
_DRAFTS = (1, 16, 64)
_COMPONENTS = ("weights", "weights_repacked", "kv_cache", "compute", "logits")
_MEBIBYTE = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--quick", action="store_true", help="one row of each column only")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(_measure(arguments.models[0], json.loads(arguments.one))))
        return
    rows = []
    print(f"{'model':<34} {'ctx':>5} {'KV':<5}{'draft':>5}  component MiB predicted/real ... peak")
    for model in arguments.models:
        for settings in _grid(model, arguments.quick):
            row = _in_own_process(model, settings)
            rows.append(row)
            print(_line(row), flush=True)
    failed = _sum_up(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    sys.exit(failed)


def _grid(model: Path, quick: bool) -> list[dict[str, Any]]:
    from edgespec.memory.footprint import kv_type_fits
    from edgespec.models.spec import read_model_spec

    spec = read_model_spec(model)
    points = itertools.product(_CONTEXTS, _KV_TYPES, _DRAFTS)
    if quick:
        points = iter(((512, "f16", 1), (4096, "q8_0", 16), (4096, "q4_0", 64)))
    return [
        {"context_size": context, "kv_type": kv_type, "draft_max": draft}
        for context, kv_type, draft in points
        if context <= spec.context_length and kv_type_fits(spec, kv_type)
    ]


def _in_own_process(model: Path, settings: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, __file__, str(model), "--one", json.dumps(settings)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def _measure(model: Path, settings: dict[str, Any]) -> dict[str, Any]:
    import edgespec.cli.main  # noqa: F401  (measured is what the command takes)
    from edgespec.loading import load_plan
    from edgespec.memory.plan import Request
    from edgespec.memory.track import peak_resident_bytes
    from edgespec.models.spec import read_model_spec
    from edgespec.planning import make_run_plan
    from edgespec.tree import DraftTree

    spec = read_model_spec(model)
    plan = make_run_plan(spec, Request(**settings))
    with load_plan(spec, plan) as engine:
        prompt = engine.encode("The quick brown fox jumps over the lazy dog. " * 40)
        prompt = prompt[: settings["context_size"] - 100]
        engine.generate(prompt, max_tokens=8)
        engine.backend.verify(DraftTree.chain(prompt[: plan.draft_max + 1]))
        engine.generate(prompt, max_tokens=8)
        real = engine.backend.memory_bytes()
        peak = peak_resident_bytes()
    return {
        "model": f"{spec.name} {spec.file_type}",
        **settings,
        "predicted": plan.component_bytes,
        "real": real,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "peak_bytes": peak,
    }


def _line(row: dict[str, Any]) -> str:
    pairs = (_pair(row["predicted"].get(name, 0), row["real"].get(name, 0)) for name in _COMPONENTS)
    peak = _pair(row["predicted_peak_bytes"], row["peak_bytes"])
    name = f"{row['model'][:33]:<34} {row['context_size']:>5} {row['kv_type']:<5}"
    return f"{name}{row['draft_max']:>5}  {''.join(pairs)}{peak}"


def _pair(predicted: int, real: int) -> str:
    return f"{predicted / _MEBIBYTE:8.1f}/{real / _MEBIBYTE:<8.1f}"


def _sum_up(rows: list[dict[str, Any]]) -> int:
    failed = 0
    for name in _COMPONENTS:
        pairs = [(row["predicted"].get(name, 0), row["real"].get(name, 0)) for row in rows]
        failed |= _worst(name, pairs, 0.02, _MEBIBYTE)
    peaks = [(row["predicted_peak_bytes"], row["peak_bytes"]) for row in rows]
    return failed | _worst("peak", peaks, 0.04, 8 * _MEBIBYTE)


def _worst(name: str, pairs: list[tuple[int, int]], part: float, slack: int) -> int:
    """Print the row furthest off; 1 when one is off by more than `part` and `slack` bytes."""
    predicted, real = max(pairs, key=lambda pair: abs(pair[0] - pair[1]))
    off = predicted - real
    within = sum(abs(p - r) <= max(part * r, slack) for p, r in pairs)
    print(
        f"worst {name:<17} {off / _MEBIBYTE:+7.2f} MiB ({off / max(1, real):+.2%}); "
        f"{within} of {len(pairs)} within {part:.0%} or {slack // _MEBIBYTE} MiB"
    )
    return int(within < len(pairs))


if __name__ == "__main__":
    main()
