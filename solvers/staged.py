"""The integer program over stages: a relaxation that every schedule of the problem satisfies.

The required ops of the step, in order, are its slots; a recompute in slot s runs after slot s - 1 and before op s.
The forward is stage 0, but for what comes after its highest slot where that is near its end (`_forward_cut`). The
rest is cut into stages 1..K by their *end slots*, which are chosen where memory is tightest: at an end slot
everything that the stage recomputed has already run, so what the next stage finds resident is surely live, and the
peak row of that slot is exact but for what dies in the stage.

Variables
    R[i, k]  op i is recomputed at least once in stage k                                 (binary)
    A[t, k]  tensor t is resident when stage k begins                                    (binary)
    H[t, k]  t is held through the whole of stage k                                      (in [0, 1])
    U[i, k]  op i is recomputed at least once from stage k on                            (in [0, 1])
  for forward ops that may be recomputed and for their outputs, where a later read can still profit from it.

Objective
    minimise sum cost[i] * R[i, k]

Constraints
    1. need     A[t, k] + R[prod(t), k] >= 1           a required op of stage k reads t        (`_need`)
    2. closure  A[t, k] + R[prod(t), k] >= R[i, k]     i reads t, k after i's own stage        (`_closure`)
    3. keep     A[t, k+1] <= H[t, k] + R[prod(t), k],  H[t, k] <= A[t, k]                      (`_keep`)
    4. peak     at each slot s, bytes surely live <= budget                                     (`peak_rows`)
                  - what s reads and writes, its workspace, outputs of the step, backward tensors
                  - t is read later in the stage:       bytes[t] * (1 - R[prod(t), k])
                  - else, at the end slot of a stage:   bytes[t] * A[t, k+1]
                  - else:                               bytes[t] * H[t, k]
                  - where t is first written, k its stage, but for the end slot:
                                                        bytes[t] * (A[t, k+1] - R[prod(t), k])
    5. suffix   A[t, k] + U[prod(t), k] >= 1           a required op from stage k on reads t   (`_suffix`)
                A[t, k] + U[prod(t), k] >= U[i, k]     i reads t
                U[i, k] <= sum of R[i, l] over l >= k

Constraint 5 says nothing new of integers, but much of fractions: without it an op could be recomputed by halves in
two stages, each half from the same half of its inputs, and more stages would weaken the relaxation. In the last
stage that can use i, U[i, k] is R[i, k].

Each row holds for the indicators of *any* schedule that runs the required ops in this order, however often and
wherever it recomputes: 1-3 say that what is read was resident or written again, 4 counts a tensor only when it
cannot have been dropped. So the optimum, and any dual bound, bounds the added cost of all schedules from below.
The converse is false - inside a stage the relaxation may place a recompute both before and after a slot - so a
solution becomes a schedule through `to_live` and is judged by the simulator. More end slots make the relaxation
tighter and slower.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import gcd

import numpy as np
import pulp

from .live import Live
from .problem import Problem

COEFFICIENT_LIMIT = 1 << 20
NEAR_END = 10
ABOUT = 0.99


@dataclass(frozen=True)
class Rows:
    """Peak rows in compressed form: row j is sum(coefficients * columns over its range of `starts`) <= limits[j].

    Scaled so that coefficients stay small, and rounded so that each row stays valid: sizes down, budgets up.
    """

    slots: np.ndarray
    starts: np.ndarray
    columns: np.ndarray
    coefficients: np.ndarray
    limits: np.ndarray


@dataclass(frozen=True)
class Holds:
    """Bytes surely held: from slot `first` until `stop`, `size` times the value of `column` (1 where it is -1)."""

    first: np.ndarray
    stop: np.ndarray
    column: np.ndarray
    size: np.ndarray


@dataclass(frozen=True)
class Reach:
    """What recomputing can still be good for.

    Attributes:
        last_use: for each tensor the last slot that can profit from it, through recomputes too; -1 for none.
        useful: for each op whether recomputing it in the backward can be of use.
    """

    last_use: tuple[int, ...]
    useful: tuple[bool, ...]


def cost_unit(problem: Problem) -> int:
    """What the program counts costs in: their common divisor, or a multiple of it that keeps coefficients small."""
    costs = [op.cost for op in problem.ops if op.recomputable]
    divisor = gcd(*costs) or 1
    return divisor * max(1, -(-max(costs, default=0) // (divisor * COEFFICIENT_LIMIT)))


def reach(problem: Problem, cut: int) -> Reach:
    """Propagate the reads after slot `cut` through the forward ops that may be recomputed."""
    last = [-1] * len(problem.tensors)
    useful = [False] * len(problem.ops)
    for i in range(len(problem.ops) - 1, -1, -1):
        op = problem.ops[i]
        again = max((last[t] for t in op.outputs), default=-1)
        useful[i] = i < problem.num_forward and op.recomputable and again >= 0
        latest = max(i if i > cut else -1, again if useful[i] else -1)
        for t in op.inputs:
            last[t] = max(last[t], latest)
    return Reach(tuple(last), tuple(useful))


def plain_bytes(problem: Problem) -> np.ndarray:
    """What is live at each slot when nothing is recomputed, workspace and takeovers aside."""
    change = np.zeros(len(problem.ops) + 1, dtype=np.int64)
    for t, p in enumerate(problem.producer):
        end = len(problem.ops) if t in problem.pinned else max(problem.readers[t], default=p) + 1
        change[p] += problem.tensors[t].bytes
        change[end] -= problem.tensors[t].bytes
    total: np.ndarray = np.cumsum(change)[:-1]
    return total


class StagedModel:
    """The program for one choice of end slots. `program` is the PuLP problem; peak rows are added by the caller.

    Raises:
        TimeoutError: the deadline passed while the program was being built.
    """

    def __init__(
        self, problem: Problem, budget_bytes: int, ends: tuple[int, ...], deadline: float = float("inf")
    ) -> None:
        self.problem = problem
        self.deadline = deadline
        self.budget_bytes = budget_bytes
        self.decided = [self._is_decided(t) for t in range(len(problem.tensors))]
        self.ends = (self._forward_cut(), *ends)
        self.reach = reach(problem, self.ends[0])
        self.stage = [bisect_left(self.ends, s) for s in range(len(problem.ops))]
        self.home = [self.stage[p] for p in problem.producer]
        self.R: dict[tuple[int, int], pulp.LpVariable] = {}
        self.A: dict[tuple[int, int], pulp.LpVariable] = {}
        self.H: dict[tuple[int, int], pulp.LpVariable] = {}
        self.U: dict[tuple[int, int], pulp.LpVariable] = {}
        self.cost_unit = cost_unit(problem)
        self.program = pulp.LpProblem("recompute", pulp.LpMinimize)
        self._variables()
        self._need()
        self._keep()
        self._closure()
        self._suffix()

    def _forward_cut(self) -> int:
        """Where stage 0 ends: near the end of the forward, of the slots that are about as high as any there when
        nothing is dropped, the one that needs most whatever is dropped. Often it is the loss.
        """
        last = self.problem.num_forward - 1
        near = range(max(0, last - self.problem.num_forward // NEAR_END), last + 1)
        total = plain_bytes(self.problem)
        highest = max((int(total[s]) for s in near), default=0)
        slots = [s for s in near if total[s] >= ABOUT * highest and not self.problem.ops[s].optional]
        return max(slots, key=lambda s: self.fixed_bytes[s], default=last)

    @cached_property
    def fixed_bytes(self) -> list[int]:
        """For each slot, bytes that every schedule holds at it: all but the decided tensors it does not read."""
        problem = self.problem
        sizes = np.array([t.bytes for t in problem.tensors], dtype=np.int64)
        fixed = np.full(len(problem.ops), problem.static_bytes, dtype=np.int64)
        for t, p in enumerate(problem.producer):
            if self.decided[t] or problem.ops[p].optional:
                continue
            end = len(problem.ops) if t in problem.pinned else max(problem.readers[t], default=p) + 1
            fixed[p + 1 : end] += sizes[t]
        for s, op in enumerate(problem.ops):
            fixed[s] += op.workspace + sum(int(sizes[t]) for t in op.outputs)
            fixed[s] += sum(int(sizes[t]) for t in dict.fromkeys(op.inputs) if self.decided[t])
            fixed[s] -= int(sizes[op.reuse[0]]) if op.reuse else 0
        return [int(b) for b in fixed]

    def peak_rows(self, slots: np.ndarray) -> Rows:
        """Constraint 4 at some slots (ascending), without the rows that no solution can break."""
        holds, columns = self.holds, len(self.column)
        low, high = np.searchsorted(slots, holds.first), np.searchsorted(slots, holds.stop)
        counts = np.maximum(high - low, 0)
        before = np.cumsum(counts) - counts
        row = np.repeat(low - before, counts) + np.arange(counts.sum())
        column, size = np.repeat(holds.column, counts), np.repeat(holds.size, counts)
        constant = np.array(self.fixed_bytes, dtype=np.int64)[slots]
        np.add.at(constant, row[column < 0], size[column < 0])
        # Tensors of one op share a column: its coefficients are added up.
        keys, place = np.unique((row * columns + column)[column >= 0], return_inverse=True)
        sums = np.zeros(len(keys), dtype=np.int64)
        np.add.at(sums, place, size[column >= 0])
        row, column = keys // columns, keys % columns
        highest = constant.copy()
        np.add.at(highest, row, np.maximum(sums, 0))
        kept = np.flatnonzero(highest > self.budget_bytes)
        chosen = np.isin(row, kept)
        row, column, sums = np.searchsorted(kept, row[chosen]), column[chosen], sums[chosen]
        largest = np.ones(len(kept), dtype=np.int64)
        np.maximum.at(largest, row, np.abs(sums))
        unit = -(-largest // COEFFICIENT_LIMIT)
        limits = -(-(self.budget_bytes - constant[kept]) // unit)
        starts = np.searchsorted(row, np.arange(len(kept) + 1))
        # A negative coefficient belongs to a size that was also added to the constant, so it is rounded down too.
        return Rows(slots[kept], starts, column, sums // unit[row], limits)

    def surely_live(self, values: np.ndarray) -> np.ndarray:
        """The left-hand sides of all peak rows at once, constants included; `values` go by `column`."""
        holds = self.holds
        held = holds.size * np.append(values, 1.0)[holds.column]
        change = np.zeros(len(self.problem.ops) + 1)
        np.add.at(change, holds.first, held)
        np.add.at(change, holds.stop, -held)
        result: np.ndarray = np.cumsum(change[:-1]) + np.array(self.fixed_bytes)
        return result

    @cached_property
    def column(self) -> dict[str, int]:
        """The place of each variable, by name, in the program's own order."""
        return {v.name: j for j, v in enumerate(self.program.variables())}

    @cached_property
    def holds(self) -> Holds:
        """Constraint 4's terms, each over the slots that it stands for."""
        found: list[tuple[int, int, int, int]] = []
        for t in self._decided_tensors:
            if self.problem.tensors[t].bytes:
                stages = range(self.home[t], self._last_stage(t) + 1)
                found += (hold for k in stages for hold in self._holds_in(t, k))
        table = np.array([hold for hold in found if hold[0] < hold[1]], dtype=np.int64).reshape(-1, 4)
        return Holds(*(np.ascontiguousarray(table[:, c]) for c in range(4)))

    def _holds_in(self, t: int, k: int) -> Iterator[tuple[int, int, int, int]]:
        """Where tensor t is surely held in stage k, by which variable."""
        p, size, home = self.problem.producer[t], self.problem.tensors[t].bytes, self.home[t]
        first, end = (p + 1 if k == home else self.ends[k - 1] + 1), self.ends[k]
        readers = [r for r in self.problem.readers[t] if first <= r <= end]
        last = readers[-1] if readers else first - 1
        again = self.column[self.R[p, k].name]
        begin = first
        for stop in readers:  # at its readers it is counted as an input
            yield begin, stop, -1, size
            yield begin, stop, again, -size
            begin = stop + 1
        following = self.column[self.A[t, k + 1].name] if (t, k + 1) in self.A else None
        if k == home and following is not None:
            yield last + 1, end + 1, following, size
            yield last + 1, end, again, -size
        elif following is not None:
            if (t, k) in self.H:
                yield last + 1, end, self.column[self.H[t, k].name], size
            yield max(last + 1, end), end + 1, following, size

    def to_live(self, values: dict[str, float]) -> Live:
        """The recomputes of a solution, each right before its first reader of the stage."""
        live = Live(self.problem)
        slots = list(self.problem.required())
        for k in range(1, len(self.ends)):
            inside = [s for s in slots if self.stage[s] == k]
            chosen = [i for i in self._ops if (i, k) in self.R and values[self.R[i, k].name] > 0.5]
            place: dict[int, int] = {}
            for i in reversed(chosen):
                readers = [r for t in self.problem.ops[i].outputs for r in self.problem.readers[t]]
                first = self.problem.num_forward if k == self.stage[i] else 0
                at = [r for r in readers if self.stage[r] == k and r >= first]
                at += [place[r] for r in readers if r in place]
                place[i] = min(at, default=inside[-1])
            live.add_all((s, i) for i, s in sorted(place.items()))
        return live

    def values_of(self, live: Live) -> dict[str, float]:
        """The indicators of a plan: what it recomputes in which stage, and what it finds resident."""
        values: dict[str, float] = {v.name: 0.0 for group in (self.R, self.A, self.H, self.U) for v in group.values()}
        for slot, i in live.recomputes():
            variable = self.R.get((i, self.stage[slot]))
            if variable is not None:
                values[variable.name] = 1.0
        for (i, k), variable in self.U.items():
            variables = self._from_stage(i, k)
            values[variable.name] = max(values[v.name] for v in variables)
        for (t, k), variable in self.A.items():
            # The stage begins after the previous end slot, before anything of the next one.
            values[variable.name] = float(live.is_live(t, live.key(self.ends[k - 1] + 1, 0)))
        for (t, k), variable in self.H.items():
            following = values[self.A[t, k + 1].name] - values[self.R[self.problem.producer[t], k].name]
            values[variable.name] = max(0.0, following)
        return values

    @cached_property
    def _ops(self) -> list[int]:
        return [i for i in self.problem.forward if self.problem.ops[i].recomputable]

    @cached_property
    def _decided_tensors(self) -> list[int]:
        return [t for t, decided in enumerate(self.decided) if decided]

    def _is_decided(self, t: int) -> bool:
        p = self.problem.producer[t]
        return p < self.problem.num_forward and self.problem.ops[p].recomputable and t not in self.problem.pinned

    def _last_stage(self, t: int) -> int:
        last = self.reach.last_use[t]
        return self.stage[last] if last >= 0 else self.home[t]

    def _variables(self) -> None:
        for i in self._ops:
            first = self.stage[i]
            last = max((self._last_stage(t) for t in self.problem.ops[i].outputs), default=first)
            for k in range(first, last + 1 if self.reach.useful[i] else first + 1):
                self.R[i, k] = pulp.LpVariable(f"R{i}_{k}", 0, 1, pulp.LpInteger)
        for t in self._decided_tensors:
            last = self._last_stage(t)
            for k in range(self.home[t] + 1, last + 1):
                self.A[t, k] = pulp.LpVariable(f"A{t}_{k}", 0, 1, pulp.LpInteger)
                if k < last:
                    self.H[t, k] = pulp.LpVariable(f"H{t}_{k}", 0, 1)
        costs = {v: self.problem.ops[i].cost // self.cost_unit for (i, _), v in self.R.items()}
        self.program.setObjective(pulp.LpAffineExpression(costs))

    def _from_stage(self, i: int, k: int) -> list[pulp.LpVariable]:
        """R[i, l] over l >= k."""
        found = []
        while (i, k) in self.R:
            found.append(self.R[i, k])
            k += 1
        return found

    def _again(self, i: int, k: int) -> pulp.LpVariable | None:
        """U[i, k], or what stands for it; None where recomputing i from stage k on can be of no use."""
        return self.U.get((i, k), self.R.get((i, k)))

    def _add(self, terms: dict[pulp.LpVariable, int], sense: int, right: int) -> None:
        if time.monotonic() > self.deadline:
            raise TimeoutError("the program is too large to be built in time")
        self.program.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), sense, rhs=right))

    def _need(self) -> None:
        for t in self._decided_tensors:
            p = self.problem.producer[t]
            for k in dict.fromkeys(self.stage[r] for r in self._later_readers(t)):
                self._add({self.A[t, k]: 1, self.R[p, k]: 1}, pulp.LpConstraintGE, 1)

    def _later_readers(self, t: int) -> list[int]:
        """Required ops that read t in a later stage than the one it is first written in."""
        return [r for r in self.problem.readers[t] if self.stage[r] > self.home[t]]

    def _keep(self) -> None:
        for (t, k), held in self.H.items():
            recomputed = self.R[self.problem.producer[t], k]
            self._add({self.A[t, k + 1]: 1, held: -1, recomputed: -1}, pulp.LpConstraintLE, 0)
            self._add({held: 1, self.A[t, k]: -1}, pulp.LpConstraintLE, 0)

    def _closure(self) -> None:
        for (i, k), recomputed in self.R.items():
            for t in dict.fromkeys(self.problem.ops[i].inputs) if k > self.stage[i] else ():
                if self.decided[t]:
                    terms = {self.A[t, k]: 1, self.R[self.problem.producer[t], k]: 1, recomputed: -1}
                    self._add(terms, pulp.LpConstraintGE, 0)

    def _suffix(self) -> None:
        for i, k in self.R:
            variables = self._from_stage(i, k)
            if k > self.stage[i] and len(variables) > 1:
                self.U[i, k] = pulp.LpVariable(f"U{i}_{k}", 0, 1)
                self._add({self.U[i, k]: -1, **dict.fromkeys(variables, 1)}, pulp.LpConstraintGE, 0)
        for i, k in self.U:
            for t in dict.fromkeys(self.problem.ops[i].inputs):
                self._is_there(t, k, {self.U[i, k]: -1}, 0)
        for t in self._decided_tensors:
            last = max((self.stage[r] for r in self._later_readers(t)), default=0)
            for k in range(self.home[t] + 1, last):  # in stage `last` itself it is constraint 1
                self._is_there(t, k, {}, 1)

    def _is_there(self, t: int, k: int, terms: dict[pulp.LpVariable, int], right: int) -> None:
        """A[t, k] + U[prod(t), k] + terms >= right, for a tensor that may not be there."""
        again = self._again(self.problem.producer[t], k)
        if self.decided[t] and again is not None:
            self._add({self.A[t, k]: 1, again: 1, **terms}, pulp.LpConstraintGE, right)


def first_ends(problem: Problem, count: int) -> tuple[int, ...]:
    """The slot of each of `count` equal windows of the backward at which most bytes are needed whatever is kept."""
    fixed = StagedModel(problem, 0, (len(problem.ops) - 1,)).fixed_bytes
    first, last = problem.num_forward, len(problem.ops) - 1
    total = last + 1 - first
    ends = []
    for j in range(min(count, total)):
        window = range(first + total * j // count, first + total * (j + 1) // count)
        ends.append(max((s for s in window if not problem.ops[s].optional), key=lambda s: fixed[s], default=last))
    return tuple(sorted({*ends, last}))
