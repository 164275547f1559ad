"""prepare: a model whose regions are planned, before any decision: found, captured, measured."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from passes._torch import dense_parts, is_distributed, local_part
from passes.device import kind_of
from passes.exclusive import exclusive
from passes.lower import kept_sizes, split_nodes
from passes.memory import granule, own_bytes, round_up
from passes.printable import printable
from passes.profile import Counting
from passes.trace.arguments import state_entries, state_tensors
from passes.trace.capture import Traced
from passes.trace.layouts import Layouts
from passes.trace.reads import Known, Reads
from passes.trace.refuse import has_sharded, is_quantized_weight, storage_kind
from passes.trace.structure import flatten
from passes.trace.templates import Constant, slots
from planner.check.restore import Generators
from planner.elsewhere import held_bytes
from planner.errors import NothingTrained, RegionError
from planner.footprint import Start, start_of
from planner.optimizer import NO_UPDATE
from planner.options import Options
from planner.prepared import Prepared, Regions, lower_step, model_device
from planner.progress import Progress
from planner.sizes import Sizes
from solvers.errors import BudgetError, PlannerError
from solvers.order import plain_peak
from solvers.problem import Problem
from solvers.schedule import plain_order, with_frees

from .compose import Composed
from .find import Candidates, candidates
from .flat import Besides, FlatGraph
from .hollow import Hollow
from .losses import LOSS
from .part import Part
from .parts import NO_GRADIENT, Parts
from .refusals import Refusal, again, first_of, stopped, with_regions_tried
from .sample import Sample
from .settle import settled_run
from .together import Together


@dataclass(frozen=True)
class _Found:
    """What hollow runs have shown of a step.

    Attributes:
        hollow: the last of them, which taught nothing new.
        why: why the model is not planned as a whole, where that was tried.
    """

    model: nn.Module
    arguments: Mapping[str, Any]
    options: Options
    device: torch.device
    chosen: Candidates
    parts: Parts
    hollow: Hollow
    glue_cost: int
    why: Refusal | None
    draws: Mapping[str, Any]

    @property
    def target(self) -> torch.device:
        """The kind of device that is planned for."""
        return self.options.target(self.device)

    @property
    def eager(self) -> dict[str, str]:
        return {**({"": str(self.why)} if self.why else {}), **self.parts.refused}

    @property
    def spare(self) -> tuple[str, ...]:
        return tuple(path for path in self.chosen.chosen if path not in self.hollow.called)

    def regions(self, composed: Composed, prepared: Sequence[Prepared]) -> Regions:
        hollow, parts = self.hollow, self.parts
        return Regions(
            composed, hollow.crossings, self.glue_cost, tuple(prepared), self.eager, self.spare, parts.eager_calls,
            bool(parts.heard), self.draws,
        )  # fmt: skip


@exclusive()
def prepare_regions(
    model: nn.Module, arguments: Mapping[str, Any], options: Options, progress: Progress, *, sizes: Sizes,
    layouts: Layouts | None = None, required_hints: bool = True, differentiated: tuple[str, ...] | None = None,
    why: Refusal | None = None, draws: Mapping[str, Any] | None = None,
) -> Prepared:  # fmt: skip
    """Everything before the decision, for a step by regions.

    Args:
        sizes, layouts, required_hints, differentiated: as for `planner.prepared.prepare`.
        why: why the model is not planned as a whole, where that was tried.
        draws: the states that all generators begin the step in (None: those that they are in).

    Raises:
        RegionError: nothing can be planned.
        BudgetError: the device has no room for the step whatever is recomputed.
    """
    device = model_device(model)
    meta = any(p.device.type == "meta" for p in model.parameters())
    if options.target(device).type != device.type and not meta:
        raise again(why) if why else RegionError(
            f"device={options.device!r} with regions: what runs between them is measured, and that only on the "
            'model\'s own device. Plan there, with a model on the meta device, or with regions="whole".'
        )
    options = options.priced_on(device)
    if any(map(is_quantized_weight, (*model.parameters(), *model.buffers()))):
        quantized = "regions of a model with quantized weights (tensor subclasses) are not planned."
        raise again(why) if why else RegionError(quantized)
    if any(t.requires_grad and storage_kind(t) for t in (*model.parameters(), *flatten(dict(arguments))[0])):
        raise RegionError("a sparse tensor requires a gradient: make it dense (to_dense()), or detach() it.")
    parts = Parts({} if layouts is None else layouts, progress, options.keep_outputs, sizes)
    chosen = candidates(model, options.patterns)
    runs_on = torch.device("meta") if meta else device
    sample = Sample(
        model, options.loss_fn, arguments, options.keep_outputs, options.gradients, runs_on, differentiated,
        draws or Generators.of([*model.parameters(), *model.buffers()]).state(),
    )  # fmt: skip
    try:
        hollow, glue_cost = settled_run(sample, chosen, parts, options)
        if why is not None and not {run.path for run in hollow.runs} - {LOSS}:
            chosen, hollow, glue_cost = _by_layers(sample, chosen.layers(), parts, options)
    except torch.OutOfMemoryError as error:
        raise BudgetError(
            f"the step does not fit on {device}: with nothing kept of its regions, it still runs out of memory there "
            f"({str(error).partition('.')[0]}). Take a smaller batch, or free memory there."
        ) from error
    except Exception as error:
        if why is None and isinstance(error, PlannerError):
            raise
        raise stopped(error, why, meta) from error
    if not hollow.runs and why is None and set(parts.refused.values()) == {NO_GRADIENT}:
        raise NothingTrained(f"no region can be planned: {first_of(parts.refused)}. Check requires_grad.")
    if not hollow.runs:
        none = f"no region can be planned: {first_of(parts.refused)}"
        raise with_regions_tried(why, chosen, parts.refused) or RegionError(none)
    if glue_cost is None:
        sample.run(chosen, parts, counting := Counting(options.cost_function(device)))
        glue_cost = counting.total
    found = _Found(model, arguments, options, device, chosen, parts, hollow, round(glue_cost), why, sample.draws)
    return _prepared(found, required_hints)


def _by_layers(
    sample: Sample, chosen: Candidates, parts: Parts, options: Options
) -> tuple[Candidates, Hollow, float | None]:
    """`settled_run` with those layers as regions in which enough can be decided: an LSTM, say, and no convolution."""
    device = sample.device
    found = {run.path: run.part for run in settled_run(sample, chosen, parts, options)[0].runs}
    worth = {path for path, part in found.items() if _holds_more(_of_part(part, options, device).problem)} | {LOSS}
    chosen.wanted = {path: module for path, module in chosen.wanted.items() if path in worth}
    return chosen, *settled_run(sample, chosen, parts, options)


def _holds_more(problem: Problem) -> bool:
    """Whether a step holds for its backward more than it returns, and could compute that again."""
    last = [max(readers, default=-1) for readers in problem.readers]
    again = [t for t in problem.evictable if problem.producer[t] < problem.num_forward <= last[t]]
    returned = [t for t in problem.outputs if problem.producer[t] < problem.num_forward]
    held, given = (sum(problem.tensors[t].bytes for t in ts) for ts in (again, returned))
    return held > given


def _prepared(found: _Found, required_hints: bool) -> Prepared:
    options, device, hollow = found.options, found.device, found.hollow
    parts = {id(run.part): run.part for run in hollow.runs}
    own = {i: _of_part(part, options, device) for i, part in parts.items()}
    prepared = [own[id(run.part)] for run in hollow.runs]
    traced, flat = _flat(found)
    besides = _besides(found)
    static = _resident_bytes(found) + besides.accumulated_bytes + held_bytes(flat.profiles, device, found.target)
    static += _kept_bytes(parts.values(), hollow.kept, again=has_sharded(found.model))
    whole = Together(hollow.crossings, [p.lowered for p in prepared], traced, flat, found.glue_cost, besides)
    composed, view, hinted = whole.composed(options, device, static, required_hints)
    made = Prepared(
        traced, whole.aliases, flat.profiles, view, device, plain_peak(view.problem), options, hinted,
        printable(type(found.model).__name__), found.parts.layouts, _start(found), found.regions(composed, prepared),
        found.parts.sizes,
    )  # fmt: skip
    plain = made.footprint(with_frees(view.problem, plain_order(view.problem)))
    return made if plain is None else replace(made, baseline_peak_bytes=plain.allocated_bytes)


def _of_part(part: Part, options: Options, device: torch.device) -> Prepared:
    """A part's own step; what is set aside counts for the whole."""
    assert part.profiles is not None
    alone = replace(options, keep_outputs=False, reserve_bytes=0, update=NO_UPDATE, loss_fn=None)
    lowered = lower_step(part.traced, part.aliases, part.profiles, device, alone, region=True)
    return Prepared(
        part.traced, part.aliases, part.profiles, lowered, device, plain_peak(lowered.problem), alone, {},
        printable(part.kind.__name__), part.traced.layouts,
    )  # fmt: skip


