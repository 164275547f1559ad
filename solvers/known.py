"""Schedules of the smallest peaks found so far in this process, so that a stated minimum is met when it is asked for.

What a refusal names was found within a share of one search's time. The next search of the same problem may have less
time, a busier machine, or costs that were measured anew: where it finds nothing, the schedule that the refusal was
about is still there; for every budget above, too, lest a larger one cost more. Costs decide no peak, so problems that
differ in them alone are the same here.

What was planned, and what searches that found nothing came down to, is kept beside them, for where a search finds
nothing: no refusal names more than that, and it is the answer where it fits. So is the smallest of which a caller has
found that it can run as it is, where a schedule cannot run in every order that the Problem allows.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from .problem import Problem
from .schedule import Schedule
from .simulate import peak_and_cost

MOST = 128
STATED, FALLBACK, RUNS = "stated", "fallback", "runs"

Key = tuple[str, bytes]

_schedules: OrderedDict[Key, tuple[int, Schedule]] = OrderedDict()  # with their peaks


def remember(problem: Problem, schedule: Schedule, kind: str = STATED) -> None:
    """Keep a schedule whose peak is about to be stated, unless a lower one is known.

    Args:
        kind: FALLBACK where it is for where a search finds nothing, RUNS where it can run as it is.
    """
    peak, _ = peak_and_cost(problem, schedule)
    key = kind, problem.digest
    if not _within(key, peak):
        _schedules[key] = peak, schedule
    _schedules.move_to_end(key)
    while len(_schedules) > MOST:
        _schedules.popitem(last=False)


def recalled(problem: Problem, budget_bytes: float) -> tuple[Schedule, ...]:
    """The schedule of the smallest peak stated, where it is within the budget."""
    return tuple(schedule for _, schedule in _within((STATED, problem.digest), budget_bytes))


def fallbacks(problem: Problem, budget_bytes: float) -> tuple[Schedule, ...]:
    """What there is within the budget where a search has found nothing."""
    return tuple(schedule for _, schedule in _all_within(problem, budget_bytes))


def lowest_known(problem: Problem) -> float:
    """The smallest peak found; infinite where none was."""
    return min((peak for peak, _ in _all_within(problem, math.inf)), default=math.inf)


def _all_within(problem: Problem, budget_bytes: float) -> list[tuple[int, Schedule]]:
    return [found for kind in (STATED, FALLBACK, RUNS) for found in _within((kind, problem.digest), budget_bytes)]


def _within(key: Key, budget_bytes: float) -> tuple[tuple[int, Schedule], ...]:
    found = _schedules.get(key)
    return () if found is None or found[0] > budget_bytes else (found,)
