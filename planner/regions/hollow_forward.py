"""hollow_forward: the forward of a region in a hollow run: it returns tensors without data, and marks when it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import fx, nn

from passes._torch import arrived, disable_current_modes, local_part
from passes.alias import Storage
from passes.memory import place
from passes.run._torch import active_saving_hooks, backward_number, under_transform
from passes.run.listeners import Listeners
from passes.run.mixing import Versions
from passes.run.tensors import overlapping
from passes.trace.arguments import call_signature, copied_forward, repeated_hook, set_forward, state_tensors
from passes.trace.binding import bind_call, call_bound
from passes.trace.capture import casts_dropped
from passes.trace.constructs import settings_of_kernels
from passes.trace.expected import unless_none
from passes.trace.given import Given, all_outputs, deliver, left_alone, targets_of
from passes.trace.settings import set_again, tensors_set
from passes.trace.structure import flatten, held_objects

from .find import children
from .hollow import Hollow, Run
from .losses import losses_set_aside
from .part import Part

_CONSTANT = "a tensor that it reads is changed in place before its backward: register it (self.register_buffer)"
HOOKED = (
    "its output {} is one from which it computes another, and code after it registers a hook on it, calls retain_grad()"
    " or asks for its gradient: a part of that would be missing"
)


class HollowForward:
    """The `forward` of a region during a hollow run."""

    runs_plan = True

    def __init__(self, hollow: Hollow, path: str, module: nn.Module) -> None:
        self.hollow, self.path, self.module = hollow, path, module
        self.previous = module.__dict__.get("forward")
        self.__signature__ = call_signature(module)

    @property
    def original(self) -> Callable[..., Any]:
        return self.previous or type(self.module).forward.__get__(self.module)

    def stands_for(self) -> Any:
        """What it is for guards (`stood_for`)."""
        return unless_none(self.previous)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copied_forward(self.module, self.previous, memo)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hollow, path = self.hollow, self.path
        number = hollow.called.get(path, 0)
        hollow.called[path] = number + 1
        if hollow.inside or not torch.is_grad_enabled() or (path, number) in hollow.parts.eager_calls:
            return self.original(*args, **kwargs)
        bound = arrived(bind_call(self.__signature__, args, kwargs))
        tensors, template = flatten(bound)
        part = self._part(number, bound, tensors, template)
        if part is None:  # what is in it keeps nothing either: on a full device there is no room for it
            inner = dict(children(self.module, path)) if hollow.descend else {}
            with hollowed(hollow, inner):
                return self.original(*args, **kwargs)
        if held_objects(bound):
            hollow.given.append(Given(bound))
        found = state_tensors(self.module, part.traced.state)
        parameters = (t for t, entry in zip(found, part.traced.state, strict=True) if entry.is_parameter)
        run = Run(path, number, part, [], lent=any(id(t) not in hollow.own for t in parameters))
        hollow.runs.append(run)
        state = list(map(local_part, found))
        primals, outputs = [*state, *tensors], part.traced.outputs
        run.inputs = [hollow.edge(t) for t in tensors]
        hollow.mark("forward in", len(hollow.runs) - 1)
        started = next((p.device for p in primals if p.requires_grad), None)
        token = _HollowOwner.apply(hollow, run, torch.empty(0, device=started), *primals)
        results = _HollowResult.apply(self, run, bound, token)
        run.listeners = _HollowListeners(hollow, run, results)
        hollow.mark("forward out", len(hollow.runs) - 1)
        read = {i: t for i, t in enumerate(primals) if i not in part.traced.mutated and not t.is_inference()}
        with disable_current_modes():  # those that look at the step's ops need not see these
            run.read = {i: Versions([t]) for i, t in read.items()}
            run.constants = Versions(t for t in part.traced.graph_module.buffers() if not t.is_inference())
        leaves = [primals[leaf.input] if leaf.input is not None else results[leaf.index] for leaf in outputs]
        set_again(part.traced.settings, self.module, leaves)
        return deliver(part.traced.changes, leaves, bound, part.traced.output_template, self.module)

    def _part(self, number: int, bound: Mapping[str, Any], tensors: list[torch.Tensor], template: Any) -> Part | None:
        hollow = self.hollow
        why = "the hollow run is over" if hollow.late else ""
        if threading.get_ident() != hollow.thread:
            why = "it is called in a thread that forward starts: call it in the one that calls the model"
        if owner := active_saving_hooks():
            why = f"it runs under {owner}, which decides what is kept there: leave that out"
        if settings_of_kernels() != hollow.settings:
            why = "it runs in a block with other settings of torch's than its backward: set them around the whole step"
        if any(t.is_nested for t in tensors):
            why = "it is called with a nested tensor, which has no shape: pad it, with a mask"
        if under_transform(tensors):
            why = "it runs under a transform of torch.func, or in forward-mode differentiation"
        if backward_number() >= 0:
            why = "it runs in a backward (a custom function's, a reentrant torch.utils.checkpoint's): leave that out"
        if hook := repeated_hook(self.module, None):
            why = f"its forward hook {hook} would run within the plan and around it: register it on a submodule"
        if why:
            hollow.again = hollow.parts.refuse(self.path, why) or hollow.again
            return None
        home = hollow.home if hollow.imagined else nullcontext()
        with self.set_aside(), hollow.within(), losses_set_aside(), disable_current_modes(), home:
            part, new = hollow.parts.find(self.path, number, self.module, bound, tensors, template)
        hollow.again = hollow.again or new
        return part

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Let the region's forward be its own in the block."""
        set_forward(self.module, self.previous)
        try:
            yield
        finally:
            set_forward(self.module, self)


