"""Exact search for small problems: shortest path over (next required op, what is resident).

Covers every schedule there is: any op that may be recomputed, any number of times, anywhere, frees in any order.
A state is the next required op and a bit mask of resident tensors (with one more bit per optional op that has
run). The moves are: free a tensor, run the next required op, run an optional op right before an op that replays
it, recompute an op. Only the last kind costs anything.

What cannot be part of a best path is left out. A tensor that nothing to come can read is freed before anything else.
Where every op that may run fits as things are, freeing can wait. A tensor that a required op to come reads is resident
or is written again, and what writes it reads what is resident or written again in turn: the ops of that closure run at
least once more each, whatever else does, so their cost is to come (A*; Hart, Nilsson and Raphael 1968), and where one
of them may not run again the state leads nowhere.

With `budget_bytes` the cheapest path is found; without, a path of smallest peak. The search gives up after a fixed
amount of work, or at its deadline; what it has ruled out by then is proved.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

from .bounds import floor_bytes
from .problem import Problem
from .schedule import Schedule, with_frees

MAX_TENSORS = 20
MOST_TENSORS = 64
WORK_LIMIT = 400_000
LESS_WORK = 50_000

State = tuple[int, int]


@dataclass(frozen=True)
class Found:
    """What a search knows at its end.

    Attributes:
        schedule: the best of all, or None.
        complete: there is no other; with None, none fits.
        bound: no schedule within the budget costs less; without a budget, none peaks lower.
    """

    schedule: Schedule | None
    complete: bool
    bound: int


@dataclass(frozen=True)
class Move:
    """One step of the search; `op` is -1 for a free."""

    op: int
    mask: int
    moment_bytes: int
    cost: int


class _Search:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.required = list(problem.required())
        self.reads = [_mask(op.inputs) for op in problem.ops]
        self.replays = [_mask((*op.inputs, *op.replay_inputs)) for op in problem.ops]
        self.writes = [_mask(op.outputs) for op in problem.ops]
        self.alloc = [op.workspace + sum(problem.tensors[t].bytes for t in op.outputs) for op in problem.ops]
        self.pinned = _mask(problem.outputs)
        self.sizes = [t.bytes for t in problem.tensors]
        self.all = (1 << len(self.sizes)) - 1
        optional = [i for i, op in enumerate(problem.ops) if op.optional]
        self.ran_bit = {p: 1 << (len(self.sizes) + j) for j, p in enumerate(optional)}
        self.dead: list[int] = []
        self.kept: list[int] = []
        self.needed: list[int] = []
        for position in range(len(self.required) + 1):
            self._look_ahead(position)

    def _look_ahead(self, position: int) -> None:
        """What nothing to come can read once the required op at `position` is next, what must not be freed any more,
        and what a required op to come reads of those before.
        """
        read = 0
        for i in self.required[position:]:
            read |= self.reads[i]
        useful = self.pinned | read
        for i in reversed(self.required):  # an op is listed after those that write what it reads
            if self.problem.ops[i].recomputable and self.writes[i] & useful:
                useful |= self.replays[i]
        written = once = 0
        for i in self.required[:position]:
            written |= self.writes[i]
            once |= 0 if self.problem.ops[i].recomputable else self.writes[i]
        weightless = _mask(tuple(t for t, size in enumerate(self.sizes) if not size))
        self.dead.append(self.all & ~useful)
        self.kept.append(self.pinned | weightless | read & once)
        self.needed.append(read & written)

    def resident(self, mask: int) -> int:
        """Bytes of a mask, static bytes included."""
        return self.problem.static_bytes + sum(self.sizes[t] for t in _bits(mask & self.all))

    def to_come(self, position: int, mask: int) -> float:
        """The least that is still to be paid; infinite where the step cannot be ended from here."""
        cost, missing, written = 0, self.needed[position] & ~mask, 0
        while missing:
            op = self.problem.producer[(missing & -missing).bit_length() - 1]
            if not self.problem.ops[op].recomputable:
                return math.inf
            cost += self.problem.ops[op].cost
            written |= self.writes[op]
            missing = (missing | self.replays[op] & ~mask) & ~written
        return cost

    def moves(self, position: int, mask: int, room_bytes: float) -> Iterator[tuple[int, Move]]:
        """(next position, move) for everything worth doing within a budget that leaves `room_bytes`."""
        here, following, blocked = self.resident(mask), self.required[position], False
        if self.reads[following] & ~mask == 0:
            for move in self.runs(following, mask, here, 0):
                blocked |= move.moment_bytes > room_bytes
                yield position + 1, move
        for t in self.problem.ops[following].replay_inputs:
            p = self.problem.producer[t]
            if p in self.ran_bit and not mask & self.ran_bit[p]:
                moment = here + self.alloc[p]
                blocked |= moment > room_bytes
                yield position, Move(p, mask | self.writes[p] | self.ran_bit[p], moment, 0)
        for i in self.required[:position]:
            wanted = self.writes[i] & ~mask & ~self.dead[position]
            if wanted and self.problem.ops[i].recomputable and self.replays[i] & ~mask == 0:
                for move in self.runs(i, mask, here, self.problem.ops[i].cost):
                    blocked |= move.moment_bytes > room_bytes
                    yield position, move
        for t in _bits(mask & self.all & ~self.kept[position]) if blocked else ():
            yield position, Move(-1, mask & ~(1 << t), 0, 0)

    def runs(self, op: int, mask: int, here: int, cost: int) -> Iterator[Move]:
        """Running `op` with `here` bytes resident: into new memory, or into that of the input it takes over."""
        yield Move(op, mask | self.writes[op], here + self.alloc[op], cost)
        for t in self.problem.ops[op].reuse:
            if self.pinned >> t & 1 or mask >> self.problem.ops[op].outputs[0] & 1:
                continue
            given = mask & ~(1 << t)
            yield Move(op, given | self.writes[op], here + self.alloc[op] - self.sizes[t], cost)


def _mask(tensors: tuple[int, ...]) -> int:
    mask = 0
    for t in tensors:
        mask |= 1 << t
    return mask


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def exact_schedule(problem: Problem, budget_bytes: int | None = None, deadline: float = math.inf) -> Found:
    """The best schedule of all.

    Args:
        budget_bytes: find the cheapest schedule within it; None: one of smallest peak.
    """
    floor = floor_bytes(problem)
    if len(problem.tensors) > MOST_TENSORS:
        return Found(None, False, floor if budget_bytes is None else 0)
    if budget_bytes is not None and floor > budget_bytes:
        return Found(None, True, 0)
    return _Run(_Search(problem), budget_bytes, floor).search(deadline)


class _Run:
    """The search for one budget, or for the smallest."""

    def __init__(self, search: _Search, budget_bytes: int | None, floor: int) -> None:
        self.states, self.budget_bytes, self.floor = search, budget_bytes, floor
        self.parent: dict[State, tuple[State, int]] = {}
        self.best: dict[State, tuple[float, float]] = {}
        self.heap: list[tuple[float, float, float, int, int]] = []
        self.work = WORK_LIMIT if len(search.sizes) <= MAX_TENSORS else LESS_WORK

    def search(self, deadline: float) -> Found:
        states, closed, bound = self.states, set[State](), 0
        self._reach(0, 0, self.floor, 0)
        while self.heap:
            first, *_, negative, mask = heapq.heappop(self.heap)
            state = (-negative, mask)
            if state in closed:
                continue
            closed.add(state)
            bound = max(bound, int(first))
            if len(closed) > self.work or (len(closed) % 256 == 0 and time.monotonic() > deadline):
                return Found(None, False, bound)
            if state[0] == len(states.required):
                return Found(with_frees(states.problem, _order(self.parent, state)), True, bound)
            peak, cost = self.best[state]
            room = peak if self.budget_bytes is None else self.budget_bytes
            for position, move in states.moves(*state, room):
                if self.budget_bytes is None or move.moment_bytes <= self.budget_bytes:
                    after = position, move.mask & ~states.dead[position]
                    if after not in closed:
                        self._reach(*after, max(peak, move.moment_bytes), cost + move.cost, state, move.op)
        return Found(None, True, bound)

    def _reach(
        self, position: int, mask: int, peak: float, cost: float, before: State | None = None, op: int = -1
    ) -> None:
        """A state reached by a path of that peak and cost: kept where no path so far is as good."""
        label = (peak, cost) if self.budget_bytes is None else (0, cost)
        state = position, mask
        if state in self.best and self.best[state] <= label:
            return
        total = cost + self.states.to_come(position, mask)
        if math.isinf(total):
            return
        self.best[state] = label
        if before is not None:
            self.parent[state] = before, op
        keys = (peak, -position, total) if self.budget_bytes is None else (total, -position, cost)
        heapq.heappush(self.heap, (*keys, -position, mask))


def _order(parent: dict[State, tuple[State, int]], state: State) -> list[int]:
    order = []
    while state in parent:
        state, op = parent[state]
        if op >= 0:
            order.append(op)
    return order[::-1]
