"""The mathematics of recompute plans: a `Problem` and a budget in, a proved `Solution` out. Imports no torch."""

from __future__ import annotations

from .auto import Auto
from .base import Report, Solver
from .bounds import floor_bytes
from .chen import Chen
from .errors import BudgetError, PlannerError, ScheduleError, SolverUnavailable
from .greedy import Greedy
from .ilp import Ilp
from .minimum import Minimum, minimum_budget
from .problem import Op, Problem, Tensor
from .rotor import Rotor
from .schedule import Schedule, Step, computes, plain_order, with_frees
from .simulate import Simulation, peak_and_cost, simulate
from .solution import Solution, Status, plain_solution, solution

SOLVERS: dict[str, type[Solver]] = {"auto": Auto, "chen": Chen, "greedy": Greedy, "ilp": Ilp, "rotor": Rotor}


def get_solver(name: str) -> Solver:
    """The solver of that name.

    Raises:
        SolverUnavailable: there is none; the message lists those there are.
    """
    if name not in SOLVERS:
        known = tuple(SOLVERS)
        message = f"no solver is named {name!r}; available: {', '.join(known)}"
        raise SolverUnavailable(message, solver=str(name), available=known)
    return SOLVERS[name]()


def solve(
    problem: Problem,
    budget_bytes: int,
    *,
    solver: str = "auto",
    time_limit: float = 30.0,
    gap: float = 0.01,
    warm_starts: tuple[Schedule, ...] = (),
    report: Report | None = None,
) -> Solution:
    """Choose what to recompute so that the step peaks at no more than `budget_bytes`.

    Raises:
        BudgetError: nothing found fits; carries the smallest peak found and the proved floor.
        SolverUnavailable: no solver has that name.
    """
    chosen = get_solver(solver)
    return chosen.solve(
        problem, budget_bytes, time_limit=time_limit, gap=gap, warm_starts=warm_starts, report=report
    )


__all__ = [
    "SOLVERS",
    "BudgetError",
    "Minimum",
    "Op",
    "PlannerError",
    "Problem",
    "Report",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "Solution",
    "Solver",
    "SolverUnavailable",
    "Status",
    "Step",
    "Tensor",
    "computes",
    "floor_bytes",
    "get_solver",
    "minimum_budget",
    "peak_and_cost",
    "plain_order",
    "plain_solution",
    "simulate",
    "solution",
    "solve",
    "with_frees",
]
