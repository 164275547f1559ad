"""What forward puts into dicts, lists and objects that modules hold, and reads nothing of: `self.losses["aux"] = ...`.

Such a place is a `Setting`, as an attribute is. Of a list it is what was added to its end, or all of it if that is new.
"""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import is_
from typing import Any

import torch
from torch import nn

from .lookups import names_in
from .nodes import MISSING, Change, Node, change_of, tensors_of
from .rerun import Script, reads
from .settings import Setting, is_plain, tensors_in
from .state import Snapshot
from .structure import unflatten
from .templates import Template, slots

MAX_DEPTH = 4
OTHERS = 64  # items that are put beside those that are there
MOST = 10_000  # values that are looked at
_DICTS = (dict, OrderedDict, defaultdict)


def settings_inside(
    model: nn.Module, changes: Iterable[Change], renewed: Container[str],
    again: Mapping[int, Collection[tuple[str, str]]],
) -> list[Setting]:  # fmt: skip
    """The places inside of what modules hold, of changes that forward only makes, with what it left there.

    What is reached in several ways has to be an attribute of modules in each of them.

    Args:
        renewed: the paths of lists all of which is replaced.
        again: the further paths and names of what is reached in several ways, by ids.
    """
    found = []
    wanted = list(filter(_may_be, changes))
    reached = _reached(model, {id(c.node.owner) for c in wanted}) if wanted else {}
    for change in wanted:
        ways, others = reached.get(id(change.node.owner), []), again.get(id(change.node.owner), ())
        attributes = {".".join(filter(None, ("self", path, *within))) for path, within in ways if len(within) == 1}
        if ways and all(path in attributes for path, _ in others):
            (path, within), *rest = ways
            aliases = tuple((p, w[0]) for p, w in rest) if others else ()
            value, name, count, whole = put_there(change), change.key, 0, change.path in renewed
            if name is MISSING:
                name, count = "", 0 if whole else len(value)
            kind = None if change.node.kind == "attributes" else type(change.node.owner)
            found.append(Setting(path, name, value, None, None, within, count, whole, kind, change.path, aliases))
    return found


def only_set(
    before: Snapshot, codes: Collection[types.CodeType], script: Callable[[], Script], changes: Iterable[Change],
    renewed: Container[str],
) -> list[Change]:  # fmt: skip
    """Those of the changes that forward makes whatever else is there, and what it only sets to what it was already.

    A run tells, with other items in these dicts and lists, and without what is set in dicts and objects. None is left
    if it fails or asks anything else of torch: it reads there in a way that no name shows. Of a list or dict to which
    it does anything else than to add (than to replace all of a list, where its path is `renewed`) nothing is.
    What is put into a dict comes in the run's order.
    """
    every = {(id(change.node.owner), change.key): change for change in changes}
    named = frozenset(name for code in codes for name in names_in(code))
    taken = {id(node.owner): (node, keys) for node in before.nodes if (keys := _only_set_in(node, codes, named))}
    for change in every.values():
        taken.setdefault(id(change.node.owner), (change.node, ()))
    if not every and not any(isinstance(node.owner, dict) for node, _ in taken.values()):
        return []
    others = [torch.zeros(()) for _ in range(OTHERS)]
    before.restore()
    try:
        lines = script().lines
        before.restore()
        for node, keys in taken.values():
            node.give(_with_others(node, keys, others))
        if script().lines != lines:
            return []
        now = {number: node.take() for number, (node, _) in taken.items()}
    except Exception:  # noqa: BLE001 - it misses what is not there, or has no use for what is
        return []
    finally:
        before.restore()
    paths = {number: change.path for (number, _), change in every.items()}
    kept = [n for n, (node, _) in taken.items() if _only_adds(node, now[n], others, paths.get(n) in renewed)]
    again = {
        (n, key): change_of(taken[n][0], key, MISSING, value) for n in kept if isinstance(now[n], dict)
        for key, value in now[n].items() if key in taken[n][1] or (n, key) in every
    }  # fmt: skip
    return [change for (n, _), change in (again | every).items() if n in kept]


def _with_others(node: Node, keys: Collection[Any], others: Sequence[torch.Tensor]) -> Any:
    if isinstance(node.content, list):
        return [*node.content, *others]
    left = {key: value for key, value in node.content.items() if key not in keys}
    return left | {object(): other for other in others} if isinstance(node.owner, dict) else left


def _only_adds(node: Node, now: Any, others: Sequence[torch.Tensor], all_goes: bool) -> bool:
    """Whether a run has left these others where they were; in a list, if `all_goes`, none, nor what was there."""
    if isinstance(node.content, list):
        then = [*node.content, *others]
        if all_goes:
            return set(map(id, then)).isdisjoint(map(id, now))
        return len(now) >= len(then) and all(map(is_, now, then))
    return not isinstance(node.owner, dict) or set(map(id, others)).issubset(map(id, now.values()))


