"""Simulated annealing over recomputes: what it returns fits, and is cheaper where descents are far off."""

from __future__ import annotations

import math
import time
from threading import Event

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solvers import Problem
from solvers.base import CLOCK
from solvers.bounds import floor_bytes
from solvers.descent import cheapest_descent
from solvers.hunt import Hunt, annealing_beside
from solvers.live import Live
from solvers.metropolis import Annealed, anneal
from solvers.turns import WAYS, Runs
from tests.bench.families import FAMILIES

from .oracles import replay
from .strategies import problems

MOVES = 20_000


def annealed(problem: Problem, budget_bytes: int, moves: int = MOVES, seed: int = 0) -> Annealed:
    return anneal(Live(problem), budget_bytes, 0.5, moves=moves, deadline=math.inf, seed=seed)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_state_that_fits_is_a_schedule_of_that_peak_and_cost(data: st.DataObject) -> None:
    problem = data.draw(problems())
    plain = Live(problem).peak_bytes
    budget = data.draw(st.integers(floor_bytes(problem), max(plain, floor_bytes(problem))))
    live = annealed(problem, budget, moves=300).live
    if live is None:
        return
    seen = replay(problem, live.schedule())
    assert seen.peak_bytes <= live.peak_bytes <= budget  # ops that reuse memory may do better in the schedule's order
    assert seen.added_cost == live.cost


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_move_taken_back_leaves_the_state_as_it_was(data: st.DataObject) -> None:
    problem = data.draw(problems())
    allowed = [(s, i) for s in problem.required() for i in range(s) if problem.ops[i].recomputable]
    chosen = data.draw(st.lists(st.sampled_from(allowed), unique=True)) if allowed else []
    half = len(chosen) // 2
    live, plain = Live(problem, chosen[:half]), Live(problem, chosen[:half])
    before = live.levels()
    move = [*((1, s, i) for s, i in chosen[half:]), *((-1, s, i) for s, i in chosen[:half])]
    live.apply(move)
    then = Live(problem, chosen[half:])
    assert (live.total == then.total).all()
    live.take_back(move, before)
    assert (live.total == plain.total).all()
    assert (live.events, live.cost, live.recomputes()) == (plain.events, plain.cost, plain.recomputes())


@pytest.mark.slow
def test_far_below_the_plain_peak_it_is_cheaper_than_descents() -> None:
    """Descents come to 37.8 % of the step, eight seeds to 31.0 to 37.0."""
    problem = FAMILIES["layered-small"]()
    budget = Live(problem).peak_bytes // 5
    descents = cheapest_descent(problem, budget)
    found = [annealed(problem, budget, moves=3 * MOVES, seed=seed).live for seed in range(3)]
    assert descents is not None
    assert min(live.cost for live in found if live is not None) < 0.9 * descents.cost


def test_one_seed_is_one_plan() -> None:
    problem = FAMILIES["unet-6"]()
    budget = Live(problem).peak_bytes * 2 // 5
    plans = [annealed(problem, budget, moves=3000, seed=7).live for _ in range(2)]
    assert plans[0] is not None
    assert plans[1] is not None
    assert plans[0].recomputes() == plans[1].recomputes()


def test_the_deadline_ends_a_run() -> None:
    problem = FAMILIES["layered-small"]()
    begin = time.monotonic()
    run = anneal(Live(problem), Live(problem).peak_bytes // 5, 0.5, moves=10**9, deadline=begin + 0.5)
    assert run.moves < 10**9
    assert time.monotonic() - begin < 3.0


def test_after_two_turns_the_dearest_way_is_left_out() -> None:
    problem = FAMILIES["unet-6"]()
    runs = Runs(problem, Live(problem).peak_bytes * 2 // 5)
    best: Live | None = None
    for _ in range(2 * len(WAYS) + 1):
        live = runs.next(best, time.monotonic() + 0.5)
        if live is not None and (best is None or live.cost < best.cost):
            best = live
    assert len(runs.costs) == len(WAYS) - 1


def test_without_a_plan_every_other_run_searches_for_one() -> None:
    problem = FAMILIES["transformer-2"]()
    runs = Runs(problem, floor_bytes(problem) - 1)
    for _ in range(4):
        assert runs.next(None, time.monotonic() + 0.3) is None
    assert runs.searches * 2 == runs.number


def test_what_stops_a_run_ends_it() -> None:
    problem = FAMILIES["layered-small"]()
    stop = Event()
    stop.set()
    run = anneal(Live(problem), Live(problem).peak_bytes // 5, 0.5, moves=10**9, deadline=math.inf, stop=stop)
    assert run.live is None
    assert run.moves == 0


def test_annealing_beside_a_block_is_offered_at_its_end() -> None:
    problem = FAMILIES["layered-small"]()
    budget = Live(problem).peak_bytes // 4
    state = Hunt(problem, budget, time.monotonic() + 60.0, 0, None)
    state.offer(cheapest_descent(problem, budget))
    before = state.live
    assert before is not None
    cost = before.cost
    with annealing_beside(state):
        time.sleep(3.0)
        assert state.live is before
    assert state.cost < cost
    assert replay(problem, state.live.schedule()).peak_bytes <= budget
    assert CLOCK in state.notes  # how far it came is the clock's doing


def test_runs_side_by_side_give_the_same_plan_again() -> None:
    problem = FAMILIES["unet-6"]()
    budget = Live(problem).peak_bytes * 2 // 5
    costs = []
    for _ in range(2):
        runs, found = Runs(problem, budget), []
        for _ in range(2):
            live = runs.next(None, math.inf)
            found.append(None if live is None else live.recomputes())
        costs.append(found)
    assert costs[0] == costs[1]
