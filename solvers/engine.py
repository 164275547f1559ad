"""PuLP's program solved by HiGHS inside this process; CBC where HiGHS is missing.

Peak rows are added as solutions violate them: to the relaxation first, whose few rows that matter then begin the
integer program.

The status words of the engines are not trusted: an answer is a bound and a vector of values, and both are judged
elsewhere. HiGHS runs in a thread, so that Ctrl-C interrupts it at once and no child process exists.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pulp

from .cbc import solve_by_cbc
from .errors import SolverUnavailable
from .staged import StagedModel

try:
    import highspy
except ImportError:  # the fallback is CBC; `Answer.notes` says so
    highspy = None  # type: ignore[assignment]

ROWS_PER_ROUND = 24
TOLERANCE = 1e-6
SLACK = 1e-4
OPEN_SHARE = 0.05
SPREAD = 1000
ROUNDS = 20


@dataclass(frozen=True)
class Answer:
    """What a solve of the staged program proved and found.

    Attributes:
        bound: lower bound on the objective in cost units, or None.
        values: variable values of the best solution found, or None.
        infeasible: the engine proved that the program has no solution.
        timed_out: the clock ended the solve.
        failed: the engine gave no answer that could be trusted; `notes` says why.
    """

    bound: int | None
    values: dict[str, float] | None
    infeasible: bool = False
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


def solve_staged(
    model: StagedModel, time_limit: float, gap_cost: int, incumbent: dict[str, float] | None = None
) -> Answer:
    """Bound the program from below and look for a solution, within the time limit."""
    if highspy is None:
        return _solve_cbc(model, time_limit, incumbent)
    return _HighsRun(model, time.monotonic() + time_limit).solve(gap_cost, incumbent)


class _HighsRun:
    """One program in one HiGHS instance: the relaxation first, with rows added, then the integers."""

    def __init__(self, model: StagedModel, deadline: float) -> None:
        self.model = model
        self.deadline = deadline
        solver = pulp.HiGHS(msg=False, mip=False, threads=2)
        solver.createAndConfigureSolver(model.program)
        solver.buildSolverModel(model.program)
        self.highs: Any = model.program.solverModel
        self.index = model.column
        self.peak = PeakRows(model)
        self.first_row = self.highs.getNumRow()

    def solve(self, gap_cost: int, incumbent: dict[str, float] | None) -> Answer:
        relaxed = self._relax()
        if relaxed.infeasible or relaxed.timed_out:
            return relaxed
        self._make_integer()
        # What the program leaves open is worth less time than what its stages leave out.
        open_cost = 0.0 if incumbent is None else self._cost(incumbent) - (relaxed.bound or 0)
        self.highs.setOptionValue("mip_abs_gap", max(0.999, gap_cost / self.model.cost_unit, OPEN_SHARE * open_cost))
        self.highs.setOptionValue("mip_rel_gap", 0.0)
        bound, values = relaxed.bound, None
        for _ in range(ROUNDS):
            if incumbent is not None:
                self._start_from(incumbent)
            self._run()
            status = self.highs.getModelStatus()
            if status == highspy.HighsModelStatus.kInfeasible:
                return Answer(None, None, infeasible=True)
            bound = _larger(bound, self._as_bound(self.highs.getInfo().mip_dual_bound))
            solution = self._solution()
            if solution is None:
                break
            values = {name: float(solution[j]) for name, j in self.index.items()}
            if time.monotonic() > self.deadline or not self._add_violated(solution):
                break
        return Answer(bound, values, timed_out=time.monotonic() > self.deadline)

    def _cost(self, values: dict[str, float]) -> float:
        return sum(c * values[v.name] for v, c in self.model.program.objective.items())

    def _relax(self) -> Answer:
        """Solve the linear relaxation until no peak row is violated; then keep the rows that decide it."""
        best = Answer(None, None)
        for _ in range(ROUNDS):
            answer = self._relaxation()
            best = replace(answer, bound=_larger(best.bound, answer.bound))
            if answer.bound is None or time.monotonic() > self.deadline:
                break
            if not self._add_violated(np.array(self.highs.getSolution().col_value)):
                self._drop_idle_rows()
                break
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
            return Answer(None, None, infeasible=True)
        if status != highspy.HighsModelStatus.kOptimal:
            return Answer(None, None, timed_out=True)
        return Answer(self._as_bound(self._safe_bound()), None)

    def _add_violated(self, values: np.ndarray) -> bool:
        slots = self.peak.violated(values)
        self._add_rows(slots)
        return bool(slots)

    def _add_rows(self, slots: list[int]) -> None:
        rows = self.model.peak_rows(np.array(sorted(slots), dtype=np.int64))
        self.peak.present.update(dict.fromkeys(rows.slots.tolist()))
        count = len(rows.limits)
        if not count:
            return
        lower = np.full(count, -highspy.kHighsInf)
        starts, columns = rows.starts[:-1].astype(np.int32), rows.columns.astype(np.int32)
        values = rows.coefficients.astype(float)
        status = self.highs.addRows(
            count, lower, rows.limits.astype(float), len(columns), starts, columns, values
        )
        if status == highspy.HighsStatus.kError:
            raise SolverUnavailable("HiGHS did not take the peak rows of the program", solver="ilp")

    def _make_integer(self) -> None:
        for v in self.model.program.variables():
            if v.cat == pulp.LpInteger:
                self.highs.changeColIntegrality(v.index, highspy.HighsVarType.kInteger)

    def _start_from(self, incumbent: dict[str, float]) -> None:
        solution = highspy.HighsSolution()
        values = [0.0] * len(self.index)
        for name, j in self.index.items():
            values[j] = incumbent[name]
        solution.col_value = values
        self.highs.setSolution(solution)

    def _run(self) -> None:
        self.highs.setOptionValue("time_limit", self.highs.getRunTime() + max(0.05, self.deadline - time.monotonic()))
        _interruptible(self.highs)

    def _solution(self) -> np.ndarray | None:
        if self.highs.getInfo().primal_solution_status != 2:
            return None
        values = np.array(self.highs.getSolution().col_value)
        return values if len(values) and bool(np.isfinite(values).all()) else None

    def _safe_bound(self) -> float:
        """The Lagrangian bound that the row prices give: valid whatever the engine thinks of them.

        For prices y of the right signs, y * limits + sum over columns of min(0, reduced cost) bounds the optimum
        from below (Neumaier and Shcherbina 2004), so an interior point that is slightly off costs little.
        """
        program = self.highs.getLp()
        prices = np.array(self.highs.getSolution().row_dual)
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
        reduced = np.array(program.col_cost_) - priced
        return float(prices @ np.where(usable, limits, 0.0) + np.minimum(reduced, 0.0) @ np.array(program.col_upper_))

    def _as_bound(self, value: float) -> int | None:
        """Costs are integers, so a bound rounds up, after giving the engine's tolerance back."""
        if not math.isfinite(value):
            return None
        return max(0, math.ceil(value - TOLERANCE * max(1.0, abs(value))))


