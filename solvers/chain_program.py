"""The dynamic program over the stretches of a chain, after theorem 1 of rotor's paper (`solvers.rotor`).

Value
    V[s, t, keep, have]  the least cost of running the forward of stages s..t and then their backward, as a function
                   of the bytes it may use: a staircase of (bytes, cost). What stage s reads is resident at the start;
                   it is let go at its last read, except for what the backward of stage s - 1 reads where `keep` is set.
                   With `have`, what the backward of stage t reads of stage t's own tensors is resident already.

Recursion
    1. keep stage s:  run it, keep what its backward reads; V[s + 1, t]; its backward             (`_kept`)
    2. run it again:  run s..c - 1, keeping nothing of them but their input and, perhaps, stage c - 1's own tensors;
                      V[c, t]; then V[s, c - 1] from that input, for every c in s + 1..t          (`_again`)

The first run of a stage costs nothing (t is the last stage exactly then); a later one runs the ops that are wanted
only, so a stage whose backward reads nothing but its stage's input is not run again for it. Bytes are exact ints:
every part is replayed op by op, workspace and in-place ops included. `have` is not in the paper, where a stage's
backward reads its input and all that was saved; it lets a dropout's mask stay while its input is computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from .chain import Chain
from .staircase import NOWHERE, Staircase, lowest

WORK = 1 << 25
FEWEST_POINTS = 256

State = tuple[int, int, bool, bool]


@dataclass(frozen=True)
class Program:
    """The table of staircases of one chain, filled from short stretches to long; bytes are without `static_bytes`."""

    chain: Chain
    limit_bytes: int
    table: dict[State, Staircase] = field(default_factory=dict)
    thinned: list[State] = field(default_factory=list)
    _memory: dict[tuple[object, ...], int] = field(default_factory=dict)

    def fill(self) -> Staircase:
        """Compute every entry; returns that of the whole chain."""
        for length in range(self._last + 1):
            for s in range(self._last + 1 - length):
                t = s + length
                keeps = (False, True) if self._spared(s) else (False,)
                haves = (False, True) if t < self._last and self._own(t) else (False,)
                for state in product((s,), (t,), keeps, haves):
                    self._enter(state)
        return self.table[self._start_state]

    def order(self, available_bytes: int) -> list[int]:
        """The computes of a best schedule within that many bytes, which the whole chain's staircase must allow."""
        result: list[int] = []
        todo = [Part(state=self._start_state, available_bytes=available_bytes)]
        while todo:
            part = todo.pop()
            result.extend(part.ops)
            if part.state is not None:
                todo.extend(reversed(self._decide(part.state, part.available_bytes)))
        return result

    @property
    def max_points(self) -> int:
        return max(FEWEST_POINTS, WORK // len(self.chain.stages) ** 3)

    @property
    def _last(self) -> int:
        return len(self.chain.stages) - 1

    @property
    def _start_state(self) -> State:
        return 0, self._last, False, False

    def _enter(self, state: State) -> None:
        options = [self._kept(state), *(stairs for _, _, stairs in self._again(state))]
        stairs = lowest(options, self.limit_bytes)
        if len(stairs.bytes) > self.max_points:
            self.thinned.append(state)
            chosen = np.linspace(0, len(stairs.bytes) - 1, self.max_points).round().astype(int)
            stairs = Staircase(stairs.bytes[chosen], stairs.costs[chosen])
        self.table[state] = stairs

    def _decide(self, state: State, available: int) -> list[Part]:
        """The cheapest option within `available` bytes, as ops to run and smaller states."""
        s, t, keep, have = state
        options = [(self._kept(state).at(available), s, False)]
        options += [(stairs.at(available), c, own) for c, own, stairs in self._again(state)]
        _, c, own = min(option for option in options if option[0] is not None)
        if c == s:
            rest = available - self._held(s, keep)
            inner = [Part(state=self._after(s, t, True, have), available_bytes=rest)] if s < t else []
            return [Part(self._ops(s, t, self._wanted(state)) or ()), *inner, Part(self.chain.stages[s].backward)]
        ran = [Part(self._ops(j, t, self._passed(j, own and j == c - 1)) or ()) for j in range(s, c)]
        rest = available - self._beside(s, c, own)
        second = Part(state=(s, c - 1, keep, own), available_bytes=available)
        return [*ran, Part(state=self._after(c - 1, t, own, have), available_bytes=rest), second]

    def _kept(self, state: State) -> Staircase:
        """Option 1."""
        s, t, keep, have = state
        ops = self._ops(s, t, self._wanted(state))
        if ops is None:
            return NOWHERE
        forward = self._forward_bytes(s, t, self._wanted(state), self._inputs_kept(s, keep))
        if have:
            forward = 0 if s == t else forward + self._own_bytes(t)
        least = max(forward, self._backward_bytes(s, keep))
        if s == t:
            return Staircase(np.array([least]), np.array([self._cost(ops, t)]))
        return self.table[self._after(s, t, True, have)].raised(self._held(s, keep), least, self._cost(ops, t))

    def _again(self, state: State) -> Iterator[tuple[int, bool, Staircase]]:
        """Option 2 for every c, without and with stage c - 1's own tensors kept."""
        s, t, keep, have = state
        inputs = self.chain.stages[s].inputs
        more = self._own_bytes(t) if have else 0
        least = cost = 0
        for c in range(s + 1, t + 1):
            kept = inputs if c - 1 == s else frozenset[int]()
            beside = more + (self.chain.bytes_of(inputs) if c - 1 > s else 0)
            for own in (True, False) if self._own(c - 1) else (False,):
                ops = self._ops(c - 1, t, self._passed(c - 1, own))
                if ops is None:
                    continue
                peak = max(least, beside + self._forward_bytes(c - 1, t, self._passed(c - 1, own), kept))
                first = self.table[self._after(c - 1, t, own, have)]
                first = first.raised(self._beside(s, c, own), peak, cost + self._cost(ops, t))
                yield c, own, first.plus(self.table[s, c - 1, keep, own])
            if ops is None or peak > self.limit_bytes:
                return
            least, cost = peak, cost + self._cost(ops, t)

    def _after(self, s: int, t: int, kept: bool, have: bool) -> State:
        """The state of the stages after s, whose own tensors were `kept` or not."""
        return s + 1, t, kept and bool(self._spared(s + 1)), have

    def _own(self, s: int) -> frozenset[int]:
        """What the backward of stage s reads of the tensors that stage s writes."""
        return self.chain.stages[s].needs - self.chain.stages[s].inputs

    def _own_bytes(self, s: int) -> int:
        return self.chain.bytes_of(self._own(s))

    def _passed(self, s: int, own: bool) -> frozenset[int]:
        """What is wanted of stage s when it is passed on the way to a later one."""
        return self.chain.stages[s].outputs | self._own(s) if own else self.chain.stages[s].outputs

    def _beside(self, s: int, c: int, own: bool) -> int:
        """Bytes that option 2 holds beside stage c's inputs."""
        kept = self._own(c - 1) - self.chain.stages[c - 1].outputs if own else frozenset[int]()
        return self.chain.bytes_of(self.chain.stages[s].inputs | kept)

    def _spared(self, s: int) -> frozenset[int]:
        """What stage s reads and the backward of the stage before it does too."""
        return self.chain.stages[s].inputs & self.chain.stages[s - 1].needs if s else frozenset()

    def _inputs_kept(self, s: int, keep: bool) -> frozenset[int]:
        stage = self.chain.stages[s]
        return stage.needs & stage.inputs | (self._spared(s) if keep else frozenset())

    def _held(self, s: int, keep: bool) -> int:
        """Bytes that option 1 holds beside the next stage's inputs."""
        stage = self.chain.stages[s]
        return self.chain.bytes_of(self._inputs_kept(s, keep) | (stage.needs - stage.outputs))

    def _wanted(self, state: State) -> frozenset[int]:
        """What option 1 wants of stage s: what its backward reads, and what the next stage does."""
        s, t, _, have = state
        stage = self.chain.stages[s]
        if s < t:
            return stage.needs | stage.outputs
        return stage.needs & stage.inputs if have else stage.needs

    def _ops(self, s: int, t: int, wanted: frozenset[int]) -> tuple[int, ...] | None:
        """What runs of stage s: all of it the first time, else what `wanted` takes; None if it may not run again."""
        stage = self.chain.stages[s]
        return stage.ops if t == self._last else self.chain.wanted_ops(stage, wanted)

    def _cost(self, ops: tuple[int, ...], t: int) -> int:
        return 0 if t == self._last else sum(self.chain.problem.ops[i].cost for i in ops)

    def _forward_bytes(self, s: int, t: int, wanted: frozenset[int], inputs_kept: frozenset[int]) -> int:
        """The most bytes while stage s runs, those held for earlier stages left out."""
        key = (s, t == self._last, wanted, inputs_kept)
        if key not in self._memory:
            stage, chain = self.chain.stages[s], self.chain
            own = chain.problem.pinned.intersection(o for i in stage.ops for o in chain.problem.ops[i].outputs)
            there = chain.pinned_before(stage.ops[0]) if t == self._last else own
            peak = chain.replay(self._ops(s, t, wanted) or (), there | stage.inputs, wanted | inputs_kept)
            self._memory[key] = peak if t == self._last else peak - chain.bytes_of(own)
        return self._memory[key] + (0 if t == self._last else self._base(t))

    def _backward_bytes(self, s: int, keep: bool) -> int:
        """The most bytes in the backward of stage s, those held for earlier stages left out."""
        key = ("backward", s, keep)
        if key not in self._memory:
            chain, ops = self.chain, self.chain.stages[s].backward
            there = chain.held_before(self._start(s)) | chain.stages[s].needs | self._inputs_kept(s, keep)
            wanted = chain.held_before(self._start(s - 1)) | (self._spared(s) if keep else frozenset())
            self._memory[key] = chain.replay(ops, there, wanted)
        return self._memory[key]

    def _base(self, t: int) -> int:
        """Bytes live between the backward of stage t + 1 and that of stage t, whatever is kept of the forward."""
        key = ("base", t)
        if key not in self._memory:
            self._memory[key] = self.chain.bytes_of(self.chain.held_before(self._start(t)))
        return self._memory[key]

    def _start(self, t: int) -> int:
        """The first backward op after those of the stages beyond t."""
        return self.chain.problem.num_forward + sum(len(stage.backward) for stage in self.chain.stages[t + 1 :])


@dataclass(frozen=True)
class Part:
    """A stretch of a schedule: ops to run, or a state still to be decided."""

    ops: tuple[int, ...] = ()
    state: State | None = None
    available_bytes: int = 0
