"""What memory costs: the cheapest plan for each of a range of budgets, and the largest batch under one budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from passes.device import room_bytes
from passes.errors import CaptureError
from solvers.errors import MIB, BudgetError, PlannerError, shown_minimum
from solvers.problem import Problem
from solvers.solution import Solution

from .api import check_names
from .budget import Budget
from .plan import Plan
from .prepared import model_device
from .session import Session, open_session
from .units import show_bytes

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Point:
    """The best plan found for one budget.

    Attributes:
        budget_bytes, peak_bytes: asked and reached.
        overhead, bound: recompute over the plain step's cost, and the proved lower bound on it or None.
        status, solver: how sure it is, and who found it.
    """

    budget_bytes: int
    peak_bytes: int
    overhead: float
    bound: float | None
    status: str
    solver: str


@dataclass(frozen=True)
class Frontier:
    """Recompute against memory, from the smallest budget known to work to the plain peak.

    Attributes:
        points: by budget, ascending; the overhead never rises with the budget.
        plain_peak_bytes, minimum_bytes, floor_bytes: no recompute; smallest known to work; proved floor.
        cost_name: what recompute is measured in.
    """

    points: tuple[Point, ...]
    plain_peak_bytes: int
    minimum_bytes: int
    floor_bytes: int
    cost_name: str

    def table(self) -> pd.DataFrame:
        """A row per budget."""
        import pandas as pd

        return pd.DataFrame([
            {"budget_mib": p.budget_bytes / MIB, "share_of_plain": p.budget_bytes / self.plain_peak_bytes,
             "peak_mib": p.peak_bytes / MIB, "overhead": p.overhead, "bound": p.bound, "status": p.status,
             "solver": p.solver}
            for p in self.points
        ])  # fmt: skip

    def plot(self, width: float = 7.0, height: float = 4.2) -> Figure:
        """Recompute over memory as a matplotlib figure, the proved bounds beneath it. Sizes in inches."""
        from .show.plots import BUDGET, COLORS, PLAIN, TEXT, figure_with_axes

        figure, axes = figure_with_axes(width, height)
        budgets = [p.budget_bytes / MIB for p in self.points]
        axes.plot(budgets, [100 * p.overhead for p in self.points], marker="o", ms=4, color=COLORS["saved"],
                  label="best plan found")  # fmt: skip
        proved = [(p.budget_bytes / MIB, 100 * p.bound) for p in self.points if p.bound is not None]
        if proved:
            axes.plot(*zip(*proved, strict=True), color=TEXT, linestyle="--", lw=1, label="proved lower bound")
        floor, plain = self.floor_bytes / MIB, self.plain_peak_bytes / MIB
        axes.axvline(floor, color=BUDGET, lw=1, linestyle=":", label=f"proved floor {floor:,.1f} MiB")
        axes.axvline(plain, color=PLAIN, lw=1, linestyle=":", label=f"nothing recomputed {plain:,.1f} MiB")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("budget, MiB of peak memory")
        axes.set_ylabel(f"recompute, % of the step ({self.cost_name})")
        axes.legend(framealpha=1, edgecolor="none", fontsize=8.5)  # over lines that cross it
        return figure

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "plain_peak_bytes": self.plain_peak_bytes, "minimum_bytes": self.minimum_bytes,
            "floor_bytes": self.floor_bytes, "cost": self.cost_name, "points": [vars(p) for p in self.points],
        }  # fmt: skip


def frontier(model: nn.Module, sample: Any, points: int = 20, **options: Any) -> Frontier:
    """Capture and profile once, then solve for `points` budgets from the minimum to the plain peak.

    `options` are those of `auto_checkpoint`; `time_limit` is seconds per budget. What `optimizer` and `reserve_mb` set
    aside is part of every budget and peak, as it is there.

    Raises:
        PlannerError: `points` is below 2, or the model cannot be planned.
    """
    if isinstance(points, bool) or not isinstance(points, int) or points < 2:
        raise PlannerError(f"points={points!r}: a frontier takes a whole number of at least 2 budgets.")
    check_names("frontier", options, without=("group",))
    return frontier_of(open_session(model, sample, **options), points)


def frontier_of(session: Session, points: int = 20) -> Frontier:
    """`frontier` of a step that is captured already."""
    minimum = session.minimum()
    low, high = minimum.minimum_bytes, session.plain_peak_bytes
    budgets = sorted({low + (high - low) * i // (points - 1) for i in range(points)})
    found: list[Point] = []
    warm = minimum.schedule
    for budget in session.progress.each(budgets, "frontier"):
        s = session.solve(budget, warm_starts=(warm,))  # the plan of a smaller budget fits
        warm = s.schedule
        found.append(_never_worse(found, _point(session.problem, budget, s)))
    return Frontier(tuple(found), high, low, minimum.floor_bytes, session.prepared.options.cost_name)


def _point(problem: Problem, budget: int, s: Solution) -> Point:
    bound = None if s.bound is None else problem.overhead(s.bound)
    return Point(budget, s.peak_bytes, problem.overhead(s.added_cost), bound, s.status.value, s.solver)


def _never_worse(found: list[Point], point: Point) -> Point:
    """Recompute that the hints prefer may cost more within a larger budget; a smaller budget's plan fits it too."""
    best = min((p for p in found if p.overhead < point.overhead), key=lambda p: p.overhead, default=None)
    if best is None:
        return point
    return Point(point.budget_bytes, best.peak_bytes, best.overhead, point.bound, "feasible", best.solver)


