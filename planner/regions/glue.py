"""Glue: what the hollow run's allocator events say about the code between regions, as ops of a Problem.

Between two edges of regions nothing can be decided, so that all that matters is the highest point there, what lives on,
and which of the storages that cross edges are dropped. A stretch is cut into as few ops as tell it exactly: an op's
outputs are allocated while its inputs are held, so where memory is freed first, another op begins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from passes.lower import KEPT
from passes.memory import round_up
from solvers.errors import PlannerError

from .hollow import Crossings, Edge, Mark

STATIC = -1
UNTOLD = -1


@dataclass(eq=False)
class GlueOp:
    """One op that stands for glue.

    Attributes:
        made: crossing storages that it allocates.
        dropped: crossing storages that glue holds until its end.
        kept_bytes: what else it allocates and leaves, and `released_bytes` what it frees of what earlier ones left.
        peak_bytes: the highest point above its start, `made` and `kept_bytes` included.
        events: what it asks of the allocator, in order.
    """

    made: list[Edge] = field(default_factory=list)
    dropped: list[Edge] = field(default_factory=list)
    level: int = 0
    lowest: int = 0
    peak_bytes: int = 0
    made_bytes: int = 0
    events: list[Event] = field(default_factory=list)

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
class Event:
    """An allocation, or a free (of negative size).

    Attributes:
        block: which allocation, where addresses are told; `KEPT` where it was made once and stays for ever.
        edge: the storage that crosses edges which it is for.
        parts: those whose sum it is.
    """

    size: int
    address: int = 0
    block: int = UNTOLD
    edge: Edge | None = None
    parts: tuple[Event, ...] = ()


Stretch = list[Event]


def glue_ops(hollow: Crossings, granule: int) -> tuple[list[list[GlueOp]], set[Edge]]:
    """For the stretch before each mark the ops that stand for it (none within regions); and what the step drops."""
    stretches = _attributed(hollow)[:-1]
    found: list[list[GlueOp]] = []
    late: Stretch = []
    for i, stretch in enumerate(stretches):
        if _is_inside(hollow.marks, i):
            late = _left_over(stretch, granule, hollow.runs[hollow.marks[i - 1].run].gradients)
            found.append([])
        else:
            found.append(_ops([*late, *stretch], granule))
            late = []
    return found, {e.edge for stretch in stretches for e in stretch if e.edge is not None and e.size < 0}


def _attributed(hollow: Crossings) -> list[Stretch]:
    """The events between marks, those of storages that cross edges told from the others."""
    stretches = _between(hollow.events, hollow.marks)
    for stretch in stretches:
        for event in stretch:
            event.edge = hollow.edges.get(abs(event.size))
    outside = [[] if _is_inside(hollow.marks, i) else stretch for i, stretch in enumerate(stretches)]
    for edge in hollow.found.values():
        _attribute(edge, stretches, outside)
    return stretches


def _is_inside(marks: Sequence[Mark], i: int) -> bool:
    """Whether stretch `i` lies within a region."""
    return i > 0 and marks[i - 1].kind.endswith(" in")


def _between(events: Sequence[tuple[int, int]], marks: Sequence[Mark]) -> list[Stretch]:
    stretches: list[Stretch] = [[]]
    waiting = iter(marks)
    mark = next(waiting, None)
    live: dict[int, int] = {}
    for number, (address, size) in enumerate(events):
        if size > 0:
            live[address] = KEPT if address == KEPT else number if address else UNTOLD
        if mark is not None and size == mark.size:
            stretches.append([])
        elif mark is not None and size == -mark.size:
            mark = next(waiting, None)
        else:
            stretches[-1].append(Event(size, address, live.get(address, UNTOLD)))
    if mark is not None or len(stretches) != len(marks) + 1:
        raise PlannerError("the allocator did not report all that a step allocates, so that glue cannot be measured.")
    return stretches


def _attribute(edge: Edge, stretches: Sequence[Stretch], outside: Sequence[Stretch]) -> None:
    """Find where a storage that glue makes was allocated, and where freed, by its size."""
    birth = _birth(edge, outside)
    if birth is None:
        edge.run = STATIC  # from before the step
        return
    birth.edge = edge
    if edge.died >= 0:
        death = next((e for e in stretches[edge.died] if _frees(e, birth)), None)
        if death is not None:
            death.edge = edge


def _frees(event: Event, birth: Event) -> bool:
    return event.size == -birth.size and event.block == birth.block and event.edge is None


def _birth(edge: Edge, outside: Sequence[Stretch]) -> Event | None:
    """The latest allocation of that size before the edge was seen, outside of regions: what is made in one dies there.

    Of several, where addresses are not told, any will do: every event counts once, so that who made what changes no
    total.
    """
    before = (e for stretch in reversed(outside[: edge.born + 1]) for e in reversed(stretch))
    found = (e for e in before if e.size == edge.size and e.address in (0, edge.address))
    return next((e for e in found if e.edge is None), None)


def _left_over(stretch: Stretch, granule: int, given: Sequence[Edge | None]) -> Stretch:
    """What changes within a region and is not the region's: seen once it is over.

    Args:
        given: what its backward starts from: freed while it runs, that is held by nobody but the region itself.
    """
    freed = [e for e in stretch if e.edge is not None and e.size < 0 and e.edge not in given]
    made = [e for e in stretch if e.edge is not None and e.size > 0 and e.edge.run is None]
    parts = _unmatched(e for e in stretch if e.edge is None and e.block != KEPT)
    net = sum(_rounded(part.size, granule) for part in parts)
    return [*([Event(net, parts=parts)] if net else []), *made, *freed]


def _unmatched(events: Iterable[Event]) -> tuple[Event, ...]:
    """Allocations that stay, and frees of what was there before."""
    net = Counter[tuple[int, int]]()
    for event in events:
        net[abs(event.size), event.block] += 1 if event.size > 0 else -1
    left = ((size if n > 0 else -size, block, abs(n)) for (size, block), n in net.items())
    return tuple(Event(size, block=block) for size, block, count in left for _ in range(count))


def _ops(stretch: Stretch, granule: int) -> list[GlueOp]:
    ops = [GlueOp()]
    for event in stretch:
        size = _rounded(event.size, granule)
        if event.block == KEPT:
            ops[-1].events.append(event)
            continue
        if event.edge is not None and event.size < 0:
            ops[-1].dropped.append(event.edge)
            ops[-1].events.append(event)
            continue
        if size > 0 and not ops[-1].has_room_for(size):
            ops.append(GlueOp())
        ops[-1].add(size, event.edge)
        ops[-1].events += event.parts or (event,)
    return ops


def _rounded(size: int, granule: int) -> int:
    return round_up(size, granule) if size > 0 else -round_up(-size, granule)
