"""The hollow run: one step of the user's model in which regions keep nothing, so that all that is left is glue.

Each region runs the true submodule without autograd, and returns gradients of zeros. Everything that crosses its edge
lies in memory of a size of its own, by which it is recognised among the allocator's events; marks are allocations, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from passes._torch import StorageWeakRef, active_saving_hooks, disable_current_modes, local_part, swapped_state
from passes.alias import Storage
from passes.device import empty_cache, kind_of
from passes.lower import KEPT
from passes.memory import place, without_collections
from passes.profile import Counting
from passes.run._torch import backward_number, under_autocast, under_transform
from passes.run.mixing import Versions
from passes.trace.arguments import (
    StateEntry,
    bind_call,
    call_bound,
    call_signature,
    names_given,
    repeated_hook,
    run_model,
    set_forward,
    state_entries,
    state_tensors,
)
from passes.trace.capture import OutputLeaf, Traced, casts_kept, choose_differentiated
from passes.trace.given import all_outputs, deliver, left_alone, targets_of
from passes.trace.layouts import BACKWARD_AUTOCAST, Layouts, gradient_key
from passes.trace.refuse import has_sharded, is_sharded
from passes.trace.state import Snapshot as Reached
from passes.trace.structure import Bound, flatten, slots, unflatten
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

from .find import Candidates, children
from .losses import LOSS, looking_at_losses, losses_set_aside
from .parts import Part, Parts
from .writes import undone_writes

PAD = 7  # hardly any ordinary tensor has such a size in bytes: a mask may


class Edge:
    """A storage that crosses the edge of a region.

    Attributes:
        size, address: by which it is found among the allocator's events.
        run, storage: the run of a region that makes it, and what it is there; None where glue makes it.
        born, died: indices of the first mark at which it was there, and at which it was gone.
    """

    def __init__(self, size: int, run: int | None = None, storage: Storage | None = None) -> None:
        self.size, self.run, self.storage = size, run, storage
        self.born, self.died = 0, -1
        self.memory: Any = None
        self.address = 0


@dataclass(eq=False)
class Run:
    """One run of a region in the sample step.

    Attributes:
        inputs, gradients: what holds each input, and each gradient that its backward starts from; None for memory that
            is there before and after the step.
        given: those gradients, for as long as what is handed over may be one of them.
        views: the part's, as they were handed out.
    """

    path: str
    number: int
    part: Part
    inputs: list[Edge | None]
    gradients: list[Edge | None] = field(default_factory=list)
    given: list[torch.Tensor] = field(default_factory=list)
    views: Versions = field(default_factory=lambda: Versions(()))
    ended: bool = False


@dataclass(frozen=True)
class Mark:
    """A moment of the hollow run: a region's `forward` or `backward` begins or ends, the step's own backward begins."""

    kind: str
    run: int
    size: int


@dataclass(frozen=True, eq=False)
class Crossings:
    """What a Problem of the step is composed from.

    Attributes:
        events: the allocator's: addresses (0 where they are not told; `KEPT`) and signed sizes.
        edges, found: storages that cross the edges of regions, made by regions and made by glue.
    """

    runs: Sequence[Run]
    marks: Sequence[Mark]
    events: Sequence[tuple[int, int]]
    edges: Mapping[int, Edge]
    found: Mapping[int, Edge]


class Hollow:
    """What one hollow run showed; see the module.

    Attributes:
        events: as of `Crossings`.
        again: whether something was learned or refused, so that another run will differ.
        called: how often each candidate was called.
        accumulated_bytes: whole gradients that sharded modules kept from a step before.
        outputs: what the model returned, and each of those tensors without its data.
        descend: whether the children of what cannot be a region are tried in its place.
    """

    def __init__(
        self, model: nn.Module, static: Sequence[torch.Tensor], parts: Parts, device: torch.device, descend: bool
    ) -> None:
        self.model, self.parts, self.device, self.descend = model, parts, device, descend
        self.home = torch.get_default_device()  # which, where nothing has data, is the meta device meanwhile
        self.static = {place(local_part(t).untyped_storage()) for t in static}
        self.marks: list[Mark] = []
        self.edges: dict[int, Edge] = {}
        self.found: dict[int, Edge] = {}
        self.runs: list[Run] = []
        self.events: list[tuple[int, int]] = []
        self.again = self.inside = self.late = False
        self.counting: Counting | None = None
        self.called: dict[str, int] = {}
        self.accumulated_bytes = 0
        self.outputs: list[tuple[OutputLeaf, torch.Tensor]] = []
        self.sizes: set[int] = set()
        self.latest: dict[int, int] = {}  # the last size that was given to what is that large

    @property
    def imagined(self) -> bool:
        """Whether nothing has data."""
        return self.device.type == "meta"

    @property
    def crossings(self) -> Crossings:
        return Crossings(self.runs, self.marks, self.events, self.edges, self.found)

    def mark(self, kind: str, run: int = -1) -> None:
        for edge in self.found.values():
            if edge.died < 0 and edge.memory.expired():
                edge.died = len(self.marks)
        size = self._size(0)
        self.marks.append(Mark(kind, run, size))
        if self.counting is None:
            self._memory(size)

    @contextmanager
    def within(self) -> Iterator[None]:
        """Around what a region does itself."""
        self.inside = True
        if self.counting is not None:
            self.counting.on = False
        try:
            yield
        finally:
            self.inside = False
            if self.counting is not None:
                self.counting.on = True

    def storage(self, like: int, run: int, made: Storage) -> torch.UntypedStorage:
        """New memory for something that a run of a region makes."""
        size = self._size(like)
        self.edges[size] = Edge(size, run, made)
        return self._memory(size)

    def _memory(self, size: int) -> torch.UntypedStorage:
        if self.imagined:  # where ops are looked at, as no allocator tells anything
            return torch.empty(size, dtype=torch.uint8, device=self.device).untyped_storage()
        return torch.UntypedStorage(size, device=self.device)

    def edge(self, tensor: torch.Tensor) -> Edge | None:
        """What holds a tensor that crosses an edge."""
        memory = tensor.untyped_storage()
        size = memory.nbytes()
        if not size or place(memory) in self.static:
            return None
        if size in self.edges:
            return self.edges[size]
        if memory._cdata not in self.found:  # the weak reference keeps the address from being used anew
            edge = self.found[memory._cdata] = Edge(size)
            edge.memory, edge.born, edge.address = StorageWeakRef(memory), len(self.marks), memory.data_ptr()
        return self.found[memory._cdata]

    def _size(self, like: int) -> int:
        first = like + -like % 64 + PAD
        size = self.latest.get(first, first)
        while size in self.sizes or size in self.parts.ordinary:
            size += 64
        self.sizes.add(size)
        self.latest[first] = size
        return size

    def tell_kept(self, first: Hollow) -> None:
        """Put in what an equal run before this one asked for alone, and has kept: workspaces of cuBLAS."""
        spare = Counter(n for _, n in first.events if n > 0) - Counter(n for _, n in self.events if n > 0)
        live = {address: i for i, (address, size) in enumerate(first.events) if size > 0}
        for i, (address, size) in enumerate(first.events):
            if size < 0 and live.get(address, i) < i:
                del live[address]
        for i in sorted(live.values()):
            size = first.events[i][1]
            if spare[size]:
                spare[size] -= 1
                self.events.insert(i, (KEPT, size))

    @property
    def kept(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The sizes of that, in the forward's thread and in the backward's."""
        begins = next(mark.size for mark in self.marks if mark.kind == "backward")
        at = [size for _, size in self.events].index(begins)
        forward, backward = (
            tuple(n for address, n in part if address == KEPT) for part in (self.events[:at], self.events[at:])
        )
        return forward, backward

    def ordinary_sizes(self) -> set[int]:
        """What the step itself allocates, also where something of this run has that size by chance."""
        times = Counter(size for _, size in self.events if size > 0)
        return {size for size, count in times.items() if count > 1 or size not in self.sizes}


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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hollow, path = self.hollow, self.path
        number = hollow.called.get(path, 0)
        hollow.called[path] = number + 1
        if hollow.inside or not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        bound = bind_call(self.__signature__, args, kwargs)
        tensors, template = flatten(bound)
        part = self._part(number, bound, tensors, template)
        if part is None:  # what is in it keeps nothing either: on a full device there is no room for it
            inner = dict(children(self.module, path)) if hollow.descend else {}
            with _hollowed(hollow, inner):
                return self.original(*args, **kwargs)
        run = Run(path, number, part, [])
        hollow.runs.append(run)
        state = [local_part(t) for t in state_tensors(self.module, part.traced.state)]
        primals, outputs = [*state, *tensors], part.traced.outputs
        run.inputs = [hollow.edge(t) for t in tensors]
        hollow.mark("forward in", len(hollow.runs) - 1)
        started = next((p.device for p in primals if p.requires_grad), None)
        token = _HollowOwner.apply(hollow, run, torch.empty(0, device=started), *primals)
        results = _HollowResult.apply(self, run, bound, token)
        hollow.mark("forward out", len(hollow.runs) - 1)
        leaves = [primals[leaf.input] if leaf.input is not None else results[leaf.index] for leaf in outputs]
        return deliver(part.traced.changes, leaves, bound, part.traced.output_template)

    def _part(self, number: int, bound: Mapping[str, Any], tensors: list[torch.Tensor], template: Any) -> Part | None:
        hollow = self.hollow
        why = "the hollow run is over" if hollow.late else ""
        if owner := active_saving_hooks():
            why = f"it runs under {owner}, which decides what is kept there: leave that out"
        if under_transform(tensors):
            why = "it runs under a transform of torch.func, or in forward-mode differentiation"
        if backward_number() >= 0:
            why = "it runs within a backward (a reentrant torch.utils.checkpoint): leave that out"
        if not self.module.training:
            why = "it is in eval mode: call train() on it"
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


