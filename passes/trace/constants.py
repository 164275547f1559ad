"""Values that ops inside an op compute from shapes alone: `cov` asks whether its divisor is positive.

Python's own questions are answered by `value_guards`. These come from C++, where every call reaches the fake tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from passes._torch import WeakIdKeyDictionary, disable_current_modes, pytree

aten = torch.ops.aten
LARGEST = 1 << 16  # elements
FACTORIES = frozenset(
    getattr(aten, name)
    for name in ("arange", "zeros", "ones", "full", "linspace", "eye", "scalar_tensor", "ones_like", "zeros_like",
                 "full_like", "new_ones", "new_zeros", "new_full", "triu_indices", "tril_indices")
)  # fmt: skip
LENGTHS = {aten.masked_select.default: 1, aten.nonzero.default: 0}  # op -> the argument that decides how long it is


class Constants:
    """The real values of small fake tensors that depend on nothing but shapes."""

    def __init__(self) -> None:
        self.values = WeakIdKeyDictionary()

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a question (`equal`, `item`) is answered; None for other calls, and where it is not known."""
        if any(isinstance(r.type, (torch.TensorType, torch.ListType)) for r in func._schema.returns):
            return None
        return self._really(func, args, kwargs) if self._follows(func, args, kwargs) else None

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Know the value of what was just computed, where shapes alone decide it."""
        if func._schema.is_mutable:
            self.values.clear()  # views of what is written may be known
            return
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if not made or any(t.numel() > LARGEST for t in made) or not self._follows(func, args, kwargs):
            return
        real = pytree.tree_leaves(self._really(func, args, kwargs))
        self.values.update({f: r for f, r in zip(made, real, strict=False) if isinstance(r, torch.Tensor)})

    def _follows(self, func: Any, args: Any, kwargs: Any) -> bool:
        if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
            return False
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        return func.overloadpacket in FACTORIES or (bool(leaves) and all(t in self.values for t in leaves))

    def _really(self, func: Any, args: Any, kwargs: Any) -> Any:
        with disable_current_modes(), torch.no_grad():
            try:
                real_args, real_kwargs = pytree.tree_map(self._value, (args, kwargs))
                return func(*real_args, **real_kwargs)
            except (RuntimeError, IndexError, ValueError, TypeError):
                return None

    def shapes(self, func: Any, args: Any) -> tuple[tuple[int, ...], ...] | None:
        """What an op makes whose results' shapes depend on values in general, where shapes alone decide them."""
        if func is aten._ctc_loss.default:  # LossCTC.cpp: the losses, and the alphas over the longest target
            positions, batch = args[0].shape[:2]
            return (batch,), (batch, positions, 2 * max(args[3], default=0) + 1)
        position = LENGTHS.get(func)
        if position is None or args[position] not in self.values:
            return None
        with disable_current_modes():
            mask = self.values[args[position]]
            count = int(mask.expand(torch.broadcast_shapes(mask.shape, args[0].shape)).count_nonzero())
        return ((count, args[0].dim()) if func is aten.nonzero.default else (count,),)

    def _value(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            known = self.values.get(leaf)
            return torch.empty(leaf.shape, dtype=leaf.dtype) if known is None else known
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf
