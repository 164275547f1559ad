"""casts: what autocast's cache holds of the caller's is set aside while something is planned, and put back.

Autocast casts a leaf once per block, and the gradients of all its uses there go through that one cast. The cache is
the process's: planning must neither read the caller's casts nor leave its own, and can only clear all of it. So the
casts are taken out before, tensor by tensor, as autocast itself would find them, and handed to it again after.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch

from ._torch import AUTOGRAD_KEYS, DisableTorchFunction, scoped_library
from .run._torch import within_autocast

Cast = Callable[[torch.Tensor], torch.Tensor]
KINDS = ("cpu", "cuda")

_are_aside = False
_frozen: tuple[int, list[Any]] = (0, [])  # how many objects the collector leaves out, and the tensors among them


@contextmanager
def casts_aside() -> Iterator[None]:
    """Let autocast's cache be empty in the block, and as it was after it, where a block of the caller's is open.

    Blocks may be nested: the outermost counts. One thread at a time is in such a block.
    """
    global _are_aside
    if _are_aside or not within_autocast():
        yield
        return
    kept, _are_aside = _kept_casts(), True
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        _are_aside = False
        torch.clear_autocast_cache()
        _keep(kept)


class _NoCast(Exception):
    """Autocast keeps no cast of a tensor."""


def _kept_casts() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The tensors that autocast keeps a cast of, each with it."""
    kept = []
    with _casting(_no_cast):
        for tensor in filter(_may_be_kept, [*gc.get_objects(), *_frozen_tensors()]):
            try:
                kept.append((tensor, torch.matmul(tensor, tensor)))
            except _NoCast:
                continue
    return kept


def _keep(kept: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Let autocast find these casts."""
    casts = {id(tensor): cast for tensor, cast in kept}
    with _casting(lambda tensor: casts[id(tensor)]):
        for tensor, _ in kept:
            torch.matmul(tensor, tensor)


def _may_be_kept(found: Any) -> bool:
    if not issubclass(type(found), torch.Tensor) or found.dtype != torch.float32 or found.layout != torch.strided:
        return False
    return found.requires_grad and _is_leaf(found) and found.device.type in KINDS and not found.is_nested


def _is_leaf(found: torch.Tensor) -> bool:
    try:
        return found.is_leaf
    except RuntimeError:  # a view whose base was changed: torch refuses to tell, whoever asks
        return False


def _frozen_tensors() -> list[torch.Tensor]:
    """The tensors that `gc.freeze()` has hidden from the collector, as far as they can be reached."""
    global _frozen
    count = gc.get_freeze_count()
    if count > _frozen[0]:
        met, found = [*gc.get_objects(), sys.modules, *_locals()], []
        seen = set(map(id, met))
        while met:
            met = list({id(o): o for o in gc.get_referents(*met) if id(o) not in seen and gc.is_tracked(o)}.values())
            seen.update(map(id, met))
            found += [weakref.ref(o) for o in met if issubclass(type(o), torch.Tensor)]
        _frozen = count, found
    return [t for reference in _frozen[1] if (t := reference()) is not None] if count else []


def _locals() -> Iterator[Any]:
    """What functions that run now hold, which the collector does not follow."""
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            yield from list(frame.f_locals.values())
            frame = frame.f_back


def _no_cast(tensor: torch.Tensor) -> torch.Tensor:
    raise _NoCast


@contextmanager
def _casting(cast: Cast) -> Iterator[None]:
    """Let `torch.matmul(tensor, tensor)` return what autocast casts the tensor to, and `cast` be how it does so."""
    own, aten = threading.get_ident(), torch.ops.aten
    meant: dict[Any, Cast] = {aten.to.dtype: cast, aten.matmul.default: lambda tensor: tensor}

    def kernel(op: Any) -> Callable[..., Any]:
        def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return meant[op](tensor) if threading.get_ident() == own else op.decompose(tensor, *args, **kwargs)

        return run

    with ExitStack() as stack:
        library = stack.enter_context(scoped_library("aten", "IMPL"))
        for op in meant:
            for key in AUTOGRAD_KEYS:
                library.impl(op, kernel(op), key.name)
        stack.enter_context(DisableTorchFunction())
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(True)
        for kind in KINDS:
            stack.callback(torch.set_autocast_enabled, kind, torch.is_autocast_enabled(kind))
            torch.set_autocast_enabled(kind, True)
        yield
