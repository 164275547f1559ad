"""Exact search for tiny problems: shortest path over (next required op, what is resident).

Covers every schedule there is: any op that may be recomputed, any number of times, anywhere, frees in any order.
A state is the next required op and a bit mask of resident tensors (with one more bit per optional op that has
run). The moves are: free a tensor, run the next required op, run an optional op right before an op that replays
it, recompute an op. Only the last kind costs anything. A tensor that nothing to come can read is freed before
anything else. With `budget_bytes` the cheapest path is found; without, the path of smallest peak. The search gives
up after a fixed amount of work, or at its deadline.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass

from .problem import Problem
from .schedule import Schedule, with_frees

MAX_TENSORS = 20
WORK_LIMIT = 400_000

State = tuple[int, int]


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
        optional = [i for i, op in enumerate(problem.ops) if op.optional]
        self.ran_bit = {p: 1 << (len(self.sizes) + j) for j, p in enumerate(optional)}
        self.dead = [self._dead(position) for position in range(len(self.required) + 1)]

    def _dead(self, position: int) -> int:
        """What nothing can read once the required op at `position` is next: neither it, a later one, nor a replay."""
        useful = self.pinned
        for i in self.required[position:]:
            useful |= self.reads[i]
        for i in reversed(self.required):  # an op is listed after those that write what it reads
            if self.problem.ops[i].recomputable and self.writes[i] & useful:
                useful |= self.replays[i]
        return ((1 << len(self.sizes)) - 1) & ~useful

    def resident(self, mask: int) -> int:
        """Bytes of a mask, static bytes included."""
        return self.problem.static_bytes + sum(size for t, size in enumerate(self.sizes) if mask >> t & 1)

    def moves(self, position: int, mask: int) -> Iterator[tuple[int, Move]]:
        """(next position, move) for everything that may happen."""
        if mask & self.dead[position]:
            yield position, Move(-1, mask & ~self.dead[position], 0, 0)
            return
        here = self.resident(mask)
        for t in range(len(self.sizes)):
            if mask >> t & 1 and not self.pinned >> t & 1:
                yield position, Move(-1, mask & ~(1 << t), 0, 0)
        following = self.required[position]
        if self.reads[following] & ~mask == 0:
            for move in self.runs(following, mask, here, 0):
                yield position + 1, move
        for t in self.problem.ops[following].replay_inputs:
            p = self.problem.producer[t]
            if p in self.ran_bit and not mask & self.ran_bit[p]:
                yield position, Move(p, mask | self.writes[p] | self.ran_bit[p], here + self.alloc[p], 0)
        for i in self.required[:position]:
            if self.problem.ops[i].recomputable and self.replays[i] & ~mask == 0:
                for move in self.runs(i, mask, here, self.problem.ops[i].cost):
                    yield position, move

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


def exact_schedule(
    problem: Problem, budget_bytes: int | None = None, deadline: float = float("inf")
) -> tuple[Schedule | None, bool]:
    """The best schedule of all, or None; and whether the search was complete.

    Args:
        budget_bytes: find the cheapest schedule within it; None: the one of smallest peak, then cheapest.
    """
    if len(problem.tensors) > MAX_TENSORS:
        return None, False
    search = _Search(problem)
    start: State = (0, 0)
    heap: list[tuple[int, int, int, int]] = [(0, 0, 0, 0)]
    parent: dict[State, tuple[State, int]] = {}
    best: dict[State, tuple[int, int]] = {start: (0, 0)}
    closed: set[State] = set()
    while heap:
        peak, cost, negative, mask = heapq.heappop(heap)
        state = (-negative, mask)
        if state in closed:
            continue
        closed.add(state)
        if len(closed) > WORK_LIMIT or (len(closed) % 256 == 0 and time.monotonic() > deadline):
            return None, False
        if state[0] == len(search.required):
            return with_frees(problem, _order(parent, state)), True
        for position, move in search.moves(*state):
            if budget_bytes is not None and move.moment_bytes > budget_bytes:
                continue
            label = (0 if budget_bytes is not None else max(peak, move.moment_bytes), cost + move.cost)
            target = (position, move.mask)
            if target not in closed and (target not in best or label < best[target]):
                best[target] = label
                parent[target] = (state, move.op)
                heapq.heappush(heap, (*label, -position, move.mask))
    return None, True


def _order(parent: dict[State, tuple[State, int]], state: State) -> list[int]:
    order = []
    while state in parent:
        state, op = parent[state]
        if op >= 0:
            order.append(op)
    return order[::-1]
