"""The engines behind the ILP: CBC instead of HiGHS, Ctrl-C in the middle of a solve, and the time limit."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import solvers.engine
from solvers import BudgetError, Problem, Status, floor_bytes, solve
from solvers.engine import solve_staged
from solvers.solution import plain_solution
from solvers.staged import StagedModel, first_ends
from tests.bench.problems import plain_peak_bytes, synthetic
from tests.solvers.chains import even_chain
from tests.solvers.oracles import replay

SLACK_SECONDS = 3.0  # beside the time limit, for heuristics and model building that are not cut short


def chain(stages: int, seed: int = 2) -> Problem:
    return even_chain(random.Random(seed).randint, stages, cheapest=1)


def half_way(problem: Problem) -> int:
    """A budget between what every schedule holds and what the plain one does."""
    return (floor_bytes(problem) + plain_peak_bytes(problem)) // 2


# CBC ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_highs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solvers.engine, "highspy", None)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["ilp", "auto"])
def test_without_highs_cbc_answers_and_says_so(name: str, seed: int, no_highs: None) -> None:
    """Valid, within the budget, labelled, and its bound holds for the optimum that the rotor knows."""
    problem = chain(12, seed)
    budget_bytes = half_way(problem)
    best = solve(problem, budget_bytes, solver="rotor").added_cost
    found = solve(problem, budget_bytes, solver=name, gap=0.0, time_limit=20.0)
    again = replay(problem, found.schedule)
    assert (found.peak_bytes, found.added_cost) == (again.peak_bytes, again.added_cost)
    assert found.peak_bytes <= budget_bytes
    assert any("highspy is not installed: CBC" in note for note in found.notes)
    assert found.bound is not None
    assert 0 < found.bound <= best <= found.added_cost
    assert (found.status is Status.OPTIMAL) == (found.bound == found.added_cost)


def test_with_highs_nothing_is_noted() -> None:
    problem = chain(12)
    found = solve(problem, half_way(problem), solver="ilp", gap=0.0, time_limit=20.0)
    assert not any("CBC" in note for note in found.notes)


def test_cbc_proves_that_nothing_fits(no_highs: None) -> None:
    """Infeasible by the program: the error still names a budget that works."""
    problem = chain(12)
    with pytest.raises(BudgetError) as caught:
        solve(problem, floor_bytes(problem) - 1, solver="ilp", time_limit=10.0)
    assert caught.value.minimum_bytes is not None
    assert solve(problem, caught.value.minimum_bytes, solver="ilp", time_limit=10.0).added_cost > 0


# Ctrl-C ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that takes every temporary file of the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def alarm() -> Iterator[Callable[[float], None]]:
    """Arms a Ctrl-C of the main thread, as the terminal would send it."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)  # type: ignore[func-returns-value]
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def children() -> list[str]:
    """Process ids of this process's children."""
    found: list[str] = []
    for task in os.listdir("/proc/self/task"):
        with suppress(FileNotFoundError):  # a thread that has ended since
            found += Path(f"/proc/self/task/{task}/children").read_text().split()
    return found


def interrupted(run: Callable[[], Any], alarm: Callable[[float], None], seconds: float) -> float:
    """Ctrl-C `run` after that many seconds; returns how long it took to give up."""
    alarm(seconds)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run()
    return time.monotonic() - begin - seconds


@pytest.mark.parametrize("after", [0.3, 1.0])
def test_ctrl_c_in_highs_leaves_nothing_behind(
    after: float, temporary: Path, alarm: Callable[[float], None]
) -> None:
    """A program that HiGHS works on for many seconds, interrupted while it does."""
    problem = chain(40)
    budget_bytes = plain_peak_bytes(problem) // 6
    model = StagedModel(problem, budget_bytes, first_ends(problem, 12, budget_bytes))
    small = StagedModel(problem, problem.static_bytes, first_ends(problem, 2, budget_bytes))
    solve_staged(small, 5.0, 0)  # starts HiGHS's workers
    threads, processes = threading.active_count(), children()
    late = interrupted(lambda: solve_staged(model, 60.0, 0), alarm, after)
    assert late < 5.0, f"it went on for {late:.1f} s"
    assert threading.active_count() == threads
    assert children() == processes
    assert os.listdir(temporary) == []
    used = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - used < 0.25, "something still computes"
    again = solve(chain(12), half_way(chain(12)), solver="ilp", gap=0.0, time_limit=20.0)
    assert again.status is Status.OPTIMAL, "the next solve works"


def test_ctrl_c_in_cbc_leaves_nothing_behind(
    temporary: Path, alarm: Callable[[float], None], no_highs: None
) -> None:
    problem = chain(40)
    budget_bytes = plain_peak_bytes(problem) // 6
    model = StagedModel(problem, budget_bytes, first_ends(problem, 12, budget_bytes))
    processes = children()
    late = interrupted(lambda: solve_staged(model, 60.0, 0), alarm, 1.5)
    assert late < 5.0, f"it went on for {late:.1f} s"
    assert children() == processes
    assert os.listdir(temporary) == []


# The time limit -------------------------------------------------------------------------------------------------------


def seconds_taken(problem: Problem, name: str, time_limit: float) -> float:
    """Wall clock, or processor time where a busy machine makes that the smaller."""
    begin, used = time.monotonic(), time.process_time()
    found = solve(problem, plain_peak_bytes(problem) // 3, solver=name, time_limit=time_limit, gap=0.0)
    taken = min(time.monotonic() - begin, time.process_time() - used)
    assert found.peak_bytes <= plain_peak_bytes(problem) // 3
    return taken


def assert_in_time(problem: Problem, name: str, time_limit: float) -> None:
    """At the second try if need be: what else the machine does can only add to a time."""
    tries = (seconds_taken(problem, name, time_limit) for _ in range(2))
    assert any(taken < time_limit + SLACK_SECONDS for taken in tries)


def test_chen_stops_at_the_limit_and_says_so() -> None:
    problem = synthetic(1000)
    budget = plain_peak_bytes(problem) // 2
    hurried = solve(problem, budget, solver="chen", time_limit=1e-9)
    free = solve(problem, budget, solver="chen")
    assert hurried.peak_bytes <= budget and free.added_cost <= hurried.added_cost
    assert any("time limit" in note for note in hurried.notes) and free.notes == ()


@pytest.mark.parametrize("name", ["auto", "chen", "greedy", "ilp"])
def test_the_time_limit_holds_on_three_thousand_ops(name: str) -> None:
    assert_in_time(synthetic(1000), name, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["auto", "chen", "greedy", "ilp"])
def test_the_time_limit_holds_on_ten_thousand_ops(name: str) -> None:
    assert_in_time(synthetic(3000), name, 8.0)


def test_what_the_clock_ended_says_so() -> None:
    problem = synthetic(500)
    found = solve(problem, plain_peak_bytes(problem) // 3, solver="ilp", time_limit=0.6, gap=0.0)
    assert found.status is Status.OPTIMAL or any("time limit" in note for note in found.notes)
    assert plain_solution(problem, "plain").notes == ()
