"""An incremental simulator: the live bytes of a step while recomputes are added to it and taken away.

A plan is a set of *recomputes*, pairs (slot, op): run `op` again right before required op `slot`. Inside a
slot recomputes run in the order of their indices. Every such set is a valid schedule, because the first run of
each op comes before; what a recompute changes is only how long tensors stay live. `Live` keeps, for every slot,
the bytes at its worst moment, and updates them when one recompute comes or goes, by touching only the tensors
that the op reads and writes. It agrees with `simulate` to the byte; `simulate` remains the referee.

Vocabulary: a *key* `slot * (n + 1) + op` is a moment of the step, ordered like the schedule; an *event* is
`2 * key + 1` where a tensor is written and `2 * key` where it is read; a tensor is live between two successive
events when the later one is a read, or always once written if it is an output of the step.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

import numpy as np

from .problem import Problem
from .schedule import Recompute, Schedule, with_frees

Move = list[tuple[int, int, int]]  # (1, slot, op) comes, (-1, slot, op) goes
Levels = tuple[np.ndarray, list[int]]


class Live:
    """Live bytes per slot under a changing set of recomputes."""

    def __init__(self, problem: Problem, recomputes: Iterable[Recompute] = ()) -> None:
        self.problem = problem
        self.stride = len(problem.ops) + 1
        self.inputs = [tuple(dict.fromkeys(op.inputs)) for op in problem.ops]
        self.outputs = [op.outputs for op in problem.ops]
        self.pinned = [t in problem.pinned for t in range(len(problem.tensors))]
        self.events: list[list[int]] = [[] for _ in problem.tensors]
        self.items: list[list[int]] = [[] if op.optional else [i] for i, op in enumerate(problem.ops)]
        self.slots_of: list[list[int]] = [[] for _ in problem.ops]
        self.bytes = [t.bytes for t in problem.tensors]
        self.replays = [tuple(dict.fromkeys((*op.inputs, *op.replay_inputs))) for op in problem.ops]
        self.alloc = [op.workspace + sum(self.bytes[t] for t in op.outputs) for op in problem.ops]
        self.reuse = [op.reuse for op in problem.ops]
        self.cost = 0
        self.journal: list[tuple[int, int, int]] | None = None
        self.total = np.zeros(len(problem.ops), dtype=np.int64)
        self.relative = [0] * len(problem.ops)
        self._deferred: dict[int, None] | None = None
        self._undoing = False  # what is live where is about to be put back
        self.optional_slot: dict[int, int] = {}
        self._load_plain()
        self.add_all(recomputes)

    @property
    def peak_bytes(self) -> int:
        """The peak of the step, static bytes included."""
        return self.problem.static_bytes + (max(0, int(self.total.max())) if len(self.total) else 0)

    def add(self, slot: int, op: int) -> None:
        """Recompute `op` right before `slot`."""
        if self.journal is not None:
            self.journal.append((1, slot, op))
        insort(self.slots_of[op], slot)
        self.cost += self.problem.ops[op].cost
        self._place(slot, op, self.replays[op])
        self._refresh_optional(op)

    def add_all(self, recomputes: Iterable[Recompute]) -> None:
        """Add many at once."""
        self.apply((1, slot, op) for slot, op in recomputes)

    def apply(self, move: Iterable[tuple[int, int, int]]) -> None:
        """Make several changes at once; slots are looked at again only at the end."""
        self._refresh_all(self._apply(move))

    def levels(self) -> Levels:
        """What `take_back` needs to know of the state before a move."""
        return self.total.copy(), self.relative.copy()

    def take_back(self, move: Move, before: Levels) -> None:
        """Undo the last `apply`; no slot is looked at again."""
        self._undoing = True
        self._apply((-sign, slot, op) for sign, slot, op in reversed(move))
        self._undoing = False
        self.total, self.relative = before

    def _apply(self, move: Iterable[tuple[int, int, int]]) -> dict[int, None]:
        """Returns the slots that have to be looked at again."""
        self._deferred = {}
        for sign, slot, op in move:
            (self.add if sign > 0 else self.remove)(slot, op)
        dirty, self._deferred = self._deferred, None
        return dirty

    def remove(self, slot: int, op: int) -> None:
        """Take back `add(slot, op)`."""
        if self.journal is not None:
            self.journal.append((-1, slot, op))
        self.slots_of[op].remove(slot)
        self.cost -= self.problem.ops[op].cost
        self._displace(slot, op, self.replays[op])
        self._refresh_optional(op)

    def rollback(self, mark: int = 0) -> None:
        """Undo what the journal holds from `mark` on."""
        journal, self.journal = self.journal or [], None
        for sign, slot, op in reversed(journal[mark:]):
            (self.remove if sign > 0 else self.add)(slot, op)
        del journal[mark:]
        self.journal = journal

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

    def worst_key(self, slot: int) -> int:
        """The worst moment of `slot`."""
        worst, at = -1, slot
        for moment, op in self._walk(slot):
            if moment > worst:
                worst, at = moment, op
        return self.key(slot, at)

    def _load_plain(self) -> None:
        for i in self.problem.required():
            key = 2 * self.key(i, i)
            for t in self.inputs[i]:
                self.events[t].append(key)
            for t in self.outputs[i]:
                self.events[t].append(key + 1)
        for t, events in enumerate(self.events):
            if events:
                last = len(self.total) if self.pinned[t] else self.slot(events[-1]) + 1
                self.total[self.slot(events[0]) + 1 : last] += self.bytes[t]
        for slot in range(len(self.total)):
            self._refresh(slot)

    def _place(self, slot: int, op: int, reads: Sequence[int]) -> None:
        insort(self.items[slot], op)
        event = 2 * self.key(slot, op)
        dirty = {slot: None}
        for t in reads:
            self._insert(t, event, dirty)
        for t in self.outputs[op]:
            self._insert(t, event + 1, dirty)
        self._refresh_all(dirty)

    def _displace(self, slot: int, op: int, reads: Sequence[int]) -> None:
        self.items[slot].remove(op)
        event = 2 * self.key(slot, op)
        dirty = {slot: None}
        for t in reads:
            self._delete(t, event, dirty)
        for t in self.outputs[op]:
            self._delete(t, event + 1, dirty)
        self._refresh_all(dirty)

    def _insert(self, t: int, event: int, dirty: dict[int, None]) -> None:
        events = self.events[t]
        j = bisect_left(events, event)
        if not self._undoing:
            self._shift(t, events, j, event, 1, dirty)
        events.insert(j, event)

    def _delete(self, t: int, event: int, dirty: dict[int, None]) -> None:
        events = self.events[t]
        j = bisect_left(events, event)
        del events[j]
        if not self._undoing:
            self._shift(t, events, j, event, -1, dirty)

    def _shift(self, t: int, events: list[int], j: int, event: int, sign: int, dirty: dict[int, None]) -> None:
        """Account for `event` coming (sign 1) between events j - 1 and j, or going (sign -1)."""
        slot = self.slot(event)
        if j == 0:
            self._shift_first(t, events, slot, sign)
            return
        was_live = j < len(events) and not events[j] & 1
        now_live = not event & 1
        if was_live == now_live or self.pinned[t]:
            return
        before = self.slot(events[j - 1])
        dirty[before] = None
        delta = sign * self.bytes[t] * (1 if now_live else -1)
        if delta and before < slot:
            self.total[before + 1 : slot + 1] += delta

    def _shift_first(self, t: int, events: list[int], slot: int, sign: int) -> None:
        """A first event is the write of an optional op: the tensor comes to life with it."""
        end = len(self.total) if self.pinned[t] else (self.slot(events[0]) + 1 if events else slot + 1)
        self.total[slot + 1 : end] += sign * self.bytes[t]

    def _refresh_all(self, slots: dict[int, None]) -> None:
        if self._deferred is not None:
            self._deferred.update(slots)
            return
        for slot in slots:
            self._refresh(slot)

    def _refresh(self, slot: int) -> None:
        worst = max((moment for moment, _ in self._walk(slot)), default=0)
        if worst != self.relative[slot]:
            self.total[slot] += worst - self.relative[slot]
            self.relative[slot] = worst

    def _walk(self, slot: int) -> list[tuple[int, int]]:
        """(moment, op) of each run in the slot, in bytes above what is live when the slot begins."""
        items, begin, current = self.items[slot], 2 * slot * self.stride, 0
        moments = []
        for i in items:
            event = begin + 2 * i
            moments.append((current + (self._needs(event, i) if self.reuse[i] else self.alloc[i]), i))
            if i != items[-1]:
                current += self._change(event, i)
        return moments

    def _needs(self, event: int, op: int) -> int:
        """Bytes that a run allocates: an in-place op takes over the input that it is the last to read."""
        candidates = self.reuse[op]
        if not candidates:
            return self.alloc[op]
        written = self.problem.ops[op].outputs[0]
        if self.pinned[written] and self.events[written][0] < event:
            return self.alloc[op]
        dying = any(self._is_last_read(t, event) for t in candidates)
        return self.alloc[op] - (self.bytes[written] if dying else 0)

    def _change(self, event: int, op: int) -> int:
        """Bytes that become resident by recomputing `op`, less those that its last reads set free."""
        change = 0
        for t in self.outputs[op]:
            events = self.events[t]
            j = bisect_left(events, event + 1)
            if self.pinned[t]:
                change += self.bytes[t] if j == 0 else 0
            elif j + 1 < len(events) and not events[j + 1] & 1:
                change += self.bytes[t]
        for t in self.replays[op]:
            events = self.events[t]
            j = bisect_left(events, event) + 1
            if (j == len(events) or events[j] & 1) and not self.pinned[t]:
                change -= self.bytes[t]
        return change

    def _refresh_optional(self, op: int) -> None:
        """Put the optional ops that `op` replays right before the first op that is recomputed, or leave them out."""
        for t in self.problem.ops[op].replay_inputs:
            p = self.problem.producer[t]
            if not self.problem.ops[p].optional:
                continue
            wanted = next((i for i in self.problem.replayers[p] if self.slots_of[i]), -1)
            current = self.optional_slot.get(p, -1)
            if wanted == current:
                continue
            if current >= 0:
                self._displace(current, p, ())
            if wanted >= 0:
                self._place(wanted, p, ())
            self.optional_slot[p] = wanted

    def _is_last_read(self, t: int, event: int) -> bool:
        events = self.events[t]
        j = bisect_left(events, event)
        return not self.pinned[t] and (j + 1 == len(events) or bool(events[j + 1] & 1))
