"""`auto_checkpoint` and `minimum_budget`: a session's plan, and its minimum."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from passes.profile import OpProfile
from solvers.errors import MIB

from .budget import Budget
from .check.record import Check
from .options import Gradients, OnNewShape
from .plan import Plan
from .ranks.agree import plan_together
from .ranks.wrapper import group_of
from .session import Session, open_session


def auto_checkpoint(
    model: nn.Module,
    sample: Any,
    budget_mb: float | str | None = None,
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
    check: Check = "auto",
    regions: str | Sequence[str] = "auto",
    gradients: Gradients = "fresh",
    device: str | torch.device | None = None,
    group: Any = None,
    pipeline: Any = None,
) -> Plan:
    """Plan a training step of `model` that stays under `budget_mb`, at the lowest recompute cost found.

    One thread of a process plans at a time: a plan begun in another one waits while this one captures or profiles, and
    so does a replan inside a training step. Other threads may train other models meanwhile; on the CPU their random
    draws are theirs alone. Calls of one planned model (`plan.module`) from several threads take turns, and wait while
    it is planned anew. Other uses of a model that is being planned do not (its own calls, `zero_grad`, `plan.apply`):
    keep them out of other threads meanwhile. Ctrl-C is heard within about a second, at a moment at which torch and the
    model are as before; pressed again after two seconds, at once. So is any signal with a handler in Python (an alarm).

    Args:
        model: any `nn.Module`; it is not changed.
        sample: a tensor, a tuple (args) or a dict (kwargs), as the model will be called in training.
        budget_mb: MiB of peak memory of the whole step, as `torch.cuda.max_memory_allocated` counts it:
            parameters, buffers, inputs, gradients, activations, outputs. Also a size with its unit ("12GB") or a
            share ("50%") of the peak of this step with nothing recomputed (`plan.baseline_peak_bytes`; plain eager
            may take more). None: all that truly fits the device on CUDA, segments of its allocator included; no limit
            on the CPU.
        solver: a name of `solvers.SOLVERS`.
        cost: what recompute is measured in. "roofline": picoseconds by rates of the device that the step runs on, for
            each class of op (`passes.rates` has those built in, and "roofline:h100" names one). "device": the same
            with rates that are measured once on this device and kept in a file. "measured": nanoseconds that each op
            took while planning, which no two plannings agree on. "flops". Or a function of an `OpProfile`.
        loss_fn: `loss_fn(output)` or `loss_fn(output, target, ...)`; planned as part of the step, and what
            `plan.module` returns. Its further required arguments become arguments of the module.
        optimizer: an instance, class or function that makes one from a list of parameters. Its state is resident
            throughout, and what its `step()` holds for a moment has to fit as well, once the activations are gone; both
            are measured by stepping stand-ins of the parameters (`planner.optimizer`).
        reserve_mb: MiB to leave free for anything else.
        time_limit: seconds the solver may take. Where a call with other shapes is planned anew it starts from what was
            decided before, with a tenth of that or a fifth of what it took then, unless no plan is found so soon.
        gap: stop when recompute is proved to be within this share of the step's cost of the optimum.
        progress: show progress; None shows it on a terminal and in notebooks.
        keep_outputs: count what the model returns besides its loss (logits, ...) as alive through the backward. False
            plans for `loss = module(**batch).loss`, where nobody holds it: less recompute, but holding it then
            exceeds the budget by its size.
        on_new_shape: what a call with other shapes does: "replan" (and cache), "eager", or "error". "bucket" is
            "replan" without the solver where a larger shape was planned: what that recomputes is recomputed, as far
            as the budget asks for it here. Nothing is padded.
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
              no budget: always). Where the budget leaves no room, or an op may not run again, it is kept, and a note
              says so. `plan.bound` then bounds the schedules that run these ops at least as often as the plan does.
        check: whether two steps of the planned and of the plain model are run from equal state, on copies, and
            compared bit for bit before the plan is handed over; `plan.checked` tells. "auto" does so where the
            memory is free (on a GPU, in training: within the budget), and for no longer than planning took, or a
            second: with one step instead of two, or not at all. True does so always. A call in training that is
            planned anew is checked as well (by "auto" not one whose trace comes from symbols for its sizes): where the
            two differ, such calls run in eager, with a warning, and by True an error says so. On the CPU some later
            calls are compared, too, where twice the plain step's memory is free: spot checks.
        regions: "whole" plans the model as one step. Patterns of module paths ("model.layers.*") choose submodules:
            each is planned as a step of its own in place of its forward, all under one budget, and the code between
            them runs as it is, what it holds being measured on the sample. Where they cannot be had within the budget,
            the submodules that hold them are planned instead. "auto" plans the whole model where it can be
            traced, and otherwise the largest submodules that can. A step that takes another course than the sample's
            (layer drop, another number of calls) is right, but may need more memory. `plan.regions` tells all.
        gradients: what becomes of a parameter's gradient, which leaves the backward as soon as nothing reads it any
            more. "fresh" counts on `.grad` being None before the step, and on gradients that stay. "accumulated" counts
            on `.grad` being there and added to: the gradients from before are resident. "consumed" counts on a hook
            (`register_post_accumulate_grad_hook`) that sets `.grad` to None; with `optimizer=`, on one that steps it
            for that parameter.
        device: plan for another device than the model is on: "cuda", "cpu", or one with built-in rates ("h100").
            Its rates, rounding of sizes and rules count; the kernels are those that run here, and `plan.notes` says
            what is therefore not counted.
        group: a `torch.distributed` process group whose ranks all make this call: they get one plan, decided by its
            first rank, and one that cannot plan, or has another step, is an error on all of them. A model in
            DistributedDataParallel brings its own; else, with None, this process plans alone.
        pipeline: the `ScheduleGPipe` or `Schedule1F1B` whose stage the model is; the sample is then one micro-batch,
            and the budget holds for all that are in flight. Apply the plan to the stage's module. `loss_fn(output)` is
            then the loss of a micro-batch, which the schedule computes outside of the plan: it is counted, not planned.

    Raises:
        BudgetError: the budget is not one, or nothing found fits; carries the smallest that works. Where hints
            narrow what fits, it says what would work without them.
        CaptureError, Unsupported, RegionError: the model cannot be planned; says where and what to do.
        CheckError: the planned step differs from the plain one; names the first op, gradient or output and the likely
            cause.
        SolverUnavailable: `solver` is unknown or not installed.
        HintError: a hint names no op of the step (the nearest names are told), or contradicts another one.
        RankError: another rank of `group` cannot plan, ended, or has another step.
    """

    def opened() -> Session:
        return open_session(
            model, sample, solver=solver, cost=cost, loss_fn=loss_fn, optimizer=optimizer, reserve_mb=reserve_mb,
            time_limit=time_limit, gap=gap, progress=progress, on_new_shape=on_new_shape, keep_outputs=keep_outputs,
            save=save, never_recompute=never_recompute, recompute=recompute, check=check, regions=regions,
            gradients=gradients, device=device, pipeline=pipeline,
        )  # fmt: skip

    ranks = group_of(model) if group is None else group
    if ranks is not None:
        return plan_together(ranks, opened, budget_mb)
    budget, session = Budget(budget_mb), opened()
    return session.plan(budget.to_bytes(session.plain_peak_bytes))


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
    regions: str | Sequence[str] = "auto",
    gradients: Gradients = "fresh",
    device: str | torch.device | None = None,
) -> tuple[float, float]:
    """`(minimum_mb, floor_mb)`: the smallest budget known to work, and the proved floor below which none does.

    The options are those of `auto_checkpoint`: both figures hold under the hints, with what is set aside included.
    """
    found = open_session(
        model, sample, loss_fn=loss_fn, optimizer=optimizer, reserve_mb=reserve_mb, time_limit=time_limit,
        progress=progress, keep_outputs=keep_outputs, save=save, never_recompute=never_recompute, regions=regions,
        gradients=gradients, device=device,
    ).minimum()  # fmt: skip
    return found.minimum_bytes / MIB, found.floor_bytes / MIB


def check_names(function: str, options: Iterable[str], *, without: tuple[str, ...] = ()) -> None:
    """Raise for what a function that passes on the options of `auto_checkpoint` cannot be called with.

    Raises:
        TypeError: as Python says it of a function that lists its keywords.
    """
    known = inspect.signature(auto_checkpoint).parameters
    for name in options:
        if name not in known or known[name].kind is not inspect.Parameter.KEYWORD_ONLY or name in without:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
