"""The drop-in module: the user's own model, with the planned step in place of its training forward."""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from passes._torch import swapped_state
from passes.capture import (
    Traced,
    argument_names,
    bind_call,
    call_signature,
    run_model,
    state_entries,
    state_tensors,
)
from passes.errors import InputMismatch
from passes.random import set_rng_state
from passes.structure import Constant, Template, Tree, flatten, slots, unflatten
from solvers.errors import PlannerError

from .pipeline import Planned

CACHE_SIZE = 8
Replan = Callable[[nn.Module, Any, "tuple[str, ...] | None"], Planned]


@dataclass(frozen=True)
class Key:
    """What a plan is valid for: everything the trace took as given."""

    inputs: tuple[Any, ...]
    state: tuple[Any, ...]
    modules: tuple[Any, ...]
    autocast: tuple[Any, ...]
    variant: int = 0  # counts plans that differ in the answers to what the model asks about its inputs' values


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
        self._plan_state.start(sample, planned)
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

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PlannerError(
            "a planned module is not pickled: it holds generated code. Save the weights (state_dict) and the plan "
            "(plan.save), and load with Plan.load(path, model, sample)."
        )

    # What there is to look at -----------------------------------------------------------------------------------

    @property
    def forward_graph(self) -> fx.GraphModule:
        """The planned forward (of the most recently planned shapes)."""
        return self._plan_state.latest.step.forward

    @property
    def backward_graph(self) -> fx.GraphModule:
        """The planned backward, with the recomputes in it."""
        return self._plan_state.latest.step.backward

    def print_readable(self, print_output: bool = True, *args: Any, **kwargs: Any) -> str:
        """The call graph and both halves as source."""
        parts = [super().print_readable(print_output=False)]
        halves = (self.forward_graph, self.backward_graph)
        parts += [half.print_readable(False, *args, **kwargs) for half in halves]
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
        return self.__dict__["owner"]._plan_state.run(bound)