@dataclass(frozen=True)
class MaxBatch:
    """The largest batch whose plan fits.

    Attributes:
        batch: its size.
        plan: its plan.
        plain_batch: the largest that fits without recompute, of those tried; 0 if none did.
        tried: every batch size tried, with whether it fits.
    """

    batch: int
    plan: Plan
    plain_batch: int
    tried: tuple[tuple[int, bool], ...]


def max_batch(
    model: nn.Module,
    make_sample: Callable[[int], Any],
    budget_mb: float | None,
    *,
    limit: int = 1 << 16,
    **options: Any,
) -> MaxBatch:
    """The largest batch whose planned step stays under `budget_mb`: doubling, then bisection.

    Args:
        make_sample: batch size -> sample, as `auto_checkpoint` takes it.
        budget_mb: MiB; None takes the free memory of a CUDA device.
        limit: largest batch to try. The smallest is one, or two where forward refuses one (a batch norm does).
        options: those of `frontier`, except for `points`; and `check`, as in `auto_checkpoint`.

    Raises:
        BudgetError: not even the smallest batch fits; carries the minimum.
    """
    if not callable(make_sample):
        raise PlannerError(
            f"make_sample is a {type(make_sample).__name__}: pass a function of the batch size that makes one, such "
            "as lambda n: torch.randn(n, 16)."
        )
    check_names("max_batch", options, without=("group",))
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise PlannerError(f"limit={limit!r}: the largest batch to try is a whole number of at least 1.")
    budget = Budget(budget_mb).to_bytes(None) or room_bytes(model_device(model))
    if budget is None:
        raise BudgetError("budget_mb=None has no meaning on the CPU here: give the MiB that the step may take.")
    search = _Search(model, make_sample, budget, {"check": "auto", **options})
    low = search.smallest(limit)
    high = 2 * low
    while high <= limit and search.fits(high):
        low, high = high, high * 2
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if search.fits(middle) else (low, middle)
    return MaxBatch(low, search.plans[low].plan(budget), search.plain, tuple(sorted(search.tried.items())))


class _Search:
    def __init__(
        self, model: nn.Module, make_sample: Callable[[int], Any], budget: int, options: dict[str, Any]
    ) -> None:
        self.model, self.make_sample, self.budget, self.options = model, make_sample, budget, options
        self.tried: dict[int, bool] = {}
        self.plans: dict[int, Session] = {}
        self.plain = 0

    def smallest(self, limit: int) -> int:
        """The smallest batch, which has to fit."""
        try:
            self.fits(1, must=True)
        except CaptureError:  # by regions it is not known whose error it was
            if limit < 2:
                raise
            self.tried[1] = False
            self.fits(2, must=True)
            return 2
        return 1

    def fits(self, batch: int, *, must: bool = False) -> bool:
        ceiling = None if must else self.budget  # one that is far too large may not even be profiled in memory
        try:
            session = open_session(self.model, self.make_sample(batch), ceiling_bytes=ceiling, **self.options)
        except BudgetError:
            self.tried[batch] = False
            return False
        self.tried[batch] = session.plain_peak_bytes <= self.budget
        if self.tried[batch]:
            self.plain = max(self.plain, batch)
        else:
            self.tried[batch] = self._solves(session, batch if must else 0)
        if self.tried[batch]:
            self.plans = {batch: session}
        return self.tried[batch]

    def _solves(self, session: Session, must: int) -> bool:
        """Whether the smallest peak found fits, as that of batch `must` has to; what is cheapest is not asked yet."""
        minimum = session.minimum()
        if minimum.minimum_bytes <= self.budget:
            return True
        if must:
            raise BudgetError(
                f"not even a batch of {'one' if must == 1 else 'two'} fits into {show_bytes(self.budget)}: it takes "
                f"{shown_minimum(minimum.minimum_bytes)}, none below {minimum.floor_bytes} bytes can work.",
                budget_bytes=self.budget, minimum_bytes=minimum.minimum_bytes, floor_bytes=minimum.floor_bytes,
            )  # fmt: skip
        return False
