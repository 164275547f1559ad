"""The `forward` of a model that runs a plan."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from passes.trace.arguments import bind_call, refuse_repeated_hooks, run_model, set_forward
from planner.errors import NotAFunction

from .cache import OPAQUE, PlanState


class PlannedForward:
    """The `forward` of a model that runs a plan: planned in training, the original under `eval()` or `no_grad`.

    Copying the model copies it with its plans; a pickle of the model holds the model without its plan.

    Attributes:
        module: the plan's own module, by which a plan knows its forward again.
        previous: the instance's own `forward` from before, put back by `remove`; None where the class's was in use.
    """

    runs_plan = True

    def __init__(
        self, module: nn.Module, model: nn.Module, previous: Callable[..., Any] | None, state: PlanState
    ) -> None:
        self.module, self.model, self.previous, self.state = module, model, previous, state
        self.copies: WeakKeyDictionary[nn.Module, PlannedForward] = WeakKeyDictionary()
        self.__name__ = "forward"
        self.__doc__ = inspect.getdoc(type(model).forward)
        self.__signature__ = state.signature

    @torch.compiler.disable(reason=OPAQUE)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = self.state
        if state.unplanned:
            return self.original(*args, **kwargs)
        trained = self.model.training and torch.is_grad_enabled()
        if trained or state.loss_fn is not None:
            refuse_repeated_hooks(self.model, state.loss_fn)
        if trained:
            with state.through(self):
                return state.run(bind_call(state.signature, args, kwargs), self._plain)
        state.notices.in_eval()
        if state.loss_fn is None:
            return self.original(*args, **kwargs)
        return self._plain(bind_call(state.signature, args, kwargs))

    def __getattr__(self, name: str) -> Any:
        raise NotAFunction(
            f"the forward of a planned model has no {name}, which torch.export and torch.jit.script read: they cannot "
            "look into a planned step. Call plan.remove(model) first, and plan.apply(model) after it."
        )

    @property
    def __func__(self) -> Callable[..., Any]:
        """As of a method: who wraps methods and binds them anew, to this model or to a copy, looks for it."""
        return self._called_on

    def _called_on(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = self if model is self.model else self.copies.get(model)
        if own is None:
            own = self.copies[model] = self.__deepcopy__({id(self.model): model})
        return own(*args, **kwargs)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Be the model's forward in the block; nothing where it runs the plan anyway."""
        if getattr(self.previous, "runs_plan", False):
            yield
            return
        set_forward(self.model, self)
        try:
            yield
        finally:
            set_forward(self.model, self.previous)

    @property
    def original(self) -> Callable[..., Any]:
        """The forward that ran before the plan was applied."""
        return self.previous or type(self.model).forward.__get__(self.model)

    def _plain(self, bound: Mapping[str, Any]) -> Any:
        # Not `model(...)`: the call that led here runs the model's hooks already.
        return run_model(_Bare(self.original), self.state.loss_fn, self.state.signature, bound)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedForward:
        model = memo.get(id(self.model))
        if model is None:
            return self
        return PlannedForward(self.module, model, copy.deepcopy(self.previous, memo), self.state.around(model))

    def __reduce__(self) -> Any:
        return getattr, (self.model, "forward")


class _Bare(nn.Module):
    """A model's forward without the model's hooks."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = forward
