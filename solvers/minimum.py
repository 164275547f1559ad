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
from dataclasses import dataclass, replace

from .bounds import floor_bytes
from .descent import KEEP_RATIOS, Reached, Taste, descend
from .errors import MIB, BudgetError, shown_minimum
from .exact import exact_schedule
from .known import FALLBACK, fallbacks, lowest_known, remember
from .live import Live
from .problem import LARGE, Problem
from .schedule import Schedule
from .simulate import peak_and_cost
from .solution import Solution, cheapest_fit

RECALLED = "the search found nothing; this plan is of an earlier search in this process"
TRIES = 12
MINIMUM_SHARE = 0.3
KNOWN_SHARE = 0.6
EXACT_SHARE = 0.2
SURE_WORK = 1_000_000  # of recomputes times ops: about a tenth of a second


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
    lowest = (*fallbacks(problem, live.peak_bytes - 1), live.schedule())
    schedule = min(lowest, key=lambda s: peak_and_cost(problem, s)[0])
    return Minimum(peak_and_cost(problem, schedule)[0], exact.bound, schedule)


def smallest_peak(problem: Problem, enough_bytes: int, deadline: float = math.inf) -> Lowest:
    """Many descents, each as deep as it goes; ends after one that has reached `enough_bytes`, or at the deadline.

    The first recomputes of the first are added whatever the clock says, so that there is something to name.
    """
    best, target = Live(problem), floor_bytes(problem)
    reached = Reached(early(deadline), best.peak_bytes)
    for number, taste in enumerate(_tastes(len(problem.ops))):
        if best.peak_bytes <= max(enough_bytes, target) or (number and time.monotonic() > deadline):
            break
        live = Live(problem, best.recomputes() if taste.noise else ())
        sure = 0 if number else SURE_WORK // (len(problem.ops) + 1)
        descend(live, target, taste, deadline=deadline, reached=reached, at_least=sure)
        if live.peak_bytes < best.peak_bytes:
            best = live
    remember(problem, best.schedule())
    return Lowest(best, int(reached.known_bytes))


def early(deadline: float) -> float:
    """The moment until which a search names what it has reached."""
    now = time.monotonic()
    return now + KNOWN_SHARE * (deadline - now)


def _tastes(size: int) -> list[Taste]:
    """Plain descents, thorough ones, then blurred ones that start from the best; fewer for large problems."""
    tastes = [Taste(ratio) for ratio in KEEP_RATIOS]
    if size <= LARGE:
        tastes += [Taste(ratio, promising=size) for ratio in KEEP_RATIOS]
        tastes += [
            Taste(KEEP_RATIOS[seed % 3], noise=1.0, promising=size, rng=random.Random(seed)) for seed in range(TRIES)
        ]
    return tastes


def recall_or_refuse(
    problem: Problem, budget_bytes: int, name: str, reached: Reached, minimum_bytes: int, floor: int, *, hurried: bool
) -> Solution:
    """Where a search has found nothing: what fits of what is kept, else the refusal.

    Args:
        reached: how low descents towards the budget came.
        minimum_bytes: the smallest peak known otherwise.

    Raises:
        BudgetError: nothing kept fits.
    """
    kept = cheapest_fit(problem, budget_bytes, name, fallbacks(problem, budget_bytes))
    if kept is not None:
        return replace(kept, notes=(RECALLED,))
    named = int(min(minimum_bytes, reached.known_bytes, lowest_known(problem)))
    if reached.live is not None:
        remember(problem, reached.live.schedule(), FALLBACK)
    raise budget_error(budget_bytes, named, floor, hurried=hurried)


def budget_error(budget_bytes: int, minimum_bytes: int, floor: int, *, hurried: bool = False) -> BudgetError:
    """Nothing fits: say what was asked, what works and what cannot.

    Args:
        hurried: the clock ended the search for something that fits.
    """
    limit = ". The time limit ended the search: a longer one may find less" if hurried else ""
    message = (
        f"no schedule found within {_size(budget_bytes)}; the smallest budget known to work is "
        f"{shown_minimum(minimum_bytes)}: ask for that, or for a smaller batch. None below {_size(floor)} can "
        f"work{limit}"
    )
    return BudgetError(message, budget_bytes=budget_bytes, minimum_bytes=minimum_bytes, floor_bytes=floor)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.3f} MiB ({size_bytes} bytes)"
