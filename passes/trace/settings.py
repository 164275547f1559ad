"""Plain values that forward sets as attributes of the model's modules (`self.rows = len(x)`).

A trace holds for one course of the forward, so they are constants of it: a planned step sets them after its forward.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .nodes import MISSING, PLAIN, same


@dataclass(frozen=True)
class Setting:
    """One attribute of the module at a path, and what forward leaves there."""

    path: str
    name: str
    value: Any

    def __str__(self) -> str:
        return ".".join(part for part in ("self", self.path, self.name) if part)

    def of(self, model: nn.Module) -> dict[str, Any]:
        """The attributes of the model's module at the path."""
        return vars(model.get_submodule(self.path))


def steady(found: Sequence[Setting], first: Mapping[str, Any], model: nn.Module) -> tuple[Setting, ...]:
    """Those that an earlier run of the same forward has left, too.

    Args:
        first: what that run changed, by `str(Setting)`; the rest is as it is in the model.
    """
    return tuple(s for s in found if same(first.get(str(s), s.of(model).get(s.name, MISSING)), s.value))


def set_again(found: Sequence[Setting], model: nn.Module) -> None:
    """Leave in the model what forward leaves."""
    for setting in found:
        setting.of(model)[setting.name] = setting.value


@contextmanager
def set_aside(found: Sequence[Setting], model: nn.Module) -> Iterator[None]:
    """Undo at the end what the block, in which forward runs again, sets."""
    before = [(setting.of(model), setting.name) for setting in found]
    values = [own.get(name, MISSING) for own, name in before]
    try:
        yield
    finally:
        for (own, name), value in zip(before, values, strict=True):
            if value is MISSING:
                own.pop(name, None)
            else:
                own[name] = value


def is_plain(value: Any) -> bool:
    """Whether it cannot change, and holds nothing that can."""
    if type(value) in (tuple, torch.Size):
        return all(map(is_plain, value))
    if isinstance(value, str) and "Tensor" in value:  # a tensor's class, which is another one while tracing
        return False
    return type(value) in PLAIN or isinstance(value, enum.Enum)
