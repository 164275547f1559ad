"""Memory that tensors of a step share, where the forward overwrites it: what is read there depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from .._torch import local_part
from ..run.tensors import meeting, memory_of, reach

Overlaps = tuple[tuple[int, int], ...]
WITH_MEMORY = (torch.Tensor, nn.Parameter, nn.Buffer)  # other classes may have no memory


def spans(tensors: Sequence[torch.Tensor]) -> list[int] | None:
    """How many bytes of memory each reaches over; None where one has none of its own."""
    return list(map(reach, tensors)) if all(type(t) in WITH_MEMORY for t in tensors) else None


def lie_apart(tensors: Sequence[torch.Tensor], spans: Sequence[int]) -> bool:
    """Whether no two of them share memory, as far as can be told at once."""
    places = sorted(zip(map(torch.Tensor.data_ptr, tensors), spans, strict=True))
    return all(place + span <= after for (place, span), (after, _) in pairwise(places))


def overlaps(tensors: Sequence[torch.Tensor], overwritten: Sequence[int]) -> Overlaps:
    """Pairs of a tensor that is overwritten and another one that has some of its memory."""
    if not overwritten:
        return ()
    local = [t if type(t) in WITH_MEMORY else local_part(t) for t in tensors]
    places = [memory_of(t) if type(t) in WITH_MEMORY else 0 for t in local]
    return meeting(local, places, overwritten)
