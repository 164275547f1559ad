"""Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost": checkpoint every so many bytes, drop the rest.

The forward is cut at its articulation points: ops that every path from its first to its last op goes through.
Walking the cut points, one becomes a checkpoint whenever the bytes since the last one exceed a granularity b.
What lies between two checkpoints is dropped after the forward and recomputed, as a whole segment, right before
the first backward op that reads any of it. Chen's choice for b is the square root of (bytes times largest cut);
here a range of b is tried, and of the segmentations that fit the cheapest wins, so a larger budget never
costs more.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import ClassVar

import networkx as nx

from .base import CLOCK, Effort, Solver
from .bounds import floor_bytes
from .known import FALLBACK, remember
from .live import Live
from .minimum import KNOWN_SHARE, budget_error
from .problem import LARGE, Problem
from .schedule import Recompute
from .solution import Solution, cheapest_fit

GRANULARITIES = 32


@dataclass(frozen=True)
class Chen(Solver):
    """Segments between articulation points, at the granularity that fits."""

    name: ClassVar[str] = "chen"

    def search(self, problem: Problem, budget_bytes: int, plain: Solution, effort: Effort) -> Solution:
        backbone = _backbone(problem)
        best: Live | None = None
        lowest: Live | None = None
        notes: tuple[str, ...] = ()
        for checkpoints in segmentations(problem, backbone):
            if time.monotonic() > effort.until():
                notes = (CLOCK,)
                break
            live = checkpointed(problem, checkpoints, backbone)
            in_time = lowest is None or time.monotonic() < effort.until(KNOWN_SHARE)
            if in_time and (lowest is None or live.peak_bytes < lowest.peak_bytes):
                lowest = live
            if live.peak_bytes <= budget_bytes and (best is None or live.cost < best.cost):
                best = live
        schedules = [best.schedule()] if best is not None else []
        found = cheapest_fit(problem, budget_bytes, self.name, (*schedules, *effort.warm_starts))
        if found is None:
            smallest = plain.peak_bytes if lowest is None else min(plain.peak_bytes, lowest.peak_bytes)
            if lowest is not None:
                remember(problem, lowest.schedule(), FALLBACK)
            raise budget_error(budget_bytes, smallest, floor_bytes(problem), hurried=bool(notes))
        return replace(found, notes=notes)


def cut_points(problem: Problem, backbone: list[int]) -> list[int]:
    """Forward ops whose removal separates the ops before them from the ops after, in order."""
    members = set(backbone)
    graph = nx.Graph()
    graph.add_nodes_from(backbone)
    for i in backbone:
        producers = (problem.producer[t] for t in problem.ops[i].inputs)
        graph.add_edges_from((p, i) for p in producers if p in members)
    return sorted(nx.articulation_points(graph))


def _backbone(problem: Problem) -> list[int]:
    """Ops that descend from the forward's most read source; masks and constants that feed every layer do not."""
    reached = [1 << i for i in problem.forward]  # a bit for the op and each that descends from it
    sources = []
    for i in reversed(problem.forward):
        producers = {problem.producer[t] for t in problem.ops[i].inputs}
        for p in producers:
            reached[p] |= reached[i]
        sources += [] if producers or problem.ops[i].optional else [i]
    if not sources:
        return []
    source = max(sources, key=lambda i: (reached[i].bit_count(), -i))
    return [i for i in problem.forward if reached[source] >> i & 1]


def segmentations(problem: Problem, backbone: list[int]) -> list[tuple[int, ...]]:
    """Distinct lists of checkpoints, from the finest granularity to a single segment."""
    cuts = cut_points(problem, backbone)
    sizes = [sum(problem.tensors[t].bytes for t in op.outputs) for op in problem.ops]
    total = sum(sizes[: problem.num_forward])
    found: dict[tuple[int, ...], None] = {}
    count = GRANULARITIES if len(problem.ops) <= LARGE else GRANULARITIES // 4
    for step in range(count + 1):
        found[_checkpoints(problem, cuts, sizes, total * step * step // count**2)] = None
    return list(found)


def _checkpoints(problem: Problem, cuts: list[int], sizes: list[int], granularity: int) -> tuple[int, ...]:
    chosen = []
    allowed = set(cuts)
    since = 0
    for i in problem.forward:
        since += sizes[i]
        if i in allowed and since > granularity:
            chosen.append(i)
            since = 0
    return tuple(chosen)


def checkpointed(problem: Problem, checkpoints: tuple[int, ...], backbone: list[int]) -> Live:
    """Save checkpoints, and what may not be recomputed; recompute each segment before its first backward read."""
    segment_of = _segments(problem, checkpoints)
    saved = set(checkpoints)
    members: dict[int, list[int]] = {}
    dropped = {i for i in backbone if problem.ops[i].recomputable and i not in saved}
    for i in sorted(dropped):
        members.setdefault(segment_of[i], []).append(i)
    live = Live(problem)
    done: set[int] = set()
    for s in problem.backward:
        for t in problem.ops[s].inputs:
            p = problem.producer[t]
            if p in dropped and segment_of[p] not in done:
                done.add(segment_of[p])
                live.add_all(_segment(problem, members[segment_of[p]], s))
    return live


def _segments(problem: Problem, checkpoints: tuple[int, ...]) -> list[int]:
    """For each forward op the number of checkpoints before it."""
    ends = set(checkpoints)
    segment, result = 0, []
    for i in problem.forward:
        result.append(segment)
        segment += i in ends
    return result


def _segment(problem: Problem, ops: list[int], slot: int) -> list[Recompute]:
    """Recomputes, in `slot`, of those ops of a segment that something from there on needs."""
    needed: set[int] = set()
    for i in reversed(ops):
        readers = (r for t in problem.ops[i].outputs for r in problem.readers[t])
        if any(r >= slot or r in needed for r in readers):
            needed.add(i)
    return [(slot, i) for i in ops if i in needed]
