"""`auto_checkpoint` and its relatives: the functions a user calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from passes.profile import OpProfile
from passes.trace.arguments import bind_sample
from passes.trace.refuse import refuse
from solvers import get_solver
from solvers.errors import MIB, PlannerError

from .budget import budget_to_bytes, optimizer_state_bytes, reserve_to_bytes
from .dropin.module import PlannedModule
from .hints import make_hints
from .options import OnNewShape, Options, check_options
from .pipeline import Planned, model_device, plan_step, prepare
from .plan import Plan
from .progress import Progress


def auto_checkpoint(
    model: nn.Module,
    sample: Any,
    budget_mb: float | None = None,
    *,
    solver: str = "auto",
    cost: str | Callable[[OpProfile], float] = "roofline",
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Any = None,
    reserve_mb: float = 0,
    time_limit: float = 30.0,
    gap: float = 0.01,
    progress: bool | None = None,
    on_new_shape: OnNewShape = "replan",
    keep_outputs: bool = True,
    save: Sequence[str] = (),
    never_recompute: Sequence[str] = (),
    recompute: Sequence[str] = (),
) -> Plan:
    """Plan a training step of `model` that stays under `budget_mb`, at the lowest recompute cost found.

    One thread of a process plans at a time: a plan begun in another one waits while this one captures or profiles, and
    so does a replan inside a training step. Other threads may train other models meanwhile; on the CPU their random
    draws are theirs alone. Ctrl-C is heard within about a second, at a moment at which torch and the model are as
    before; pressed again after two seconds, at once.

    Args:
        model: any `nn.Module`; it is not changed.
        sample: a tensor, a tuple (args) or a dict (kwargs), as the model will be called in training.
        budget_mb: MiB of peak memory of the whole step, as `torch.cuda.max_memory_allocated` counts it:
            parameters, buffers, inputs, gradients, activations, outputs. None: the device's free memory on CUDA,
            no limit on the CPU.
        solver: a name of `solvers.SOLVERS`.
        cost: what recompute is measured in: "flops", "roofline" (bytes), "measured" (nanoseconds on this device),
            or a function of an `OpProfile`.
        loss_fn: `loss_fn(output)` or `loss_fn(output, target, ...)`; planned as part of the step, and what
            `plan.module` returns. Its further required arguments become arguments of the module.
        optimizer: an instance or class whose state (after its first step) is to fit into the budget too.
        reserve_mb: MiB to leave free for anything else.
        time_limit: seconds the solver may take.
        gap: stop when recompute is proved to be within this share of the step's cost of the optimum.
        progress: show progress; None shows it on a terminal and in notebooks.
        keep_outputs: count what the model returns besides its loss (logits, ...) as alive through the backward. False
            plans for `loss = module(**batch).loss`, where nobody holds it: less recompute, but holding it then
            exceeds the budget by its size.
        on_new_shape: what a call with other shapes does: "replan" (and cache), "eager", or "error".
        save, never_recompute, recompute: hints, each a sequence of patterns. A pattern is the name of an op (`addmm_3`,
            as `plan.explain` shows it), a module path (with all below it), an ATen op (`aten.mm`, `aten.mm.default`)
            or module/op (`transformer.h.*.mlp/aten.gelu`); `*`, `?` and `[]` match as in `fnmatch`, dots included.
            What matches only views stands for the tensors that they are views of. Ops of the backward are not matched.

            * save: what these ops compute stays resident from the forward to its last use. A result that neither the
              backward nor a recompute reads has its last use in the forward, and is not kept for nothing.
            * never_recompute: these ops run once. What the backward needs of them is therefore kept; for a result
              that it reads, the two hints ask for the same.
            * recompute: these ops are preferred. What must be recomputed is taken from them first, and what they
              compute is not kept from the forward for the backward wherever the rest of the budget allows that (with
              no budget: always). It is no promise: where the budget leaves no room, or an op may not run again, it is
              kept, and a note says so. `plan.bound` then bounds the schedules that run these ops at least as often
              as the plan does.

    Raises:
        BudgetError: the budget is no budget, or nothing found fits; carries the smallest that works. Where hints
            narrow what fits, it says what would work without them.
        CaptureError, Unsupported: the model cannot be planned; says where and what to do.
        SolverUnavailable: `solver` is unknown or not installed.
        HintError: a hint names no op of the step (the nearest names are told), or contradicts another one.
    """
    _check_model(model)
    get_solver(solver)
    options = Options(
        budget_bytes=None, reserve_bytes=0, solver=solver, cost=cost, loss_fn=loss_fn, time_limit=time_limit, gap=gap,
        progress=progress, on_new_shape=on_new_shape, keep_outputs=keep_outputs,
        hints=make_hints(save, never_recompute, recompute),
    )  # fmt: skip
    check_options(options)
    budget_bytes = budget_to_bytes(budget_mb, model_device(model))
    reserve_bytes = reserve_to_bytes(reserve_mb) + optimizer_state_bytes(optimizer, model)
    options = replace(options, budget_bytes=budget_bytes, reserve_bytes=reserve_bytes)
    bound = _bind(model, sample, loss_fn)
    planned = plan_step(model, bound, options)
    return make_plan(model, bound, planned, options)


def make_plan(model: nn.Module, bound: dict[str, Any], planned: Planned, options: Options) -> Plan:
    """Wrap a planned step as a `Plan` with its drop-in module."""

    def replan(instance: nn.Module, call: Any, differentiated: tuple[str, ...] | None) -> Planned:
        _check_model(instance)
        return plan_step(instance, call, replace(options, differentiated=differentiated, progress=False), first=False)

    module = PlannedModule(model, planned, bound, replan, options.loss_fn, options.on_new_shape)
    return Plan(module, options.budget_bytes, planned, options.cost_name)


def minimum_budget(
    model: nn.Module,
    sample: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Any = None,
    reserve_mb: float = 0,
    time_limit: float = 30.0,
    progress: bool | None = None,
    keep_outputs: bool = True,
    save: Sequence[str] = (),
    never_recompute: Sequence[str] = (),
) -> tuple[float, float]:
    """`(minimum_mb, floor_mb)`: the smallest budget known to work, and the proved floor below which none does.

    The options are those of `auto_checkpoint`: both figures hold under the hints, with what is set aside included.
    """
    from solvers import minimum_budget as solve_minimum

    _check_model(model)
    hints = make_hints(save, never_recompute)
    reserve_bytes = reserve_to_bytes(reserve_mb) + optimizer_state_bytes(optimizer, model)
    options = Options(
        None, reserve_bytes, "auto", "roofline", loss_fn, time_limit, 0.01, progress, keep_outputs=keep_outputs,
        hints=hints,
    )  # fmt: skip
    check_options(options)
    prepared = prepare(model, _bind(model, sample, loss_fn), options, Progress(progress))
    minimum = solve_minimum(prepared.lowered.problem, time_limit=time_limit)
    return minimum.minimum_bytes / MIB, minimum.floor_bytes / MIB


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise PlannerError(f"model is a {type(model).__name__}: pass a torch.nn.Module.")
    if torch.is_inference_mode_enabled():
        raise PlannerError(
            "planning under torch.inference_mode(), in which no gradient can be recorded: leave the block, or use "
            "torch.no_grad() there."
        )
    refuse(model)


def _bind(model: nn.Module, sample: Any, loss_fn: Callable[..., Any] | None) -> dict[str, Any]:
    try:
        return bind_sample(model, sample, loss_fn)
    except TypeError as error:
        raise PlannerError(
            f"the sample does not fit {type(model).__name__}.forward: {error}. Pass a tensor, a tuple of positional "
            "arguments, or a dict of keyword arguments."
        ) from error

