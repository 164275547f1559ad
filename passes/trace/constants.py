"""Values that ops inside an op compute from shapes alone: `cov` asks whether its divisor is positive.

Python's own questions are answered by `value_guards`. These come from C++, where every call reaches the fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
EMPTY = frozenset({aten.new_empty, aten.new_empty_strided, aten.empty_like})  # of whatever memory holds
# Op -> the argument that decides how long its result is, and what of it does.
LENGTHS: dict[Any, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
    aten.masked_select.default: (1, torch.count_nonzero),
    aten.nonzero.default: (0, torch.count_nonzero),
    aten.repeat_interleave.Tensor: (0, torch.sum),
}


class Constants:
    """The real values of small fake tensors that depend on nothing but shapes.

    Attributes:
        of_sample: where a length does not: the value that decides it in the sample (`value_guards`).
    """

    def __init__(self) -> None:
        self.values = WeakIdKeyDictionary()
        self.of_sample: Callable[..., torch.Tensor | None] | None = None

    @contextmanager
    def asking(self, of_sample: Callable[..., torch.Tensor | None]) -> Iterator[None]:
        """Ask for what decides lengths while the forward runs, whose guard then says so."""
        self.of_sample = of_sample
        try:
            yield
        finally:
            self.of_sample = None

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
            for tensor in made:  # its kernel may have made it of what is known, by ops that were followed
                self.values.pop(tensor, None)
            return
        real = pytree.tree_leaves(self._really(func, args, kwargs))
        self.values.update({f: r for f, r in zip(made, real, strict=False) if isinstance(r, torch.Tensor)})

    def _follows(self, func: Any, args: Any, kwargs: Any) -> bool:
        if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags or func.overloadpacket in EMPTY:
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
        if func in (aten._ctc_loss.default, aten._ctc_loss.Tensor):  # LossCTC.cpp
            positions, batch = args[0].shape[:2]  # the losses, and the alphas over the longest target
            return (batch,), (batch, positions, 2 * _longest_target(args[1], args[3]) + 1)
        if func not in LENGTHS:
            return None
        position, count = LENGTHS[func]
        told = self.values.get(args[position])
        if told is None and self.of_sample is not None:
            told = self.of_sample(args[position], count)
        if told is None:
            return None
        with disable_current_modes():
            length = int(count(told.expand(torch.broadcast_shapes(told.shape, args[0].shape))))
        return ((length, args[0].dim()) if func is aten.nonzero.default else (length,),)

    def _value(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            known = self.values.get(leaf)
            return torch.empty(leaf.shape, dtype=leaf.dtype) if known is None else known
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _longest_target(targets: torch.Tensor, lengths: torch.Tensor | list[int]) -> int:
    """How long CTC's longest target is; where a tensor says how long each is, how long one could be."""
    if not isinstance(lengths, torch.Tensor):
        return max(lengths, default=0)
    return targets.shape[1] if targets.dim() == 2 else targets.numel()
