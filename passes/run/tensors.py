"""What a planned step does with its tensors as objects. Needs torch alone: exports hold a copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ._torch import bare, num_owners


def distinct(outputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Autograd wants every output to be an object of its own, and lets none that is a view be changed in place.

    A view that has its memory to itself, a linear layer's reshaped result, say, is handed out as no view.
    """
    seen: set[int] = set()
    places = places_of(outputs)
    result = []
    for output, place in zip(outputs, places, strict=True):
        own = output if not output._is_view() or places.count(place) > 1 else alone(output)
        result.append(output.detach() if id(output) in seen else own)
        seen.add(id(output))
    return tuple(result)


def places_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Where the storages of tensors begin."""
    return list(map(torch.UntypedStorage.data_ptr, map(torch.Tensor.untyped_storage, tensors)))


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


def nodes_behind(tensors: Iterable[torch.Tensor], nodes: Iterable[Any] = ()) -> Iterator[Any]:
    """The nodes of autograd's graph that the tensors were computed by, each once, and others with those behind them."""
    seen, waiting = set[Any](), [*(tensor.grad_fn for tensor in tensors), *nodes]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [before for before, _ in node.next_functions]


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
