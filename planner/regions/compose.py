"""compose: glue and the runs of regions, in the order in which they were executed, as one flat Problem.

A storage that crosses the edge of a region is one tensor, whoever holds it. What a region returns is computed once, so
whatever runs again belongs to one run of a region and is read in that run's backward alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from passes.lower import LEFT_BEFORE, GlueEvents, Lowered
from passes.memory import round_up
from solvers.problem import Op, Problem, Tensor

from .glue import STATIC, GlueOp, glue_ops
from .hollow import Crossings, Edge

BACKWARD = "backward"  # the op at which the step's own backward begins


@dataclass(frozen=True)
class Composed:
    """The flat Problem, and what each op and tensor of it is.

    Attributes:
        forward, backward: for each run its ops there.
        local: for each op its run and its index in that run's own Problem; None for glue.
        tensors: for each run, its own tensors as tensors of the flat Problem; None for memory that stays anyway.
        glue: for each op of glue what it asks of the allocator, as `Lowered.glue`.
        before: as `Lowered.before`.
    """

    problem: Problem
    forward: tuple[range, ...]
    backward: tuple[range, ...]
    local: tuple[tuple[int, int] | None, ...]
    tensors: tuple[dict[int, int | None], ...]
    glue: dict[int, GlueEvents]
    before: dict[int, int]


def compose(
    hollow: Crossings, lowered: Sequence[Lowered], names: Sequence[str], *, granule: int, static_bytes: int,
    glue_cost: int = 0,
) -> Composed:  # fmt: skip
    """The Problem of a step that was run hollow.

    Args:
        lowered: for each run its own Problem.
        names: for each run what to add to the names of its ops and tensors.
        glue_cost: what the glue of a plain step costs.
    """
    return _Composition(hollow, lowered, names, granule).build(static_bytes, glue_cost)


class _Composition:
    def __init__(self, hollow: Crossings, lowered: Sequence[Lowered], names: Sequence[str], granule: int) -> None:
        self.hollow, self.lowered, self.names, self.granule = hollow, lowered, names, granule
        self.ops: list[Op] = []
        self.local: list[tuple[int, int] | None] = []
        self.made: list[Tensor] = []
        self.edges: dict[Edge, int] = {}
        self.tensors: list[dict[int, int | None]] = [{} for _ in lowered]
        self.spans: dict[str, list[range]] = {kind: [range(0)] * len(lowered) for kind in ("forward", "backward")}
        self.left: list[_Left] = []  # what earlier glue left, latest last
        self.dropped: set[Edge] = set()
        last = {run.path: r for r, run in enumerate(hollow.runs)}
        first = {run.path: r for r, run in reversed(list(enumerate(hollow.runs)))}
        self.first_runs = {first[path]: last[path] for path in last}  # of each region, with its last
        self.num_forward = 0
        self.glue: dict[int, GlueEvents] = {}

    def build(self, static_bytes: int, glue_cost: int) -> Composed:
        self._add_left()
        glue, self.dropped = glue_ops(self.hollow, self.granule)
        for ops, mark in zip(glue, self.hollow.marks, strict=False):
            for op in ops:
                self._add_glue(op)
            kind = mark.kind.removesuffix(" in")
            if mark.kind == BACKWARD:
                self.num_forward = len(self.ops)
                self._add(Op(BACKWARD, (), (), 0, 0, False), None)
            elif kind in self.spans:
                first = len(self.ops)
                self._add_run(mark.run, kind == "forward")
                self.spans[kind][mark.run] = range(first, len(self.ops))
        pinned = self._alive_at_the_end()
        cost = sum(op.cost for op in self.ops) + glue_cost
        problem = Problem(tuple(self.ops), tuple(self.made), self.num_forward, pinned, static_bytes, cost)
        forward, backward = (tuple(self.spans[kind]) for kind in ("forward", "backward"))
        return Composed(
            problem, forward, backward, tuple(self.local), tuple(self.tensors), self.glue, self._before()
        )  # fmt: skip

    # Runs of regions ----------------------------------------------------------------------------------------------

    def _add_left(self) -> None:
        """What the step before has left in attributes of regions, each until the first run of its region is over."""
        made: list[int] = []
        for r, lowered in enumerate(self.lowered):
            for t in lowered.before:
                self.tensors[r][t] = None
                if r in self.first_runs:
                    self.tensors[r][t] = new = self._tensor(lowered.problem.tensors[t])
                    made.append(new)
        if made:
            self._add(Op(LEFT_BEFORE, (), tuple(made), 0, 0, False), None)

    def _before(self) -> dict[int, int]:
        """As `Lowered.before`: the last run of a region leaves what its first run finds."""
        found: dict[int, int] = {}
        for first, last in self.first_runs.items():
            olds = (self.tensors[first][t] for t in self.lowered[first].before)
            news = (self.tensors[last].get(t) for t in self.lowered[last].before.values())
            pairs = zip(olds, news, strict=False)
            found |= {old: new for old, new in pairs if old is not None and new is not None}
        return found

    def _add_run(self, r: int, forward: bool) -> None:
        lowered, run = self.lowered[r], self.hollow.runs[r]
        own, count = lowered.problem, lowered.problem.num_forward
        if forward:
            self._meet(r, own.ops[0].outputs, run.inputs)
        else:
            self._meet(r, lowered.tangents, run.gradients)
        for i in range(1, count) if forward else range(count, len(own.ops)):
            self._add(self._moved(r, own.ops[i]), (r, i))

    def _meet(self, r: int, tensors: Sequence[int], edges: Sequence[Edge | None]) -> None:
        """Tensors of a run that others hold, too."""
        for t, edge in zip(tensors, edges, strict=True):
            self.tensors[r][t] = None if edge is None else self._of_edge(edge)

    def _moved(self, r: int, op: Op) -> Op:
        new = tuple(t for t in op.outputs if t not in self.tensors[r])
        for t in new:
            own = self.lowered[r].problem.tensors[t]
            self.tensors[r][t] = self._tensor(Tensor(f"{own.name}{self.names[r]}", own.bytes, own.category))
        given = () if len(new) == len(op.outputs) else op.outputs  # the gradients that a backward starts from
        return Op(
            f"{op.name}{self.names[r]}", self._all(r, (*op.inputs, *(t for t in given if t not in new))),
            self._all(r, new), op.cost, op.workspace, op.recomputable, self._all(r, op.replay_inputs), op.optional,
            self._all(r, op.reuse),
        )  # fmt: skip

    def _all(self, r: int, tensors: Sequence[int]) -> tuple[int, ...]:
        found = (self.tensors[r][t] for t in tensors)
        return tuple(dict.fromkeys(t for t in found if t is not None))

    def _of_edge(self, edge: Edge) -> int | None:
        if edge.run is None:
            return self.edges[edge]
        if edge.run == STATIC or edge.storage is None:
            return None
        own = self.lowered[edge.run].storage_tensor.get(edge.storage)
        return None if own is None else self.tensors[edge.run][own]

    # Glue ---------------------------------------------------------------------------------------------------------

    def _add_glue(self, op: GlueOp) -> None:
        index, name = len(self.ops), f"glue_{len(self.ops)}"
        read = [t for edge in op.dropped if (t := self._of_edge(edge)) is not None]
        read += self._released(op.released_bytes)
        made: list[int] = []
        for edge in op.made:
            self.edges[edge] = self._tensor(Tensor(f"{name}_{len(made)}", round_up(edge.size, self.granule)))
            made.append(self.edges[edge])
        if op.kept_bytes:
            self.left.append(_Left(index, op.kept_bytes))
        if read or made or op.kept_bytes or op.workspace:
            found = ((e.size, e.block, None if e.edge is None else self._of_edge(e.edge)) for e in op.events)
            self.glue[index] = tuple(found)
            self._add(Op(name, tuple(dict.fromkeys(read)), tuple(made), 0, op.workspace, False), None)

    def _released(self, size: int) -> list[int]:
        """Of what glue has left, as much as is freed now, the latest first."""
        found = []
        while size and self.left:
            last = self.left[-1]
            taken = min(size, last.bytes)
            size -= taken
            last.bytes -= taken
            found.append(self._chunk(last.op, taken, "activation"))
            if not last.bytes:
                self.left.pop()
        return found

    def _chunk(self, op: int, size: int, category: str) -> int:
        tensor = self._tensor(Tensor(f"{self.ops[op].name}_left_{len(self.made)}", size, category))
        made = self.ops[op]
        self.ops[op] = Op(made.name, made.inputs, (*made.outputs, tensor), 0, made.workspace, False)
        return tensor

    def _alive_at_the_end(self) -> tuple[int, ...]:
        """What the step hands out: gradients and outputs."""
        late = [self._chunk(left.op, left.bytes, self._category(left.op)) for left in self.left]
        return tuple(dict.fromkeys([*late, *self._never_dropped()]))

    def _never_dropped(self) -> list[int]:
        held = [e for e in (*self.hollow.edges.values(), *self.hollow.found.values()) if e not in self.dropped]
        return [t for e in held if (t := self._of_edge(e)) is not None]

    def _category(self, op: int) -> str:
        return "gradient" if op >= self.num_forward else "output"

    def _tensor(self, tensor: Tensor) -> int:
        self.made.append(tensor)
        return len(self.made) - 1

    def _add(self, op: Op, local: tuple[int, int] | None) -> None:
        self.ops.append(op)
        self.local.append(local)


@dataclass
class _Left:
    op: int
    bytes: int
