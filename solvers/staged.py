"""The integer program over stages: a relaxation that every schedule of the problem satisfies.

The required ops of the step, in order, are its slots; a recompute in slot s runs after slot s - 1 and before op s.
They are cut into stages 0..K by *end slots*, any of them: at an end slot everything that the stage recomputed has
already run, so what the next stage finds resident is surely live, and the peak row of that slot is exact except for
what dies in the stage. `end_slots` chooses them where memory is tightest: the forward is one stage, except for what
comes after its highest slot near its end, unless the forward alone exceeds the budget; then that part is cut, too.

Variables
    R[i, k]  op i is recomputed at least once in stage k                                 (binary)
    A[t, k]  tensor t is resident when stage k begins                                    (binary)
    H[t, k]  t is held through the whole of stage k                                      (in [0, 1])
    U[i, k, l]  op i is recomputed at least once in stages k to l, one of a few windows  (in [0, 1])
    Q[i, k]  op i is recomputed at least twice in stage k; in small programs alone       (binary)
  for forward ops that may be recomputed and for their outputs, where a later read can still profit from it.

Objective
    minimise sum cost[i] * (R[i, k] + Q[i, k])

Constraints
    1. need     A[t, k] + R[prod(t), k] >= 1           a required op of stage k reads t        (`_need`)
    2. closure  A[t, k] + R[prod(t), k] >= R[i, k]     i reads t, k after i's own stage        (`_closure`)
    3. keep     A[t, k+1] <= H[t, k] + R[prod(t), k],  H[t, k] <= A[t, k]                      (`_keep`)
    4. peak     at each slot s, bytes surely live <= budget                                     (`peak_rows`)
                  - what s reads and writes, its workspace, outputs of the step, backward tensors
                  - t is read later in the stage:       bytes[t] * (1 - R[prod(t), k])
                  - else, at the end slot of a stage:   bytes[t] * A[t, k+1]
                  - else:                               bytes[t] * H[t, k]
                  - where t is first written, k its stage, except for the end slot:
                                                        bytes[t] * (A[t, k+1] - R[prod(t), k])
                and while i is recomputed in stage k                                            (`peaks.Peaks.apart`)
                  - what i reads and writes, its workspace:     bytes * R[i, k]
                  - t was written in an earlier stage, i neither reads nor writes it:
                      t is read at the end slot of k:           bytes[t] * (1 - R[prod(t), k])
                      else:                                     bytes[t] * H[t, k]
                  - what is held at every slot of the stage at which i can run again; whether or not i runs, the
                    tensors held through the stage have to fit beside what any one slot of it needs, so where that is
                    more it is counted, and as much less with R[i, k]
    5. window   A[t, k] + U[prod(t), k, l] >= 1           a required op of stages k to l reads t (`_windows`)
                A[t, k] + U[prod(t), k, l] >= U[i, k, l]  i reads t
                U[i, k, l] <= sum of R[i, m] over k <= m <= l
    6. twice    Q[i, k] <= R[i, k]; what is held while i runs in stage k, or runs twice         (`solvers.twice`)
    7. crowd    where `windows` are asked for                                                   (`_crowd`)
                  H[t, k] = 0, R[prod(t), k] = 1, A[t, k+1] = 0 or A[t, k+1] <= R[prod(t), k]: constraint 4 counts t
                  by H[t, k], 1 - R[prod(t), k], A[t, k+1] or A[t, k+1] - R[prod(t), k] at a slot where t and what
                  every schedule holds exceed the budget
                  R[i, k] = 0: what is held while i runs exceeds it

Constraint 5 says nothing new of integers, but much of fractions: without it an op could be recomputed by halves in
two stages, each half from the same half of its inputs, and more stages would weaken the relaxation. What is resident
when stage k begins is all that stages k to l have to begin with, so it holds of any window what 1 and 2 say of one
stage. The windows end with the last stage; where `windows` are asked for, there are others of `LENGTHS` stages. Where
one stage of a window can use i, U[i, k, l] is R[i, k].

Constraint 7 says of fractions what 4 says of integers: what does not fit at a slot is not there by halves.

Each row holds for the indicators of *any* schedule that runs the required ops in this order, however often and
wherever it recomputes: 1-3 say that what is read was resident or written again, 4 counts a tensor only when it
cannot have been dropped (and with R[i, k] = 0 a run's row counts what is live at any one slot of the stage). So the
optimum, and any dual bound, bounds the added cost of all schedules from below. The converse is false - inside a stage
the relaxation may place a recompute both before and after a slot - so a solution becomes a schedule through `to_live`
and is judged by the simulator. More end slots make the relaxation tighter and slower.
"""

