"""Tensors that forward reads and nobody registers: what may change in them while each stays the same object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .._torch import DisableTorchFunction
from .overlaps import WITH_MEMORY


def look_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What Python may ask of a tensor, and `.data = ...`, `resize_` and `requires_grad_` change."""
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad


def numbers_of(tensor: torch.Tensor) -> tuple[int, int]:
    """What tells of other numbers in it: how often it was changed in place, and where its memory is.

    One that was made under `inference_mode` does not count its changes.
    """
    has_memory = type(tensor) in WITH_MEMORY and tensor.layout is torch.strided
    return 0 if tensor.is_inference() else tensor._version, tensor.data_ptr() if has_memory else 0


def equal(a: Any, b: torch.Tensor) -> bool:
    """Whether a value is a tensor with the look, strides and numbers of another; torch compares dense ones alone."""
    dense = type(a) is type(b) and a.layout is b.layout is torch.strided
    return dense and look_of(a) == look_of(b) and a.stride() == b.stride() and torch.equal(a, b) and _signs_agree(a, b)


def _signs_agree(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Also of zeros, which are equal."""
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    return not a.is_floating_point() or torch.equal(a.signbit(), b.signbit())


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that is neither parameter, buffer nor input, and what it was like as forward read it.

    Where the graph holds this very object, and Python took no numbers from it, these may change.
    """

    value: torch.Tensor
    look: tuple[Any, ...]
    numbers: tuple[int, int]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Constant:
        """As the tensor is now."""
        with DisableTorchFunction():  # modes that listen to forward need not hear of it
            return cls(tensor, look_of(tensor), numbers_of(tensor))


class Unregistered:
    """Such tensors of one model, as a plan was last found to hold for them."""

    def __init__(self) -> None:
        self.looks: list[tuple[torch.Tensor, tuple[Any, ...]]] = []
        self.numbers: list[tuple[torch.Tensor, tuple[int, int]]] = []

    def hold(self) -> bool:
        """Whether they are as they were."""
        alike = all(look_of(tensor) == look for tensor, look in self.looks)
        return alike and all(numbers_of(tensor) == numbers for tensor, numbers in self.numbers)
