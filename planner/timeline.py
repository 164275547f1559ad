"""Live bytes over the step, by category."""

from __future__ import annotations

from dataclasses import dataclass

from solvers.problem import Problem
from solvers.schedule import Schedule
from solvers.simulate import taken_over

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
    """Replay `schedule`, keeping the bytes of each category apart."""
    kinds = _copies(problem, schedule)
    rows: dict[str, list[int]] = {c: [] for c in CATEGORIES}
    level = dict.fromkeys(CATEGORIES, 0)
    level["parameters"] = problem.static_bytes
    holder: dict[int, str] = {}
    labels: list[str] = []
    backward_from = 0
    for position, (kind, i) in enumerate(schedule):
        if kind == "free":
            level[holder.pop(i)] -= problem.tensors[i].bytes
            continue
        op = problem.ops[i]
        if i == problem.num_forward:
            backward_from = len(labels)
        transient = op.workspace
        taken = taken_over(problem, schedule, position)
        if taken is not None and op.outputs[0] in holder:
            taken = None
        for t in op.outputs:
            if t in holder:
                transient += problem.tensors[t].bytes
            else:
                holder[t] = kinds[position, t]
                level[holder[t]] += problem.tensors[t].bytes
        labels.append(op.name)
        if taken is not None:
            level[holder[taken]] -= problem.tensors[taken].bytes
        for category in CATEGORIES:
            rows[category].append(level[category] + (transient if category == "temporary" else 0))
        if taken is not None:
            level[holder[taken]] += problem.tensors[taken].bytes
    return Timeline(tuple(labels), backward_from, {c: tuple(v) for c, v in rows.items()})


def _copies(problem: Problem, schedule: Schedule) -> dict[tuple[int, int], str]:
    """The category of the copy that a compute (by its position) makes of a tensor."""
    kinds: dict[tuple[int, int], str] = {}
    done: set[int] = set()
    boundary = next(p for p, s in enumerate(schedule) if s.kind == "compute" and s.index == problem.num_forward)
    held: dict[int, int] = {}
    for position, (kind, i) in enumerate(schedule):
        if kind == "free":
            made = held.pop(i, None)
            if made is not None and made < boundary < position and kinds[made, i] == "temporary":
                kinds[made, i] = "saved"
            continue
        for t in problem.ops[i].outputs:
            category = problem.tensors[t].category
            kinds[position, t] = (
                "gradients" if category == "gradient" else "recomputed" if i in done
                else "saved" if category == "output" else "temporary"
            )  # fmt: skip
            held.setdefault(t, position)
        done.add(i)
    return kinds
