"""Text from outside (names of modules, paths, arguments, values) on one line of any terminal, file or page."""

from __future__ import annotations

import reprlib
import types
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import nn
from torch.overrides import TorchFunctionMode


def printable(text: Any) -> str:
    r"""`text` with everything that does not print escaped: newlines, control codes, lone surrogates (`\ud800`)."""
    text = str(text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def brief(text: Any, longest: int = 200) -> str:
    """`printable`, with the middle left out of what is longer."""
    shown = printable(text)
    return shown if len(shown) <= longest else f"{shown[: longest // 2]}...{shown[-longest // 2 :]}"


def few(names: Sequence[str], most: int = 4) -> str:
    """The first of several names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names) if more <= 1 else f"{', '.join(names[:most])} and {more} more"


def shown(value: Any, longest: int = 80) -> str:
    """A value in a message: tensors, wherever it holds them, by their shapes; the beginning of what is longer."""
    with _Shapes():
        text = printable(" ".join(_SHORT.repr(value).split()))
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def describe_kind(kind: type) -> str:
    return f"{'an' if kind.__name__[:1] in 'AEIOUaeiou' else 'a'} {kind.__name__}"


class _Short(reprlib.Repr):
    """The first few items of what is in containers, and no addresses."""

    def repr_instance(self, x: Any, level: int) -> str:
        kind = type(x)
        if isinstance(x, (torch.Tensor, numpy.ndarray)):
            return _shape(x)
        if isinstance(x, nn.Module) or kind.__repr__ is object.__repr__:
            return describe_kind(kind)
        if isinstance(x, (type, types.FunctionType, types.BuiltinFunctionType)):
            return x.__qualname__
        try:
            return repr(x)
        except Exception:  # noqa: BLE001 - the user's own code
            return describe_kind(kind)


_SHORT = _Short()
_SHORT.maxstring = _SHORT.maxlong = 80
_SHORT.maxdict = _SHORT.maxlist


class _Shapes(TorchFunctionMode):
    """Tensors are written as their shapes in the block, also by the `repr` of what holds them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("__repr__", "__format__"):
            return _shape(args[0])
        return func(*args, **(kwargs or {}))


def _shape(tensor: Any) -> str:
    device = f" on {tensor.device}" if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu" else ""
    return f"{type(tensor).__name__} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{device}"
