"""Budgets from far too small to ample: refused or run, never over, never slower with more.

    python benchmarks/budgets.py MODEL... [--steps 40] [--json OUT]

Each budget is one `edgespec run`. Columns: budget, what was planned and the measured peak in MiB,
context, largest draft, predicted and measured tokens/s. The exit status is 1 when a peak was over
its budget, a run failed in another way than by refusal, or a larger budget predicts less speed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

_MEBIBYTE = 1 << 20
_NOISE = 0.9  # every run teaches the next prediction something
_PROMPT = "Write a JSON list of six fruits with the keys name, colour, sweetness and season."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path, metavar="OUT")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    failed = False
    for model in arguments.models:
        ample = json.loads(_edgespec("plan", str(model), "--json").stdout)
        most = ample["memory"]["predicted_peak_bytes"]
        print(f"\n{model.name}: budget, plan, peak MiB, context, draft, predicted, measured t/s")
        best = 0.0
        for step in range(arguments.steps):
            budget = int(most * (0.3 + 0.8 * step / (arguments.steps - 1)))
            row = {"model": model.stem, **_one(model, budget)}
            rows.append(row)
            print(_line(row), flush=True)
            failed |= not row["refused"] and (
                row["peak_bytes"] > budget or row["predicted_tokens_per_s"] < _NOISE * best
            )
            best = max(best, row.get("predicted_tokens_per_s", 0.0))
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    sys.exit(failed)


def _edgespec(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edgespec.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _one(model: Path, budget: int) -> dict[str, Any]:
    options = ["--budget", f"{budget / _MEBIBYTE:.3f}MiB"]
    done = _edgespec("run", str(model), _PROMPT, "--max-tokens", "48", "--json", *options)
    if done.returncode == 1 and "hint:" in done.stderr and "Traceback" not in done.stderr:
        return {"budget_bytes": budget, "refused": True, "hint": done.stderr.split("hint: ")[1]}
    if done.returncode != 0:
        sys.exit(f"status {done.returncode} at {budget} bytes: {done.stderr}")
    found = json.loads(done.stdout)
    plan = found["plan"]
    options += ["--ctx", str(plan["context_size"]["value"])]  # a plan is made for longer answers
    predicted = json.loads(_edgespec("plan", str(model), "--json", *options).stdout)
    return {
        "budget_bytes": budget,
        "refused": False,
        "planned_bytes": found["memory"]["predicted_peak_bytes"],
        "peak_bytes": found["memory"]["measured_peak_bytes"],
        "context_size": plan["context_size"]["value"],
        "draft_max": plan["draft_max"]["value"],
        "predicted_tokens_per_s": predicted["predicted_tokens_per_s"],
        "tokens_per_s": found["tokens_per_s"],
    }


def _line(row: dict[str, Any]) -> str:
    budget = f"{row['budget_bytes'] / _MEBIBYTE:8.1f}"
    if row["refused"]:
        return f"{budget}  refused; {row['hint'].strip()}"
    planned, peak = row["planned_bytes"] / _MEBIBYTE, row["peak_bytes"] / _MEBIBYTE
    return (
        f"{budget} {planned:8.1f} {peak:8.1f} {row['context_size']:6} {row['draft_max']:3} "
        f"{row['predicted_tokens_per_s']:7.1f} {row['tokens_per_s']:7.1f}"
    )


if __name__ == "__main__":
    main()
