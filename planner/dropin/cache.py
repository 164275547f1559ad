"""What a call of a planned model does: find the plan that holds for it, make one where none does, run it."""

from __future__ import annotations

import os
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from passes._torch import active_saving_hooks, swapped_state
from passes.errors import InputMismatch
from passes.run.random import set_rng_state
from passes.trace.arguments import argument_names, call_signature, run_model, state_entries, state_tensors
from passes.trace.capture import Traced
from passes.trace.layouts import Layouts, gradient_key
from passes.trace.structure import Template, flatten, unflatten
from planner.pipeline import Planned
from solvers.errors import PlannerError

from .plan_key import (
    Key,
    autocast_key,
    describe_autocast,
    describe_tensor,
    settings,
    state_key,
    structure_difference,
    template_key,
    tensor_key,
)

CACHE_SIZE = 8
Replan = Callable[[nn.Module, Any, "tuple[str, ...] | None"], Planned]


@dataclass(frozen=True)
class HandedOver:
    """Plans of one model for a copy of it: as `PlanState` has them, with the copy's `constants` found at `places`."""

    cache: OrderedDict[Key, Planned]
    first: Key
    latest: Planned
    outdated: frozenset[Key]
    differentiated: tuple[str, ...] | None
    places: tuple[tuple[str, str], ...]
    constants: tuple[Any, ...]


class PlanState:
    """Everything behind a `PlannedModule`: the cache of planned steps and the checks before each call."""

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Any] | None, replan: Replan, on_new_shape: str
    ) -> None:
        self.model, self.loss_fn, self.replan, self.on_new_shape = model, loss_fn, replan, on_new_shape
        self.signature = call_signature(model, loss_fn)
        self.traced_forward = model.__dict__.get("forward")
        self.entries = tuple(state_entries(model))
        self.cache: OrderedDict[Key, Planned] = OrderedDict()
        self.differentiated: tuple[str, ...] | None = None
        self.outdated: set[Key] = set()
        self.handed: HandedOver | None = None  # keeps the constants alive whose ids the keys hold
        self.unplanned = False
        self.noticed_hooks = False

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
            inputs=(template_key(template), *(tensor_key(t) for t in tensors)),
            state=tuple(map(state_key, state)),
            modules=(*settings(self.model), *self._constant_ids()),
            autocast=autocast_key(),
            template=template,
        )

    def run(self, bound: Mapping[str, Any], plain: Callable[[Mapping[str, Any]], Any]) -> Any:
        """Run the step planned for such a call, planning it first where that is asked for; else `plain`."""
        tensors, template = flatten(dict(bound))
        state = state_tensors(self.model, self.entries)
        key = self._variant(self.key(state, tensors, template), tensors)
        planned = self.cache.get(key)
        if planned is not None:
            self.cache.move_to_end(key)
        if planned is None or key in self.outdated:
            planned = self._missing(key, bound)
            if planned is None:
                return plain(bound)
        return self._execute(planned, [*state, *tensors])

    def _variant(self, key: Key, tensors: Sequence[torch.Tensor]) -> Key:
        """The key of the plan whose guard holds for these inputs, or of the one that is still to be made."""
        while (planned := self.cache.get(key)) is not None:
            guard = planned.prepared.traced.guard
            if guard is None or guard.holds(tensors):
                return key
            key = replace(key, variant=key.variant + 1)
        return key

    def _execute(self, planned: Planned, primals: list[torch.Tensor]) -> Any:
        traced = planned.prepared.traced
        _check_materialized(traced, primals)
        self._notice_hooks()
        results = planned.step(primals, _Fallback(self, traced, planned.prepared.layouts))
        leaves = [primals[leaf.input] if leaf.input is not None else results[leaf.index] for leaf in traced.outputs]
        return unflatten(traced.output_template, leaves)

    def _notice_hooks(self) -> None:
        """Say once that hooks on saved tensors have no effect on a planned step."""
        if self.noticed_hooks or not (owner := active_saving_hooks()):
            return
        self.noticed_hooks = True
        warnings.warn(
            f"a planned module is called under {owner}, which saves no memory there: a planned step holds its saved "
            "tensors itself, and the numbers stay right. Plan the module that contains this one, or leave the wrapper "
            "out (torch.utils.checkpoint would also run the planned forward a second time).",
            stacklevel=_user_frame(),
        )

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
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t), self.set_aside():
            planned = self.replan(self.model, dict(bound), self.differentiated)
        self.add(key, planned)
        return planned

    def _difference(self, key: Key) -> InputMismatch:
        known = self.first
        hint = 'on_new_shape="replan" plans such calls, "eager" runs them unplanned.'
        names = argument_names(self.latest.prepared.traced.input_template)
        if key.inputs[0] != known.inputs[0]:
            return InputMismatch(*structure_difference(key.template, known.template), hint)
        for name, got, expected in zip(names, key.inputs[1:], known.inputs[1:], strict=False):
            if got != expected:
                return InputMismatch(name, describe_tensor(got), describe_tensor(expected), hint)
        for entry, got, expected in zip(self.entries, key.state, known.state, strict=False):
            if got != expected:
                return InputMismatch(entry.name, describe_tensor(got), describe_tensor(expected), hint)
        if key.variant:
            asked = self.latest.prepared.traced.guard
            answers = "" if asked is None else f" {list(asked.answers)}"
            return InputMismatch("(values)", "other answers to the model's `if`s", f"the sample's{answers}", hint)
        if key.autocast != known.autocast:
            return InputMismatch("(autocast)", describe_autocast(key), describe_autocast(known), hint)
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

    def plain(self, bound: Mapping[str, Any]) -> Any:
        """The plain step's forward."""
        with self.set_aside():
            return run_model(self.model, self.loss_fn, self.signature, bound)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Let `model(...)` be the model's own forward in the block, where the plan was applied to it."""
        own, before = self.model.__dict__, self.unplanned
        applied = own.pop("forward") if getattr(own.get("forward"), "runs_plan", False) else None
        if applied is not None and applied.previous is not None:
            own["forward"] = applied.previous
        self.unplanned = True
        try:
            yield
        finally:
            self.unplanned = before
            if applied is not None:
                own["forward"] = applied

    def hand_over(self, constants: tuple[Any, ...]) -> HandedOver:
        """The plans for a copy of the model, whose constants are `constants`."""
        # Plans made under constants that the model no longer has stay behind: their keys could not be told apart.
        own, count = self._constant_ids(), len(self.constants)
        ids = tuple(map(id, constants))
        keys = {k: _with_constants(k, ids) for k in self.cache if k.modules[len(k.modules) - count :] == own}
        return HandedOver(
            cache=OrderedDict((mine, self.cache[theirs]) for theirs, mine in keys.items()),
            first=_with_constants(self.first, ids),
            latest=self.latest,
            outdated=frozenset(mine for theirs, mine in keys.items() if theirs in self.outdated),
            differentiated=self.differentiated,
            places=self.places(),
            constants=constants,
        )

    def around(self, model: nn.Module, handed: HandedOver) -> PlanState:
        """The state of `model`, to which plans were handed over."""
        new = PlanState(model, self.loss_fn, self.replan, self.on_new_shape)
        modules = dict(model.named_modules())
        new.constants = [(modules[path], name) for path, name in handed.places]
        new.signature, new.first, new.latest, new.handed = self.signature, handed.first, handed.latest, handed
        new.cache, new.outdated = OrderedDict(handed.cache), set(handed.outdated)
        new.differentiated = handed.differentiated
        return new

    def places(self) -> tuple[tuple[str, str], ...]:
        """Module path and attribute of each constant."""
        paths = {id(module): path for path, module in self.model.named_modules()}
        return tuple((paths[id(module)], name) for module, name in self.constants)

    def constants_of(self, model: nn.Module) -> tuple[Any, ...]:
        """What another instance has in the places of the constants."""
        modules = dict(model.named_modules())
        return tuple(modules[path].__dict__.get(name) for path, name in self.places())

    def constant_values(self) -> tuple[Any, ...]:
        """The plain tensors of the model's modules that the plans hold as constants."""
        return tuple(module.__dict__.get(name) for module, name in self.constants)

    def _constant_ids(self) -> tuple[int, ...]:
        return tuple(map(id, self.constant_values()))

    def expect(self, paths: tuple[str, ...]) -> None:
        """From now on plan for gradients of these outputs."""
        self.differentiated = paths
        self.outdated.update(self.cache)


