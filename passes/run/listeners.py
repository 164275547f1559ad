"""Hooks on an output from which the step computes others. Needs torch alone: exports hold a copy.

In eager such a hook, or `retain_grad()`, is given the whole gradient of that output, of which a part comes from the
others. To autograd the outputs of a planned step lie side by side, so that it would be given the rest, or nothing.
So these hooks are taken off before they run, and the backward is left to the plain step, which gets them. Nor is a
hook called with None, as autograd would where another output alone has a gradient. Whether `torch.autograd.grad` asks
for such an output's gradient, only its caller's stack tells.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch

from ._torch import listen_first
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
        if later is None:
            theirs = {key: hook for key, hook in theirs.items() if not _counts_its_calls(hook)}
        elif any(_is_output(asked, node, i) for asked in _asked_for()):
            self.refuse(i, later, f"torch.autograd.grad, or inputs=, asks for the gradient of {self.names[i]}")
        elif any(map(_is_of_several, theirs.values())):
            self.refuse(i, later, f"register_multi_grad_hook was called with {self.names[i]}")
        retained = own is not None and own.retains_grad and own.grad_fn is node
        if later is not None and (theirs or retained):
            before = own.grad if own is not None and retained else None
            self.taken[i] = Taken(tuple(theirs.values()), retained, self.outputs[i], before)
        if theirs:
            self.waiting[i] = dict(hooks)
            for key in theirs:
                del hooks[key]

    def refuse(self, i: int, later: int, what: str) -> None:
        """Raise: autograd does not know that one output is computed from the other."""
        raise PlannerError(
            f"{what}, and the planned step computes {self.names[later]} from {self.names[i]}: to autograd its outputs "
            "lie side by side, so that this part of the gradient would be missing. Take this step with the original "
            f"model. {REMEDY.format(self.names[later])}"
        )


def _asked_for() -> Sequence[Any]:
    """What the `inputs` of the running backward are; of those of all threads where this one is autograd's own."""
    own = _inputs_on(sys._getframe())
    if own is not None:
        return own
    return [asked for frame in sys._current_frames().values() for asked in _inputs_on(frame) or ()]


def _inputs_on(frame: FrameType | None) -> Sequence[Any] | None:
    """The `inputs` of the innermost `torch.autograd.grad` or `backward` that this stack is in; None outside of any."""
    while frame is not None:
        if frame.f_code.co_name in ("grad", "backward") and frame.f_globals.get("__name__") == "torch.autograd":
            inputs = frame.f_locals.get("inputs")
            if isinstance(inputs, torch.Tensor | torch.autograd.graph.GradientEdge):
                return [inputs]
            return list(inputs.values() if isinstance(inputs, Mapping) else inputs or ())
        frame = frame.f_back
    return None


def _is_output(asked: Any, node: Any, number: int) -> bool:
    """Whether a tensor or an edge of autograd's graph is this output of a node."""
    behind = asked.node if isinstance(asked, torch.autograd.graph.GradientEdge) else asked.grad_fn
    return behind is node and asked.output_nr == number


def _is_of_several(hook: Hook) -> bool:
    """Whether it is of `register_multi_grad_hook`."""
    return _module_of(hook) == "torch.autograd.graph"


def _counts_its_calls(hook: Hook) -> bool:
    """Whether it is of one that waits until each tensor's was called, if only with None."""
    return _is_of_several(hook) and hook.__name__ == "inner_hook"


def _module_of(hook: Any) -> str:
    """The name of the module that a hook's code is in."""
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__globals__", {}).get("__name__") or getattr(hook, "__module__", ""))
