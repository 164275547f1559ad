"""masks: what is written where a boolean mask says (`h[mask] = features`), and needs a gradient.

Its gradient is `gradient[mask]`, whose length is asked for in the backward, where nobody knows the mask's values. So
the places that the mask picks are looked for in the forward, as the kernel does itself: with the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from passes._torch import DisableTorchFunction

_WRITES = frozenset({Tensor.__setitem__, Tensor.index_put, Tensor.index_put_, torch.index_put, torch.index_put_})


def at_places(func: Any, args: Sequence[Any], kwargs: dict[str, Any], known: Collection[Tensor]) -> tuple[Any, Any]:
    """The arguments of a call, with the places that `known` masks pick for these, where that is such a write."""
    if func not in _WRITES:
        return args, kwargs
    given = {**dict(zip(("input", "indices", "values", "accumulate"), args, strict=False)), **kwargs}
    indices, values = given.get("indices"), given.get("values")
    with DisableTorchFunction():  # other modes would be told of it
        if not (isinstance(values, Tensor) and values.requires_grad and torch.is_grad_enabled()):
            return args, kwargs
    masks = {id(t) for t in known if t.dtype is torch.bool and t.dim()}
    each = indices if isinstance(indices, (tuple, list)) else (indices,)
    if not any(id(index) in masks for index in each):
        return args, kwargs
    found = (index.nonzero().unbind(1) if id(index) in masks else (index,) for index in each)
    places = tuple(place for of_one in found for place in of_one)
    return ((args[0], places, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "indices": places})
