"""`plan.check(model, sample)`: the check of a plan that is already there."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from passes.trace.arguments import argument_names, bind_call, split_sample, state_entries, state_tensors
from passes.trace.structure import flatten
from planner.decided import Decided
from planner.dropin.module import PlannedModule
from planner.errors import ModelMismatch
from solvers.errors import PlannerError

from .record import Checked
from .run import check_step


def check_plan(module: PlannedModule, model: nn.Module | None, sample: Any) -> Checked:
    """See `Plan.check`."""
    state = module._plan_state
    model = state.model if model is None or model is module else model
    if sample is None:
        raise PlannerError("plan.check runs steps on a sample: call plan.check(model, sample), as for auto_checkpoint.")
    try:
        bound = bind_call(state.signature, *split_sample(sample))
    except TypeError as error:
        raise PlannerError(f"the sample does not fit {type(model).__name__}.forward: {error}.") from error
    applied: Any = model.__dict__.get("forward")
    own = applied.state if getattr(applied, "runs_plan", False) else state
    with own.set_aside() if own.model is model else contextlib.nullcontext():
        decided = _planned_for(list(own.cache.values()), model, bound)
        return check_step(model, decided, bound, state.loss_fn, True)


def _planned_for(made: Sequence[Decided], model: nn.Module, bound: dict[str, Any]) -> Decided:
    """The step that was planned for such a model and call."""
    tensors, template = flatten(bound)
    entries = tuple(state_entries(model))
    wrong = ""
    for planned in reversed(made):
        traced = planned.prepared.traced
        metas = [p.meta["val"] for p in traced.placeholders[: traced.num_primals]]
        own, metas = metas[: len(traced.state)], metas[len(traced.state) :]
        if entries != traced.state or list(map(_form, state_tensors(model, entries))) != list(map(_form, own)):
            raise ModelMismatch(
                f"the plan was made for another model: this {type(model).__name__} has other parameters or buffers.",
                differs="parameters or buffers",
            )
        given, expected = ([_form(t) for t in side] for side in (tensors, metas))
        if given == expected and (traced.guard is None or traced.guard.holds(tensors)):
            return planned
        names = argument_names(template)
        pairs = list(zip(names, given, expected, strict=False))
        wrong = next((f"{n} is {g}, planned {e}" for n, g, e in pairs if g != e), "other arguments or other answers")
    raise PlannerError(
        f"the plan has not been made for this sample ({wrong}): call plan.module with it first, which plans such "
        "calls, or pass the sample that the plan was made with."
    )


def _form(t: torch.Tensor) -> str:
    return f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"
