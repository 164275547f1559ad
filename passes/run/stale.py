"""Casts that autocast keeps, of parameters that changed since, are noticed. Needs torch alone: exports hold a copy.

Torch keeps its casts of parameters until the outermost block of autocast ends. Where an optimizer steps before that,
the plain model goes on with the old ones; a planned step casts anew at each call.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from ._torch import own_part, within_autocast
from .errors import PlannerError

_EMPTY = torch.zeros(0, 0)
_CANARY = torch.zeros(0, 0, requires_grad=True)


class StaleCasts(PlannerError, RuntimeError):
    """A parameter was changed while autocast keeps a cast of it, with which the plain model would go on."""


def note_casts(cast: Iterable[tuple[str, torch.Tensor]], planned: bool = True) -> None:
    """Remember, as long as autocast keeps its casts, what these parameters are.

    Args:
        planned: whether a planned step casts them; if not, the plain model does, if anyone.

    Raises:
        StaleCasts: a planned step casts one that was cast before and changed since.
    """
    known = _notes()
    if known is None:
        return
    for name, tensor in cast:
        now, (reference, then, _) = _state(tensor), known.get(id(tensor), _UNKNOWN)
        if reference() is not tensor:
            known[id(tensor)] = weakref.ref(tensor), now, planned
        elif planned and then != now:
            _refuse(name)
        elif planned:
            known[id(tensor)] = reference, then, True


def check_casts(model: torch.nn.Module) -> None:
    """Look, before the plain model runs, at its parameters that a planned step has cast in this block.

    Raises:
        StaleCasts: one was changed since.
    """
    known = _notes() or {}
    for name, tensor in model.named_parameters() if known else ():
        reference, then, planned = known.get(id(tensor), _UNKNOWN)
        if planned and reference() is tensor and then != _state(tensor):
            _refuse(name)


def note_plain(model: torch.nn.Module) -> None:
    """The same for a call of the plain model, which casts parameters itself.

    Raises:
        StaleCasts: as `check_casts`.
    """
    check_casts(model)
    if torch.is_grad_enabled():  # else autocast keeps nothing
        note_casts(model.named_parameters(), planned=False)


def _notes() -> dict[int, Any] | None:
    """What was noted since autocast's cache was last cleared, kept with a cast of a tensor of our own in it."""
    if not torch.is_autocast_cache_enabled() or not within_autocast():
        return None
    enabled = torch.is_autocast_enabled("cpu")
    try:
        torch.set_autocast_enabled("cpu", True)
        with torch.enable_grad():
            node: Any = torch.addmm(_CANARY, _EMPTY, _EMPTY).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    finally:
        torch.set_autocast_enabled("cpu", enabled)
    found: dict[int, Any] = node.metadata.setdefault("planner", {})
    return found


def _state(tensor: torch.Tensor) -> tuple[int, int]:
    part = own_part(tensor)
    return tensor._version, part.data_ptr() if type(part) in _PLAIN else 0


def _nothing() -> None:
    return None


_UNKNOWN: Any = (_nothing, None, False)
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # others may have no memory


def _refuse(name: str) -> None:
    raise StaleCasts(
        f"{name} was changed since this block of autocast began, which casts it: torch keeps the cast until the "
        "outermost block ends, and the plain model would go on with that of the old value; a planned step casts anew. "
        "End the block after each forward, call torch.clear_autocast_cache() after optimizer.step(), or give the block "
        "cache_enabled=False."
    )
