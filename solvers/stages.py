"""The variables of the staged program (`solvers.staged`), and what there is to decide about: the stages themselves."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

import pulp

from .problem import Problem

COEFFICIENT_LIMIT = 1 << 20
MOST_TWICE = 400


@dataclass(frozen=True)
class Reach:
    """What recomputing can still be good for.

    Attributes:
        last_use: for each tensor the last slot that can profit from it, through recomputes too; -1 for none.
        useful: for each op whether recomputing it in the backward can be of use.
    """

    last_use: tuple[int, ...]
    useful: tuple[bool, ...]


def cost_unit(problem: Problem, cost_limit: float = math.inf) -> int:
    """What the program counts costs in: the common divisor of those within the limit, or a multiple of it that keeps
    coefficients small.
    """
    costs = [op.cost for op in problem.ops if op.recomputable and op.cost <= cost_limit]
    divisor = math.gcd(*costs) or 1
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


class Stages:
    """The program's variables and objective for one choice of end slots; who derives from it adds constraints.

    Attributes:
        decided: for each tensor, whether the program decides where it is kept.
        stage: the stage of each slot.
        home: the stage in which each tensor is first written.
    """

    def __init__(
        self, problem: Problem, budget_bytes: int, ends: tuple[int, ...], cost_limit: float = math.inf
    ) -> None:
        self.problem = problem
        self.cost_limit = cost_limit
        self.budget_bytes = budget_bytes
        self.decided = [self._is_decided(t) for t in range(len(problem.tensors))]
        self.ends = ends
        self.reach = reach(problem, self.ends[0])
        self.stage = [bisect_left(self.ends, s) for s in range(len(problem.ops))]
        self.home = [self.stage[p] for p in problem.producer]
        self.R: dict[tuple[int, int], pulp.LpVariable] = {}
        self.A: dict[tuple[int, int], pulp.LpVariable] = {}
        self.H: dict[tuple[int, int], pulp.LpVariable] = {}
        self.U: dict[tuple[int, int, int], pulp.LpVariable] = {}
        self.Q: dict[tuple[int, int], pulp.LpVariable] = {}
        self.cost_unit = cost_unit(problem, cost_limit)
        self.program = pulp.LpProblem("recompute", pulp.LpMinimize)
        # What newer versions of PuLP have in place of the constructor warns of nothing.
        self._variable = getattr(self.program, "add_variable", pulp.LpVariable)
        self._variables()

    @cached_property
    def column(self) -> dict[str, int]:
        """The place of each variable, by name, in the program's own order."""
        return {v.name: j for j, v in enumerate(self.program.variables())}

    @cached_property
    def recomputable(self) -> list[int]:
        return [i for i in self.problem.forward if self.problem.ops[i].recomputable]

    @cached_property
    def decided_tensors(self) -> list[int]:
        return [t for t, decided in enumerate(self.decided) if decided]

    def _is_decided(self, t: int) -> bool:
        p = self.problem.producer[t]
        return p < self.problem.num_forward and self.problem.ops[p].recomputable and t not in self.problem.pinned

    def last_stage(self, t: int) -> int:
        last = self.reach.last_use[t]
        return self.stage[last] if last >= 0 else self.home[t]

    def _variables(self) -> None:
        costs = [op.cost for op in self.problem.ops]
        for i in self.recomputable:
            first = self.stage[i]
            last = max((self.last_stage(t) for t in self.problem.ops[i].outputs), default=first)
            for k in range(first, last + 1 if self.reach.useful[i] else first + 1):
                self.R[i, k] = self._variable(f"R{i}_{k}", 0, int(costs[i] <= self.cost_limit), pulp.LpInteger)
        for t in self.decided_tensors:
            last = self.last_stage(t)
            for k in range(self.home[t] + 1, last + 1):
                self.A[t, k] = self._variable(f"A{t}_{k}", 0, 1, pulp.LpInteger)
                if k < last:
                    self.H[t, k] = self._variable(f"H{t}_{k}", 0, 1)
        again = [(i, k) for i, k in self.R if k > self.stage[i]] if len(self.R) <= MOST_TWICE else []
        self.Q = {key: self._variable(f"Q{key[0]}_{key[1]}", 0, 1, pulp.LpInteger) for key in again}
        runs = (*self.R.items(), *self.Q.items())
        prices = {v: int(min(costs[i], self.cost_limit)) // self.cost_unit for (i, _), v in runs}
        self.program.setObjective(pulp.LpAffineExpression(prices))
