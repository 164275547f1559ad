"""What a solver is given: one training step as a straight line of ops, in pure Python ints.

A `Problem` knows nothing of torch. Its tensors are *storages*: views have been folded into the storage
they share, so a tensor's bytes are paid once however many views of it exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from math import gcd
from typing import Any

from .errors import PlannerError

LARGE = 5000  # ops of a step; solvers look at less of a larger one at a time

CATEGORIES = ("activation", "temporary", "gradient", "output", "rng", "tangent")


@dataclass(frozen=True, slots=True)
class Tensor:
    """One storage written by exactly one op.

    Attributes:
        name: the graph's name for it.
        bytes: size in bytes, rounded up to the allocator's granule.
        category: one of `CATEGORIES`; only reports read it.
    """

    name: str
    bytes: int
    category: str = "activation"


@dataclass(frozen=True, slots=True)
class Op:
    """One op of the step.

    Attributes:
        name: the graph's name for it.
        inputs: tensors read (indices into `Problem.tensors`), without parameters and inputs of the step,
            which are resident throughout and counted in `Problem.static_bytes`.
        outputs: tensors written; every compute allocates all of them anew.
        cost: what one execution costs, in the problem's cost unit.
        workspace: bytes the op needs above its inputs and outputs while it runs.
        recomputable: whether it may run more than once. A backward op never is.
        replay_inputs: tensors that the second and later executions read besides `inputs` (a saved RNG state).
        optional: the op may be left out altogether (taking an RNG state that nobody replays).
        reuse: inputs whose memory the first output may take over (in place), each as large as it. The first of them
            whose last read is this run is taken.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    cost: int
    workspace: int = 0
    recomputable: bool = True
    replay_inputs: tuple[int, ...] = ()
    optional: bool = False
    reuse: tuple[int, ...] = ()


