"""A schedule: the one representation that simulate, verify, rewrite, reports and the plan file share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from .errors import ScheduleError
from .problem import Problem


class Step(NamedTuple):
    """`compute` runs op `index`; `free` drops tensor `index`. Other kinds (offload, fetch, ...) may follow."""

    kind: Literal["compute", "free"]
    index: int  # type: ignore[assignment]  # a tuple has a method of that name


Schedule = tuple[Step, ...]


def computes(schedule: Schedule) -> tuple[int, ...]:
    """The ops a schedule executes, in order, recomputes included."""
    return tuple(step.index for step in schedule if step.kind == "compute")


def freed_after(schedule: Schedule, position: int) -> frozenset[int]:
    """Tensors freed between the compute at `position` and the next one."""
    freed = []
    following = position + 1
    while following < len(schedule) and schedule[following].kind == "free":
        freed.append(schedule[following].index)
        following += 1
    return frozenset(freed)


def plain_order(problem: Problem) -> tuple[int, ...]:
    """Every required op once: the step without recompute."""
    return tuple(problem.required())


def with_frees(problem: Problem, order: Sequence[int]) -> Schedule:
    """Complete an order of computes with the earliest frees that keep it valid.

    Freeing as early as possible is never worse for memory, so the order of computes is the whole decision. A
    copy is dropped after its last read before the tensor is computed again; an output of the step keeps its
    first copy. Optional ops (`save_rng` and its like) are inserted where a replay in `order` needs them and
    left out elsewhere, whether or not `order` lists them.

    Raises:
        ScheduleError: an op reads a tensor that no earlier compute wrote, or an output is never computed.
    """
    order = _place_optional(problem, order)
    reads = _reads(problem, order)
    _check_written(problem, order, reads)
    drops: list[list[int]] = [[] for _ in order]
    wanted = set(problem.pinned)
    for position in range(len(order) - 1, -1, -1):
        outputs = problem.ops[order[position]].outputs
        drops[position] = [t for t in dict.fromkeys((*reads[position], *outputs)) if t not in wanted]
        wanted.difference_update(t for t in outputs if t not in problem.pinned)
        wanted.update(reads[position])
    steps: list[Step] = []
    for position, i in enumerate(order):
        steps.append(Step("compute", i))
        steps.extend(Step("free", t) for t in drops[position])
    return tuple(steps)


def _reads(problem: Problem, order: Sequence[int]) -> list[tuple[int, ...]]:
    """What each compute of `order` reads: a second execution reads its replay inputs too."""
    seen: set[int] = set()
    reads = []
    for i in order:
        op = problem.ops[i]
        reads.append(op.inputs + op.replay_inputs if i in seen else op.inputs)
        seen.add(i)
    return reads


def _check_written(problem: Problem, order: Sequence[int], reads: Sequence[tuple[int, ...]]) -> None:
    written: set[int] = set()
    for position, i in enumerate(order):
        for t in reads[position]:
            if t not in written:
                names = problem.ops[i].name, problem.tensors[t].name
                raise ScheduleError(f"op {names[0]!r} reads {names[1]!r} before it is computed", step=position)
        written.update(problem.ops[i].outputs)
    for t in problem.outputs:
        if t not in written:
            raise ScheduleError(f"output {problem.tensors[t].name!r} is never computed")


def _place_optional(problem: Problem, order: Sequence[int]) -> list[int]:
    """Put each optional op that a replay needs right before the first run of the op that replays it."""
    count: dict[int, int] = {}
    for i in order:
        count[i] = count.get(i, 0) + 1
    result: list[int] = []
    placed: set[int] = set()
    for i in order:
        op = problem.ops[i]
        if op.optional:
            continue
        if count[i] > 1:
            for t in op.replay_inputs:
                p = problem.producer[t]
                if problem.ops[p].optional and p not in placed:
                    placed.add(p)
                    result.append(p)
        result.append(i)
    return result


Recompute = tuple[int, int]


def recomputes_of(problem: Problem, schedule: Schedule) -> list[Recompute]:
    """The recomputes of a schedule; runs of one op repeated inside a slot are merged."""
    found: dict[Recompute, None] = {}
    pending: list[int] = []
    done: set[int] = set()
    for i in computes(schedule):
        if problem.ops[i].optional:
            continue
        if i in done:
            pending.append(i)
            continue
        done.add(i)
        found.update(((i, j), None) for j in pending)
        pending = []
    return sorted(found)