def _larger(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else max(a, b)


def _interruptible(highs: Any) -> None:
    """Run HiGHS in a thread and wait for it; an exception here (Ctrl-C) stops it and goes on."""
    highs.HandleUserInterrupt = True
    done = threading.Event()  # Python 3.11 takes a thread for ended once Ctrl-C has interrupted a join of it

    def run() -> None:
        try:
            highs.run()
        finally:
            done.set()

    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()
        while not done.wait(0.05):
            pass
    except BaseException:
        while thread.ident is not None and not done.is_set():  # one that has not begun does not hear the first call
            highs.cancelSolve()
            done.wait(0.05)
        raise


def _solve_cbc(model: StagedModel, time_limit: float, incumbent: dict[str, float] | None) -> Answer:
    """The same program with all peak rows by CBC; only an answer proved optimal bounds anything."""
    note = ("highspy is not installed: CBC solved the program",)
    costs = {v.name: c for v, c in model.program.objective.items()}
    rows = model.peak_rows(np.array(list(model.problem.required()), dtype=np.int64))
    variables = model.program.variables()
    for j, limit in enumerate(rows.limits.tolist()):
        inside = slice(rows.starts[j], rows.starts[j + 1])
        columns, coefficients = rows.columns[inside].tolist(), rows.coefficients[inside].tolist()
        if not columns:
            return Answer(None, None, infeasible=True, notes=note)
        expression = pulp.LpAffineExpression({variables[c]: x for c, x in zip(columns, coefficients, strict=True)})
        model.program.addConstraint(pulp.LpConstraint(expression, pulp.LpConstraintLE, rhs=limit))
    found = solve_by_cbc(model.program, time_limit)
    least = sum(c * found.values[name] for name, c in costs.items()) if found.values else 0.0
    known = sum(c * incumbent[name] for name, c in costs.items()) if incumbent else math.inf
    failure = found.failure
    if (found.infeasible and incumbent) or (found.optimal and least > known + 1e-3):
        failure = "it calls impossible what a known plan does"
    if failure:
        return Answer(None, None, failed=True, notes=(f"highspy is not installed, and CBC failed: {failure}",))
    if found.infeasible or found.values is None:
        return Answer(None, None, infeasible=found.infeasible, timed_out=not found.infeasible, notes=note)
    return Answer(
        math.ceil(least - 1e-3) if found.optimal else None, found.values, timed_out=not found.optimal, notes=note
    )
