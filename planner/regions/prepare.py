"""prepare: a model whose regions are planned, before any decision: found, captured, measured, composed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from passes.errors import CaptureError, Unsupported
from passes.lower import UPDATE
from passes.memory import granule, round_up
from passes.printable import printable
from passes.profile import Counting
from passes.trace.arguments import state_entries, state_tensors
from passes.trace.capture import Traced
from passes.trace.layouts import Layouts
from passes.trace.reads import Known, Reads
from passes.trace.refuse import is_quantized_weight
from passes.trace.structure import Constant, flatten, slots
from planner.errors import RegionError
from planner.hints import resolve
from planner.options import Options
from planner.prepared import Prepared, Regions, lower_step, model_device
from planner.progress import Progress
from solvers.problem import Op, Problem
from solvers.schedule import plain_order, with_frees
from solvers.simulate import simulate

from .compose import compose
from .find import Candidates, candidates
from .flat import FlatGraph, lowered_of
from .hollow import Hollow, Sample
from .parts import Part, Parts

MOST_RUNS = 30  # hollow ones; each teaches something


def prepare_regions(
    model: nn.Module, arguments: Mapping[str, Any], options: Options, progress: Progress, *,
    layouts: Layouts | None = None, required_hints: bool = True, why: CaptureError | Unsupported | None = None,
) -> Prepared:  # fmt: skip
    """Everything before the decision, for a step by regions.

    Args:
        layouts, required_hints: as for `planner.prepared.prepare`.
        why: why the model is not planned as a whole, where that was tried.

    Raises:
        RegionError: nothing can be planned.
    """
    device = model_device(model)
    if device.type == "meta" or any(p.device.type == "meta" for p in model.parameters()):
        raise RegionError("regions of a model on the meta device: what runs between them cannot be measured there.")
    if any(map(is_quantized_weight, (*model.parameters(), *model.buffers()))):
        raise why or RegionError("regions of a model with quantized weights (tensor subclasses) are not planned.")
    parts = Parts({} if layouts is None else layouts, progress)
    chosen = candidates(model, options.patterns)
    sample = Sample(model, options.loss_fn, arguments, options.keep_outputs, options.gradients, device)
    hollow = _settled_run(sample, chosen, parts, options)
    if not hollow.runs:
        raise why or RegionError(f"no region can be planned: {_first(parts.refused)}")
    counting = Counting(options.cost_function)
    sample.run(chosen.chosen, parts, counting)
    own = {id(p): _prepared(p, options, device) for p in parts.known}
    prepared = tuple(own[id(run.part)] for run in hollow.runs)
    eager = {**({"": str(why)} if why else {}), **parts.refused}
    glue_cost = round(counting.total)
    return _composed(model, arguments, options, hollow, prepared, eager, device, parts, required_hints, glue_cost)


def _settled_run(sample: Sample, chosen: Candidates, parts: Parts, options: Options) -> Hollow:
    """The last of several hollow runs, which taught nothing new."""
    for _ in range(MOST_RUNS):
        hollow = sample.run(chosen.chosen, parts)
        for run in hollow.runs:
            if not run.ended:
                hollow.again = parts.refuse(run.path, chosen.chosen[run.path], "no gradient reaches it") or hollow.again
        if chosen.refine(tuple(parts.refused), tuple(hollow.called)) or hollow.again:
            continue
        if not parts.profile(True, options.cost == "measured"):
            return hollow
    raise RegionError(f"the step takes another course each time that it is run: {_first(parts.refused)}")


def _first(refused: Mapping[str, str]) -> str:
    return next((f"{path}: {why}" for path, why in refused.items()), "no submodule is called")


def _prepared(part: Part, options: Options, device: torch.device) -> Prepared:
    """A part's own step; what is set aside counts for the whole."""
    assert part.profiles is not None
    alone = replace(options, keep_outputs=False, reserve_bytes=0, loss_fn=None)
    lowered = lower_step(part.traced, part.aliases, part.profiles, device, alone, region=True)
    problem = lowered.problem
    plain = simulate(problem, with_frees(problem, plain_order(problem))).peak_bytes
    return Prepared(
        part.traced, part.aliases, part.profiles, lowered, device, plain, alone, {}, printable(part.kind.__name__),
        part.traced.layouts,
    )  # fmt: skip


def _composed(
    model: nn.Module, arguments: Mapping[str, Any], options: Options, hollow: Hollow, prepared: Sequence[Prepared],
    eager: Mapping[str, str], device: torch.device, parts: Parts, required_hints: bool, glue_cost: int,
) -> Prepared:  # fmt: skip
    entries = state_entries(model)
    tensors = state_tensors(model, entries)
    inputs, template = flatten(dict(arguments))
    suffixes = [f"_r{r}" for r in range(len(hollow.runs))]
    lowered = [p.lowered for p in prepared]
    multiple = granule(device)
    resident = sum(_distinct([*tensors, *inputs], multiple).values())
    grads = [t for t in tensors if t.requires_grad] if options.gradients == "accumulated" else []
    accumulated = sum(round_up(t.numel() * t.element_size(), multiple) for t in grads)
    composed = compose(
        hollow, lowered, suffixes, granule=multiple, static_bytes=resident + accumulated + options.set_aside_bytes,
        glue_cost=glue_cost,
    )  # fmt: skip
    composed = replace(composed, problem=_with_update(composed.problem, options.update.step_bytes))
    flat = FlatGraph(entries, tensors, inputs, [t for leaf, t in hollow.outputs if leaf.differentiated])
    for run, suffix in zip(hollow.runs, suffixes, strict=True):
        flat.add(run.part, run.path, suffix)
    graph_module, aliases = flat.finish()
    reads = Reads(tuple(entries), (Known(type(model), "", True),), {}, (), None, frozenset())
    traced = Traced(
        graph_module, graph_module.graph, tuple(entries), template, tuple(path for path, _ in slots(template)),
        len(inputs), Constant(None), tuple(leaf for leaf, _ in hollow.outputs), (), 0, reads,
    )  # fmt: skip
    view = lowered_of(composed, lowered, flat, aliases, accumulated)
    hinted = resolve(options.hints, traced, aliases, device, required=required_hints)
    once = {view.node_op[n] for n, hint in hinted.items() if hint.once and n in view.node_op}
    if once:
        composed = replace(composed, problem=_run_once(composed.problem, once))
        view = replace(view, problem=composed.problem)
    problem = composed.problem
    plain = simulate(problem, with_frees(problem, plain_order(problem))).peak_bytes
    runs = hollow.runs
    regions = Regions(
        composed, tuple((r.path, r.number) for r in runs), tuple(r.part.key for r in runs), tuple(prepared), dict(eager)
    )
    name = printable(type(model).__name__)
    return Prepared(
        traced, aliases, flat.profiles, view, device, plain, options, hinted, name, parts.layouts, None, regions
    )


def _distinct(tensors: Sequence[torch.Tensor], multiple: int) -> dict[int, int]:
    """Bytes by storage."""
    storages = [t.untyped_storage() for t in tensors]
    return {s.data_ptr(): round_up(s.nbytes(), multiple) for s in storages}


def _run_once(problem: Problem, once: set[int]) -> Problem:
    ops = (replace(op, recomputable=False) if i in once else op for i, op in enumerate(problem.ops))
    return replace(problem, ops=tuple(ops))


def _with_update(problem: Problem, step_bytes: int) -> Problem:
    """The update of the parameters, an op of its own at the end, where it holds anything for a moment."""
    if not step_bytes:
        return problem
    return replace(problem, ops=(*problem.ops, Op(UPDATE, (), (), 0, step_bytes, False)))
