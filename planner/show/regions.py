"""The regions of a plan as rows: what each saves, recomputes and costs, and what stays eager, and why."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from planner.decided import Decided
from planner.prepared import Regions
from planner.timeline import with_category
from planner.units import show_bytes
from solvers.schedule import computes
from solvers.simulate import simulate

GLUE = "(between regions)"


@dataclass(frozen=True)
class Region:
    """A part of a plan.

    Attributes:
        path: the module's path; "" for the whole model, `GLUE` for the code between regions.
        runs: how often the sample's step calls it.
        saved_bytes: what it hands from its forward to its backward.
        at_peak_bytes: what it holds at the step's peak.
        recomputed: how many of its ops run again.
        overhead: what that costs, as a share of the plain step.
        eager: why it is not planned; "" where it is.
    """

    path: str
    runs: int
    saved_bytes: int = 0
    at_peak_bytes: int = 0
    recomputed: int = 0
    overhead: float = 0.0
    eager: str = ""

    def __str__(self) -> str:
        if self.eager:
            return f"{self.path or 'the whole model'} stays eager: {self.eager}"
        runs = f", {self.runs} runs" if self.runs > 1 else ""
        text = f"{self.path or 'the whole model'}{runs}: {show_bytes(self.saved_bytes)} saved for the backward, "
        text += f"{show_bytes(self.at_peak_bytes)} held at the peak"
        return text if self.path == GLUE else f"{text}, recompute costs {self.overhead:.2%} of the step"


def region_rows(plan: Decided) -> tuple[Region, ...]:
    """A row for each region in the order of its first run, then what is between them, then what stays eager."""
    regions = plan.prepared.regions
    owners = [0] * len(plan.problem.ops) if regions is None else _owners(regions)
    paths = [""] if regions is None else [GLUE, *dict.fromkeys(path for path, _ in regions.paths)]
    calls = Counter({"": 1} if regions is None else (path for path, _ in regions.paths))
    found = [_row(plan, path, calls[path], owners, number) for number, path in enumerate(paths)]
    rest = () if regions is None else (*regions.eager.items(), *((p, NOT_CALLED) for p in regions.spare))
    return (*found[1:], *found[:1], *(Region(path, 0, eager=why) for path, why in rest))


NOT_CALLED = "the sample's step does not call it; where another step does, it runs like an equal region"


def _owners(regions: Regions) -> list[int]:
    """For each op the number of its region's row; 0 for glue."""
    paths = list(dict.fromkeys(path for path, _ in regions.paths))
    return [0 if place is None else 1 + paths.index(regions.paths[place[0]][0]) for place in regions.composed.local]


def _row(plan: Decided, path: str, calls: int, owners: list[int], number: int) -> Region:
    problem, schedule, runs = plan.problem, plan.schedule, Counter(computes(plan.schedule))
    own = [i for i, owner in enumerate(owners) if owner == number]
    again = {i: runs[i] - 1 for i in own if runs[i] > 1}
    peak = simulate(problem, schedule).peak_step
    held = saved = 0
    for copy, kind in with_category(problem, schedule):
        if owners[problem.producer[copy.tensor]] == number:
            size = problem.tensors[copy.tensor].bytes
            saved += size if kind == "saved" else 0
            held += size if copy.made <= peak < copy.until else 0
    if owners[schedule[peak].index] == number:
        held += problem.ops[schedule[peak].index].workspace
    cost = sum(problem.ops[i].cost * times for i, times in again.items())
    return Region(path, calls, saved, held, len(again), problem.overhead(cost))


def lines(plan: Decided, longest: int = 240) -> list[str]:
    """The rows in sentences, with reasons cut short; none for a step that is planned as a whole."""
    if plan.prepared.regions is None:
        return []
    rows = [row for row in region_rows(plan) if row.path or not row.eager]  # why not as a whole is one of the notes
    count = sum(row.runs > 0 for row in rows)
    head = f"Planned by {count} region{'' if count == 1 else 's'} under one budget:"
    return [head, *(f"- {textwrap.shorten(str(row), longest, placeholder=' ...')}" for row in rows)]


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
