"""leaves: when each parameter's gradient is final, and which gradients leave the backward together.

A gradient is final once nothing reads its memory any more. Its parameter's hook may then change the parameter (an
optimizer that steps in the backward), so nothing may read that either: no later op of the backward, and no recompute,
wherever a schedule puts it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from solvers.problem import Problem
from solvers.stages import reach

from .alias import Aliases, Storage, is_view
from .trace.capture import Traced

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
) -> tuple[Leave, ...]:
    """The groups in which gradients of parameters leave, in order; what is in none is there until the end."""
    owners = _owners(traced, aliases, problem, tensor_of)
    read = _last_reads(problem, nodes, aliases)
    places = {aliases.of[p]: i for i, p in enumerate(traced.placeholders[: traced.num_primals])}
    last = {places[s]: i for s, i in read.items() if s in places}
    final = {
        t: max([problem.producer[t], *problem.readers[t], *(last.get(i, -1) for i in primals)])
        for t, primals in owners.items()
    }
    waiting: list[int] = []
    found, size = [], 0
    limit = sum(problem.tensors[t].bytes for t in owners) // MAX_GROUPS
    for t in sorted(owners, key=lambda t: (final[t], t)):
        waiting += owners[t]
        size += problem.tensors[t].bytes
        if size >= limit:
            found.append(Leave(final[t], tuple(waiting)))
            waiting, size = [], 0
    return tuple(found)


def sums(traced: Traced) -> dict[int, str]:
    """The primals whose gradient may be a sum, as the step reads them more than once, and their names."""
    gradients: Any = traced.pristine.output_node().args[0]
    names, found = traced.primal_names, {}
    for i, gradient in enumerate(gradients[traced.num_forward_outputs :]):
        while isinstance(gradient, fx.Node) and is_view(gradient):
            gradient = gradient.args[0]
        if isinstance(gradient, fx.Node) and gradient.target is torch.ops.aten.add.Tensor:
            found[i] = names[i]
    return found


def casts(traced: Traced) -> dict[int, str]:
    """The parameters that are cast and whose gradient is cast back: autocast does so once for all uses of one."""
    found = {}
    for i, (entry, gradient) in enumerate(zip(traced.state, traced.gradients, strict=False)):
        while isinstance(gradient, fx.Node) and is_view(gradient):
            gradient = gradient.args[0]
        if entry.is_parameter and getattr(gradient, "target", None) is torch.ops.aten._to_copy.default:
            found[i] = entry.name
    return found


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