def _only_set_in(node: Node, codes: Collection[types.CodeType], named: Container[str]) -> Collection[Any]:
    """The keys of what a dict or an object holds that code names, and does not read."""
    if node.kind == "items" and type(node.owner) in _DICTS:
        if node.name not in named or reads(codes, node.name):
            return ()
        return {k for k, v in node.content.items() if type(v) not in (list, *_DICTS) and _can_be_set(v)}
    if node.kind != "attributes" or not _has_plain_attributes(node.owner):
        return ()
    own = object.__getattribute__(node.owner, "__dict__")
    return {k for k, v in own.items() if k in named and is_plain(v) and not reads(codes, k)}


def set_now(places: Iterable[Setting], model: nn.Module, lengths: Iterable[int]) -> Iterator[Setting]:
    """These places with what a run of the forward has left there, if it has.

    Args:
        lengths: of their lists, before it ran.
    """
    for place, length in zip(places, lengths, strict=True):
        own = place.of(model)
        in_list = isinstance(own, list)
        value = tuple(own[0 if place.whole else length :]) if in_list else own.get(place.name, MISSING)
        if _can_be_set(value) and (not in_list or len(value) == len(place.value)):
            yield replace(place, value=value)


def places_among(found: Iterable[Setting]) -> list[Setting]:
    """Those inside of what modules hold, of what a step of other sizes sets, for `set_now`."""
    inside = [setting for setting in found if setting.within]
    return [s if s.template is None else replace(s, template=None, value=_structure(s.template)) for s in inside]


def _structure(template: Template) -> Any:
    return unflatten(template, [None] * (1 + max(i for _, i in slots(template))))


def lengths_of(places: Iterable[Setting], model: nn.Module) -> list[int]:
    """Of the dicts, lists and objects that hold these places, how much is in each."""
    return [len(place.of(model)) for place in places]


def put_there(change: Change) -> Any:
    """What forward put in a place: in a list, the items that it added, or all if all of it is new; else MISSING."""
    if change.key is not MISSING or change.node.kind != "items":
        return change.after
    if type(change.node.owner) is not list:
        return MISSING
    if _has_grown(change):
        return tuple(change.after[len(change.before) :])
    return tuple(change.after) if renews(change) else MISSING


def renews(change: Change) -> bool:
    """Whether a list has tensors, as before, and other ones."""
    if type(change.node.owner) is not list or change.key is not MISSING or _has_grown(change):
        return False
    before, after = (set(map(id, tensors_of(items))) for items in (change.before, change.after))
    return bool(before and after) and before.isdisjoint(after)


def _has_grown(change: Change) -> bool:
    before, after = change.before, change.after
    return len(after) > len(before) and all(a is b for a, b in zip(after, before, strict=False))


def _may_be(change: Change) -> bool:
    """Whether a step can leave there what forward did: all of it plain values and tensors."""
    owner = change.node.owner
    if type(owner) not in (list, *_DICTS):
        of_instance = change.node.kind == "attributes" and _has_plain_attributes(owner)
        if not of_instance or hasattr(getattr(type(owner), change.key, None), "__set__"):
            return False
    return _can_be_set(put_there(change)) and (change.key is not MISSING or type(owner) is list)


def _has_plain_attributes(owner: Any) -> bool:
    """Whether an object keeps its attributes in a dict alone."""
    kind = type(owner)
    usual = kind.__setattr__ is object.__setattr__ and kind.__getattribute__ is object.__getattribute__
    return usual and hasattr(owner, "__dict__") and not isinstance(owner, (nn.Module, type, types.ModuleType))


def _can_be_set(value: Any) -> bool:
    return is_plain(value) or bool(tensors_in(value))


def _reached(model: nn.Module, wanted: Container[int]) -> dict[int, list[tuple[str, tuple[Any, ...]]]]:
    """How these are reached: the path of a module, an attribute of it, and keys of dicts and lists in that."""
    looked, found = 0, defaultdict(list)
    for prefix, module in model.named_modules():
        own: dict[str, Any] = object.__getattribute__(module, "__dict__")
        waiting: list[tuple[tuple[Any, ...], Any]] = [((k,), v) for k, v in own.items() if not k.startswith("_")]
        while waiting and looked < MOST:
            within, value = waiting.pop()
            looked += 1
            if id(value) in wanted:
                found[id(value)].append((prefix, within))
            if len(within) < MAX_DEPTH and type(value) in (list, *_DICTS):
                inner = enumerate(value) if isinstance(value, list) else value.items()
                waiting += [((*within, key), item) for key, item in inner]
    return found
