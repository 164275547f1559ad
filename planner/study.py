"""One captured step, many plans: capture and profile once, then solve for any number of budgets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from passes.profile import OpProfile
from solvers import get_solver
from solvers.minimum import Minimum
from solvers.problem import Problem
from solvers.schedule import Schedule
from solvers.solution import Solution

from .api import _bind, _check_model, make_plan
from .budget import optimizer_state_bytes, reserve_to_bytes
from .hints import make_hints
from .options import OnNewShape, Options, check_options
from .pipeline import Prepared, emit, prepare
from .plan import Plan
from .progress import Progress
from .solving import solve_step


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

    def solve(
        self, budget_bytes: int | None, *, solver: str | None = None, warm_starts: tuple[Schedule, ...] = ()
    ) -> Solution:
        """The cheapest schedule found for `budget_bytes` (None: no limit), no dearer than a warm start that fits.

        Raises:
            BudgetError: nothing found fits.
        """
        options = replace(self.options, solver=solver or self.options.solver)
        with self.progress.stage("solve"):
            return solve_step(self.prepared, budget_bytes, options, self.progress.report, warm_starts)

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
    optimizer: Any = None,
    reserve_mb: float = 0,
    time_limit: float = 30.0,
    gap: float = 0.01,
    progress: bool | None = None,
    on_new_shape: OnNewShape = "replan",
    keep_outputs: bool = True,
    save: Sequence[str] = (),
    never_recompute: Sequence[str] = (),
    recompute: Sequence[str] = (),
    ceiling_bytes: int | None = None,
) -> Study:
    """Capture and profile the training step of `model`; arguments as in `auto_checkpoint`.

    Args:
        ceiling_bytes: raise before any op is run if the step is sure to need more.

    Raises:
        BudgetError: what is to be reserved is no size, or the step needs more than the ceiling.
        CaptureError, Unsupported: the model cannot be planned.
        SolverUnavailable: `solver` is unknown or not installed.
    """
    _check_model(model)
    get_solver(solver)
    options = Options(
        None, reserve_to_bytes(reserve_mb), solver, cost, loss_fn, time_limit, gap, progress, on_new_shape,
        keep_outputs=keep_outputs, hints=make_hints(save, never_recompute, recompute),
    )  # fmt: skip
    check_options(options)
    state_bytes = optimizer_state_bytes(optimizer, model)
    options = replace(options, reserve_bytes=options.reserve_bytes + state_bytes)
    bound = _bind(model, sample, loss_fn)
    shown = Progress(progress)
    return Study(model, bound, options, prepare(model, bound, options, shown, ceiling_bytes=ceiling_bytes), shown)
