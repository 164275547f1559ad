"""Which problems are chains: the forward in stages that hand on one op's outputs, the backward in the reverse order.

The forward is cut after every op whose outputs are all that later forward ops read of what was written so far. What
lies between two cuts is a *stage*: an op with its mask, a residual block, zero-byte ops in between. The backward is
cut so that stage l's part reads, of the forward, only what stage l wrote or read; an op goes to the earliest stage that
allows it. Tensors of the backward may be read anywhere later in it: they are never computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from .errors import SolverUnavailable
from .problem import Problem

SMALL_STAGE = 8


@dataclass(frozen=True)
class Stage:
    """Consecutive forward ops and the backward ops that belong to them.

    Attributes:
        ops, backward: op indices; optional ops are left out, because random ops run once here.
        inputs: tensors of the stage before that its ops read.
        outputs: its tensors that the next stage reads.
        needs: tensors among `inputs` and its own that its backward reads; outputs of the step are always there.
    """

    ops: tuple[int, ...]
    backward: tuple[int, ...]
    inputs: frozenset[int]
    outputs: frozenset[int]
    needs: frozenset[int]


@dataclass(frozen=True)
class Chain:
    """A problem cut into stages."""

    problem: Problem
    stages: tuple[Stage, ...]

    @cached_property
    def sizes(self) -> list[int]:
        return [t.bytes for t in self.problem.tensors]

    @cached_property
    def last_read(self) -> list[int]:
        """For each tensor its last reader in the plain step, outputs of the step never ending; -1 for none."""
        end = len(self.problem.ops)
        return [
            end if t in self.problem.pinned else max(readers, default=-1)
            for t, readers in enumerate(self.problem.readers)
        ]

    def pinned_before(self, op: int) -> frozenset[int]:
        """Outputs of the step that ops before `op` wrote."""
        return frozenset(t for t in self.problem.outputs if self.problem.producer[t] < op)

    def held_before(self, op: int) -> frozenset[int]:
        """What is live before backward op `op` whatever is kept of the forward."""
        problem = self.problem
        late = (t for i in range(problem.num_forward, op) for t in problem.ops[i].outputs)
        return frozenset(t for t in late if self.last_read[t] >= op) | self.pinned_before(op)

    def bytes_of(self, tensors: Iterable[int]) -> int:
        return sum(self.sizes[t] for t in tensors)

    def wanted_ops(self, stage: Stage, wanted: frozenset[int]) -> tuple[int, ...] | None:
        """The stage's ops that a later run needs for `wanted`; None when one of them may not run again."""
        missing = set(wanted - stage.inputs)
        chosen: list[int] = []
        for i in reversed(stage.ops):
            op = self.problem.ops[i]
            if missing.intersection(op.outputs):
                if not op.recomputable or op.replay_inputs:
                    return None
                chosen.append(i)
                missing.update(t for t in op.inputs if t not in stage.inputs and t not in self.problem.pinned)
        return tuple(reversed(chosen))

    def replay(self, ops: Sequence[int], live: frozenset[int], wanted: frozenset[int]) -> int:
        """The most bytes live while `ops` run from `live`, what is neither read again nor `wanted` being let go."""
        problem = self.problem
        later = set(wanted) | problem.pinned
        drops: list[list[int]] = []
        for i in reversed(ops):
            touched = dict.fromkeys((*problem.ops[i].inputs, *problem.ops[i].outputs))
            drops.append([t for t in touched if t not in later])
            later.update(touched)
        held = set(live & later)
        now = peak = self.bytes_of(held)
        for i, dropped in zip(ops, reversed(drops), strict=True):
            op = problem.ops[i]
            dying = (t for t in op.reuse if t in dropped)
            taken = next(dying, None) if op.outputs and op.outputs[0] not in held else None
            if taken is not None:
                held.discard(taken)
                now -= self.sizes[taken]
            peak = max(peak, now + op.workspace + self.bytes_of(op.outputs))
            now += self.bytes_of(t for t in op.outputs if t not in held)
            held.update(op.outputs)
            now -= self.bytes_of(t for t in dropped if t in held)
            held.difference_update(dropped)
        return peak


