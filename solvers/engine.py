"""PuLP's program solved by HiGHS inside this process, peak rows added as they are violated; CBC where HiGHS is missing.

The status words of the engines are not trusted: an answer is a bound and a vector of values, and both are judged
elsewhere. HiGHS runs in a thread, so that Ctrl-C interrupts it at once and no child process exists.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pulp

from .staged import Row, StagedModel

try:
    import highspy
except ImportError:  # the fallback is CBC; `Answer.notes` says so
    highspy = None  # type: ignore[assignment]

ROWS_PER_ROUND = 24
ROUNDS = 60
TOLERANCE = 1e-6
SPREAD = 1000
LARGE_MODEL = 30_000
LARGE_ROUNDS = 3


@dataclass(frozen=True)
class Answer:
    """What a solve of the staged program proved and found.

    Attributes:
        bound: lower bound on the objective in cost units, or None.
        values: variable values of the best solution found, or None.
        infeasible: the engine proved that the program has no solution.
        timed_out: the clock ended the solve.
    """

    bound: int | None
    values: dict[str, float] | None
    infeasible: bool = False
    timed_out: bool = False
    notes: tuple[str, ...] = ()


@dataclass
class PeakRows:
    """Which peak rows a model has, and which it still lacks."""

    model: StagedModel
    rows: dict[int, Row] = field(default_factory=dict)

    def violated(self, values: np.ndarray) -> list[int]:
        """Slots whose rows `values` break, worst first, and not all of them side by side."""
        problem, budget = self.model.problem, self.model.budget_bytes
        excess = self.model.surely_live(values) - budget
        apart = len(problem.ops) // SPREAD
        chosen: list[int] = []
        for slot in np.argsort(-excess, kind="stable").tolist():
            if excess[slot] <= TOLERANCE * budget or len(chosen) == ROWS_PER_ROUND:
                break
            if slot in self.rows or problem.ops[slot].optional or any(abs(slot - s) <= apart for s in chosen):
                continue
            chosen.append(slot)
        return chosen


def solve_staged(
    model: StagedModel, time_limit: float, gap_cost: int, incumbent: dict[str, float] | None = None
) -> Answer:
    """Bound the program from below and look for a solution, within the time limit."""
    if highspy is None:
        return _solve_cbc(model, time_limit)
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
        self.index = {v.name: v.index for v in model.program.variables()}
        self.peak = PeakRows(model)
        self.large = len(self.index) > LARGE_MODEL

    def solve(self, gap_cost: int, incumbent: dict[str, float] | None) -> Answer:
        if self.large:
            self.highs.setOptionValue("solver", "ipm")
            self.highs.setOptionValue("run_crossover", "off")
        relaxed = self._relax()
        if relaxed is not None and (relaxed.infeasible or self.large):
            return relaxed
        bound = relaxed.bound if relaxed is not None else None
        self._make_integer()
        self.highs.setOptionValue("mip_abs_gap", max(0.999, gap_cost / self.model.cost_unit))
        self.highs.setOptionValue("mip_rel_gap", 0.0)
        values: dict[str, float] | None = None
        for _ in range(ROUNDS):
            if time.monotonic() > self.deadline:
                break
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
            if not self._add_rows(solution) or status != highspy.HighsModelStatus.kOptimal:
                break
        return Answer(bound, values, timed_out=time.monotonic() > self.deadline)

    def _relax(self) -> Answer | None:
        """Solve the linear relaxation until no peak row is violated; None when the clock ended it."""
        bound = None
        for _ in range(LARGE_ROUNDS if self.large else ROUNDS):
            self._run()
            status = self.highs.getModelStatus()
            if status == highspy.HighsModelStatus.kInfeasible:
                return Answer(None, None, infeasible=True)
            if status != highspy.HighsModelStatus.kOptimal:
                return None if bound is None else Answer(bound, None)
            bound = _larger(bound, self._as_bound(self._safe_bound()))
            if not self._add_rows(np.array(self.highs.getSolution().col_value)) or time.monotonic() > self.deadline:
                break
        return Answer(bound, None)

    def _add_rows(self, values: np.ndarray) -> bool:
        slots = self.peak.violated(values)
        for slot in slots:
            self.peak.rows[slot] = self.model.peak_row(slot)
            terms, limit = self.model.scaled(self.peak.rows[slot])
            columns = np.array([self.index[v.name] for v, _ in terms], dtype=np.int32)
            coefficients = np.array([c for _, c in terms], dtype=float)
            self.highs.addRow(-highspy.kHighsInf, limit, len(terms), columns, coefficients)
        return bool(slots)

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
        index, value, lengths = np.array(matrix.index_), np.array(matrix.value_), np.diff(np.array(matrix.start_))
        outer = np.repeat(np.arange(len(lengths)), lengths)
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
    thread = threading.Thread(target=highs.run, daemon=True)
    thread.start()
    wait: Callable[[], None] = thread.join
    try:
        while thread.is_alive():
            thread.join(0.05)
    except BaseException:
        highs.cancelSolve()
        wait()
        raise


def _solve_cbc(model: StagedModel, time_limit: float) -> Answer:
    """The same program with all peak rows by CBC; only an answer proved optimal bounds anything."""
    note = ("highspy is not installed: CBC solved the program",)
    for slot in model.problem.required():
        terms, limit = model.scaled(model.peak_row(slot))
        expression = pulp.LpAffineExpression(dict(terms)) if terms else None
        if expression is None:
            if limit < 0:
                return Answer(None, None, infeasible=True, notes=note)
            continue
        model.program.addConstraint(pulp.LpConstraint(expression, pulp.LpConstraintLE, rhs=limit))
    model.program.solve(pulp.PULP_CBC_CMD(msg=False, timeLimit=time_limit))
    if model.program.sol_status == pulp.LpSolutionInfeasible:
        return Answer(None, None, infeasible=True, notes=note)
    values = {v.name: v.varValue or 0.0 for v in model.program.variables()}
    optimal = model.program.sol_status == pulp.LpSolutionOptimal
    bound = math.ceil(pulp.value(model.program.objective) - 1e-3) if optimal else None
    return Answer(bound, values, timed_out=not optimal, notes=note)
