"""Greedy eviction at the simulated peak: fast, good, and without any proof.

The cheapest of a few descents (`solvers.descent`) that fits; when none does, the smallest peak that
`solvers.minimum` can find.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import Effort, Solver
from .descent import KEEP_RATIOS, cheapest_descent
from .minimum import fit_by_minimum
from .problem import Problem
from .solution import Solution, cheapest_fit, solution


@dataclass(frozen=True)
class Greedy(Solver):
    """Cheapest recompute per byte at the peak, until the step fits."""

    name: ClassVar[str] = "greedy"
    keep_ratios: tuple[float, ...] = KEEP_RATIOS

    def search(self, problem: Problem, budget_bytes: int, plain: Solution, effort: Effort) -> Solution:
        live = cheapest_descent(problem, budget_bytes, self.keep_ratios)
        schedules = effort.warm_starts if live is None else (live.schedule(), *effort.warm_starts)
        found = cheapest_fit(problem, budget_bytes, self.name, schedules)
        return found or solution(problem, fit_by_minimum(problem, budget_bytes).schedule(), self.name)
