"""What the lines that `peers.py` wrote come to: ratios by contender and by category."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from edgespec.bench.ratios import Timed, interval_text, rate, ratio_of
from edgespec.bench.summary import decoding, end_to_end
from edgespec.decode.stats import Counters
from edgespec.memory.device.neighbours import BUSY

Line = dict[str, Any]  # one prompt and its answers by all contenders
_PLAIN = ("server", "python", "transformers")  # peers, and the names of their plain settings


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
    return max(names, key=lambda name: rate(_timed(lines, name, decoding)))


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
        "tokens_per_s": rate(ours),
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
    return [part(_counters(line["answers"][name])) for line in lines]


def _counters(one: dict[str, Any]) -> Counters:
    """What is timed of an answer; every decoded token counts as a round."""
    return Counters(
        generated_tokens=one["generated_tokens"],
        rounds=one["decoded_tokens"],
        time_to_first_token_s=one["time_to_first_token_s"],
        decode_s=one["decode_s"],
    )
