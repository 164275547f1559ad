"""When each tensor of a step is written and read, under a changing set of recomputes.

Vocabulary: a *key* `slot * (n + 1) + op` is a moment of the step, ordered like the schedule; an *event* is
`2 * key + 1` where a tensor is written and `2 * key` where it is read; a tensor is live between two successive
events when the later one is a read, or always once written if it is an output of the step.
"""

from __future__ import annotations

from bisect import bisect_left

from .problem import Problem
from .schedule import Recompute, Schedule, with_frees


class Events:
    """The runs of a step, slot by slot, and the events of its tensors; at first nothing is recomputed."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.stride = len(problem.ops) + 1
        self.inputs = [tuple(dict.fromkeys(op.inputs)) for op in problem.ops]
        self.outputs = [op.outputs for op in problem.ops]
        self.pinned = [t in problem.pinned for t in range(len(problem.tensors))]
        self.events: list[list[int]] = [[] for _ in problem.tensors]
        self.items: list[list[int]] = [[] if op.optional else [i] for i, op in enumerate(problem.ops)]
        self.slots_of: list[list[int]] = [[] for _ in problem.ops]
        for i in problem.required():
            key = 2 * self.key(i, i)
            for t in self.inputs[i]:
                self.events[t].append(key)
            for t in self.outputs[i]:
                self.events[t].append(key + 1)

    def recomputes(self) -> list[Recompute]:
        """All recomputes, by slot, then by op."""
        ops = self.problem.ops
        return [(s, i) for s, items in enumerate(self.items) for i in items if i != s and not ops[i].optional]

    def has(self, slot: int, op: int) -> bool:
        """Whether `op` is recomputed right before `slot`."""
        return slot in self.slots_of[op]

    def schedule(self) -> Schedule:
        """The schedule this state stands for."""
        order = [i for items in self.items for i in items if not self.problem.ops[i].optional]
        return with_frees(self.problem, order)

    def key(self, slot: int, op: int) -> int:
        """The moment at which `op` runs in `slot`."""
        return slot * self.stride + op

    def slot(self, event: int) -> int:
        """The slot of an event."""
        return (event >> 1) // self.stride

    def around(self, tensor: int, key: int) -> tuple[int, int]:
        """The tensor's last event before `key` and its first at or after it; -1 where there is none."""
        events = self.events[tensor]
        j = bisect_left(events, 2 * key)
        return (events[j - 1] if j else -1), (events[j] if j < len(events) else -1)

    def is_live(self, tensor: int, key: int) -> bool:
        """Whether a recompute at `key` could read `tensor` without keeping it any longer than now."""
        before, after = self.around(tensor, key)
        return before >= 0 and (self.pinned[tensor] or (after >= 0 and not after & 1))

    def is_dead(self, slot: int, op: int) -> bool:
        """Whether nothing reads what the recompute writes before it is written again or the step ends."""
        key = self.key(slot, op)
        for t in self.problem.ops[op].outputs:
            after = self.around(t, key + 1)[1]
            if after >= 0 and not after & 1:
                return False
        return True

    def _is_last_read(self, t: int, event: int) -> bool:
        events = self.events[t]
        j = bisect_left(events, event)
        return not self.pinned[t] and (j + 1 == len(events) or bool(events[j + 1] & 1))
