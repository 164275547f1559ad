"""One run of a repeated part as a small problem of its own.

    before | forward of the run | away, apart | arrives | backward of the run

`before` writes what the run reads of earlier ops, `arrives` what its backward reads of ops in between. `away` and
`apart` stand for all that the step does between the two halves, in the forward and in the backward: they read what
others read of the run there, and what lives through them is what the run holds while others run. None of the four can
run again. An op of the run may run again where the step allows it, within the run's own two halves.

Bytes are told as differences from the step without recompute, so whatever lives through a run for others' sake need
not be known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from .live import Live
from .problem import Op, Problem, Tensor
from .repeats import MIDDLE, Run
from .schedule import Recompute


@dataclass(frozen=True)
class Part:
    """A run's small problem, and where its ops are in the step.

    Attributes:
        problem: `before`, the forward, `away`, `apart`, `arrives`, the backward.
        slots: for each op of `problem` the slot of the step that a recompute right before it stands in.
    """

    run: Run
    problem: Problem
    slots: tuple[int, ...]

    @property
    def away(self) -> int:
        """The slot of `away`; that of `apart` follows."""
        return len(self.run.forward) + 1

    @cached_property
    def key(self) -> object:
        """Equal for runs whose small problems are equal."""
        return self.problem.ops, self.problem.tensors, self.problem.outputs

    @property
    def has_between(self) -> bool:
        """Whether anything runs between its two halves."""
        return self.run.forward.stop < self.run.backward.start

    @cached_property
    def own(self) -> np.ndarray:
        """The small problem's slots that are ops of the run."""
        forward = np.arange(1, self.away)
        return np.concatenate((forward, np.arange(self.away + 3, len(self.slots))))

    @cached_property
    def places(self) -> np.ndarray:
        """Where `own` is in the step."""
        return np.concatenate((np.array(self.run.forward), np.array(self.run.backward)))

    @cached_property
    def plain(self) -> np.ndarray:
        """Live bytes at each slot of the small problem without recompute."""
        return Live(self.problem).total

    @cached_property
    def lag_bytes(self) -> int:
        """Bytes that others read in the forward alone: they can be freed in the backward without being freed there."""
        away, apart = (self.problem.ops[slot].inputs for slot in (self.away, self.away + 1))
        return sum(self.problem.tensors[t].bytes for t in away if t not in apart)

    def in_step(self, recomputes: Iterable[Recompute]) -> list[Recompute]:
        """Recomputes of the small problem as recomputes of the step."""
        first = self.run.forward.start - 1
        return [(self.slots[slot], first + op) for slot, op in recomputes]

    def holding(self, less: tuple[int, int], most_bytes: int) -> Problem:
        """The small problem under a budget of `most_bytes`, where `away` and `apart` leave so many bytes less room
        than they take without recompute.
        """
        ops = list(self.problem.ops)
        for slot, bytes_less in zip((self.away, self.away + 1), less, strict=True):
            room = most_bytes - int(self.plain[slot]) + bytes_less
            ops[slot] = replace(ops[slot], workspace=max(0, room))
        return replace(self.problem, ops=tuple(ops))


def parts_of(problem: Problem, runs: Sequence[Run]) -> list[Part]:
    """The small problem of each run. For the run of kind `MIDDLE` the others hold nothing beyond its forward."""
    owner = np.full(len(problem.ops), -1)
    for number, run in enumerate(runs):
        if run.kind != MIDDLE:
            owner[run.forward.start : run.forward.stop] = number
    return [_Cut(problem, run, owner.tolist()).part() for run in runs]


class _Cut:
    """The building of one part: tensors are numbered as they are met, so that equal runs give equal problems."""

    def __init__(self, problem: Problem, run: Run, owner: list[int]) -> None:
        self.problem, self.run, self.owner = problem, run, owner
        self.number: dict[int, int] = {}
        self.sizes: list[int] = []
        self.away: list[int] = []
        self.apart: list[int] = []
        self.kept: list[int] = []

    def part(self) -> Part:
        run = self.run
        before = self._from_outside((*run.forward, *run.backward), range(run.forward.start))
        ops = [Op("before", (), self._enter(before), 0, recomputable=False)]
        ops += [self._own(i) for i in run.forward]
        for t in (t for i in run.forward for t in self.problem.ops[i].outputs):
            self._read_by_others(t)
        ops += [Op(name, self._named(reads), (), 0, recomputable=False) for name, reads in
                (("away", self.away), ("apart", self.apart))]  # fmt: skip
        between = self._from_outside(run.backward, range(run.forward.stop, run.backward.start))
        ops.append(Op("arrives", (), self._enter(between), 0, recomputable=False))
        ops += [self._own(i) for i in run.backward]
        self.kept += [t for i in run.backward for t in self.problem.ops[i].outputs if self._is_read_after(t)]
        tensors = tuple(Tensor("", size) for size in self.sizes)
        small = Problem(tuple(ops), tensors, len(run.forward) + 3, self._named(self.kept))
        begin = run.backward.start
        slots = (run.forward.start, *run.forward, run.forward.stop, begin, begin, *run.backward)
        return Part(run, small, slots)

    def _from_outside(self, ops: Iterable[int], producers: range) -> list[int]:
        """What some ops read of others."""
        found: dict[int, None] = {}
        for i in ops:
            op = self.problem.ops[i]
            for t in (*op.inputs, *op.replay_inputs):
                if self.problem.producer[t] in producers:
                    found[t] = None
        return list(found)

    def _enter(self, tensors: list[int]) -> tuple[int, ...]:
        self.kept += [t for t in tensors if self._is_read_after(t)]
        return self._named(tensors)

    def _named(self, tensors: Iterable[int]) -> tuple[int, ...]:
        for t in tensors:
            if t not in self.number:
                self.number[t] = len(self.sizes)
                self.sizes.append(self.problem.tensors[t].bytes)
        return tuple(self.number[t] for t in tensors)

    def _own(self, i: int) -> Op:
        op = self.problem.ops[i]
        return replace(op, name="", inputs=self._named(op.inputs), outputs=self._named(op.outputs),
                       replay_inputs=self._named(op.replay_inputs), reuse=self._named(op.reuse))  # fmt: skip

    def _is_read_after(self, t: int) -> bool:
        """Whether it lives on after the run's backward."""
        readers = self.problem.readers[t]
        return t in self.problem.pinned or (bool(readers) and readers[-1] >= self.run.backward.stop)

    def _read_by_others(self, t: int) -> None:
        """Where ops outside the run read its tensor. Another run may need its input until its own backward."""
        run, here = self.run, self.owner[self.run.forward.start]
        others = [r for r in self.problem.readers[t] if r not in run.forward and r < run.backward.start]
        if others and others[0] < self.problem.num_forward:
            self.away.append(t)
        again = (r for r in others if self.owner[r] not in (-1, here) and self.problem.ops[r].recomputable)
        if others and (others[-1] >= self.problem.num_forward or next(again, None) is not None):
            self.apart.append(t)
        if self._is_read_after(t):
            self.kept.append(t)
