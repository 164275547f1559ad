"""One step to be checked: what it starts from, and how its plain and its planned form are run and observed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from passes._torch import storage_of, swapped_state
from passes.exclusive import interrupt_point
from passes.memory import place, span
from passes.run._torch import next_node, under_autocast
from passes.run.step import OtherAnswer
from passes.trace.arguments import argument_names, call_signature, run_model, state_tensors
from passes.trace.binding import names_given
from passes.trace.capture import Traced
from passes.trace.first_call import Remembers
from passes.trace.given import all_outputs, filled, left_alone, targets_of
from passes.trace.preparing import BUFFER, fill
from passes.trace.refuse import has_sharded
from passes.trace.settings import tensors_set
from passes.trace.state import Snapshot as Reached
from passes.trace.structure import Bound, flatten, held_objects, unflatten
from passes.trace.templates import constants, slots
from planner.decided import Decided
from planner.dropin.regions import regions_of, running_regions

from .compare import Observed, unequal
from .restore import Generators, Snapshot, put_back, strangers_kept
from .twins import nudged, twins, varied

Tensors = list[torch.Tensor]
Backward = Callable[[Any, Sequence[Any]], Any]  # of an output, and of what forward changed in its arguments
# (tensors, step counted from 0, backward) -> what `backward` gave for the output
Run = Callable[[Tensors, int, Backward], Any]


class Case:
    """A model and the arguments of one call. Every run starts from the same state, on copies of its own.

    Attributes:
        originals: the user's own parameters, buffers and inputs, in the order of the step's primals; `names` theirs.
        offload: whether what is observed, and what the plain step saves, waits on the host.
        changed: attributes that the latest run changed, before they were put back.
        repeated: buffers that the plain step alone updates twice, which are not compared.
    """

    def __init__(
        self, model: nn.Module, traced: Traced, bound: Mapping[str, Any], loss_fn: Callable[..., Any] | None
    ) -> None:
        self.model, self.traced, self.loss_fn, self.offload = model, traced, loss_fn, False
        self.signature = call_signature(model, loss_fn)
        inputs, self.template = flatten(dict(bound))
        self.by_name = names_given(bound)
        self.count = len(traced.state)
        self.names = [*(e.name for e in traced.state), *argument_names(self.template)]
        self.originals = [*state_tensors(model, traced.state), *inputs]
        roots = [model, loss_fn, *constants(self.template)]
        self.snapshot = Snapshot(roots, self.originals)
        self.reached = None if has_sharded(model) else Reached(model, loss_fn, held_objects(bound), draws=False)
        self.remembers = False  # whether the plain step, which runs first, left anything on the model
        self.generators = Generators.of(self.originals)
        self.start = self.generators.state()
        self.batch, self.other_batch = inputs, inputs
        self.changed: list[str] = []
        self.repeated = {name for _, names in traced.repeated for name in names}

    def vary_batch(self) -> None:
        """Let the second step have other inputs, where the trace holds for them."""
        other = varied(self.batch)
        guard = self.traced.guard
        fits = guard is None or guard.holds([*self.originals[: self.count], *other])
        self.other_batch = other if fits else self.batch

    def keep_batch(self) -> None:
        """Let both steps have the same inputs."""
        self.other_batch = self.batch

    def left_as_it_was(self) -> contextlib.AbstractContextManager[None]:
        """Around everything that runs the model."""
        return put_back(self.snapshot, self.generators)

    # The two ways to run a step -----------------------------------------------------------------------------------

    def plain(self, tensors: Tensors, step: int, backward: Backward) -> Any:
        """The model's own forward, with its hooks on parameters out of reach."""
        saving = torch.autograd.graph.save_on_cpu() if self.offload else contextlib.nullcontext()
        return self._own_forward(tensors, backward, saving)

    def _own_forward(
        self, tensors: Tensors, backward: Backward, around: contextlib.AbstractContextManager[Any]
    ) -> Any:
        named = {e.name: t for e, t in zip(self.traced.state, tensors, strict=False)}
        with swapped_state(self.model, named), around:
            bound = Bound(unflatten(self.template, tensors[self.count :]), self.by_name)
            with left_alone(bound):
                targets = targets_of(self.traced.changes, bound)
                result = backward(run_model(self.model, self.loss_fn, self.signature, bound), targets)
        tensors[: self.count] = [named[e.name] for e in self.traced.state]
        return result

    def planned(self, planned: Decided) -> Run:
        """The rewritten step; one by regions is the model's own forward, around the rewritten regions."""
        if planned.runs:
            regions = regions_of(self.model, planned)
            return lambda tensors, step, backward: self._own_forward(tensors, backward, running_regions(regions))
        return lambda tensors, step, backward: self._rewritten(planned, tensors, step, backward)

    def _rewritten(self, planned: Decided, tensors: Tensors, step: int, backward: Backward) -> Any:
        if self.traced.first_call is not None and not step:
            self._remember(self.traced.first_call, tensors)
        bound = Bound(unflatten(self.template, tensors[self.count :]), self.by_name)
        with left_alone(bound):
            targets = targets_of(self.traced.changes, bound)
            result = backward(planned.run(self.model, tensors, _NoOtherBackward(), bound), targets)
        replaced = {str(s) for s in self.traced.settings}
        for i, entry in enumerate(self.traced.state):
            if f"self.{entry.name}" in replaced:
                tensors[i] = self.model.get_buffer(entry.name)
        return result

    def _remember(self, first: Remembers, tensors: Tensors) -> None:
        """Fill the buffers that a first call fills."""
        filled = {change.name: change.after for change in first.left if change.node.kind == BUFFER}
        for entry, tensor in zip(self.traced.state, tensors, strict=False):
            if entry.name in filled:
                fill(tensor, filled[entry.name])

    # A run of some steps ------------------------------------------------------------------------------------------

    def take(self, run: Run, steps: int, enough: Callable[[], bool] = lambda: False) -> list[Observed]:
        """Run and observe `steps` steps from the state that the case starts from; fewer when `enough()` says so.

        A step after the first one has another batch: where it answers forward's questions otherwise, it is left out.
        """
        self.generators.set(self.start)
        tensors = twins(self.originals)
        observed, apart = list[Observed](), _count_memory(tensors)
        try:
            if not self.model.training:
                self.model.train()
            while len(observed) < steps and not (observed and enough()):
                interrupt_point()
                if observed and _count_memory(tensors) < apart:
                    break  # what forward left is one tensor now, for which it would be planned anew
                if observed:
                    self.remembers = self.remembers or bool(self.snapshot.changed())
                    self._move_on(tensors)
                observed.append(self._observe(run, tensors, len(observed)))
        except OtherAnswer:
            if not observed:
                raise
        finally:
            self.changed = self.snapshot.changed()
            self.snapshot.restore()
            if self.reached is not None:
                self.reached.restore()
        return observed

    def _at(self, i: int, step: int) -> torch.Tensor:
        """What tensor `i` holds before a step, if no step changes it."""
        if not step:
            return self.originals[i].detach()
        if i >= self.count:
            return self.other_batch[i - self.count].detach()
        return self._nudged(i, self.originals[i])

    def _nudged(self, i: int, tensor: torch.Tensor) -> torch.Tensor:
        """A parameter or buffer as another step may find it; a forward that remembers things may have read buffers.

        One that decides which course forward takes is as it was.
        """
        if self.traced.guard is not None and i in self.traced.guard.given:
            return self.originals[i].detach()
        is_parameter = self.traced.state[i].is_parameter
        return nudged(tensor, is_parameter) if is_parameter or not self.remembers else tensor.detach()

    def _move_on(self, tensors: Tensors) -> None:
        """Between two steps: as after an optimizer's step and with another batch, the same for every run."""
        self.generators.advance()
        with torch.no_grad():
            for i, tensor in enumerate(tensors):
                tensor.grad = None
                if span(tensor) == tensor.numel():  # not expanded
                    own = i < self.count
                    tensor.copy_(self._nudged(i, tensor) if own else self._at(i, 1))

    def _observe(self, run: Run, tensors: Tensors, step: int) -> Observed:
        given, self.since = list(tensors), next_node()
        before = self.generators.state()
        torch.clear_autocast_cache()  # under autocast around both steps, the second would see the first one's weights
        found, template = run(tensors, step, lambda output, targets: self._backward(output, targets, step, tensors))
        own = {storage_of(t).data_ptr() for t in (*given, *tensors)}
        paths, output = list(found), list(found.values())
        outputs = [self._kept(t.detach(), storage_of(t).data_ptr() in own) for t in output]
        return Observed(
            structure=template,
            outputs=dict(zip(paths, outputs, strict=True)),
            requires_grad={p: t.requires_grad for p, t in zip(paths, output, strict=True)},
            memory=_memory([*self.names, *(p or "the output" for p in paths)], [*given, *output], paths),
            gradients={n: None if t.grad is None else self._kept(t.grad, False)
                       for n, t in zip(self.names, given, strict=True)},
            state={n: self._after(i, step, t) for i, (n, t) in enumerate(zip(self.names, tensors, strict=True))
                   if n not in self.repeated},
            generators_before=before,
            generators=self.generators.state(),
        )  # fmt: skip

    def _after(self, i: int, step: int, tensor: torch.Tensor) -> torch.Tensor | None:
        before = self._at(i, step)
        same = tensor.shape == before.shape and tensor.dtype == before.dtype and not unequal(tensor, before)
        return None if same else self._kept(tensor.detach(), True)

    def _kept(self, tensor: torch.Tensor, copy: bool) -> torch.Tensor:
        if self.offload:
            return tensor.to("cpu", copy=True)
        return tensor.clone() if copy else tensor

    def _backward(
        self, output: Any, targets: Sequence[Any], step: int, own: Tensors
    ) -> tuple[dict[str, torch.Tensor], Any]:
        """Start a backward where the trace did; the output's tensors and those that forward set, and its template."""
        leaves, template = flatten(output)
        paths = {i: path for path, i in reversed(slots(template))}
        found = {paths[i]: tensor for i, tensor in enumerate(leaves)}
        left = filled(tensors_set(self.traced.settings, self.model))
        others = {self.traced.outputs[i].path: t for i, t in left.items() if not any(t is leaf for leaf in leaves)}
        at = {path: leaves[i] for path, i in slots(template)} | others
        if self.traced.changes:  # forward puts some into its arguments
            every = all_outputs(output, self.traced.output_template, self.traced.changes, targets)
            at = {o.path: t for o, t in zip(self.traced.outputs, every, strict=False)} | at
        starts = [at[o.path] for o in self.traced.outputs if o.differentiated and o.path in at]
        chosen = [t for t in starts if t.requires_grad]
        if chosen:
            planned = self.traced.placeholders[self.traced.num_primals :][: len(chosen)]
            strides = [p.meta["val"].stride() for p in planned]
            tangents = [tangent(t, s, step) for t, s in zip(chosen, strides, strict=True)]
            memory = {place(storage_of(t)) for t in own}
            kept = strangers_kept(chosen, lambda leaf: place(storage_of(leaf)) in memory, self.since)
            with under_autocast(self.traced.backward_autocast), kept as backward:
                backward(chosen, tangents)
        return found | others, template


