"""Problems for the benchmarks: a synthetic family of any size, and what memory of a step is activations."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from solvers import Problem, Tensor, plain_order, simulate, with_frees
from solvers.problem import Op

MIB = 1 << 20
BLOCK = 25


@dataclass(frozen=True)
class Layer:
    """One op of the repeated block: a product (`weight`) or an elementwise op, with an optional second input."""

    mib: int
    cost_per_byte: int
    skip: bool

    @property
    def weight(self) -> bool:
        return self.cost_per_byte >= 6


def synthetic(forward_ops: int, seed: int = 0) -> Problem:
    """A joint graph of about `forward_ops` forward ops and two backward ops for each: one random block, repeated.

    As in a transformer, widths vary inside a block and its ends are narrow, some ops read an older result of the
    block, the last adds the block's input, products cost 6 to 20 times what moving their bytes does and leave a
    weight's gradient, and the backward of an op reads the gradient and what that kind of op has to have saved.
    """
    rng = random.Random(seed)
    block = [
        Layer(rng.choice((1, 1, 1, 4, 4, 3)), rng.choice((1, 1, 1, 1, 6, 12, 20)), rng.random() < 0.15)
        for _ in range(BLOCK - 1)
    ] + [Layer(1, 1, False)]
    return _Synthetic(rng, block).build(max(1, forward_ops // BLOCK))


class _Synthetic:
    def __init__(self, rng: random.Random, block: list[Layer]) -> None:
        self.rng, self.block = rng, block
        self.ops: list[Op] = []
        self.tensors: list[Tensor] = []
        self.done: list[tuple[Layer, tuple[int, ...], int]] = []

    def build(self, blocks: int) -> Problem:
        x = self._tensor(MIB, "activation")
        self.ops.append(Op("input", (), (x,), MIB))
        for b in range(blocks):
            x = self._forward(x, b)
        num_forward = len(self.ops)
        outputs = self._backward(x)
        return Problem(tuple(self.ops), tuple(self.tensors), num_forward, outputs)

    def _forward(self, start: int, number: int) -> int:
        history = [start]
        for j, layer in enumerate(self.block):
            inputs = [history[-1]]
            if layer.skip and len(history) > 2:
                inputs.append(history[-3])
            if j == len(self.block) - 1:
                inputs.append(start)
            size = layer.mib * MIB + (64 * self.rng.randrange(64) if j < len(self.block) - 1 else 0)
            output = self._tensor(size, "activation")
            self._op(f"f{number}_{j}", inputs, output, layer.cost_per_byte * size, recomputable=True)
            self.done.append((layer, tuple(dict.fromkeys(inputs)), output))
            history.append(output)
        return history[-1]

    def _backward(self, loss: int) -> tuple[int, ...]:
        gradient = {loss: self._tensor(64, "tangent")}
        self.ops.append(Op("tangents", (), (gradient[loss],), 0, recomputable=False))
        weights = []
        for number, (layer, inputs, output) in enumerate(reversed(self.done)):
            size = self.tensors[output].bytes
            saved = [] if layer.weight else [inputs[0], *([output] if inputs[0] % 2 else [])]
            for t in inputs:
                before = [gradient[t]] if t in gradient else []
                reads = [gradient[output], *(saved if t == inputs[0] else ()), *before]
                gradient[t] = self._tensor(self.tensors[t].bytes, "temporary")
                cost = layer.cost_per_byte * size if t == inputs[0] else self.tensors[t].bytes
                self._op(f"b{number}_{t}", reads, gradient[t], cost, recomputable=False)
            weights.append(self._tensor(MIB // 4 if layer.weight else 1024, "gradient"))
            reads = [gradient[output], *([inputs[0]] if layer.weight else [])]
            self._op(f"w{number}", reads, weights[-1], layer.cost_per_byte * size, recomputable=False)
        return tuple(weights)

    def _tensor(self, size: int, category: str) -> int:
        self.tensors.append(Tensor(f"t{len(self.tensors)}", size, category))
        return len(self.tensors) - 1

    def _op(self, name: str, inputs: list[int], output: int, cost: int, *, recomputable: bool) -> None:
        self.ops.append(Op(name, tuple(dict.fromkeys(inputs)), (output,), cost, recomputable=recomputable))


def plain_peak_bytes(problem: Problem) -> int:
    """The plain step's peak, static bytes included."""
    return simulate(problem, with_frees(problem, plain_order(problem))).peak_bytes


def gradient_bytes(problem: Problem) -> int:
    """What the gradients take once the step is done."""
    return sum(problem.tensors[t].bytes for t in problem.outputs if problem.tensors[t].category == "gradient")


def activation_bytes(problem: Problem) -> int:
    """Activation memory: the plain step's highest bytes that are neither static nor gradients of the step's inputs."""
    schedule = with_frees(problem, plain_order(problem))
    pinned = set(problem.outputs)
    gradients = highest = 0
    for step, moment in zip(schedule, simulate(problem, schedule).moment_bytes, strict=True):
        highest = max(highest, moment - problem.static_bytes - gradients)
        if step.kind == "compute":
            written = problem.ops[step.index].outputs
            gradients += sum(
                problem.tensors[t].bytes for t in written if t in pinned and problem.tensors[t].category == "gradient"
            )
    return highest


def with_gradient_buffers(problem: Problem) -> Problem:
    """The step of a trainer that holds a gradient buffer per parameter throughout (accumulation, DDP, Megatron).

    The buffers are static. A gradient is made beside its buffer, added to it and let go: its bytes are workspace of the
    op that makes it.
    """
    buffered = {t for t in problem.outputs if problem.tensors[t].category == "gradient"}
    ops = tuple(
        replace(op, workspace=op.workspace + made, reuse=()) if (made := _bytes(problem, op, buffered)) else op
        for op in problem.ops
    )
    tensors = tuple(replace(t, bytes=0) if i in buffered else t for i, t in enumerate(problem.tensors))
    ops = tuple(replace(op, reuse=tuple(t for t in op.reuse if t not in buffered)) for op in ops)
    static = problem.static_bytes + gradient_bytes(problem)
    return replace(problem, ops=ops, tensors=tensors, static_bytes=static)


def _bytes(problem: Problem, op: Op, chosen: set[int]) -> int:
    return sum(problem.tensors[t].bytes for t in op.outputs if t in chosen)