class _HollowOwner(torch.autograd.Function):
    """As in `passes.run.step`: the node that hands over gradients. What it hands over here is zeros."""

    @staticmethod
    def forward(ctx: Any, hollow: Hollow, run: Run, token: torch.Tensor, *primals: torch.Tensor) -> torch.Tensor:
        ctx.hollow, ctx.owner, ctx.index = hollow, run, len(hollow.runs) - 1
        ctx.primals = primals if run.part.returns_primals else None
        return token.new_empty(0)

    @staticmethod
    def backward(ctx: Any, token: torch.Tensor) -> Any:
        hollow, run = ctx.hollow, ctx.owner
        made: dict[Any, torch.UntypedStorage] = {}
        with hollow.within():
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
        with hollow.within(), torch.enable_grad(), _casts_dropped():
            found = run.part.output_values if hollow.imagined else _flat_call(of, traced, bound)
        outputs: list[Any] = [None] * traced.num_outputs
        made: dict[int, torch.UntypedStorage] = {}
        with hollow.within():
            for leaf, tensor, storage in zip(traced.outputs, found, run.part.output_storages, strict=True):
                if storage is not None:
                    outputs[leaf.index] = _moved(tensor, hollow, index, storage, made)
        ctx.hollow, ctx.run, ctx.index, ctx.token = hollow, run, index, token
        run.views = Versions(outputs[i] for i in run.part.views)
        returned = [leaf for leaf in traced.outputs if leaf.input is None]
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
        run.ended = True
        given = [g for g in gradients if g is not None]
        run.gradients = [hollow.edge(g) for g in given]
        hollow.mark("backward in", ctx.index)
        hollow.again = hollow.parts.learn(run.path, run.number, part, gradients) or hollow.again
        run.given = given if part.returns_tangents else []
        return None, None, None, ctx.token


