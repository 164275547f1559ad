"""What a plan is valid for, and how a call that differs is described."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from passes._torch import is_distributed, local_part, look_alike
from passes.run._torch import DEFAULTS, Autocast, active_autocast, torch_defaults
from passes.trace.arguments import argument_names
from passes.trace.constructs import is_generator
from passes.trace.getters import HOOKS
from passes.trace.recorder import is_looked_into
from passes.trace.structure import is_shared
from passes.trace.templates import Again, Constant, Opaque, Slot, Template, Tree, outline

LAZY = ", yet to be conjugated"
UNTRACKED = ", made under inference_mode"


@dataclass(frozen=True)
class Key:
    """What a call looks like: its arguments, and torch's settings that decide what ops it runs."""

    inputs: tuple[Any, ...]
    autocast: Autocast
    defaults: tuple[Any, ...]
    template: Template = field(default=Constant(None), compare=False, repr=False)


def call_key(tensors: Sequence[torch.Tensor], template: Template, cast: torch.dtype | None = None) -> Key:
    """The key of a call with these arguments, made now; `cast` is to what those of floating point are cast before."""
    looks = [(*state_key(t), _kind_of(t)) for t in tensors]
    # Forward may look for attributes that the caller set.
    named = [(i, *sorted(vars(t))) for i, t in enumerate(tensors) if type(t) is torch.Tensor and vars(t)]
    inputs: tuple[Any, ...] = (f"{template_key(template)}{named or ''}", *looks)
    if cast is not None:
        floats = [t.is_floating_point() for t in tensors]
        inputs = (inputs[0], *((k[0], cast, *k[2:]) if f else k for k, f in zip(inputs[1:], floats, strict=True)))
    return Key(inputs, active_autocast(), torch_defaults(), template)


def _kind_of(t: torch.Tensor) -> str:
    """Whether a tensor is a parameter or buffer, in words."""
    kinds = {"a parameter": isinstance(t, nn.Parameter), "a buffer": isinstance(t, nn.Buffer)}
    return "".join(f", {what}" for what, holds in kinds.items() if holds)


class Look(NamedTuple):
    """What a call looked like, laid out so that it is quickly told whether another one looks the same."""

    template: Template
    alike: Callable[..., bool]
    outside: tuple[Any, ...]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], template: Template) -> Look | None:
        """That of a call made now; None for those that are compared by `call_key` alone."""
        alike = look_alike(tensors) if is_shared(template) else None
        return None if alike is None or any(map(vars, tensors)) else cls(template, alike, _outside())

    def is_of(self, tensors: Sequence[torch.Tensor], template: Template) -> bool:
        """Whether the `call_key` of a call made now is the same, as far as can be told at once."""
        same = template is self.template and self.outside == _outside()
        return same and self.alike(*tensors) and not any(map(vars, tensors))


def _outside() -> tuple[Any, ...]:
    return active_autocast(), *torch_defaults()


def state_key(t: torch.Tensor) -> tuple[Any, ...]:
    """What of a parameter, buffer or input decides; of one spread over ranks its part here, and how it is spread."""
    if is_distributed(t):
        spread: Any = t
        return (*state_key(local_part(t)), tuple(map(str, spread.placements)), tuple(t.shape))
    shape = "nested" if t.is_nested else t.shape  # a nested one has none
    return shape, t.dtype, home(t), t.requires_grad, arrangement(t), manner(t)


def module_key(module: nn.Module) -> Any:
    """What modules that are refused alike have in common: submodules, state, hooks and flags. Their numbers may differ,
    as those of layers in a row do.
    """
    tensors = (*module.parameters(), *module.buffers())
    return tuple(map(_look, *zip(*module.named_modules(), strict=True))), tuple(map(state_key, tensors))


def _look(name: str, module: nn.Module) -> Any:
    own = vars(module)
    flags = tuple(item for item in own.items() if isinstance(item[1], bool))
    return name, type(module), tuple(len(own[kind]) for kind in HOOKS), flags


