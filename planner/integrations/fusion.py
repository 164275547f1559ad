"""A Problem as a compiler that fuses sees it: what is written and read within one kernel takes no memory.

An op is *fusable* if Inductor generates its code, rather than calling a kernel of a library, and *pointwise* if it can
also be computed again wherever it is read. A pointwise result is *inlined*, that is, never allocated, where

- every op that reads it is fusable, and it is not returned;
- readers in its own half stand in the same run of fusable ops (no library kernel between), as one kernel computes them;
- for readers in the backward of a result of the forward: what it is computed from is no larger than it. They compute
  it anew, random numbers from their seed, too.

What reads an inlined result reads what that is computed from. The solvers see the remaining ops; a schedule of theirs
becomes one of the whole Problem in which inlined ops run again right where they are read. The compiler may choose
otherwise, so that the peaks found here are estimates, which the caller compares with measured ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from solvers.problem import Op, Problem
from solvers.schedule import Schedule, computes, with_frees

SLACK = 1.1
SMALL_BYTES = 4096


@dataclass(frozen=True)
class Kind:
    """How a compiler treats an op."""

    fusable: bool
    pointwise: bool


@dataclass(frozen=True, eq=False)
class Fused:
    """A Problem and what remains of it.

    Attributes:
        whole, problem: before and after inlining.
        ops: for each op of `problem` its index in `whole`.
        inlined: ops of `whole` that are inlined, with the tensors that each is computed from.
        runs: for each op of `whole` its run of fusable ops, -1 for a library kernel.
    """

    whole: Problem
    problem: Problem
    ops: tuple[int, ...]
    inlined: dict[int, tuple[int, ...]]
    runs: tuple[int, ...]

    def unfused(self, schedule: Schedule) -> Schedule:
        """A schedule of `problem` as one of `whole`."""
        order: list[int] = []
        latest: dict[int, int] = {}  # when each op last ran, in library kernels run so far
        now, first = 0, 0

        def run(i: int) -> None:
            for j in self._chain(i):
                if latest[j] != now and self.whole.ops[j].recomputable:
                    order.append(j)
                    latest[j] = now
            order.append(i)
            latest[i] = now

        for k in computes(schedule):
            i = self.ops[k]
            while first < i:  # all before it run for the first time, in order
                if first in self.inlined:
                    run(first)
                first += 1
            run(i)
            first = max(first, i + 1)
            now += self.runs[i] < 0
        return with_frees(self.whole, order)

    def _chain(self, i: int) -> list[int]:
        """Inlined ops that op `i` is computed with, in order."""
        return self._chains[i]

    @cached_property
    def _chains(self) -> list[list[int]]:
        chains: list[list[int]] = []
        for op in self.whole.ops:
            found: set[int] = set()
            for t in op.inputs:
                p = self.whole.producer[t]
                if p in self.inlined:
                    found.update((p, *chains[p]))
            chains.append(sorted(found))
        return chains


def fuse(problem: Problem, kinds: Sequence[Kind]) -> Fused:
    """Inline what a compiler would; `kinds` has an entry for each op."""
    runs = _runs(kinds)
    sources: dict[int, tuple[int, ...]] = {}  # inlined tensor -> what it is computed from
    inlined: dict[int, tuple[int, ...]] = {}
    for i, op in enumerate(problem.ops):
        read = _resolve(op.inputs, sources)
        if kinds[i].pointwise and len(op.outputs) == 1 and _inlines(problem, i, read, kinds, runs):
            sources[op.outputs[0]] = read
            inlined[i] = read
    kept = [i for i in range(len(problem.ops)) if i not in inlined]
    tensors = [t for i in kept for t in problem.ops[i].outputs]
    place = {t: k for k, t in enumerate(tensors)}
    partial = Fused(problem, problem, tuple(kept), inlined, runs)
    ops = tuple(_remaining(problem, kinds[i], i, place, sources, partial) for i in kept)
    return replace(partial, problem=Problem(
        ops=ops,
        tensors=tuple(problem.tensors[t] for t in tensors),
        num_forward=sum(i < problem.num_forward for i in kept),
        outputs=tuple(place[t] for t in problem.outputs),
        static_bytes=problem.static_bytes,
        step_cost=problem.step_cost,
    ))  # fmt: skip


def _remaining(
    problem: Problem, kind: Kind, i: int, place: dict[int, int], sources: dict[int, tuple[int, ...]], fused: Fused
) -> Op:
    """Op `i`, with what is inlined into it; generated code writes over an input of its result's size where it can."""
    op = problem.ops[i]
    read = _resolve(op.inputs, sources)
    same = [t for t in read if kind.pointwise and problem.tensors[t].bytes == problem.tensors[op.outputs[0]].bytes]
    over = [t for t in same if problem.tensors[t].category != "output"]  # which the caller may hold
    return replace(
        op, inputs=tuple(place[t] for t in read), outputs=tuple(place[t] for t in op.outputs),
        cost=op.cost + sum(problem.ops[j].cost for j in fused._chain(i)), reuse=tuple(place[t] for t in over),
        workspace=0 if kind.fusable else op.workspace,
    )  # fmt: skip


def _runs(kinds: Sequence[Kind]) -> tuple[int, ...]:
    """For each op the number of its run of fusable ops; -1 for a library kernel, which ends one."""
    runs, now = [], 0
    for kind in kinds:
        runs.append(now if kind.fusable else -1)
        now += not kind.fusable
    return tuple(runs)


def _resolve(tensors: Sequence[int], sources: dict[int, tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(s for t in tensors for s in sources.get(t, (t,))))


def _inlines(problem: Problem, i: int, read: tuple[int, ...], kinds: Sequence[Kind], runs: Sequence[int]) -> bool:
    (t,) = problem.ops[i].outputs
    readers = problem.readers[t]
    if t in problem.pinned or not readers or not all(kinds[r].fusable for r in readers):
        return False
    forward = i < problem.num_forward
    near = [r for r in readers if (r < problem.num_forward) == forward]
    if any(runs[r] != runs[i] for r in near):
        return False
    if len(near) == len(readers):
        return True
    size = sum(problem.tensors[s].bytes for s in read)
    return problem.ops[i].recomputable and size <= SLACK * problem.tensors[t].bytes + SMALL_BYTES
