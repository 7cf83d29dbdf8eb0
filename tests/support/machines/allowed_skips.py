"""The reasons for which a test may skip in CI, and what makes any other one a failure."""

from __future__ import annotations

import re

import pytest

# By the beginning of what a test says, and why CI does without it.
ALLOWED = {
    "llama.cpp sees no GPU here": "CI's machine has none: benchmarks/gpu_check.py",
    "this processor has no ": "each processor runs the kernels that it has",
    "root reads anything": "in a container CI is root",
    "needs node": "no browser's engine is installed for one function",
    "numbers are not given again here": "some C libraries never give a thread's number again",
    "this kernel gives nobody huge pages": "a container's kernel may have none",
    "this system's allocator gave the list no room": "it places lists as it likes",
    "emulates programs of this processor": "on ARM the products of x86-64 are not emulated",
    "AMX exists on x86-64 alone": "on ARM there is none",
    "needs tomllib": "Python 3.10 has none",
    "needs PYTHONSAFEPATH": "Python 3.10 has none",
    "needs two cores": "a container may have one",
}

# The long run has what these lack.
ALLOWED_IN_SHORT_RUNS = (
    "no Chromium here",
    "training needs torch",
    "the export extra is not installed",
    "comes with the export extra",
)


class UnknownSkips:
    """A plugin of pytest: tests that skip for a reason that is not listed fail the run."""

    def __init__(self, *, is_long: bool) -> None:
        self.allowed = (*ALLOWED, *(() if is_long else ALLOWED_IN_SHORT_RUNS))
        self.found: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._see(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._see(report)

    def _see(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = re.sub(r"^Skipped: ", "", said)
        if not reason.startswith(self.allowed):
            self.found.append(f"{report.nodeid}: {reason}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.found and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.found:
            terminalreporter.section("skips that tests/support/machines/allowed_skips.py lacks")
            for line in self.found:
                terminalreporter.line(line)
