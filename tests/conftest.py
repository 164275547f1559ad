"""Shared by all tests: what runs by default, Ctrl-C, temporary files, and that no solver test is skipped unseen."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import tempfile
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings

QUIET = {"deadline": None, "derandomize": True, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("default", max_examples=60, **QUIET)
settings.register_profile("thorough", max_examples=2000, **(QUIET | {"derandomize": False}))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# A shell ignores Ctrl-C in what it runs in the background, and Python then leaves it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

# One process for each core: more threads than that only wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests look at what is left among temporary files, so each process has its own.
os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="tests-")
atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)

SOLVER_TESTS = "tests/solvers/"


@pytest.fixture(autouse=True, scope="module")
def _settled() -> None:
    """What is alive between files (modules, torch's caches) is garbage to nobody: collections need not look at it.

    There is one for each refusal.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test with three cases or more every second one runs by default, of one with six or more every sixth, or each
    n-th if it is marked `every(n)`.

    The others are slow.
    """
    cases, seen = Counter(map(_test, items)), Counter[str]()
    for item in items:
        mark, test = item.get_closest_marker("every"), _test(item)
        n = mark.args[0] if mark else 6 if cases[test] > 5 else 2 if cases[test] > 2 else 1
        if seen[test] % n:
            item.add_marker("slow")
        seen[test] += 1


def _test(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a run that skipped a solver test: a missing engine must not look like a passing one."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or exitstatus != pytest.ExitCode.OK:
        return
    skipped = [report.nodeid for report in reporter.stats.get("skipped", []) if report.nodeid.startswith(SOLVER_TESTS)]
    if skipped:
        reporter.write_line(f"skipped solver tests fail the run: {', '.join(skipped)}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
