"""Predicted against real memory: every component, and the peak of the whole process.

    python benchmarks/memory_grid.py MODEL... [--json OUT] [--quick] [--draft-model FILE]

Each row is one `edgespec run` with its own context size, KV type and largest draft, over a prompt
of more than one batch. Columns are the plan's bytes and what llama.cpp says it allocated, in MiB,
and at the end the predicted and measured peak resident set of the process. `worst` lines sum up;
the exit status is 1 when a component is off by more than 2% and 1 MiB, the peak by more than 4% and
8 MiB, or when a process took more than its predicted peak.
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
_DRAFT_COMPONENTS = tuple(f"draft_{name}" for name in _COMPONENTS)
_SIDES = ("predicted", "real")
_MEBIBYTE = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--draft-model", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="one row of each column only")
    arguments = parser.parse_args()
    rows = []
    print(f"{'model':<34} {'ctx':>5} {'KV':<5}{'draft':>5}  component MiB predicted/real ... peak")
    for model in arguments.models:
        for settings in _grid(model, arguments.quick):
            row = _in_own_process(model, settings, arguments.draft_model)
            rows.append(row)
            print(_line(row), flush=True)
    failed = _sum_up(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    sys.exit(failed)


def _grid(model: Path, quick: bool) -> list[dict[str, Any]]:
    from edgespec.memory.bytes.footprint import kv_type_fits
    from edgespec.models.spec import read_model_spec

    spec = read_model_spec(model)
    points = list(itertools.product(_CONTEXTS, _KV_TYPES, _DRAFTS))
    if quick:
        points = [(512, "f16", 1), (4096, "q8_0", 16), (4096, "q4_0", 64)]
    return [
        {"ctx": context, "kv-type": kv_type, "draft-max": draft}
        for context, kv_type, draft in points
        if context <= spec.context_length and kv_type_fits(spec, kv_type)
    ]


def _in_own_process(
    model: Path, settings: dict[str, Any], draft_model: Path | None
) -> dict[str, Any]:
    """One `edgespec run`: what it planned, allocated and used at its peak."""
    prompt = "The quick brown fox jumps over the lazy dog. " * (30 if settings["ctx"] > 512 else 20)
    options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    if draft_model is not None:
        options += ["--draft-model", str(draft_model), "--drafter", "suffix,model"]
    command = [sys.executable, "-m", "edgespec.cli.main", "run", str(model), prompt]
    done = subprocess.run(
        [*command, "--json", "--max-tokens", "16", *options],
        check=True,
        capture_output=True,
        text=True,
    )
    memory = json.loads(done.stdout)["memory"]
    return {
        "model": model.stem,
        **settings,
        "predicted": memory["components"],
        "real": memory["allocated_bytes"],
        "predicted_peak_bytes": memory["predicted_peak_bytes"],
        "peak_bytes": memory["measured_peak_bytes"],
    }


def _line(row: dict[str, Any]) -> str:
    pairs = (
        _pair(row["predicted"].get(name, 0), row["real"].get(name, 0)) for name in _names([row])
    )
    peak = _pair(row["predicted_peak_bytes"], row["peak_bytes"])
    name = f"{row['model'][:33]:<34} {row['ctx']:>5} {row['kv-type']:<5}"
    return f"{name}{row['draft-max']:>5}  {''.join(pairs)}{peak}"


def _names(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    drafts = any("draft_weights" in row["real"] for row in rows)
    return _COMPONENTS + _DRAFT_COMPONENTS if drafts else _COMPONENTS


def _pair(predicted: int, real: int) -> str:
    return f"{predicted / _MEBIBYTE:8.1f}/{real / _MEBIBYTE:<8.1f}"


def _sum_up(rows: list[dict[str, Any]]) -> int:
    failed = 0
    for name in _names(rows):
        pairs = [(row["predicted"].get(name, 0), row["real"].get(name, 0)) for row in rows]
        failed |= _worst(name, pairs, 0.02, _MEBIBYTE)
    for row in rows:
        drafts = [sum(row[of].get(name, 0) for name in _DRAFT_COMPONENTS) for of in _SIDES]
        if drafts[1]:
            target = sum(row["real"].get(name, 0) for name in _COMPONENTS)
            print(
                f"draft model {drafts[0] / _MEBIBYTE:.2f} MiB predicted, "
                f"{drafts[1] / _MEBIBYTE:.2f} allocated ({drafts[0] / drafts[1] - 1:+.2%}), "
                f"{drafts[1] / target:.1%} of the target's"
            )
    peaks = [(row["predicted_peak_bytes"], row["peak_bytes"]) for row in rows]
    failed |= _worst("peak", peaks, 0.04, 8 * _MEBIBYTE)
    return failed | any(real > predicted for predicted, real in peaks)


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
