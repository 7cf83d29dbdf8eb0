"""Options of llama.cpp in commands that people copy: taken where they change nothing here.

One that would change the answer is refused, with what does the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import typer
from typer.core import TyperOption

from edgespec.cli.render import note

_FLASH = ("on", "off", "auto", "1", "0")
# Names, and whether a value follows.
_HARMLESS = (
    *(("-fa --flash-attn", True), ("-b --batch-size", True), ("-ub --ubatch-size", True)),
    *(("-tb --threads-batch", True), ("-np --parallel", True), ("--numa", True), ("--prio", True)),
    *(("--poll", True), ("--fit -fit", True), ("--jinja", False), ("--no-mmap", False)),
    *(("--mmap", False), ("--mlock", False), ("-cnv --conversation", False)),
    *(("-st --single-turn", False), ("-cb --cont-batching", False), ("--no-warmup", False)),
    *(("--warmup", False), ("-kvu --kv-unified", False), ("--no-display-prompt", False)),
    *(("--simple-io", False), ("--log-disable", False), ("--perf --no-perf", False)),
    *(("--metrics", False), ("--slots", False)),
)
# Names, whether a value follows, and what to do instead.
_OTHERWISE = (
    ("--lora-scaled", True, "use --lora FILE=SCALE"),
    ("-no-cnv --no-conversation", False, "use --raw"),
    ("--chat-template --chat-template-file", True, "the model's own is used, or none with --raw"),
    ("-hff --hf-file", True, "name the file's type, as in hf:OWNER/REPO:Q4_K_M"),
    ("-e --escape", False, "write line ends as they are, or use --file"),
    ("--draft --draft-n", True, "use --draft-max"),
    ("--mirostat-n", True, "use --mirostat"),
)


def other_options(names: Collection[str]) -> Iterator[TyperOption]:
    """Those of llama.cpp that are none of a command's own `names`; help and files have none."""
    for texts, has_value in _HARMLESS:
        yield from _option(texts, has_value, _taken, names)
    for texts, has_value, instead in _OTHERWISE:

        def refuse(_: Any, _option: Any, value: Any, instead: str = instead) -> None:
            if value:
                raise typer.BadParameter(f"edgespec has none: {instead}")

        yield from _option(texts, has_value, refuse, names)


def _option(
    texts: str, has_value: bool, callback: Any, names: Collection[str]
) -> Iterator[TyperOption]:
    known = [one for one in texts.split() if one not in names]
    if known:
        place = known[0].strip("-").replace("-", "_")
        yield TyperOption(
            param_decls=[f"llama_{place}", *known],
            type=str if has_value else bool,
            is_flag=not has_value,
            default=None if has_value else False,
            multiple=False,
            hidden=True,
            expose_value=False,
            callback=callback,
        )


def _taken(context: Any, option: Any, value: Any) -> None:
    if not value or context.resilient_parsing:
        return
    name = option.opts[0]
    if name == "-fa" and value not in _FLASH:
        raise typer.BadParameter(f"-fa is {', '.join(_FLASH)}, not {value}")
    note(f"{name} is llama.cpp's and changes nothing here")