def tangent(like: torch.Tensor, strides: Sequence[int], step: int) -> torch.Tensor:
    """The gradient of an output, in the strides that are planned for: one for a loss, numbers for other outputs."""
    if like.dim() == 0:
        return torch.full((), 1 - step / 4, dtype=like.dtype, device=like.device)
    sizes = [size if stride else 1 for size, stride in zip(like.shape, strides, strict=True)]  # a sum's is expanded
    result = torch.empty_strided(sizes, strides, dtype=like.dtype, device=like.device)
    numbers = torch.arange(result.numel(), dtype=torch.float32, device=like.device).mul_(0.37).add_(step).cos_()
    return result.copy_(numbers.reshape(sizes)).expand(like.shape)


def _memory(names: list[str], tensors: Tensors, outputs: list[str]) -> dict[str, str]:
    """For each output, which come last, the first of all tensors in whose memory it is."""
    places = [storage_of(t).data_ptr() for t in tensors]
    holders = [names[places.index(p) if p else i] for i, p in enumerate(places)]
    return dict(zip(outputs, holders[len(holders) - len(outputs) :], strict=True))


class _NoOtherBackward:
    """The backward starts where the trace did: a step that expects another start has no gradients, which shows."""

    def __call__(self, primals: Sequence[torch.Tensor], *_: Any) -> list[Any]:
        return [None] * len(primals)

    def changed(self) -> str:
        """Nothing has."""
        return ""

    path = ""

    def compare(self, results: Sequence[torch.Tensor]) -> None:
        """That is what the case is for."""

    def compared(self, gradients: Mapping[int, torch.Tensor], planned: Callable[[], list[Any]] | None) -> None:
        """The same."""

    def learn(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """It is the backward that the plan is for."""

    def not_needed(self) -> None:
        """As planned."""

    def failed(self, error: Exception) -> None:
        """It is raised."""


def _count_memory(tensors: Tensors) -> int:
    """How many of the tensors have memory of their own."""
    return len({place(storage_of(tensor)) for tensor in tensors})
