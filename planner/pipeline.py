"""The pipeline: model, sample -> Traced -> Profiled -> Problem -> Solution -> rewritten, verified Step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from passes.alias import Aliases, alias, device_of
from passes.lower import Lowered, lower, stateful_primals
from passes.ops import is_random
from passes.profile import Measured, OpProfile, profile
from passes.rewrite import Rewritten, rewrite
from passes.run.step import Step
from passes.trace.capture import Traced, capture
from passes.trace.layouts import Layouts, learned
from passes.verify import verify
from solvers.bounds import floor_bytes
from solvers.errors import MIB, BudgetError
from solvers.schedule import Schedule, plain_order, with_frees
from solvers.simulate import simulate
from solvers.solution import Solution, solution

from .hints import NO_HINTS, Hinted, Hints, resolve
from .options import Options
from .preference import solve_step
from .progress import Progress


@dataclass(frozen=True)
class Prepared:
    """A step that is captured, profiled and lowered, before any decision.

    Attributes:
        layouts: what running has shown about layouts so far; one object for all plans of a model.
    """

    traced: Traced
    aliases: Aliases
    profiles: dict[fx.Node, OpProfile]
    lowered: Lowered
    device: torch.device
    baseline_peak_bytes: int
    keep_outputs: bool = True
    hints: Hints = NO_HINTS
    hinted: dict[fx.Node, Hinted] = field(default_factory=dict)
    layouts: Layouts = field(default_factory=dict)

    @property
    def preferred(self) -> tuple[int, ...]:
        """Ops that the hints want to be recomputed, in order."""
        return tuple(sorted(self.lowered.node_op[n] for n, hint in self.hinted.items() if not hint.once))


@dataclass(frozen=True)
class Planned:
    """A decided step: what was chosen, and the code that runs it."""

    prepared: Prepared
    solution: Solution
    rewritten: Rewritten
    step: Step
    seconds: dict[str, float]


def plan_step(model: nn.Module, bound: Mapping[str, Any], options: Options, *, first: bool = True) -> Planned:
    """Capture, profile, solve, rewrite and prove one training step; `first` as for `prepare`."""
    progress = Progress(options.progress)
    prepared = prepare(model, bound, options, progress, first=first)
    with progress.stage("solve"):
        solution = solve_step(prepared, options.budget_bytes, options, progress.report)
    return emit(prepared, solution, progress)


def prepare(
    model: nn.Module,
    bound: Mapping[str, Any],
    options: Options,
    progress: Progress,
    *,
    first: bool = True,
    ceiling_bytes: int | None = None,
) -> Prepared:
    """Everything before the decision.

    Args:
        first: False when planning anew for other inputs, where a hint that names nothing warns instead of raising.
        ceiling_bytes: raise `BudgetError` before any op is run if the step is sure to need more.
    """
    device = model_device(model)
    measured: dict[Any, Measured] = {}
    while True:
        traced, aliases, hinted = _capture(model, bound, options, progress, first)
        once = [n for n, hint in hinted.items() if hint.once]
        with progress.stage("profile"):
            real = not any(p.device.type == "meta" for p in model.parameters())
            if ceiling_bytes is not None:
                _check_floor(traced, aliases, device, options, once, ceiling_bytes)
            profiles = profile(
                traced.graph_module.graph, measure=real, timed=real and options.cost == "measured",
                progress=progress.each, known=measured,
            )  # fmt: skip
        made = learned(traced.graph_module.graph, {n: p.result_strides for n, p in profiles.items()})
        if all(options.layouts.get(key) == strides for key, strides in made.items()):
            break
        options.layouts.update(made)
    lowered = lower_step(traced, aliases, profiles, device, options, once)
    plain = simulate(lowered.problem, with_frees(lowered.problem, plain_order(lowered.problem)))
    return Prepared(
        traced, aliases, profiles, lowered, device, plain.peak_bytes, options.keep_outputs, options.hints, hinted,
        options.layouts,
    )  # fmt: skip


def _capture(
    model: nn.Module, bound: Mapping[str, Any], options: Options, progress: Progress, first: bool
) -> tuple[Traced, Aliases, dict[fx.Node, Hinted]]:
    with progress.stage("capture"):
        traced = capture(
            model, bound, options.loss_fn, differentiated=options.differentiated, keep_outputs=options.keep_outputs,
            layouts=options.layouts,
        )  # fmt: skip
        aliases = alias(traced.graph_module.graph)
        hinted = resolve(options.hints, traced, aliases, model_device(model), required=first)
    return traced, aliases, hinted


def _check_floor(
    traced: Traced, aliases: Aliases, device: torch.device, options: Options, once: Collection[fx.Node], ceiling: int
) -> None:
    """The floor without what ops need besides what they read and write is known without running one."""
    counted = {n: replace(p, workspace_bytes=0) for n, p in profile(traced.graph_module.graph, measure=False).items()}
    floor = floor_bytes(lower_step(traced, aliases, counted, device, options, once).problem)
    if floor > ceiling:
        message = f"the step cannot run below {floor / MIB:,.1f} MiB; it was to stay below {ceiling / MIB:,.1f} MiB"
        raise BudgetError(message, budget_bytes=ceiling, floor_bytes=floor)


def lower_step(
    traced: Traced, aliases: Aliases, profiles: dict[fx.Node, OpProfile], device: torch.device, options: Options,
    once: Collection[fx.Node] = (),
) -> Lowered:  # fmt: skip
    """The Problem of a profiled step; `once` are the kernels that hints keep from running again."""
    return lower(
        traced, aliases, profiles, options.cost_function, device=device, reserve_bytes=options.reserve_bytes,
        keep_outputs=options.keep_outputs, once=once,
    )  # fmt: skip


def emit(prepared: Prepared, solution: Solution, progress: Progress) -> Planned:
    """Rewrite a solution into code, and prove it."""
    with progress.stage("rewrite"):
        rewritten = rewrite(prepared.traced, prepared.aliases, prepared.lowered, solution.schedule)
    with progress.stage("verify"):
        verify(prepared.traced, rewritten)
    return Planned(prepared, solution, rewritten, make_step(prepared, rewritten), dict(progress.seconds))


def emit_schedule(prepared: Prepared, schedule: Schedule, solver: str = "given") -> Planned:
    """`emit` for a schedule from elsewhere (a plan file, a test)."""
    return emit(prepared, solution(prepared.lowered.problem, schedule, solver), Progress(False))


def make_step(prepared: Prepared, rewritten: Rewritten) -> Step:
    """Bind the halves to what the runtime has to know."""
    traced = prepared.traced
    returned = [leaf for leaf in traced.outputs if leaf.input is None]
    tangents = traced.placeholders[traced.num_primals :]
    return Step(
        forward=rewritten.forward,
        backward=rewritten.backward,
        mutated=traced.mutated,
        num_outputs=traced.num_outputs,
        saved_primals=rewritten.saved_primals,
        differentiable=tuple(leaf.requires_grad for leaf in returned),
        expected=tuple(leaf.index for leaf in returned if leaf.differentiated),
        tangent_strides=tuple(tuple(t.meta["val"].stride()) for t in tangents),
        keep_primals=stateful_primals(traced),
        rng_devices=_rng_devices(traced),
        hold_outputs=prepared.keep_outputs,
    )


def model_device(model: nn.Module) -> torch.device:
    """Where the model lives; the CPU for a model without parameters or on the meta device."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type != "meta":
            return tensor.device
    return torch.device("cpu")


def _rng_devices(traced: Traced) -> tuple[str, ...]:
    drawing = [n for n in traced.graph_module.graph.nodes if is_random(n)]
    return tuple(dict.fromkeys(str(device_of(n)) for n in drawing))
