"""What a step is called with: the sample bound to `forward`'s parameters, and the model's parameters and buffers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.weight_norm import WeightNorm

from .._torch import own_call
from ..errors import PlannerError, Unsupported
from .binding import bind_call, call_bound, forward_signature, names_given
from .carried import in_arguments
from .hidden import refuse_hidden
from .places import is_users
from .refuse import is_quantized_weight, refuse_not_dense, refuse_untracked
from .state import ITERATORS
from .structure import Bound
from .templates import Template, argument_path, constants, slots

Sample = Any


@dataclass(frozen=True)
class StateEntry:
    """A parameter or buffer the graph reads, under its first name; `aliases` are its other names."""

    name: str
    aliases: tuple[str, ...]
    is_parameter: bool
    requires_grad: bool

    @property
    def registry(self) -> str:
        """The attribute of its module that holds it."""
        return "_parameters" if self.is_parameter else "_buffers"


def bind_sample(model: nn.Module, sample: Sample, loss_fn: Callable[..., Any] | None = None) -> Bound:
    """Bind a sample (tensor, tuple of args, dict of kwargs) to the names of `forward`'s parameters, or keep it bound.

    Raises:
        PlannerError: `forward` cannot be called with it.
    """
    if isinstance(sample, Bound):
        return sample
    args, kwargs = split_sample(sample)
    try:
        return bind_call(call_signature(model, loss_fn), args, kwargs)
    except TypeError as error:
        own, extra, follow = f"{type(model).__name__}.forward", loss_arguments(loss_fn), ""
        if extra:
            own += f" and loss_fn, which takes {', '.join(extra)}"
            follow = "; what loss_fn takes follows what forward requires"
        raise PlannerError(
            f"the sample does not fit {own}: {error}. Pass a tensor, a tuple of positional arguments, or a dict of "
            f"keyword arguments{follow}."
        ) from error


def split_sample(sample: Sample) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A sample as `(args, kwargs)`."""
    if isinstance(sample, Mapping):
        return (), {str(k): v for k, v in sample.items()}
    if isinstance(sample, tuple) and not hasattr(sample, "_fields"):
        return sample, {}
    return (sample,), {}


def call_signature(model: nn.Module, loss_fn: Callable[..., Any] | None = None) -> inspect.Signature:
    """The signature of `model.forward`, with `loss_fn`'s further required arguments after it."""
    extra = loss_arguments(loss_fn)
    signature = forward_signature(model, may_inject=not extra)
    if not extra:
        return signature
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    rest = [p.replace(kind=p.KEYWORD_ONLY) if p.kind is p.POSITIONAL_OR_KEYWORD else p
            for p in parameters if p not in positional]  # fmt: skip
    taken = {p.name for p in parameters}
    added = [
        inspect.Parameter(n if n not in taken else f"loss_{n}", inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in extra
    ]
    rest.sort(key=lambda p: p.kind)
    return inspect.Signature([*positional, *added, *rest])


def loss_arguments(loss_fn: Callable[..., Any] | None) -> list[str]:
    """Names of the arguments `loss_fn` requires after the model's output: they are taken from the call."""
    if loss_fn is None:
        return []
    target = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        return []
    required = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
                and p.default is p.empty]  # fmt: skip
    return [p.name for p in required[1:]]


def set_forward(module: nn.Module, forward: Callable[..., Any] | None) -> None:
    """Give the module a `forward` of its own, or its class's where that is None."""
    if forward is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = forward


def copied_forward(module: nn.Module, previous: Callable[..., Any] | None, memo: dict[int, Any]) -> Any:
    """The module's own forward, for the copy of it that `copy.deepcopy` makes while another stands in its place.

    Args:
        previous: the forward that the module had of its own; None for its class's.
    """
    if previous is not None:
        return copy.deepcopy(previous, memo)
    return type(module).forward.__get__(memo.get(id(module), module))


def run_model(
    model: nn.Module, loss_fn: Callable[..., Any] | None, signature: inspect.Signature, bound: Mapping[str, Any]
) -> Any:
    """The plain step's forward: the model, with the hooks that `runs_hooks` tells of, then the loss if there is one.

    A model that was compiled since it was planned runs its own code, which the plan is for. State that it carries in
    attributes is read from the arguments, and left there.
    """
    with in_arguments(model, bound):
        return _run(model, loss_fn, signature, bound)


def _run(
    model: nn.Module, loss_fn: Callable[..., Any] | None, signature: inspect.Signature, bound: Mapping[str, Any]
) -> Any:
    called = own_call(model) if runs_hooks(model, loss_fn) else model.forward
    if loss_fn is None:
        return call_bound(called, signature, bound)
    names = loss_arguments(loss_fn)
    forward = forward_signature(model)
    own = set(forward.parameters)
    extra = [bound[n if n in bound and n not in own else f"loss_{n}"] for n in names]
    inner = Bound({k: v for k, v in bound.items() if k in own}, names_given(bound))
    loss = loss_fn(call_bound(called, forward, inner), *extra)
    if loss is None or isinstance(loss, (int, float)):
        raise PlannerError(f"loss_fn returned {loss!r}: it has to return the loss as a tensor.")
    return loss


def runs_hooks(model: nn.Module, loss_fn: Callable[..., Any] | None) -> bool:
    """Whether the model's own forward hooks belong to the step.

    They do where what follows them does: a loss, or a parametrization of torch's own (weight_norm), which makes a
    weight. Otherwise they are the caller's, and run around the step whenever it is called. The hooks of submodules
    are always part of it.
    """
    return loss_fn is not None or any(_is_from(hook, "torch.nn.utils") for hook in _own_hooks(model))


