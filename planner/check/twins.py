"""What stands in for a step's parameters, buffers and inputs: a check runs on it, and never touches the user's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from passes._torch import storage_of
from passes.memory import span
from passes.run.tensors import alone
from passes.trace.arguments import lend_attributes

SCALE = 31 / 32
NUDGE = 2.0**-7


def twins(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Equal tensors in memory of their own: the same layouts, sharing memory with each other where `tensors` do."""
    groups: dict[tuple[int, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault((storage_of(tensor).data_ptr(), tensor.dtype), []).append(i)
    found: dict[int, torch.Tensor] = {}
    for indices in groups.values():
        if tensors[indices[0]].layout is not torch.strided:
            found.update((i, stand_in(tensors[i], tensors[i].detach().clone())) for i in indices)
            continue
        starts = [int(tensors[i].storage_offset()) for i in indices]
        ends = [(start, start + span(tensors[i])) for start, i in zip(starts, indices, strict=True)]
        low, high = min(a for a, _ in ends), max(b for _, b in ends)
        together = len(indices) > 1 and high - low <= sum(b - a for a, b in ends)
        whole = _copy(tensors[indices[0]], low, high) if together else None
        for i, (first, last) in zip(indices, ends, strict=True):
            memory, start = (_copy(tensors[i], first, last), 0) if whole is None else (whole, first - low)
            found[i] = stand_in(tensors[i], alone(memory.as_strided(tensors[i].shape, tensors[i].stride(), start)))
    return [found[i] for i in range(len(tensors))]


def _copy(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    return tensor.detach().as_strided((last - first,), (1,), first).clone()


def stand_in(tensor: torch.Tensor, twin: torch.Tensor) -> torch.Tensor:
    """The leaf `twin`, of the tensor's kind and with what was set on it."""
    if isinstance(tensor, nn.Parameter):
        return lend_attributes(tensor, nn.Parameter(twin, tensor.requires_grad))
    return lend_attributes(tensor, twin.requires_grad_(tensor.requires_grad))


def nudged(tensor: torch.Tensor, is_parameter: bool) -> torch.Tensor:
    """What the tensor holds at the second step: moved, as an optimizer moves parameters, so that a stale copy shows.

    Signs, zeros and infinities of a buffer stay, and every number keeps to what bounds it.
    """
    value = tensor.detach()
    if value.element_size() < 2 or not (value.is_floating_point() or value.is_complex()):
        return value
    return value * SCALE + NUDGE if is_parameter else value * SCALE


def varied(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Another batch that is as valid as this one: its samples in another order, and floats a little smaller.

    Samples change places only where all inputs have as many rows, so that what belongs together stays together, and
    are dense and on the CPU, where an index out of bounds is an error like another.
    """
    rows = {t.shape[0] for t in inputs if t.dim()}
    plain = all(t.device.type == "cpu" and t.layout is torch.strided for t in inputs)
    moved = len(rows) == 1 and plain and not any(map(_is_offsets, inputs))
    return [nudged(t.roll(1, 0) if moved and t.dim() else t, False) for t in inputs]


def _is_offsets(t: torch.Tensor) -> bool:
    """Row boundaries, as `embedding_bag` and packed sequences take them, have an order to keep."""
    whole = not (t.is_floating_point() or t.is_complex())
    return whole and t.dim() == 1 and t.numel() > 1 and bool((t[1:] >= t[:-1]).all())
