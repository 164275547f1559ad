"""owned: what forward returns of the model's own, and leaves as it was: in each call the thing itself, as in eager."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cached_property
from typing import Any

import numpy
from torch import nn

from .expected import LITERALS
from .given import Given
from .state import Snapshot
from .stores import MODEL, SHARED, Place, held_in

_OF_MODULE = frozenset(vars(nn.Module()))


class Owned:
    """The containers, objects and modules that attributes of a model's modules lead to.

    Args:
        before: what could be reached from the model before forward ran.
        looked_at: the attributes that forward read, with the ids of what has them: what is in several places is
            taken from one of these.
    """

    def __init__(self, model: nn.Module, before: Snapshot, looked_at: Collection[tuple[int, str]]) -> None:
        self.model, self.before, self.looked_at = model, before, looked_at

    def place(self, value: Any) -> Place | None:
        """Where it is in the model; None where it is not, or forward has changed it or what is in it."""
        if isinstance(value, tuple) or id(value) not in self.before.seen:
            return None
        return self._places.get(id(value)) if self._is_as_before(value, set()) else None

    def is_of_others(self, value: Any) -> bool:
        """Whether it was there before, in a global or a closure, and is as it was: in each call it is this one."""
        is_held = not isinstance(value, (tuple, *SHARED)) and held_in(value) is not None
        return is_held and id(value) in self.before.seen and self._is_as_before(value, set())

    @cached_property
    def _changed(self) -> dict[int, set[Any]]:
        """What is changed in things, by their ids."""
        found: dict[int, set[Any]] = {}
        for change in self.before.changes():
            found.setdefault(id(change.node.owner), set()).add(change.key)
        return found

    def _is_as_before(self, value: Any, seen: set[int]) -> bool:
        if type(value) in LITERALS or id(value) in seen:
            return True
        seen.add(id(value))
        held = held_in(value)
        parts = held.values() if isinstance(held, dict) else held or ()
        return id(value) not in self._changed and all(self._is_as_before(part, seen) for part in parts)

    @cached_property
    def _places(self) -> dict[int, Place]:
        found = dict[int, Place]()
        for was_read in (True, False):
            for module, at in self._modules():
                found.setdefault(id(module), at)
                own = {n: v for n, v in vars(module).items() if ((id(module), n) in self.looked_at) is was_read}
                for n in _OF_MODULE | self._changed.get(id(module), set()):
                    own.pop(n, None)
                given = Given(own).things.values()
                moved = [thing.place.steps for thing in given if id(thing.value) in self._changed]
                held = [t for t in given if t.held is not None or isinstance(t.value, numpy.ndarray)]
                for value, ((_, name), *rest) in ((t.value, t.place.steps) for t in held):
                    if not any(((False, name), *rest)[: len(steps)] == steps for steps in moved):
                        found.setdefault(id(value), Place((*at.steps, (True, name), *rest)))
        return found

    def _modules(self) -> Iterator[tuple[nn.Module, Place]]:
        for path, module in self.model.named_modules():
            steps = [(True, step) for name in path.split(".") if path for step in ("_modules", name)]
            yield module, Place(((False, MODEL), *steps))
