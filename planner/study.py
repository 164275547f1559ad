"""One captured step, many plans: capture and profile once, then solve for any number of budgets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from passes.profile import OpProfile
from passes.refuse import refuse
from solvers import solve
from solvers.minimum import Minimum
from solvers.problem import Problem
from solvers.solution import Solution, plain_solution

from .api import _bind, make_plan
from .options import Options, check_options
from .pipeline import Prepared, emit, prepare
from .plan import Plan
from .progress import Progress


@dataclass(frozen=True, eq=False)
class Study:
    """A captured and profiled step, before any decision."""

    model: nn.Module
    bound: dict[str, Any]
    options: Options
    prepared: Prepared
    progress: Progress

    @property
    def problem(self) -> Problem:
        return self.prepared.lowered.problem

    @property
    def plain_peak_bytes(self) -> int:
        """Predicted peak with no recompute."""
        return self.prepared.baseline_peak_bytes

    def minimum(self) -> Minimum:
        """The smallest peak known to work, and the proved floor."""
        from solvers import minimum_budget

        with self.progress.stage("minimum"):
            return minimum_budget(self.problem, time_limit=self.options.time_limit)

    def solve(self, budget_bytes: int | None, *, solver: str | None = None) -> Solution:
        """The cheapest schedule found for `budget_bytes` (None: no limit).

        Raises:
            BudgetError: nothing found fits.
        """
        if budget_bytes is None:
            return plain_solution(self.problem, "none")
        options = self.options
        with self.progress.stage("solve"):
            return solve(
                self.problem, budget_bytes, solver=solver or options.solver, time_limit=options.time_limit,
                gap=options.gap, report=self.progress.report,
            )  # fmt: skip

    def plan(self, budget_bytes: int | None) -> Plan:
        """Solve, rewrite and prove."""
        planned = emit(self.prepared, self.solve(budget_bytes), self.progress)
        options = replace(self.options, budget_bytes=budget_bytes)
        return make_plan(self.model, self.bound, planned, options)


def study(
    model: nn.Module,
    sample: Any,
    *,
    solver: str = "auto",
    cost: str | Callable[[OpProfile], float] = "roofline",
    loss_fn: Callable[..., Any] | None = None,
    reserve_bytes: int = 0,
    time_limit: float = 30.0,
    gap: float = 0.01,
    progress: bool | None = None,
    keep_outputs: bool = True,
) -> Study:
    """Capture and profile the training step of `model`; arguments as in `auto_checkpoint`.

    Raises:
        CaptureError, Unsupported: the model cannot be planned.
    """
    options = Options(
        None, reserve_bytes, solver, cost, loss_fn, time_limit, gap, progress, keep_outputs=keep_outputs
    )
    check_options(options)
    bound = _bind(model, sample, loss_fn)
    refuse(model)
    shown = Progress(progress)
    return Study(model, bound, options, prepare(model, bound, options, shown), shown)
