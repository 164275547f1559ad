"""`plan.check(model, sample)`: the check of a plan that is already there."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn

from passes.trace.arguments import split_sample
from passes.trace.structure import flatten
from planner.dropin.forward import PlannedForward, stand_in_within
from planner.dropin.module import PlannedModule
from planner.errors import ModelMismatch
from planner.ranks.wrapper import inner_module
from solvers.errors import PlannerError

from .record import Checked
from .run import check_step


def check_plan(module: PlannedModule, model: nn.Module | None, sample: Any) -> Checked:
    """See `Plan.check`."""
    state = module._plan_state
    model = state.model if model is None or model is module else inner_module(model)
    if sample is None:
        raise PlannerError("plan.check runs steps on a sample: call plan.check(model, sample), as for auto_checkpoint.")
    try:
        arguments = state.bind(*split_sample(sample))
    except TypeError as error:
        raise PlannerError(f"the sample does not fit {type(model).__name__}.forward: {error}.") from error
    applied = stand_in_within(model)
    own = state if model is state.model else state.around(model)
    own = applied.state if isinstance(applied, PlannedForward) else own
    with own.set_aside() if own.model is model else contextlib.nullcontext():
        tensors, template = flatten(arguments)
        key = own.key_of(tensors, template)
        entry, _ = own.find(key, tensors, arguments)
        if entry is None:
            differs = str(own.difference(key, tensors, arguments))
            raise ModelMismatch(f"the plan has not been made for this model and sample: {differs}", differs=differs)
        return check_step(model, entry.planned, arguments, state.loss_fn, True)
