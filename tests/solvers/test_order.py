"""Re-ordering the backward: what may move, what it gains, and that it never costs memory."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from solvers import Op, Problem, Tensor, plain_order, simulate, with_frees
from solvers.anneal import lighter_order
from solvers.bounds import floor_bytes
from solvers.order import backward_order, in_order

from .strategies import problems


def peak(problem: Problem) -> int:
    return simulate(problem, with_frees(problem, plain_order(problem))).peak_bytes


def linear_layer() -> Problem:
    """x (8 bytes) saved for a layer; from its output's gradient g (8) come x's gradient (8) and the weight's (1)."""
    return Problem(
        ops=(
            Op("forward", (), (0,), 1),
            Op("start", (), (1,), 0, recomputable=False),
            Op("to_input", (1,), (2,), 1, recomputable=False),
            Op("to_weight", (0, 1), (3,), 1, recomputable=False),
            Op("before", (2,), (4,), 1, recomputable=False),
        ),
        tensors=(Tensor("x", 8), Tensor("g", 8), Tensor("gx", 8), Tensor("gw", 1), Tensor("gb", 1)),
        num_forward=1,
        outputs=(3, 4),
    )


def test_the_weight_comes_first_so_that_the_saved_input_is_let_go() -> None:
    problem = linear_layer()
    order = backward_order(problem, (2, 3, 4))
    assert order == (0, 1, 3, 2, 4)
    # with x, g and gx beside each other the step holds 8 + 8 + 8 + 1; without, x, g and gw, then g, gx and gw
    assert peak(problem) == 25
    assert peak(in_order(problem, order)) == 17


def test_what_may_not_move_stays() -> None:
    problem = linear_layer()
    assert backward_order(problem, (2, 4)) == (0, 1, 2, 3, 4)


@given(problems(), st.data())
@settings(max_examples=150, deadline=None)
def test_any_problem_keeps_its_rules_and_holds_no_more(problem: Problem, data: st.DataObject) -> None:
    backward = list(problem.backward)
    movable = data.draw(st.lists(st.sampled_from(backward), unique=True)) if backward else []
    order = backward_order(problem, movable)
    assert sorted(order) == list(range(len(problem.ops)))
    assert order[: problem.num_forward] == tuple(problem.forward)
    assert all(order[i] == i for i in range(len(order)) if i not in movable)
    after = in_order(problem, order)  # validates that nothing is read before it is written
    assert peak(after) <= peak(problem)
    assert floor_bytes(after) <= floor_bytes(problem)


def two_arms() -> Problem:
    """A source, two arms that each blow 1 byte up to 9 and fold it again, and their sum: in turn, not side by side."""
    reads = ((), (0,), (0,), (1,), (2,), (3, 4))
    sizes = (1, 9, 9, 1, 1, 1)
    ops = tuple(Op(f"f{i}", r, (i,), 1) for i, r in enumerate(reads))
    return Problem(ops, tuple(Tensor(f"t{i}", s) for i, s in enumerate(sizes)), len(ops))


def test_one_arm_after_the_other() -> None:
    problem = two_arms()
    order = lighter_order(problem, range(6), steps=200)
    assert peak(problem) == 1 + 9 + 9 + 1 - 1 and peak(in_order(problem, order)) == 1 + 9 + 1
    assert lighter_order(problem, (0, 5), steps=50) == (0, 1, 2, 3, 4, 5)
    assert lighter_order(problem, (), steps=50) == (0, 1, 2, 3, 4, 5)


@given(problems(), st.data())
@settings(max_examples=60, deadline=None)
def test_any_whole_order_keeps_its_rules_and_holds_no_more(problem: Problem, data: st.DataObject) -> None:
    movable = data.draw(st.lists(st.sampled_from(range(len(problem.ops))), unique=True))
    order = lighter_order(problem, movable, steps=60)
    assert sorted(order) == list(range(len(problem.ops)))
    assert all((i < problem.num_forward) == (place < problem.num_forward) for place, i in enumerate(order))
    fixed = [i for i in order if i not in movable or problem.ops[i].optional]
    assert fixed == sorted(fixed)
    after = in_order(problem, order)  # validates that nothing is read before it is written
    assert peak(after) <= peak(problem)
    assert floor_bytes(after) <= floor_bytes(problem)
