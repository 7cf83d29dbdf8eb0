"""How long work tells of its progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

# What is being done, and which part of it is done (0..1).
Progress: TypeAlias = Callable[[str, float], None]
