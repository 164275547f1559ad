"""Tensors that forward reads and nobody registers: what may change in them while each stays the same object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .._torch import DisableTorchFunction

_WITH_MEMORY = (torch.Tensor, nn.Parameter, nn.Buffer)


def look_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What Python may ask of a tensor, and `.data = ...`, `resize_` and `requires_grad_` change."""
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad


def numbers_of(tensor: torch.Tensor) -> tuple[int, int]:
    """What tells of other numbers in it: how often it was changed in place, and where its memory is.

    One that was made under `inference_mode` does not count its changes.
    """
    has_memory = type(tensor) in _WITH_MEMORY and tensor.layout is torch.strided
    return 0 if tensor.is_inference() else tensor._version, tensor.data_ptr() if has_memory else 0


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
