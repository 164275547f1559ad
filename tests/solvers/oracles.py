"""What the solvers are judged by: a naive replayer, and brute force over all schedules of a tiny problem.

Neither uses `simulate` or `with_frees`; both read the rules from `Problem`'s documentation only.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations, takewhile

from solvers.problem import Op, Problem
from solvers.schedule import Schedule


class Broken(Exception):
    """The naive replayer met a schedule that the rewritten program could not execute."""


@dataclass(frozen=True)
class Replay:
    peak_bytes: int
    added_cost: int
    resident_bytes: tuple[int, ...]
    moment_bytes: tuple[int, ...]


def replay(problem: Problem, schedule: Schedule) -> Replay:
    """Execute a schedule on a dict of buffers, adding all of them up anew at every step."""
    buffers: dict[int, int] = {}
    given: set[int] = set()
    runs: Counter[int] = Counter()
    first_runs: list[int] = []
    resident, moments = [], []

    def held() -> int:
        return problem.static_bytes + sum(buffers.values())

    for position, (kind, index) in enumerate(schedule):
        if kind == "free":
            if index not in buffers and index not in given:
                raise Broken(f"frees {problem.tensors[index].name}")
            if index in problem.outputs:
                raise Broken(f"frees {problem.tensors[index].name}, which is handed out")
            given.discard(index) if index in given else buffers.pop(index)
            moments.append(held())
        else:
            op = problem.ops[index]
            runs[index] += 1
            if runs[index] == 1:
                first_runs.append(index)
            if runs[index] == 2 and not op.recomputable:
                raise Broken(f"runs {op.name} twice")
            missing = [t for t in _reads(op, runs[index] > 1) if t not in buffers]
            if missing:
                raise Broken(f"{op.name} misses {problem.tensors[missing[0]].name}")
            fresh = {t: problem.tensors[t].bytes for t in op.outputs}
            taken = [t for t in op.reuse if t in _freed_next(schedule, position)][:1]
            if taken and op.outputs[0] not in buffers:
                given.add(taken[0])  # in place: the buffer changes hands, its free is a formality
                del buffers[taken[0]]
            moments.append(held() + op.workspace + sum(fresh.values()))
            buffers = fresh | buffers
        resident.append(held())

    left_out = [i for i, op in enumerate(problem.ops) if op.optional and not runs[i]]
    if first_runs != [i for i in range(len(problem.ops)) if i not in left_out]:
        raise Broken(f"ops ran for the first time in the order {first_runs}")
    if not set(problem.outputs) <= set(buffers):
        raise Broken("an output is gone")
    added = sum(problem.ops[i].cost * (count - 1) for i, count in runs.items())
    return Replay(max([problem.static_bytes, *moments]), added, tuple(resident), tuple(moments))


def _freed_next(schedule: Schedule, position: int) -> list[int]:
    """Tensors freed between the compute at `position` and the next one."""
    rest = schedule[position + 1 :]
    return [index for kind, index in takewhile(lambda step: step.kind == "free", rest)]


def _reads(op: Op, again: bool) -> tuple[int, ...]:
    return op.inputs + op.replay_inputs if again else op.inputs


@dataclass(frozen=True)
class Frontier:
    """Every worthwhile trade of a problem: `(added_cost, peak_bytes)`, cost rising, peak falling."""

    points: tuple[tuple[int, int], ...]

    @property
    def minimum_bytes(self) -> int:
        """The smallest peak of any schedule."""
        return self.points[-1][1]

    def best(self, budget_bytes: int) -> int | None:
        """The least added cost within a budget, or None if nothing fits."""
        return next((cost for cost, peak in self.points if peak <= budget_bytes), None)


def brute_force(problem: Problem, *, from_op: int = 0, to_op: int | None = None) -> Frontier:
    """All schedules of a tiny problem, as the frontier of added cost against peak.

    A shortest-path search over states `(required ops run, tensors live)` with two criteria. From a state: free a
    live tensor that is not an output, execute again an op that has run, or run the next required op, with or without
    the optional ops whose output it may need for a replay later; an in-place op may let its input go as it runs.
    Labels leave the heap by rising cost, so a label matters only if its peak is below every peak its state was
    left with before.

    Args:
        from_op: ops are executed again only once this op is the next to run (`num_forward`: not in the forward).
        to_op: ... and only while the next required op is at most this one.
    """
    search = _Search(problem, from_op, len(problem.ops) if to_op is None else to_op)
    points: list[tuple[int, int]] = []
    lowest: dict[tuple[int, int], int] = {}
    heap = [(0, problem.static_bytes, 0, 0)]
    while heap:
        cost, peak, position, live = heapq.heappop(heap)
        if lowest.get((position, live), peak + 1) <= peak:
            continue
        lowest[position, live] = peak
        if position == len(search.required):
            if not points or peak < points[-1][1]:
                points.append((cost, peak))
            continue
        for added, moment, then, after in search.moves(position, live):
            label = (cost + added, max(peak, moment), then, after)
            if lowest.get((then, after), label[1] + 1) > label[1]:
                heapq.heappush(heap, label)
    return Frontier(tuple(points))


class _Search:
    def __init__(self, problem: Problem, from_op: int, to_op: int) -> None:
        self.problem, self.from_op, self.to_op = problem, from_op, to_op
        self.required = [i for i, op in enumerate(problem.ops) if not op.optional]
        self.first_reads = [_mask(op.inputs) for op in problem.ops]
        self.second_reads = [_mask(op.inputs + op.replay_inputs) for op in problem.ops]
        self.writes = [_mask(op.outputs) for op in problem.ops]
        self.size = [sum(problem.tensors[t].bytes for t in op.outputs) + op.workspace for op in problem.ops]
        self.outputs = _mask(problem.outputs)
        self.useful = [self._useful(position) | self.outputs for position in range(len(self.required) + 1)]
        self.weightless = _mask(t for t, tensor in enumerate(problem.tensors) if not tensor.bytes)
        self.bytes = cache(self._bytes)

    def moves(self, position: int, live: int) -> Iterator[tuple[int, int, int, int]]:
        """`(added cost, bytes at the moment, position, live)` of every move."""
        dead = live & ~self.useful[position]
        if dead:  # nothing can read these any more: holding them is never better
            yield 0, 0, position, live & ~dead
            return
        held = self.bytes(live)
        for t in _bits(live & ~self.outputs & ~self.weightless):
            yield 0, 0, position, live & ~(1 << t)
        due = self.required[position]
        if self.from_op <= due <= self.to_op:
            for i in self.required[:position]:
                reads, writes = self.second_reads[i], self.writes[i]
                if self.problem.ops[i].recomputable and reads & ~live == 0 and writes & ~live:
                    cost = self.problem.ops[i].cost
                    yield cost, held + self.size[i], position, live | writes
                    for taken in self._may_take(i, live):
                        moment = held + self.size[i] - self.problem.tensors[taken].bytes
                        yield cost, moment, position, live & ~(1 << taken) | writes
        if self.first_reads[due] & ~live == 0:
            for prelude in self._preludes(due):
                yield self._run((*prelude, due), position, live, None)
                for taken in self._may_take(due, live):
                    yield self._run((*prelude, due), position, live, taken)

    def _run(
        self, ops: tuple[int, ...], position: int, live: int, taken: int | None
    ) -> tuple[int, int, int, int]:
        moment = 0
        for i in ops:
            if i == ops[-1] and taken is not None:
                live &= ~(1 << taken)
            moment = max(moment, self.bytes(live) + self.size[i])
            live |= self.writes[i]
        return 0, moment, position + 1, live

    def _may_take(self, i: int, live: int) -> list[int]:
        """Inputs into whose memory op `i` may write its first output, if they are let go."""
        op = self.problem.ops[i]
        return [t for t in op.reuse if not self.outputs >> t & 1 and not live >> op.outputs[0] & 1]

    def _preludes(self, due: int) -> Iterator[tuple[int, ...]]:
        writers = {t: i for i, op in enumerate(self.problem.ops) for t in op.outputs}
        optional = [writers[t] for t in self.problem.ops[due].replay_inputs if self.problem.ops[writers[t]].optional]
        for count in range(len(optional) + 1):
            yield from combinations(optional, count)

    def _useful(self, position: int) -> int:
        """Tensors that a required op to come reads, or that an op worth executing again reads."""
        useful = 0
        for i in self.required[position:]:
            useful |= self.first_reads[i]
        grown = -1
        while grown != useful:
            grown = useful
            for i, op in enumerate(self.problem.ops):
                if op.recomputable and self.writes[i] & useful:
                    useful |= self.second_reads[i]
        return useful

    def _bytes(self, live: int) -> int:
        return self.problem.static_bytes + sum(self.problem.tensors[t].bytes for t in _bits(live))


def _mask(tensors: Iterable[int]) -> int:
    return sum(1 << t for t in set(tensors))


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
