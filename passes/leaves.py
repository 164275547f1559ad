"""leaves: when each parameter's gradient is final, and which gradients leave the backward together.

A gradient is final once nothing reads its memory any more. Its parameter's hook may then change the parameter (an
optimizer that steps in the backward), so nothing may read that either: no later op of the backward, and no recompute,
wherever a schedule puts it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from passes._torch import pytree
from solvers.problem import Problem
from solvers.stages import reach

from .alias import Aliases, Storage, ancestors, is_view
from .fuse.records import BATCH_NORM_STATISTICS, WITH_RUNNING
from .trace.capture import Traced
from .trace.layouts import LAID_OUT

_UPDATES = frozenset({
    WITH_RUNNING, BATCH_NORM_STATISTICS.op, torch.ops.aten._batch_norm_with_update_functional.default,
})  # fmt: skip

MAX_GROUPS = 64  # about so many nodes in autograd's graph: small gradients wait for others


@dataclass(frozen=True)
class Leave:
    """Primals whose gradients leave the backward right after op `after` of the Problem."""

    after: int
    primals: tuple[int, ...]


def leaves(
    traced: Traced,
    aliases: Aliases,
    problem: Problem,
    nodes: tuple[fx.Node | None, ...],
    tensor_of: Mapping[Storage, int],
    in_turn: bool,
) -> tuple[Leave, ...]:
    """The groups in which gradients of parameters leave; what is in none is there until the end.

    Either as soon as they are final or `in_turn`, as from a plain step, of which the backward has another order of ops.
    """
    owners = _owners(traced, aliases, problem, tensor_of)
    rank = {i: k for k, i in enumerate(traced.arrivals if in_turn else ())}
    read = _last_reads(problem, nodes, aliases)
    places = {aliases.of[p]: i for i, p in enumerate(traced.placeholders[: traced.num_primals])}
    last = {places[s]: i for s, i in read.items() if s in places}
    final = {
        t: max([problem.producer[t], *problem.readers[t], *(last.get(i, -1) for i in primals)])
        for t, primals in owners.items()
    }
    waiting: list[int] = []
    found, size, after = [], 0, 0
    limit = sum(problem.tensors[t].bytes for t in owners) // MAX_GROUPS
    for t in sorted(owners, key=lambda t: (max(rank.get(i, -1) for i in owners[t]), final[t], t)):
        waiting += owners[t]
        size, after = size + problem.tensors[t].bytes, max(after, final[t])
        if size >= limit:
            found.append(Leave(after, tuple(waiting)))
            waiting, size = [], 0
    return tuple(found)


def sums(traced: Traced) -> dict[int, str]:
    """The primals that are read more than once on the way to an output that requires a gradient, and their names:
    whichever outputs the backward starts from, their gradient may be a sum.
    """
    counts = zip(traced.primal_names, _counts(traced), strict=True)
    return {i: name for i, (name, reads) in enumerate(counts) if reads > 1}


def read_views(traced: Traced) -> tuple[int, ...]:
    """The outputs (by `OutputLeaf.index`) that are views in the plain step, of memory that it reads twice itself.

    A view that is changed in place gets another node in autograd's graph, below which the step's own readers are: their
    terms are added up before the caller's is, and not after it.
    """
    outputs = _differentiable(traced)
    ahead = ancestors(outputs.values())
    of_views = {leaf.index for leaf in traced.outputs if leaf.is_view}
    found = ((i, _before_views(o)) for i, o in outputs.items() if i in of_views)
    return tuple(i for i, base in found if _reads(base, ahead, list(outputs.values())) > 2)


def uncounted(traced: Traced) -> tuple[int, ...]:
    """The mutated primals whose version does not change in eager: the running statistics of a batch norm.

    Its kernels write them without saying so (native_functions.yaml): a plain forward that waits for its backward may
    have saved them, and goes on.
    """
    results: Any = traced.graph_module.graph.output_node().args[0]
    news = zip(traced.mutated, results, strict=False)
    return tuple(i for i, new in news if new.target is getitem and new.args[0].target in _UPDATES)


def _before_views(value: fx.Node) -> fx.Node:
    while is_view(value):
        value = value.all_input_nodes[0]
    return value


def _counts(traced: Traced) -> list[int]:
    """How often each primal is read on the way to an output that requires a gradient."""
    differentiable = list(_differentiable(traced).values())
    ahead = ancestors(differentiable)
    primals = traced.pristine.find_nodes(op="placeholder")[: traced.num_primals]
    return [_reads(primal, ahead, differentiable) for primal in primals]


def _differentiable(traced: Traced) -> dict[int, fx.Node]:
    """The outputs that require a gradient in the plain step, by their index."""
    results: Any = traced.pristine.output_node().args[0]
    outputs = results[len(traced.mutated) : traced.num_forward_outputs]
    returned = [leaf for leaf in traced.outputs if leaf.input is None]
    pairs = zip(outputs, returned, strict=True)
    return {leaf.index: _before_detach(o) for o, leaf in pairs if leaf.requires_grad}


def _before_detach(output: Any) -> Any:
    """What a capture returns detached, as this backward does not start from it."""
    while output.target in (torch.ops.aten.detach.default, LAID_OUT):
        output = output.args[0]
    return output


def _reads(value: fx.Node, ahead: set[fx.Node], outputs: list[Any]) -> int:
    """How often ops out of `ahead` read the value or a view of it, or it is an output, which others read."""
    readers = [user for user in value.users if user in ahead and user.target is not torch.ops.aten.detach.default]
    return outputs.count(value) + sum(
        _reads(user, ahead, outputs) if is_view(user) else pytree.tree_leaves((user.args, user.kwargs)).count(value)
        for user in readers
    )


def casts(traced: Traced) -> dict[int, str]:
    """The parameters that are cast and whose gradient is cast back: autocast does so once for all uses of one."""
    found = {}
    for i, (entry, gradient) in enumerate(zip(traced.state, traced.gradients, strict=False)):
        while isinstance(gradient, fx.Node) and is_view(gradient):
            gradient = gradient.args[0]
        if entry.is_parameter and getattr(gradient, "target", None) is torch.ops.aten._to_copy.default:
            found[i] = entry.name
    return found


def cast_often(traced: Traced) -> list[int]:
    """The primals that are inputs, get a gradient and are cast for several uses, each with a cast of its own.

    A use that comes to nothing is not in the graph, but the first one decides when eager's one cast adds its gradient:
    that shows in a sum of three terms.
    """
    placeholders = traced.pristine.find_nodes(op="placeholder")[: traced.num_primals]
    inputs = [i for i in range(len(traced.state), traced.num_primals) if traced.gradients[i] is not None]
    counts = _counts(traced)
    casts_of = {i: [u.target for u in placeholders[i].users].count(torch.ops.aten._to_copy.default) for i in inputs}
    return [i for i in inputs if casts_of[i] > 1 or (casts_of[i] and counts[i] > 2)]


def _owners(
    traced: Traced, aliases: Aliases, problem: Problem, tensor_of: Mapping[Storage, int]
) -> dict[int, list[int]]:
    """The primals whose gradient lies in a tensor of the backward, where all of them are parameters."""
    found: dict[int, list[int]] = {}
    for i, gradient in enumerate(traced.gradients):
        storage = aliases.of[gradient] if isinstance(gradient, fx.Node) else None
        if isinstance(storage, Storage) and storage in tensor_of:
            found.setdefault(tensor_of[storage], []).append(i)
    parameters = {i for i, entry in enumerate(traced.state) if entry.is_parameter}
    first = problem.num_forward + 1  # what the backward starts from is the caller's
    return {t: i for t, i in found.items() if problem.producer[t] >= first and parameters.issuperset(i)}


def _last_reads(problem: Problem, nodes: tuple[fx.Node | None, ...], aliases: Aliases) -> dict[Any, int]:
    """For each storage that is resident throughout, the last op of the backward that can read it or need a reader of
    it to run again.
    """
    useful = reach(problem, problem.num_forward - 1).last_use
    last: dict[Any, int] = {}
    for i, storage in _static_reads(nodes, aliases):
        op = problem.ops[i]
        until = i if i >= problem.num_forward else max((useful[t] for t in op.outputs if op.recomputable), default=-1)
        last[storage] = max(last.get(storage, -1), until)
    return last


def _static_reads(nodes: tuple[fx.Node | None, ...], aliases: Aliases) -> Iterator[tuple[int, Storage]]:
    for i, node in enumerate(nodes):
        for argument in node.all_input_nodes if node is not None else ():
            yield from ((i, storage) for storage in aliases.storages(argument) if storage.static)