def arrangement(t: torch.Tensor) -> Any:
    """A tensor's strides, or its layout where it has none."""
    return t.stride() if t.layout is torch.strided else t.layout


def manner(t: torch.Tensor) -> str:
    """Whether a tensor is yet to be conjugated, or torch does not count its changes, in words."""
    return LAZY * t.is_conj() + UNTRACKED * t.is_inference()


def home(t: torch.Tensor) -> torch.device:
    """Where the tensor is, or will be: a plan for a model on the meta device is one for the CPU."""
    return torch.device("cpu") if t.device.type == "meta" else t.device


def describe_tensor(key: Any) -> str:
    shape, dtype, device, requires_grad, strides, *others = key
    more = ", requires_grad" * requires_grad + "".join(other for other in others if isinstance(other, str))
    if isinstance(strides, torch.layout):
        more += f", {str(strides).removeprefix('torch.')}"
    elif strides != torch.empty(shape, device="meta").stride():
        more += f", in strides {tuple(strides)}"
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')} on {device}{more}"


def template_key(template: Template) -> str:
    match template:
        case Tree(spec, children, attributes):
            inside = ", ".join(map(template_key, children))
            return f"{spec.type.__qualname__}{spec.context}({inside}){_named(attributes)}"
        case Opaque(prototype, attributes):
            return f"{_kind(prototype)}({_named(attributes)})"
        case Constant(torch.Generator() as generator):  # no trace draws from one, nor asks for its state
            return f"a generator on {generator.device}"
        case Constant(value):
            return _kind(value) if is_looked_into(value) or is_generator(value) else repr(value)
        case Slot(index):
            return f"tensor {index}"
        case Again(index):
            return f"that of place {index}"


def _named(attributes: Iterable[tuple[str, Template]]) -> str:
    return ", ".join(f"{name}={template_key(child)}" for name, child in attributes)


def _kind(value: Any) -> str:
    """Of what is compared by what forward reads of it."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def key_difference(now: Key, then: Key) -> tuple[str, str, str] | None:
    """The first thing in which a call is not as another one: its name, what it is, what it was."""
    if now.inputs[0] != then.inputs[0]:
        return structure_difference(now.template, then.template)
    for name, got, expected in zip(argument_names(then.template), now.inputs[1:], then.inputs[1:], strict=False):
        if got != expected:
            return name, describe_tensor(got), describe_tensor(expected)
    if now.autocast != then.autocast:
        return "(autocast)", describe_autocast(now.autocast), describe_autocast(then.autocast)
    for name, got, expected in zip(DEFAULTS, now.defaults, then.defaults, strict=True):
        if got != expected:
            return f"(torch's {name})", str(got), str(expected)
    return None


def structure_difference(got: Template, expected: Template) -> tuple[str, str, str]:
    """The first place where two calls' arguments are built differently: its name, what is there, what is expected."""
    given, planned = outline(got), outline(expected)
    for path in dict.fromkeys([*planned, *given]):
        if given.get(path) != planned.get(path):
            # A place that only one of them has is told by what is beside it.
            around = _LAST_KEY.sub("", path) if path not in given or path not in planned else path
            return around, _what_is_at(around, given), _what_is_at(around, planned)
    return "(structure)", "other keys or another order of them", "those of the sample"


_LAST_KEY = re.compile(r"(?<=.)(\[[^\[\]]*\]|\.\w+)$")


def _what_is_at(path: str, places: dict[str, str]) -> str:
    if path in places:
        return places[path]
    inside = [p.removeprefix(path) for p in places if p.startswith((f"{path}[", f"{path}."))]
    shown = ", ".join(inside[:_SHOWN]) + (", ..." if len(inside) > _SHOWN else "")
    return f"what holds {shown}" if inside else "nothing"


_SHOWN = 6


def describe_autocast(autocast: Autocast) -> str:
    on = [f"autocast to {str(dtype).removeprefix('torch.')} on {kind}" for kind, dtype in autocast]
    return " and ".join(on) or "no autocast"
