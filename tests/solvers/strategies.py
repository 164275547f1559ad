"""Small random problems and random valid schedules, for Hypothesis and for plain seeds.

Both are drawn through one function, `pick(low, high) -> int`: Hypothesis can then shrink a failure, and a seed names a
problem that any process can make again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from hypothesis import strategies as st

from solvers.problem import Op, Problem, Tensor
from solvers.schedule import Schedule, Step, with_frees

Pick = Callable[[int, int], int]


def seeded_problem(seed: int, max_forward: int = 6) -> Problem:
    """The random problem of a seed: at most 12 ops for `max_forward` up to 6."""
    return make_problem(random.Random(seed).randint, max_forward)


@st.composite
def problems(draw: st.DrawFn, max_forward: int = 6) -> Problem:
    return make_problem(lambda low, high: draw(st.integers(low, high)), max_forward)


@st.composite
def schedules(draw: st.DrawFn, problem: Problem, max_recomputes: int = 4) -> Schedule:
    return make_schedule(lambda low, high: draw(st.integers(low, high)), problem, max_recomputes)


def make_problem(pick: Pick, max_forward: int = 6) -> Problem:
    """A training step in miniature: the backward mirrors the forward, or reads whatever it likes."""
    return _Builder(pick).build(max_forward - pick(0, max_forward - 1) * pick(0, 1), mirror=bool(pick(0, 3)))


class _Builder:
    def __init__(self, pick: Pick) -> None:
        self.pick = pick
        self.ops: list[Op] = []
        self.tensors: list[Tensor] = []
        self.outputs: list[int] = []
        self.workspaces = (0, 0, 0, 1, 4)[: 3 + 2 * pick(0, 1)]

    def build(self, num_forward: int, *, mirror: bool) -> Problem:
        random_ops = 0
        for k in range(num_forward):
            draws = random_ops < 2 and self.pick(0, 6) == 6
            random_ops += draws
            self._forward(k, draws)
        end = len(self.ops)
        for t in range(len(self.tensors)):
            if self.tensors[t].category != "rng" and self.pick(0, 9) == 9:
                self.outputs.append(t)
        self._backward(mirror)
        return Problem(
            tuple(self.ops), tuple(self.tensors), end, tuple(self.outputs), static_bytes=self.pick(0, 3)
        )  # fmt: skip

    def _forward(self, k: int, draws: bool) -> None:
        replay = ()
        if draws:
            replay = (self._tensor(f"state{k}", self.pick(0, 2), "rng"),)
            self.ops.append(Op(f"save{k}", (), replay, 0, 0, False, optional=True))
        known = [t for t, tensor in enumerate(self.tensors) if tensor.category != "rng"]
        inputs = self._some(known, 0 if self.pick(0, 7) == 7 else 1, 2)
        count = (1, 1, 1, 1, 2, 2, 0)[self.pick(0, 6)]
        outputs = tuple(self._tensor(f"x{k}{'abc'[n]}", self._bytes(), "activation") for n in range(count))
        recomputable = draws or self.pick(0, 7) < 7
        reuse = self._reuse(inputs, outputs)
        self.ops.append(
            Op(f"f{k}", inputs, outputs, self._cost(), self._workspace(), recomputable, replay, reuse=reuse)
        )

    def _backward(self, mirror: bool) -> None:
        gradient: int | None = None
        if self.pick(0, 3) == 3:
            gradient = self._tensor("tangent", self.pick(0, 2), "tangent")
            self.ops.append(Op("start", (), (gradient,), 0, 0, False))
        values = [t for t, tensor in enumerate(self.tensors) if tensor.category == "activation"]
        for forward in reversed([op for op in self.ops if op.name.startswith("f")]):
            if len(self.ops) >= 12:
                break
            own = [t for t in dict.fromkeys((*forward.inputs, *forward.outputs)) if self.pick(0, 2)]
            reads = own if mirror else list(self._some(values, 0, 2))
            if gradient is not None and self.pick(0, 7):
                reads.append(gradient)
            gradient = self._tensor(f"g{forward.name[1:]}", (1, 0, 2, 4)[self.pick(0, 3)], "gradient")
            if self.pick(0, 2) == 2:
                self.outputs.append(gradient)
            self.ops.append(
                Op(f"b{forward.name[1:]}", tuple(reads), (gradient,), self.pick(0, 2), self._workspace(), False,
                   reuse=self._reuse(tuple(reads), (gradient,)))
            )

    def _reuse(self, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> tuple[int, ...]:
        """Sometimes inputs of the first output's size, the latest first: the op then works in place where it may."""
        same = [t for t in inputs if outputs and self.tensors[t].bytes == self.tensors[outputs[0]].bytes]
        return tuple(dict.fromkeys(reversed(same)))[: self.pick(0, 2)]

    def _tensor(self, name: str, size: int, category: str) -> int:
        self.tensors.append(Tensor(name, size, category))
        return len(self.tensors) - 1

    def _some(self, known: list[int], low: int, high: int) -> tuple[int, ...]:
        """A few tensors, the latest first in likelihood, sometimes the same one twice."""
        if not known:
            return ()
        count = self.pick(low, high)
        return tuple(known[max(0, len(known) - 1 - (self.pick(0, 3) if n == 0 else self.pick(0, 7)))]
                     for n in range(count))  # fmt: skip

    def _bytes(self) -> int:
        return (4, 1, 2, 3, 5, 8, 0, 4)[self.pick(0, 7)]

    def _cost(self) -> int:
        return (1, 2, 3, 5, 0, 1)[self.pick(0, 5)]

    def _workspace(self) -> int:
        return self.workspaces[self.pick(0, len(self.workspaces) - 1)]


