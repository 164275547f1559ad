"""The best plan found within the time limit, with the gap that can be proved.

Never worse than greedy or Chen, unless the clock cuts them short: each gets a share of the time.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar

from .base import Effort, Solver
from .chen import Chen
from .errors import BudgetError
from .ilp import search_with_proof
from .problem import Problem
from .solution import Solution

CHEN_SHARE = 0.2


@dataclass(frozen=True)
class Auto(Solver):
    """Chen's plan as a warm start of the ILP's hunt, which starts from greedy and goes on with local search."""

    name: ClassVar[str] = "auto"

    def search(self, problem: Problem, budget_bytes: int, plain: Solution, effort: Effort) -> Solution:
        starts = effort.warm_starts
        with suppress(BudgetError):  # no segmentation may fit, and the hunt still find a plan
            hurried = replace(effort, time_limit=CHEN_SHARE * effort.time_limit)
            chen = Chen().search(problem, budget_bytes, plain, hurried)
            starts = (*starts, chen.schedule)
        return search_with_proof(problem, budget_bytes, self.name, replace(effort, warm_starts=starts))
