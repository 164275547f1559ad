"""A gradient by eager's own formula, where that formula looks at values. Needs torch alone: exports hold a copy.

`prod` divides where no factor is zero, and a full `max` picks out what is largest: autograd asks the tensors while it
runs, which no graph can hold. So the op runs once more, with autograd, and is differentiated on the spot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ._torch import with_autograd


def gradient_of(
    op: str,
    gradient: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    constants: Sequence[int],
    differentiated: Sequence[int],
    wanted: int,
) -> torch.Tensor:
    """The gradient with respect to `tensors[wanted]` of `op(*tensors, *constants)`, whose result has `gradient`.

    Args:
        op: name of an ATen op with one result, `prod.dim_int`.
        differentiated: which of the tensors require a gradient, as a formula may compute what they share once.
    """
    function: Any = torch.ops.aten
    for name in op.split("."):
        function = getattr(function, name)
    kinds = [str(a.type) for a in function._schema.arguments][len(tensors) :]
    given = [bool(c) if kind == "bool" else c for c, kind in zip(constants, kinds, strict=False)]
    with with_autograd():
        leaves = [t.detach().requires_grad_(i in differentiated) for i, t in enumerate(tensors)]
        result = function(*leaves, *given)
        return torch.autograd.grad(result, leaves[wanted], gradient)[0]
