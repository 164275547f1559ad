"""What a trace says, written down without what belongs to it alone, and evaluated where sizes have other values."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from passes._torch import BareTensor, number_of, symbolic


class Departed(Exception):
    """What is written down does not hold, or cannot be written down."""


class Pinned(Departed):
    """What is traced takes a size as the one number that it has."""


@dataclass(frozen=True)
class Size:
    """A number that depends on sizes."""

    expression: Any


@dataclass(frozen=True)
class Items:
    """A container: its type and what is in it."""

    kind: type
    parts: tuple[Any, ...]


@dataclass(frozen=True)
class Tensor:
    """Tensor number `index` of the script."""

    index: int


@dataclass(frozen=True)
class Outside:
    """A tensor that was there before."""

    tensor: weakref.ref[torch.Tensor]


@dataclass(frozen=True)
class Look:
    """How a tensor looks."""

    shape: Items
    strides: Items
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_NUMBERS = (bool, int, float, complex, str)
IDENTICAL = (type, type(len), type(lambda: 0), type(Ellipsis))


def written(value: Any, tensor: Callable[[torch.Tensor], Any]) -> Any:
    """`value` without what belongs to one trace; `tensor` says what stands for a tensor."""
    if isinstance(value, torch.Tensor):
        return tensor(value)
    if symbolic(value):
        return _size(value)
    if isinstance(value, slice):
        return Items(slice, tuple(written(part, tensor) for part in (value.start, value.stop, value.step)))
    if isinstance(value, dict):
        if not all(type(key) is str for key in value):
            raise Departed("a dict whose keys are not strings")
        return Items(type(value), tuple((key, written(part, tensor)) for key, part in value.items()))
    if isinstance(value, (tuple, list)):
        return Items(type(value), tuple(written(part, tensor) for part in value))
    if value is None or type(value) in _NUMBERS or isinstance(value, (numpy.generic, *PLAIN, *IDENTICAL)):
        return value
    raise Departed(f"a {type(value).__name__} cannot be written down")


def _size(value: Any) -> Any:
    if isinstance(value, torch.SymFloat):
        raise Departed("a float that depends on sizes")  # sympy's last bit may be another than Python's
    expression = value.node.expr
    return Size(expression) if expression.free_symbols else number_of(expression, {})


def look_of(value: torch.Tensor) -> Look:
    """Write down how a fake tensor looks."""
    if value.layout is not torch.strided or value.is_conj() or value.is_neg():
        raise Departed("a tensor that is not a plain strided one")
    shape, strides = written(value.size(), _no_tensor), written(tuple(value.stride()), _no_tensor)
    return Look(shape, strides, value.dtype, value.device, value.requires_grad)


def _no_tensor(value: torch.Tensor) -> Any:
    raise Departed("a tensor where none is expected")


class At:
    """Evaluates what was written down where the symbols have these sizes."""

    def __init__(self, sizes: Mapping[Any, int]) -> None:
        self.sizes = sizes
        self.known: dict[Any, Any] = {}

    def number(self, told: Any) -> Any:
        """The number in the place of a `Size`; any other value as it is."""
        if type(told) is not Size:
            return told
        if told.expression not in self.known:
            self.known[told.expression] = number_of(told.expression, self.sizes)
        return self.known[told.expression]

    def numbers(self, told: Items) -> tuple[int, ...]:
        return tuple(map(self.number, told.parts))


class StandIn(BareTensor):
    """A tensor that can be looked at, and asked for nothing else."""

    @classmethod
    def of(cls, look: Look, at: At) -> StandIn:
        shape, strides = at.numbers(look.shape), at.numbers(look.strides)
        return cls.made(shape, strides, look.dtype, look.device, look.requires_grad)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise Departed(f"{func}, which no call that is seen makes")


def tensors_of(told: Any) -> list[int]:
    """The numbers of the tensors in it."""
    if isinstance(told, Tensor):
        return [told.index]
    if isinstance(told, Items):
        return [i for part in told.parts for i in tensors_of(part)]
    return [i for part in told for i in tensors_of(part)] if type(told) is tuple else []
