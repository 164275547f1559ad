"""Regions while a step runs: for the time of the model's forward, their own `forward` is the planned one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from passes._torch import active_saving_hooks
from passes.run._torch import Autocast, under_transform
from passes.trace.arguments import bind_call, call_bound, call_signature, set_forward
from passes.trace.matching import Differs, match
from passes.trace.reads import Matched, Reads
from passes.trace.structure import flatten
from planner.decided import Decided, PlannedRun
from planner.ranks.sharded import gathered_parameters, sources_of
from planner.regions.losses import LOSS, looking_at_losses, region_module

from .entry import Entry, Losses, starts_of
from .fallback import Fallback
from .plan_key import call_key


class RegionForward:
    """The `forward` of a region: each call runs the plan of that call, and what has none runs plain.

    Attributes:
        traced: the module's own `forward` when it was planned (None: its class's); `previous` is the one of now.
        eager_calls: calls that no gradient reaches, by their numbers.
        surprise: the autocast of a backward that was not one that was planned for; None where each was.
        scattered: parameters that `fully_shard` gathers for it, or for another module of the model.

    Dynamo does not see it: it is there only while a planned model's forward runs, which Dynamo leaves alone.
    """

    runs_plan = True

    def __init__(
        self, module: nn.Module, path: str, runs: Sequence[PlannedRun], eager_calls: Collection[int] = (),
        scattered: Sequence[Any] = (),
    ) -> None:  # fmt: skip
        self.model, self.path, self.eager_calls, self.scattered = module, path, eager_calls, scattered
        self.traced = self.previous = module.__dict__.get("forward")
        self.signature = call_signature(module)
        self.__signature__ = self.signature
        self.losses, self.calls, self.noticed = Losses(), 0, False
        self.surprise: Autocast | None = None
        self.numbers, self.cache = [run.number for run in runs], [self._entry(run) for run in runs]

    def _entry(self, run: PlannedRun) -> Entry:
        return Entry(run.key, list(run.state), run.planned, starts_of(run.planned.prepared.traced))

    def _entries(self, number: int) -> Iterator[Entry]:
        """The plans, that of a call first."""
        yield from (entry for n, entry in zip(self.numbers, self.cache, strict=False) if n == number)
        yield from self.cache

    @property
    def original(self) -> Callable[..., Any]:
        """The forward that the region has while no plan runs."""
        return self.previous or type(self.model).forward.__get__(self.model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        number, self.calls = self.calls, self.calls + 1
        if not torch.is_grad_enabled() or number in self.eager_calls:
            return self.original(*args, **kwargs)
        if self.previous is self.traced and not active_saving_hooks():  # a checkpoint would run the plain one again
            bound = bind_call(self.signature, args, kwargs)
            inputs, template = flatten(bound)
            key = call_key(inputs, template)
            planned = () if under_transform(inputs) else self._entries(number)
            for entry in planned:
                if entry.key == key and (state := entry.holds(self.model, None, inputs, bound)) is not None:
                    primals = [*state, *inputs]
                    sources = sources_of(self.scattered, primals) if self.scattered else None
                    return entry.planned.run(self.model, primals, Fallback(self, entry, bound), bound, sources)
        self._notice(number)
        return self.original(*args, **kwargs)

    def changed(self) -> Differs | None:
        """How the module differs from what its plans were made for; None where one of them holds, or there is none."""
        if not self.cache or any(entry.unchanged(self.model, None) is not None for entry in self.cache):
            return None
        try:
            match(self.cache[0].reads, self.model, None)
        except Differs as differs:
            return differs
        return Differs("(state)", "parameters or buffers of other shapes or types", "those at planning")

    def plain(self, bound: Mapping[str, Any]) -> Any:
        """The region's own forward, for calls that are replayed."""
        return call_bound(self.original, self.signature, bound)

    def match(self, reads: Reads) -> Matched:
        """Find in the region, as it is now, what its forward read."""
        return match(reads, self.model, None)

    def replayed(self, autocast: Autocast) -> None:
        """Note that the step's own backward has to be looked at."""
        self.surprise = autocast

    def start(self) -> None:
        """Be the module's forward."""
        current = self.model.__dict__.get("forward")
        self.calls, self.previous = 0, self.previous if current is self else current
        set_forward(self.model, self)

    def end(self) -> None:
        """Undo `start`."""
        set_forward(self.model, self.previous)

    def _notice(self, number: int) -> None:
        if not self.noticed:
            self.noticed = True
            warnings.warn(
                f"call {number + 1} of region {self.path} is not one that was planned: it runs plain, and not under "
                "the budget.",
                stacklevel=3,
            )


@contextmanager
def running_regions(regions: Sequence[RegionForward]) -> Iterator[None]:
    """Let the regions' modules run their plans in the block."""
    loss = next((region.model for region in regions if region.path == LOSS), None)
    try:
        for region in regions:
            region.start()
        with looking_at_losses(loss) if loss is not None else nullcontext():
            yield
    finally:
        for region in reversed(regions):
            region.end()


def are_of(regions: Sequence[RegionForward], model: nn.Module) -> bool:
    """Whether these regions are still modules of the model, and none of their paths leads to another one."""
    return all(region.path == LOSS or _module_at(model, region.path) is region.model for region in regions)


def regions_of(model: nn.Module, planned: Decided) -> list[RegionForward]:
    """The regions of a plan, as they are in `model`; one that the sample did not call runs like the most frugal."""
    found: dict[str, list[PlannedRun]] = {}
    for run in planned.runs:
        found.setdefault(run.path, []).append(run)
    frugal = sorted(planned.runs, key=lambda run: -run.planned.solution.added_cost)
    regions = planned.prepared.regions
    spare, eager_calls = (regions.spare, regions.eager_calls) if regions is not None else ((), ())
    for path in spare:
        kind = type(_module_at(model, path))
        found[path] = [run for run in frugal if type(_module_at(model, run.path)) is kind]
    modules = {path: _module_at(model, path) for path in found}
    scattered = gathered_parameters(model)
    made = [
        RegionForward(m, path, found[path], {n for p, n in eager_calls if p == path}, scattered)
        for path, m in modules.items() if m is not None
    ]  # fmt: skip
    if spare and not scattered:
        with running_regions(made):
            for region in made:
                if region.path in spare and region.changed() is not None:
                    region.cache = []  # of the same class, and not its equal: a Sequential, say
    return made


def _module_at(model: nn.Module, path: str) -> nn.Module | None:
    """The module that a region's path stands for, unless it was taken out of the model."""
    try:
        return region_module(model, path)
    except AttributeError:
        return None
