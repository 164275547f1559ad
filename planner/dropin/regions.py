"""Regions while a step runs: for the time of the model's forward, their own `forward` is the planned one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from passes.trace.arguments import bind_call, call_bound, call_signature
from passes.trace.structure import flatten
from planner.decided import Decided, PlannedRun
from planner.regions.losses import LOSS, looking_at_losses, region_module

from .entry import Entry, Fallback, Losses, starts_of
from .plan_key import call_key


class RegionForward:
    """The `forward` of a region: each call runs the plan of that call, and what has none runs plain.

    Dynamo does not see it: it is there only while a planned model's forward runs, which Dynamo leaves alone.
    """

    runs_plan = True

    def __init__(self, module: nn.Module, path: str, runs: Sequence[PlannedRun]) -> None:
        self.model, self.path = module, path
        self.previous = module.__dict__.get("forward")
        self.signature = call_signature(module)
        self.__signature__ = self.signature
        self.losses, self.calls, self.noticed = Losses(), 0, False
        self.cache = [self._entry(run) for run in runs]

    def _entry(self, run: PlannedRun) -> Entry:
        return Entry(run.key, list(run.state), run.planned, starts_of(run.planned.prepared.traced))

    @property
    def original(self) -> Callable[..., Any]:
        """The forward that the region has while no plan runs."""
        return self.previous or type(self.model).forward.__get__(self.model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        number, self.calls = self.calls, self.calls + 1
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        bound = bind_call(self.signature, args, kwargs)
        inputs, template = flatten(bound)
        key = call_key(inputs, template)
        for entry in (*self.cache[number : number + 1], *self.cache):
            if entry.key == key and (state := entry.holds(self.model, None, inputs)) is not None:
                return entry.planned.run([*state, *inputs], Fallback(self, entry))
        self._notice(number)
        return self.original(*args, **kwargs)

    def plain(self, bound: Mapping[str, Any]) -> Any:
        """The region's own forward, for calls that are replayed."""
        return call_bound(self.original, self.signature, bound)

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
    for region in regions:
        region.calls = 0
        region.model.__dict__["forward"] = region
    loss = next((region.model for region in regions if region.path == LOSS), None)
    try:
        with looking_at_losses(loss) if loss is not None else nullcontext():
            yield
    finally:
        for region in regions:
            own = region.model.__dict__
            if region.previous is None:
                own.pop("forward", None)
            else:
                own["forward"] = region.previous


def regions_of(model: nn.Module, planned: Decided) -> list[RegionForward]:
    """The regions of a plan, as they are in `model`; one that the sample did not call runs like the most frugal."""
    found: dict[str, list[PlannedRun]] = {}
    for run in planned.runs:
        found.setdefault(run.path, []).append(run)
    frugal = sorted(planned.runs, key=lambda run: -run.planned.solution.added_cost)
    regions = planned.prepared.regions
    for path in regions.spare if regions is not None else ():
        kind = type(region_module(model, path))
        found[path] = [run for run in frugal if type(region_module(model, run.path)) is kind]
    return [RegionForward(region_module(model, path), path, own) for path, own in found.items()]
