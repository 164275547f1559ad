"""Context variables while a forward is traced: what a library collects in one is not to hold tensors of the trace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import copy_context
from typing import Any

from ..errors import Unsupported

MAX_DEPTH = 4


@contextlib.contextmanager
def private_contexts() -> Iterator[None]:
    """Let containers in context variables be copies in the block.

    Raises:
        Unsupported: the block changed one of them, which planned steps would not do.
    """
    held = [(variable, value) for variable, value in copy_context().items() if isinstance(value, (dict, list))]
    copies = [_copied(value) for _, value in held]
    tokens = [variable.set(copied) for (variable, _), copied in zip(held, copies, strict=True)]
    try:
        yield
    finally:
        for (variable, _), token in zip(reversed(held), reversed(tokens), strict=True):
            variable.reset(token)
    for (variable, value), copied in zip(held, copies, strict=True):
        if not _same(value, copied):
            raise Unsupported(
                "tensors collected in a context variable", variable.name,
                "a planned step would not put them there (hooks that capture attentions, router logits, ... do)",
                "Leave them out (output_attentions=False, output_router_logits=False), or return them from forward.",
            )  # fmt: skip


def _copied(value: Any, depth: int = 0) -> Any:
    """A copy of nested dicts and lists, with the same things in them."""
    if depth < MAX_DEPTH and isinstance(value, dict):
        copied = value.copy()
        for key, item in copied.items():
            copied[key] = _copied(item, depth + 1)
        return copied
    return [_copied(item, depth + 1) for item in value] if depth < MAX_DEPTH and type(value) is list else value


def _same(value: Any, copied: Any) -> bool:
    if isinstance(value, dict) and isinstance(copied, dict):
        return value.keys() == copied.keys() and all(_same(value[key], copied[key]) for key in value)
    if isinstance(value, list) and isinstance(copied, list):
        return len(value) == len(copied) and all(map(_same, value, copied))
    return value is copied