class _Fallback:
    """Backward from other outputs than planned for, or with gradients laid out in another way.

    The plain model replays the forward; later calls are replanned.
    """

    def __init__(self, state: PlanState, traced: Traced, layouts: Layouts) -> None:
        self.state, self.traced, self.layouts = state, traced, layouts

    def __call__(
        self,
        primals: Sequence[torch.Tensor],
        generators: dict[str, torch.Generator],
        gradients: dict[int, torch.Tensor],
    ) -> list[Any]:
        wanted = {leaf.index: leaf for leaf in self.traced.outputs if leaf.index in gradients}
        paths = tuple(leaf.path for leaf in wanted.values())
        if not paths:
            return [None] * len(primals)
        expected = paths == tuple(leaf.path for leaf in self.traced.outputs if leaf.differentiated)
        new = not expected or self._learn({wanted[i].path: g for i, g in gradients.items()})
        warnings.warn(
            f"backward started from {', '.join(p or 'the output' for p in paths)}"
            f"{' with a gradient in other strides' if expected else ''}, which the plan did not expect: this step "
            "replays the plain forward (correct, but not under the budget); "
            f"{'later calls are planned for it' if new else 'so will others, as a plan is for one set of strides'}.",
            stacklevel=2,
        )
        result = self._replay(primals, generators, gradients)
        if new:
            self.state.expect(paths)
        return result

    def _learn(self, gradients: Mapping[str, torch.Tensor]) -> bool:
        """Plan for gradients in these strides from now on; not where others were learned before."""
        keys = {gradient_key(path, g): tuple(g.stride()) for path, g in gradients.items()}
        if any(key in self.layouts for key in keys):
            return False
        self.layouts.update(keys)
        return True

    def _replay(
        self,
        primals: Sequence[torch.Tensor],
        generators: dict[str, torch.Generator],
        gradients: dict[int, torch.Tensor],
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
                set_rng_state(generator.get_state(), device)
            outputs, _ = flatten(state.plain(unflatten(traced.input_template, leaves[count:])))
        indices = [leaf.index for leaf in traced.outputs]
        started = [(o, gradients[i]) for o, i in zip(outputs, indices, strict=True) if i in gradients]
        inputs = [t for t in leaves if t.requires_grad]
        found = iter(torch.autograd.grad([o for o, _ in started], inputs, [g for _, g in started], allow_unused=True))
        return [next(found) if t.requires_grad else None for t in leaves]


def _with_constants(key: Key, ids: tuple[int, ...]) -> Key:
    return replace(key, modules=(*key.modules[: len(key.modules) - len(ids)], *ids))


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


_PLACES = (os.path.dirname(__file__), torch.__file__)
_LIBRARY = tuple(os.path.join(os.path.dirname(os.path.abspath(f)), "") for f in _PLACES)
