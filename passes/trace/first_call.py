"""What a forward remembers at its first call (a mask, a table, a library's choice): a step is traced with it in place.

A step that was traced without it would hold until some other forward, in evaluation for one, has remembered it.
Planning leaves it on no model. The first planned call does, as a plain first call would: its forward runs once for
what it remembers of that call's arguments, which need not be the sample's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from torch import nn

from .next_step import is_hook
from .nodes import MISSING, Change, identical, put, twin
from .notice import holder
from .once import may_run, once
from .preparing import prepared


@dataclass(frozen=True)
class Remembers:
    """What a forward remembers at its first call.

    Attributes:
        paths: the places, and the containers in which there are some.
        changed: the parameters and buffers that it changes, too.
        evolves: whether the next call, as far as a trace can tell, asks torch for something else.
        left: what it remembers of the sample; nothing where it could not run.
    """

    paths: tuple[str, ...]
    changed: tuple[str, ...]
    evolves: bool
    left: tuple[Change, ...] = ()

    @property
    def made_buffers(self) -> frozenset[str]:
        """The names of buffers among it that are None before."""
        return frozenset(change.path.removeprefix("self.") for change in self.left if change.node.name == "_buffers")

    def of(
        self, model: nn.Module, bound: Mapping[str, Any], loss_fn: Callable[..., Any] | None
    ) -> tuple[Change, ...]:
        """Call the forward, and put back all that it changes.

        Returns:
            What it remembers; nothing where it cannot run: without data, where other threads run, which would draw the
            same random numbers, or where other ranks would have to run it, too. Nor is there anything where the next
            call is another one for all that.
        """
        if not may_run(model, bound):
            return ()
        with suppress(Exception):
            if self.evolves:
                return prepared(model, bound, loss_fn, self.changed)
            return self._left(model, bound, loss_fn)
        return ()

    def _left(
        self, model: nn.Module, bound: Mapping[str, Any], loss_fn: Callable[..., Any] | None
    ) -> tuple[Change, ...]:
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        own = {name: twin(named[name]) for name in self.changed}
        with once(model, bound, loss_fn, own) as (before, run, _):
            run()
            return tuple(change for change in before.changes(identical) if holder(change) in self.paths)


class FirstCall(Exception):
    """Ends a trace whose forward would remember something."""

    def __init__(self, paths: Iterable[str], changed: Iterable[str], evolves: bool = False) -> None:
        super().__init__()
        self.remembers = Remembers(tuple(paths), tuple(changed), evolves)


def remember(changes: Iterable[Change]) -> list[Change]:
    """Leave in these places what a first call leaves, where all are as before it; returns where that was done.

    Some of it tells that the rest is there: all of it, or nothing.
    """
    done = list(changes)
    if not all(map(_is_as_before, done)):
        return []
    for change in done:
        put(change, change.after)
    return done


@contextmanager
def remembered(first: Remembers | None) -> Iterator[None]:
    """The model as its first call leaves it, for the time of the block; as it is where there is none."""
    done = remember(() if first is None else first.left)
    try:
        yield
    finally:
        for change in reversed(done):
            put(change, change.before)


def _is_as_before(change: Change) -> bool:
    now = change.node.take()
    if is_hook(change):
        return bool(now == change.node.content)
    if change.key is not MISSING:
        return identical(now.get(change.key, MISSING), change.before)
    return len(now) == len(change.before) and all(map(identical, now, change.before))
