"""What every solver answers with, and the one vocabulary for how sure it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from .problem import Problem
from .schedule import Schedule, plain_order, with_frees
from .simulate import simulate

EVERY = "all schedules"


class Status(str, Enum):
    """How good a schedule is known to be; the value is the user's word."""

    OPTIMAL = "optimal"
    PERSISTENT = "optimal among persistent schedules"
    FEASIBLE = "feasible"


@dataclass(frozen=True)
class Solution:
    """A schedule that `simulate` accepted, and what is proved about it.

    Attributes:
        schedule: the schedule.
        peak_bytes, added_cost: `simulate`'s figures for it.
        status: OPTIMAL only when `added_cost` equals a `bound` over all schedules; PERSISTENT when it equals one over
            rotor's family.
        bound: proved lower bound on the added cost within `family`, or None.
        family: the schedules over which `bound` is proved, in words.
        solver: who answered.
        notes: fallbacks taken and limits hit, each a sentence for the user.
    """

    schedule: Schedule
    peak_bytes: int
    added_cost: int
    status: Status
    solver: str
    bound: int | None = None
    family: str = ""
    notes: tuple[str, ...] = ()


def solution(
    problem: Problem,
    schedule: Schedule,
    solver: str,
    *,
    bound: int | None = None,
    family: str = "",
    notes: tuple[str, ...] = (),
) -> Solution:
    """Wrap a schedule, re-costed by `simulate`; a bound above the cost would be a defect and is clamped to it.

    Args:
        family: begins with `EVERY` where the bound holds for all schedules.
    """
    result = simulate(problem, schedule)
    if result.added_cost == 0:
        bound, family = 0, EVERY
    if bound is not None:
        bound = min(bound, result.added_cost)
    proved = Status.OPTIMAL if family.startswith(EVERY) else Status.PERSISTENT
    status = proved if bound == result.added_cost else Status.FEASIBLE
    return Solution(
        schedule, result.peak_bytes, result.added_cost, status, solver, bound, family, notes
    )


def plain_solution(problem: Problem, solver: str) -> Solution:
    """The step without recompute."""
    return solution(problem, with_frees(problem, plain_order(problem)), solver, bound=0, family=EVERY)


def cheapest_fit(
    problem: Problem, budget_bytes: int, solver: str, schedules: Sequence[Schedule]
) -> Solution | None:
    """The cheapest of `schedules` that fits the budget, or None."""
    found = [solution(problem, schedule, solver) for schedule in schedules]
    return min((s for s in found if s.peak_bytes <= budget_bytes), key=lambda s: s.added_cost, default=None)
