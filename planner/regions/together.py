"""Runs of regions made one step: the flat graph, its Problem, and the same again with other graphs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import fx

from passes.alias import Aliases, alias
from passes.lower import UPDATE, Lowered
from passes.memory import granule
from passes.trace.capture import Traced
from planner.hints import Hinted, resolve
from planner.options import Options
from planner.prepared import Prepared
from solvers.order import plain_peak
from solvers.problem import Op, Problem

from .compose import Composed, compose
from .flat import Besides, FlatGraph, lowered_of, suffixes
from .hollow import Crossings
from .part import Part


def composed_anew(prepared: Prepared, own: Sequence[Prepared]) -> Prepared:
    """The same step by regions, with other graphs for its runs: `own` has for each what it is now."""
    regions, graph = prepared.regions, prepared.traced.graph_module.graph
    assert regions is not None
    runs = regions.crossings.runs
    parts = [
        replace(r.part, traced=p.traced, aliases=p.aliases, profiles=p.profiles) for r, p in zip(runs, own, strict=True)
    ]
    lowered = [_found_by_edges(r.part, new, p.lowered) for r, new, p in zip(runs, parts, own, strict=True)]
    values = [n.meta["val"] for n in graph.nodes if n.op == "placeholder"]
    state, inputs = len(prepared.traced.state), prepared.traced.num_primals
    starts = sum(leaf.differentiated for leaf in prepared.traced.outputs)
    flat = FlatGraph(
        prepared.traced.state, values[:state], values[state:inputs], values[inputs : inputs + starts]
    )  # fmt: skip
    module = flat.of([(run.path, part) for run, part in zip(runs, parts, strict=True)])
    traced = replace(prepared.traced, graph_module=module, pristine=flat.graph)
    before = prepared.lowered
    besides = Besides(before.accumulated_bytes, before.gradient_bytes)
    whole = Together(regions.crossings, lowered, traced, flat, regions.glue_cost, besides)
    options = replace(prepared.options, cost=own[0].options.cost)
    composed, view, hinted = whole.composed(options, prepared.device, prepared.problem.static_bytes, False)
    return replace(
        prepared, traced=traced, aliases=whole.aliases, profiles=flat.profiles, lowered=view, options=options,
        baseline_peak_bytes=plain_peak(view.problem), hinted=hinted, start=None,
        regions=replace(regions, composed=composed, prepared=tuple(own)),
    )  # fmt: skip


def _found_by_edges(old: Part, new: Part, lowered: Lowered) -> Lowered:
    """What a run returns, found under the storages that it had when the step was run hollow."""
    pairs = zip((*old.output_nodes, *old.gradients), (*new.output_nodes, *new.gradients), strict=True)
    known = {
        old.aliases.of[a]: t for a, b in pairs if a is not None and b is not None
        and (t := lowered.storage_tensor.get(cast(Any, new.aliases.of[b]))) is not None
    }  # fmt: skip
    return replace(lowered, storage_tensor={**lowered.storage_tensor, **cast(Any, known)})


@dataclass(frozen=True)
class Together:
    """Runs of regions about to become one step."""

    crossings: Crossings
    lowered: Sequence[Lowered]
    traced: Traced
    flat: FlatGraph
    glue_cost: int
    besides: Besides

    @cached_property
    def aliases(self) -> Aliases:
        return alias(self.flat.graph)

    def composed(
        self, options: Options, device: torch.device, static_bytes: int, required_hints: bool
    ) -> tuple[Composed, Lowered, dict[fx.Node, Hinted]]:
        """The flat Problem, what it is in the flat graph, and which of its kernels hints name."""
        target = options.target(device)
        composed = compose(
            self.crossings, self.lowered, suffixes(len(self.lowered)), granule=granule(target),
            glue_cost=self.glue_cost, static_bytes=static_bytes,
        )  # fmt: skip
        composed = _with_update(composed, options.update.step_bytes)
        view = lowered_of(composed, self.lowered, self.flat, self.aliases, self.besides)
        named = resolve(options.hints, self.traced, self.aliases, target, required=required_hints)
        hinted = {n: hint for n, hint in named.items() if n in view.node_op}  # others fused with what reads them
        once = {view.node_op[n] for n, hint in hinted.items() if hint.once}
        composed = replace(composed, problem=_run_once(composed.problem, once))
        return composed, replace(view, problem=composed.problem), hinted


def _run_once(problem: Problem, once: Collection[int]) -> Problem:
    ops = (replace(op, recomputable=op.recomputable and i not in once) for i, op in enumerate(problem.ops))
    return replace(problem, ops=tuple(ops))


def _with_update(composed: Composed, step_bytes: int) -> Composed:
    """The update of the parameters, an op of its own at the end, where it holds anything for a moment."""
    if not step_bytes:
        return composed
    ops = (*composed.problem.ops, Op(UPDATE, (), (), 0, step_bytes, False))
    return replace(composed, problem=replace(composed.problem, ops=ops), local=(*composed.local, None))
