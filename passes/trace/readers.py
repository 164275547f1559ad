"""readers: which outputs of a forward are computed from other outputs, as autograd sees it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from passes.run.tensors import nodes_behind


def readers(outputs: Mapping[int, torch.Tensor]) -> dict[int, tuple[int, ...]]:
    """For each of the outputs the others whose gradients go on to it.

    The one may be a view of the other, and what is computed from a detached one does not count.
    """
    own = {(t.grad_fn, t.output_nr): i for i, t in outputs.items() if t.grad_fn is not None}
    found: dict[int, list[int]] = {i: [] for i in outputs}
    for j, tensor in outputs.items() if len(own) > 1 else ():
        edges = {edge for node in nodes_behind([tensor]) for edge in node.next_functions}
        for i in sorted(i for edge, i in own.items() if edge in edges):
            found[i].append(j)
    return {i: tuple(by) for i, by in found.items()}
