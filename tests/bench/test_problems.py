"""The benchmarks' own problems and judgements: what they claim to measure is what they measure."""

from __future__ import annotations

import pytest

from solvers import Problem, plain_order, with_frees
from solvers.problem import Op, Tensor
from tests.bench.large import Row, misses
from tests.bench.problems import (
    activation_bytes,
    gradient_bytes,
    plain_peak_bytes,
    synthetic,
    with_gradient_buffers,
)
from tests.solvers.oracles import replay
from tests.solvers.problems import parse


def test_the_synthetic_problem_has_the_size_it_says() -> None:
    problem = synthetic(10_000)
    assert problem.num_forward == 10_001
    assert len(problem.ops) >= 30_000
    assert plain_peak_bytes(synthetic(200)) > 5 * gradient_bytes(synthetic(200))


def test_the_synthetic_problem_is_the_same_each_time_and_differs_by_seed() -> None:
    assert synthetic(100) == synthetic(100)
    assert synthetic(100) != synthetic(100, seed=1)


def by_hand() -> Problem:
    """Activations 4 + 4, then gradients of two parameters of 6 and 2 bytes, made while 1 byte of gradient flows."""
    problem = parse(
        """
        a:4 = f0()
        b:4 = f1(a)
        --
        g:1 = d1(b)
        w1:6 = v1(g, a)
        h:1 = d0(g)
        w0:2 = v0(h)
        """,
        outputs="w1 w0",
        static_bytes=100,
    )
    tensors = tuple(Tensor(t.name, t.bytes, "gradient" if t.name[0] == "w" else t.category) for t in problem.tensors)
    return Problem(problem.ops, tensors, problem.num_forward, problem.outputs, problem.static_bytes)


def test_activation_memory_by_hand() -> None:
    """Highest beside gradients: v1 makes w1 while a and g live (4 + 1 + 6); d1 sees a, b and g (9)."""
    assert gradient_bytes(by_hand()) == 8
    assert plain_peak_bytes(by_hand()) == 100 + 4 + 1 + 6
    assert activation_bytes(by_hand()) == 4 + 1 + 6


def test_gradient_buffers_are_static_and_gradients_pass_through() -> None:
    problem = with_gradient_buffers(by_hand())
    assert problem.static_bytes == 108
    assert gradient_bytes(problem) == 0
    peak = replay(problem, with_frees(problem, plain_order(problem))).peak_bytes
    assert peak == 108 + 4 + 1 + 6
    assert plain_peak_bytes(problem) - problem.static_bytes == activation_bytes(problem)


def test_a_gradient_made_in_place_is_no_longer_in_place() -> None:
    """The buffer is not the memory that the op would have taken over."""
    ops = (
        Op("f", (), (0,), 1), Op("d", (0,), (1,), 1, recomputable=False, reuse=(0,)),
    )  # fmt: skip
    problem = Problem(ops, (Tensor("x", 4), Tensor("w", 4, "gradient")), 1, (1,))
    changed = with_gradient_buffers(problem)
    assert changed.ops[1].reuse == ()
    assert changed.ops[1].workspace == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"total_s": 121.0}, ["llama7b: 121 s, more than 120"]),
        ({"overhead": 0.08}, ["llama7b at 50 %: gap of 3.00%, more than 2%"]),
        ({"resident_gib": 6.5}, ["llama7b: 6.5 GiB resident, more than 6"]),
        ({"refused": "minimum 3.00, floor 2.00"}, ["llama7b at 50 %: no plan (minimum 3.00, floor 2.00)"]),
    ],
)
def test_a_missed_threshold_is_said(changes: Row, words: list[str]) -> None:
    row: Row = {"share": 50, "total_s": 60.0, "overhead": 0.06, "bound": 0.05, "gap_of_bound": 0.2, "resident_gib": 1.0}
    assert misses("llama7b", [row | changes]) == words
    assert misses("llama7b-eager", [row | changes]) == []