def refuse_repeated_hooks(model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
    """Refuse that the step's own hooks also run around it, except for those that only make a weight again.

    Raises:
        Unsupported: there is another one.
    """
    hook = repeated_hook(model, loss_fn)
    if hook is not None:
        raise Unsupported(
            f"a forward hook on the planned model, {hook},",
            type(model).__name__, "it belongs to the step, as what follows it does (a loss_fn, a weight that it "
            "makes), and would run a second time around the plan", "Use plan.module; or register it on a "
            "submodule, compute the loss outside of the plan, or use torch.nn.utils.parametrizations.",
        )  # fmt: skip


def repeated_hook(model: nn.Module, loss_fn: Callable[..., Any] | None) -> str | None:
    """The name of a hook of the step's own that also runs around it, and does more than make a weight again."""
    for hook in _own_hooks(model) if runs_hooks(model, loss_fn) else ():
        if not isinstance(hook, (WeightNorm, BasePruningMethod)) and not _is_from(hook, "torch.distributed", "planner"):
            return str(getattr(hook, "__qualname__", type(hook).__name__))
    return None


def overridden_call(model: nn.Module) -> Callable[..., Any] | None:
    """The `__call__` of the model's own class, which runs around its forward as hooks do."""
    call = type(model).__call__
    return call if is_users(call) else None


def _own_hooks(model: nn.Module) -> list[Any]:
    # Not read as the forward reads: whether the caller adds a hook of its own is nothing to a plan.
    hooks = [h for name in _HOOKS for h in object.__getattribute__(model, name).values()]
    return [*hooks, *filter(None, [overridden_call(model)])]


_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def _is_from(hook: object, *packages: str) -> bool:
    module = getattr(type(hook), "__module__", "") if not hasattr(hook, "__module__") else hook.__module__
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def state_entries(model: nn.Module, others: Collection[str] = ()) -> list[StateEntry]:
    """Parameters then buffers, each object once, with the names tied to it; quantized weights are constants.

    Args:
        others: names of buffers that are arguments of the step (`carried`).
    """
    entries: list[StateEntry] = []
    # A wrapper's own `named_parameters` (torch's CheckpointWrapper) leaves its name out of theirs.
    for named, is_parameter in ((nn.Module.named_parameters, True), (nn.Module.named_buffers, False)):
        names: dict[int, list[str]] = {}
        tensors: dict[int, torch.Tensor] = {}
        for name, tensor in named(model, remove_duplicate=False):
            if name in others or is_quantized_weight(tensor):
                continue
            names.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor
        entries += [StateEntry(n[0], tuple(n[1:]), is_parameter, tensors[i].requires_grad) for i, n in names.items()]
    return entries


def parameters_of(model: nn.Module) -> list[torch.Tensor]:
    """`nn.Module.parameters`, in its order, without names: for what is done before each call."""
    found: dict[int, torch.Tensor] = {}
    seen, waiting = set[int](), [model]
    while waiting:
        module = waiting.pop()
        if id(module) not in seen:
            seen.add(id(module))
            found.update((id(p), p) for p in module._parameters.values() if p is not None)
            waiting.extend(m for m in reversed(module._modules.values()) if m is not None)
    return list(found.values())


def state_tensors(model: nn.Module, entries: tuple[StateEntry, ...] | list[StateEntry]) -> list[torch.Tensor]:
    """The live tensors of `entries`; read before every step, hence no walk along each name."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return [_read(modules, e) for e in entries]


def lend_attributes(tensor: torch.Tensor, stand_in: torch.Tensor) -> torch.Tensor:
    """A stand-in, with what was set on the tensor that it stands for (`weight.scale = ...`)."""
    vars(stand_in).update({name: value for name, value in vars(tensor).items() if name not in vars(stand_in)})
    return stand_in


def lend_kind(tensor: torch.Tensor, stand_in: torch.Tensor) -> None:
    """Have `isinstance(x, nn.Parameter)` and `nn.Buffer` answer for a stand-in as for the tensor."""
    for kind, flag in ((nn.Parameter, "_is_param"), (nn.Buffer, "_is_buffer")):
        if isinstance(tensor, kind) and not isinstance(stand_in, kind):
            setattr(stand_in, flag, True)


def _read(modules: dict[str, nn.Module], entry: StateEntry) -> Any:
    path, _, leaf = entry.name.rpartition(".")
    module = modules[path]
    found = (module._parameters if entry.is_parameter else module._buffers).get(leaf)
    return getattr(module, leaf) if found is None else found


def argument_names(template: Template) -> list[str]:
    """What the user calls each input tensor: `labels`, `batch.mask`, `x[0]`."""
    names: dict[int, str] = {}
    for path, i in slots(template):
        names.setdefault(i, argument_path(path))
    return [names[i] for i in sorted(names)]


def check_inputs(tensors: list[torch.Tensor], names: list[str], template: Template) -> None:
    for tensor, name in zip(tensors, names, strict=True):
        if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
            raise Unsupported(
                "tensor subclass", f"argument {name} ({type(tensor).__name__})", "what it stores cannot be seen from "
                "the graph", "Pass a plain tensor.",
            )  # fmt: skip
        refuse_not_dense(tensor, f"argument {name}")
        refuse_untracked(tensor, f"argument {name}")
    refuse_hidden(template, "the arguments")
    for value in constants(template):
        if isinstance(value, ITERATORS):
            raise Unsupported(
                "iterator", f"the arguments ({type(value).__name__})", "it would be advanced while tracing, and not in "
                "the planned steps", "Pass what it gives.",
            )  # fmt: skip
        if type(value).__module__ == "numpy":
            raise Unsupported(
                "numpy value", f"the arguments ({type(value).__name__})", "a plan would hold for this value alone",
                "Pass torch.from_numpy(array), or a Python number.",
            )  # fmt: skip
