"""`python -m tests.zoo.table`: every promise on every entry of the zoo (models, hazards, libraries), as one table.

A row is one entry at one share of what its plain step needs above static. Where nothing fits that share, the row is
planned again at the smallest budget that the refusal named, and says so.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from planner import BudgetError, Plan, auto_checkpoint
from solvers.errors import MIB
from tests.zoo import compare
from tests.zoo.compare import differences, forward_backward, measured_peak_bytes, run_step
from tests.zoo.hazards import HAZARDS
from tests.zoo.layers import LAYERS
from tests.zoo.library import LIBRARY
from tests.zoo.models import ZOO

SHARES = (80, 60, 40)
ENTRIES: dict[str, Callable[[], tuple[nn.Module, Any]]] = {**ZOO, **HAZARDS, **LAYERS, **LIBRARY}
LEAST_SECONDS = 0.3  # of each side's steps in a time ratio
MOST_STEPS = 30


@dataclass(frozen=True)
class Row:
    """One entry under one budget, or what stopped it (`failure`)."""

    name: str
    share: int
    nodes: int = 0
    capture_seconds: float = 0.0
    budget_bytes: int = 0
    peak_bytes: int = 0
    measured_bytes: int = 0
    loss_bytes: int = 0
    time_ratio: float = 0.0
    overhead: float = 0.0
    bound: float | None = None
    status: str = ""
    plan_seconds: float = 0.0
    different: tuple[str, ...] = ()
    raised_to_minimum: bool = False
    failure: str = ""

    @property
    def error(self) -> float:
        """(measured - predicted) / predicted."""
        return self.measured_bytes / self.peak_bytes - 1 if self.peak_bytes else 0.0

    @property
    def asked(self) -> str:
        return f"{self.share} %{' (raised)' if self.raised_to_minimum else ''}"

    @property
    def passed(self) -> bool:
        """Equal numbers, the prediction within the budget, the measurement within the prediction.

        A loss taken outside the model is not the plan's to count: `loss_bytes` is what it may add.
        """
        if self.failure or self.different or self.peak_bytes > self.budget_bytes:
            return False
        return self.measured_bytes <= self.peak_bytes + self.loss_bytes


def build(name: str, seed: int = 0) -> tuple[nn.Module, Any]:
    """An entry in training mode, with reproducible weights and data."""
    torch.manual_seed(seed)
    model, sample = ENTRIES[name]()
    return model.train(), sample


class Entry:
    """One entry, planned without a budget once, then under several."""

    def __init__(self, name: str, solver: str = "auto", time_limit: float = 30.0, *, timed: bool = True) -> None:
        self.name, self.solver, self.time_limit, self.timed = name, solver, time_limit, timed
        self.model, self.sample = build(name)
        self.free = auto_checkpoint(self.model, self.sample, progress=False)
        self.lowest: tuple[int, Row] | None = None  # a proved floor, and the row at the minimum above it

    def row(self, share: int) -> Row:
        """Plan at `share` % of the dynamic memory; a budget below the minimum is raised to the stated one."""
        free, start = self.free, time.perf_counter()
        budget = free.static_bytes + (free.baseline_peak_bytes - free.static_bytes) * share // 100
        if self.lowest is not None and budget < self.lowest[0]:  # would be refused, and raised to the same plan
            return dataclasses.replace(self.lowest[1], share=share)
        try:
            return self._measure(share, budget, self._plan(budget), start)
        except BudgetError as error:
            budget, floor = error.minimum_bytes or 0, error.floor_bytes or 0
        row = dataclasses.replace(self._measure(share, budget, self._plan(budget), start), raised_to_minimum=True)
        self.lowest = floor, row
        return row

    def _plan(self, budget: int) -> Plan:
        options: Any = {"solver": self.solver, "time_limit": self.time_limit, "progress": False}
        return auto_checkpoint(self.model, self.sample, budget / MIB, **options)

    def _measure(self, share: int, budget: int, plan: Plan, start: float) -> Row:
        seconds = time.perf_counter() - start
        model, sample, plain = self.model, self.sample, copy.deepcopy(self.model)
        different = tuple(differences(run_step(plain, plain, sample), run_step(plan.module, model, sample)))
        measured = measured_peak_bytes(plan.module, model, sample, plan.static_bytes)
        return Row(
            name=self.name, share=share, nodes=len(plan.prepared.traced.graph_module.graph.nodes),
            capture_seconds=self.free.seconds["capture"], budget_bytes=budget, peak_bytes=plan.peak_bytes,
            measured_bytes=measured, loss_bytes=compare.loss_bytes(plan.module, sample),
            time_ratio=_time_ratio(plain, plan.module, sample) if self.timed else 0.0, overhead=plan.overhead,
            bound=plan.bound, status=plan.status, plan_seconds=seconds, different=different,
        )  # fmt: skip


def check(name: str, share: int, solver: str = "auto", time_limit: float = 30.0, timed: bool = True) -> Row:
    """One row."""
    return Entry(name, solver, time_limit, timed=timed).row(share)


def attempt(name: str, shares: Sequence[int], solver: str, time_limit: float) -> list[Row]:
    """An entry's rows; whatever is raised becomes a failed row, for one entry must not hide the others."""
    rows: list[Row] = []
    entry: Entry | None = None
    for share in shares:
        try:
            entry = entry or Entry(name, solver, time_limit)
            rows.append(entry.row(share))
        except Exception as error:  # noqa: BLE001 - the row says FAIL and the command exits 1
            traceback.print_exc()
            rows.append(Row(name, share, failure=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"))
    return rows


def _time_ratio(plain: nn.Module, planned: nn.Module, sample: Any) -> float:
    """Median time of a planned step over that of a plain one, the two taking turns after a warm-up of each."""
    times: tuple[list[float], list[float]] = ([], [])
    while len(times[0]) < 5 or (sum(times[0]) < LEAST_SECONDS and len(times[0]) < MOST_STEPS):
        for module, taken in zip((plain, planned), times, strict=True):
            module.zero_grad(set_to_none=True)
            start = time.perf_counter()
            forward_backward(module, sample)
            taken.append(time.perf_counter() - start)
    times = times[0][2:], times[1][2:]
    return statistics.median(times[1]) / statistics.median(times[0])


COLUMNS = ("entry", "nodes", "capture s", "share", "budget MiB", "predicted", "measured", "time", "recompute", "bound",
           "plan s", "numbers equal", "passed")  # fmt: skip


def cells(r: Row) -> tuple[str, ...]:
    """The row as `COLUMNS` name it."""
    if r.failure:
        return (r.name, "", "", r.asked, "", "", "", "", "", "", "", r.failure[:90], "FAIL")
    return (
        r.name, str(r.nodes), f"{r.capture_seconds:.1f}", r.asked, _mib(r.budget_bytes), _mib(r.peak_bytes),
        _mib(r.measured_bytes), f"{r.time_ratio:.2f}x", f"{r.overhead:.2%}",
        "-" if r.bound is None else f"{r.bound:.2%}", f"{r.plan_seconds:.1f}",
        "yes" if not r.different else f"NO: {', '.join(r.different[:3])}", "yes" if r.passed else "FAIL",
    )  # fmt: skip


def _mib(size: int) -> str:
    return f"{size / MIB:.2f}" if size >= MIB else f"{size / MIB:.4f}"


def table(rows: Sequence[Row]) -> Table:
    """The rows as rich shows them."""
    result = Table(*COLUMNS)
    for r in rows:
        result.add_row(*cells(r))
    return result


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a markdown table."""
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *(cells(r) for r in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def main() -> int:
    """Print the table; exit 1 when a row fails."""
    options = _options()
    names = options.only or (list(ZOO) if options.models else list(ENTRIES))
    console, rows = Console(width=180), []
    for position, name in enumerate(names, 1):
        rows += attempt(name, options.shares, options.solver, options.time_limit)
        told = ", ".join(f"{r.asked} {'passed' if r.passed else 'FAIL'}" for r in rows[-len(options.shares) :])
        console.print(f"{position} of {len(names)}: {name}: {told}")
    console.print(table(rows))
    if options.json:
        records = [{**dataclasses.asdict(r), "passed": r.passed} for r in rows]
        Path(options.json).write_text(json.dumps(records, indent=1) + "\n")
    if options.markdown:
        Path(options.markdown).write_text(markdown(rows))
    failed = [r for r in rows if not r.passed]
    raised = sum(r.raised_to_minimum for r in rows)
    console.print(f"{len(names)} entries, {len(rows)} rows, {raised} at the stated minimum, {len(failed)} failed")
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(ENTRIES), metavar="NAME", help="this entry (repeat)")
    parser.add_argument("--models", action="store_true", help=f"the {len(ZOO)} large models only")
    parser.add_argument("--shares", type=lambda s: tuple(map(int, s.split(","))), default=SHARES, help="80,60,40")
    parser.add_argument("--solver", default="auto")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds per plan")
    parser.add_argument("--json", metavar="FILE", help="write the rows here too")
    parser.add_argument("--markdown", metavar="FILE", help="write the table here too")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
