"""Random programs under random valid schedules: the proof, the numbers and the memory agree with plain eager.

`python -m tests.passes.programs` draws as many as wanted; what it found wrong once is a named test here or a zoo entry.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from passes.errors import Unsupported
from passes.run import kernels
from passes.trace.arguments import bind_sample
from planner import auto_checkpoint
from planner.pipeline import emit_schedule
from planner.plan import Plan
from planner.prepared import prepare
from planner.progress import Progress
from solvers.schedule import Step, plain_order, with_frees
from solvers.simulate import simulate
from tests.passes.corruptions import run
from tests.passes.program_ops import FAMILIES, Builder, Pick
from tests.passes.programs import OPTIONS, SMALL_BLOCKS, Rejected, check, check_auto, draw_program, run_seed
from tests.zoo.compare import differences, measured_peak_bytes, run_step
from tests.zoo.hazards import Wrap


def picker(draw: st.DrawFn) -> Pick:
    return lambda low, high: draw(st.integers(low, high))


@settings(max_examples=20)
@given(st.data())
def test_random_programs_under_random_schedules(data: Any) -> None:
    pick = picker(data.draw)
    try:
        check(draw_program(pick, max_ops=8), pick)
    except (Rejected, Unsupported):
        assume(False)


@settings(max_examples=5)
@given(st.data())
def test_random_programs_under_a_budget(data: Any) -> None:
    pick = picker(data.draw)
    try:
        check_auto(draw_program(pick, max_ops=8), pick(40, 95))
    except (Rejected, Unsupported):
        assume(False)


@pytest.mark.every(2)
@pytest.mark.parametrize("first", range(0, 20, 10))
def test_random_programs_with_merges_whatever_their_size(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in zip(("SMALLEST_BLOCK", "NORM_BLOCK"), SMALL_BLOCKS, strict=True):
        monkeypatch.setattr(kernels, name, size)
    assert {run_seed(seed)[0] for seed in range(first, first + 10)} & {"ok", "auto"}


@pytest.mark.slow
def test_two_thousand_random_programs() -> None:
    kinds = [run_seed(seed)[0] for seed in range(2600)]
    assert sum(kind in ("ok", "auto") for kind in kinds) >= 2000


@pytest.mark.slow
def test_five_hundred_random_corruptions() -> None:
    tally = run(500)
    assert tally.missed == []


def test_every_family_of_ops_draws() -> None:
    """A family that always fails or does nothing would leave its ops untested."""
    for family in FAMILIES:
        grown = 0
        for seed in range(6):
            builder = Builder(random.Random(seed).randint)
            builder.call(torch.tanh, builder.module(nn.Linear(4, 6), builder.input(torch.randn(3, 2, 4))))
            before = len(builder.graph.nodes)
            family(builder)
            grown += len(builder.graph.nodes) > before
        assert grown, family.__name__


# What the programs found ------------------------------------------------------------------------------------------


def _as_plain(forward: Callable[..., Any], sample: Any, **children: nn.Module) -> None:
    torch.manual_seed(0)
    plain, model = Wrap(forward, **children), Wrap(forward, **children)
    plan = auto_checkpoint(model, sample)
    assert differences(run_step(plain, plain, sample), run_step(plan.module, model, sample)) == []


@pytest.mark.parametrize("factory", [torch.rand, torch.randn])
def test_a_random_op_with_a_device_keyword_is_replayed(factory: Callable[..., torch.Tensor]) -> None:
    """`rand(..., device=)` met the replay's own parameter of that name."""
    model = Wrap(lambda self, x: (self.linear(x) * factory(3, 4)).tanh().sum(), linear=nn.Linear(4, 4))
    sample = torch.randn(3, 4)
    prepared = prepare(model, bind_sample(model, sample), OPTIONS, Progress(False))
    problem = prepared.lowered.problem
    order = list(plain_order(problem))
    order[order.index(problem.num_forward) + 1 : 0] = [i for i in problem.forward if problem.ops[i].recomputable]
    planned = emit_schedule(prepared, with_frees(problem, order))
    assert "run_with_rng_state" in planned.rewritten.backward.code


def test_gates_changed_in_place_in_a_wider_buffer() -> None:
    """`chunk.add_(...).sigmoid_()` runs on strided memory in eager: a dense copy gave other last bits."""
    _as_plain(lambda self, x: self.gru(x)[0].abs().mean(), torch.randn(2, 12, 3), gru=nn.GRU(3, 4))


def test_pieces_of_an_unsafe_split_share_memory() -> None:
    model = Wrap(lambda self, x: self.gru(x)[0].sum(), gru=nn.GRU(3, 4))
    prepared = prepare(model, bind_sample(model, torch.randn(2, 12, 3)), OPTIONS, Progress(False))
    nodes = [n for n in prepared.traced.graph_module.graph.nodes if "unsafe_split" in str(n.target)]
    assert nodes
    assert all(len(prepared.aliases.storages(n)) == 1 for n in nodes)
    assert not any("unsafe_split" in op.name for op in prepared.lowered.problem.ops)


def test_computing_what_is_live_keeps_the_first_copy() -> None:
    """A saved tensor that was computed again although live was held twice: a placeholder lives to the end."""
    model = Wrap(lambda self, x: self.linear(x).sin().sum(), linear=nn.Linear(4, 4))
    prepared = prepare(model, bind_sample(model, torch.randn(3, 4)), OPTIONS, Progress(False))
    problem = prepared.lowered.problem
    schedule = list(with_frees(problem, plain_order(problem)))
    boundary = next(p for p, s in enumerate(schedule) if s == Step("compute", problem.num_forward))
    schedule.insert(boundary + 1, Step("compute", 0))
    simulate(problem, tuple(schedule))
    backward = emit_schedule(prepared, tuple(schedule)).rewritten.backward.graph
    assert all(n.users for n in backward.find_nodes(op="placeholder"))


def test_what_is_computed_again_before_the_backward_holds_what_the_forward_returns() -> None:
    """A buffer's new value was counted as gone: 5 % low for a queue of keys at its smallest budget."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        result = (x @ self.linear.weight.sin()).square().mean()
        self.seen.add_(x.detach())
        return result

    model, sample = Wrap(forward, linear=nn.Linear(64, 64)), torch.randn(64, 64)
    model.register_buffer("seen", torch.zeros(64, 64))
    bound = bind_sample(model, sample)
    prepared = prepare(model, bound, OPTIONS, Progress(False))
    problem, order = prepared.lowered.problem, list(plain_order(prepared.lowered.problem))
    start = order.index(problem.num_forward)
    order[start:start] = [i for i in problem.forward if problem.ops[i].recomputable][:2]
    plan = Plan.of(model, bound, emit_schedule(prepared, with_frees(problem, order)))
    assert measured_peak_bytes(plan.module, model, sample, plan.static_bytes) == plan.peak_bytes


def test_an_output_changed_in_place_before_the_backward_is_noticed() -> None:
    """The backward saved it; plain eager raises too."""
    model = Wrap(lambda self, x: torch.tanh(self.linear(x)), linear=nn.Linear(4, 4))
    output = auto_checkpoint(model, torch.randn(2, 4)).module(torch.randn(2, 4))
    with torch.no_grad():
        output.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        output.sum().backward()
