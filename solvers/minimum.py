"""The smallest budget: exactly where the problem is small, else by descending as far as it goes above the proved floor.

The descents depend on the problem alone, never on the budget asked for, so the smallest peak that a `BudgetError`
names is reached again when it is asked for. That must hold on a clock too: what `minimum_budget` names was found
within `MINIMUM_SHARE` of the time limit, what a refusal names within `KNOWN_SHARE` of its search, and a solve that has
nothing better goes on descending for longer. Within one process the schedule itself is kept (`known`).
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass

from .bounds import floor_bytes
from .descent import KEEP_RATIOS, Taste, descend
from .errors import MIB, BudgetError
from .exact import exact_schedule
from .known import remember
from .live import LARGE, Live
from .problem import Problem
from .schedule import Schedule

TRIES = 12
MINIMUM_SHARE = 0.3
KNOWN_SHARE = 0.6
EXACT_SHARE = 0.2


@dataclass(frozen=True)
class Minimum:
    """The smallest peak found for a problem.

    Attributes:
        minimum_bytes: peak of `schedule`.
        floor_bytes: no schedule of the problem peaks below this; equal to `minimum_bytes` where that is proved.
        schedule: it reaches `minimum_bytes`.
    """

    minimum_bytes: int
    floor_bytes: int
    schedule: Schedule


@dataclass(frozen=True)
class Lowest:
    """What descents reached.

    Attributes:
        live: the state of smallest peak.
        known_bytes: the smallest peak reached early enough to be reached again by a solve of the same time limit.
    """

    live: Live
    known_bytes: int


def minimum_budget(problem: Problem, *, time_limit: float = 30.0) -> Minimum:
    """The smallest budget that `solve` is known to meet, and a proved floor under all schedules."""
    begin = time.monotonic()
    return smallest_of(problem, begin + EXACT_SHARE * time_limit, begin + (EXACT_SHARE + MINIMUM_SHARE) * time_limit)


def smallest_of(problem: Problem, exact_until: float, until: float) -> Minimum:
    """`minimum_budget`, by the exact search until one moment and by descents until another."""
    exact = exact_schedule(problem, deadline=exact_until)
    if exact.schedule is not None:
        remember(problem, exact.schedule)
        return Minimum(exact.bound, exact.bound, exact.schedule)
    live = smallest_peak(problem, exact.bound, until).live
    return Minimum(live.peak_bytes, exact.bound, live.schedule())


def smallest_peak(problem: Problem, enough_bytes: int, deadline: float = math.inf) -> Lowest:
    """Many descents, each as deep as it goes; ends after one that has reached `enough_bytes`, or at the deadline."""
    best, target = Live(problem), floor_bytes(problem)
    known, known_until = best.peak_bytes, time.monotonic() + KNOWN_SHARE * (deadline - time.monotonic())
    for taste in _tastes(len(problem.ops)):
        if best.peak_bytes <= max(enough_bytes, target) or time.monotonic() > deadline:
            break
        live = Live(problem, best.recomputes() if taste.noise else ())
        early = time.monotonic() < known_until
        descend(live, target, taste, deadline=known_until if early else deadline)
        if early:
            known = min(known, live.peak_bytes)
            if time.monotonic() > known_until:  # it was cut short
                descend(live, target, taste, deadline=deadline)
        if live.peak_bytes < best.peak_bytes:
            best = live
    remember(problem, best.schedule())
    return Lowest(best, known)


def _tastes(size: int) -> list[Taste]:
    """Plain descents, thorough ones, then blurred ones that start from the best; fewer for large problems."""
    tastes = [Taste(ratio) for ratio in KEEP_RATIOS]
    if size <= LARGE:
        tastes += [Taste(ratio, promising=size) for ratio in KEEP_RATIOS]
        tastes += [
            Taste(KEEP_RATIOS[seed % 3], noise=1.0, promising=size, rng=random.Random(seed)) for seed in range(TRIES)
        ]
    return tastes


def budget_error(budget_bytes: int, minimum_bytes: int, floor: int, *, hurried: bool = False) -> BudgetError:
    """Nothing fits: say what was asked, what works and what cannot.

    Args:
        hurried: the clock ended the search for something that fits.
    """
    limit = ". The time limit ended the search: a longer one may find less" if hurried else ""
    message = (
        f"no schedule found within {_size(budget_bytes)}; the smallest budget known to work is {_size(minimum_bytes)}: "
        f"ask for that, or for a smaller batch. None below {_size(floor)} can work{limit}"
    )
    return BudgetError(message, budget_bytes=budget_bytes, minimum_bytes=minimum_bytes, floor_bytes=floor)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.3f} MiB ({size_bytes} bytes)"
