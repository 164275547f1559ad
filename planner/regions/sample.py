"""sample: the step run hollow on the sample: its regions leave sizes alone, the code between them is observed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from passes._torch import dense_parts, is_compiled, local_part, swapped_state
from passes.device import empty_cache, kind_of
from passes.memory import place, without_collections
from passes.profile import Counting
from passes.run._torch import next_node, under_autocast
from passes.trace.arguments import StateEntry, call_signature, lend_attributes, run_model, state_entries, state_tensors
from passes.trace.binding import call_bound, names_given
from passes.trace.capture import OutputLeaf, casts_kept, choose_differentiated
from passes.trace.given import left_alone
from passes.trace.gradient_layouts import gradient_strides
from passes.trace.hidden import trained_tensors
from passes.trace.layouts import BACKWARD_AUTOCAST, Layouts
from passes.trace.refuse import has_sharded, is_sharded, refuse_sparse
from passes.trace.state import Snapshot as Reached
from passes.trace.structure import Bound, flatten, held_objects, unflatten
from passes.trace.templates import slots
from passes.trace.value_guards import KnownValues
from planner.check.restore import Generators, Snapshot, gradients_aside, hooks_aside, put_back, strangers_kept
from planner.ranks.sharded import (
    gathered_gradient_bytes,
    gathered_gradients_aside,
    of_last_micro_batch,
    scattered,
    without_reducing,
    without_talking,
)

from .find import Candidates
from .hollow import Hollow
from .hollow_forward import hollowed
from .losses import LOSS, looking_at_losses
from .parts import Parts
from .sums import refuse_sums
from .writes import undone_writes


@dataclass(frozen=True)
class Sample:
    """The step that is run hollow.

    Attributes:
        gradients: "fresh", "accumulated" or "consumed"; see `auto_checkpoint`.
        differentiated: paths of the outputs that `backward` starts from; None chooses.
        draws: the states that all generators begin each run in.
        written: parameters (and inputs, by their numbers) that the step changes in place, as its first run shows:
            later ones have copies.
    """

    model: nn.Module
    loss_fn: Callable[..., Any] | None
    arguments: Mapping[str, Any]
    keep_outputs: bool
    gradients: str
    device: torch.device
    differentiated: tuple[str, ...] | None
    draws: Mapping[str, Any]
    written: set[str] = field(default_factory=set)

    @cached_property
    def reached(self) -> Reached:
        """What Python state the step can change, in functions' globals, classes and arguments, too."""
        return Reached(self.model, self.loss_fn, held_objects(self.arguments), draws=False)

    def run(self, candidates: Candidates, parts: Parts, counting: Counting | None = None) -> Hollow:
        """One hollow run; the model, its gradients and all generators are left as they were.

        Args:
            counting: adds up what glue costs. Ops that are looked at may allocate otherwise: it shows no events.
        """
        kept = casts_kept(torch.is_autocast_cache_enabled())  # a copy of what one rank gathers alone is a wrong one
        alone = nullcontext() if has_sharded(self.model) else self.reached.iterators_held()
        # A module that is compiled in place runs in eager: under a mode Dynamo gives up its code for good.
        compiled = any(map(is_compiled, self.model.modules()))
        as_it_is = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
        with (
            scattered(self.model), gathered_gradients_aside(self.model), of_last_micro_batch(self.model), kept, alone,
            as_it_is,
        ):  # fmt: skip
            if counting is not None or not kind_of(self.device).caches:
                return self._run(candidates, parts, counting)
            empty_cache(self.device)
            first = self._run(candidates, parts, None)  # in which products ask for workspaces, and keep them
            hollow = self._run(candidates, parts, None)
            hollow.again = hollow.again or first.again
            hollow.tell_kept(first)
            return hollow

    def _run(self, candidates: Candidates, parts: Parts, counting: Counting | None) -> Hollow:
        entries = state_entries(self.model)
        originals = state_tensors(self.model, entries)
        inputs, template = flatten(dict(self.arguments))
        generators = Generators.of([*originals, *inputs])
        snapshot = Snapshot([self.model, self.loss_fn], originals)
        sharded = has_sharded(self.model)
        own = self._stand_ins(entries, originals, sharded, snapshot)
        copied = [t.detach().clone() if str(i) in self.written else t.detach() for i, t in enumerate(inputs)]
        without_data: AbstractContextManager[Any] = nullcontext()
        if self.device.type == "meta":
            own = {name: t.to("meta") for name, t in own.items()}
            real, copied = copied, [t.to("meta") for t in copied]
            without_data = _without_data(copied, real)
        inputs = [c.requires_grad_(t.requires_grad) for c, t in zip(copied, inputs, strict=True)]
        modules, every = candidates.chosen, (*own.values(), *inputs)
        given = [part.untyped_storage() for t in every for part in dense_parts(t)]  # held: forward may replace some
        hollow = Hollow(self.model, given, parts, self.device, candidates)
        swapped = {name: t for (name, t), o in zip(own.items(), originals, strict=True) if t is not o}
        hollow.stand_ins = {id(o): t for t, o in zip(own.values(), originals, strict=True) if t is not o}
        hollow.own = frozenset(map(id, own.values()))
        alone = without_talking(self.model, parts.heard, listen=not parts.known)
        parameters = {e.name: own[e.name] for e in entries if e.is_parameter}  # of buffers there are copies
        looked_at = {**parameters, **{str(i): t for i, t in enumerate(inputs)}}
        first_look = nullcontext() if parts.known else undone_writes(looked_at, self.written)
        states = put_back(snapshot, generators), swapped_state(self.model, swapped)
        consumes = _consume if self.gradients == "consumed" else None
        hooks = hooks_aside(own.values(), consumes) if sharded else nullcontext()  # others are stand-ins without any
        # Of others there are stand-ins: another thread's backward may go on.
        gradients = gradients_aside(self.model.parameters()) if sharded else nullcontext()
        with gradients, hooks, states[0], states[1], alone, without_data, first_look:
            generators.set(self.draws)
            if not self.model.training:
                self.model.train()
            signature, since = call_signature(self.model, self.loss_fn), next_node()

            def step(hollow: Hollow = hollow) -> None:
                with left_alone(bound := Bound(unflatten(template, inputs), names_given(self.arguments))):
                    self._step(hollow, signature, bound, every, since)

            if not sharded:
                self._prepare_gradients([p for p in own.values() if p.requires_grad and p.is_leaf])
            elif self.gradients == "accumulated":
                first = Hollow(self.model, given, parts, self.device, candidates)
                hollow.sizes |= self._first_sizes(first, step, modules)
            with closing(hollow), hollowed(hollow, modules), looking_at_losses(modules.get(LOSS)):
                self._observe(hollow, step, counting)
            for parameter in own.values():
                parameter.grad = None
        return hollow

    def _first_sizes(self, first: Hollow, step: Callable[[Hollow], None], modules: Mapping[str, nn.Module]) -> set[int]:
        """Sizes in a micro-batch before this one: what is left of it is told by them from what this one makes."""
        alone = without_reducing(self.model)
        with closing(first), hollowed(first, modules), looking_at_losses(modules.get(LOSS)), alone:
            kind_of(self.device).allocations(lambda: step(first), self.device)
        return set(first.sizes)

    def _stand_ins(
        self, entries: Sequence[StateEntry], originals: Sequence[torch.Tensor], sharded: bool, snapshot: Snapshot
    ) -> dict[str, torch.Tensor]:
        """What the step has in the place of parameters and buffers; of sharded ones the parameters themselves.

        A buffer of which a view is kept stays in its memory, and is put back: a copy's changes would not show there.
        """
        viewed = {where for t, _ in snapshot.tensors for where in _places(t)}
        made = {}
        for e, t in zip(entries, originals, strict=True):
            if sharded and e.is_parameter:
                made[e.name] = t
            elif not e.is_parameter and not viewed.isdisjoint(_places(t)):
                snapshot.keep(t)
                made[e.name] = lend_attributes(t, t.detach().requires_grad_(t.requires_grad))
            else:
                made[e.name] = _stand_in_of(t, e.is_parameter, e.name in self.written)
        return made

    def _observe(self, hollow: Hollow, step: Callable[[], None], counting: Counting | None) -> None:
        left = frozenset(hollow.sizes)
        hollow.accumulated_bytes = gathered_gradient_bytes(self.model)
        if counting is None:
            events = without_collections(lambda: kind_of(self.device).allocations(step, self.device))
            hollow.events = [event for event in events if -event[1] not in left]
            ordinary = hollow.ordinary_sizes()
            hollow.parts.ordinary |= ordinary
            hollow.again = hollow.again or not hollow.sizes.isdisjoint(ordinary)  # the next run has others
        else:
            hollow.counting = counting
            with counting:
                step()

    def _prepare_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        for parameter in parameters:
            if self.gradients == "accumulated":
                parameter.grad = torch.zeros_like(parameter)
                parameter.register_hook(refuse_sparse)
            elif self.gradients == "consumed":
                parameter.register_post_accumulate_grad_hook(_consume)

    def _step(self, hollow: Hollow, signature: Any, bound: Any, own: Sequence[torch.Tensor], since: int) -> None:
        if is_sharded(self.model) and self.loss_fn is None:
            output = call_bound(self.model, signature, bound)  # with its hooks, which gather its own parameters
        else:
            output = run_model(self.model, self.loss_fn, signature, bound)
        leaves, template = flatten(output)
        paths: dict[int, str] = {}
        for path, i in slots(template):
            paths.setdefault(i, path)
        for path, tensor in trained_tensors(template):  # in objects that no step could return
            paths[len(leaves)] = path
            leaves.append(tensor)
        wanted = choose_differentiated(template, leaves, paths, self.differentiated)
        hollow.outputs = [
            (OutputLeaf(paths[i], None, i, t.requires_grad, i in wanted), local_part(t).detach().to("meta"))
            for i, t in enumerate(leaves)
        ]
        chosen, layouts = {paths[i]: leaves[i] for i in sorted(wanted)}, hollow.parts.layouts
        hollow.again = refuse_sums(hollow, leaves, wanted) or hollow.again
        if not self.keep_outputs:
            output, leaves = None, []
        hollow.mark("backward")
        starts, started = [_start_of_backward(t, path, layouts) for path, t in chosen.items()], list(chosen.values())
        sharded = has_sharded(self.model)  # what hooks gather has gradients of its own
        if BACKWARD_AUTOCAST not in layouts:
            torch.clear_autocast_cache()  # as at its end, which comes before the backward
        ids = set(map(id, own))
        usual = nullcontext(torch.autograd.backward)
        others = usual if sharded else strangers_kept(started, lambda leaf: id(leaf) in ids, since)
        with others as backward, under_autocast(layouts.get(BACKWARD_AUTOCAST, ())):
            backward(started, starts)
        hollow.mark("end")
        hollow.late = True


