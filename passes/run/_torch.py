"""What a step needs of torch's semi-private names while it runs. Needs torch alone: exports hold a copy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import register_pytree_node

__all__ = ["below_autograd", "num_owners", "register_pytree_node", "under_transform", "with_autograd"]

_C: Any = torch._C


@contextlib.contextmanager
def below_autograd() -> Iterator[None]:
    """Run ops straight on their kernels: no autograd graph, no view bookkeeping, no autocast.

    Gradient mode stays on, as in the plain forward: some kernels ask for it (oneDNN's LSTM keeps what its backward
    needs only then).
    """
    no_autocast = getattr(_C, "_DisableAutocast", contextlib.nullcontext)
    guard = getattr(_C, "_AutoDispatchBelowAutograd", torch.no_grad)
    with torch.enable_grad(), no_autocast(), guard():
        yield


@contextlib.contextmanager
def with_autograd() -> Iterator[None]:
    """Record an autograd graph again, also below it."""
    excluded = _C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        excluded = excluded.remove(getattr(_C.DispatchKey, key))
    with torch.enable_grad(), _C._ForceDispatchKeyGuard(_C._dispatch_tls_local_include_set(), excluded):
        yield


def under_transform() -> bool:
    """Whether a `torch.func` transform (grad, vmap, jvp, ...) is running this code."""
    level = getattr(getattr(_C, "_functorch", None), "maybe_current_level", lambda: None)()
    return level is not None


def num_owners(storage: torch.UntypedStorage) -> int | None:
    """How many tensors and storage objects refer to the memory; None where torch does not say."""
    count = getattr(_C, "_storage_Use_Count", None)
    return None if count is None else int(count(storage._cdata))
