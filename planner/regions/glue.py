"""Glue: what the hollow run's allocator events say about the code between regions, as ops of a Problem.

Between two edges of regions nothing can be decided, so that all that matters is the highest point there, what lives on,
and which of the storages that cross edges are dropped. A stretch is cut into as few ops as tell it exactly: an op's
outputs are allocated while its inputs are held, so where memory is freed first, another op begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from passes.memory import round_up
from solvers.errors import PlannerError

from .hollow import Edge, Hollow, Mark


@dataclass(eq=False)
class GlueOp:
    """One op that stands for glue.

    Attributes:
        made: crossing storages that it allocates.
        dropped: crossing storages that glue holds until its end.
        kept_bytes: what else it allocates and leaves, and `released_bytes` what it frees of what earlier ones left.
        peak_bytes: the highest point above its start, `made` and `kept_bytes` included.
    """

    made: list[Edge] = field(default_factory=list)
    dropped: list[Edge] = field(default_factory=list)
    level: int = 0
    lowest: int = 0
    peak_bytes: int = 0
    made_bytes: int = 0

    @property
    def kept_bytes(self) -> int:
        return self.level - self.lowest

    @property
    def released_bytes(self) -> int:
        return -self.lowest

    @property
    def workspace(self) -> int:
        return self.peak_bytes - self.made_bytes - self.kept_bytes

    def has_room_for(self, size: int) -> bool:
        """Whether another allocation leaves the op exact: what it leaves was all there at its highest point."""
        total = self.made_bytes + self.level + size
        return not self.dropped and max(self.peak_bytes, total) >= total - self.lowest

    def add(self, size: int, made: Edge | None = None) -> None:
        if made is not None:
            self.made.append(made)
            self.made_bytes += size
        else:
            self.level += size
        self.lowest = min(self.lowest, self.level)
        self.peak_bytes = max(self.peak_bytes, self.made_bytes + self.level)


@dataclass
class _Event:
    size: int
    edge: Edge | None = None


Stretch = list[_Event]


def glue_ops(hollow: Hollow, granule: int) -> list[list[GlueOp]]:
    """For the stretch before each mark, and the one after the last, the ops that stand for it; none within regions."""
    stretches = _attributed(hollow)
    found: list[list[GlueOp]] = []
    late: Stretch = []
    for i, stretch in enumerate(stretches):
        if 0 < i < len(stretches) - 1 and hollow.marks[i - 1].kind.endswith(" in"):
            late = _left_over(stretch, granule)
            found.append([])
        else:
            found.append(_ops([*late, *stretch], granule))
            late = []
    return found


def _attributed(hollow: Hollow) -> list[Stretch]:
    """The events between marks, those of storages that cross edges told from the others."""
    stretches = _between(hollow.events, hollow.marks)
    for stretch in stretches:
        for event in stretch:
            event.edge = hollow.edges.get(abs(event.size))
    for edge in hollow.found.values():
        _attribute(edge, stretches)
    return stretches


def _between(events: Sequence[int], marks: Sequence[Mark]) -> list[Stretch]:
    stretches: list[Stretch] = [[]]
    waiting = iter(marks)
    mark = next(waiting, None)
    for size in events:
        if mark is not None and size == mark.size:
            stretches.append([])
        elif mark is not None and size == -mark.size:
            mark = next(waiting, None)
        else:
            stretches[-1].append(_Event(size))
    if mark is not None or len(stretches) != len(marks) + 1:
        raise PlannerError("the allocator did not report all that a step allocates, so that glue cannot be measured.")
    return stretches


def _attribute(edge: Edge, stretches: Sequence[Stretch]) -> None:
    """Find where a storage that glue makes was allocated, and where freed, by its size."""
    birth = _birth(edge, stretches)
    if birth is None:
        edge.run = STATIC  # from before the step
        return
    birth.edge = edge
    if edge.died >= 0:
        death = next((e for e in stretches[edge.died] if e.size == -edge.size and e.edge is None), None)
        if death is not None:
            death.edge = edge


def _birth(edge: Edge, stretches: Sequence[Stretch]) -> _Event | None:
    """The latest allocation of that size which nothing freed before the edge was seen."""
    freed = 0
    for event in (e for stretch in reversed(stretches[: edge.born + 1]) for e in reversed(stretch)):
        if event.edge is not None or abs(event.size) != edge.size:
            continue
        if event.size > 0 and not freed:
            return event
        freed += 1 if event.size < 0 else -1
    return None


STATIC = -1


def _left_over(stretch: Stretch, granule: int) -> Stretch:
    """What changes within a region and is not the region's: seen once it is over."""
    crossing = sorted((e for e in stretch if e.edge is not None), key=lambda e: e.size < 0)
    net = sum(_rounded(e.size, granule) for e in stretch if e.edge is None)
    return [*([_Event(net)] if net else []), *crossing]


def _ops(stretch: Stretch, granule: int) -> list[GlueOp]:
    ops = [GlueOp()]
    for event in stretch:
        size = _rounded(event.size, granule)
        if event.edge is not None and event.size < 0:
            ops[-1].dropped.append(event.edge)
            continue
        if size > 0 and not ops[-1].has_room_for(size):
            ops.append(GlueOp())
        ops[-1].add(size, event.edge)
    return ops


def _rounded(size: int, granule: int) -> int:
    return round_up(size, granule) if size > 0 else -round_up(-size, granule)
