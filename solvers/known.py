"""Schedules of the smallest peaks stated so far in this process, so that a stated minimum is met when it is asked for.

What a refusal names was found within a share of one search's time. The next search of the same problem may have less
time, a busier machine, or costs that were measured anew: where it finds nothing, the schedule that the refusal was
about is still there; for every budget above, too, lest a larger one cost more. Costs decide no peak, so problems that
differ in them alone are the same here.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from .errors import ScheduleError
from .problem import Problem
from .schedule import Schedule
from .simulate import peak_and_cost

MOST = 64

_schedules: OrderedDict[int, Schedule] = OrderedDict()


def remember(problem: Problem, schedule: Schedule) -> None:
    """Keep a schedule whose peak is about to be stated, unless a lower one is known."""
    peak, _ = peak_and_cost(problem, schedule)
    key = _key(problem)
    if not _within(problem, _schedules.get(key), peak):
        _schedules[key] = schedule
    _schedules.move_to_end(key)
    while len(_schedules) > MOST:
        _schedules.popitem(last=False)


def recalled(problem: Problem, budget_bytes: int) -> tuple[Schedule, ...]:
    """The schedule of the smallest peak stated, where it is within the budget."""
    return _within(problem, _schedules.get(_key(problem)), budget_bytes)


def _within(problem: Problem, schedule: Schedule | None, budget_bytes: int) -> tuple[Schedule, ...]:
    if schedule is None:
        return ()
    try:
        peak, _ = peak_and_cost(problem, schedule)
    except (ScheduleError, IndexError):  # of another problem with the same hash
        return ()
    return (schedule,) if peak <= budget_bytes else ()


def _key(problem: Problem) -> int:
    """Of all that decides a peak."""
    return hash(replace(problem, step_cost=0, ops=tuple(replace(op, cost=0) for op in problem.ops)))
