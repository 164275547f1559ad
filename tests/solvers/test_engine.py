"""HiGHS behind the ILP: its process, Ctrl-C in the middle of a solve, and the time limit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from solvers import BudgetError, Problem, Status, floor_bytes, mip, solve
from solvers.descent import cheapest_descent
from solvers.end_slots import first_ends
from solvers.engine import bound_staged, solve_staged
from solvers.interruptible import Beside, shielded
from solvers.live import Live
from solvers.mip import Worker
from solvers.solution import plain_solution
from solvers.staged import StagedModel
from tests.bench.families import FAMILIES
from tests.bench.problems import plain_peak_bytes, synthetic
from tests.planner.residue import children
from tests.solvers.chains import even_chain
from tests.solvers.oracles import replay

LATE_SHARE, LATE_SECONDS = 0.1, 1.0  # what a solve may take beyond its time limit


def chain(stages: int, seed: int = 2) -> Problem:
    return even_chain(random.Random(seed).randint, stages, cheapest=1)


def half_way(problem: Problem) -> int:
    """A budget between what every schedule holds and what the plain one does."""
    return (floor_bytes(problem) + plain_peak_bytes(problem)) // 2


# The process of its own -----------------------------------------------------------------------------------------------


def hard_model(stages: int = 40) -> StagedModel:
    """A program that HiGHS works on for many seconds."""
    problem = chain(stages)
    budget_bytes = plain_peak_bytes(problem) // 6
    return StagedModel(problem, budget_bytes, first_ends(problem, 12, budget_bytes))


@pytest.mark.every(3)
@pytest.mark.parametrize("program", ["", "no such program", "/bin/false"])
def test_without_its_process_the_relaxation_answers_and_says_so(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Valid, within the budget, labelled, and its bound holds for the optimum that the rotor knows."""
    problem = chain(40)  # too large for the exact search
    budget_bytes = half_way(problem)
    best = solve(problem, budget_bytes, solver="rotor").added_cost
    monkeypatch.setattr(sys, "executable", program or str(Path(__file__)))
    found = solve(problem, budget_bytes, solver="ilp", gap=0.0, time_limit=3.0)
    again = replay(problem, found.schedule)
    assert (found.peak_bytes, found.added_cost) == (again.peak_bytes, again.added_cost)
    assert found.peak_bytes <= budget_bytes
    assert any("only its relaxation" in note for note in found.notes)
    assert found.bound is not None
    assert 0 < found.bound <= best <= found.added_cost


class Silent(Worker):
    """HiGHS in a root node: the process takes the program, sends what it is told to and then nothing."""

    def __init__(self, told: list[dict[str, Any]]) -> None:
        super().__init__()
        self.told = told

    def _send(self, job: dict[str, Any]) -> None:
        if self.process is None:
            self.process = subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for message in self.told:
            self.answers.put(message)


INTRODUCED = """
import os, runpy, sys, highspy
class Introduced(highspy.Highs):
    told = False
    def __init__(self):
        if not Introduced.told:
            Introduced.told = True
            os.write(1, b"Running HiGHS 1.16.0\\n")
        super().__init__()
highspy.Highs = Introduced
"""


