"""What long measurements share: they may be stopped, and say which machine their results are of."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgespec.memory.device.host import cpu_name


@contextmanager
def stoppable() -> Iterator[None]:
    """Ctrl-C or SIGTERM ends what is inside, not the script: it shows what was measured so far."""

    def stop(_number: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        print("stopped: what follows was measured until now", file=sys.stderr, flush=True)
    finally:
        signal.signal(signal.SIGTERM, before)


def results_file(folder: Path, what: str, model: str) -> Path:
    """NAME.json in the folder, which is made: what was measured, the model and the processor."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{what} {Path(model).stem} {cpu_name()}"
    return folder / f"{re.sub('[^a-z0-9._]+', '-', name.lower()).strip('-')}.json"


def write_results(path: Path, document: dict[str, Any]) -> None:
    """As JSON, the machine's name included."""
    found = {"machine": cpu_name(), **document}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"results: {path}", file=sys.stderr)