from __future__ import annotations

import math
import time
from itertools import pairwise

import numpy as np
import pulp

from .live import Live
from .peaks import Peaks, Rows
from .problem import Problem
from .stages import Stages
from .twice import Twice

LENGTHS = (2, 3, 4, 6, 8, 12, 16)


class StagedModel(Stages):
    """The program for one choice of end slots. `program` is the PuLP problem; peak rows are added by the caller.

    With a `cost_limit`, what a plan at hand costs, ops that alone cost more are not recomputed: the optimum is that of
    all schedules that cost no more than the limit, and no other schedule costs less.

    Raises:
        TimeoutError: the deadline passed while the program was being built.
    """

    def __init__(
        self,
        problem: Problem,
        budget_bytes: int,
        ends: tuple[int, ...],
        deadline: float = math.inf,
        cost_limit: float = math.inf,
        *,
        windows: bool = False,
    ) -> None:
        super().__init__(problem, budget_bytes, ends, cost_limit)
        self.deadline = deadline
        self.peaks = Peaks(self)
        self._need()
        self._keep()
        self._closure()
        self._windows(LENGTHS if windows else ())
        if windows:
            self._crowd()
        for key, twice in self.Q.items():
            self._add({twice: 1, self.R[key]: -1}, pulp.LpConstraintLE, 0)
        self.twice = Twice(self, self.peaks)

    def peak_rows(self, moments: np.ndarray) -> Rows:
        """Constraint 4 at some moments (ascending), without the rows that no solution can break."""
        return self.peaks.rows(moments)

    def surely_live(self, values: np.ndarray) -> np.ndarray:
        """The left-hand sides of all peak rows at once, constants included; `values` go by `column`."""
        return self.peaks.left_sides(values)

    def to_live(self, values: dict[str, float], threshold: float = 0.5) -> Live:
        """The recomputes of a solution, each right before its first reader of the stage; fractions above the threshold
        count as ones.

        In the stage of its own first run an op runs again after the longest time without a reader.
        """
        live = Live(self.problem)
        slots = list(self.problem.required())
        for k, end in enumerate(self.ends):
            last = max(s for s in slots if self.stage[s] == k) if end not in slots else end
            chosen = [i for i in self.recomputable if (i, k) in self.R and values[self.R[i, k].name] > threshold]
            place: dict[int, int] = {}
            for i in reversed(chosen):
                outputs = self.problem.ops[i].outputs
                readers = [r for t in outputs for r in self.problem.readers[t]]
                at = [r for r in readers if self.stage[r] == k] + [place[r] for r in readers if r in place]
                kept = any((t, k + 1) in self.A and values[self.A[t, k + 1].name] > threshold for t in outputs)
                if k == self.stage[i]:
                    place[i] = _after_longest_gap([i, *at, *([last] if kept or not at else [])])
                else:
                    place[i] = min(at, default=last)
            live.add_all((s, i) for i, s in sorted(place.items()) if s > i)
        return live

    def values_of(self, live: Live) -> dict[str, float]:
        """The indicators of a plan: what it recomputes in which stage, and what it finds resident."""
        values: dict[str, float] = {
            v.name: 0.0 for group in (self.R, self.A, self.H, self.U, self.Q) for v in group.values()
        }
        for slot, i in live.recomputes():
            variable = self.R.get((i, self.stage[slot]))
            if variable is not None:
                if (twice := self.Q.get((i, self.stage[slot]))) is not None:
                    values[twice.name] = values[variable.name]
                values[variable.name] = 1.0
        for (i, k, last), variable in self.U.items():
            values[variable.name] = max(values[v.name] for v in self._within(i, k, last))
        for (t, k), variable in self.A.items():
            # The stage begins after the previous end slot, before anything of the next one.
            values[variable.name] = float(live.is_live(t, live.key(self.ends[k - 1] + 1, 0)))
        for (t, k), variable in self.H.items():
            following = values[self.A[t, k + 1].name] - values[self.R[self.problem.producer[t], k].name]
            values[variable.name] = max(0.0, following)
        return values

    def _within(self, i: int, k: int, last: int) -> list[pulp.LpVariable]:
        """R[i, l] over k <= l <= last."""
        return [self.R[i, stage] for stage in range(k, last + 1) if (i, stage) in self.R]

    def _add(self, terms: dict[pulp.LpVariable, int], sense: int, right: int) -> None:
        if time.monotonic() > self.deadline:
            raise TimeoutError("the program is too large to be built in time")
        self.program.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), sense, rhs=right))

    def _need(self) -> None:
        for t in self.decided_tensors:
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

    def _windows(self, lengths: tuple[int, ...]) -> None:
        """Constraint 5 for windows of some lengths from every stage, and for those that end with the last."""
        last = len(self.ends) - 1
        wide = {k: sorted({min(k + n - 1, last) for n in (*lengths, last + 1)} - {k}) for k in range(1, last + 1)}
        for i, k in self.R:
            for end in wide[k] if k > self.stage[i] else ():
                runs = self._within(i, k, end)
                if len(runs) > 1:
                    again = self.U[i, k, end] = self._variable(f"U{i}_{k}_{end}", 0, 1)
                    self._add({again: -1, **dict.fromkeys(runs, 1)}, pulp.LpConstraintGE, 0)
        for (i, k, end), again in self.U.items():
            for t in dict.fromkeys(self.problem.ops[i].inputs):
                self._is_there(t, k, end, {again: -1}, 0)
        for t in self.decided_tensors:
            read = sorted({self.stage[r] for r in self._later_readers(t)})
            for k in range(self.home[t] + 1, max(read, default=0)):
                before = k  # constraint 1 is that of one stage; of two windows the narrower says more
                for end in wide[k]:
                    if any(before < stage <= end for stage in read):
                        self._is_there(t, k, end, {}, 1)
                    before = end

    def _is_there(self, t: int, k: int, end: int, terms: dict[pulp.LpVariable, int], right: int) -> None:
        """A[t, k] + U[prod(t), k, end] + terms >= right, for a tensor that may not be there."""
        p = self.problem.producer[t]
        if self.decided[t]:
            again = self.U[p, k, end] if (p, k, end) in self.U else self._within(p, k, end)[0]
            self._add({self.A[t, k]: 1, again: 1, **terms}, pulp.LpConstraintGE, right)

    def _crowd(self) -> None:
        """Constraint 7."""
        for variable, alone in zip(self.R.values(), self.peaks.alone, strict=True):
            if alone > self.budget_bytes:
                variable.upBound = 0
        variables = self.program.variables()
        for column, less in self.peaks.crowded():
            if column < 0:
                self._add({variables[less]: 1}, pulp.LpConstraintGE, 1)
            elif less < 0:
                variables[column].upBound = 0
            else:
                self._add({variables[column]: 1, variables[less]: -1}, pulp.LpConstraintLE, 0)


def _after_longest_gap(slots: list[int]) -> int:
    """Of two or more slots, the one that most lies before."""
    slots = sorted(slots)
    return max(pairwise(slots), key=lambda pair: pair[1] - pair[0])[1]
