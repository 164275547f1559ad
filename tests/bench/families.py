"""Training steps whose shape is hard on a solver: long skips, dense reads, unrolled cells, hundreds of equal blocks.

Sizes are in units of 1 KiB and costs in units of bytes moved, both only shapes: a `Tape` records a forward and mirrors
it, so that the backward of an op reads the gradients of its results and what that kind of op has to have saved.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from solvers import Op, Problem, Tensor

KIB = 1 << 10


@dataclass(frozen=True)
class Done:
    """A forward op as the backward sees it."""

    inputs: tuple[int, ...]
    output: int
    saves: tuple[int, ...]
    weight: int


class Tape:
    """Records forward ops; `step` adds the backward."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.tensors: list[Tensor] = []
        self.done: list[Done] = []

    def op(self, *inputs: int, size: int, cost: int | None = None, weight: int = 0, saves: str = "inputs") -> int:
        """An op with a result of `size` KiB.

        Args:
            cost: in KiB moved; None: what is read and written.
            weight: KiB of a parameter's gradient that its backward leaves.
            saves: what its backward reads: "inputs", "output", or "nothing".
        """
        output = self._tensor(size * KIB, "activation")
        moved = sum(self.tensors[t].bytes for t in inputs) // KIB + size
        self.ops.append(Op(f"f{len(self.ops)}", inputs, (output,), moved if cost is None else cost))
        kept = {"inputs": inputs, "output": (output,), "nothing": ()}[saves]
        self.done.append(Done(inputs, output, kept, weight))
        return output

    def product(self, t: int, size: int, weight: int) -> int:
        """A matrix product or a convolution: dear, reads its input again for its weight."""
        return self.op(t, size=size, cost=12 * size, weight=weight)

    def cheap(self, *inputs: int) -> int:
        """An elementwise op or a norm of the first input's size."""
        return self.op(*inputs, size=self.tensors[inputs[0]].bytes // KIB)

    def add(self, *inputs: int) -> int:
        """A sum: its backward reads nothing."""
        return self.op(*inputs, size=self.tensors[inputs[0]].bytes // KIB, saves="nothing")

    def step(self) -> Problem:
        """The whole step; the last recorded result is the loss."""
        num_forward = len(self.ops)
        gradient = {self.done[-1].output: self._tensor(64, "tangent")}
        self.ops.append(Op("start", (), (gradient[self.done[-1].output],), 0, recomputable=False))
        outputs = [self.done[-1].output]
        for number, done in enumerate(reversed(self.done)):
            if done.output in gradient:
                outputs += self._mirror(f"b{number}", done, gradient)
        return Problem(tuple(self.ops), tuple(self.tensors), num_forward, tuple(outputs))

    def _mirror(self, name: str, done: Done, gradient: dict[int, int]) -> list[int]:
        """The backward of one op; returns the gradients that stay."""
        forward = self.ops[self.producer(done.output)]
        reads = tuple(dict.fromkeys((gradient[done.output], *done.saves)))
        weights = [self._tensor(done.weight * KIB, "gradient")] if done.weight else []
        made = {t: self._tensor(self.tensors[t].bytes, "temporary") for t in dict.fromkeys(done.inputs)}
        if made or weights:
            written = (*made.values(), *weights)
            self.ops.append(Op(name, reads, written, 2 * forward.cost, recomputable=False))
        for t, new in made.items():
            if t in gradient:
                total = self._tensor(self.tensors[t].bytes, "temporary")
                moved = 2 * self.tensors[t].bytes // KIB
                self.ops.append(Op(f"{name}+", (gradient[t], new), (total,), moved, recomputable=False, reuse=(new,)))
                new = total
            gradient[t] = new
        return weights

    def producer(self, tensor: int) -> int:
        return next(i for i, op in enumerate(self.ops) if tensor in op.outputs)

    def _tensor(self, size: int, category: str) -> int:
        self.tensors.append(Tensor(f"t{len(self.tensors)}", size, category))
        return len(self.tensors) - 1


def _convolution(tape: Tape, t: int, size: int) -> int:
    return tape.op(tape.cheap(tape.product(t, size, 8)), size=size, saves="output")


def unet(depth: int = 6) -> Problem:
    """A U-Net (Ronneberger et al. 2015): sizes halve on the way down, every level is read again on the way up."""
    tape = Tape()
    size, skips = 4096, []
    t = tape.op(size=size)
    for _ in range(depth):
        skips.append(t := _convolution(tape, _convolution(tape, t, size), size))
        size //= 2
        t = tape.op(t, size=size)
    t = _convolution(tape, t, size)
    for skip in reversed(skips):
        size *= 2
        t = tape.op(tape.op(t, size=size), skip, size=2 * size)
        t = _convolution(tape, _convolution(tape, t, size), size)
    tape.op(t, size=1)
    return tape.step()


def unet_plus_plus(depth: int = 6) -> Problem:
    """UNet++ (Zhou et al. 2018): node (i, j) reads every earlier node of its level and the one below."""
    tape = Tape()
    nodes: dict[tuple[int, int], int] = {}
    t = tape.op(size=2048)
    for i in range(depth):
        size = 2048 >> i
        nodes[i, 0] = t = _convolution(tape, t if i == 0 else tape.op(t, size=size), size)
    for j in range(1, depth):
        for i in range(depth - j):
            size = 2048 >> i
            reads = (*(nodes[i, k] for k in range(j)), tape.op(nodes[i + 1, j - 1], size=size))
            nodes[i, j] = _convolution(tape, tape.op(*reads, size=size * len(reads)), size)
    tape.op(nodes[0, depth - 1], size=1)
    return tape.step()


def dense(blocks: int = 40) -> Problem:
    """A DenseNet (Huang et al. 2017): each block reads the concatenation of all before it."""
    tape = Tape()
    parts = [tape.op(size=64)]
    for _ in range(blocks):
        joined = tape.op(*parts, size=64 + 32 * (len(parts) - 1), saves="nothing")
        parts.append(tape.product(tape.cheap(joined), 32, 8))
    tape.op(tape.op(*parts, size=64 + 32 * blocks), size=1)
    return tape.step()


def lstm(steps: int = 200) -> Problem:
    """An LSTM unrolled: four gates from input and state, a cell, a state; every state is read at the end."""
    tape = Tape()
    state, cell = tape.op(size=16), tape.op(size=16)
    states = []
    for _ in range(steps):
        gates = tape.op(tape.op(size=16), state, size=64, cost=768, weight=4)
        inner = tape.op(gates, size=64, saves="output")
        cell = tape.op(inner, cell, size=16)
        state = tape.op(inner, tape.op(cell, size=16, saves="output"), size=16)
        states.append(state)
    tape.op(tape.op(*states, size=16 * steps, saves="nothing"), size=1)
    return tape.step()


def unit_dag(ops: int = 300, seed: int = 0) -> Problem:
    """Every op costs one and every result is as large; each reads the last and up to two of the fifty before."""
    rng, tape = random.Random(seed), Tape()
    made = [tape.op(size=1, cost=1)]
    for _ in range(ops - 1):
        others = [made[max(0, len(made) - 1 - rng.randrange(50))] for _ in range(rng.randrange(3))]
        made.append(tape.op(*dict.fromkeys((made[-1], *others)), size=1, cost=1))
    return tape.step()


def transformer(blocks: int) -> Problem:
    """GPT blocks: two norms, attention of three products, a feed-forward of four times the width, two residuals."""
    tape = Tape()
    t = tape.op(size=64)
    for _ in range(blocks):
        t = tape.add(t, _attention(tape, tape.cheap(t)))
        wide = tape.product(tape.cheap(t), 256, 16)
        t = tape.add(t, tape.product(tape.cheap(wide), 64, 16))
    tape.op(tape.product(t, 512, 64), size=1)
    return tape.step()


def _attention(tape: Tape, t: int) -> int:
    query, key, value = (tape.product(t, 64, 4) for _ in range(3))
    weights = tape.op(tape.op(query, key, size=192, cost=1500), size=192, saves="output")
    return tape.product(tape.op(weights, value, size=64, cost=1500), 64, 4)


def experts(count: int = 64, layers: int = 4) -> Problem:
    """Mixtures of experts: a router, `count` small feed-forwards that read parts of one tensor, their sum."""
    tape = Tape()
    t = tape.op(size=256)
    for _ in range(layers):
        routed = tape.cheap(t)
        parts = []
        for _ in range(count):
            part = tape.op(routed, size=8, saves="nothing")
            parts.append(tape.product(tape.cheap(tape.product(part, 32, 4)), 8, 4))
        t = tape.add(t, tape.op(*parts, size=256, saves="nothing"))
    tape.op(t, size=1)
    return tape.step()


def layered(width: int, layers: int, seed: int = 0) -> Problem:
    """A random layered graph (Gagrani et al. 2022) and its backward: reads the layer before, sometimes an older one."""
    rng, tape = random.Random(seed), Tape()
    rows = [[tape.op(size=rng.randint(1, 64)) for _ in range(width)]]
    for _ in range(layers - 1):
        row = []
        for j in range(width):
            near = [rows[-1][j], *rng.sample(rows[-1], rng.randint(0, 1))]
            far = [rng.choice(rng.choice(rows))] if rng.random() < 0.15 else []
            cost = rng.randint(1, 1000)
            row.append(tape.op(*dict.fromkeys((*near, *far)), size=rng.randint(1, 64), cost=cost))
        rows.append(row)
    tape.op(*rows[-1], size=1)
    return tape.step()


FAMILIES: dict[str, Callable[[], Problem]] = {
    "unet-6": unet,
    "unet++-6": unet_plus_plus,
    "dense-40": dense,
    "dense-6": lambda: dense(6),
    "lstm-200": lstm,
    "lstm-20": lambda: lstm(20),
    "lstm-3": lambda: lstm(3),
    "unit-dag": unit_dag,
    "unit-dag-20": lambda: unit_dag(20),
    "transformer-200": lambda: transformer(200),
    "transformer-12": lambda: transformer(12),
    "transformer-2": lambda: transformer(2),
    "experts-64": experts,
    "experts-2": lambda: experts(2, 2),
    "layered-tiny": lambda: layered(3, 6),
    "layered-small": lambda: layered(8, 24),
    "layered-medium": lambda: layered(16, 40),
    "layered-large": lambda: layered(32, 90),
}
