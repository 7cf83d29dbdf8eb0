"""What drafters begin with: how often drafts held in answers of several models.

`priors.json` was made by `benchmarks/prior.py`. It describes no user's text: hits and tries by
calibration cell. A document of another version or layout is not used.

Models differ: from one to another the odds of a cell are halved or doubled, and whoever repeats
itself less would lose by the counts of others. So they are taken at half of their odds, about one
standard deviation below, which costs those who repeat themselves more little: own counts come fast.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from edgespec.drafting import constants
from edgespec.drafting.calibration import Counts, pairs_of

VERSION = 1


@cache
def known_counts(drafter: str, num_cells: int) -> Counts:
    """Hits and tries by cell of a drafter's table; nothing where there are none."""
    document = _document()
    found = document.get(drafter) if document.get("version") == VERSION else None
    if not isinstance(found, dict) or found.get("num_cells") != num_cells:
        return {}
    pairs = {int(cell): counts for cell, counts in pairs_of(found.get("cells")).items()}
    there = {cell: counts for cell, counts in pairs.items() if counts[1] > 0.0}
    return cautious(there) if max(there, default=0) < num_cells else {}


def cautious(counts: Counts) -> Counts:
    """The same number of tries, at the odds that one may expect of another model."""
    found = {}
    for cell, (hits, tries) in counts.items():
        odds = constants.PRIOR_ODDS * (hits + 0.5) / (tries - hits + 0.5)
        found[cell] = (tries * odds / (1.0 + odds), tries)
    return found


def _document() -> dict[str, Any]:
    text = files("edgespec.drafting").joinpath("priors.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document
