"""The `forward` of a model that runs a plan."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from passes.trace.arguments import refuse_repeated_hooks, run_model, set_forward
from passes.trace.carried import without_state
from passes.trace.expected import unless_none
from planner.errors import NotAFunction

from .cache import OPAQUE, PlanState


class StandIn:
    """What is in the place of one model's `forward`, and can be taken apart as a method can.

    Accelerate takes `__func__` of a model's forward, wraps it and binds it anew, to this model or, when that is copied,
    to the copy. Its `unwrap_model` follows `__wrapped__`, past this one to what it was put around. There is no
    `__dict__`, which `functools.wraps` would hand to wrappers, and copies of the model would copy.

    Attributes:
        previous: the instance's own `forward` from before; None where the class's was in use.
    """

    __slots__ = ("__signature__", "__weakref__", "__wrapped__", "model", "previous")
    __name__ = "forward"

    def __init__(self, model: nn.Module, previous: Callable[..., Any] | None, signature: inspect.Signature) -> None:
        self.model, self.previous, self.__signature__ = model, previous, signature
        if previous is not None:
            self.__wrapped__ = previous

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def copied(self, model: nn.Module, memo: dict[int, Any]) -> StandIn:
        """The same for a copy of the model."""
        raise NotImplementedError

    def stands_for(self) -> Any:
        """What it is for guards (`stood_for`)."""
        return unless_none(self.previous)

    @property
    def original(self) -> Callable[..., Any]:
        """The forward from before."""
        return self.previous or type(self.model).forward.__get__(self.model)

    @property
    def __func__(self) -> Callable[..., Any]:
        return _Function(self)

    def on(self, model: nn.Module) -> StandIn:
        """This one, or that of a copy of the model; the copy holds it."""
        if model is self.model:
            return self
        own = model.__dict__.get("_stand_in")
        if not isinstance(own, StandIn) or own.model is not model:
            own = model.__dict__["_stand_in"] = self.copied(model, {id(self.model): model})
        return own

    def __deepcopy__(self, memo: dict[int, Any]) -> StandIn:
        model = memo.get(id(self.model))
        return self if model is None else self.copied(model, memo)

    def __reduce__(self) -> Any:
        return getattr, (self.model, "forward")

    def __getattr__(self, name: str) -> Any:
        raise NotAFunction(
            f"the forward of a planned model has no {name}, which torch.export and torch.jit.script read: they cannot "
            "look into a planned step. Call plan.remove(model) first, and plan.apply(model) after it."
        )


class _Function:
    """The function of a stand-in: called with the model first."""

    __slots__ = ("__signature__", "own")
    __name__ = "forward"

    def __init__(self, own: StandIn) -> None:
        self.own, self.__signature__ = own, with_self(own.__signature__)

    def __call__(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.own.on(model)(*args, **kwargs)


def with_self(signature: inspect.Signature) -> inspect.Signature:
    """The signature of a method's function."""
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    return signature.replace(parameters=[first, *signature.parameters.values()])


def stand_in(forward: Any) -> StandIn | None:
    """The planner's own forward that a module's is, or that it was made a method of; None for another one."""
    function = getattr(forward, "__func__", None)
    if inspect.ismethod(forward) and isinstance(function, _Function):
        return function.own.on(cast("nn.Module", forward.__self__))
    return forward if isinstance(forward, StandIn) else None


def stand_in_within(module: nn.Module) -> StandIn | None:
    """The planner's own forward that a module's is or has been put around, as far as the wrappers tell."""
    current: Any = module.__dict__.get("forward")
    inner: Any = inspect.unwrap(current, stop=lambda f: isinstance(f, (StandIn, _Function)))
    return inner.own.on(module) if isinstance(inner, _Function) else stand_in(inner)


class PlannedForward(StandIn):
    """The `forward` of a model that runs a plan: planned in training, the original under `eval()` or `no_grad`.

    Copying the model copies it with its plans; a pickle of the model holds the model without its plan.

    Attributes:
        module: the plan's own module, by which a plan knows its forward again.
        previous: put back by `remove`.
    """

    __slots__ = ("module", "state")
    runs_plan = True

    def __init__(
        self, module: nn.Module, model: nn.Module, previous: Callable[..., Any] | None, state: PlanState
    ) -> None:
        super().__init__(model, previous, state.signature)
        self.module, self.state = module, state

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
                return state.run(state.bind(args, kwargs), self._plain)
        state.in_eval()
        if state.loss_fn is None:
            return state.notices.of_eval(self.original(*args, **kwargs))
        return state.notices.of_eval(self._plain(state.bind(args, kwargs)))

    def copied(self, model: nn.Module, memo: dict[int, Any]) -> PlannedForward:
        return PlannedForward(self.module, model, copy.deepcopy(self.previous, memo), self.state.around(model))

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

    def _plain(self, bound: Mapping[str, Any]) -> Any:
        # Not `model(...)`: the call that led here runs the model's hooks already.
        arguments = without_state(bound)
        return run_model(_Bare(self.original), self.state.loss_fn, self.state.signature, arguments)


class _Bare(nn.Module):
    """A model's forward without the model's hooks."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = forward
