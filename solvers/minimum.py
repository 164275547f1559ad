"""The smallest budget: found by descending as far as it goes, with the proved floor beside it.

Everything here depends on the problem alone, never on a budget asked for or on the clock, so the smallest peak
that a `BudgetError` names is found again when it is asked for.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from .bounds import floor_bytes
from .descent import KEEP_RATIOS, Taste, descend, drop_unneeded
from .errors import MIB, BudgetError
from .live import LARGE, Live
from .problem import Problem
from .schedule import Schedule

TRIES = 12


@dataclass(frozen=True)
class Minimum:
    """The smallest peak found for a problem.

    Attributes:
        minimum_bytes: peak of `schedule`.
        floor_bytes: no schedule of the problem peaks below this.
        schedule: it reaches `minimum_bytes`.
    """

    minimum_bytes: int
    floor_bytes: int
    schedule: Schedule


def minimum_budget(problem: Problem, *, time_limit: float = 30.0) -> Minimum:
    """The smallest budget that `solve` is known to meet, and a proved floor under all schedules."""
    live = smallest_peak(problem, floor_bytes(problem), time.monotonic() + time_limit)
    return Minimum(live.peak_bytes, floor_bytes(problem), live.schedule())


def smallest_peak(problem: Problem, target_bytes: int, deadline: float = float("inf")) -> Live:
    """The state of smallest peak over many descents; stops early at `target_bytes`."""
    best = Live(problem)
    for taste in _tastes(len(problem.ops)):
        if best.peak_bytes <= target_bytes or time.monotonic() > deadline:
            break
        live = Live(problem, best.recomputes() if taste.noise else ())
        descend(live, target_bytes, taste)
        if live.peak_bytes < best.peak_bytes:
            best = live
    return best


def _tastes(size: int) -> list[Taste]:
    """Plain descents, thorough ones, then blurred ones that start from the best; fewer for large problems."""
    tastes = [Taste(ratio) for ratio in KEEP_RATIOS]
    if size <= LARGE:
        tastes += [Taste(ratio, promising=size) for ratio in KEEP_RATIOS]
        tastes += [
            Taste(KEEP_RATIOS[seed % 3], noise=1.0, promising=size, rng=random.Random(seed)) for seed in range(TRIES)
        ]
    return tastes


def fit_by_minimum(problem: Problem, budget_bytes: int) -> Live:
    """The state of smallest peak, rid of what the budget does not need.

    Raises:
        BudgetError: it does not fit.
    """
    floor = floor_bytes(problem)
    live = smallest_peak(problem, floor)
    if live.peak_bytes > budget_bytes:
        raise budget_error(budget_bytes, live.peak_bytes, floor)
    drop_unneeded(live, budget_bytes)
    return live


def budget_error(budget_bytes: int, minimum_bytes: int, floor: int) -> BudgetError:
    """Nothing fits: say what was asked, what works and what cannot."""
    message = (
        f"no schedule found within {_size(budget_bytes)}; the smallest budget known to work is {_size(minimum_bytes)}: "
        f"ask for that, or for a smaller batch. None below {_size(floor)} can work"
    )
    return BudgetError(message, budget_bytes=budget_bytes, minimum_bytes=minimum_bytes, floor_bytes=floor)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.3f} MiB ({size_bytes} bytes)"
