"""The regions of a plan: what each saves, recomputes and costs, and what stays eager, why, and what it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from planner.decided import Decided
from planner.units import show_bytes
from solvers.schedule import computes

from .tables import OpRow, op_rows

BETWEEN = "(the code between)"


@dataclass(frozen=True)
class Region:
    """A region of a plan, or what stays eager.

    Attributes:
        path: of the module; `BETWEEN` for all that is not within a region.
        runs: how often the sample's step calls it; 0 for what stays eager.
        saved_bytes: what it holds from the forward for the backward.
        dropped_bytes: what the plain step would hold, and this one computes again.
        recompute: cost of that, as a share of the plain step's.
        memory_share: of all that is held from the forward for the backward.
        eager: why it is not planned; "" for a region.
    """

    path: str
    runs: int
    saved_bytes: int
    dropped_bytes: int
    recompute: float
    memory_share: float
    eager: str = ""

    def __str__(self) -> str:
        if self.eager:
            return f"{self.path} stays eager: {self.eager}" if self.path else f"not planned as a whole: {self.eager}"
        runs = "" if self.runs == 1 else f", {self.runs} runs"
        return (
            f"{self.path}{runs}: {show_bytes(self.saved_bytes)} saved ({self.memory_share:.1%} of all), "
            f"{show_bytes(self.dropped_bytes)} recomputed at {self.recompute:.2%} of the step"
        )


def region_rows(plan: Decided) -> tuple[Region, ...]:
    """Regions in the order of their first run, the code between them, then what was refused as a region and why.

    Empty for a step that is planned as a whole.
    """
    regions = plan.prepared.regions
    if regions is None:
        return ()
    rows = op_rows(plan)
    groups: dict[str, list[OpRow]] = {path: [] for path, _ in regions.paths}
    between: list[OpRow] = []
    for row, place in zip(rows, regions.composed.local, strict=True):
        (between if place is None else groups[regions.paths[place[0]][0]]).append(row)
    runs, step = Counter(path for path, _ in regions.paths), plan.problem.step_cost or 1
    held = sum(row.saved_bytes for row in rows) or 1
    found = [_row(path, runs[path], own, step, held) for path, own in groups.items()]
    found.append(_row(BETWEEN, 0, between, step, held))
    return (*found, *(Region(path, 0, 0, 0, 0.0, 0.0, why) for path, why in regions.eager.items()))


def _row(path: str, runs: int, rows: list[OpRow], step: int, held: int) -> Region:
    saved, dropped = sum(r.saved_bytes for r in rows), sum(r.dropped_bytes for r in rows)
    return Region(path, runs, saved, dropped, sum(r.again_cost for r in rows) / step, saved / held)


def lines(plan: Decided, longest: int = 160) -> list[str]:
    """The same in sentences, of which reasons are cut; empty for a step that is planned as a whole."""
    rows = region_rows(plan)
    if not rows:
        return []
    planned = [str(r) for r in rows if r.runs]
    [between] = [r for r in rows if r.path == BETWEEN]
    head = f"Planned by {len(planned)} region{'' if len(planned) == 1 else 's'} under one budget:"
    glue = f"the code between them runs in eager and holds {show_bytes(between.saved_bytes)} ({between.memory_share:.1%})"
    eager = [text if len(text) <= longest else f"{text[: longest - 3]}..." for r in rows if r.eager for text in [str(r)]]
    return [head, *(f"- {line}" for line in [*planned, glue, *eager])]


def bands(plan: Decided, starts: Sequence[float]) -> Iterator[tuple[float, float, str]]:
    """Where on the curve each run of a region is: from, to (shares of the plain step's cost), the region's path."""
    regions = plan.prepared.regions
    if regions is None:
        return

    def run_at(step: tuple[int, int]) -> Any:
        place = regions.composed.local[step[1]]
        return None if place is None else place[0]

    for run, steps in groupby(enumerate(computes(plan.schedule)), run_at):
        if run is not None:
            own = [at for at, _ in steps]
            yield starts[own[0]], starts[own[-1] + 1], regions.paths[run][0]
