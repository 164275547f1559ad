"""Another order of a whole step that peaks lower without recompute: simulated annealing over topological orders.

One move takes an op out of the order and puts it back elsewhere between what it reads and what reads it. What is
annealed is a norm of the memory curve that is close to its maximum and yet sees every high place. Forward ops stay in
the forward, and ops that may not move keep their order among each other.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator
from itertools import pairwise

import numpy as np

from .bounds import floor_bytes
from .order import in_order, plain_peak
from .problem import Problem

NORM = 20
TEMPERATURES = (0.5, 0.1, 0.02)
COOLING = 40.0
STEPS = 100_000
WORK = 50_000_000


def lighter_order(problem: Problem, movable: Collection[int], *, steps: int = STEPS, seed: int = 0) -> tuple[int, ...]:
    """An order of all ops that peaks no higher than the present one, with every schedule's floor no higher.

    Args:
        movable: ops that may go anywhere between what they read and what reads them.
        steps: moves tried at each of the starting temperatures; fewer for more than 500 ops.
    """
    annealing = _Annealing(problem, frozenset(movable), random.Random(seed))
    for temperature in TEMPERATURES if movable else ():
        annealing.run(min(steps, WORK // len(problem.ops)), temperature)
    after = in_order(problem, annealing.best)
    if plain_peak(after) >= plain_peak(problem) or floor_bytes(after) > floor_bytes(problem):
        return tuple(range(len(problem.ops)))
    return annealing.best


class _Annealing:
    def __init__(self, problem: Problem, movable: frozenset[int], rng: random.Random) -> None:
        self.problem, self.rng = problem, rng
        self.candidates = sorted(i for i in movable if not problem.ops[i].optional)
        edges = list(dict.fromkeys(_edges(problem, frozenset(self.candidates))))
        self.before: list[list[int]] = [[] for _ in problem.ops]
        self.after: list[list[int]] = [[] for _ in problem.ops]
        for a, b in edges:
            self.before[b].append(a)
            self.after[a].append(b)
        counted = [not problem.ops[p].optional for p in problem.producer]
        self.sizes = np.array([t.bytes * c for t, c in zip(problem.tensors, counted, strict=True)], dtype=float)
        self.workspace = np.array([op.workspace * (not op.optional) for op in problem.ops], dtype=float)
        self.producer = np.array(problem.producer, dtype=np.int64)
        self.read = [t for t, readers in enumerate(problem.readers) if readers and t not in problem.pinned]
        self.readers = np.array([r for t in self.read for r in problem.readers[t]], dtype=np.int64)
        counts = [len(problem.readers[t]) for t in self.read]
        self.starts = np.cumsum([0, *counts[:-1]]) if counts else np.zeros(0, dtype=np.int64)
        self.pinned = np.array(sorted(problem.pinned), dtype=np.int64)
        self.order = list(range(len(problem.ops)))
        self.place = np.arange(len(problem.ops))
        self.curve = self._curve()
        self.scale = max(1.0, float(self.curve.max(initial=0)))
        self.best, self.lowest = tuple(self.order), float(self.curve.max(initial=0))

    def run(self, steps: int, temperature: float) -> None:
        """Anneal from the best order so far."""
        self.order = list(self.best)
        self.place[self.order] = np.arange(len(self.order))
        energy = self._energy(self._curve())
        for step in range(steps):
            move = self._draw()
            if move is None:
                continue
            self._apply(*move)
            curve = self._curve()
            after = self._energy(curve)
            worse = after / energy - 1
            if worse > 0 and self.rng.random() >= math.exp(-worse / (temperature * COOLING ** (-step / steps))):
                self._apply(*reversed(move))
                continue
            energy = after
            if (peak := float(curve.max())) < self.lowest:
                self.best, self.lowest = tuple(self.order), peak

    def _draw(self) -> tuple[int, int] | None:
        """A place and another to which its op may go."""
        i = self.candidates[self.rng.randrange(len(self.candidates))]
        now, forward = int(self.place[i]), self.problem.num_forward
        first = max((int(self.place[j]) + 1 for j in self.before[i]), default=0)
        last = min((int(self.place[j]) - 1 for j in self.after[i]), default=len(self.order) - 1)
        first, last = (first, min(last, forward - 1)) if i < forward else (max(first, forward), last)
        there = self.rng.randint(first, last)
        return None if there == now else (now, there)

    def _apply(self, now: int, there: int) -> None:
        self.order.insert(there, self.order.pop(now))
        first, stop = min(now, there), max(now, there) + 1
        self.place[self.order[first:stop]] = np.arange(first, stop)

    def _curve(self) -> np.ndarray:
        """Bytes live at each place."""
        n, birth = len(self.order), self.place[self.producer]
        last = birth.copy()
        if len(self.starts):
            last[self.read] = np.maximum.reduceat(self.place[self.readers], self.starts)
        last[self.pinned] = n - 1
        change = np.bincount(birth, self.sizes, n) - np.bincount(last + 1, self.sizes, n + 1)[:n]
        curve: np.ndarray = np.cumsum(change) + self.workspace[self.order]
        return curve

    def _energy(self, curve: np.ndarray) -> float:
        return float(((curve / self.scale) ** NORM).sum()) + 1e-12


def _edges(problem: Problem, movable: frozenset[int]) -> Iterator[tuple[int, int]]:
    """(earlier, later): what is read, and the order of those that may not move."""
    for i, op in enumerate(problem.ops):
        yield from ((problem.producer[t], i) for t in (*op.inputs, *op.replay_inputs))
    yield from pairwise(i for i in range(len(problem.ops)) if i not in movable)
