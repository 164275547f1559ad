"""The best plan found within the time limit, with the gap that can be proved.

Never worse than greedy or Chen, unless the clock cuts greedy short: above `live.LARGE` ops it gets a share of the time.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from .base import Report, Solver
from .chen import Chen
from .errors import BudgetError
from .ilp import solve_with_proof
from .problem import Problem
from .schedule import Schedule
from .solution import Solution, plain_solution


@dataclass(frozen=True)
class Auto(Solver):
    """Chen's plan as a warm start of the ILP's hunt, which starts from greedy and goes on with local search."""

    name: ClassVar[str] = "auto"

    def solve(
        self,
        problem: Problem,
        budget_bytes: int,
        *,
        time_limit: float = 30.0,
        gap: float = 0.01,
        warm_starts: tuple[Schedule, ...] = (),
        report: Report | None = None,
    ) -> Solution:
        plain = plain_solution(problem, self.name)
        if plain.peak_bytes <= budget_bytes:
            return plain
        with suppress(BudgetError):  # no segmentation may fit, and the hunt still find a plan
            warm_starts = (*warm_starts, Chen().solve(problem, budget_bytes).schedule)
        return solve_with_proof(problem, budget_bytes, self.name, time_limit, gap, warm_starts, report)
