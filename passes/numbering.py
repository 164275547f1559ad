"""numbering: numbers by which equal values are told, and a call in the terms that both sides of a proof share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .errors import VerificationError
from .fuse.meaning import Call, Item, Like, Of
from .fuse.normal_form import (
    COPY,
    SAME,
    SCATTERS,
    VIEWS,
    counted_from_front,
    geometry,
    is_copied_over,
    may_swap,
    stand_in,
    viewed,
)
from .fuse.records import BY_OP, SPLIT_BY_OP
from .memory import span
from .ops import ignored_by

aten = torch.ops.aten
Number = int


@dataclass(frozen=True)
class Known:
    """An argument by the number of its value."""

    number: Number


class Numbering:
    """Hash-consing: equal keys get equal numbers, across all graphs numbered with this object.

    Attributes:
        calls: how many results each traced call has; None for a single one.
        values: a traced value's shape, layout and type, by number: a rewritten node's own metadata proves nothing.
        like: the number whose value looks like that of another one, which need not have been traced.
        states: the generator states that traced calls draw from.
        views: the number of a call of a view.
        shown: for a value what it is a view of, and a stand-in that lies there.
        copied: for a copy the value that it has, in a layout of its own.
    """

    def __init__(self) -> None:
        self.numbers: dict[Any, Number] = {}
        self.calls: dict[Number, int | None] = {}
        self.values: dict[Number, Any] = {}
        self.like: dict[Number, Number] = {}
        self.states: set[Number] = set()
        self.views: dict[Number, Number] = {}
        self.shown: dict[Number, tuple[Number, torch.Tensor | None]] = {}
        self.copied: dict[Number, Number] = {}

    def number(self, key: Any) -> Number:
        return self.numbers.setdefault(key, len(self.numbers))

    def value(self, number: Number) -> Any:
        """A tensor that looks like the value, or None where that is not known."""
        return self.values.get(self.like.get(number, number))

    def know(self, number: Number, value: Any) -> None:
        self.values.setdefault(self.like.get(number, number), value)


class NumberedCall:
    """Numbers one call, written in the terms that both sides share.

    Attributes:
        drawn: the device and the state that a random op draws from; None for other ops.
    """

    def __init__(self, numbering: Numbering, trusted: bool, node: fx.Node, drawn: Any) -> None:
        self.numbering, self.trusted, self.node, self.drawn = numbering, trusted, node, drawn
        self.known: dict[Call, Any] = {}

    def expand(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The numbers of a call's results, by what it means or by its parts."""
        fused, split = BY_OP.get(target), SPLIT_BY_OP.get(target)
        if fused is not None and fused.meaning is not None:
            if not self._holds(fused.takes, args):
                self._refuse("runs a kernel on arguments that it is not for")
            return self._evaluate(fused.meaning(*args), None)
        if split is not None and self._holds(split.when, args):
            return tuple(self._evaluate(part, target) for part in split.parts(*args))
        return self._apply(target, args, kwargs)

    def _evaluate(self, part: Any, whole: Any) -> Any:
        """The numbers of a part of a meaning; `whole` is the op that is being split, a call of which has no parts."""
        if isinstance(part, Item):
            return self._evaluate(part.call, whole)[part.index]
        if isinstance(part, Of):
            return part.read(self._value(part.value))
        if not isinstance(part, Call):
            return part
        if part not in self.known:
            args = tuple(self._argument(a, whole) for a in part.args)
            run: Callable[..., Any] = self._apply if part.target is whole else self.expand
            self.known[part] = run(part.target, args, {})
        return self.known[part]

    def _argument(self, argument: Any, whole: Any) -> Any:
        found = self._evaluate(argument, whole)
        return Known(found) if isinstance(argument, (Call, Item)) else found

    def _apply(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The numbers of the results of an op that is not put in other terms."""
        if target in SAME and isinstance(args[0], Known):
            return args[0].number
        if target in SCATTERS:
            args = args[0], Known(self.numbering.copied.get(args[1].number, args[1].number)), *args[2:]
        first = self._value(args[0]) if args else None
        args = counted_from_front(target, args, first.dim() if isinstance(first, torch.Tensor) else 0)
        if may_swap(target, args, [self._value(a) for a in args]) and not kwargs:
            args = tuple(sorted(args, key=lambda a: a.number))
        rule = ignored_by(target, args)
        found = self._key(target, args, kwargs, rule.positions if rule else frozenset())
        if target in VIEWS and isinstance(args[0], Known):
            found = self._view(found, target, args, kwargs)
            if found == args[0].number or self.numbering.shown.get(args[0].number, (None,))[0] == found:
                return found
        count = self._admit(found, target, args)
        if target is COPY and is_copied_over(first, self._value(args[1])):
            self.numbering.copied[found] = args[1].number
        if count is None:
            return found
        alike = [self.numbering.number(("result", found, i)) for i in range(count)]
        if rule is None or rule.results is None:
            return tuple(alike)
        own = self._key(target, args, kwargs, frozenset())
        return tuple(n if i in rule.results else self._alike(own, i, n) for i, n in enumerate(alike))

    def _view(self, call: Number, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Number:
        """The number of a view: what it is a view of, and where it lies there."""
        numbering, source = self.numbering, args[0].number
        if call not in numbering.views:
            root, shown = numbering.shown.setdefault(source, (source, stand_in(numbering.value(source))))
            found = None if shown is None else viewed(target, shown, args[1:], kwargs)
            if found is None:
                return call
            whole = numbering.shown[root][1]
            assert whole is not None
            same = geometry(found) == geometry(whole)
            number = root if same else numbering.number(("view", root, geometry(found)))
            numbering.shown.setdefault(number, (root, found))
            numbering.views[call] = number
        return numbering.views[call]

    def _alike(self, call: Number, index: int, other: Number) -> Number:
        """A result that depends on what others of the call ignore."""
        number = self.numbering.number(("result", call, index))
        if number != other:
            self.numbering.like.setdefault(number, other)
        return number

    def _admit(self, call: Number, target: Any, args: tuple[Any, ...]) -> int | None:
        """How many results a call has; refuses one that was not traced, except a view that only lends its layout."""
        calls = self.numbering.calls
        if self.trusted:
            calls.setdefault(call, _count(target, self.node))
        elif call not in calls:
            view = _strided(self._value(args[0]), args[1:]) if target is aten.as_strided.default else None
            if view is None:
                self._refuse("computes what the traced step does not")
            self.numbering.know(call, view)
            return None
        return calls[call]

    def _key(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ignored: frozenset[int]) -> Number:
        kept = [Like(a) if i in ignored else a for i, a in enumerate(args)]
        leaves = self._leaf([kept, sorted(kwargs.items())])
        return self.numbering.number((str(target), id(target), leaves, self.drawn))

    def _leaf(self, leaf: Any) -> tuple[str, Any]:
        if isinstance(leaf, Known):
            return "value", leaf.number
        if isinstance(leaf, Like):  # an argument whose values do not matter must still be one of the same layout
            return "like", layout_of(self._value(leaf.value))
        if isinstance(leaf, (list, tuple)):
            return "list" if isinstance(leaf, list) else "tuple", tuple(map(self._leaf, leaf))
        return type(leaf).__name__, repr(leaf)

    def _holds(self, when: Callable[..., bool], args: tuple[Any, ...]) -> bool:
        values = [self._value(a) for a in args]
        tensors = (v for a, v in zip(args, values, strict=True) if isinstance(a, Known))
        return all(isinstance(t, torch.Tensor) for t in tensors) and when(*values)

    def _value(self, argument: Any) -> Any:
        return self.numbering.value(argument.number) if isinstance(argument, Known) else argument

    def _refuse(self, why: str) -> None:
        raise VerificationError(f"{self.node.name!r} {why}", node=self.node.name)


def _count(target: Any, node: fx.Node) -> int | None:
    """How many results a traced call has; None for a single one."""
    returns = target._schema.returns if hasattr(target, "_schema") else ()
    if len(returns) > 1:
        return len(returns)
    value = node.meta.get("val")
    return len(value) if target is node.target and isinstance(value, (tuple, list)) else None


def _strided(base: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
    """A view in given sizes and strides, if it lies within its dense base."""
    if not isinstance(base, torch.Tensor) or len(args) != 2 or base.numel() != span(base):
        return None
    sizes, strides = args
    if len(sizes) != len(strides) or min([*sizes, *strides], default=0) < 0:
        return None
    meta = torch.empty_strided(sizes, strides, dtype=base.dtype, device="meta")
    return base.as_strided(sizes, strides) if span(meta) <= base.numel() else None


def layout_of(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{tuple(value.shape)} {value.stride()} {value.dtype} on {value.device}"
