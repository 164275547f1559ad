"""Everything measured on one model, in a process of its own: peers, ours at their peaks, all timed in turns."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from .measure import Reference, Subject, clear, compare, interleaved_seconds, memory, ratio, reference, step, work
from .methods import Failure, Peers, Way, quoted
from .mincut import Graphs, patient_dynamo
from .models import build
from .ours import Ours, Planned
from .point import Point, versions, write

WARM_UP = 1
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


@dataclass(frozen=True)
class Task:
    """What to measure on one model.

    Attributes:
        methods: of "block", "sqrt", "selective", "mincut", "ours".
        budgets, knapsacks: settings of the min-cut partitioner.
        shares: our further budgets, as shares of the way from the minimum to the plain peak.
        rounds: timed rounds.
        clock: "wall", or "processor" for processor seconds.
        time_limit: seconds for each of our solves.
        problem: where to write our problem with the budgets asked for; None writes nothing.
    """

    model: str
    methods: tuple[str, ...]
    budgets: tuple[float, ...]
    knapsacks: tuple[str, ...]
    shares: tuple[float, ...]
    rounds: int
    time_limit: float
    clock: str = "wall"
    problem: Path | None = None


def run(task: Task, results: Path, say: Callable[[str], None]) -> None:
    """Measure and write `results` anew after each method, so that a crash loses only what had not been reached."""
    bench = _Bench(task, results, say)
    with patient_dynamo():  # the model's library is imported by now: its log calls are known
        bench.run()


class _Bench:
    def __init__(self, task: Task, results: Path, say: Callable[[str], None]) -> None:
        self.task, self.results, self.say = task, results, say
        self.model, self.sample = build(task.model)
        self.points: list[Point] = []
        self.timed: list[tuple[Point, Subject]] = []
        self.versions = {**versions(), "clock": task.clock}
        self.plain_flops = self.plain_moved = 0
        self.reference: Reference = reference(self.model, self.sample)

    def run(self) -> None:
        self._plain()
        peers = Peers(self.model, self.sample, self.task.budgets, self.task.knapsacks)
        for way in peers.ways(self.task.methods):
            self._peer(way)
        if "ours" in self.task.methods:
            self._ours()
        self._time()
        self._save()

    def _save(self) -> None:
        write(self.results, self.points)

    def _add(self, point: Point, subject: Subject | None = None, graphs: Graphs | None = None) -> None:
        """Measure all but time; an error on the way is the point's own."""
        point.versions = self.versions
        if subject is not None:
            try:
                self._measure(point, subject, graphs)
                self.timed.append((point, subject))
            except Failure as error:
                point.error = quoted(error)
        self.points.append(point)
        self._save()
        self.say(f"{self.task.model}: {point.label}: {point.error or f'{point.peak_bytes / 2**20:.1f} MiB'}")

    def _measure(self, point: Point, subject: Subject, graphs: Graphs | None) -> None:
        point.different, point.difference = compare(subject, self.sample, self.reference)
        found = memory(subject, self.sample)
        point.peak_bytes, point.activation_bytes = found.peak, found.activations
        point.parameter_bytes, point.buffer_bytes = found.parameters, found.buffers
        point.input_bytes, point.gradient_bytes = found.inputs, found.gradients
        if graphs is None:
            counted = work(subject, self.sample)
            point.flops, point.moved_bytes = counted.flops, counted.moved_bytes
        else:
            graphs.restart()
            step(subject.module, self.sample)
            clear(subject.owner)
            point.flops = self.plain_flops + graphs.added_flops
            point.moved_bytes = self.plain_moved + graphs.added_bytes

    def _plain(self) -> None:
        point = Point(self.task.model, "plain")
        self._add(point, Subject(*[copy.deepcopy(self.model)] * 2))
        if point.error is not None:
            raise RuntimeError(f"plain eager failed on {self.task.model}: {point.error}")
        self.plain_flops, self.plain_moved = point.flops, point.moved_bytes

    def _peer(self, way: Way) -> None:
        point = Point(
            self.task.model, way.method, way.setting, error=way.error, note=way.note,
            planning_seconds=way.planning_seconds,
        )  # fmt: skip
        self._add(point, way.subject, way.graphs)

    def _ours(self) -> None:
        own: nn.Module = copy.deepcopy(self.model)
        try:
            ours = Ours(own, self.sample, self.task.time_limit)
        except Failure as error:
            self._add(Point(self.task.model, "ours", error=quoted(error)))
            return
        peaks = _distinct([(p.label, p.peak_bytes) for p in self.points if p.ok and p.method != "plain"])
        peaks.insert(0, ("plain", next(p.peak_bytes for p in self.points if p.method == "plain")))
        for planned in ours.plans(peaks, self.task.shares):
            self._plan(ours, planned)
        if self.task.problem is not None:
            ours.dump(self.task.problem, dict(peaks))

    def _plan(self, ours: Ours, planned: Planned) -> None:
        point = Point(
            self.task.model, "ours", planned.setting, error=planned.error, budget_bytes=planned.budget_bytes,
            floor_bytes=planned.floor_bytes, planning_seconds=ours.prepare_seconds + planned.seconds,
        )  # fmt: skip
        plan = planned.plan
        if plan is None:
            self._add(point)
            return
        point.predicted_bytes, point.overhead, point.bound = plan.peak_bytes, plan.overhead, plan.bound
        point.status, point.solver, point.note = plan.status, plan.solver, "; ".join(plan.notes)
        self._add(point, ours.subject(plan))

    def _time(self) -> None:
        subjects = [s for _, s in self.timed]
        taken = interleaved_seconds(subjects, self.sample, WARM_UP + self.task.rounds, CLOCKS[self.task.clock])
        plain = taken[0][WARM_UP:]
        for (point, _), seconds in zip(self.timed, taken, strict=True):
            point.seconds = statistics.median(seconds[WARM_UP:])
            point.ratio = ratio(seconds[WARM_UP:], plain)


def _distinct(peaks: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Peers with the same peak to the byte share one plan, under the first one's name."""
    by_peak: dict[int, str] = {}
    for label, peak in peaks:
        by_peak.setdefault(peak, label)
    return [(label, peak) for peak, label in by_peak.items()]