@contextmanager
def _without_data(inputs: Sequence[torch.Tensor], sample: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let new tensors be on the meta device in the block, and values of the sample be known as they are to a trace."""
    with torch.device("meta"), KnownValues(inputs, sample):
        yield


def _start_of_backward(output: torch.Tensor, path: str, layouts: Layouts) -> torch.Tensor | None:
    """The gradient that the backward starts from, in the strides in which one was seen to come."""
    if output.dim() == 0:
        return None
    strides = gradient_strides(layouts, path, output)
    if strides is None:
        return torch.ones_like(output)
    last = sum((size - 1) * stride for size, stride in zip(output.shape, strides, strict=True))
    return output.new_ones(last + 1).as_strided(output.shape, strides)


def _places(tensor: torch.Tensor) -> set[int]:
    return {place(part.untyped_storage()) for part in dense_parts(tensor) if part.nbytes}


def _consume(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _stand_in_of(tensor: torch.Tensor, is_parameter: bool, written: bool) -> torch.Tensor:
    """A parameter's data without its hooks and gradient; a copy of what the step may change."""
    data = tensor.detach() if is_parameter and not written else tensor.detach().clone()
    if is_parameter:
        return lend_attributes(tensor, nn.Parameter(data, tensor.requires_grad))
    return lend_attributes(tensor, data.requires_grad_(tensor.requires_grad))
