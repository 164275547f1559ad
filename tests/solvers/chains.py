"""Chains for the rotor: drawn like the other random problems, through `pick(low, high) -> int`."""

from __future__ import annotations

from hypothesis import strategies as st

from solvers.problem import Op, Problem, Tensor
from tests.solvers.strategies import Pick

SIZES = (4, 1, 2, 3, 5, 8, 0, 4)
COSTS = (1, 2, 3, 5, 0)


@st.composite
def chains(draw: st.DrawFn, max_stages: int = 8) -> Problem:
    return any_chain(lambda low, high: draw(st.integers(low, high)), draw(st.integers(2, max_stages)))


def even_chain(pick: Pick, stages: int, *, cheapest: int = 0) -> Problem:
    """Activations of one size, gradients of one size, one workspace; costs and what the backward reads vary."""
    size, gradient, workspace = pick(1, 5), pick(0, 3), pick(0, 3)
    costs = [max(cheapest, COSTS[pick(0, 4)]) for _ in range(stages)]
    ops = [
        Op(f"f{k}", (k - 1,) if k else (), (k,), cost, workspace, recomputable=pick(0, 9) > 0)
        for k, cost in enumerate(costs)
    ]
    tensors = [Tensor(f"x{k}", size) for k in range(stages)]
    for k in reversed(range(stages)):
        reads = [t for t in (k - 1, k) if t >= 0 and pick(0, 2)] + [len(tensors) - 1] * (k < stages - 1)
        tensors.append(Tensor(f"g{k}", gradient, "gradient"))
        ops.append(Op(f"b{k}", tuple(reads), (len(tensors) - 1,), 1, workspace, recomputable=False))
    return Problem(tuple(ops), tuple(tensors), stages, (len(tensors) - 1,), static_bytes=pick(0, 3))


def any_chain(pick: Pick, stages: int) -> Problem:
    """Sizes, workspaces, masks, in-place ops, pinned weight gradients and stages of several ops at random."""
    ops: list[Op] = []
    tensors: list[Tensor] = []

    def tensor(name: str, size: int, category: str = "activation") -> int:
        tensors.append(Tensor(name, size, category))
        return len(tensors) - 1

    def workspace() -> int:
        return (0, 0, 0, 1, 3)[pick(0, 4)]

    previous: tuple[int, ...] = ()
    written: list[list[int]] = []
    handed: list[tuple[int, ...]] = []
    for k in range(stages):
        own = [tensor(f"x{k}", SIZES[pick(0, 7)])]
        if pick(0, 3) == 3:
            own.append(tensor(f"mask{k}", pick(1, 2)))
        same = [t for t in previous if tensors[t].bytes == tensors[own[0]].bytes and pick(0, 1)]
        ops.append(
            Op(f"f{k}", previous, tuple(own), COSTS[pick(0, 4)], workspace(), pick(0, 9) > 0,
               reuse=tuple(same))
        )  # fmt: skip
        if previous and pick(0, 4) == 4:  # a residual: the stage has two ops
            own.append(tensor(f"y{k}", tensors[own[0]].bytes))
            ops.append(Op(f"add{k}", (*previous, own[0]), (own[-1],), COSTS[pick(0, 4)]))
            previous = (own[-1],)
        else:
            previous = (own[0],)
        written.append(own)
        handed.append(previous)
    num_forward = len(ops)
    gradient: tuple[int, ...] = ()
    outputs: list[int] = []
    for k in reversed(range(stages)):
        readable = [*(handed[k - 1] if k else ()), *written[k]]
        reads = [t for t in readable if pick(0, 2)]
        results = [tensor(f"g{k}", (1, 0, 2, 4)[pick(0, 3)], "gradient")]
        if pick(0, 2) == 2:
            results.append(tensor(f"w{k}", pick(1, 2), "gradient"))
            outputs.append(results[-1])
        ops.append(Op(f"b{k}", (*reads, *gradient), tuple(results), 1, workspace(), recomputable=False))
        gradient = (results[0],)
    return Problem(tuple(ops), tuple(tensors), num_forward, (*outputs, *gradient), static_bytes=pick(0, 3))
