"""Hooks on an output from which the step computes others. Needs torch alone: exports hold a copy.

In eager such a hook, or `retain_grad()`, is given the whole gradient of that output, of which a part comes from the
others. To autograd the outputs of a planned step lie side by side, so that it would be given the rest, or nothing.
So these hooks are taken off before they run, and the backward is left to the plain step, which gets them. Nor is a
hook called with None, as autograd would where another output alone has a gradient.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ._torch import goes_on_behind, listen_first
from .errors import PlannerError

Readers = tuple[tuple[int, ...], ...]  # for each output, the others that are computed from it
Hook = Callable[..., Any]

REMEDY = "Listen to what a submodule returns, within the model, or compute {} outside of what is planned."
# Modules whose hooks only note that a gradient is there; Fabric's look whether its own `backward` was called.
_NOTING = ("torch.distributed.", "planner.", "passes.", "lightning_fabric.wrappers", "lightning.fabric.wrappers")


@dataclass(frozen=True)
class Taken:
    """What listens to the gradient of an output.

    Attributes:
        hooks: in order.
        retained: whether the output retains it.
        output: the output, as long as anybody has it.
        before: its `.grad` by then.
    """

    hooks: tuple[Hook, ...]
    retained: bool
    output: Callable[[], torch.Tensor | None]
    before: torch.Tensor | None

    def move_to(self, plain: torch.Tensor) -> None:
        """Let it listen to the plain step's output."""
        for hook in self.hooks:
            plain.register_hook(hook)
        if self.retained:
            plain.retain_grad()

    def hand_over(self, plain: torch.Tensor) -> None:
        """Retain what the plain step's output has retained."""
        own = self.output() if self.retained else None
        if own is not None:
            found = plain.grad
            own.grad = self.before + found if self.before is not None and found is not None else found


class Listeners:
    """Who listens to the outputs of one execution of a step; holds none of them, as each holds this by its node."""

    def __init__(self, outputs: Sequence[torch.Tensor], readers: Readers, names: Sequence[str]) -> None:
        self.readers, self.names = readers, names
        self.there: dict[int, bool] = {}
        self.hooks: dict[int, dict[int, Hook]] = {}
        self.waiting: dict[int, dict[int, Hook]] = {}
        self.taken: dict[int, Taken] = {}
        self.outputs = {i: weakref.ref(o) for i, o in enumerate(outputs) if o.requires_grad}
        if len(self.outputs) > 1:
            self.node = weakref.ref(outputs[next(iter(self.outputs))].grad_fn)
            for i in sorted(self.outputs, key=lambda i: len(readers[i])):  # first what is computed last
                self.hooks[i] = listen_first(outputs[i], partial(self._arrived, i))

    def take(self) -> dict[int, Taken]:
        """What was taken off in this backward; it is registered again, for those who ask."""
        for i in list(self.waiting):
            self._put_back(i)
        found, self.taken = self.taken, {}
        return found

    def _put_back(self, i: int) -> None:
        if i in self.waiting:
            self.hooks[i].clear()
            self.hooks[i].update(self.waiting.pop(i))

    def _arrived(self, i: int, gradient: torch.Tensor | None) -> None:
        """Decide who hears of an output's gradient, before anybody does: eager calls no hook where there is none."""
        self._put_back(i)
        self.there[i] = gradient is not None
        later = next((j for j in self.readers[i] if self.there.get(j)), None)
        if later is None and gradient is not None:
            return
        node, own, hooks = self.node(), self.outputs[i](), self.hooks[i]
        theirs = {key: hook for key, hook in hooks.items() if not _module_of(hook).startswith(_NOTING)}
        of_several = [key for key, hook in theirs.items() if _module_of(hook) == "torch.autograd.graph"]
        if later is None:
            theirs = {key: hook for key, hook in theirs.items() if key not in of_several}  # which count their calls
        elif not goes_on_behind(node):
            self.asked(i, later, gradient is not None)
        elif of_several:
            self.refuse(i, later, f"register_multi_grad_hook was called with {self.names[i]}")
        retained = own is not None and own.retains_grad and own.grad_fn is node
        if later is not None and (theirs or retained):
            before = own.grad if own is not None and retained else None
            self.taken[i] = Taken(tuple(theirs.values()), retained, self.outputs[i], before)
        if theirs:
            self.waiting[i] = dict(hooks)
            for key in theirs:
                del hooks[key]

    def asked(self, i: int, later: int, is_part: bool) -> None:
        """Gradients of some outputs are asked for, perhaps of this one, of which a part is known, or nothing."""
        asks = "torch.autograd.grad, or inputs=, asks for gradients of outputs"
        if is_part:
            self.refuse(i, later, f"{asks}, perhaps of {self.names[i]}")
        else:
            warnings.warn(f"{asks}: {self._why(i, later, f'if of {self.names[i]}, it is given none')}", stacklevel=2)

    def refuse(self, i: int, later: int, what: str) -> None:
        """Raise: autograd does not know that one output is computed from the other."""
        raise PlannerError(self._why(i, later, what))

    def _why(self, i: int, later: int, what: str) -> str:
        return (
            f"{what}, and the planned step computes {self.names[later]} from {self.names[i]}: to autograd its outputs "
            "lie side by side, so that this part of the gradient would be missing. Take this step with the original "
            f"model. {REMEDY.format(self.names[later])}"
        )


def _module_of(hook: Any) -> str:
    """The name of the module that a hook's code is in."""
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__globals__", {}).get("__name__") or getattr(hook, "__module__", ""))
