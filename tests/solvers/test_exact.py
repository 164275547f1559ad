"""The exact search by itself: the optimum and the minimum, and what it has ruled out when it gives up."""

from __future__ import annotations

import pytest

from solvers import BudgetError, Problem, floor_bytes, minimum_budget, simulate, solve
from solvers import exact as searched
from solvers.exact import exact_schedule
from tests.bench.families import FAMILIES, transformer
from tests.bench.problems import plain_peak_bytes

from .oracles import brute_force
from .test_staged import any_problem


@pytest.mark.parametrize("seed", range(60))
def test_what_is_ruled_out_is_no_more_than_the_truth(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With work for the whole search, and for a few states alone."""
    problem = any_problem(seed)
    best = brute_force(problem)
    for work in (searched.WORK_LIMIT, 3, 30):
        monkeypatch.setattr(searched, "WORK_LIMIT", work)
        lowest = exact_schedule(problem)
        assert floor_bytes(problem) <= lowest.bound <= best.minimum_bytes
        assert lowest.schedule is None or simulate(problem, lowest.schedule).peak_bytes == best.minimum_bytes
        for cost, budget_bytes in best.points:
            found = exact_schedule(problem, budget_bytes)
            assert found.bound <= cost and found.complete == (found.schedule is not None)
            if found.schedule is not None:
                assert found.bound == simulate(problem, found.schedule).added_cost == cost
        assert not exact_schedule(problem, best.minimum_bytes - 1).schedule


@pytest.mark.slow
def test_the_minimum_of_a_transformer_block_is_its_floor() -> None:
    """No descent gets below 47.24 % of the plain peak; 44.47 % is the floor, and a schedule reaches it."""
    problem = transformer(1)
    smallest = minimum_budget(problem, time_limit=20.0)
    assert smallest.minimum_bytes == smallest.floor_bytes == floor_bytes(problem)
    assert smallest.minimum_bytes < 0.45 * plain_peak_bytes(problem)
    assert simulate(problem, smallest.schedule).peak_bytes == smallest.minimum_bytes
    assert solve(problem, smallest.minimum_bytes, time_limit=20.0).peak_bytes == smallest.minimum_bytes


def test_too_large_a_problem_is_left_alone() -> None:
    found = exact_schedule(FAMILIES["transformer-12"]())
    assert found.schedule is None and not found.complete


@pytest.mark.parametrize("name", ["auto", "ilp", "greedy", "chen"])
def test_nothing_to_run_still_holds_what_is_resident(name: str) -> None:
    problem = Problem((), (), 0, static_bytes=5)
    assert solve(problem, 5, solver=name).peak_bytes == 5
    with pytest.raises(BudgetError) as refused:
        solve(problem, 4, solver=name)
    assert (refused.value.minimum_bytes, refused.value.floor_bytes) == (5, 5)
