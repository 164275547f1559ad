"""The drop-in module: the user's own model, with the planned step in place of its training forward."""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx, nn

from passes._torch import called_by_dynamo, forget_source, refer_weakly
from passes.trace.arguments import call_signature, overridden_call, runs_hooks
from passes.trace.capture import Traced
from passes.trace.templates import slots
from planner.decided import Decided
from planner.pipeline import Replan
from planner.ranks.wrapper import inner_module
from solvers.errors import PlannerError

from .cache import OPAQUE, PlanState
from .forward import PlannedForward, with_self


class PlannedModule(fx.GraphModule):
    """Runs the planned step in training; the model's own forward under `eval()` or `no_grad`.

    Parameters, buffers and submodules *are* the model's: the same objects under the same names, so optimizers,
    `state_dict`, `.to()`, freezing and forward hooks act on both. `graph` shows the call of the planned step;
    `forward_graph` and `backward_graph` are its two halves.
    """

    runs_plan = True

    def __init__(
        self,
        model: nn.Module,
        planned: Decided,
        sample: Mapping[str, Any],
        replan: Replan,
        loss_fn: Callable[..., Any] | None,
        on_new_shape: str,
    ) -> None:
        inner = inner_module(model)
        object.__setattr__(self, "_plan_model", None)
        super().__init__(nn.Module(), fx.Graph())
        own = self.__dict__
        own["_plan_model"] = model
        own["_parameters"], own["_buffers"], own["_modules"] = model._parameters, model._buffers, model._modules
        own["_non_persistent_buffers_set"] = model._non_persistent_buffers_set
        if inner is not model or not runs_hooks(model, loss_fn):
            own.update((name, getattr(model, name)) for name in _HOOKS)
            del own["_is_full_backward_hook"]  # which the model then answers
        own["_plan_state"] = PlanState(inner, loss_fn, replan, on_new_shape, call_signature(inner, loss_fn))
        own["planned_step"] = _StepCall(self)
        for name in _own_methods(model):
            setattr(type(self), name, _of_the_model(name))
        self._plan_state.start(sample, planned)
        refer_weakly(self)  # the empty graph
        self.graph = _call_graph(self._plan_state.signature, planned.prepared.traced)
        refer_weakly(self)

    # What a call does -------------------------------------------------------------------------------------------

    def recompile(self) -> Any:
        """Regenerate the graph's code; `forward` stays the planned dispatch, under the model's own signature."""
        code = super().recompile()
        cls: Any = type(self)  # every GraphModule has a class of its own
        forget_source(self)
        del cls.forward
        if state := self.__dict__.get("_plan_state"):
            cls.forward = _with_signature(state.signature)
            if overridden_call(state.model) and self._runs_around(state):
                cls.__call__ = _of_the_model("__call__")
        return code

    def _recompile_submodules(self) -> list[tuple[str, Any]]:
        """Leave graph modules of the model as they are: their classes would change, which guards compare."""
        return []

    @torch.compiler.disable(reason=OPAQUE)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own call: planned in training, the original forward under `eval()` or `no_grad`."""
        state = self._plan_state
        if state.model is not self._plan_model:
            with PlannedForward(self, state.model, state.model.__dict__.get("forward"), state).in_place():
                return self._plan_model.forward(*args, **kwargs)
        state.look_at_gathers()
        if self.training and torch.is_grad_enabled():
            return state.run(state.bind(args, kwargs), state.plain)
        if state.unplanned:
            return state.plain(state.bind(args, kwargs))
        state.in_eval()
        return state.notices.of_eval(state.plain(state.bind(args, kwargs)))

    def stands_for(self) -> nn.Module:
        """What it is for guards (`stood_for`)."""
        found: nn.Module = self.__dict__["_plan_model"]
        return found

    def __prepare_scriptable__(self) -> Any:
        """Refuse `torch.jit.script`, which asks for this."""
        raise PlannerError("torch.jit.script cannot look into a planned step: give it the original model.")

    # What belongs to the model ----------------------------------------------------------------------------------

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The model's, for those who ask `isinstance`: trainers choose by it how to save a model, and its loss.

        Dynamo, which would look for the forward there, is told what this is.
        """
        model = self.__dict__.get("_plan_model")
        return type(self) if model is None or called_by_dynamo() else model.__class__

    @property
    def training(self) -> bool:
        model = self.__dict__.get("_plan_model")
        return True if model is None else model.training

    @training.setter
    def training(self, mode: bool) -> None:
        model = self.__dict__.get("_plan_model")
        if model is not None:
            model.training = mode

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_plan_model")
            if model is None or name.startswith("__"):
                raise
            return self._within_plan(getattr(model, name))

    def _within_plan(self, found: Any) -> Any:
        """What the model has; a method of it runs with the plan in place, for the calls of `self` that it makes."""
        model, state = self.__dict__["_plan_model"], self.__dict__.get("_plan_state")
        if not inspect.ismethod(found) or found.__self__ is not model:
            return found

        @functools.wraps(found)
        def method(*args: Any, **kwargs: Any) -> Any:
            with self._in_place(state):
                result = found(*args, **kwargs)
            return self if result is model else result

        return method

    def _in_place(self, state: PlanState | None) -> AbstractContextManager[None]:
        """Let the model's own calls of itself in the block run the plan, where it is one of the model alone."""
        model = self.__dict__["_plan_model"]
        if state is None or not self._runs_around(state):
            return nullcontext()
        return PlannedForward(self, model, model.__dict__.get("forward"), state).in_place()

    def _runs_around(self, state: PlanState) -> bool:
        """Whether the step is the forward of the model itself, around which its hooks run."""
        return state.model is self._plan_model and not runs_hooks(state.model, state.loss_fn)

    def __setattr__(self, name: str, value: Any) -> None:
        """Settings are the model's, which reads them; what makes a graph module one is this object's."""
        if self._is_the_models(name):
            setattr(self._plan_model, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_the_models(name):
            delattr(self._plan_model, name)
        else:
            super().__delattr__(name)

    def _is_the_models(self, name: str) -> bool:
        model = self.__dict__.get("_plan_model")
        if model is None or name in self.__dict__ or hasattr(type(self), name):
            return False
        return hasattr(model, name) or not name.startswith("_")

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedModule:
        new = self._around(copy.deepcopy(self._plan_model, memo))
        memo[id(self)] = new
        return new

    def __copy__(self) -> PlannedModule:
        return self._around(self._plan_model)

    def _around(self, model: nn.Module) -> PlannedModule:
        """The same plans around another instance of the model."""
        state = self._plan_state
        module = PlannedModule(model, state.latest, {}, state.replan, state.loss_fn, state.on_new_shape)
        module.__dict__["_plan_state"] = state.around(inner_module(model))
        return module

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PlannerError(
            "a planned module is not pickled: it holds generated code. Save the weights (state_dict) and the plan "
            "(plan.save), and load with Plan.load(path, model, sample)."
        )

    # What there is to look at -----------------------------------------------------------------------------------

    @property
    def forward_graph(self) -> fx.GraphModule:
        """The planned forward (of the most recently planned shapes)."""
        return self._plan_state.latest.rewritten.forward

    @property
    def backward_graph(self) -> fx.GraphModule:
        """The planned backward, with the recomputes in it."""
        return self._plan_state.latest.rewritten.backward

    def print_readable(self, print_output: bool = True, *args: Any, **kwargs: Any) -> str:
        """The call graph and both halves as source."""
        parts = [super().print_readable(print_output=False)]
        halves = (self.forward_graph, self.backward_graph)
        parts += [half.print_readable(False, *args, **kwargs) for half in halves]
        text = "\n".join(parts)
        if print_output:
            print(text)
        return text


_ALWAYS = ("state_dict", "load_state_dict", "_apply", "train")  # which reach more than parameters and submodules
_CONTAINERS = ("__len__", "__getitem__", "__setitem__", "__delitem__", "__iter__", "__contains__")


def _own_methods(model: nn.Module) -> list[str]:
    """Methods that every module has and the model's class has its own of (`parameters`, `eval`), and containers'."""
    public = [name for name in dir(nn.Module) if not name.startswith("_") and name != "forward"]
    own = [n for n in public if getattr(type(model), n) is not getattr(nn.Module, n) and callable(getattr(model, n))]
    return [*_ALWAYS, *own, *(name for name in _CONTAINERS if hasattr(type(model), name))]


def _of_the_model(name: str) -> Callable[..., Any]:
    """A method that is the model's."""

    def method(self: PlannedModule, *args: Any, **kwargs: Any) -> Any:
        return self._within_plan(getattr(self._plan_model, name))(*args, **kwargs)

    method.__name__ = name
    return method


def _with_signature(signature: inspect.Signature) -> Callable[..., Any]:
    """`PlannedModule.forward` as trainers look at it, who ask a model's signature which columns of a batch it takes."""

    @torch.compiler.disable(reason=OPAQUE)
    def forward(self: PlannedModule, *args: Any, **kwargs: Any) -> Any:
        return PlannedModule.forward(self, *args, **kwargs)

    forward.__signature__ = with_self(signature)
    forward.__doc__ = PlannedModule.forward.__doc__
    return forward


_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


class _StepCall(nn.Module):
    """The target of the call graph's one node: flat inputs in, the model's output out."""

    def __init__(self, owner: PlannedModule) -> None:
        super().__init__()
        self.__dict__["owner"] = weakref.ref(owner)  # which holds this

    def forward(self, **bound: Any) -> Any:
        state = self.__dict__["owner"]()._plan_state
        return state.run(bound, state.plain)


def _call_graph(signature: Any, traced: Traced) -> fx.Graph:
    """Placeholders under the model's own argument names, one call of the planned step, its output."""
    graph = fx.Graph()
    used = [name.split("]")[0].strip("['\"") for name, _ in slots(traced.input_template)]
    names = dict.fromkeys(n for n in signature.parameters if n in used)
    values: dict[str, Any] = {n: graph.placeholder(n) for n in names}
    graph.output(graph.call_module("planned_step", (), values))
    return graph
