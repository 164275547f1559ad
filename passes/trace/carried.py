"""State that forward carries from one call to the next in attributes of modules: `self.hidden = (h, c)`.

A trace that read it as a constant would hold for one call. So it is an argument of the step, beside those of the call:
a dict of such values by the attributes' paths, in which forward puts what it leaves there, as it may in any dict that
it is given.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from passes.errors import StateChanged, Unsupported
from passes.printable import few

from .nodes import MISSING, Change, alike, tensors_of
from .settings import tensors_in, where_held
from .structure import Bound, flatten, unflatten

_ITEMS = re.compile(r"\[.*")
STATE = "self"  # the name of that dict, which no argument of a method has


class Carries(StateChanged):
    """Forward leaves tensors in attributes that a later call reads: as arguments of the step they may be planned.

    Attributes:
        paths: those of the attributes.
    """

    def __init__(self, refused: Unsupported, paths: Iterable[str]) -> None:
        super().__init__(refused.construct, refused.place, refused.reason, refused.remedy)
        self.paths = tuple(paths)


def may_be_carried(
    model: nn.Module, changes: Sequence[Change], only_set: Container[str], met_again: Container[int]
) -> tuple[str, ...]:
    """The attributes that hold tensors, of what forward changed, before or after it.

    None that it only sets, which a step does without it being an argument; all of them if there are no others. None in
    which it leaves what another attribute holds: there would be another tensor, which forward may tell by `is`. Nor one
    with a list or dict that something else holds, too, and would go on holding.

    Args:
        only_set: paths of what seems to be only set.
        met_again: ids of what was reached in several ways.
    """
    read = [change for change in changes if change.path not in only_set]
    return _may_be_carried(model, read, met_again) or _may_be_carried(model, changes, met_again)


def _may_be_carried(model: nn.Module, changes: Iterable[Change], met_again: Container[int]) -> tuple[str, ...]:
    found: dict[str, Any] = {}
    inside: dict[str, set[int]] = {}
    holders = dict(model.named_modules(remove_duplicate=False))
    for change in changes:
        path = _ITEMS.sub("", change.path).removeprefix("self.")
        module, attribute = place_of(path)
        own = vars(holders[module]) if module in holders and change.path.startswith("self.") else {}
        held, left = tensors_in(own.get(attribute)), tensors_in(change.after)
        inside.setdefault(path, set()).update(map(id, _containers([own.get(attribute), change.after])))
        if attribute in own and held is not None and left is not None and (held or left):
            found[path] = left
    others = {
        id(tensor) for prefix, module in holders.items() for own in (vars(module), module._buffers)
        for name, value in own.items() if name != "_buffers" and f"{prefix}.{name}".lstrip(".") not in found
        for tensor in tensors_of(value)
    }  # fmt: skip
    count = Counter(number for numbers in inside.values() for number in numbers)
    alone = {path for path, numbers in inside.items() if not any(n in met_again or count[n] > 1 for n in numbers)}
    return tuple(path for path, left in found.items() if path in alone and others.isdisjoint(map(id, left)))


def refuse_several_names(model: nn.Module, paths: Iterable[str], met_again: Container[int]) -> None:
    """Refuse state that was carried so far, and by now is in a list or dict that something else holds, too.

    Raises:
        StateChanged: what holds it would go on with what is there now.
    """
    for path in paths:
        held = _own(model, path).get(place_of(path)[1])
        if any(id(container) in met_again for container in _containers([held])):
            raise StateChanged(
                "state in a list or dict of several names", f"self.{path}", "as an argument of the step it would be "
                "another one by one of them", "Read and change it by one name.",
            )  # fmt: skip


def _containers(values: Iterable[Any]) -> Iterator[Any]:
    """The lists and dicts among values, and in those."""
    for value in values:
        if isinstance(value, (list, dict)):
            yield value
        if isinstance(value, (list, dict, tuple)):
            yield from _containers(value.values() if isinstance(value, dict) else value)


def carry(model: nn.Module, bound: Bound, paths: Iterable[str]) -> None:
    """Add what the model holds there now to the arguments of a call, and nothing else of it."""
    bound.pop(STATE, None)
    if paths := tuple(paths):
        held = {path: _own(model, path).get(place_of(path)[1], MISSING) for path in paths}
        bound[STATE] = {path: value for path, value in held.items() if value is not MISSING}


def carried(bound: Mapping[str, Any]) -> tuple[str, ...]:
    """The paths of what a call's arguments have of it."""
    return tuple(bound.get(STATE, ()))


def without_state(bound: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments that the caller gave."""
    if STATE not in bound:
        return bound
    return Bound([item for item in bound.items() if item[0] != STATE], getattr(bound, "by_name", ()))


def put_state(model: nn.Module, bound: Mapping[str, Any]) -> None:
    """Leave in the model what a call's arguments have of it."""
    for path, value in bound.get(STATE, {}).items():
        _own(model, path)[place_of(path)[1]] = value


@contextmanager
def in_arguments(model: nn.Module, bound: Mapping[str, Any]) -> Iterator[None]:
    """Have forward, which runs in the block, find in the model what the arguments have, and leave it in them."""
    put_state(model, bound)
    yield
    for path in carried(bound):
        bound[STATE][path] = _own(model, path).get(place_of(path)[1])


@contextmanager
def of_one_kind(bound: Mapping[str, Any]) -> Iterator[None]:
    """Refuse state that forward, which is traced in the block, leaves in another shape or dtype than it found.

    Raises:
        StateChanged: each call finds something else there, for which it would be planned anew.
    """
    before = {path: _rebuilt(value) for path, value in bound.get(STATE, {}).items()}  # it may change it in place
    yield
    for path, then in before.items():
        now = bound[STATE][path]
        if _holds_any(then) and _holds_any(now) and not alike(now, then):
            raise StateChanged(
                "state that has another shape or dtype after each call", f"self.{path}", "each call would be planned "
                "anew", "Keep its shape and dtype, or pass it as an argument.",
            )  # fmt: skip


def _holds_any(value: Any) -> bool:
    return any(tensor.numel() for tensor in flatten(value)[0])


def _rebuilt(value: Any) -> Any:
    tensors, template = flatten(value)
    return unflatten(template, tensors)


@contextmanager
def state_aside(model: nn.Module, bound: Mapping[str, Any]) -> Iterator[None]:
    """Undo at the end what the block, in which forward runs again, leaves in the model."""
    before = {path: _own(model, path).get(place_of(path)[1]) for path in carried(bound)}
    try:
        yield
    finally:
        put_state(model, {STATE: before})


def is_carried(place: str, paths: Iterable[str]) -> bool:
    """Whether a place (`self.hidden[0]`) is, or is in, one of these attributes."""
    return any(place == f"self.{path}" or place.startswith((f"self.{path}[", f"self.{path}.")) for path in paths)


def is_of_state(path: str) -> bool:
    """Whether a path into a call's arguments leads to it."""
    return path.startswith(f"['{STATE}']")


def notes_of(paths: Sequence[str]) -> tuple[str, ...]:
    """What a plan says of it."""
    names = few([f"self.{path}" for path in paths])
    return (f"forward carries {names} from call to call: the step takes it as an argument, and sets it",) * bool(paths)


def _own(model: nn.Module, path: str) -> dict[str, Any]:
    return where_held(model, *place_of(path))


def place_of(path: str) -> tuple[str, str]:
    """An attribute's module and name."""
    module, _, name = path.rpartition(".")
    return module, name
