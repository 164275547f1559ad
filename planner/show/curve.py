"""The memory curve: live bytes over the step's cost, ready to draw at any width."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from planner.decided import Decided
from planner.timeline import CATEGORIES, Timeline
from solvers.schedule import Schedule, computes, plain_order, with_frees


@dataclass(frozen=True)
class Curve:
    """A timeline with its time axis.

    Attributes:
        starts: where each step begins, as a share of the plain step's cost; one more for the end.
        timeline: labels and bytes per category.
    """

    starts: tuple[float, ...]
    timeline: Timeline

    @property
    def end(self) -> float:
        return self.starts[-1]

    @property
    def backward_at(self) -> float:
        """Where the backward begins."""
        return self.starts[self.timeline.backward_from]


def planned_curve(plan: Decided) -> Curve:
    """The curve of the planned step."""
    return Curve(_starts(plan, plan.schedule), plan.timeline)


def plain_curve(plan: Decided) -> Curve:
    """The curve of the step without recompute, on the same axis."""
    return Curve(_starts(plan, with_frees(plan.problem, plain_order(plan.problem))), plan.baseline_timeline)


def _starts(plan: Decided, schedule: Schedule) -> tuple[float, ...]:
    costs = [plan.problem.ops[i].cost for i in computes(schedule)]
    whole = plan.problem.step_cost or max(1, sum(costs))
    return tuple(c / whole for c in accumulate(costs, initial=0))


def thin(curve: Curve, columns: int) -> tuple[list[float], dict[str, list[int]]]:
    """At most about `columns` points: of the steps that share a column the highest is kept, so peaks stay exact."""
    total = curve.timeline.total
    best: dict[int, int] = {}
    for step, start in enumerate(curve.starts[:-1]):
        column = min(columns - 1, int(start / (curve.end or 1) * columns))
        if column not in best or total[step] > total[best[column]]:
            best[column] = step
    chosen = [best[c] for c in sorted(best)]
    xs = [curve.starts[s] for s in chosen] + [curve.end]
    rows = {c: [curve.timeline.bytes[c][s] for s in chosen] + [curve.timeline.bytes[c][-1]] for c in CATEGORIES}
    return xs, rows
