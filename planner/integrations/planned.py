"""`plan.compile()`: both halves of a planned step through Inductor, in the planned order, under the measured budget.

The step is the graph that torch traced, without this library's own kernels, as Inductor fuses more of it. What is
recomputed is decided anew, for what compiled code holds and costs, and the halves are proved before they are compiled.
Then the halves are measured, and what Inductor adds to the prediction comes off the next attempt's budget. A step by
regions is decided as one; each of its runs is such a step of its own, and equal runs share their compiled halves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from passes._torch import grouped_mm_of_any_type
from passes.alias import Aliases
from passes.errors import Unsupported
from passes.exclusive import exclusive
from passes.lower import Lowered
from passes.profile import OpProfile
from passes.rewrite import Rewritten
from passes.run.step import Step
from planner.check.record import Checked
from planner.decided import Decided
from planner.dropin.apply import blank_sample
from planner.dropin.module import PlannedModule
from planner.hints import Hinted, resolve
from planner.pipeline import bind_step, planned_runs
from planner.preference import solve_step
from planner.prepared import Prepared, lower_step
from planner.regions.together import composed_anew
from planner.units import show_bytes
from solvers.errors import MIB, BudgetError, PlannerError
from solvers.schedule import Schedule
from solvers.solution import Solution, solution

from ._torch_compile import check_inductor
from ._torch_inductor import compile_half, decomposed
from .joint import mark_backward
from .kernels import compiled_cost
from .measured import Measured, measured, peak_with
from .partition import Ready, ready_for

ATTEMPTS = 6
SMALLEST_STEP = 200
WORDS = 300
BY_INDUCTOR = Checked(0, "compiled code is equal up to rounding, and the check asks for equal bits")


@dataclass(frozen=True)
class Half:
    """A compiled half, called as `Step` calls its halves."""

    forward: Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Backward:
    """A compiled backward, called as `Step` calls its own: it hands over all gradients at its end."""

    compiled: Callable[[list[Any]], Any]

    def forward(self, values: list[Any]) -> Iterator[list[torch.Tensor]]:
        yield [gradient for gradient in self.compiled(values) if gradient is not None]


def compile_plan(
    module: PlannedModule, prepared: Prepared, budget_bytes: int | None, options: Mapping[str, Any]
) -> tuple[Decided, PlannedModule]:
    """See `Plan.compile`; what was decided, and the module that runs it."""
    check_inductor(options)
    state = module._plan_state

    def replan(model: nn.Module, *call: Any) -> Decided:
        return _Compilation(model, state.replan(model, *call).prepared, budget_bytes, options).decided()

    decided = _Compilation(state.model, prepared, budget_bytes, options).decided()
    sample = blank_sample(state)
    return decided, PlannedModule(state.model, decided, sample, replan, state.loss_fn, state.on_new_shape)


@dataclass(frozen=True, eq=False)
class _Compiled:
    """A step, or a run of a region, with compiled halves."""

    decided: Decided
    measured: Measured


class _Compilation:
    """A plan about to be compiled.

    Attributes:
        prepared: the step in Inductor's ops, before and after it fuses them.
        ready: what each step of its own in it is compiled from: of the whole, or of runs of regions.
    """

    def __init__(
        self, model: nn.Module, prepared: Prepared, budget_bytes: int | None, options: Mapping[str, Any]
    ) -> None:
        self.model, self.budget_bytes, self.options = model, budget_bytes, options
        self.start = time.perf_counter()
        self.ready: dict[int, Ready] = {}
        self.known: dict[tuple[int, Schedule], _Compiled] = {}
        if prepared.regions is None:
            self.prepared = self._for_inductor(prepared)
        else:
            made = {id(own): self._for_inductor(own, True) for own in prepared.regions.prepared}
            self.prepared = composed_anew(prepared, [made[id(own)] for own in prepared.regions.prepared])

    @exclusive()
    @grouped_mm_of_any_type()
    def _for_inductor(self, prepared: Prepared, region: bool = False) -> Prepared:
        """The step in Inductor's ops, before and after it fuses them."""
        own, options = prepared.traced, prepared.options
        with _named(prepared):
            joint = decomposed(fx.GraphModule(own.graph_module, own.pristine))
        traced = replace(own, graph_module=joint, pristine=joint.graph)
        mark_backward(joint.graph, traced.placeholders[traced.num_primals :])
        if options.cost == "roofline":
            options = replace(options, cost=compiled_cost)
        hinted: dict[fx.Node, Hinted] = {}

        def to_problem(aliases: Aliases, profiles: dict[fx.Node, OpProfile], once: Sequence[fx.Node]) -> Lowered:
            if not region:  # those are named in the whole
                hinted.update(resolve(options.hints, traced, aliases, prepared.device, required=False))
            named = [n for n, hint in hinted.items() if hint.once]
            return lower_step(traced, aliases, profiles, prepared.device, options, [*once, *named], region)

        ready = ready_for(traced, to_problem, timed=options.cost == "measured", fusing=True)
        lowered = ready.as_compiled
        made = replace(
            prepared, traced=traced, aliases=ready.aliases, profiles=ready.profiles, lowered=lowered,
            baseline_peak_bytes=ready.plain_peak, options=options, start=None,
            hinted={n: hint for n, hint in hinted.items() if n in lowered.node_op},
        )  # fmt: skip
        self.ready[id(made.lowered)] = ready
        return made

    def decided(self) -> Decided:
        """Compile, measure, and compile lower until the budget is kept.

        Raises:
            BudgetError: no attempt keeps it.
        """
        budget, target, lowest = self.budget_bytes, self.budget_bytes, 0
        for _ in range(ATTEMPTS):
            found = self._decide(target, lowest)
            if found is None:
                break
            decided = self._compiled(found)
            peak = self._peak(decided)
            if budget is None or peak <= budget:
                seconds = time.perf_counter() - self.start
                found = replace(found, notes=(*found.notes, _note(peak, found.peak_bytes, seconds)))
                return replace(decided, solution=found, seconds={"compile": seconds})
            target = min(found.peak_bytes - (peak - budget), found.peak_bytes - found.peak_bytes // SMALLEST_STEP)
            lowest = min(lowest or peak, peak)
        raise BudgetError(
            f"the lowest compiled step was measured to hold {lowest / MIB:,.3f} MiB: ask for more, or use the plan "
            "uncompiled", budget_bytes=budget, minimum_bytes=lowest,
        )  # fmt: skip

    def _decide(self, target: int | None, lowest: int) -> Solution | None:
        """The schedule for a target; None where one that was lowered cannot be met."""
        try:
            return solve_step(self.prepared, target)
        except BudgetError:
            if not lowest:
                raise
            return None

    def _compiled(self, found: Solution) -> Decided:
        prepared, budget = self.prepared, self.budget_bytes
        if prepared.regions is None:
            halves = self._of(prepared, found.schedule).decided.halves
            return Decided(prepared, found, halves, budget, {}, BY_INDUCTOR, compiled=True)
        runs = planned_runs(prepared.regions, found.schedule, lambda own, part, _: self._of(own, part).decided)
        return Decided(prepared, found, None, budget, {}, BY_INDUCTOR, runs, True)

    @exclusive()
    @grouped_mm_of_any_type()
    def _of(self, prepared: Prepared, schedule: Schedule) -> _Compiled:
        """A step, or a run of a region, compiled and measured; equal ones once."""
        key = id(prepared.lowered), schedule
        if key not in self.known:
            ready = self.ready[id(prepared.lowered)]
            rewritten = ready.rewritten(schedule)
            model = self.model if self.prepared.regions is None else None
            with _named(prepared):
                step = _compile(prepared, rewritten, self.options)
                seen = measured(model, ready, schedule, step, prepared.traced)
            found = solution(prepared.problem, schedule, prepared.options.solver)
            decided = Decided(prepared, found, (rewritten, step), None, {}, BY_INDUCTOR, compiled=True)
            self.known[key] = _Compiled(decided, seen)
        return self.known[key]

    def _peak(self, decided: Decided) -> int:
        """What the step peaks at with what its halves were measured to hold."""
        regions, schedule = self.prepared.regions, decided.schedule
        if regions is None:
            first = self.ready[id(self.prepared.lowered)].tangent_op
            spans = [(range(first), range(first, len(self.prepared.problem.ops)))]
            own = [self._of(self.prepared, schedule).measured]
        else:
            spans = list(zip(regions.composed.forward, regions.composed.backward, strict=True))
            own = [self._of(run.planned.prepared, run.planned.schedule).measured for run in decided.runs]
        return peak_with(self.prepared.problem, schedule, spans, own)


@contextmanager
def _named(prepared: Prepared) -> Iterator[None]:
    """What Inductor cannot compile, or run, is named."""
    try:
        yield
    except PlannerError:
        raise
    except Exception as error:
        words = " ".join(str(error).split())
        raise Unsupported(
            f"{prepared.model_name} under Inductor", "plan.compile", f"{type(error).__name__}: {words[:WORDS]}",
            "Use the plan uncompiled, or plan the parts that can be compiled by regions.",
        ) from error  # fmt: skip


def _note(measured: int, told: int, seconds: float) -> str:
    more = f"{show_bytes(abs(measured - told))} {'more' if measured > told else 'less'} than predicted"
    return f"compiled by Inductor in {seconds:.1f} s: measured to peak at {show_bytes(measured)}, {more}"


def _compile(prepared: Prepared, rewritten: Rewritten, options: Mapping[str, Any]) -> Step:
    """The step with compiled halves; the backward takes what the forward saves as Inductor laid it out."""
    count = rewritten.num_forward_outputs
    forward, strides = compile_half(rewritten.forward, options, is_backward=False, visible=range(count))
    backward, _ = compile_half(
        rewritten.backward, options, is_backward=True, visible=range(prepared.traced.num_primals),
        strides=strides[count:],
    )  # fmt: skip
    trained = tuple(i for i, gradient in enumerate(prepared.traced.gradients) if gradient is not None)
    step = bind_step(prepared, rewritten)
    return replace(
        step, forward=Half(forward), backward=Backward(backward), leaves=(trained,), reads=((),), exact=False
    )  # fmt: skip
