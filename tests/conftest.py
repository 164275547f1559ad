"""Shared by all tests: how many examples Hypothesis makes, what Ctrl-C does, that no solver test is skipped unseen."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

QUIET = {"deadline": None, "derandomize": True, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("default", max_examples=60, **QUIET)
settings.register_profile("thorough", max_examples=2000, **(QUIET | {"derandomize": False}))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# A shell ignores Ctrl-C in what it runs in the background, and Python then leaves it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

SOLVER_TESTS = "tests/solvers/"


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a run that skipped a solver test: a missing engine must not look like a passing one."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or exitstatus != pytest.ExitCode.OK:
        return
    skipped = [report.nodeid for report in reporter.stats.get("skipped", []) if report.nodeid.startswith(SOLVER_TESTS)]
    if skipped:
        reporter.write_line(f"skipped solver tests fail the run: {', '.join(skipped)}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
