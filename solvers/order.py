"""Another order of the backward's ops that holds less memory at no cost: the order is part of a Problem.

Autograd runs the gradient towards the input of a layer before the gradient of its weight; the other way round, the
layer's saved input is let go before the next gradient is allocated. `reordered` finds such exchanges by bubbling:
two neighbours that do not read each other are exchanged where what every schedule holds while they run
(`solvers.bounds`) peaks lower, or as high with less in all. Everything that is proved about a Problem is proved for
its own order, so this happens before solving. `solvers.anneal` looks further, and moves forward ops too.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from .bounds import floor_bytes
from .problem import Problem
from .schedule import plain_order, with_frees
from .simulate import simulate

MAX_ROUNDS = 50


def backward_order(problem: Problem, movable: Collection[int]) -> tuple[int, ...]:
    """An order of all ops that peaks no higher than the present one, with every schedule's floor no higher.

    Args:
        movable: backward ops that may change places with each other; all others stay where they are.
    """
    order = _Bubbles(problem, frozenset(movable)).settle()
    after = in_order(problem, order)
    if plain_peak(after) > plain_peak(problem) or floor_bytes(after) > floor_bytes(problem):
        return tuple(range(len(problem.ops)))
    return order


def in_order(problem: Problem, order: tuple[int, ...]) -> Problem:
    """The same step with its ops in another order; tensors keep their indices."""
    return replace(problem, ops=tuple(problem.ops[i] for i in order))


def plain_peak(problem: Problem) -> int:
    """The peak of the step without recompute."""
    return simulate(problem, with_frees(problem, plain_order(problem))).peak_bytes


class _Bubbles:
    def __init__(self, problem: Problem, movable: frozenset[int]) -> None:
        self.problem, self.movable = problem, movable
        self.order = list(range(len(problem.ops)))
        self.place = list(self.order)
        self.inputs = [tuple(dict.fromkeys(op.inputs)) for op in problem.ops]
        self.outputs = [frozenset(op.outputs) for op in problem.ops]
        self.sizes = [t.bytes for t in problem.tensors]
        # Held by every schedule between its writing and its last reading.
        self.held = [t in problem.pinned or not problem.ops[p].recomputable for t, p in enumerate(problem.producer)]
        self.own = [self._own(i) for i in range(len(problem.ops))]

    def settle(self) -> tuple[int, ...]:
        """Exchange neighbours until nothing is gained."""
        for _ in range(MAX_ROUNDS):
            gained = [k for k in range(self.problem.num_forward, len(self.order) - 1) if self._exchange(k)]
            if not gained:
                break
        return tuple(self.order)

    def _exchange(self, k: int) -> bool:
        a, b = self.order[k], self.order[k + 1]
        if a not in self.movable or b not in self.movable or self.outputs[a].intersection(self.inputs[b]):
            return False
        now = self.own[a], self._left(a, b) + self.own[b]
        then = self.own[b], self._left(b, a) + self.own[a]
        if (max(then), sum(then)) >= (max(now), sum(now)):
            return False
        self.order[k], self.order[k + 1] = b, a
        self.place[a], self.place[b] = k + 1, k
        return True

    def _own(self, i: int) -> int:
        """Bytes above what is held anyway while op i runs."""
        op = self.problem.ops[i]
        read = sum(self.sizes[t] for t in self.inputs[i] if not self.held[t])
        taken = self.sizes[op.reuse[0]] if op.reuse else 0
        return read + op.workspace + sum(self.sizes[t] for t in op.outputs) - taken

    def _left(self, i: int, other: int) -> int:
        """Bytes held more after op i than before, if it runs right before its neighbour `other`."""
        problem = self.problem
        written = sum(self.sizes[t] for t in self.outputs[i] if t in problem.pinned or problem.readers[t])
        ends = (
            t for t in self.inputs[i]
            if self.held[t] and t not in problem.pinned and other not in problem.readers[t]
            and max(self.place[r] for r in problem.readers[t]) <= max(self.place[i], self.place[other])
        )  # fmt: skip
        return written - sum(self.sizes[t] for t in ends)