class _PlanState:
    """Everything behind a `PlannedModule`: the cache of planned steps and the checks before each call."""

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Any] | None, replan: Replan, on_new_shape: str
    ) -> None:
        self.model, self.loss_fn, self.replan, self.on_new_shape = model, loss_fn, replan, on_new_shape
        self.signature = call_signature(model, loss_fn)
        self.entries = tuple(state_entries(model))
        self.cache: OrderedDict[Key, Planned] = OrderedDict()
        self.differentiated: tuple[str, ...] | None = None
        self.outdated: set[Key] = set()

    def start(self, bound: Mapping[str, Any], planned: Planned) -> None:
        """Remember the first plan, made for calls that look like `bound`."""
        self.constants = _constant_attributes(self.model, planned)
        self.first = self.key(state_tensors(self.model, self.entries), *flatten(dict(bound)))
        self.add(self.first, planned)

    def add(self, key: Key, planned: Planned) -> None:
        """Remember a plan; the one used longest ago is dropped when there are too many."""
        self.latest = self.cache[key] = planned
        self.outdated.discard(key)
        while len(self.cache) > CACHE_SIZE:
            self.outdated.discard(self.cache.popitem(last=False)[0])

    def key(self, state: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], template: Template) -> Key:
        """What a call with these parameters, buffers and inputs needs a plan for."""
        return Key(
            inputs=(_template_key(template), *(_tensor_key(t) for t in tensors)),
            state=tuple(map(_state_key, state)),
            modules=(*_settings(self.model), *(id(module.__dict__.get(n)) for module, n in self.constants)),
            autocast=_autocast_key(),
        )

    def run(self, bound: Mapping[str, Any]) -> Any:
        """Run the step planned for such a call, planning it first where that is asked for."""
        tensors, template = flatten(dict(bound))
        state = state_tensors(self.model, self.entries)
        key = self._variant(self.key(state, tensors, template), tensors)
        planned = self.cache.get(key)
        if planned is not None:
            self.cache.move_to_end(key)
        if planned is None or key in self.outdated:
            planned = self._missing(key, bound)
            if planned is None:
                return run_model(self.model, self.loss_fn, self.signature, bound)
        return self._execute(planned, [*state, *tensors], bound)

    def _variant(self, key: Key, tensors: Sequence[torch.Tensor]) -> Key:
        """The key of the plan whose guard holds for these inputs, or of the one that is still to be made."""
        while (planned := self.cache.get(key)) is not None:
            guard = planned.prepared.traced.guard
            if guard is None or guard.holds(tensors):
                return key
            key = replace(key, variant=key.variant + 1)
        return key

    def _execute(self, planned: Planned, primals: list[torch.Tensor], bound: Mapping[str, Any]) -> Any:
        traced = planned.prepared.traced
        _check_materialized(traced, primals)
        results = planned.step(primals, _Fallback(self, traced, bound))
        leaves = [primals[leaf.input] if leaf.input is not None else results[leaf.index] for leaf in traced.outputs]
        return unflatten(traced.output_template, leaves)

    def _missing(self, key: Key, bound: Mapping[str, Any]) -> Planned | None:
        if key not in self.outdated:
            mismatch = self._difference(key)
            if self.on_new_shape == "error":
                raise mismatch
            if self.on_new_shape == "eager":
                warnings.warn(f"planned step not used: {mismatch}", stacklevel=_user_frame())
                return None
            warnings.warn(f"planning anew: {mismatch}", stacklevel=_user_frame())
        # A surrounding torch.utils.checkpoint counts the tensors that autograd saves: tracing must not add to them.
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            planned = self.replan(self.model, dict(bound), self.differentiated)
        self.add(key, planned)
        return planned

    def _difference(self, key: Key) -> InputMismatch:
        known = self.first
        hint = 'on_new_shape="replan" plans such calls, "eager" runs them unplanned.'
        names = argument_names(next(iter(self.cache.values())).prepared.traced.input_template)
        if key.inputs[0] != known.inputs[0]:
            return InputMismatch("(structure)", key.inputs[0], known.inputs[0], hint)
        for name, got, expected in zip(names, key.inputs[1:], known.inputs[1:], strict=False):
            if got != expected:
                return InputMismatch(name, _describe(got), _describe(expected), hint)
        for entry, got, expected in zip(self.entries, key.state, known.state, strict=False):
            if got != expected:
                return InputMismatch(entry.name, _describe(got), _describe(expected), hint)
        if key.variant:
            asked = self.latest.prepared.traced.guard
            answers = "" if asked is None else f" {list(asked.answers)}"
            return InputMismatch("(values)", "other answers to the model's `if`s", f"the sample's{answers}", hint)
        if key.autocast != known.autocast:
            return InputMismatch("(autocast)", _describe_autocast(key), _describe_autocast(known), hint)
        return InputMismatch("(modules)", *self._changed_setting(key.modules, known.modules), hint)

    def _changed_setting(self, got: tuple[Any, ...], expected: tuple[Any, ...]) -> tuple[str, str]:
        for (name, module), now, then in zip(self.model.named_modules(), got, expected, strict=False):
            if now != then:
                place, kind = name or "the model", type(module).__name__
                changed = [k for k, v in now[1:] if (k, v) not in then[1:]] if now[0] == then[0] else []
                what = ", ".join(f"{k}={dict(now[1:])[k]!r}" for k in changed) or "other layers, hooks or attributes"
                was = ", ".join(f"{k}={dict(then[1:]).get(k)!r}" for k in changed) or "those at planning"
                return f"{place} ({kind}) with {what}", was
        return "other layers or tensor attributes", "those at planning"

    def rebuild(self, model: nn.Module) -> PlannedModule:
        """The same plans around another instance of the model."""
        module = PlannedModule(model, self.latest, {}, self.replan, self.loss_fn, self.on_new_shape)
        own = module._plan_state
        own.cache, own.latest, own.differentiated = OrderedDict(self.cache), self.latest, self.differentiated
        own.first, own.outdated = self.first, set(self.outdated)
        return module

    def expect(self, paths: tuple[str, ...], bound: Mapping[str, Any]) -> None:
        """From now on plan for gradients of these outputs."""
        self.differentiated = paths
        self.outdated.update(self.cache)


