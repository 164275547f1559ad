"""Sums that continue outside of a step, or in another order, are noticed. Needs torch alone: exports hold a copy.

Autograd adds the gradients of a tensor that is read in several places term by term, in the order in which they come. A
step hands over the sum of its own terms. Where autograd has others by then, of a penalty on the parameters, say, or of
a second call of the model, it so adds up in another order than in the plain step: right, except for the last bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ._torch import after_backward, own_part
from .tensors import memory_of


class Versions:
    """Which of some tensors are changed in place from now on. Keeps none of their memory."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.seen = [(_counter_of(t), t._version) for t in tensors]

    @property
    def changed(self) -> bool:
        """Whether one was."""
        return any(counter._version != version for counter, version in self.seen)


def _counter_of(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor with the version of that one: changes in place count for both."""
    counter = tensor.detach()
    counter.data = tensor.new_empty(0)
    return counter


def warn_of_changed_view() -> None:
    """Say that a view that the step returns and reads was changed in place."""
    warnings.warn(
        "a result of the planned step was changed in place. In the plain step it is a view that other parts of the "
        "step read, too, and autograd then adds up their gradients before the caller's: in another order than here, "
        "which shows in the last bits. For the same bits change a clone() of it, or use the out-of-place form.",
        stacklevel=2,
    )


def watch_sum(reader: tuple[Any, int], gradient: torch.Tensor, name: str, told: set[str], is_cast: bool) -> None:
    """Warn, once, if the gradient, a sum, is added to another one that came before it; of a cast weight, to any.

    Args:
        reader: the node of autograd's graph that it goes to, and in which of its places.
        told: the names that this was said of.
    """
    node, place = reader
    if node is None or name in told:
        return
    look = _Look(name, memory_of(gradient), told, gradient._version if is_cast else None)
    leaf = getattr(node, "variable", None)
    if leaf is not None:
        handle = leaf.register_hook(look)
    else:
        handle = node.register_prehook(lambda gradients: look(gradients[place]))
    after_backward(handle.remove)


@dataclass(frozen=True)
class _Look:
    name: str
    memory: int
    told: set[str]
    version: int | None  # before what comes later is added in place

    def __call__(self, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            return
        added = self.version is not None and own_part(gradient)._version != self.version
        if added or memory_of(own_part(gradient)) != self.memory:
            self.told.add(self.name)
            warnings.warn(
                f"the gradient of {self.name} is a sum, as the planned step reads it more than once or autocast casts "
                "it, and this backward adds it to a gradient from outside of it (a penalty on parameters, another call "
                "of the model, code after a region that reads the same): in another order or type than the plain step, "
                "which shows in the last bits of the type that it computes in. For the same bits call backward for "
                "each, or let all of it be one module, or its loss_fn, that is planned.",
                stacklevel=2,
            )
