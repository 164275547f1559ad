"""plain: whether a step by regions that computes nothing again needs its plan at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from passes.device import kind_of
from passes.exclusive import exclusive
from passes.memory import granule
from passes.trace.refuse import has_sharded
from planner.check.room import free_bytes
from planner.decided import Decided
from planner.progress import Progress
from solvers.order import plain_peak

from .compose import compose
from .find import Candidates
from .parts import Parts
from .sample import Sample


@exclusive()
def holds_no_more_plain(model: nn.Module, arguments: Mapping[str, Any], decided: Decided) -> bool:
    """Whether nothing is computed again, and the plain step, run on the sample, holds no more than the planned one.

    It is run where its allocations are told exactly and there is memory for it: on a CPU.
    """
    prepared, regions = decided.prepared, decided.prepared.regions
    if regions is None or decided.recomputed or regions.talks or has_sharded(model):
        return False
    device, options, held = prepared.device, prepared.options, prepared.problem.static_bytes
    known = not kind_of(device).caches and not any(p.is_meta for p in model.parameters())
    if not known or free_bytes(device) < 2 * (prepared.baseline_peak_bytes - held):
        return False
    starts = tuple(leaf.path for leaf in prepared.traced.outputs if leaf.differentiated)
    sample = Sample(
        model, options.loss_fn, arguments, options.keep_outputs, options.gradients, device, starts, regions.draws
    )
    parts = Parts(prepared.layouts, Progress(False), options.keep_outputs, prepared.sizes)
    step = sample.run(Candidates(model, {}, False), parts)
    glue = compose(step.crossings, (), (), granule=granule(device), static_bytes=held)
    return plain_peak(glue.problem) <= decided.solution.peak_bytes
