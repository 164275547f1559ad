"""Live bytes over the step, by category."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from solvers.problem import Problem
from solvers.replay import Copy, copies
from solvers.schedule import Schedule, Step

CATEGORIES = ("parameters", "gradients", "saved", "recomputed", "temporary")


@dataclass(frozen=True)
class Timeline:
    """Bytes resident *during* each compute of a schedule.

    Attributes:
        labels: the op that runs.
        backward_from: index of the first step of the backward.
        bytes: for each category, one figure per step; `temporary` includes the op's workspace and fresh outputs.
    """

    labels: tuple[str, ...]
    backward_from: int
    bytes: dict[str, tuple[int, ...]]

    @property
    def total(self) -> tuple[int, ...]:
        """Sum over the categories, per step."""
        return tuple(map(sum, zip(*self.bytes.values(), strict=True)))

    @property
    def peak(self) -> tuple[int, str, int]:
        """`(step, op, bytes)` of the first highest step."""
        total = self.total
        step = max(range(len(total)), key=total.__getitem__)
        return step, self.labels[step], total[step]


def timeline(problem: Problem, schedule: Schedule) -> Timeline:
    """The copies that `schedule` makes of tensors, added up by category."""
    changes = {category: [0] * (len(schedule) + 1) for category in CATEGORIES}
    for copy, category in with_category(problem, schedule):
        changes[category][copy.made] += problem.tensors[copy.tensor].bytes
        changes[category][copy.until] -= problem.tensors[copy.tensor].bytes
    changes["parameters"][0] += problem.static_bytes
    levels = {category: list(accumulate(change)) for category, change in changes.items()}
    runs = [(position, problem.ops[step.index]) for position, step in enumerate(schedule) if step.kind == "compute"]
    rows = {category: tuple(level[position] for position, _ in runs) for category, level in levels.items()}
    rows["temporary"] = tuple(b + op.workspace for b, (_, op) in zip(rows["temporary"], runs, strict=True))
    backward_from = [position for position, _ in runs].index(_boundary(problem, schedule))
    return Timeline(tuple(op.name for _, op in runs), backward_from, rows)


def with_category(problem: Problem, schedule: Schedule) -> Iterable[tuple[Copy, str]]:
    """Every copy of a tensor (`solvers.replay.copies`) with what it is for."""
    boundary = _boundary(problem, schedule)
    return ((copy, _category(problem, copy, boundary)) for copy in copies(problem, schedule))


def _boundary(problem: Problem, schedule: Schedule) -> int:
    return schedule.index(Step("compute", problem.num_forward))


def _category(problem: Problem, copy: Copy, boundary: int) -> str:
    category = problem.tensors[copy.tensor].category
    crosses = copy.made < boundary < copy.until and copy.tensor not in problem.pinned
    if category == "gradient":
        return "gradients"
    return "recomputed" if copy.again else "saved" if category == "output" or crosses else "temporary"
