"""`plan.apply(model)`: the user's own object runs the plan; `plan.remove(model)` undoes it.

Only the instance attribute `forward` is set. `model(...)` calls it as it would call the class's, so hooks on the
model, its class, its methods and its state stay what they are.
"""

from __future__ import annotations

import inspect
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from passes.run._torch import under_autocast
from passes.trace.arguments import (
    StateEntry,
    bind_sample,
    call_signature,
    refuse_repeated_hooks,
    state_entries,
    state_tensors,
)
from passes.trace.capture import Traced
from passes.trace.carried import carry
from passes.trace.compiled import refuse_compiled
from passes.trace.refuse import has_sharded, refuse
from passes.trace.structure import Bound, unflatten
from planner.errors import ModelMismatch
from planner.files.fingerprint import describe_value, fingerprint, node_lines, tensor_lines
from planner.ranks.wrapper import inner_module
from planner.sizes import Sizes
from solvers.errors import PlannerError

from .cache import PlanState
from .forward import PlannedForward, stand_in, stand_in_within
from .module import PlannedModule


def apply(planned: PlannedModule, model: nn.Module | None = None, sample: Any = None) -> nn.Module:
    """See `Plan.apply`."""
    state = planned._plan_state
    given = planned._plan_model if model is None else model
    model = inner_module(given)
    if not isinstance(model, nn.Module) or isinstance(model, PlannedModule):
        kind = type(model).__name__
        raise PlannerError(f"a plan is not applied to a {kind}: pass the torch.nn.Module that was planned.")
    current, running = model.__dict__.get("forward"), stand_in_within(model)
    if isinstance(running, PlannedForward):
        if running.module is planned:
            return given
        raise PlannerError(f"this {type(model).__name__} runs another plan: call that plan's remove(model) first.")
    if model is not state.model:
        _check_same_step(state, model, sample)
        state = state.around(model)
    elif current is not state.traced_forward and not _wraps(current, state):
        raise _mismatch("its forward was replaced after planning")
    refuse_repeated_hooks(model, state.loss_fn)
    model.forward = PlannedForward(planned, model, current, state)
    if has_sharded(model):
        state.plan_before_hooks()
    return given


def _wraps(current: Any, state: PlanState) -> bool:
    """Whether a trainer has put something (autocast) around the forward that was planned."""
    inner = inspect.unwrap(current) if current is not None else None
    return inner is not None and any(
        getattr(inner, "__func__", inner) is getattr(known, "__func__", known)
        for known in (state.traced_forward, type(state.model).forward)
    )


def remove(planned: PlannedModule, model: nn.Module | None = None) -> nn.Module:
    """See `Plan.remove`."""
    given = planned._plan_model if model is None else model
    model = inner_module(given)
    forward = getattr(model, "__dict__", {}).get("forward")
    current = stand_in(forward)
    if not isinstance(current, PlannedForward) or current.module is not planned:
        raise PlannerError(f"this {type(model).__name__} does not run this plan: {_what_it_runs(forward)}.")
    current.state.stop()
    if current.previous is None:
        del model.forward
    else:
        model.forward = current.previous
    return given


def _what_it_runs(current: Any) -> str:
    if isinstance(stand_in(current), PlannedForward):
        return "it runs another one, whose remove(model) undoes it"
    if current is None:
        return "plan.apply(model) was not called, or was undone"
    return "its forward was replaced by something else; if that was after plan.apply(model), undo it first"


# Another instance of the planned model --------------------------------------------------------------------------------


def _check_same_step(state: PlanState, model: nn.Module, sample: Any) -> None:
    """Capture the model's step and compare it with the plan's, op by op."""
    if state.first.planned.runs:
        raise PlannerError(
            "a plan by regions is applied to the model that was planned. For another instance write it with "
            "plan.save(path), and read it with Plan.load(path, model, sample)."
        )
    prepared = state.first.planned.prepared
    own = prepared.traced
    refuse(model)
    refuse_compiled(model)
    if differs := _differs_at_sight(own, state, model):
        raise _mismatch(differs)
    if sample is None and own.guard is not None:
        raise PlannerError(
            "the planned model's Python asks about its inputs' values, so whether the plan fits another instance can "
            "only be told with inputs: call plan.apply(model, sample)."
        )
    bound = blank_sample(state) if sample is None else bind_sample(model, sample, state.loss_fn)
    if sample is not None:
        carry(model, bound, state.carried)
    expected = tuple(leaf.path for leaf in own.outputs if leaf.differentiated)
    with under_autocast(state.first.key.autocast):
        other = Sizes().capture(
            model, bound, state.loss_fn, differentiated=expected, keep_outputs=prepared.options.keep_outputs,
            layouts=own.layouts,
        )  # fmt: skip
    if fingerprint(other) != fingerprint(own):
        raise _mismatch(_difference(own, other))


def _mismatch(differs: str) -> ModelMismatch:
    return ModelMismatch(
        f"the plan was made for another model: {differs}. Plan this one with auto_checkpoint.", differs=differs
    )


def _differs_at_sight(own: Traced, state: PlanState, model: nn.Module) -> str:
    """What differs in parameters, buffers or the call's arguments, if anything does."""
    entries = state_entries(model, state.carried)
    described = [describe_value(t) for t in state_tensors(model, entries)]
    expected = [describe_value(p.meta["val"]) for p in own.placeholders[: len(own.state)]]
    made = own.first_call.made_buffers if own.first_call is not None else frozenset()
    yet_to_come = made - {entry.name for entry in entries}
    of_plan = [pair for pair in zip(own.state, expected, strict=True) if pair[0].name not in yet_to_come]
    for found, planned in zip_longest(zip(entries, described, strict=True), of_plan):
        if found != planned:
            return f"{_entry(found)}, the plan has {_entry(planned)}"
    arguments = call_signature(model, state.loss_fn)
    return "" if arguments == state.signature else f"it is called with {arguments}, the plan with {state.signature}"


def _entry(pair: tuple[StateEntry, str] | None) -> str:
    if pair is None:
        return "no further parameter or buffer"
    entry, value = pair
    kind = "parameter" if entry.is_parameter else "buffer"
    tied = "".join(f" = {name}" for name in entry.aliases)
    return f"{kind} {entry.name}{tied}: {value}{' grad' if entry.requires_grad else ''}"


def blank_sample(state: PlanState) -> Bound:
    """Inputs as the plan's sample had them, except for their values."""
    tensors = []
    for shape, dtype, device, requires_grad, stride, conjugated, *_ in state.first.key.inputs[1:]:
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()
        tensor = tensor.conj() if conjugated else tensor
        tensors.append(tensor.requires_grad_(requires_grad))
    traced = state.first.planned.prepared.traced
    return Bound(unflatten(traced.input_template, tensors), traced.by_name)


def _difference(own: Traced, other: Traced) -> str:
    for lines in (tensor_lines, node_lines):
        for expected, found in zip_longest(lines(own), lines(other), fillvalue="nothing more"):
            if expected != found:
                return f"{found}, the plan has {expected}"
    return "its constants (numbers in the code, tensor attributes) or its outputs differ"