def chain_of(problem: Problem, solver: str, others: tuple[str, ...]) -> Chain:
    """The problem as a chain.

    Raises:
        SolverUnavailable: it is none; names the first op that breaks it, and the solvers that take any problem.
    """
    cuts = _cuts(problem)
    forward = [i for i in problem.forward if not problem.ops[i].optional]
    parts = _parts(forward, cuts)
    longest = max(parts, key=len, default=[])
    if len(parts) < 2 or len(longest) > max(SMALL_STAGE, len(forward) // 2):
        raise _refusal(problem, _skip(problem, forward, longest), solver, others)
    stage_of = {i: k for k, part in enumerate(parts) for i in part}
    backward = _backward(problem, stage_of, len(parts), solver, others)
    return Chain(problem, tuple(_stage(problem, parts, backward, k) for k in range(len(parts))))


def _cuts(problem: Problem) -> list[int]:
    """Forward ops after which only their own outputs are read by the rest of the forward."""
    last = [max((r for r in readers if r < problem.num_forward), default=-1) for readers in problem.readers]
    crossing: set[int] = set()
    cuts = []
    for i in problem.forward:
        outputs = problem.ops[i].outputs
        crossing = {t for t in (*crossing, *outputs) if last[t] > i}
        if crossing and crossing.issubset(outputs) and not crossing & problem.pinned:
            cuts.append(i)
    return cuts


def _parts(forward: list[int], cuts: list[int]) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    ends = set(cuts)
    for i in forward:
        parts[-1].append(i)
        if i in ends:
            parts.append([])
    return [part for part in parts if part]


def _backward(
    problem: Problem, stage_of: dict[int, int], count: int, solver: str, others: tuple[str, ...]
) -> list[list[int]]:
    """The backward ops of each stage: an op goes to the earliest that has what it reads."""
    crosses = [
        any(stage_of.get(r, -1) > stage_of.get(p, count) for r in problem.readers[t])
        for t, p in enumerate(problem.producer)
    ]
    allowed: list[tuple[int, int]] = []
    current = count - 1
    for i in problem.backward:
        read = [t for t in problem.ops[i].inputs if problem.producer[t] in stage_of and t not in problem.pinned]
        low = max((stage_of[problem.producer[t]] for t in read), default=0)
        current = min(current, *(stage_of[problem.producer[t]] + crosses[t] for t in read), count)
        if low > current:
            raise _refusal(problem, (i, max(read, key=lambda t: stage_of[problem.producer[t]])), solver, others)
        allowed.append((i, low))
    result: list[list[int]] = [[] for _ in range(count)]
    current = 0
    for i, low in reversed(allowed):
        current = max(current, low)
        result[current].insert(0, i)
    return result


def _stage(problem: Problem, parts: list[list[int]], backward: list[list[int]], k: int) -> Stage:
    written = frozenset(t for i in parts[k] for t in problem.ops[i].outputs)
    before = frozenset(t for i in parts[k - 1] for t in problem.ops[i].outputs) if k else frozenset[int]()
    after = frozenset(t for i in parts[k + 1] for t in problem.ops[i].inputs) if k + 1 < len(parts) else frozenset()
    reads = frozenset(t for i in parts[k] for t in problem.ops[i].inputs)
    needs = frozenset(t for i in backward[k] for t in problem.ops[i].inputs)
    return Stage(
        tuple(parts[k]), tuple(backward[k]), reads & before, written & after,
        (needs & (written | before)) - problem.pinned,
    )  # fmt: skip


def _skip(problem: Problem, forward: list[int], stage: list[int]) -> tuple[int, int]:
    """The tensor that is held longest into a stage, and its first reader there that does not follow its writer."""
    place = {i: j for j, i in enumerate(forward)}
    inside = set(stage)
    widest = (0, 0, -1)
    for i in forward:
        for t in problem.ops[i].outputs:
            late = [r for r in problem.readers[t] if r in inside and place[r] > place[i] + 1]
            if late:
                widest = max(widest, (place[late[-1]] - place[i], -late[0], t))
    return -widest[1], widest[2]


def _refusal(problem: Problem, offender: tuple[int, int], solver: str, others: tuple[str, ...]) -> SolverUnavailable:
    op, tensor = offender
    name = problem.ops[op].name if problem.ops else "an empty problem"
    what = "its forward hands nothing on"
    if tensor >= 0:
        part = "forward" if op < problem.num_forward else "backward"
        writer = problem.producer[tensor]
        what = f"op {op} of the {part} reads {problem.tensors[tensor].name!r}, which op {writer} wrote, out of turn"
    message = (
        f"solver={solver!r} plans chains only, and {name!r} breaks this one: {what}. In a chain every stage of the "
        "forward reads only what the stage before it wrote, and the backward visits the stages in reverse. Use "
        f"another solver: {', '.join(others)}."
    )
    return SolverUnavailable(message, solver=solver, available=others)


def merged(chain: Chain, count: int) -> Chain:
    """At most `count` stages, neighbours taken together; the stages then are coarser, the schedules still valid."""
    total = len(chain.stages)
    if total <= count:
        return chain
    groups = [chain.stages[total * j // count : total * (j + 1) // count] for j in range(count)]
    return Chain(chain.problem, tuple(map(_together, groups)))


def _together(stages: Sequence[Stage]) -> Stage:
    return Stage(
        tuple(i for stage in stages for i in stage.ops),
        tuple(i for stage in reversed(stages) for i in stage.backward),
        stages[0].inputs, stages[-1].outputs, frozenset().union(*(stage.needs for stage in stages)),
    )  # fmt: skip
