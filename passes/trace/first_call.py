"""What a forward remembers at its first call (a mask, a table, a library's choice): a step is traced with it in place.

A step that was traced without it would hold until some other forward, in evaluation for one, has remembered it.
Planning leaves it on no model; the first planned call does, as a plain first call would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from passes._torch import TorchDispatchMode, swapped_state

from ..exclusive import alone, exclusive
from ..ops import COLLECTIVES
from .arguments import call_signature, run_model
from .binding import names_given
from .given import left_alone
from .isolate import isolated
from .nodes import MISSING, Change, identical
from .notice import holder, is_hook, twin
from .state import Snapshot
from .structure import Bound, flatten, unflatten
from .templates import shared


class FirstCall(Exception):
    """Ends a trace whose forward would remember something.

    Attributes:
        paths: the places, and the containers in which there are some.
        changed: the parameters and buffers that it changes, too.
    """

    def __init__(self, paths: Iterable[str], changed: Iterable[str]) -> None:
        super().__init__()
        self.paths, self.changed = tuple(paths), tuple(changed)

    def make(
        self, model: nn.Module, bound: Mapping[str, Any], loss_fn: Callable[..., Any] | None
    ) -> tuple[Change, ...]:
        """Call the forward, and put back all that it changes.

        Returns:
            What it remembers; nothing where it cannot run: without data, where other threads run, which would draw the
            same random numbers, or where other ranks would have to run it, too.
        """
        tensors, template = flatten(dict(bound))
        if not alone() or any(t.is_meta for t in (*model.parameters(), *model.buffers(), *tensors)):
            return ()
        copies = Bound(unflatten(template, list(map(twin, tensors))), names_given(bound))
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        own = {name: twin(named[name]) for name in self.changed}
        left: list[Change] = []
        with (
            exclusive(), torch.random.fork_rng(devices=[]), isolated(model, loss_fn, shared(template)) as before,
            suppress(Exception), swapped_state(model, own), left_alone(copies), _save_nothing(),
            _Silent() if dist.is_available() and dist.is_initialized() else nullcontext(),
        ):  # fmt: skip
            run_model(model, loss_fn, call_signature(model, loss_fn), copies)
            left = [change for change in before.changes(identical) if holder(change) in self.paths]
        return tuple(left)


def remember(changes: Iterable[Change]) -> list[Change]:
    """Leave in these places what a first call leaves, where all are as before it; returns where that was done.

    Some of it tells that the rest is there: all of it, or nothing.
    """
    done = list(changes)
    if not all(map(_is_as_before, done)):
        return []
    for change in done:
        _put(change, change.after)
    return done


def relocated(changes: Iterable[Change], model: nn.Module, loss_fn: Callable[..., Any] | None) -> tuple[Change, ...]:
    """The same places of another instance of the model, as far as it has them.

    Nothing where hooks are among them: they may be of the first instance, whose own first call registers others.
    """
    changes = tuple(changes)
    if any(map(is_hook, changes)):
        return ()
    nodes = {node.path: node for node in Snapshot(model, loss_fn).nodes} if changes else {}
    return tuple(replace(c, node=nodes[c.node.path]) for c in changes if c.node.path in nodes)


@contextmanager
def remembered(changes: Iterable[Change]) -> Iterator[None]:
    """`remember` for the time of the block."""
    done = remember(changes)
    try:
        yield
    finally:
        for change in reversed(done):
            _put(change, change.before)


class _Silent(TorchDispatchMode):
    """Ends a forward that talks to other ranks, which may not run one now."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in COLLECTIVES:
            raise RuntimeError(f"{func} waits for other ranks")
        return func(*args, **(kwargs or {}))


def _is_as_before(change: Change) -> bool:
    now = change.node.take()
    if is_hook(change):
        return bool(now == change.node.content)
    if change.key is not MISSING:
        return identical(now.get(change.key, MISSING), change.before)
    return len(now) == len(change.before) and all(map(identical, now, change.before))


def _put(change: Change, value: Any) -> None:
    content = value
    if change.key is not MISSING:
        content = change.node.take()
        content[change.key] = value
        if value is MISSING:
            del content[change.key]
    change.node.give(content)


def _save_nothing() -> Any:
    """Let a forward take the course that it takes with gradients, and hold nothing for its backward."""
    def nothing(_: Any) -> Any:
        return None

    return torch.autograd.graph.saved_tensors_hooks(nothing, nothing)