def _flat(found: _Found) -> tuple[Traced, FlatGraph]:
    """The runs' graphs as one, and the step that it stands for."""
    entries = state_entries(found.model)
    inputs, template = flatten(dict(found.arguments))
    outputs = found.hollow.outputs
    gathered = has_sharded(found.model)  # regions see whole parameters
    tensors = [_whole(t) if gathered else local_part(t) for t in state_tensors(found.model, entries)]
    flat = FlatGraph(entries, tensors, inputs, [t for leaf, t in outputs if leaf.differentiated])
    module = flat.of([(run.path, run.part) for run in found.hollow.runs])
    reads = Reads(tuple(entries), (Known(type(found.model), "", True),), {}, (), None, frozenset())
    leaves, names = tuple(leaf for leaf, _ in outputs), tuple(path for path, _ in slots(template))
    traced = Traced(
        module, flat.graph, tuple(entries), template, names, len(inputs), Constant(None), leaves, (), 0, reads,
        layouts=dict(found.parts.layouts),
    )  # fmt: skip
    return traced, flat


def _whole(t: torch.Tensor) -> torch.Tensor:
    """A tensor without data that looks as a gathered parameter does."""
    return torch.empty(t.shape, dtype=t.dtype, device="meta") if is_distributed(t) else t


def _resident(found: _Found) -> list[torch.Tensor]:
    """Parameters, buffers and inputs, as they lie in memory."""
    given = *state_tensors(found.model, state_entries(found.model)), *flatten(dict(found.arguments))[0]
    return [part for t in given for part in dense_parts(t)]


