"""The best plan found within the time limit, with the gap that can be proved.

Never worse than greedy or Chen by more than the gap, unless the clock cuts them short: each gets a share of the time. A
large step of many repeated parts is composed of plans for one of them (`solvers.parts`); where that is within the gap,
it is the answer.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar

from .base import Effort, Solver
from .bounds import floor_bytes
from .chen import Chen
from .errors import BudgetError
from .ilp import search_with_proof
from .parts import solve_parts
from .problem import Problem
from .repeats import Run, repeats
from .solution import Solution, Status

CHEN_SHARE = 0.2
MANY_OPS = 2000
MANY_RUNS = 8


@dataclass(frozen=True)
class Auto(Solver):
    """Chen's plan as a warm start of the ILP's hunt, which starts from greedy and goes on with local search.

    Attributes:
        runs: of the repeated parts of the step, if they are known; None: `repeats` looks for them.
    """

    name: ClassVar[str] = "auto"
    runs: tuple[Run, ...] | None = None

    def search(self, problem: Problem, budget_bytes: int, plain: Solution, effort: Effort) -> Solution:
        starts = effort.warm_starts
        composed = self._composed(problem, budget_bytes, effort)
        if composed is None:
            effort = effort.rest()
        else:
            if composed.added_cost - (composed.bound or 0) <= effort.gap * problem.step_cost:
                return composed
            starts = (*starts, composed.schedule)
        with suppress(BudgetError):  # no segmentation may fit, and the hunt still find a plan
            hurried = replace(effort, time_limit=CHEN_SHARE * effort.time_limit)
            chen = Chen().search(problem, budget_bytes, plain, hurried)
            starts = (*starts, chen.schedule)
        found = search_with_proof(problem, budget_bytes, self.name, replace(effort, warm_starts=starts))
        if composed is None or (composed.bound or 0) <= (found.bound or 0):
            return found
        bound = min(composed.bound or 0, found.added_cost)
        status = Status.OPTIMAL if bound == found.added_cost else found.status
        return replace(found, bound=bound, family=composed.family, status=status)

    def _composed(self, problem: Problem, budget_bytes: int, effort: Effort) -> Solution | None:
        """The plan by repeated parts, where they are many."""
        if self.runs is None and len(problem.ops) < MANY_OPS:
            return None
        runs = repeats(problem) if self.runs is None else self.runs
        if len(runs) < MANY_RUNS or floor_bytes(problem) > budget_bytes:
            return None
        return solve_parts(problem, runs, budget_bytes, effort, self.name)
