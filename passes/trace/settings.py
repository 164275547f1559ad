"""What forward sets as attributes of the model's modules: plain values (`self.rows = len(x)`) and tensors (a loss).

A trace holds for one course of the forward, so plain values are constants of it: a planned step sets them after its
forward. Of an integer that forward only adds to (`self.seen += len(x)`) how much it adds is one. Tensors (`self.aux`),
and lists, tuples and dicts of them, are further outputs of the step. So is what forward puts into a dict, list or
object that a module holds (`self.losses["aux"] = ...`), and reads nothing of (`inside.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from passes._torch import FakeTensor, FunctionalTensor

from .nodes import MISSING, PLAIN, same
from .notation import StandIn
from .structure import MAX_DEPTH, Taker, unflatten
from .templates import Template, slots


@dataclass(frozen=True)
class Setting:
    """One attribute of the module at a path, or an item in one, and what forward leaves there.

    Attributes:
        name: that of the attribute; a key, in a dict.
        added: of an integer that forward reads and then sets, how much more than before that is; None of others.
        template: how what has tensors is made of the step's outputs; None of plain values.
        within: how the dict, list or object that holds it is reached from the module: an attribute, and keys.
        appended: of a list, how many items are added to its end; they are one tuple, without a name.
        whole: whether all of a list is replaced, by the items of one tuple.
        kind: the class of the list or dict that holds it; None of an attribute.
        shown: how an error names it, where that does not follow from the rest.
        aliases: further modules, by paths, that hold the same list or dict, and their attributes.
    """

    path: str
    name: Any
    value: Any
    added: int | None = None
    template: Template | None = None
    within: tuple[Any, ...] = ()
    appended: int = 0
    whole: bool = False
    kind: type | None = None
    shown: str = ""
    aliases: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return self.shown or ".".join(part for part in ("self", self.path, self.name) if part)

    def of(self, model: nn.Module) -> Any:
        """What holds it: the attributes of the model's module at the path, its buffers, or what is `within` those."""
        if not self.within:
            return where_held(model, self.path, self.name)
        first, *keys = self.within
        holder = where_held(model, self.path, first)[first]
        for key in keys:
            holder = holder[key]
        return holder if isinstance(holder, (dict, list)) else object.__getattribute__(holder, "__dict__")

    def is_buffer(self, model: nn.Module) -> bool:
        """Whether it is registered as a buffer."""
        return not self.within and self.name in model.get_submodule(self.path)._buffers

    def now(self, model: nn.Module) -> Any:
        """What is there, or else what its class has there."""
        own = self.of(model)
        if isinstance(own, list):
            return tuple(own[-self.appended :])
        of_class = MISSING if self.within else getattr(type(model.get_submodule(self.path)), self.name, MISSING)
        return own.get(self.name, of_class)


def where_held(model: nn.Module, path: str, name: str) -> dict[str, Any]:
    """What holds an attribute of the model's module at a path: its buffers, or else its attributes."""
    own: dict[str, Any] = object.__getattribute__(model.get_submodule(path), "__dict__")  # read by us
    buffers: dict[str, Any] = own["_buffers"]
    return buffers if name in buffers else own


def steady(
    found: Sequence[Setting], first: Mapping[str, Any], model: nn.Module, is_added_to: Callable[[str], bool]
) -> tuple[Setting, ...]:
    """Those that an earlier run of the same forward has left, too, and integers that it only adds to.

    Args:
        first: what that run changed, by `str(Setting)`; the rest is as it is in the model.
        is_added_to: whether forward does nothing else with an attribute of that name.
    """

    def is_left(s: Setting) -> bool:
        if s.added is not None:
            return is_added_to(s.name)
        return s.template is not None or same(first[str(s)] if str(s) in first else s.now(model), s.value)

    return tuple(filter(is_left, found))


def set_again(found: Sequence[Setting], model: nn.Module, tensors: Sequence[Any]) -> None:
    """Leave in the model what forward leaves.

    Args:
        tensors: the step's outputs.
    """
    for setting in found:
        own, name = setting.of(model), setting.name
        value = setting.value if setting.template is None else unflatten(setting.template, tensors)
        if isinstance(own, list):
            own[0 if setting.whole else len(own) :] = value
        else:
            own[name] = value if setting.added is None else setting.now(model) + setting.added


def taken_apart(
    found: Sequence[Setting], tensors: list[torch.Tensor], may_be_kept: Callable[[torch.Tensor], bool]
) -> list[Setting]:
    """The plain ones, and those of tensors that may be kept, with templates; their tensors are added to `tensors`."""
    result = []
    for setting in found:
        if is_plain(setting.value):
            result.append(setting)
        elif all(map(may_be_kept, tensors_in(setting.value) or ())):
            taker = Taker()
            taker.tensors, taker.positions = tensors, {id(tensor): i for i, tensor in enumerate(tensors)}
            result.append(replace(setting, value=None, template=taker.take(setting.value)))
    return result


def tensors_in(value: Any, depth: int = 0) -> list[torch.Tensor] | None:
    """The tensors of a tensor, or of a list, tuple or dict of tensors and plain values; None of anything else."""
    if type(value) in (torch.Tensor, FakeTensor, FunctionalTensor, StandIn):
        usual = value.layout is torch.strided and not (value.is_conj() or value.is_neg())
        return [value] if usual else None
    if type(value) in (list, tuple, dict) and depth < MAX_DEPTH:
        parts = [tensors_in(v, depth + 1) for v in (value.values() if isinstance(value, dict) else value)]
        return None if None in parts else [tensor for part in parts for tensor in part or ()]
    return [] if is_plain(value) else None


def kinds_filled(found: Iterable[Setting]) -> dict[tuple[str, Any], dict[tuple[Any, ...], type]]:
    """The classes of the lists and dicts that forward puts something in: by the attribute, and the keys in that."""
    kinds: dict[tuple[str, Any], dict[tuple[Any, ...], type]] = {}
    for setting in found:
        if setting.kind is not None:
            kinds.setdefault((setting.path, setting.within[0]), {})[setting.within[1:]] = setting.kind
            kinds.update({place: {(): setting.kind} for place in setting.aliases})
    return kinds


def tensors_set(found: Sequence[Setting], model: nn.Module) -> list[tuple[Template, Any]]:
    """What has tensors of what forward has just set, with its template."""
    return [(s.template, s.now(model)) for s in found if s.template is not None]


def set_slots(found: Sequence[Setting]) -> list[tuple[str, int]]:
    """As `templates.slots`, of what forward sets."""
    return [(f"{s}{path}", i) for s in found if s.template is not None for path, i in slots(s.template)]


@contextmanager
def set_aside(found: Sequence[Setting], model: nn.Module) -> Iterator[None]:
    """Undo at the end what the block, in which forward runs again, sets."""
    before = [(setting.of(model), setting.name) for setting in found]
    values = [list(own) if isinstance(own, list) else own.get(name, MISSING) for own, name in before]
    try:
        yield
    finally:
        for (own, name), value in zip(before, values, strict=True):
            if isinstance(own, list):
                own[:] = value
            elif value is MISSING:
                own.pop(name, None)
            else:
                own[name] = value


def is_plain(value: Any) -> bool:
    """Whether it cannot change, and holds nothing that can."""
    if type(value) in (tuple, torch.Size):
        return all(map(is_plain, value))
    if isinstance(value, str) and "Tensor" in value:  # a tensor's class, which is another one while tracing
        return False
    return type(value) in PLAIN or isinstance(value, enum.Enum)
