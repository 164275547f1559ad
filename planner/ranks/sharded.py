"""Models whose parameters `fully_shard` scattered, run by one rank alone to be measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from passes.errors import Unsupported
from passes.memory import granule, round_up
from passes.trace.refuse import is_sharded

from .alone import collectives_alone

GATHERED = "unsharded_accumulated_grad"


@contextmanager
def without_talking(model: nn.Module, heard: set[str], listen: bool) -> Iterator[None]:
    """Let the model's sharded modules gather from and reduce to this rank alone, in memory as with all of them.

    So do collectives of its own code; see `collectives_alone`.

    Raises:
        Unsupported: the parameters are replicated as well as sharded, or lie on the host.
    """
    groups = _groups(model)
    if any(group._is_hsdp for group in groups):
        raise Unsupported(
            "fully_shard over a mesh of two dimensions", "the model", "its replicas are summed up in a way that cannot "
            "be measured by one rank alone", "Shard over a mesh of one dimension.",
        )  # fmt: skip
    if any(p.offload_to_cpu and group.device.type != "cpu" for group in groups for p in group.fsdp_params):
        raise Unsupported(
            "CPUOffloadPolicy", "the model", "its parameters and gradients move between the device and the host as the "
            "step runs, which is not counted", "Shard without offload_policy.",
        )  # fmt: skip
    before = [(group, group._all_gather_comm, group._reduce_scatter_comm) for group in groups]
    try:
        for group, gather, reduce in before:
            group._all_gather_comm, group._reduce_scatter_comm = _Alone(gather, _gather), _Alone(reduce, _reduce)
        with collectives_alone(heard, listen):
            yield
    finally:
        for group, gather, reduce in before:
            group._all_gather_comm, group._reduce_scatter_comm = gather, reduce


@contextmanager
def scattered(model: nn.Module) -> Iterator[None]:
    """Let no sharded module hold whole parameters as the block begins, nor once it has ended.

    A forward without a backward leaves those that are kept for it, whole parameters in the places of their parts.
    What sharded modules set up when they first run (hooks that scatter for `state_dict`) is set up before.
    """
    for state in _states(model):
        for group in _groups_of(state) if state._is_root is None else ():
            group.lazy_init()
    with _resharded(model):
        yield


@contextmanager
def _resharded(model: nn.Module) -> Iterator[None]:
    groups = _groups(model)
    for group in groups:
        group.reshard()
    before = _progress(model)
    try:
        yield
    finally:
        for place, name, value in before:  # a step that was cut short does not end by itself
            place[name] = value
        for group in groups:
            group.reshard()


def _progress(model: nn.Module) -> list[tuple[dict[str, Any], str, Any]]:
    """How far sharded modules are within a step: each attribute that tells, and its value."""
    states, groups = _states(model), _groups(model)
    places = (*states, *(s._state_ctx for s in states), *groups, *(group.comm_ctx for group in groups))
    found = [(vars(place), name) for place in places for name in _OF_A_STEP if name in vars(place)]
    return [(held, name, copy(value) if isinstance(value := held[name], list) else value) for held, name in found]


_OF_A_STEP = (
    "_training_state", "iter_forward_root", "post_backward_final_callback_queued", "post_forward_order",
    "_post_forward_indices", "_all_gather_result", "all_gather_state", "reduce_scatter_state", "reduce_scatter_states",
)  # fmt: skip


@contextmanager
def gathered_aside(model: nn.Module) -> Iterator[None]:
    """Let sharded modules hold no whole parameters in the block, and after it those that they held before.

    One rank may plan while others do not: in the call that follows it has to gather what they gather, and nothing else.
    """
    groups = _groups(model)
    before = [(place, dict(vars(place))) for group in groups for place in (group, *group.fsdp_params)]
    for group in groups:
        group._all_gather_result = None
        for parameter in group.fsdp_params:
            parameter.all_gather_outputs, parameter._unsharded_inner_tensors = [], []
            vars(parameter).pop("_unsharded_param", None)
    try:
        with _resharded(model):
            yield
    finally:
        for place, held in before:
            vars(place).update({name: held[name] for name in _GATHERED if name in held})
        for group in groups:
            for parameter in group.fsdp_params:
                parameter._setattr_on_modules(_registered(parameter))


_GATHERED = (
    "_all_gather_result", "_sharded_state", "sharded_state", "all_gather_outputs", "_unsharded_inner_tensors",
    "_unsharded_param", "_sharded_post_forward_param", "_sharded_post_forward_param_data",
)  # fmt: skip


def _registered(parameter: Any) -> nn.Parameter:
    """What a module has of a parameter in the state in which it is."""
    places = {"UNSHARDED": "_unsharded_param", "SHARDED_POST_FORWARD": "_sharded_post_forward_param"}
    found: nn.Parameter = getattr(parameter, places.get(parameter.sharded_state.name, "sharded_param"))
    return found


@contextmanager
def without_reducing(model: nn.Module) -> Iterator[None]:
    """Let gradients accumulate where they are, as `set_requires_gradient_sync(False)` does."""
    before = [(group, group.reduce_grads) for group in _groups(model)]
    try:
        for group, _ in before:
            group.reduce_grads = False
        yield
    finally:
        for group, reduces in before:
            group.reduce_grads = reduces


@contextmanager
def of_last_micro_batch(model: nn.Module) -> Iterator[None]:
    """Let a backward in the block be the last one, which reduces and scatters, whatever was set for the next one."""
    contexts = {id(state._state_ctx): state._state_ctx for state in _states(model)}.values()
    switches = [(group, name) for group in _groups(model) for name in ("reduce_grads", "reshard_after_backward")]
    switches += [(context, "is_last_backward") for context in contexts]
    before = [(place, name, getattr(place, name)) for place, name in switches]
    try:
        for place, name, _ in before:
            setattr(place, name, True)
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)


@contextmanager
def gathered_gradients_aside(model: nn.Module) -> Iterator[None]:
    """No whole gradients wait to be reduced in the block; at its end those from before do, and no others."""
    before = [(place, name, getattr(place, name)) for place, name in _gathered_gradients(model)]
    for place, name, _ in before:
        setattr(place, name, None)
    try:
        yield
    finally:
        for place, name in _gathered_gradients(model):  # there are more where parameters were first gathered
            setattr(place, name, None)
        for place, name, gradient in before:
            setattr(place, name, gradient)


def _gathered_gradients(model: nn.Module) -> list[tuple[Any, str]]:
    """Where whole gradients are kept until they are reduced."""
    held: list[tuple[Any, str]] = []
    for parameter in gathered_parameters(model):
        if hasattr(parameter, "_unsharded_param"):
            held.append((parameter._unsharded_param, "grad"))
        if GATHERED in vars(parameter):  # since torch 2.15 that is the other's gradient
            held.append((parameter, GATHERED))
    return held


def gathered_gradient_bytes(model: nn.Module) -> int:
    """Whole gradients that sharded modules keep until they are reduced."""
    return sum(round_up(g.nbytes, granule(g.device)) for g in gathered_gradients(model))


def gathered_gradients(model: nn.Module) -> list[torch.Tensor]:
    """The whole gradients themselves."""
    parameters = gathered_parameters(model)
    found = [p.unsharded_accumulated_grad for p in parameters]
    found += [p.unsharded_param.grad for p in parameters if hasattr(p, "_unsharded_param")]
    return list({id(g): g for g in found if g is not None}.values())  # since torch 2.15 both are the same


def kept_whole_bytes(model: nn.Module) -> int:
    """Whole parameters that the backward leaves gathered, as `set_reshard_after_backward(False)` asks for."""
    parameters = [p for group in _groups(model) if not group.reshard_after_backward for p in group.fsdp_params]
    return sum(p.sharded_param.numel() * (p.param_dtype or p.sharded_param.dtype).itemsize for p in parameters)


class Gathers:
    """Of which version of its parts each sharded module gathered its whole parameters, as far as calls tell.

    Where the backward leaves them whole and an optimizer steps, eager computes the next forward with the old ones,
    scatters them, and gathers the new ones for the backward: what is recomputed there has other values.
    """

    def __init__(self) -> None:
        self.versions: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()

    def outdated(self, model: nn.Module) -> list[str]:
        """The modules that hold whole parameters from before a change and will gather anew within this step.

        Asked at each call of the model; what the call itself has gathered by then is not among them.
        """
        found = []
        modules = [(name, m) for name, m in model.named_modules() if is_sharded(m)]
        for name, group in ((n, g) for n, m in modules for g in _groups_of(m._get_fsdp_state())):
            now = [p.sharded_param._version for p in group.fsdp_params]
            anew = group._reshard_after_forward or not group.reshard_after_backward
            if not group.is_unsharded:
                self.versions[group] = now
            elif anew and group._training_state.name != "FORWARD" and self.versions.get(group) != now:
                found.append(name or "the model")
        return found


def gathered_parameters(model: nn.Module) -> list[Any]:
    """What `fully_shard` knows of each parameter that it scatters."""
    return [parameter for group in _groups(model) for parameter in group.fsdp_params]


def sources_of(parameters: Sequence[Any], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """For each of the tensors that was gathered the scattered one, which an optimizer changes; else itself."""
    parts = {id(p._unsharded_param): p.sharded_param for p in parameters if hasattr(p, "_unsharded_param")}
    return [parts.get(id(t), t) for t in tensors]


def input_dtype(model: nn.Module) -> torch.dtype | None:
    """What `fully_shard` casts inputs of floating point to before the model's forward; None where it does not."""
    policy = model._get_fsdp_state()._mp_policy if is_sharded(model) else None  # type: ignore[operator]
    return policy.param_dtype if policy is not None and policy.cast_forward_inputs else None


def _states(model: nn.Module) -> list[Any]:
    return [m._get_fsdp_state() for m in model.modules() if is_sharded(m)]  # type: ignore[operator]


def _groups_of(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one or none
    return [group for group in several or [state._fsdp_param_group] if group is not None]


def _groups(model: nn.Module) -> list[Any]:
    return [group for state in _states(model) for group in _groups_of(state)]


class _Alone:
    """In the place of what talks to other ranks: the same memory, as if all ranks had this one's numbers."""

    def __init__(self, true: Any, run: Any) -> None:
        self.true, self.run = true, run

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = self.true.allocate(*args, **kwargs)
        return made

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if input_tensor.device.type == "cpu":
            torch.empty_like(max(input_tensor, output_tensor, key=torch.numel))  # gloo copies what all ranks have
        self.run(output_tensor, input_tensor)


def _gather(whole: torch.Tensor, part: torch.Tensor) -> None:
    for place in whole.view(-1, part.numel()):
        if place.data_ptr() != part.data_ptr():  # the part may lie in its own place already
            place.copy_(part.view(-1))


def _reduce(part: torch.Tensor, whole: torch.Tensor) -> None:
    part.view(-1).copy_(whole.view(-1)[: part.numel()])
