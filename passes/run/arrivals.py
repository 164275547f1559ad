"""arrivals: in which order autograd takes up the gradients that a node hands over together.

Its queue is a heap, in which leaves are equal: more than three come out in another order than they were put in.
`DistributedDataParallel` orders its buckets by it, so they are put in as they have to be to come out right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch


def listed(
    part: Sequence[int], owners: Sequence[torch.Tensor], rank: Mapping[int, int], is_last: bool
) -> tuple[int, ...]:
    """The places in `part`, as a node lists them for autograd to take up those of leaves by their rank.

    What something made comes after them, and what gets no gradient last.
    """
    kinds: tuple[list[int], list[int], list[int]] = [], [], []
    for place, i in enumerate(part):
        kinds[0 if not owners[i].requires_grad else 1 if owners[i].is_leaf else 2].append(place)
    without, leaves, made = kinds
    leaves.sort(key=lambda place: rank.get(part[place], len(rank)))
    slots = dict(zip(_taken_up(len(leaves), len(made), is_last), leaves, strict=True))
    return (*(slots[slot] for slot in range(len(leaves))), *made, *without)


@cache
def _taken_up(count: int, others: int, is_last: bool) -> tuple[int, ...]:
    """In which order autograd takes up so many leaves, which are put in before others and, unless that is the last of
    the chain, after its next node: observed.
    """
    found: list[int] = []
    with torch.enable_grad():
        leaves = [torch.empty(0, device="cpu", requires_grad=True) for _ in range(count)]
        for i, leaf in enumerate(leaves):
            leaf.register_hook(partial(_note, found, i))
        start = torch.empty(0, device="cpu", requires_grad=not is_last)
        made = (torch.empty(0, device="cpu", requires_grad=True).view(0) for _ in range(others))
        _Together.apply(start.view(0), *leaves, *made).backward(torch.empty(0, device="cpu"))
    return tuple(found)


def _note(found: list[int], i: int, _: torch.Tensor) -> None:
    found.append(i)


class _Together(torch.autograd.Function):
    """Hands gradients to all that it is given."""

    @staticmethod
    def forward(ctx: Any, *given: torch.Tensor) -> torch.Tensor:
        ctx.count = len(given)
        return given[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty_like(gradient) for _ in range(ctx.count))