@contextmanager
def _casts_dropped() -> Iterator[None]:
    """Let autocast keep no copies of parameters in the block: those of a region are the region's own."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _flat_call(of: HollowForward, traced: Traced, bound: Any) -> list[torch.Tensor]:
    with left_alone(bound):
        targets = targets_of(traced.changes, bound)
        value = call_bound(of.original, of.__signature__, bound)
        return all_outputs(value, traced.output_template, traced.changes, targets)


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


def _stand_in(node: fx.Node | None, ctx: Any, given: list[torch.Tensor], made: dict[Any, Any]) -> Any:
    """Zeros laid out like a gradient that the region returns, in the memory that the true one has."""
    if node is None:
        return None
    part: Part = ctx.owner.part
    storage, value = part.aliases.of[node], node.meta["val"]
    assert isinstance(storage, Storage)
    offset = value.storage_offset()
    if storage not in made:
        position = part.position.get(storage)
        if position is None or (position >= part.traced.num_primals and not part.dense[position]):
            made[storage] = ctx.hollow.storage(storage.bytes, ctx.index, storage), 0
            torch.empty(0, dtype=torch.uint8, device=made[storage][0].device).set_(made[storage][0]).zero_()
        else:
            count = part.traced.num_primals
            source = ctx.primals[position] if position < count else given[position - count]
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


# The step ------------------------------------------------------------------------------------------------------------


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
        """What Python state the step can change, in functions' globals and classes, too."""
        return Reached(self.model, self.loss_fn, draws=False)

    def run(self, candidates: Candidates, parts: Parts, counting: Counting | None = None) -> Hollow:
        """One hollow run; the model, its gradients and all generators are left as they were.

        Args:
            counting: adds up what glue costs. Ops that are looked at may allocate otherwise: it shows no events.
        """
        kept = casts_kept(torch.is_autocast_cache_enabled())  # a copy of what one rank gathers alone is a wrong one
        alone = nullcontext() if has_sharded(self.model) else self.reached.iterators_held()
        with scattered(self.model), gathered_gradients_aside(self.model), of_last_micro_batch(self.model), kept, alone:
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
        own = self._stand_ins(entries, originals, sharded)
        copied = [t.detach().clone() if str(i) in self.written else t.detach() for i, t in enumerate(inputs)]
        without_data: AbstractContextManager[Any] = nullcontext()
        if self.device.type == "meta":
            own = {name: t.to("meta") for name, t in own.items()}
            real, copied = copied, [t.to("meta") for t in copied]
            without_data = _without_data(copied, real)
        inputs = [c.requires_grad_(t.requires_grad) for c, t in zip(copied, inputs, strict=True)]
        given, modules = [*own.values(), *inputs], candidates.chosen
        hollow = Hollow(self.model, given, parts, self.device, candidates.descend)
        swapped = {name: t for (name, t), o in zip(own.items(), originals, strict=True) if t is not o}
        alone = without_talking(self.model)
        looked_at = {**own, **{str(i): t for i, t in enumerate(inputs)}}
        first_look = nullcontext() if parts.known else undone_writes(looked_at, self.written)
        states = put_back(snapshot, generators), swapped_state(self.model, swapped)
        consumes = _consume if self.gradients == "consumed" else None
        hooks = hooks_aside(own.values(), consumes) if sharded else nullcontext()  # others are stand-ins without any
        with gradients_aside(self.model.parameters()), hooks, states[0], states[1], alone, without_data, first_look:
            generators.set(self.draws)
            if not self.model.training:
                self.model.train()
            signature = call_signature(self.model, self.loss_fn)

            def step(hollow: Hollow = hollow) -> None:
                with left_alone(bound := Bound(unflatten(template, inputs), names_given(self.arguments))):
                    self._step(hollow, signature, bound)

            if not sharded:
                self._prepare_gradients([p for p in own.values() if p.requires_grad and p.is_leaf])
            elif self.gradients == "accumulated":
                first = Hollow(self.model, given, parts, self.device, candidates.descend)
                with _hollowed(first, modules), looking_at_losses(modules.get(LOSS)), without_reducing(self.model):
                    kind_of(self.device).allocations(lambda: step(first), self.device)  # known by size when it is freed
                hollow.sizes |= first.sizes  # what is left of it is told from this run's by its size
            with _hollowed(hollow, modules), looking_at_losses(modules.get(LOSS)):
                self._observe(hollow, step, counting)
            for parameter in own.values():
                parameter.grad = None
        return hollow

    def _stand_ins(
        self, entries: Sequence[StateEntry], originals: Sequence[torch.Tensor], sharded: bool
    ) -> dict[str, torch.Tensor]:
        """What the step has in the place of parameters and buffers; of sharded ones the parameters themselves."""
        return {
            e.name: t if sharded and e.is_parameter else _stand_in_of(t, e.is_parameter, e.name in self.written)
            for e, t in zip(entries, originals, strict=True)
        }

    def _observe(self, hollow: Hollow, step: Callable[[], None], counting: Counting | None) -> None:
        left = frozenset(hollow.sizes)
        hollow.accumulated_bytes = gathered_gradient_bytes(self.model)
        if counting is None:
            events = without_collections(lambda: kind_of(self.device).allocations(step, self.device))
            hollow.events = [event for event in events if -event[1] not in left]
            hollow.parts.ordinary |= hollow.ordinary_sizes()
        else:
            hollow.counting = counting
            with counting:
                step()

    def _prepare_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        for parameter in parameters:
            if self.gradients == "accumulated":
                parameter.grad = torch.zeros_like(parameter)
            elif self.gradients == "consumed":
                parameter.register_post_accumulate_grad_hook(_consume)

    def _step(self, hollow: Hollow, signature: Any, bound: Any) -> None:
        if is_sharded(self.model) and self.loss_fn is None:
            output = call_bound(self.model, signature, bound)  # with its hooks, which gather its own parameters
        else:
            output = run_model(self.model, self.loss_fn, signature, bound)
        leaves, template = flatten(output)
        paths: dict[int, str] = {}
        for path, i in slots(template):
            paths.setdefault(i, path)
        wanted = choose_differentiated(template, leaves, paths, self.differentiated)
        hollow.outputs = [
            (OutputLeaf(paths[i], None, i, t.requires_grad, i in wanted), t.detach().to("meta"))
            for i, t in enumerate(leaves)
        ]
        chosen, layouts = {paths[i]: leaves[i] for i in sorted(wanted)}, hollow.parts.layouts
        hollow.again = _refuse_other_sums(hollow, leaves) or hollow.again
        if not self.keep_outputs:
            output, leaves = None, []
        hollow.mark("backward")
        starts, started = [_start(t, path, layouts) for path, t in chosen.items()], list(chosen.values())
        sharded = has_sharded(self.model)  # what hooks gather has gradients of its own
        if BACKWARD_AUTOCAST not in layouts:
            torch.clear_autocast_cache()  # as at its end, which comes before the backward
        others = nullcontext() if sharded else strangers_kept(started, hollow.static)
        with others, under_autocast(layouts.get(BACKWARD_AUTOCAST, ())):
            torch.autograd.backward(started, starts)
        hollow.mark("end")
        hollow.late = True


