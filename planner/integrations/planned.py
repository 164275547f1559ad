"""`plan.compile()`: both halves of a planned step through Inductor, in the planned order, under the measured budget.

The step is the graph that torch traced, without this library's own kernels, as Inductor fuses more of it. What is
recomputed is decided anew, for what compiled code holds and costs, and the halves are proved before they are compiled.
Then one step is measured. What Inductor adds to the prediction comes off the next attempt's budget.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import fx, nn

from passes.memory import measure_peak
from passes.rewrite import Rewritten
from passes.run._torch import below_autograd
from passes.run.step import Step
from passes.trace.arguments import state_tensors
from passes.trace.capture import Traced
from planner.check.record import Checked
from planner.decided import Decided
from planner.dropin.apply import blank_sample
from planner.dropin.module import PlannedModule
from planner.pipeline import bind_step
from planner.prepared import Prepared, lower_step
from planner.units import show_bytes
from solvers.errors import MIB, BudgetError
from solvers.schedule import Schedule
from solvers.solution import solution

from ._torch_inductor import compile_half, decomposed
from .joint import mark_backward
from .kernels import compiled_cost
from .partition import Ready, ready_for

ATTEMPTS = 6
SMALLEST_STEP = 200
BY_INDUCTOR = Checked(0, "compiled code is equal up to rounding, and the check asks for equal bits")


@dataclass(frozen=True)
class Half:
    """A compiled half, called as `Step` calls its halves."""

    forward: Callable[[list[Any]], Any]


def compile_plan(
    module: PlannedModule, prepared: Prepared, budget_bytes: int | None, options: Mapping[str, Any]
) -> tuple[Decided, PlannedModule]:
    """See `Plan.compile`; what was decided, and the module that runs it."""
    state = module._plan_state

    def replan(model: nn.Module, *call: Any) -> Decided:
        return _compiled(model, state.replan(model, *call).prepared, budget_bytes, options)

    decided = _compiled(state.model, prepared, budget_bytes, options)
    sample = blank_sample(state)
    return decided, PlannedModule(state.model, decided, sample, replan, state.loss_fn, state.on_new_shape)


def _compiled(model: nn.Module, prepared: Prepared, budget_bytes: int | None, options: Mapping[str, Any]) -> Decided:
    """Compile, measure, and compile lower until the budget is kept.

    Raises:
        BudgetError: no attempt keeps it.
    """
    start = time.perf_counter()
    prepared, ready = _for_inductor(prepared)
    target, lowest = budget_bytes, 0
    for _ in range(ATTEMPTS):
        schedule = _decide(prepared, ready, target, lowest)
        if schedule is None:
            break
        rewritten = ready.rewritten(schedule)
        step = _compile(prepared, rewritten, options)
        told = ready.peak_bytes(schedule)
        measured = ready.problem.static_bytes + _measure(model, step, prepared.traced)
        if budget_bytes is None or measured <= budget_bytes:
            note = _note(measured, told, time.perf_counter() - start)
            found = solution(prepared.problem, schedule, prepared.options.solver, notes=(note,))
            seconds = {"compile": time.perf_counter() - start}
            return Decided(prepared, found, (rewritten, step), budget_bytes, seconds, BY_INDUCTOR, compiled=True)
        target = min(told - (measured - budget_bytes), told - told // SMALLEST_STEP)
        lowest = min(lowest or measured, measured)
    raise BudgetError(
        f"the lowest compiled step was measured to hold {lowest / MIB:.1f} MiB: ask for more, or use the plan "
        "uncompiled", budget_bytes=budget_bytes, minimum_bytes=lowest,
    )  # fmt: skip


def _note(measured: int, told: int, seconds: float) -> str:
    more = f"{show_bytes(abs(measured - told))} {'more' if measured > told else 'less'} than predicted"
    return (
        f"compiled by Inductor in {seconds:.1f} s: measured to peak at {show_bytes(measured)}, {more}"
    )


def _decide(prepared: Prepared, ready: Ready, target: int | None, lowest: int) -> Schedule | None:
    """The schedule for a target; None where one that was lowered cannot be met."""
    options = prepared.options
    try:
        return ready.decide(target, solver=options.solver, time_limit=options.time_limit, gap=options.gap)
    except BudgetError:
        if not lowest:
            raise
        return None


def _for_inductor(prepared: Prepared) -> tuple[Prepared, Ready]:
    """The step in Inductor's ops, before and after it fuses them."""
    own, options = prepared.traced, prepared.options
    joint = decomposed(fx.GraphModule(own.graph_module, own.pristine))
    traced = replace(own, graph_module=joint, pristine=joint.graph)
    mark_backward(joint.graph, traced.placeholders[traced.num_primals :])
    if options.cost == "roofline":
        options = replace(options, cost=compiled_cost)
    ready = ready_for(
        traced,
        lambda aliases, profiles, once: lower_step(traced, aliases, profiles, prepared.device, options, once),
        timed=options.cost == "measured", fusing=True,
    )  # fmt: skip
    return replace(
        prepared, traced=traced, aliases=ready.aliases, profiles=ready.profiles, lowered=ready.as_compiled,
        baseline_peak_bytes=ready.plain_peak, options=options, hinted={}, start=None,
    ), ready  # fmt: skip


def _compile(prepared: Prepared, rewritten: Rewritten, options: Mapping[str, Any]) -> Step:
    """The step with compiled halves; the backward takes what the forward saves as Inductor laid it out."""
    count = rewritten.num_forward_outputs
    forward, strides = compile_half(rewritten.forward, options, is_backward=False, visible=range(count))
    backward, _ = compile_half(
        rewritten.backward, options, is_backward=True, visible=range(prepared.traced.num_primals),
        strides=strides[count:],
    )  # fmt: skip
    return replace(bind_step(prepared, rewritten), forward=cast(Any, Half(forward)), backward=cast(Any, Half(backward)))


def _measure(model: nn.Module, step: Step, traced: Traced) -> int:
    """The highest point of one step above its parameters and inputs; leaves model and generators as they are."""
    given = traced.placeholders[len(traced.state) :]
    inputs = [_blank(n, 0) for n in given[: traced.num_inputs]]
    primals = [t.detach() for t in (*state_tensors(model, traced.state), *inputs)]
    tangents = given[traced.num_inputs :]
    count = traced.num_forward_outputs

    def once() -> None:
        results = list(step.forward.forward(list(primals)))
        outputs, values = results[len(step.mutated) : count], results[count:]
        results.clear()
        values += [*(primals[i] for i in step.saved_primals), *(_blank(n, 1) for n in tangents)]
        step.backward.forward(values)
        outputs.clear()

    with torch.random.fork_rng(), below_autograd():
        once()  # what is made once and kept is not of the step
        return measure_peak(once, primals[0].device if primals else None)


def _blank(node: fx.Node, value: int) -> torch.Tensor:
    like = node.meta["val"]
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return made.fill_(value)
