"""Pauses of the whole process: a CPU quota, a closed lid, Ctrl-Z. Drafting goes on behind them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Writes the same answer again and again, until its input ends: drafted tokens of each, one a line.
_WRITER = """
import json, sys, threading
import edgespec
text = "".join(f"def {name}(a, b):\\n    return a {sign} b\\n\\n" for name, sign in
               (("add", "+"), ("sub", "-"), ("mul", "*"), ("div", "/")))
prompt = text * 2 + "def add(a, b):\\n    return a"
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
with edgespec.load(context_size=1024, threads=1, drafter="suffix") as engine:
    while not ended.is_set():
        counters = engine.generate(prompt, raw=True, max_tokens=120).counters
        print(json.dumps([counters.drafted_tokens, counters.rounds]), flush=True)
"""
_OFF_S, _ON_S = 0.06, 0.06
_PAUSES_S, _AFTER_S = 6.0, 2.0


@pytest.mark.long
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no such signal here")
def test_a_process_that_is_stopped_and_continued_drafts_as_before(measured_cache: Path) -> None:
    """Two seconds behind the last pause, and in most answers between them."""
    environment = {**os.environ, "EDGESPEC_CACHE": str(measured_cache)}
    with subprocess.Popen(
        [sys.executable, "-c", _WRITER],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        before = [json.loads(process.stdout.readline()) for _ in range(4)][-1]
        end = time.monotonic() + _PAUSES_S
        while time.monotonic() < end:
            process.send_signal(signal.SIGSTOP)
            time.sleep(_OFF_S)
            process.send_signal(signal.SIGCONT)
            time.sleep(_ON_S)
        time.sleep(_AFTER_S)
        process.stdin.close()
        after = json.loads(process.stdout.readlines()[-1])
    assert before[0] >= 60, "the text repeats itself"
    assert after[0] >= before[0] / 2, (before, after)
