"""What a planned step does with its tensors as objects. Needs torch alone: exports hold a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ._torch import bare, num_owners


def distinct(outputs: Sequence[torch.Tensor], differentiable: Sequence[bool]) -> tuple[torch.Tensor, ...]:
    """The outputs, every one an object of its own, as autograd wants them.

    Those with a gradient that share memory are views of one tensor. A change in place of one, which the gradients of
    the others would have to follow, is then an error of autograd's: it lets no view that a custom function returns be
    changed, nor be read after its base was. What shares memory with no such output is handed out as no view.
    """
    roots: dict[int, torch.Tensor] = {}
    result, seen = [], set[int]()
    places, sharing = places_of(outputs), overlapping(outputs, differentiable)
    for i, (output, place) in enumerate(zip(outputs, places, strict=True)):
        if i not in sharing:
            own = alone(output) if output._is_view() or id(output) in seen else output
        else:
            root = roots.setdefault(place, output if output._base is None else output._base)
            is_one = id(output) not in seen and (output is root or output._base is root)
            own = output if is_one else _view_like(output, root)
        result.append(own)
        seen.add(id(output))
    return tuple(result)


def overlapping(tensors: Sequence[torch.Tensor], which: Sequence[bool]) -> set[int]:
    """Which of some of the tensors lie between the first and the last element of another of those."""
    spans = {i: _span(t) for i, (t, chosen) in enumerate(zip(tensors, which, strict=True)) if chosen and t.numel()}
    return {
        i for i, (place, begin, end) in spans.items()
        if any(i != j and place == at and begin < until and start < end for j, (at, start, until) in spans.items())
    }  # fmt: skip


def _span(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Where the tensor's storage begins, and there its first byte and the one after its last."""
    begin = int(tensor.storage_offset()) * tensor.itemsize
    return tensor.untyped_storage().data_ptr(), begin, begin + reach(tensor)


def reach(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first item to behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(last + 1) * tensor.itemsize


def _view_like(tensor: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
    """The tensor, which lies in the root's memory, as a view of the root."""
    parts, memory = (_as_real(t.conj() if t.is_conj() else t) for t in (tensor, root))
    memory = memory._neg_view() if root.is_neg() else memory
    view = memory.as_strided(parts.size(), parts.stride(), parts.storage_offset())
    view = torch.view_as_complex(view) if tensor.is_complex() else view
    view = view.conj() if tensor.is_conj() else view
    return view._neg_view() if tensor.is_neg() else view


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def places_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Where the memory of each begins, as `memory_of` has it. A step asks for those of all that it reads and keeps."""
    tensors = list(tensors)
    at_their_start = not any(map(torch.Tensor.storage_offset, tensors))
    return list(map(torch.Tensor.data_ptr if at_their_start else memory_of, tensors))


def apart(gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Gradients each in memory of its own: autograd keeps what it is given as `.grad`, which is clipped in place."""
    places = list(map(memory_of, gradients))
    if len(set(places)) == len(places):
        return tuple(gradients)
    return tuple(g.clone() if places[i] in places[:i] else g for i, g in enumerate(gradients))


def memory_of(tensor: torch.Tensor) -> int:
    """Where the tensor's memory begins; 0 for one without any: empty, or zeros that are not written out yet.

    Its storage is not asked: autograd adds nothing in place to a tensor whose storage Python has once seen.
    """
    place = tensor.data_ptr()
    return place and place - int(tensor.storage_offset()) * tensor.itemsize


def meeting(
    tensors: Sequence[torch.Tensor], places: Sequence[int], which: Iterable[int]
) -> tuple[tuple[int, int], ...]:
    """Pairs of one of `which` and another tensor that has some of its memory; `places` are those of `memory_of`."""
    owners: dict[int, list[int]] = {}
    for i in which:
        owners.setdefault(places[i], []).append(i)
    return tuple(
        (i, j) for j, place in enumerate(places) if place for i in owners.get(place, ())
        if i != j and _meet(tensors[i], tensors[j])
    )  # fmt: skip


def _meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() < b.data_ptr() + reach(b) and b.data_ptr() < a.data_ptr() + reach(a)


def nodes_behind(
    tensors: Iterable[torch.Tensor], nodes: Iterable[Any] = (), enters: Callable[[Any], bool] = lambda node: True
) -> Iterator[Any]:
    """The nodes of autograd's graph that the tensors were computed by, each once, and others with those behind them.

    Args:
        enters: whether to go on behind a node.
    """
    seen, waiting = set[Any](), [*(tensor.grad_fn for tensor in tensors), *nodes]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [before for before, _ in node.next_functions] if enters(node) else []


def laid_out(gradient: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """The gradient in the layout that was traced; where there is one index only, the steps between indices are free.

    Bits that say that it is conjugated or negated are resolved: the traced ones had none.
    """
    gradient = gradient.resolve_conj().resolve_neg()
    if gradient.stride() == stride:
        return gradient.detach()
    if is_laid_out(gradient, stride):
        return gradient.detach().as_strided(gradient.shape, stride)
    return torch.empty_strided(gradient.shape, stride, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


def is_laid_out(gradient: torch.Tensor, stride: Sequence[int]) -> bool:
    """Whether the gradient has the traced strides, wherever there is more than one index."""
    own = gradient.stride()
    steps = zip(gradient.shape, own, stride, strict=True)
    return own == stride or not gradient.numel() or all(size == 1 or mine == traced for size, mine, traced in steps)


def held_once(tensor: torch.Tensor) -> bool:
    """Whether nothing but `tensor`, and the tensor that it is a view of, refers to its memory.

    What a step saves is `alone`: never a view of what its caller was given, so a caller's tensor always counts.
    """
    own = 1 if tensor._base is None else 2
    return num_owners(tensor.untyped_storage()) == own + 1  # and the storage object itself


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory and layout in a tensor that keeps no other tensor alive, as a view would."""
    return bare(tensor)