@contextmanager
def _without_data(inputs: Sequence[torch.Tensor], sample: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let new tensors be on the meta device in the block, and values of the sample be known as they are to a trace."""
    with torch.device("meta"), KnownValues(inputs, sample):
        yield


def _start(output: torch.Tensor, path: str, layouts: Layouts) -> torch.Tensor | None:
    """The gradient that the backward starts from, in the strides in which one was seen to come."""
    if output.dim() == 0:
        return None
    strides = layouts.get(gradient_key(path, output))
    if strides is None:
        return torch.ones_like(output)
    last = sum((size - 1) * stride for size, stride in zip(output.shape, strides, strict=True))
    return output.new_ones(last + 1).as_strided(output.shape, strides)


OTHER_SUM = (
    "its input {name!r} is read more than once in it, and by code that comes after it: the gradient would be summed in "
    "another order than the plain step's"
)


CHANGED_VIEW = (
    "a result of it is changed in place, and is a view that it reads, too: the gradient would be summed in another "
    "order than the plain step's"
)


SHARED_CAST = (
    "its parameter {name!r} has other uses, and autocast casts it once for all of them: the gradients of the uses "
    "would be added up in another type than the plain step's"
)


def _refuse_other_sums(hollow: Hollow, outputs: Sequence[torch.Tensor]) -> bool:
    """Leave to eager regions that sum a part of a gradient which the plain step adds, term by term, to others.

    Autograd runs what was recorded last first, so that terms from a later reader come before the region's own.
    """
    casters: dict[tuple[Any, int], int] = Counter()
    latest: dict[tuple[Any, int], int] = {}
    regions: list[Any] = []
    waiting, seen = [t.grad_fn for t in outputs if t.grad_fn is not None], set[Any]()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        regions += [node] if isinstance(getattr(node, "owner", None), Run) else []
        for edge in node.next_functions:
            latest[edge] = max(latest.get(edge, 0), node._sequence_nr())
            casters[edge] += type(node).__name__ == "ToCopyBackward0"
        waiting += [following for following, _ in node.next_functions if following is not None]
    for node in regions:
        casters.update(node.next_functions[1:][i] for i in node.owner.part.casts)
    new = False
    for run in hollow.runs:
        if run.views.changed:
            new = hollow.parts.refuse(run.path, CHANGED_VIEW) or new
    for node in regions:
        part, edges = node.owner.part, node.next_functions[1:]  # without the token's
        for i, name in part.casts.items():
            if casters[edges[i]] > 1:
                new = hollow.parts.refuse(node.owner.path, SHARED_CAST.format(name=name)) or new
        for i, name in part.sums.items():
            if edges[i][0] is not None and latest[edges[i]] > node._sequence_nr():
                why = OTHER_SUM.format(name=name)
                new = hollow.parts.refuse(node.owner.path, why) or new
    return new


def _consume(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _stand_in_of(tensor: torch.Tensor, is_parameter: bool, written: bool) -> torch.Tensor:
    """A parameter's data without its hooks and gradient; a copy of what the step may change."""
    if is_parameter:
        return nn.Parameter(tensor.detach().clone() if written else tensor.detach(), tensor.requires_grad)
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


@contextmanager
def _hollowed(hollow: Hollow, candidates: Mapping[str, nn.Module]) -> Iterator[None]:
    with ExitStack() as stack:
        for path, module in candidates.items():
            forward = HollowForward(hollow, path, module)
            set_forward(module, forward)
            stack.callback(set_forward, module, forward.previous)
        yield