@dataclass(frozen=True)
class Problem:
    """A training step in execution order.

    Attributes:
        ops: `ops[:num_forward]` is the forward, the rest the backward. Required ops keep this order in every
            schedule; recomputes are inserted between them.
        tensors: the storages, each the output of one op.
        num_forward: how many ops belong to the forward.
        outputs: tensors that the step hands out (gradients, and what the forward returned). From the moment an output
            is first written its holder may read it, so that copy stays to the end of the step: it is never freed, not
            even to be computed again, and a later run of its op writes a second copy that is dropped at once.
        static_bytes: what is resident before, during and after (parameters, buffers, inputs, reserve).
        step_cost: cost of the plain step, the denominator of every overhead; defaults to the sum of op costs.
    """

    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    num_forward: int
    outputs: tuple[int, ...] = ()
    static_bytes: int = 0
    step_cost: int = field(default=-1)

    def __post_init__(self) -> None:
        if self.step_cost < 0:
            object.__setattr__(self, "step_cost", sum(op.cost for op in self.ops))
        _validate(self)

    @cached_property
    def producer(self) -> tuple[int, ...]:
        """For each tensor the op that writes it."""
        producer = [-1] * len(self.tensors)
        for i, op in enumerate(self.ops):
            for t in op.outputs:
                producer[t] = i
        return tuple(producer)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each tensor the ops that read it on their first execution, in order."""
        readers: list[list[int]] = [[] for _ in self.tensors]
        for i, op in enumerate(self.ops):
            for t in dict.fromkeys(op.inputs):
                readers[t].append(i)
        return tuple(tuple(r) for r in readers)

    @cached_property
    def pinned(self) -> frozenset[int]:
        """`outputs` as a set."""
        return frozenset(self.outputs)

    @cached_property
    def digest(self) -> bytes:
        """Of all that decides a schedule's peak: costs do not."""
        ops = [
            (op.inputs, op.outputs, op.workspace, op.recomputable, op.replay_inputs, op.optional, op.reuse)
            for op in self.ops
        ]
        return sha256(repr((ops, self.tensors, self.num_forward, self.outputs, self.static_bytes)).encode()).digest()

    @cached_property
    def replayers(self) -> dict[int, list[int]]:
        """For each op the ops that replay what it writes, in order; ops that none does are left out."""
        found: dict[int, list[int]] = {}
        for i, op in enumerate(self.ops):
            for t in op.replay_inputs:
                found.setdefault(self.producer[t], []).append(i)
        return found

    @cached_property
    def unit(self) -> int:
        """What scores count bytes in, so that scaling all sizes changes no rounding."""
        return gcd(*(t.bytes for t in self.tensors)) or 1

    @cached_property
    def evictable(self) -> list[int]:
        """Tensors that may be dropped and recomputed, cheapest per byte first."""
        ops, producer, sizes = self.ops, self.producer, [t.bytes for t in self.tensors]
        allowed = [t for t, p in enumerate(producer) if ops[p].recomputable and t not in self.pinned and sizes[t]]
        if len(ops) <= LARGE:
            return sorted(allowed, key=lambda t: (ops[producer[t]].cost / (sizes[t] // self.unit), t))
        # Equals are scattered over the step, else a look at the first few sees one corner of it only.
        scatter = {t: t * 2654435761 % (1 << 32) for t in allowed}
        return sorted(allowed, key=lambda t: (round(ops[producer[t]].cost / sizes[t], 2), scatter[t]))

    @property
    def forward(self) -> range:
        return range(self.num_forward)

    @property
    def backward(self) -> range:
        return range(self.num_forward, len(self.ops))

    def required(self) -> Iterator[int]:
        """Ops that every schedule executes, in order."""
        return (i for i, op in enumerate(self.ops) if not op.optional)

    def overhead(self, added_cost: int) -> float:
        """Added cost as a share of the plain step's cost."""
        return added_cost / self.step_cost if self.step_cost else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and ints, for a JSON file."""
        return {
            "num_forward": self.num_forward,
            "outputs": list(self.outputs),
            "static_bytes": self.static_bytes,
            "step_cost": self.step_cost,
            "tensors": [[t.name, t.bytes, t.category] for t in self.tensors],
            "ops": [
                [o.name, list(o.inputs), list(o.outputs), o.cost, o.workspace, o.recomputable,
                 list(o.replay_inputs), o.optional, list(o.reuse)]
                for o in self.ops
            ],
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Problem:
        """Inverse of `to_dict`."""
        return cls(
            ops=tuple(
                Op(name, tuple(ins), tuple(outs), cost, workspace, recomputable, tuple(replay), optional, tuple(reuse))
                for name, ins, outs, cost, workspace, recomputable, replay, optional, reuse in data["ops"]
            ),
            tensors=tuple(Tensor(*t) for t in data["tensors"]),
            num_forward=data["num_forward"],
            outputs=tuple(data["outputs"]),
            static_bytes=data["static_bytes"],
            step_cost=data["step_cost"],
        )


def _validate(problem: Problem) -> None:
    written: set[int] = set()
    for i, op in enumerate(problem.ops):
        for t in (*op.inputs, *op.replay_inputs):
            if t not in written:
                raise PlannerError(f"op {i} ({op.name!r}) reads tensor {t} before any op writes it")
        for t in op.outputs:
            if t in written or not 0 <= t < len(problem.tensors):
                raise PlannerError(f"op {i} ({op.name!r}) writes tensor {t}, which is unknown or written twice")
            written.add(t)
        if op.cost < 0 or op.workspace < 0:
            raise PlannerError(f"op {i} ({op.name!r}) has a negative cost or workspace")
        if i >= problem.num_forward and op.recomputable:
            raise PlannerError(f"backward op {i} ({op.name!r}) is marked recomputable")
        for t in op.reuse:
            if t not in op.inputs or not op.outputs or problem.tensors[op.outputs[0]].bytes != problem.tensors[t].bytes:
                raise PlannerError(f"op {i} ({op.name!r}) takes over tensor {t}, no input of its output's size")
        if op.optional and op.inputs:
            raise PlannerError(f"optional op {i} ({op.name!r}) must not have inputs")
    if len(written) != len(problem.tensors):
        raise PlannerError(f"{len(problem.tensors) - len(written)} tensors are written by no op")
    if any(t.bytes < 0 for t in problem.tensors) or problem.static_bytes < 0:
        raise PlannerError("bytes are negative")
    if not set(problem.outputs) <= written:
        raise PlannerError("an output is not a tensor of the problem")
