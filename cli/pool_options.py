"""Which models `edgespec serve` has, as its options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from edgespec.cli.options import SERVER, Group
from edgespec.option_fields import option


@dataclass(frozen=True)
class PoolOptions(Group):
    """Which models answer, and how long each stays.

    Args:
        folder: Folder of GGUF files, which are loaded when asked for.
        any_here: Load any model that `models list` knows when asked for.
        keep_alive: How long an idle model stays: 5m, 0 or always; for one model NAME=5m. Default:
            until others need its memory.
        pin: Name of a model that is loaded at once and stays.
        alias: Name of the model for clients; of several models NAME=ALIAS. Default: the file's
            name.
    """

    TITLE: ClassVar[str] = SERVER

    folder: Path | None = option(None, called="--models")
    any_here: bool = option(False, called="--any")
    keep_alive: list[str] | None = option(None)
    pin: list[str] | None = option(None)
    alias: list[str] | None = option(None)

    def is_pool(self, named: Sequence[str]) -> bool:
        """Whether models are loaded when they are asked for: not one model that stays."""
        is_chosen = self.folder or self.any_here or self.keep_alive or self.pin
        return len(named) > 1 or bool(is_chosen)
