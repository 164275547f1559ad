"""PuLP's program solved by HiGHS: the relaxation in this process, the integers in one that can be ended (`mip`).

Peak rows are added as solutions violate them: to the relaxation first, whose few rows that matter then begin the
integer program.

The status words of HiGHS are not trusted: an answer is a bound and a vector of values, and both are judged elsewhere.
The relaxation runs in a thread (`interruptible`), so that Ctrl-C and the clock end it at once.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import Any

import highspy
import numpy as np
import pulp

from .errors import SolverUnavailable
from .interruptible import interruptible, shielded
from .mip import Worker, introduce, job_of
from .peaks import NO_ROWS, Rows
from .staged import StagedModel

ROWS_PER_ROUND = 24
TOLERANCE = 1e-6
SLACK = 1e-4
OPEN_SHARE = 0.05
FAR_SHARE = 0.03  # of the step's cost: where more is open, integers close little of it
SPREAD = 1000
ROUNDS = 100
ENOUGH = 10
ROUND_SHARE = 0.1
RAY_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Answer:
    """What a solve of the staged program proved and found.

    Attributes:
        bound: lower bound on the objective in cost units, or None.
        values: variable values of the best solution found, of the relaxation where there is none, or None.
        infeasible: HiGHS says that the program has no solution.
        certified: prices that were checked here prove it, so that no schedule fits the budget.
        timed_out: the clock ended the solve.
        failed: the engine gave no answer that could be trusted; `notes` says why.
    """

    bound: int | None
    values: dict[str, float] | None
    infeasible: bool = False
    certified: bool = False
    timed_out: bool = False
    failed: bool = False
    notes: tuple[str, ...] = ()


@dataclass
class PeakRows:
    """Which peak rows a model has, and which it still lacks."""

    model: StagedModel
    present: dict[int, None] = field(default_factory=dict)

    def violated(self, values: np.ndarray) -> list[int]:
        """Slots whose rows `values` break, worst first, and not all of them side by side."""
        problem, budget = self.model.problem, self.model.budget_bytes
        excess = self.model.surely_live(values) - budget
        apart = len(problem.ops) // SPREAD
        chosen: list[int] = []
        for slot in np.argsort(-excess, kind="stable").tolist():
            if excess[slot] <= TOLERANCE * budget or len(chosen) == ROWS_PER_ROUND:
                break
            if slot in self.present or any(abs(slot - s) <= apart for s in chosen):
                continue
            chosen.append(slot)
        return chosen


def solve_staged(model: StagedModel, time_limit: float, gap_cost: int) -> Answer:
    """Bound the program from below and look for a solution, within the time limit."""
    run = StagedRun(model, time.monotonic() + time_limit)
    return run.integers(run.relax(), gap_cost)


def relax_staged(model: StagedModel, time_limit: float) -> Answer:
    """Bound the program from below by its relaxation alone."""
    return StagedRun(model, time.monotonic() + time_limit).relax()


def bound_staged(model: StagedModel, time_limit: float) -> Answer:
    """Bound the program from below by its relaxation with all rows at once, by the dual simplex.

    Every basis on the way to the optimum has prices that prove a bound, so a run that the clock ends counts, too.
    Presolve would lose them.
    """
    run = StagedRun(model, time.monotonic() + time_limit)
    run.highs.setOptionValue("solver", "simplex")
    run.highs.setOptionValue("presolve", "off")
    run.add_all()
    return run.bounded()


class StagedRun:
    """One program: the relaxation first, with rows added, then the integers, until the deadline."""

    def __init__(self, model: StagedModel, deadline: float) -> None:
        self.model = model
        self.deadline = deadline
        introduce()
        solver = pulp.HiGHS(msg=False, mip=False, threads=2)
        solver.createAndConfigureSolver(model.program)
        shielded(lambda: solver.buildSolverModel(model.program))
        self.highs: Any = model.program.solverModel
        self.highs.HandleUserInterrupt = True
        self.index = model.column
        self.peak = PeakRows(model)
        self.first_row = self.highs.getNumRow()
        self.enough = math.inf

    def integers(self, relaxed: Answer, gap_cost: int, incumbent: dict[str, float] | None = None) -> Answer:
        """What the integers add to the relaxation, beginning from a plan; nothing where much is open."""
        if relaxed.infeasible or relaxed.timed_out:
            return relaxed
        self.enough = (
            math.inf if incumbent is None else self._cost(incumbent) - ENOUGH * gap_cost / self.model.cost_unit
        )
        # What the program leaves open is worth less time than what its stages leave out.
        open_cost = 0.0 if incumbent is None else self._cost(incumbent) - (relaxed.bound or 0)
        if not self.model.Q and open_cost * self.model.cost_unit > FAR_SHARE * self.model.problem.step_cost:
            return relaxed
        allowed = max(0.999, gap_cost / self.model.cost_unit, OPEN_SHARE * open_cost)
        start = None if incumbent is None else np.array([incumbent[name] for name in self.index])
        worker = Worker()
        try:
            try:
                return self._integers(worker, relaxed, start, allowed)
            finally:
                worker.end()
        finally:  # Ctrl-C may fall on the line above
            worker.end()

    def _integers(self, worker: Worker, relaxed: Answer, start: np.ndarray | None, allowed: float) -> Answer:
        """Solve the integer program again and again, with the rows that its solutions break."""
        integer = np.array([v.cat == pulp.LpInteger for v in self.model.program.variables()])
        options = {"threads": 2, "mip_abs_gap": allowed, "mip_rel_gap": 0.0}
        best, seconds = relaxed, self.deadline - time.monotonic()
        for _ in range(ROUNDS):
            begin = time.monotonic()
            found = worker.solve(job_of(self.highs, integer, start, options), self.deadline)
            if found.infeasible:
                return replace(best, infeasible=start is None, failed=start is not None)
            best = replace(best, bound=_larger(best.bound, self._as_bound(found.bound)))
            if found.failure:
                note = f"the integer program was not solved, only its relaxation: {found.failure}"
                return replace(best, failed=True, notes=(note,))
            if found.values is None or len(found.values) != len(integer) or not np.isfinite(found.values).all():
                break
            best = replace(best, values=self._named(found.values))
            slow = time.monotonic() - begin > ROUND_SHARE * seconds
            enough = slow or (best.bound or 0) >= self.enough
            if time.monotonic() > self.deadline or not self._add_violated(found.values, enough):
                break
        return replace(best, timed_out=time.monotonic() > self.deadline)

    def _named(self, values: np.ndarray) -> dict[str, float]:
        return {name: float(values[j]) for name, j in self.index.items()}

    def _cost(self, values: dict[str, float]) -> float:
        return sum(c * values[v.name] for v, c in self.model.program.objective.items())

    def relax(self) -> Answer:
        """Solve the linear relaxation until no peak row is violated; then keep the rows that decide it."""
        best = Answer(None, None)
        for _ in range(ROUNDS):
            answer = self._relaxation()
            best = replace(answer, bound=_larger(best.bound, answer.bound))
            if answer.bound is None or time.monotonic() > self.deadline:
                break
            relaxed = np.array(self.highs.getSolution().col_value)
            if not self._add_violated(relaxed, enough=True):
                self._drop_idle_rows()
                return replace(best, values=self._named(relaxed))
        return best

    def _drop_idle_rows(self) -> None:
        solution = self.highs.getSolution()
        prices = np.array(solution.row_dual)[self.first_row :]
        limits = np.array(self.highs.getLp().row_upper_)[self.first_row :]
        slack = limits - np.array(solution.row_value)[self.first_row :]
        idle = (np.abs(prices) < TOLERANCE) & (slack > SLACK * np.maximum(1.0, np.abs(limits)))
        self.highs.deleteRows(int(idle.sum()), (np.flatnonzero(idle) + self.first_row).astype(np.int32))
        slots = np.array(list(self.peak.present), dtype=np.int64)
        self.peak.present = dict.fromkeys(slots[~idle].tolist())

    def _relaxation(self) -> Answer:
        self._run()
        status = self.highs.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return Answer(None, None, infeasible=True, certified=self._is_impossible())
        if status != highspy.HighsModelStatus.kOptimal:
            return Answer(None, None, timed_out=True)
        prices = np.array(self.highs.getSolution().row_dual)
        return Answer(self._as_bound(self._safe_bound(prices, np.array(self.highs.getLp().col_cost_))), None)

    def add_all(self) -> None:
        """Add the rows of constraint 4 that some solution breaks; those of its slots imply those of runs that need no
        more than a slot of their stage.
        """
        peaks = self.model.peaks
        runs = np.flatnonzero(np.array(peaks.alone, dtype=np.int64) > peaks.run_bytes)
        self._add_rows(self.model.peak_rows(np.concatenate((np.arange(peaks.slots), peaks.slots + runs))))

    def bounded(self) -> Answer:
        """The bound that the prices of one run give, at whatever point it ended; its solution if it came to an end."""
        self._run()
        found = self.highs.getSolution()
        prices = np.array(found.row_dual)
        if len(prices) != self.highs.getNumRow():
            return Answer(None, None, timed_out=True)
        bound = self._as_bound(self._safe_bound(prices, np.array(self.highs.getLp().col_cost_)))
        solved = self.highs.getModelStatus() == highspy.HighsModelStatus.kOptimal
        return Answer(bound, self._named(np.array(found.col_value)) if solved else None)

    def _is_impossible(self) -> bool:
        """Whether a ray of prices proves that nothing satisfies the rows: at no cost at all the bound is positive."""
        self.highs.setOptionValue("presolve", "off")  # what presolve finds impossible has no ray
        self._run()
        _, there, ray = self.highs.getDualRay()
        if not there:
            return False
        ray = np.array(ray) / max(1e-300, float(np.abs(ray).max()))
        free = np.zeros(self.highs.getNumCol())
        return max(self._safe_bound(ray, free), self._safe_bound(-ray, free)) > RAY_TOLERANCE

    def _add_violated(self, values: np.ndarray, enough: bool) -> bool:
        """Add rows that `values` break: of constraint 4, else of constraint 6 unless that is enough."""
        slots = self.peak.violated(values)
        if slots:
            self._add_rows(self.model.peak_rows(np.array(sorted(slots), dtype=np.int64)))
            return True
        rows = self.model.twice.rows(values, self.model.surely_live(values)) if not enough else NO_ROWS
        self._add_rows(rows)
        return bool(len(rows.limits))

    def _add_rows(self, rows: Rows) -> None:
        self.peak.present.update(dict.fromkeys(rows.slots.tolist()))
        count = len(rows.limits)
        if not count:
            return
        lower = np.full(count, -highspy.kHighsInf)
        starts, columns = rows.starts[:-1].astype(np.int32), rows.columns.astype(np.int32)
        values = rows.coefficients.astype(float)

        def add() -> None:
            upper = rows.limits.astype(float)
            status = self.highs.addRows(count, lower, upper, len(columns), starts, columns, values)
            if status == highspy.HighsStatus.kError:
                raise SolverUnavailable("HiGHS did not take the peak rows of the program", solver="ilp")

        shielded(add)

    def _run(self) -> None:
        self.highs.setOptionValue("time_limit", self.highs.getRunTime() + max(0.05, self.deadline - time.monotonic()))
        interruptible(self.highs, self.deadline)

    def _safe_bound(self, prices: np.ndarray, costs: np.ndarray) -> float:
        """The Lagrangian bound that row prices give: valid whatever the engine thinks of them.

        For prices y of the right signs, y * limits + sum over columns of min(0, reduced cost) bounds the optimum
        from below (Neumaier and Shcherbina 2004), so prices that are slightly off cost little.
        """
        program = self.highs.getLp()
        lower, upper = np.array(program.row_lower_), np.array(program.row_upper_)
        limits = np.where(prices > 0, lower, upper)
        usable = np.isfinite(limits) & np.isfinite(prices)
        prices = np.where(usable, prices, 0.0)
        matrix = program.a_matrix_
        index, value = np.array(matrix.index_, dtype=np.int64), np.array(matrix.value_, dtype=float)
        starts = np.array(matrix.start_, dtype=np.int64)
        outer = np.repeat(np.arange(len(starts) - 1), starts[1:] - starts[:-1])
        by_row = matrix.format_ != highspy.MatrixFormat.kColwise
        rows, columns = (outer, index) if by_row else (index, outer)
        priced = np.bincount(columns, weights=value * prices[rows], minlength=program.num_col_)
        reduced = costs - priced
        return float(prices @ np.where(usable, limits, 0.0) + np.minimum(reduced, 0.0) @ np.array(program.col_upper_))

    def _as_bound(self, value: float) -> int | None:
        """Costs are integers, so a bound rounds up, after giving the engine's tolerance back."""
        if not math.isfinite(value):
            return None
        return max(0, math.ceil(value - TOLERANCE * max(1.0, abs(value))))


def _larger(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else max(a, b)
