"""Values that do not depend on the step's inputs, known while tracing.

A fake tensor has no data, so `if (positions.diff() != 1).any()` cannot be decided although `positions` is an
`arange` and the answer is the same at every call. Beside each traced tensor that was computed from constants
alone, its real value is computed too; where Python asks for it, it is there. What depends on an input, a
parameter or randomness stays unknown and fails to trace, as it must.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

LARGEST = 1 << 22  # elements
FACTORIES = frozenset(
    {torch.arange, torch.zeros, torch.ones, torch.full, torch.tensor, torch.linspace, torch.eye, torch.scalar_tensor}
)
QUESTIONS = frozenset(
    {torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__,
     torch.Tensor.__index__, torch.equal, torch.is_nonzero}
)  # fmt: skip


class KnownConstants(TorchFunctionMode):
    """Keeps real values beside traced ones and answers Python's questions about them."""

    def __init__(self) -> None:
        super().__init__()
        self.values = WeakIdKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        known = all(t in self.values for t in tensors) and (bool(tensors) or func in FACTORIES)
        if not known:
            if tensors and _writes(func, kwargs) and tensors[0] in self.values:
                self.values.clear()
            return func(*args, **kwargs)
        real = self._really(func, args, kwargs)
        if func in QUESTIONS and real is not None:
            return real[0]
        result = func(*args, **kwargs)
        if real is not None:
            self._remember(result, real[0])
        return result

    def _really(self, func: Any, args: Any, kwargs: Any) -> tuple[Any] | None:
        """The call on real values, in a 1-tuple; None where it cannot be made."""
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            try:
                real_args, real_kwargs = pytree.tree_map(self._value, (args, kwargs))
                if real_kwargs.get("device") is not None:
                    real_kwargs["device"] = torch.device("cpu")
                return (func(*real_args, **real_kwargs),)
            except Exception:  # noqa: BLE001 - whatever it is, tracing the call itself will say it better
                return None

    def _value(self, leaf: Any) -> Any:
        return self.values[leaf] if isinstance(leaf, torch.Tensor) else leaf

    def _remember(self, result: Any, real: Any) -> None:
        for traced, value in zip(_tensors(result), _tensors(real), strict=False):
            if traced.shape == value.shape and value.numel() <= LARGEST and type(value) is torch.Tensor:
                self.values[traced] = value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor))


def _writes(func: Any, kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    return "out" in kwargs or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
