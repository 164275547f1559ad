"""Overhead against budget: many budgets of one problem, each warm-started from the last."""

from __future__ import annotations

from collections.abc import Callable

from .minimum import minimum_budget
from .problem import Problem
from .schedule import Schedule
from .solution import Solution, plain_solution

Solve = Callable[[Problem, int, float, tuple[Schedule, ...]], Solution]


def frontier(problem: Problem, solve: Solve, *, points: int = 20, time_limit: float = 60.0) -> tuple[Solution, ...]:
    """The cheapest plans found at `points` budgets, evenly spread from the smallest that works to the plain peak.

    Budgets rise; a plan that fits one fits the next, so cost never rises along the result.

    Args:
        solve: called with the problem, a budget, a time limit and warm starts.
        time_limit: seconds for all points together.
    """
    smallest = minimum_budget(problem, time_limit=time_limit / 4)
    lowest, highest = smallest.minimum_bytes, plain_solution(problem, "plain").peak_bytes
    warm: tuple[Schedule, ...] = (smallest.schedule,)
    found: list[Solution] = []
    for j in range(points):
        budget = highest if points == 1 else lowest + (highest - lowest) * j // (points - 1)
        found.append(solve(problem, budget, time_limit / points, warm))
        warm = (found[-1].schedule,)
    return tuple(found)