def _start(found: _Found) -> Start | None:
    """The device's caching allocator, with what the step finds there; None where there is none."""
    here = found.device.type == found.target.type and kind_of(found.device).caches
    if not here or found.hollow.imagined or has_sharded(found.model):
        return None
    gc.collect()  # what refusals and runs left in cycles
    return start_of(_resident(found), found.device)


def _kept_bytes(parts: Iterable[Part], glue: tuple[tuple[int, ...], tuple[int, ...]], *, again: bool) -> int:
    """What products leave on the device for ever, each size once in each thread that runs some.

    Args:
        again: count for the backward's thread those of the forward, too, which a recompute runs there: where no
            allocator is played, nothing else tells.
    """
    kept = tuple(dict.fromkeys(sizes) for sizes in glue)
    for part in parts:
        for found, nodes in zip(kept, split_nodes(part.traced), strict=True):
            found.update(dict.fromkeys(kept_sizes(nodes, part.profiles or {})))
            if again:
                kept[1].update(found)
    return sum(map(sum, kept))


def _resident_bytes(found: _Found) -> int:
    """Parameters, buffers and inputs, and what is set aside."""
    sizes = own_bytes(_resident(found))
    return sum(round_up(size, granule(found.target)) for size in sizes) + found.options.set_aside_bytes


def _besides(found: _Found) -> Besides:
    """Gradients, of which those from before the step are there throughout."""
    accumulated = found.hollow.accumulated_bytes
    trained = [] if has_sharded(found.model) else [p for p in found.model.parameters() if p.requires_grad]
    sizes = tuple(round_up(p.numel() * p.element_size(), granule(found.target)) for p in trained)
    if found.options.gradients == "accumulated":
        accumulated += sum(sizes)
    return Besides(accumulated, sizes)
