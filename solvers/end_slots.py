"""Which slots end the stages of a first program: those where memory is tightest."""

from __future__ import annotations

import numpy as np

from .peaks import Peaks
from .problem import Problem
from .stages import Stages

NEAR_END = 10
ABOUT = 0.99


def plain_bytes(problem: Problem) -> np.ndarray:
    """What is live at each slot when nothing is recomputed, workspace and takeovers aside."""
    change = np.zeros(len(problem.ops) + 1, dtype=np.int64)
    for t, p in enumerate(problem.producer):
        end = len(problem.ops) if t in problem.pinned else max(problem.readers[t], default=p) + 1
        change[p] += problem.tensors[t].bytes
        change[end] -= problem.tensors[t].bytes
    total: np.ndarray = np.cumsum(change)[:-1]
    return total


def first_ends(problem: Problem, count: int, budget_bytes: int) -> tuple[int, ...]:
    """End slots for a first program, about `count` of them, where most bytes are needed.

    The forward is one stage except for what comes after its cut (`_forward_cut`), unless its own peak can bind: then
    the part of it that exceeds the budget without recompute is cut as finely as the backward.
    """
    last = len(problem.ops) - 1
    fixed = Peaks(Stages(problem, 0, (last,))).fixed_bytes.tolist()
    cut = _forward_cut(problem, fixed)
    own = _own_bytes(problem)
    over = np.flatnonzero(own > budget_bytes)
    windows = [] if not len(over) else _windows(int(over[0]), int(over[-1]) + 1, count)
    ends = {cut, last} | {max(w, key=lambda s: own[s]) for w in windows}
    for window in _windows(problem.num_forward, last + 1, count):
        ends.add(max(window, key=lambda s: fixed[s]))
    return tuple(sorted(s for s in ends if not problem.ops[s].optional or s == last))


def forward_binds(problem: Problem, budget_bytes: int) -> bool:
    """Whether the forward alone exceeds the budget where nothing is recomputed."""
    return bool((_own_bytes(problem) > budget_bytes).any())


def _windows(first: int, stop: int, count: int) -> list[range]:
    """`count` equal parts of the slots from `first` to `stop`, or as many as there are."""
    count = min(count, stop - first)
    return [range(first + (stop - first) * j // count, first + (stop - first) * (j + 1) // count) for j in range(count)]


def _own_bytes(problem: Problem) -> np.ndarray:
    """What is live at each slot of the forward when nothing is recomputed and nothing kept for the backward."""
    change = np.zeros(len(problem.ops) + 1, dtype=np.int64)
    for t, p in enumerate(problem.producer):
        if problem.ops[p].optional:
            continue
        inside = (r for r in problem.readers[t] if r < problem.num_forward)
        end = len(problem.ops) if t in problem.pinned else max(inside, default=p) + 1
        change[p] += problem.tensors[t].bytes
        change[end] -= problem.tensors[t].bytes
    workspace = np.array([op.workspace for op in problem.ops])
    own: np.ndarray = np.cumsum(change)[:-1] + workspace + problem.static_bytes
    return own[: problem.num_forward]


def _forward_cut(problem: Problem, fixed: list[int]) -> int:
    """Where stage 0 ends: near the end of the forward, of the slots that are about as high as any there when
    nothing is dropped, the one that needs most whatever is dropped. Often it is the loss.
    """
    last = problem.num_forward - 1
    near = range(max(0, last - problem.num_forward // NEAR_END), last + 1)
    total = plain_bytes(problem)
    highest = max((int(total[s]) for s in near), default=0)
    slots = [s for s in near if total[s] >= ABOUT * highest and not problem.ops[s].optional]
    return max(slots, key=lambda s: fixed[s], default=max(last, 0))