def test_what_highs_says_of_itself_is_no_answer_and_reaches_nobody(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Releases from 1.16 on print a line on standard output when the first instance in a process is made."""
    problem = chain(40)
    monkeypatch.setattr(mip, "BOOT", INTRODUCED + mip.BOOT)
    found = solve(problem, half_way(problem), solver="ilp", gap=0.0, time_limit=3.0)
    assert not any("only its relaxation" in note for note in found.notes)
    here = f"{INTRODUCED}from solvers.mip import introduce\nintroduce()\nhighspy.Highs()"
    subprocess.run([sys.executable, "-c", here], check=True, timeout=60)
    assert capfd.readouterr().out == ""


def test_a_silent_process_is_ended_and_what_it_said_counts() -> None:
    worker = Silent([{"bound": 3.0}, {"values": np.ones(2)}, {"bound": 4.0}])
    before, begin = children(), time.monotonic()
    outcome = worker.solve({}, begin + 0.5)
    assert time.monotonic() - begin < 1.5
    assert (outcome.bound, outcome.done, outcome.failure) == (4.0, False, "")
    assert outcome.values is not None and outcome.values.tolist() == [1.0, 1.0]
    assert children() == before


def test_what_is_found_before_the_end_is_used() -> None:
    """The program is far from solved when it is ended, and yet there are a bound and a solution."""
    for seconds in (2.0, 10.0):  # the second for a machine that is busy
        begin = time.monotonic()
        answer = solve_staged(hard_model(), seconds, 0)
        assert time.monotonic() - begin < seconds + 2.0
        assert answer.timed_out
        if answer.values is not None:
            break
    assert answer.bound is not None and answer.values is not None


def test_an_impossible_program_is_certified() -> None:
    """The relaxation alone proves it, checked by its ray; what fits is never called impossible."""
    problem = chain(12)
    floor = floor_bytes(problem)
    ends = first_ends(problem, 5, floor)
    assert solve_staged(StagedModel(problem, floor - 1, ends), 5.0, 0).certified
    assert not solve_staged(StagedModel(problem, plain_peak_bytes(problem), ends), 5.0, 0).certified


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


def interrupted(run: Callable[[], Any], alarm: Callable[[float], None], seconds: float) -> float:
    """Ctrl-C `run` after that many seconds; returns how long it took to give up."""
    alarm(seconds)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run()
    return time.monotonic() - begin - seconds


@pytest.mark.parametrize("after", [0.3, 1.0])
def test_ctrl_c_in_highs_leaves_nothing_behind(after: float, temporary: Path, alarm: Callable[[float], None]) -> None:
    """A program that HiGHS works on for many seconds, interrupted while it does."""
    problem, model = chain(40), hard_model()
    small = StagedModel(problem, problem.static_bytes, first_ends(problem, 2, problem.static_bytes))
    solve_staged(small, 5.0, 0)  # starts HiGHS's workers
    threads, processes = threading.active_count(), children()
    late = interrupted(lambda: solve_staged(model, 60.0, 0), alarm, after)
    assert late < 5.0, f"it went on for {late:.1f} s"
    patience = time.monotonic() + 5.0
    while threading.active_count() > threads and time.monotonic() < patience:
        time.sleep(0.01)  # one that was just being started ends by itself
    assert threading.active_count() == threads
    assert children() == processes
    assert os.listdir(temporary) == []
    used = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - used < 0.25, "something still computes"
    again = solve(chain(12), half_way(chain(12)), solver="ilp", gap=0.0, time_limit=20.0)
    assert again.status is Status.OPTIMAL, "the next solve works"


# The time limit -------------------------------------------------------------------------------------------------------


def seconds_taken(problem: Problem, name: str, time_limit: float) -> float:
    """Wall clock, or processor time where a busy machine makes that the smaller."""
    begin, used = time.monotonic(), time.process_time()
    try:
        found = solve(problem, plain_peak_bytes(problem) // 3, solver=name, time_limit=time_limit, gap=0.0)
        assert found.peak_bytes <= plain_peak_bytes(problem) // 3
    except BudgetError as error:  # on a machine that is busy enough
        if "The time limit ended the search" not in str(error):
            raise
    return min(time.monotonic() - begin, time.process_time() - used)


def assert_in_time(problem: Problem, name: str, time_limit: float) -> None:
    """At the second try if need be: what else the machine does can only add to a time."""
    tries = (seconds_taken(problem, name, time_limit) for _ in range(2))
    assert any(taken < (1 + LATE_SHARE) * time_limit + LATE_SECONDS for taken in tries)


@pytest.mark.parametrize("name", ["auto", "chen", "greedy", "ilp"])
def test_no_time_at_all(name: str) -> None:
    """A plan that exists is used; without one the refusal says that the clock did it, and names what works."""
    problem = synthetic(200)
    budget = plain_peak_bytes(problem) // 2
    free = solve(problem, budget, solver=name, time_limit=20.0)
    hurried = solve(problem, budget, solver=name, time_limit=1e-9, warm_starts=(free.schedule,))
    assert hurried.peak_bytes <= budget and free.added_cost == hurried.added_cost
    with pytest.raises(BudgetError, match="The time limit ended the search") as caught:
        solve(problem, floor_bytes(problem), solver=name, time_limit=1e-9)
    stated = caught.value.minimum_bytes
    assert stated is not None and (stated <= free.peak_bytes or name == "chen")
    assert solve(problem, stated, solver=name, time_limit=1e-9).peak_bytes <= stated


@pytest.mark.parametrize("name", ["auto", "chen", "greedy", "ilp"])
def test_the_time_limit_holds_on_three_thousand_ops(name: str) -> None:
    assert_in_time(synthetic(1000), name, 4.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["auto", "chen", "greedy", "ilp"])
def test_the_time_limit_holds_on_ten_thousand_ops(name: str) -> None:
    assert_in_time(synthetic(3000), name, 8.0)


def test_what_the_clock_ended_says_so() -> None:
    problem = synthetic(500)
    budget = plain_peak_bytes(problem) // 3
    known = solve(problem, budget, solver="chen").schedule
    found = solve(problem, budget, solver="ilp", time_limit=2.0, gap=0.0, warm_starts=(known,))
    assert found.status is Status.OPTIMAL or any("time limit" in note for note in found.notes)
    assert plain_solution(problem, "plain").notes == ()


def test_an_interrupt_is_raised_once_what_is_shielded_is_over() -> None:
    """Within HiGHS's bindings it would be taken for a wrong argument, or be lost."""
    over = []

    def act() -> None:
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.1)
        over.append(True)

    with pytest.raises(KeyboardInterrupt):
        shielded(act)
    assert over == [True]
    with pytest.raises(ZeroDivisionError):
        shielded(lambda: over.append(bool(1 // 0)))


def test_work_beside_a_block_is_told_of_its_end() -> None:
    def work(stop: threading.Event) -> bool:
        return stop.wait(60.0)

    begin = time.monotonic()
    with Beside(work) as side:
        pass
    assert side.result()
    with pytest.raises(KeyboardInterrupt), Beside(work):
        signal.raise_signal(signal.SIGINT)
    assert time.monotonic() - begin < 30.0


def test_an_error_of_work_beside_a_block_is_raised() -> None:
    with Beside(lambda _: 1 // 0) as side, pytest.raises(ZeroDivisionError):
        side.result()


def test_a_relaxation_that_the_clock_ends_proves_what_it_came_to() -> None:
    problem = FAMILIES["layered-small"]()
    budget_bytes = Live(problem).peak_bytes // 5
    model = StagedModel(problem, budget_bytes, first_ends(problem, 24, budget_bytes), windows=True)
    answer = bound_staged(model, 2.0)
    plan = cheapest_descent(problem, budget_bytes)
    assert answer.values is None
    assert plan is not None
    assert answer.bound is not None
    assert 0 < answer.bound * model.cost_unit <= plan.cost