class _HollowListeners(Listeners):
    """What listens to an output from which the region computes others: such a region stays eager."""

    def __init__(self, hollow: Hollow, run: Run, results: Sequence[torch.Tensor]) -> None:
        self.hollow, self.path = hollow, run.path
        leaves = [leaf for leaf in run.part.traced.outputs if leaf.input is None]
        names = [leaf.path or "(the output)" for leaf in leaves]
        super().__init__(results, tuple(leaf.readers for leaf in leaves), names)

    def refuse(self, i: int, later: int, what: str) -> None:
        """Leave the region to eager."""
        self.hollow.again = self.hollow.parts.refuse(self.path, HOOKED.format(self.names[i])) or self.hollow.again


class _HollowOwner(torch.autograd.Function):
    """As in `passes.run.step`: the node that hands over gradients. What it hands over here is zeros."""

    @staticmethod
    def forward(ctx: Any, hollow: Hollow, run: Run, token: torch.Tensor, *primals: torch.Tensor) -> torch.Tensor:
        ctx.hollow, ctx.owner, ctx.index = hollow, run, len(hollow.runs) - 1
        ctx.primals = primals if run.part.returns_primals else None
        hollow.nodes.append(ctx)
        return token.new_empty(0)

    @staticmethod
    def backward(ctx: Any, token: torch.Tensor) -> Any:
        hollow, run = ctx.hollow, ctx.owner
        made: dict[Any, torch.UntypedStorage] = {}
        unseen = nullcontext() if hollow.imagined else disable_current_modes()  # there a mode tells the allocations
        with hollow.within(), unseen:
            returned = [_stand_in(n, ctx, run.given, made) for n in run.part.gradients]
        run.given.clear()
        hollow.mark("backward out", ctx.index)
        return None, None, None, *_apart(run.part, returned)


class _HollowResult(torch.autograd.Function):
    """As there: the node of the outputs. Here they are computed without autograd, and nothing is kept."""

    @staticmethod
    def forward(ctx: Any, of: HollowForward, run: Run, bound: Mapping[str, Any], token: torch.Tensor) -> Any:
        hollow, traced = of.hollow, run.part.traced
        index = len(hollow.runs) - 1
        with hollow.within(), torch.enable_grad(), casts_dropped():
            found = run.part.output_values if hollow.imagined else _flat_call(of, run.part, bound)
        outputs: list[Any] = [None] * traced.num_outputs
        made: dict[int, torch.UntypedStorage] = {}
        with hollow.within():
            for leaf, tensor, storage in zip(traced.outputs, found, run.part.output_storages, strict=True):
                if storage is not None:
                    outputs[leaf.index] = _moved(tensor, hollow, index, storage, made)
        ctx.hollow, ctx.run, ctx.index, ctx.token = hollow, run, index, token
        hollow.nodes.append(ctx)
        run.views = Versions(outputs[i] for i in run.part.views)
        returned = [leaf for leaf in traced.outputs if leaf.input is None]
        with_gradient = [leaf.requires_grad for leaf in returned]
        run.overlapping = Versions(outputs[i] for i in overlapping(outputs, with_gradient))
        ctx.mark_non_differentiable(*(outputs[leaf.index] for leaf in returned if not leaf.requires_grad))
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        hollow, run, part = ctx.hollow, ctx.run, ctx.run.part
        why = "two backwards pass through it (torch.autograd.grad in forward)" if run.ended else ""
        why = "it is differentiated twice (create_graph=True in forward)" if torch.is_grad_enabled() else why
        if why:
            hollow.again = hollow.parts.refuse(run.path, why) or hollow.again
        if taken := run.listeners.take():
            why = HOOKED.format(run.listeners.names[next(iter(taken))])
            hollow.again = hollow.parts.refuse(run.path, why) or hollow.again
        if run.constants.changed:
            hollow.again = hollow.parts.refuse(run.path, _CONSTANT) or hollow.again
        changed = tuple(i for i, version in run.read.items() if version.changed)
        hollow.again = hollow.parts.learn_of_changes(run.path, run.number, changed) or hollow.again
        run.ended = True
        given = [g for g in gradients if g is not None]
        run.gradients = [hollow.edge(g) for g in given]
        hollow.mark("backward in", ctx.index)
        hollow.again = hollow.parts.learn(run.path, run.number, part, gradients) or hollow.again
        run.given = [gradients[i] for i in part.differentiated] if part.returns_tangents else []
        return None, None, None, ctx.token


