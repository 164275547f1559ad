"""What a forward read while it was traced: the places, what was found there, and whether that still holds.

A step was traced for one state of Python: attributes of modules and configs, containers, functions, globals. `Reads`
is the part of it that was looked at, without the model's own objects in it: these are numbered, so that a copy of the
model, or one with a layer replaced by an equal one, is recognised. `match` (matching.py) finds the
objects of a model and hands back `Matched`, which tells before each call in microseconds whether anything has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import repeat
from operator import call, is_
from typing import Any

import torch

from .arguments import StateEntry
from .carried import place_of
from .expected import MISSING, Expected, Literal, Object, Same, holds_these, same_value
from .getters import HOOKS_IN, Getter, held_together, kind_within
from .late import Late
from .settings import Setting, kinds_filled
from .unregistered import Unregistered


@dataclass(frozen=True)
class Read:
    """One name that was looked up.

    Attributes:
        holder: an `Object`, or the class, function, cell or dict of globals that has it.
        getter: how the name is looked up there.
        label: the holder in words, where it is not an `Object`.
        late: whether Python that the backward runs (a custom function's backward, a hook) reads it, too.
    """

    holder: Any
    getter: Callable[[Any], Getter]
    name: str
    expected: Expected
    label: str = ""
    late: bool = False

    @cached_property
    def at_holder(self) -> Getter:
        """Of a class, function, cell or dict of globals, one for all models: what is looked at often is near."""
        return self.getter(self.holder)


@dataclass(frozen=True)
class Known:
    """An object of the model: its type, where it was found, and whether that is a path of submodules."""

    kind: type
    path: str
    is_submodule: bool


@dataclass(frozen=True)
class Reads:
    """Everything that a trace read.

    Attributes:
        objects: the model first; then its submodules and what else was reached.
        by_object: the reads of each object; `fixed` are those of classes, functions and globals.
        live: ids of the tensors that the graph holds itself, whose changes in place are therefore seen.
        arguments: what each of the call's `held_objects` has to be.
        taken: ids of the tensors whose numbers Python took.
    """

    entries: tuple[StateEntry, ...]
    objects: tuple[Known, ...]
    by_object: dict[int, list[Read]]
    fixed: tuple[Read, ...]
    loss: Expected
    live: frozenset[int]
    arguments: tuple[Expected, ...] = ()
    taken: frozenset[int] = frozenset()

    def but(self, settings: Iterable[Setting], carried: Iterable[str] = ()) -> Reads:
        """Without those of attributes that forward only adds to, or that are `carried`.

        Of lists and dicts that it puts something in, and does not read, their kinds are left, and whether modules that
        hold one of them together still do.
        """
        settings = list(settings)
        counted = {(setting.path, setting.name) for setting in settings if setting.added is not None}
        counted |= {place_of(path) for path in carried}
        filled = kinds_filled(settings)
        paths = {i: known.path for i, known in enumerate(self.objects) if known.is_submodule}

        def left(place: tuple[Any, str], read: Read) -> list[Read]:
            kinds = filled.get(place, {}).items()
            found = [replace(read, getter=partial(kind_within, keys), expected=Same(kind)) for keys, kind in kinds]
            return found or [read]

        by_object = {
            i: [kept for r in own if (at := (paths.get(i), r.name)) not in counted for kept in left(at, r)]
            for i, own in self.by_object.items()
        }
        together = {((s.path, s.within[0]), *s.aliases) for s in settings if s.aliases}
        by_object[0] = by_object.get(0, []) + [
            Read(Object(0), partial(held_together, places), _one_object(places), Literal(True), "the model")
            for places in sorted(together)
        ]
        return replace(self, by_object=by_object)

    def path_of(self, tensor: torch.Tensor) -> str:
        """Where a tensor that is not registered was read, or what it is."""
        places = ((self.objects[n].path or "self", read) for n, reads in self.by_object.items() for read in reads)
        found = (f"{path}.{read.name}" for path, read in places if getattr(read.expected, "value", None) is tensor)
        return next(found, f"a tensor of shape {tuple(tensor.shape)} that is not registered")

    @property
    def modes(self) -> dict[str, bool]:
        """The submodules that were asked whether they are in training mode, by their paths, and what they answered."""
        asked = ((self.objects[n], read) for n, reads in self.by_object.items() for read in reads)
        found = ((known, read.expected) for known, read in asked if known.is_submodule and read.name == "training")
        return {known.path: expected.value for known, expected in found if isinstance(expected, Literal)}


def _one_object(places: Iterable[tuple[str, str]]) -> str:
    return " is ".join(".".join(filter(None, ("self", *place))) for place in places)


class Looked:
    """Some of the reads of one model, laid out so that a check is two passes in C."""

    def __init__(self) -> None:
        self.getters: list[Getter] = []
        self.names: list[str] = []
        self.found: list[Any] = []

    def add(self, getter: Getter, name: str, value: Any) -> None:
        self.getters.append(getter)
        self.names.append(name)
        self.found.append(value)

    def hold(self) -> bool:
        """Whether all is as it was: the same objects (the usual case), or equal values."""
        found = list(map(call, self.getters, self.names, repeat(MISSING)))
        if not all(map(is_, found, self.found)):
            if not all(map(same_value, found, self.found)):
                return False
            self.found = found
        return True


class Matched:
    """The reads of one model: `own` are of its objects, `fixed` those of classes, functions and globals."""

    def __init__(self) -> None:
        self.own, self.fixed, self.unregistered = Looked(), Looked(), Unregistered()
        self.objects: list[Any] = []
        self.kinds: list[type] = []
        self.modules: list[dict[str, Any]] = []  # the attributes of each module, for its hooks
        self.hooks: list[tuple[Any, ...]] = []
        self.empty: list[Any] = []
        self.contents: list[tuple[Any, list[Any]]] = []
        self.computed: list[tuple[Getter, str, Any]] = []
        self.state_getters: list[tuple[Getter, str]] = []
        self.ties: list[int] = []
        self.numbered: dict[int, Any] = {}  # which object stands for which
        self.late = Late()

    def state(self, fixed: bool = True) -> list[torch.Tensor] | None:
        """The parameters and buffers of the next call; None where what was read has changed (the `fixed`, if asked)."""
        return self.tensors() if self._holds(fixed) else None

    def _holds(self, fixed: bool) -> bool:
        return (
            self.own.hold()
            and (not fixed or self.fixed.hold())
            and list(map(HOOKS_IN, self.modules)) == self.hooks
            and all(map(is_, map(type, self.objects), self.kinds))
            and not any(self.empty)
            and all(holds_these(container, items) for container, items in self.contents)
            and self.unregistered.hold()
            and all(same_value(get(name, MISSING), value) for get, name, value in self.computed)
        )

    def tensors(self) -> list[torch.Tensor] | None:
        """One tensor per entry; None where one is gone, untied or tied."""
        found = [get(name, None) for get, name in self.state_getters]
        tensors: list[Any] = []
        for i, tensor in zip(self.ties, found, strict=True):
            if i == len(tensors):
                tensors.append(tensor)
            elif tensors[i] is not tensor:
                return None
        distinct = len(set(map(id, tensors))) == len(tensors)
        return tensors if distinct and not any(map(is_, tensors, repeat(None))) else None
