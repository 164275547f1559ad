"""Greedy eviction at the simulated peak: fast, good, and without any proof.

The cheapest of a few descents (`solvers.descent`) that fits; when none does, the smallest peak that
`solvers.minimum` can find, rid of what the budget does not need.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import ClassVar

from .base import CLOCK, Effort, Solver
from .bounds import floor_bytes
from .descent import KEEP_RATIOS, Reached, cheapest_descent
from .known import recalled
from .minimum import early, recall_or_refuse, smallest_peak
from .problem import Problem
from .solution import Solution, cheapest_fit
from .unneeded import drop_unneeded

DESCENT_SHARE = 0.5


@dataclass(frozen=True)
class Greedy(Solver):
    """Cheapest recompute per byte at the peak, until the step fits."""

    name: ClassVar[str] = "greedy"
    keep_ratios: tuple[float, ...] = KEEP_RATIOS

    def search(self, problem: Problem, budget_bytes: int, plain: Solution, effort: Effort) -> Solution:
        until = effort.until(DESCENT_SHARE)
        reached = Reached(early(until))
        live = cheapest_descent(problem, budget_bytes, self.keep_ratios, until, first_by=until, reached=reached)
        notes = (CLOCK,) if time.monotonic() > until else ()
        schedules = effort.warm_starts if live is None else (live.schedule(), *effort.warm_starts)
        found = cheapest_fit(problem, budget_bytes, self.name, schedules)
        if found is None:
            lowest = smallest_peak(problem, budget_bytes, effort.until())
            if lowest.live.peak_bytes <= budget_bytes:
                drop_unneeded(lowest.live, budget_bytes, effort.until())
            found = cheapest_fit(problem, budget_bytes, self.name, (lowest.live.schedule(),))
        known = cheapest_fit(problem, budget_bytes, self.name, recalled(problem, budget_bytes))
        fitting = [s for s in (found, known) if s is not None]
        if fitting:
            return replace(min(fitting, key=lambda s: s.added_cost), notes=notes)
        floor, late = floor_bytes(problem), time.monotonic() > effort.until()
        kept = recall_or_refuse(problem, budget_bytes, self.name, reached, lowest.known_bytes, floor, hurried=late)
        return replace(kept, notes=(*notes, *kept.notes))
