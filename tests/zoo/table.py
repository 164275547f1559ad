"""`python -m tests.zoo.table [names] [--solver auto] [--shares 80,60,40]`: every promise on every model, tabled."""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from planner import BudgetError, Plan, auto_checkpoint
from planner.plan import MIB
from tests.zoo.compare import differences, measured_peak_bytes, run_step
from tests.zoo.models import ZOO, build


@dataclass(frozen=True)
class Row:
    """One model under one budget."""

    name: str
    nodes: int
    capture_seconds: float
    share: int
    budget_bytes: int
    peak_bytes: int
    measured_bytes: int
    overhead: float
    bound: float | None
    status: str
    solve_seconds: float
    different: tuple[str, ...]
    raised_to_minimum: bool

    @property
    def error(self) -> float:
        """(measured - predicted) / predicted."""
        return self.measured_bytes / self.peak_bytes - 1

    @property
    def asked(self) -> str:
        return f"{self.share} %{' (raised)' if self.raised_to_minimum else ''}"

    @property
    def passed(self) -> bool:
        return self.measured_bytes <= self.budget_bytes and abs(self.error) <= 0.01 and not self.different


def check(name: str, share: int, solver: str = "auto", time_limit: float = 30.0) -> Row:
    """Plan a zoo model at `share` % of its dynamic memory; a budget below the minimum is raised to the stated one."""
    model, sample = build(name)
    plain = copy.deepcopy(model)
    free = auto_checkpoint(model, sample, progress=False)
    budget = free.static_bytes + (free.baseline_peak_bytes - free.static_bytes) * share // 100
    start = time.perf_counter()
    raised = False
    try:
        plan = _plan(model, sample, budget, solver, time_limit)
    except BudgetError as error:
        raised = True
        budget = error.minimum_bytes or 0
        plan = _plan(model, sample, budget, solver, time_limit)
    seconds = time.perf_counter() - start
    different = tuple(differences(run_step(plain, plain, sample), run_step(plan.module, model, sample)))
    measured = measured_peak_bytes(plan.module, model, sample, plan.static_bytes)
    return Row(
        name, len(plan.planned.prepared.traced.graph_module.graph.nodes), free.seconds["capture"], share, budget,
        plan.peak_bytes, measured, plan.overhead, plan.bound, plan.status, seconds, different, raised,
    )  # fmt: skip


def _plan(model: Any, sample: Any, budget: int, solver: str, time_limit: float) -> Plan:
    return auto_checkpoint(model, sample, budget / MIB, solver=solver, time_limit=time_limit, progress=False)


def table(rows: Sequence[Row]) -> Table:
    """The rows as rich shows them."""
    columns = ("model", "nodes", "capture s", "share", "budget MiB", "predicted", "measured", "error", "recompute",
               "bound", "status", "plan s", "numbers equal", "passed")  # fmt: skip
    result = Table(*columns)
    for r in rows:
        bound = "-" if r.bound is None else f"{r.bound:.2%}"
        result.add_row(
            r.name, str(r.nodes), f"{r.capture_seconds:.1f}", r.asked,
            f"{r.budget_bytes / MIB:.2f}", f"{r.peak_bytes / MIB:.2f}", f"{r.measured_bytes / MIB:.2f}",
            f"{r.error:+.4%}", f"{r.overhead:.2%}", bound, r.status, f"{r.solve_seconds:.1f}",
            "yes" if not r.different else f"NO: {', '.join(r.different[:3])}", "yes" if r.passed else "NO",
        )  # fmt: skip
    return result


def main() -> int:
    """Print the table; exit 1 when a row fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(ZOO))
    parser.add_argument("--solver", default="auto")
    parser.add_argument("--shares", default="80,60,40")
    parser.add_argument("--time-limit", type=float, default=30.0)
    options = parser.parse_args()
    rows = []
    for name in options.names or ZOO:
        for share in map(int, options.shares.split(",")):
            rows.append(check(name, share, options.solver, options.time_limit))
    Console(width=200).print(table(rows))
    return 0 if all(r.passed for r in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