class _Fallback:
    """Backward from other outputs than planned for: the plain model replays the forward; later calls are replanned."""

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
        indices = [leaf.index for leaf in traced.outputs]
        started = [(o, gradients[i]) for o, i in zip(outputs, indices, strict=True) if i in gradients]
        inputs = [t for t in leaves if t.requires_grad]
        found = iter(torch.autograd.grad([o for o, _ in started], inputs, [g for _, g in started], allow_unused=True))
        return [next(found) if t.requires_grad else None for t in leaves]


def _call_graph(signature: Any, traced: Traced) -> fx.Graph:
    """Placeholders under the model's own argument names, one call of the planned step, its output."""
    graph = fx.Graph()
    used = [name.split("]")[0].strip("['\"") for name in traced.input_names]
    names = dict.fromkeys(n for n in signature.parameters if n in used)
    values: dict[str, Any] = {n: graph.placeholder(n) for n in names}
    graph.output(graph.call_module("planned_step", (), values))
    return graph


def _tensor_key(t: torch.Tensor) -> tuple[Any, ...]:
    return t.shape, t.dtype, _home(t), t.requires_grad, t.stride()


def _state_key(t: torch.Tensor) -> tuple[Any, ...]:
    return t.shape, t.dtype, _home(t), t.requires_grad


def _home(t: torch.Tensor) -> torch.device:
    """Where the tensor is, or will be: a plan for a model on the meta device is one for the CPU."""
    return torch.device("cpu") if t.device.type == "meta" else t.device


def _settings(model: nn.Module) -> Iterator[tuple[Any, ...]]:
    """What decides the Python path through each module: its type, plain attributes (dropout's `p`, ...) and hooks."""
    whole = model.training  # a model handed over in eval mode is planned in training mode, with all its modules
    for module in model.modules():
        plain = [(k, v) for k, v in module.__dict__.items() if type(v) in _PLAIN and k != "training"]
        hooks = sum(len(module.__dict__[k]) for k in _HOOKS)
        yield type(module), ("training", not whole or module.training), ("hooks", hooks), *plain


_PLAIN = frozenset({bool, int, float, str, type(None)})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _constant_attributes(model: nn.Module, planned: Planned) -> list[tuple[nn.Module, str]]:
    """Where the modules keep the plain tensors that the traced graph holds as constants."""
    root = planned.prepared.traced.graph_module
    held = {id(getattr(root, str(n.target), None)) for n in root.graph.find_nodes(op="get_attr")}
    return [(m, k) for m in model.modules() for k, v in m.__dict__.items() if id(v) in held]


def _check_materialized(traced: Traced, primals: Sequence[torch.Tensor]) -> None:
    for position, primal in enumerate(primals):
        if primal.device.type == "meta":
            name = [*(e.name for e in traced.state), *argument_names(traced.input_template)][position]
            raise PlannerError(
                f"{name!r} is on the meta device, so there is no data to compute with: a plan can be made from such a "
                "model, but to run it materialise it first, with model.to_empty(device=...) and load_state_dict."
            )


def _user_frame() -> int:
    """The `stacklevel` of the first frame outside this file and torch."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARY):
        frame, level = frame.f_back, level + 1
    return level


_LIBRARY = (__file__, os.path.dirname(os.path.abspath(torch.__file__)))


def _describe(key: Any) -> str:
    shape, dtype, device, requires_grad, *_ = key
    gradient = ", requires_grad" if requires_grad else ""
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')} on {device}{gradient}"


def _template_key(template: Template) -> str:
    if isinstance(template, Tree):
        return f"{template.spec}({', '.join(_template_key(c) for c in template.children)})"
    if isinstance(template, Constant):
        return repr(template.value)
    return str(slots(template))


def _describe_autocast(key: Key) -> str:
    on = [f"autocast to {str(dtype).removeprefix('torch.')} on {kind}" for kind, dtype in key.autocast]
    return " and ".join(on) or "no autocast"


def _autocast_key() -> tuple[Any, ...]:
    return tuple(
        (kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
    )
