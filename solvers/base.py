"""The one abstract class of the package."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

from .known import FALLBACK, remember
from .problem import Problem
from .schedule import Schedule
from .solution import Solution, plain_solution

Report = Callable[[str], None]
CLOCK = "the time limit ended the search; another run may find another plan"


@dataclass(frozen=True)
class Effort:
    """What a search may spend and start from; see `Solver.solve`. The clock runs from `begin`."""

    time_limit: float = 30.0
    gap: float = 0.01
    warm_starts: tuple[Schedule, ...] = ()
    report: Report | None = None
    begin: float = field(default_factory=time.monotonic)

    def until(self, share: float = 1.0) -> float:
        """The moment at which that share of the time limit is used up."""
        return self.begin + share * self.time_limit

    def rest(self) -> Effort:
        """What is left, as an effort of its own."""
        now = time.monotonic()
        return replace(self, time_limit=max(0.0, self.until() - now), begin=now)


class Solver(ABC):
    """A way to choose what to recompute. Implementations are stateless; options are dataclass fields."""

    name: ClassVar[str]

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
        """Find a schedule whose simulated peak is at most `budget_bytes`.

        Args:
            time_limit: seconds of wall clock for everything, a refusal included.
            gap: stop once added cost - bound <= gap * problem.step_cost.
            warm_starts: schedules to start from; any that fits is a floor for the answer's quality. `auto` and `ilp`
                repair those that do not.
            report: called with a short line whenever there is progress to tell.

        Raises:
            BudgetError: nothing found fits; carries the smallest peak found and the proved floor.
            SolverUnavailable: the solver is not for this problem.
        """
        effort = Effort(time_limit, gap, warm_starts, report)
        self.check(problem)
        plain = plain_solution(problem, self.name)
        if plain.peak_bytes <= budget_bytes:
            return plain
        found = self.search(problem, budget_bytes, plain, effort)
        remember(problem, found.schedule, FALLBACK)
        return found

    def check(self, problem: Problem) -> None:  # noqa: B027  # most solvers take any problem
        """Refuse a problem that this solver is not for."""

    @abstractmethod
    def search(self, problem: Problem, budget_bytes: int, plain: Solution, effort: Effort) -> Solution:
        """`solve` for a step that does not fit as it is, which `plain` is."""