def _flat_call(of: HollowForward, part: Part, bound: Any) -> list[torch.Tensor]:
    """The outputs of the region's own forward; the last ones, its answers, as they were when it was captured."""
    traced = part.traced
    with left_alone(bound):
        targets = targets_of(traced.changes, bound)
        value = call_bound(of.original, of.__signature__, bound)
        left = tensors_set(traced.settings, of.module)
        found = all_outputs(value, traced.output_template, traced.changes, targets, left)
    made = part.output_values[len(found) :]
    return found + [torch.tensor(a.answer, device=v.device) for v, a in zip(made, traced.asked, strict=True)]


def _moved(tensor: torch.Tensor, hollow: Hollow, run: int, storage: Storage, made: dict[int, Any]) -> torch.Tensor:
    """The same tensor in memory of a size of its own; outputs that share memory go on doing so."""
    if storage.static:
        return tensor.to("meta") if hollow.imagined else tensor.detach()
    memory = tensor.untyped_storage()
    if place(memory) not in made:
        made[place(memory)] = hollow.storage(memory.nbytes(), run, storage)
    new = torch.empty(0, dtype=tensor.dtype, device=hollow.device if hollow.imagined else tensor.device).set_(
        made[place(memory)], tensor.storage_offset(), tensor.size(), tensor.stride()
    )
    if not hollow.imagined:
        once = tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())  # of what is expanded
        new[once].copy_(tensor[once])
    return new


def _stand_in(node: fx.Node | None, ctx: Any, given: list[torch.Tensor | None], made: dict[Any, Any]) -> Any:
    """Zeros laid out like a gradient that the region returns, in the memory that the true one has.

    Where that is a gradient which the backward does not give, the region is captured for other ones next.
    """
    if node is None:
        return None
    part: Part = ctx.owner.part
    storage, value = part.aliases.of[node], node.meta["val"]
    assert isinstance(storage, Storage)
    offset = value.storage_offset()
    if storage not in made:
        position, count, source = part.position.get(storage), part.traced.num_primals, None
        if position is not None and position < count:
            source = ctx.primals[position]
        elif position is not None and part.dense[position]:
            source = given[position - count]
        if source is None:
            made[storage] = ctx.hollow.storage(storage.bytes, ctx.index, storage), 0
            torch.empty(0, dtype=torch.uint8, device=made[storage][0].device).set_(made[storage][0]).zero_()
        else:
            made[storage] = source.untyped_storage(), source.storage_offset()
    memory, start = made[storage]
    return torch.empty(0, dtype=value.dtype, device=memory.device).set_(
        memory, start + offset, value.size(), value.stride()
    )


def _apart(part: Part, returned: Sequence[torch.Tensor | None]) -> Iterator[torch.Tensor | None]:
    """As `passes.run.tensors.apart`: a gradient in the memory of another is copied when the region hands it over."""
    seen: set[Any] = set()
    for node, gradient in zip(part.gradients, returned, strict=True):
        storage = None if node is None else part.aliases.of[node]
        yield gradient.clone() if gradient is not None and storage in seen else gradient
        seen.add(storage)


@contextmanager
def hollowed(hollow: Hollow, candidates: Mapping[str, nn.Module]) -> Iterator[None]:
    with ExitStack() as stack:
        for path, module in candidates.items():
            forward = HollowForward(hollow, path, module)
            set_forward(module, forward)
            stack.callback(set_forward, module, forward.previous)
        yield
