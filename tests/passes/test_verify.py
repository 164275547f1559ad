"""The proof: valid rewrites pass, and every way of breaking one that changes a value is caught."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from passes.errors import VerificationError
from passes.ops import FUNCTIONAL, is_random
from passes.rewrite import Rewritten, rewrite
from passes.run.random import get_rng_state, run_with_rng_state
from passes.trace.arguments import bind_sample
from passes.verify import verify
from planner.options import Options
from planner.prepared import Prepared, prepare
from planner.progress import Progress
from solvers.schedule import Schedule, plain_order, with_frees
from tests.passes.corruptions import run

OPTIONS = Options(progress=False)


def prepared() -> Prepared:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(8 * 36, 8),
              nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 4))  # fmt: skip
    model = nn.Sequential(*layers)
    return prepare(model, bind_sample(model, torch.randn(4, 3, 8, 8)), OPTIONS, Progress(False))


def recompute_all(step: Prepared) -> Schedule:
    problem = step.lowered.problem
    order = list(plain_order(problem))
    at = order.index(problem.num_forward) + 1
    order[at:at] = [i for i in problem.forward if problem.ops[i].recomputable]
    return with_frees(problem, order)


def rewritten(step: Prepared) -> Rewritten:
    return rewrite(step.traced, step.aliases, step.lowered, recompute_all(step))


def find(graph: fx.Graph, condition: Callable[[fx.Node], bool]) -> fx.Node:
    return next(n for n in graph.nodes if n.op == "call_function" and condition(n))


def named(part: str) -> Callable[[fx.Node], bool]:
    return lambda n: part in str(n.target)


def swap_arguments(r: Rewritten) -> None:
    node = find(r.backward.graph, named("mm.default"))
    node.args = (node.args[1], node.args[0], *node.args[2:])


def drop_a_recompute(r: Rewritten) -> None:
    again = find(r.backward.graph, lambda n: bool(n.meta.get("recompute_of")) and "tanh" in str(n.target))
    again.replace_all_uses_with(again.args[0])  # type: ignore[arg-type]


def recompute_a_random_op(r: Rewritten) -> None:
    node = find(r.backward.graph, lambda n: n.target is run_with_rng_state)
    node.target, node.args = node.args[2], node.args[3:]


def replay_under_another_state(r: Rewritten) -> None:
    states = [n for n in r.forward.graph.nodes if n.target is get_rng_state]
    states[0].replace_all_uses_with(states[1])


def take_the_state_too_late(r: Rewritten) -> None:
    state = find(r.forward.graph, lambda n: n.target is get_rng_state)
    drawn = find(r.forward.graph, is_random)
    drawn.append(state)


def wrong_getitem(r: Rewritten) -> None:
    batch_norm = find(r.backward.graph, named("_native_batch_norm"))
    items = [u for u in batch_norm.users if u.target is operator.getitem]
    items[0].args = (batch_norm, 1 if items[0].args[1] != 1 else 2)


def change_a_constant(r: Rewritten) -> None:
    node = find(r.forward.graph, named("dropout"))
    node.args = (node.args[0], 0.25, *node.args[2:])


def change_a_keyword(r: Rewritten) -> None:
    node = find(r.backward.graph, named("sum.dim_IntList"))
    node.kwargs = {**node.kwargs, "dtype": torch.float64}


def wrong_output_order(r: Rewritten) -> None:
    output = r.backward.graph.output_node()
    values: Any = list(output.args[0])  # type: ignore[arg-type]
    first, second = [i for i, v in enumerate(values) if isinstance(v, fx.Node)][:2]
    values[first], values[second] = values[second], values[first]
    output.args = (tuple(values),)


def drop_a_gradient(r: Rewritten) -> None:
    output = r.backward.graph.output_node()
    output.args = ((None, *output.args[0][1:]),)  # type: ignore[index]


def duplicate_a_mutation(r: Rewritten) -> None:
    output = r.forward.graph.output_node()
    values: Any = output.args[0]
    output.args = ((values[1], values[1], *values[2:]),)


def save_the_wrong_tensor(r: Rewritten) -> None:
    output = r.forward.graph.output_node()
    values: Any = list(output.args[0])  # type: ignore[arg-type]
    values[-1] = values[-2]
    output.args = (tuple(values),)


def draw_twice(r: Rewritten) -> None:
    node = find(r.forward.graph, is_random)
    with r.forward.graph.inserting_after(node):
        r.forward.graph.node_copy(node)


def swap_two_draws(r: Rewritten) -> None:
    first, second = [n for n in r.forward.graph.nodes if n.op == "call_function" and is_random(n)][:2]
    first.args = (first.args[0], second.args[1], *first.args[2:])


def write_to_an_input(r: Rewritten) -> None:
    graph = r.forward.graph
    first = next(n for n in graph.nodes if n.op == "placeholder")
    with graph.inserting_before(graph.output_node()):
        graph.call_function(torch.ops.aten.mul_.Tensor, (first, 2))


def overwrite_too_early(r: Rewritten) -> None:
    node = find(r.backward.graph, named("tanh_backward"))
    value = node.args[1]
    assert isinstance(value, fx.Node)
    with r.backward.graph.inserting_before(node):
        r.backward.graph.call_function(torch.ops.aten.mul_.Tensor, (value, 2))


def replay_on_another_device(r: Rewritten) -> None:
    find(r.backward.graph, lambda n: n.target is run_with_rng_state).update_arg(1, "cuda:1")


def compute_nonsense_that_nobody_reads(r: Rewritten) -> None:
    node = find(r.backward.graph, named("mm.default"))
    with r.backward.graph.inserting_after(node):
        r.backward.graph.call_function(node.target, (node.args[1], node.args[0]))  # type: ignore[arg-type]


def hand_over_another_primal(r: Rewritten) -> None:
    object.__setattr__(r, "saved_primals", (*r.saved_primals[1:], r.saved_primals[0]))


BREAKS = (
    swap_arguments, drop_a_recompute, recompute_a_random_op, replay_under_another_state, take_the_state_too_late,
    wrong_getitem, change_a_constant, change_a_keyword, wrong_output_order, drop_a_gradient, duplicate_a_mutation,
    save_the_wrong_tensor, draw_twice, swap_two_draws, write_to_an_input, overwrite_too_early,
    replay_on_another_device, compute_nonsense_that_nobody_reads, hand_over_another_primal,
)  # fmt: skip


@pytest.mark.parametrize("damage", BREAKS, ids=lambda f: f.__name__)
def test_a_broken_rewrite_is_caught(damage: Callable[[Rewritten], None]) -> None:
    step = prepared()
    good = rewritten(step)
    verify(step.traced, good)
    damage(good)
    with pytest.raises(VerificationError):
        verify(step.traced, good)


def test_running_statistics_do_not_reach_the_recomputed_result() -> None:
    step = prepared()
    r = rewritten(step)
    again = find(r.backward.graph, named("_native_batch_norm"))
    assert {u.args[1] for u in again.users} <= {0, 1, 2}
    verify(step.traced, r)


def test_everything_saved_is_the_traced_graph_node_for_node() -> None:
    step = prepared()
    problem = step.lowered.problem
    r = rewrite(step.traced, step.aliases, step.lowered, with_frees(problem, plain_order(problem)))
    nodes = [n for n in step.traced.graph_module.graph.nodes if n in step.lowered.node_op]
    assert sorted(nodes) == sorted(n for n in step.lowered.nodes if n is not None)
    traced = [str(n.target) for n in step.lowered.nodes if n is not None]  # the backward in the order of the Problem
    emitted = [
        str(FUNCTIONAL.get(n.target, n.target))
        for module in (r.forward, r.backward)
        for n in module.graph.nodes
        if n.op == "call_function" and n.meta.get("source") in {m.name for m in step.lowered.node_op}
        and n.meta["source"] == n.meta.get("source") and "recompute_of" in n.meta
    ]
    assert emitted == traced
    assert not any(n.meta.get("recompute_of") for n in r.backward.graph.nodes)


def test_random_corruptions_that_change_a_value_are_caught() -> None:
    """`python -m tests.passes.corruptions` draws 500 of them."""
    tally = run(30)
    assert tally.missed == []
    assert sum(tally.caught.values()) >= 30