def make_order(pick: Pick, problem: Problem, max_recomputes: int = 4) -> tuple[int, ...]:
    """The required ops with a few recomputes thrown in anywhere after the first run."""
    order = list(problem.required())
    for _ in range(pick(0, max_recomputes)):
        again = [i for i in order if problem.ops[i].recomputable]
        if not again:
            break
        i = again[pick(0, len(again) - 1)]
        order.insert(pick(order.index(i) + 1, len(order)), i)
    return tuple(order)


def make_schedule(pick: Pick, problem: Problem, max_recomputes: int = 4) -> Schedule:
    """A valid schedule that nobody would choose: random recomputes, and some frees late or left out."""
    return lazier(pick, with_frees(problem, make_order(pick, problem, max_recomputes)), problem)


def lazier(pick: Pick, schedule: Schedule, problem: Problem) -> Schedule:
    """Delay or leave out some frees without taking a value from a later reader."""
    steps = list(schedule)
    for position in range(len(steps) - 1, -1, -1):
        fate = pick(0, 3)
        if steps[position].kind == "free" and fate >= 2:
            step = steps.pop(position)
            latest = last_place(steps, position, step.index, problem)
            if fate == 2:
                steps.insert(pick(position, latest), step)
    return tuple(steps)


def last_place(steps: list[Step], start: int, tensor: int, problem: Problem) -> int:
    """How late a free of `tensor`, taken out at `start`, may be put back: before it is written or freed again."""
    for position in range(start, len(steps)):
        kind, index = steps[position]
        if (kind == "free" and index == tensor) or (kind == "compute" and tensor in problem.ops[index].outputs):
            return position
    return len(steps)


def scaled(problem: Problem, factor: int) -> Problem:
    """The problem with every byte `factor` times as big."""
    return replace(
        problem,
        ops=tuple(replace(op, workspace=op.workspace * factor) for op in problem.ops),
        tensors=tuple(replace(t, bytes=t.bytes * factor) for t in problem.tensors),
        static_bytes=problem.static_bytes * factor,
    )
