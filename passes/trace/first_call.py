"""What a forward remembers at its first call (a mask, a table, a library's choice): a step is traced with it in place.

A step that was traced without it would hold until some other forward, in evaluation for one, has remembered it.
Planning leaves it on no model; the first planned call does, as a plain first call would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from torch import nn

from .nodes import MISSING, Change, identical
from .notice import holder, is_hook, twin
from .once import may_run, once
from .state import Snapshot


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
        if not may_run(model, bound):
            return ()
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        left: list[Change] = []
        own = {name: twin(named[name]) for name in self.changed}
        with suppress(Exception), once(model, bound, loss_fn, own) as (before, run):
            run()
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
