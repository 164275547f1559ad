"""arrivals: in which order autograd takes up the gradients that a node hands over together.

Its queue is a heap, in which leaves are equal: more than three come out in another order than they were put in.
`DistributedDataParallel` orders its buckets by it, so they are put in as they have to be to come out right.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch

Parts = tuple[tuple[int, ...], ...]


def kind(owner: torch.Tensor) -> int:
    """0 for what gets no gradient, 1 for a leaf, 2 for what something made."""
    return 0 if not owner.requires_grad else 1 if owner.is_leaf else 2


@lru_cache(maxsize=256)
def listed(parts: Parts, kinds: tuple[int, ...], arrivals: tuple[int, ...]) -> tuple[Parts, Parts]:
    """The places in each part, as the nodes of a chain list them for autograd to take up leaves as in `arrivals`, and
    what is there.

    What something made comes after them, and what gets no gradient last. A step asks each time it runs.
    """
    rank = {i: k for k, i in enumerate(arrivals)}
    places = tuple(_listed(part, kinds, rank, n == len(parts)) for n, part in enumerate(parts, 1))
    return places, tuple(tuple(part[k] for k in order) for part, order in zip(parts, places, strict=True))


def _listed(part: tuple[int, ...], kinds: tuple[int, ...], rank: dict[int, int], is_last: bool) -> tuple[int, ...]:
    without, leaves, made = ([place for place, i in enumerate(part) if kinds[i] == each] for each in range(3))
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
            leaf.register_hook(lambda _, i=i: found.append(i))
        start = torch.empty(0, device="cpu", requires_grad=not is_last)
        made = (torch.empty(0, device="cpu", requires_grad=True).view(0) for _ in range(others))
        _Together.apply(start.view(0), *leaves, *made).backward(torch.empty(0, device="cpu"))
    return tuple(found)


class _Together(torch.autograd.Function):
    """Hands gradients to all that it is given."""

    @staticmethod
    def forward(ctx: Any, *given: torch.Tensor) -> torch.Tensor:
        ctx.count = len(given)
        return given[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty_like(gradient) for _ in range(ctx.count))
