"""Plain values that forward sets as attributes of the model's modules (`self.rows = len(x)`).

A trace holds for one course of the forward, so they are constants of it: a planned step sets them after its forward. Of
an integer that forward only adds to (`self.seen += len(x)`) how much it adds is one.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .nodes import MISSING, PLAIN, same


@dataclass(frozen=True)
class Setting:
    """One attribute of the module at a path, and what forward leaves there.

    Attributes:
        added: of an integer that forward reads and then sets, how much more than before that is; None of others.
    """

    path: str
    name: str
    value: Any
    added: int | None = None

    def __str__(self) -> str:
        return ".".join(part for part in ("self", self.path, self.name) if part)

    def of(self, model: nn.Module) -> dict[str, Any]:
        """The attributes of the model's module at the path."""
        return vars(model.get_submodule(self.path))


def steady(
    found: Sequence[Setting], first: Mapping[str, Any], model: nn.Module, is_added_to: Callable[[str], bool]
) -> tuple[Setting, ...]:
    """Those that an earlier run of the same forward has left, too, and integers that it only adds to.

    Args:
        first: what that run changed, by `str(Setting)`; the rest is as it is in the model.
        is_added_to: whether forward does nothing else with an attribute of that name.
    """

    def is_left(s: Setting) -> bool:
        if s.added is not None:
            return is_added_to(s.name)
        return same(first.get(str(s), s.of(model).get(s.name, MISSING)), s.value)

    return tuple(filter(is_left, found))


def set_again(found: Sequence[Setting], model: nn.Module) -> None:
    """Leave in the model what forward leaves."""
    for setting in found:
        own, name = setting.of(model), setting.name
        own[name] = setting.value if setting.added is None else own[name] + setting.added


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
