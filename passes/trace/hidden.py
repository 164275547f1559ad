"""Tensors in places where arguments and outputs are not taken apart: sets, slots, closures, generators, partials."""

from __future__ import annotations

import gc
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from passes._torch import FakeTensor, FunctionalTensor

from ..errors import Unsupported
from .templates import Constant, Opaque, Template, Tree, parts

MAX_VISITED = 20_000
_CLOSED = (type, types.ModuleType, types.CodeType, str, bytes, int, float)


def refuse_hidden(template: Template, what: str) -> None:
    """Raise Unsupported where a constant of the template holds a tensor.

    Args:
        what: "the output" or "the arguments".
    """
    for path, value in _constants(template, ""):
        if (tensor := _tensor_in(value)) is not None:
            kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
            raise Unsupported(
                "tensor in an object that cannot be taken apart", f"{what}{path} ({kind}, with a tensor of shape "
                f"{tuple(tensor.shape)} in it)", "later steps would be given the tensor of the step that was traced",
                "Return or pass it in a tuple, list, dict or dataclass.",
            )  # fmt: skip


def trained_tensors(template: Template) -> Iterator[tuple[str, torch.Tensor]]:
    """Those that require a gradient in what a template takes for constants, with its path and a number."""
    for path, value in _constants(template, ""):
        found = (t for t in _tensors_in(value) if t.requires_grad and t.grad_fn is not None)
        yield from ((f"{path}({type(value).__name__} {i})", tensor) for i, tensor in enumerate(found))


def _constants(template: Template, path: str) -> Iterator[tuple[str, Any]]:
    match template:
        case Constant(value):
            yield path, value
        case Tree() | Opaque():
            if isinstance(template, Opaque):
                yield path, template.prototype
            for name, child in parts(template):
                yield from _constants(child, path + name)


def _tensor_in(value: Any) -> torch.Tensor | None:
    return next(_tensors_in(value), None)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that can be reached from a value, not through a class or global.

    A module keeps its own tensors, so what is reached through one counts only where it was traced.
    """
    pending, seen = deque([(value, False)]), {id(value)}
    while pending and len(seen) < MAX_VISITED:
        current, of_module = pending.popleft()
        if isinstance(current, torch.Tensor):
            if not of_module or isinstance(current, (FakeTensor, FunctionalTensor)):
                yield current
            continue
        of_module = of_module or isinstance(current, nn.Module)
        for inner in _inside(current):
            if id(inner) not in seen and not isinstance(inner, _CLOSED):
                seen.add(id(inner))
                pending.append((inner, of_module))


def _inside(value: Any) -> list[Any]:
    if isinstance(value, _CLOSED):
        return []
    if isinstance(value, types.FunctionType):
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__]
    if isinstance(value, types.BuiltinFunctionType):
        return [value.__self__]
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return [] if frame is None else list(frame.f_locals.values())
    if isinstance(value, (types.CoroutineType, types.AsyncGeneratorType)):
        frame = getattr(value, "cr_frame", None) or getattr(value, "ag_frame", None)
        return [] if frame is None else list(frame.f_locals.values())
    return gc.get_referents(value)
