"""Finding the objects of a model that stand for those of a trace."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from passes._torch import plain_class
from passes.printable import describe_kind, shown

from .expected import (
    BY_VALUE,
    MISSING,
    Contents,
    Expected,
    Literal,
    Object,
    Same,
    State,
    Whole,
    apart,
    attributes_beside,
    compared_in,
    counterparts,
    describe,
    literals_in,
    made_of,
    parts_of,
    same_value,
    stood_for,
)
from .getters import (
    NAMES,
    REGISTERED,
    Getter,
    by_attribute,
    names_of,
    of_buffers,
    of_compiled,
    of_hooks,
    of_parameters,
    of_stood_for,
)
from .reads import Looked, Matched, Read, Reads, holds_these
from .refuse import refuse_untracked
from .unregistered import Constant, equal, look_of, numbers_of


class Differs(Exception):
    """What was read is no longer there: where, what is there now, what was there."""

    def __init__(self, where: str, now: str, then: str) -> None:
        now, then = apart(now, then)
        super().__init__(where, now, then)
        self.where, self.now, self.then = where, now, then


def match(reads: Reads, model: nn.Module, loss_fn: Any) -> Matched:
    """Find the objects of `model` that stand for those of the trace.

    Raises:
        Differs: something that was read has changed.
    """
    return _Matching(reads, model).run(model, loss_fn)


def match_arguments(reads: Reads, matched: Matched, model: nn.Module, given: Sequence[Any]) -> None:
    """Look at what a call is given besides tensors (`held_objects`), where the model is as `matched`.

    Raises:
        Differs: something that forward reads there differs from what the trace was given.
    """
    if any(expected is not None for expected in reads.arguments):
        _Matching(reads, model).go_on(matched, given)


class _Matching:
    """Walks from the model along the reads."""

    def __init__(self, reads: Reads, model: nn.Module) -> None:
        self.reads, self.model = reads, model
        self.matched = Matched()
        self.objects, self.numbers = dict[int, Any](), dict[int, int]()
        self.pending: list[int] = []
        self.open: set[tuple[int, int]] = set()
        self.tensors: list[torch.Tensor] = []

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        """By their paths; arguments, which are looked at before each call, need none."""
        return dict(self.model.named_modules(remove_duplicate=False))

    def run(self, model: nn.Module, loss_fn: Any) -> Matched:
        self._state()
        if not self.agrees(Object(0), model):
            raise Differs("the model", describe_kind(type(model)), describe_kind(self.reads.objects[0].kind))
        self._follow()
        if not self.agrees(self.reads.loss, loss_fn):
            raise Differs("loss_fn", shown(loss_fn), describe(self.reads.loss))
        for read in self.reads.fixed:
            self._check(read, read.at_holder, read.label, self.matched.fixed)
        self._follow()
        for number in self.reads.by_object:
            self._unreached(number)
            self._follow()
        self.matched.numbered = self.objects
        return self.matched

    def go_on(self, matched: Matched, given: Sequence[Any]) -> None:
        """As `run`, from where that ended."""
        self.objects, self.tensors = dict(matched.numbered), matched.tensors() or []
        self.numbers = {id(value): number for number, value in self.objects.items()}
        for expected, value in zip(self.reads.arguments, given, strict=True):
            if not self.agrees(expected, value):
                raise Differs("(arguments)", shown(value), self._words(expected))
            self._follow()

    def _told(self, read: Read, label: str, value: Any) -> tuple[str, str]:
        """What is there in the place of a read now, and what was there, in words."""
        if read.getter is of_hooks:
            return f"{label} with other hooks", "those at planning"
        if read.getter is of_compiled:
            return f"{label} compiled in place, by its compile()", "one that is not"
        if read.name == NAMES:
            names, before = value if isinstance(value, tuple) else (), literals_in(read.expected)
            came, went = (", ".join(n for n in a if n not in b) for a, b in ((names, before), (before, names)))
            told = [f"with {came} set"] * bool(came) + [f"without {went}"] * bool(went)
            return f"{label} {' and '.join(told)}", "the attributes that it had"
        now, then = apart(*(f"{read.name}={text}" for text in (shown(value), self._words(read.expected))))
        return f"{label} with {now}", then

    def _words(self, expected: Expected) -> str:
        if isinstance(expected, Object):
            return describe_kind(self.reads.objects[expected.index].kind)
        return describe(expected)

    def _unreached(self, number: int) -> None:
        """A submodule that no read led to (Python came to it some other way) is looked up at its path."""
        known = self.reads.objects[number]
        if number in self.objects or not known.is_submodule:
            return
        module = self.modules.get(known.path, MISSING)
        if not self.agrees(Object(number), module):
            raise Differs(known.path, shown(module), describe_kind(known.kind))

    def _state(self) -> None:
        matched = self.matched
        for i, entry in enumerate(self.reads.entries):
            for name in (entry.name, *entry.aliases):
                path, _, leaf = name.rpartition(".")
                module = self.modules.get(path)
                if module is None:
                    raise Differs(name, "nothing", "a parameter or buffer")
                matched.state_getters.append((REGISTERED[entry.registry](module), leaf))
                matched.ties.append(i)
        tensors = matched.tensors()
        if tensors is None:
            raise Differs(*self._differing_state())
        self.tensors = tensors

    def _differing_state(self) -> tuple[str, str, str]:
        found = [get(name, None) for get, name in self.matched.state_getters]
        names = [name for e in self.reads.entries for name in (e.name, *e.aliases)]
        first: dict[int, int] = {}
        for position, (i, tensor, name) in enumerate(zip(self.matched.ties, found, names, strict=True)):
            other = first.setdefault(id(tensor), position)
            if tensor is None:
                return name, "nothing", "a parameter or buffer"
            if self.matched.ties[other] != i:
                return name, f"the same tensor as {names[other]}", "one of its own"
            if other == position and i in self.matched.ties[:position]:
                return name, "one of its own", f"the same tensor as {self.reads.entries[i].name}"
        return "(state)", "other parameters or buffers", "those at planning"

    def _bind(self, number: int, value: Any) -> None:
        self.objects[number], self.numbers[id(value)] = value, number
        self.matched.objects.append(value)
        self.matched.kinds.append(type(value))
        self.pending.append(number)

    def _follow(self) -> None:
        while self.pending:
            number = self.pending.pop()
            for read in self.reads.by_object.get(number, ()):
                getter = self._getter(read, self.objects[number])
                self._check(read, getter, read.label, self.matched.own)

    def _getter(self, read: Read, holder: Any) -> Getter:
        try:
            return read.getter(holder)
        except AttributeError:
            return lambda name, default: default

    def _check(self, read: Read, getter: Getter, label: str, looked: Looked) -> None:
        value = stood_for(found := getter(read.name, MISSING))
        getter = getter if value is found else of_stood_for(getter)
        matched = self.matched
        is_state = isinstance(read.expected, State) and read.getter in (of_parameters, of_buffers)
        if is_state:
            pass  # looked up with the state
        elif read.getter is of_hooks:
            matched.modules.append(object.__getattribute__(self.objects[read.holder.index], "__dict__"))
            matched.hooks.append(value)
        elif read.getter is names_of or (read.getter is by_attribute and isinstance(read.holder, Object)):
            matched.computed.append((getter, read.name, value))
        else:
            looked.add(getter, read.name, value)
        known = len(matched.contents)
        if not (self._same_hooks if read.getter is of_hooks else self.agrees)(read.expected, value):
            raise Differs("(read by forward)", *self._told(read, label, value))
        if read.late:
            matched.late.add(read, getter, value, is_state, matched.contents[known:])

    def agrees(self, expected: Expected, value: Any) -> bool:
        """Whether `value` can stand for what was found there while tracing."""
        return expected is None or _AGREES[type(expected)](self, expected, stood_for(value))

    def _same_whole(self, expected: Whole, value: Any) -> bool:
        self.matched.contents.append((value, expected.items))
        return type(value) is expected.kind and holds_these(value, expected.items)

    def _same_object(self, expected: Object, value: Any) -> bool:
        index = expected.index
        if index in self.objects:
            return value is self.objects[index]
        same = plain_class(type(value)) is plain_class(self.reads.objects[index].kind)
        if not same or id(value) in self.numbers:
            return False
        self._bind(index, value)
        return True

    def _same_parts(self, expected: Contents, value: Any) -> bool:
        if type(value) is not expected.kind:
            return False
        if (id(value), id(expected)) in self.open:
            return True  # a container that holds itself
        self.open.add((id(value), id(expected)))
        now = parts_of(value) or []
        if isinstance(value, torch.Tensor):
            self.matched.computed.append((partial(made_of, value), "", made_of(value)))
        self._look_into(value)
        self._look_into(attributes_beside(value))
        return len(now) == len(expected.parts) and all(map(self.agrees, expected.parts, now))

    def _look_into(self, container: Any) -> None:
        if isinstance(container, (list, dict, deque)) and not len(container):
            self.matched.empty.append(container)
        elif isinstance(container, (*BY_VALUE, list, dict, deque)):
            self.matched.contents.append((container, compared_in(container)))

    def _same_hooks(self, expected: Any, value: tuple[dict[int, Any], ...]) -> bool:
        """Hooks are called in their order: their numbers tell when each was registered."""
        for then, now in zip(expected.parts, value, strict=True):
            hooks = then.parts[len(then.parts) // 2 :]
            self._look_into(now)
            if len(now) != len(hooks) or not all(map(self.agrees, hooks, now.values())):
                return False
        return True

    def _same(self, expected: Same, value: Any) -> bool:
        then = expected.value
        places = {} if value is then else counterparts(then, value)
        for read in (reads := [read for read in self.reads.fixed if id(read.holder) in places]):
            self._check(read, read.getter(places[id(read.holder)]), read.label, self.matched.fixed)
        return value is then or any(read.holder is then for read in reads)

    def _same_tensor(self, expected: Constant, value: Any) -> bool:
        then = expected.value
        tensors = [t for t in (value, then) if isinstance(t, torch.Tensor)]
        self.matched.unregistered.looks += [(t, expected.look) for t in tensors]
        numbers_count = id(then) in self.reads.taken
        if value is then and id(then) in self.reads.live and not numbers_count:
            return look_of(then) == expected.look
        for tensor in tensors:
            refuse_untracked(tensor, "what forward reads")
        self.matched.unregistered.numbers += [(t, numbers_of(t)) for t in tensors]
        if look_of(then) != expected.look or (numbers_count and numbers_of(then) != expected.numbers):
            return False
        return value is then or equal(value, then)


_AGREES: dict[type, Callable[[_Matching, Any, Any], bool]] = {
    Literal: lambda _, expected, value: same_value(value, expected.value),
    Same: _Matching._same,
    State: lambda matching, expected, value: value is matching.tensors[expected.index],
    Constant: _Matching._same_tensor,
    Object: _Matching._same_object,
    Whole: _Matching._same_whole,
    Contents: _Matching._same_parts,
}
