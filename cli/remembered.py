"""`edgespec remembered`: what `--remember` and `--disk-cache` have kept on this machine."""

from __future__ import annotations

import dataclasses
import json

from edgespec.cli import options
from edgespec.cli.render import note, printable, size_text, table
from edgespec.option_fields import option


def remembered(
    clear: bool = option(False, "Delete all of it."),
    as_json: options.JsonOption = False,
) -> None:
    """Show or clear the texts that --remember keeps, and the caches that --disk-cache keeps."""
    from edgespec.memory.store import cells, texts

    if clear:
        count = texts.forget()
        cells.forget()
        note(f"forgot the texts of {count} model{'s' * (count != 1)}")
    kept, caches = texts.remembered(), cells.kept_bytes()
    if caches and not as_json:
        sizes = ", ".join(f"{printable(name)} {size_text(size)}" for name, size in caches.items())
        note(f"caches of conversations: {sizes}")
    if as_json:
        print(json.dumps([dataclasses.asdict(entry) for entry in kept]))
    elif kept:
        head = ("model", "texts", "tokens", "size")
        rows = [(e.model, str(e.texts), str(e.tokens), size_text(e.file_bytes)) for e in kept]
        print(printable(table([head, *rows])))
    elif not clear and not caches:
        note("nothing is remembered; --remember keeps what a model reads and writes")
