"""The drop-in module: the user's own model, with the planned step in place of its training forward."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from passes.capture import (
    Traced,
    bind_call,
    call_signature,
    run_model,
    state_entries,
    state_tensors,
)
from passes.errors import InputMismatch
from passes.random import set_rng_state
from passes.runtime import Step
from passes.structure import Constant, Template, Tree, flatten, slots, unflatten
from passes._torch import swapped_state
from solvers.errors import PlannerError

from .pipeline import Planned

CACHE_SIZE = 8
Replan = Callable[[Any, "tuple[str, ...] | None"], Planned]


@dataclass(frozen=True)
class Key:
    """What a plan is valid for: everything the trace took as given."""

    inputs: tuple[Any, ...]
    state: tuple[Any, ...]
    training: tuple[bool, ...]
    autocast: tuple[Any, ...]


class PlannedModule(fx.GraphModule):
    """Runs the planned step in training; the model's own forward under `eval()` or `no_grad`.

    Parameters, buffers and submodules *are* the model's: the same objects under the same names, so optimizers,
    `state_dict`, `.to()` and freezing act on both. `graph` shows the call of the planned step; `forward_graph` and
    `backward_graph` are its two halves.
    """

    def __init__(
        self,
        model: nn.Module,
        planned: Planned,
        sample: Mapping[str, Any],
        replan: Replan,
        loss_fn: Callable[..., Any] | None,
        on_new_shape: str,
    ) -> None:
        object.__setattr__(self, "_plan_model", None)
        super().__init__(nn.Module(), fx.Graph())
        own = self.__dict__
        own["_plan_model"] = model
        own["_parameters"], own["_buffers"], own["_modules"] = model._parameters, model._buffers, model._modules
        own["_non_persistent_buffers_set"] = model._non_persistent_buffers_set
        own["_plan_state"] = _PlanState(model, loss_fn, replan, on_new_shape)
        own["planned_step"] = _StepCall(self)
        self._plan_state.add(sample, planned)
        self.graph = _call_graph(self._plan_state.signature, planned.prepared.traced)

    # What a call does -------------------------------------------------------------------------------------------

    def recompile(self) -> Any:
        """Regenerate the graph's code; `forward` stays the planned dispatch."""
        code = super().recompile()
        cls = type(self)
        if "forward" in cls.__dict__:
            del cls.forward
        return code

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own call: planned in training, the original forward under `eval()` or `no_grad`."""
        state = self._plan_state
        if not (self.training and torch.is_grad_enabled()):
            if state.loss_fn is None:
                return state.model(*args, **kwargs)
            return run_model(state.model, state.loss_fn, state.signature, bind_call(state.signature, args, kwargs))
        return state.run(bind_call(state.signature, args, kwargs))

    # What belongs to the model ----------------------------------------------------------------------------------

    @property
    def training(self) -> bool:  # type: ignore[override]
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
            return getattr(model, name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._plan_model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._plan_model.load_state_dict(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> PlannedModule:
        self._plan_model._apply(fn, recurse)
        return self

    def train(self, mode: bool = True) -> PlannedModule:
        self._plan_model.train(mode)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedModule:
        state = self._plan_state
        model = copy.deepcopy(state.model, memo)
        new = state.rebuild(model)
        memo[id(self)] = new
        return new

    def __copy__(self) -> PlannedModule:
        return self._plan_state.rebuild(self._plan_model)

    def __reduce__(self) -> Any:
        raise PlannerError(
            "a planned module is not pickled: it holds generated code. Save the weights (state_dict) and the plan "
            "(plan.save), and load with Plan.load(path, model, sample)."
        )

    __reduce_ex__ = __reduce__  # type: ignore[assignment]

    # What there is to look at -----------------------------------------------------------------------------------

    @property
    def forward_graph(self) -> fx.GraphModule:
        """The planned forward (of the most recently planned shapes)."""
        return self._plan_state.latest.step.forward

    @property
    def backward_graph(self) -> fx.GraphModule:
        """The planned backward, with the recomputes in it."""
        return self._plan_state.latest.step.backward

    def print_readable(self, print_output: bool = True, **kwargs: Any) -> str:
        """The call graph and both halves as source."""
        parts = [super().print_readable(print_output=False)]
        parts += [g.print_readable(print_output=False, **kwargs) for g in (self.forward_graph, self.backward_graph)]
        text = "\n".join(parts)
        if print_output:
            print(text)
        return text


class _StepCall(nn.Module):
    """The target of the call graph's one node: flat inputs in, the model's output out."""

    def __init__(self, owner: PlannedModule) -> None:
        super().__init__()
        self.__dict__["owner"] = owner

    def forward(self, **bound: Any) -> Any:
        return self.owner._plan_state.run(bound)


class _PlanState:
    """Everything behind a `PlannedModule`: the cache of planned steps and the checks before each call."""

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Any] | None, replan: Replan, on_new_shape: str
    ) -> None:
        self.model, self.loss_fn, self.replan, self.on_new_shape = model, loss_fn, replan, on_new_shape
        self.signature = call_signature(model, loss_fn)
        self.entries = tuple(state_entries(model))
        self.modules = list(model.modules())
        self.cache: OrderedDict[Key, Planned] = OrderedDict()
        self.differentiated: tuple[str, ...] | None = None

    @property
    def latest(self) -> Planned:
        return next(reversed(self.cache.values()))

    def add(self, bound: Mapping[str, Any], planned: Planned) -> None:
        """Remember a plan for calls that look like `bound`."""
        key = self.key(*flatten(dict(bound)))
        # A model that was handed over in eval mode is planned for training all the same.
        self.cache[key] = planned
        while len(self.cache) > CACHE_SIZE:
            self.cache.popitem(last=False)

    def key(self, tensors: Sequence[torch.Tensor], template: Template) -> Key:
        """What a call with these inputs needs a plan for."""
        return Key(
            inputs=(_template_key(template), *(_tensor_key(t) for t in tensors)),
            state=tuple(_state_key(t) for t in state_tensors(self.model, self.entries)),
            training=tuple(m.training for m in self.modules) if self.model.training else (),
            autocast=_autocast_key(),
        )

    def run(self, bound: Mapping[str, Any]) -> Any:
        """Run the step planned for such a call, planning it first where that is asked for."""
        tensors, template = flatten(dict(bound))
        key = self.key(tensors, template)
        planned = self.cache.get(key)
        if planned is None:
            planned = self._missing(key, bound)
            if planned is None:
                return run_model(self.model, self.loss_fn, self.signature, bound)
        return self._execute(planned, tensors, bound)

    def _execute(self, planned: Planned, tensors: list[torch.Tensor], bound: Mapping[str, Any]) -> Any:
        traced = planned.prepared.traced
        primals = [*state_tensors(self.model, self.entries), *tensors]
        results = planned.step(primals, _Fallback(self, traced, bound))
        leaves = [primals[leaf.input] if leaf.input is not None else results[leaf.index] for leaf in traced.outputs]
        return unflatten(traced.output_template, leaves)

    def _missing(self, key: Key, bound: Mapping[str, Any]) -> Planned | None:
        mismatch = self._difference(key)
        if self.on_new_shape == "error":
            raise mismatch
        if self.on_new_shape == "eager":
            warnings.warn(f"planned step not used: {mismatch}", stacklevel=4)
            return None
        warnings.warn(f"planning anew: {mismatch}", stacklevel=4)
        planned = self.replan(dict(bound), self.differentiated)
        self.cache[key] = planned
        while len(self.cache) > CACHE_SIZE:
            self.cache.popitem(last=False)
        return planned

    def _difference(self, key: Key) -> InputMismatch:
        known = next(iter(self.cache))
        hint = 'on_new_shape="replan" plans such calls, "eager" runs them unplanned.'
        names = self.latest.prepared.traced.input_names
        if key.inputs[0] != known.inputs[0]:
            return InputMismatch("(structure)", key.inputs[0], known.inputs[0], hint)
        for name, got, expected in zip(names, key.inputs[1:], known.inputs[1:], strict=False):
            if got != expected:
                return InputMismatch(name, _describe(got), _describe(expected), hint)
        for entry, got, expected in zip(self.entries, key.state, known.state, strict=False):
            if got != expected:
                return InputMismatch(entry.name, _describe(got), _describe(expected), hint)
        if key.autocast != known.autocast:
            return InputMismatch("(autocast)", str(key.autocast), str(known.autocast), hint)
        return InputMismatch("(training flags of submodules)", "other flags", "those at planning", hint)

    def rebuild(self, model: nn.Module) -> PlannedModule:
        """The same plans around another instance of the model."""
        first = next(iter(self.cache.values()))
        module = PlannedModule.__new__(PlannedModule)
        PlannedModule.__init__(module, model, first, {}, self.replan, self.loss_fn, self.on_new_shape)
        module._plan_state.cache = OrderedDict(self.cache)
        return module

    def expect(self, paths: tuple[str, ...], bound: Mapping[str, Any]) -> None:
        """From now on plan for gradients of these outputs."""
        self.differentiated = paths
        self.cache.pop(self.key(*flatten(dict(bound))), None)


class _Fallback:
    """Backward from other outputs than planned for: the plain model replays the forward, and the next call is planned anew."""

    def __init__(self, state: _PlanState, traced: Traced, bound: Mapping[str, Any]) -> None:
        self.state, self.traced, self.bound = state, traced, bound

    def __call__(
        self,
        primals: Sequence[torch.Tensor],
        generators: dict[str, torch.Tensor],
        gradients: dict[int, torch.Tensor],
    ) -> list[Any]:
        wanted = {leaf.index: leaf for leaf in self.traced.outputs if leaf.index in gradients}
        paths = tuple(leaf.path for leaf in wanted.values())
        if not paths:
            return [None] * len(primals)
        warnings.warn(
            f"backward started from {', '.join(p or 'the output' for p in paths)}, which the plan did not expect: this "
            "step replays the plain forward (correct, but not under the budget); later calls are planned for it.",
            stacklevel=2,
        )
        result = self._replay(primals, generators, gradients)
        self.state.expect(paths, self.bound)
        return result

    def _replay(
        self, primals: Sequence[torch.Tensor], generators: dict[str, torch.Tensor], gradients: dict[int, torch.Tensor]
    ) -> list[Any]:
        state, traced = self.state, self.traced
        leaves = [p.detach().requires_grad_(p.requires_grad) for p in primals]
        count = len(traced.state)
        for i in traced.mutated:
            leaves[i] = leaves[i].clone()
        named = {e.name: t for e, t in zip(traced.state, leaves, strict=False)}
        devices = [d for d in generators if d != "cpu"]
        with torch.random.fork_rng(devices=devices), torch.enable_grad(), swapped_state(state.model, named):
            for device, generator in generators.items():
                set_rng_state(generator, device)
            bound = unflatten(traced.input_template, leaves[count:])
            outputs, _ = flatten(run_model(state.model, state.loss_fn, state.signature, bound))
        started = [(outputs[k], gradients[leaf.index]) for k, leaf in enumerate(traced.outputs) if leaf.index in gradients]
        inputs = [t for t in leaves if t.requires_grad]
        found = iter(torch.autograd.grad([o for o, _ in started], inputs, [g for _, g in started], allow_unused=True))
        return [next(found) if t.requires_grad else None for t in leaves]


def _call_graph(signature: Any, traced: Traced) -> fx.Graph:
    """Placeholders under the model's own argument names, one call of the planned step, its output."""
    graph = fx.Graph()
    used = [name.split("]")[0].strip("['\"") for name in traced.input_names]
    names = dict.fromkeys(n for n in signature.parameters if n in used)
    values = {n: graph.placeholder(n) for n in names}
    graph.output(graph.call_module("planned_step", (), values))
    return graph


def _tensor_key(t: torch.Tensor) -> tuple[Any, ...]:
    return t.shape, t.dtype, t.device, t.requires_grad, t.stride()


def _state_key(t: torch.Tensor) -> tuple[Any, ...]:
    return t.shape, t.dtype, t.device, t.requires_grad


def _describe(key: Any) -> str:
    shape, dtype, device, requires_grad, *_ = key
    gradient = ", requires_grad" if requires_grad else ""
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')} on {device}{gradient}"


def _template_key(template: Template) -> str:
    if isinstance(template, Tree):
        return f"{template.spec}({', '.join(_template_key(c) for c in template.children)})"
    if isinstance(template, Constant):
        return repr(template.value)
    return str([path for path, _ in slots(template)])


def _autocast_key() -> tuple[Any, ...]:
    return tuple(
        (kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
    )
