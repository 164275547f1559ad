"""Constraint 4 of the staged program: bytes that are surely live, at the slots and while a recompute runs.

The *moments* of a model are its slots, one for each op of the problem, followed by its runs, one for each R[i, k].
There are far more of them than a solution comes near to breaking, so `PeakRows` (`solvers.engine`) asks for the
left-hand sides of all of them, and for the rows of those that matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from .problem import Op
from .stages import COEFFICIENT_LIMIT, Stages


@dataclass(frozen=True)
class Rows:
    """Peak rows in compressed form: row j is sum(coefficients * columns over its range of `starts`) <= limits[j].

    Scaled so that coefficients stay small, and rounded so that each row stays valid: sizes down, budgets up.
    """

    slots: np.ndarray
    starts: np.ndarray
    columns: np.ndarray
    coefficients: np.ndarray
    limits: np.ndarray


NO_ROWS = Rows(*(np.zeros(n, dtype=np.int64) for n in (0, 1, 0, 0, 0)))


@dataclass(frozen=True)
class Holds:
    """Bytes surely held: from slot `first` until `stop`, `size` times the value of `column` (1 where it is -1)."""

    first: np.ndarray
    stop: np.ndarray
    column: np.ndarray
    size: np.ndarray


@dataclass(frozen=True)
class Terms:
    """`size` times the value of `column` (1 where it is -1), counted in sum number `group`."""

    group: np.ndarray
    column: np.ndarray
    size: np.ndarray

    @classmethod
    def of(cls, found: list[tuple[int, int, int]]) -> Terms:
        table = np.array(found, dtype=np.int64).reshape(-1, 3)
        return cls(*(np.ascontiguousarray(table[:, c]) for c in range(3)))

    def sums(self, values: np.ndarray, groups: int) -> np.ndarray:
        """The sum of each group; the last of `values` stands for 1."""
        return np.bincount(self.group, self.size * values[self.column], groups)

    def within(self, groups: np.ndarray) -> Terms:
        """Those of some groups (ascending), each group named by its place among them."""
        chosen = np.isin(self.group, groups)
        return Terms(np.searchsorted(groups, self.group[chosen]), self.column[chosen], self.size[chosen])


class Peaks:
    """The peak rows of one model."""

    def __init__(self, model: Stages) -> None:
        self.model, self.problem = model, model.problem
        self.sizes = np.array([t.bytes for t in self.problem.tensors], dtype=np.int64)
        self.slots = len(self.problem.ops)
        self.optional = np.array([op.optional for op in self.problem.ops], dtype=bool)

    @cached_property
    def held_bytes(self) -> np.ndarray:
        """For each slot, bytes of tensors that are not decided and live right before it in every schedule."""
        problem, held = self.problem, np.full(self.slots, self.problem.static_bytes, dtype=np.int64)
        for t, p in enumerate(problem.producer):
            if not self.model.decided[t] and not problem.ops[p].optional:
                end = self.slots if t in problem.pinned else max(problem.readers[t], default=p) + 1
                held[p + 1 : end] += self.sizes[t]
        return held

    @cached_property
    def fixed_bytes(self) -> np.ndarray:
        """For each slot, bytes that every schedule holds at it: all but the decided tensors it does not read."""
        fixed = self.held_bytes.copy()
        for s in range(self.slots):
            fixed[s] += self._own_bytes(s)
        return fixed

    def _own_bytes(self, i: int) -> int:
        """Bytes of what op i writes and of the decided tensors it reads, and its workspace."""
        op = self.problem.ops[i]
        read = sum(int(self.sizes[t]) for t in dict.fromkeys(op.inputs) if self.model.decided[t])
        return read + op.workspace + sum(int(self.sizes[t]) for t in op.outputs) - self._taken(op)

    def _taken(self, op: Op) -> int:
        return int(self.sizes[op.reuse[0]]) if op.reuse else 0

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """The (op, stage) of each run."""
        return list(self.model.R)

    @cached_property
    def run_bytes(self) -> np.ndarray:
        """For each run, what tensors held through its stage have to leave free, whether or not it runs: what one slot
        of the stage needs by itself, or `alone` where that is less. If it runs, it is `alone`.
        """
        ends, ops = (-1, *self.model.ends), self.problem.ops
        written = [op.workspace + sum(int(self.sizes[t]) for t in op.outputs) - self._taken(op) for op in ops]
        needs = np.where(self.optional, 0, self.held_bytes + np.array(written, dtype=np.int64))
        most = [int(needs[a + 1 : b + 1].max(initial=0)) for a, b in pairwise(ends)]
        found = [min(self.alone[j], most[k]) for j, (_, k) in enumerate(self.runs)]
        return np.array(found, dtype=np.int64)

    @cached_property
    def alone(self) -> list[int]:
        """For each run, what every schedule that runs it in that stage holds while it does."""
        ends, found = (-1, *self.model.ends), []
        for i, k in self.runs:
            held = self.held_bytes[max(i, ends[k]) + 1 : ends[k + 1] + 1]
            found.append(self._own_bytes(i) + (int(held.min()) if len(held) else self.problem.static_bytes))
        return found

    def crowded(self) -> Iterator[tuple[int, int]]:
        """(column, column that is taken off) by which a tensor is counted at some slot at which it does not fit; -1 for
        a constant, and for nothing that is taken off.
        """
        fixed = np.where(self.optional, 0, self.fixed_bytes)
        for t in self.model.decided_tensors:
            room = self.model.budget_bytes - int(self.sizes[t])
            for k in range(self.model.home[t], self.model.last_stage(t) + 1) if self.sizes[t] else ():
                held = list(self._holds_in(t, k))
                for (first, stop, column, size), (_, less_stop, less, off) in pairwise((*held, (0, 0, -1, 1))):
                    if size < 0:
                        continue
                    if column >= 0 and (off > 0 or fixed[less_stop:stop].max(initial=0) > room):
                        less = -1
                    if fixed[first:stop].max(initial=0) > room:
                        yield column, less

    def left_sides(self, values: np.ndarray) -> np.ndarray:
        """The left-hand sides of all rows at once, constants included; `values` go by `column`."""
        values = np.append(values, 1.0)
        held = self.holds.size * values[self.holds.column]
        change = np.zeros(self.slots + 1)
        np.add.at(change, self.holds.first, held)
        np.add.at(change, self.holds.stop, -held)
        at_slots = np.cumsum(change[:-1]) + self.fixed_bytes
        at_slots[self.optional] = 0
        stages = np.array([k for _, k in self.runs], dtype=np.int64)
        through = self.through.sums(values, len(self.model.ends))[stages]
        return np.concatenate((at_slots, self.run_bytes + through + self.apart.sums(values, len(self.runs))))

    def rows(self, moments: np.ndarray) -> Rows:
        """Constraint 4 at some moments (ascending), without those of optional ops, which need not run, and without the
        rows that no solution can break.
        """
        moments = moments[~np.append(self.optional, np.zeros(len(self.runs), dtype=bool))[moments]]
        columns = len(self.model.column)
        parts = self._slot_terms(moments), self._run_terms(moments)
        row = np.concatenate([part.group for part in parts])
        column = np.concatenate([part.column for part in parts])
        size = np.concatenate([part.size for part in parts])
        constant = np.concatenate((self.fixed_bytes, self.run_bytes))[moments]
        np.add.at(constant, row[column < 0], size[column < 0])
        # Tensors of one op share a column: its coefficients are added up.
        keys, place = np.unique((row * columns + column)[column >= 0], return_inverse=True)
        sums = np.zeros(len(keys), dtype=np.int64)
        np.add.at(sums, place, size[column >= 0])
        row, column = keys // columns, keys % columns
        highest = constant.copy()
        np.add.at(highest, row, np.maximum(sums, 0))
        kept = np.flatnonzero(highest > self.model.budget_bytes)
        chosen = np.isin(row, kept) & (sums != 0)
        row, column, sums = np.searchsorted(kept, row[chosen]), column[chosen], sums[chosen]
        largest = np.ones(len(kept), dtype=np.int64)
        np.maximum.at(largest, row, np.abs(sums))
        unit = -(-largest // COEFFICIENT_LIMIT)
        limits = -(-(self.model.budget_bytes - constant[kept]) // unit)
        starts = np.searchsorted(row, np.arange(len(kept) + 1))
        # A negative coefficient belongs to a size that was also added to the constant, so it is rounded down too.
        return Rows(moments[kept], starts, column, sums // unit[row], limits)

    def _slot_terms(self, moments: np.ndarray) -> Terms:
        holds = self.holds
        low, high = np.searchsorted(moments, holds.first), np.searchsorted(moments, holds.stop)
        counts = np.maximum(high - low, 0)
        before = np.cumsum(counts) - counts
        row = np.repeat(low - before, counts) + np.arange(counts.sum())
        return Terms(row, np.repeat(holds.column, counts), np.repeat(holds.size, counts))

    def _run_terms(self, moments: np.ndarray) -> Terms:
        first = int(np.searchsorted(moments, self.slots))
        chosen = moments[first:] - self.slots
        apart = self.apart.within(chosen)
        parts = [Terms(apart.group + first, apart.column, apart.size)]
        for place, j in enumerate(chosen.tolist()):
            stage = self.through.within(np.array([self.runs[j][1]]))
            parts.append(Terms(stage.group + first + place, stage.column, stage.size))
        return Terms(*(np.concatenate([getattr(p, name) for p in parts]) for name in ("group", "column", "size")))

    def run_terms(self, j: int) -> Iterator[tuple[int, int]]:
        """(column, size) of the row of one run; the column of a constant is -1."""
        terms = self._run_terms(np.array([self.slots + j]))
        return zip(terms.column.tolist(), terms.size.tolist(), strict=True)

    @cached_property
    def through(self) -> Terms:
        """For each stage, what is surely held wherever in it a recompute runs."""
        return Terms.of([(k, *term) for (_, k), terms in self._held_through.items() for term in terms])

    @cached_property
    def apart(self) -> Terms:
        """For each run, its own bytes, less what of its own is held through its stage."""
        found = []
        for j, (i, k) in enumerate(self.runs):
            op = self.problem.ops[i]
            found.append((j, self.model.column[self.model.R[i, k].name], self.alone[j] - int(self.run_bytes[j])))
            for t in dict.fromkeys((*op.inputs, *op.outputs)):
                found += [(j, column, -size) for column, size in self._held_through.get((t, k), ())]
        return Terms.of(found)

    @cached_property
    def _held_through(self) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """(column, size) by which tensor t is held wherever in stage k a recompute runs."""
        model, found = self.model, {}
        for (t, k), held in model.H.items():
            found[t, k] = [(model.column[held.name], int(self.sizes[t]))]
        for k, end in enumerate(model.ends):
            for t in dict.fromkeys(self.problem.ops[end].inputs):
                p = self.problem.producer[t]
                if model.decided[t] and k > model.home[t]:
                    found[t, k] = [(-1, int(self.sizes[t])), (model.column[model.R[p, k].name], -int(self.sizes[t]))]
        return found

    @cached_property
    def holds(self) -> Holds:
        """Constraint 4's terms at slots, each over the slots that it stands for."""
        found: list[tuple[int, int, int, int]] = []
        for t in self.model.decided_tensors:
            if self.sizes[t]:
                stages = range(self.model.home[t], self.model.last_stage(t) + 1)
                found += (hold for k in stages for hold in self._holds_in(t, k))
        table = np.array([hold for hold in found if hold[0] < hold[1]], dtype=np.int64).reshape(-1, 4)
        return Holds(*(np.ascontiguousarray(table[:, c]) for c in range(4)))

    def _holds_in(self, t: int, k: int) -> Iterator[tuple[int, int, int, int]]:
        """Where tensor t is surely held in stage k, by which variable."""
        model = self.model
        p, size, home = self.problem.producer[t], int(self.sizes[t]), model.home[t]
        first, end = (p + 1 if k == home else model.ends[k - 1] + 1), model.ends[k]
        readers = [r for r in self.problem.readers[t] if first <= r <= end]
        last = readers[-1] if readers else first - 1
        again = model.column[model.R[p, k].name]
        begin = first
        for stop in readers:  # at its readers it is counted as an input
            yield begin, stop, -1, size
            yield begin, stop, again, -size
            begin = stop + 1
        following = model.column[model.A[t, k + 1].name] if (t, k + 1) in model.A else None
        if k == home and following is not None:
            yield last + 1, end + 1, following, size
            yield last + 1, end, again, -size
        elif following is not None:
            if (t, k) in model.H:
                yield last + 1, end, model.column[model.H[t, k].name], size
            yield max(last + 1, end), end + 1, following, size
