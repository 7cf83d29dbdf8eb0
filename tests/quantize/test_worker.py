"""The process that quantizes: what it says on its standard output."""

from __future__ import annotations

import json
import subprocess
import sys


def test_what_others_print_is_no_part_of_what_the_quantizer_says() -> None:
    """A library writes to the file descriptor, whatever Python's own stdout is."""
    program = (
        "import os\n"
        "from edgespec.models.processes import do_job\n"
        "def quantize(job, say):\n"
        "    os.write(1, b'welcome\\n')\n"
        "    say(status=0, problem=job['name'])\n"
        "do_job(quantize)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input='{"name": "\\u00fc"}',
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout) == {"status": 0, "problem": "\u00fc"}
    assert done.stderr == "welcome\n"
