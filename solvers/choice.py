"""One option for each run, at least cost, so that the step fits: a small integer program.

Variables
    x[r, o]  run r takes option o                                                       (binary)
    f[r]     bytes freed in the forward by the runs before r
    b[r]     bytes freed in the backward by the runs whose backward comes after r's
    excess   bytes over the budget, dearer than anything else

Constraints
    1. one      sum over o of x[r, o] = 1
    2. chain    f[r + 1] = f[r] + sum of freed[r, o] * x[r, o], and b likewise from the last backward to the first
    3. own      sum of peak[r, o] * x[r, o] - f[r] - excess <= budget, in the forward of r; with b in its backward
    4. between  the highest slot between two runs - what is freed there - excess <= budget

`peak[r, o]` is what is live at the worst slot of r where every other run is as without recompute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np

from .mip import Worker, introduce, job_of
from .repeats import Run

SCALE = 1000.0
EXCESS_PRICE = 1e6
MIP_GAP = 5e-4
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Figures:
    """What an option does to a run: bytes it frees in the forward and in the backward, and the worst of its own slots
    in each, where all other runs are as without recompute.
    """

    cost: int
    freed: tuple[int, int]
    peaks: tuple[int, int]


@dataclass(frozen=True)
class Relaxed:
    """The program's relaxation, solved.

    Attributes:
        shares: for each run, how much of each option is taken.
        prices: for each run, what a byte of its own peak in the forward and in the backward costs.
        room_bytes: for each run, the peaks that are allowed there.
    """

    cost: float
    shares: list[np.ndarray]
    prices: np.ndarray
    room_bytes: np.ndarray


class Choice:
    """The program for some runs (in the order of the forward), their menus and the live bytes without recompute."""

    def __init__(
        self, runs: Sequence[Run], menus: Sequence[Sequence[Figures]], plain: np.ndarray, num_forward: int, budget: int
    ) -> None:
        self.runs, self.menus, self.budget = runs, menus, budget
        self.bytes = SCALE / max(1, budget)
        self.cost = SCALE / max(1, max(figures.cost for menu in menus for figures in menu))
        count = len(runs)
        self.first = np.cumsum([0, *(len(menu) for menu in menus)]).tolist()
        self.f = range(self.first[-1], self.first[-1] + count + 1)
        self.b = range(self.f.stop, self.f.stop + count + 1)
        self.excess = self.b.stop
        self.backwards = sorted(range(count), key=lambda r: runs[r].backward.start)
        self.place = {r: j for j, r in enumerate(self.backwards)}
        self.rows: list[tuple[float, float, list[tuple[int, float]]]] = []
        self._one_and_chain()
        self.own = len(self.rows)
        self._own()
        self._between(plain, num_forward)
        self.highs = self._program()

    def relaxed(self) -> Relaxed | None:
        """Solve without integers."""
        self.highs.run()
        if self.highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        solution = self.highs.getSolution()
        values, duals = np.array(solution.col_value), np.array(solution.row_dual)
        prices = -duals[self.own : self.own + 2 * len(self.runs)].reshape(-1, 2)
        freed = np.array([[values[c] for c in self._before(r)] for r in range(len(self.runs))])
        cost = float(self.highs.getInfo().objective_function_value) / self.cost
        return Relaxed(cost, self._by_run(values), prices, self.budget + (freed / self.bytes).astype(np.int64))

    def taken(self, worker: Worker, deadline: float) -> list[int] | None:
        """For each run its option, or None where none was found in time, or nothing fits."""
        integer = np.zeros(self.excess + 1, dtype=bool)
        integer[: self.first[-1]] = True
        found = worker.solve(job_of(self.highs, integer, None, {"threads": 1, "mip_rel_gap": MIP_GAP}), deadline)
        if found.values is None or found.values[self.excess] > TOLERANCE * SCALE:
            return None
        return [int(shares.argmax()) for shares in self._by_run(found.values)]

    def _by_run(self, values: np.ndarray) -> list[np.ndarray]:
        return np.split(values[: self.first[-1]], self.first[1:-1])

    def _before(self, r: int) -> tuple[int, int]:
        """The columns of what is freed while r runs forward and backward."""
        return self.f[r], self.b[self.place[r] + 1]

    def _sum(self, r: int, figure: Any) -> list[tuple[int, float]]:
        return [(self.first[r] + o, figure(figures)) for o, figures in enumerate(self.menus[r])]

    def _one_and_chain(self) -> None:
        for r in range(len(self.runs)):
            self.rows.append((1.0, 1.0, self._sum(r, lambda _: 1.0)))
            freed = [self._sum(r, lambda figures, half=half: figures.freed[half] * self.bytes) for half in (0, 1)]
            self.rows.append((0.0, 0.0, [*freed[0], (self.f[r], 1.0), (self.f[r + 1], -1.0)]))
            after, here = self.b[self.place[r] + 1], self.b[self.place[r]]
            self.rows.append((0.0, 0.0, [*freed[1], (after, 1.0), (here, -1.0)]))
        self.rows += [(0.0, 0.0, [(self.f[0], 1.0)]), (0.0, 0.0, [(self.b[-1], 1.0)])]

    def _own(self) -> None:
        for r in range(len(self.runs)):
            for half, freed in enumerate(self._before(r)):
                peaks = self._sum(r, lambda figures, half=half: figures.peaks[half] * self.bytes)
                self._fits(peaks, freed, 0)

    def _between(self, plain: np.ndarray, num_forward: int) -> None:
        """The gaps after each forward and before each backward."""
        stops = [*(run.forward.start for run in self.runs[1:]), num_forward]
        for r, stop in enumerate(stops):
            self._fits([], self.f[r + 1], int(plain[self.runs[r].forward.stop : stop].max(initial=0)))
        begin = num_forward
        for j, r in enumerate(self.backwards):
            self._fits([], self.b[j], int(plain[begin : self.runs[r].backward.start].max(initial=0)))
            begin = self.runs[r].backward.stop

    def _fits(self, peaks: list[tuple[int, float]], freed: int, fixed: int) -> None:
        limit = (self.budget - fixed) * self.bytes
        self.rows.append((-highspy.kHighsInf, limit, [*peaks, (freed, -1.0), (self.excess, -1.0)]))

    def _program(self) -> Any:
        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = self.excess + 1, len(self.rows)
        costs = np.zeros(program.num_col_)
        costs[: self.first[-1]] = [figures.cost * self.cost for menu in self.menus for figures in menu]
        costs[self.excess] = EXCESS_PRICE
        lower = np.zeros(program.num_col_)
        lower[self.first[-1] : self.excess] = -highspy.kHighsInf
        program.col_cost_, program.col_lower_ = costs, lower
        program.col_upper_ = np.full(program.num_col_, highspy.kHighsInf)
        program.row_lower_, program.row_upper_ = (np.array([row[side] for row in self.rows]) for side in (0, 1))
        terms = [row[2] for row in self.rows]
        program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        program.a_matrix_.num_col_, program.a_matrix_.num_row_ = program.num_col_, program.num_row_
        program.a_matrix_.start_ = np.cumsum([0, *map(len, terms)]).astype(np.int32)
        program.a_matrix_.index_ = np.array([c for row in terms for c, _ in row], dtype=np.int32)
        program.a_matrix_.value_ = np.array([v for row in terms for _, v in row], dtype=float)
        introduce()
        highs = highspy.Highs()
        highs.setOptionValue("output_flag", False)
        highs.passModel(program)
        return highs
