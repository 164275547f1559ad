"""What a forward changed besides its buffers: refused where the next step would read it, else said."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch

from passes._torch import FakeTensor, FunctionalTensor, pytree
from passes.printable import few

from ..errors import StateChanged, Unsupported
from .checkpoints import refuse_checkpoints
from .constructs import DRAW, KEPT, SEED
from .next_step import Rerun, compare_steps, is_hook, place_of
from .nodes import MISSING, Change, same
from .places import say
from .rerun import is_named, line_of_change, reads
from .settings import Setting, is_plain
from .state import Snapshot, scramble
from .watch import Watch

_WHY_STATE = "a later step would read what an earlier one left there, and a planned step leaves nothing there"
_REMEDY_STATE = (
    "Register it as a buffer (a tensor), pass it as an argument, or change it outside forward. If forward only "
    "prepares itself at its first call, call the model once before planning."
)


@dataclass(frozen=True)
class Left:
    """One place that forward changes.

    Attributes:
        value: what it leaves there, if that is plain.
        holder: what the place is in, if that is a container, whose keys may be of the trace; else the place.
        is_first: whether a second call leaves it as it is.
        is_kept: whether forward reads what is there, too.
        is_new: whether nothing was there, of the model's own.
        is_only_set: whether each call puts the like there, and nothing reads it.
        is_renewed: whether each call replaces all of a list.
    """

    path: str
    value: Any
    is_first: bool
    is_kept: bool
    holder: str = ""
    is_new: bool = False
    is_only_set: bool = False
    is_renewed: bool = False


def notice(before: Snapshot, changes: list[Change], watch: Watch, rerun: Rerun, may_move: bool) -> tuple[Left, ...]:
    """Refuse or warn of what the run under `watch` changed since `before` was taken; what there is left to say.

    Args:
        changes: what that was.
        may_move: whether a plain value may come to what it then stays at (a warm-up to its end).

    Raises:
        Unsupported: it matters to the next step, or nobody can tell that it does not.
    """
    refuse_checkpoints(watch, rerun.carried)
    if not changes:
        return ()
    before.restore()

    def refuse(
        change: Change, what: str, why: str, remedy: str, place: str = "", kind: type[Unsupported] = Unsupported
    ) -> NoReturn:
        before.restore()
        line = place or line_of_change(rerun.once, change)
        before.restore()
        raise kind(what, change.path + (f", {line}" if line else ""), why, remedy)

    refuse_state = partial(refuse, why=_WHY_STATE, remedy=_REMEDY_STATE, kind=StateChanged)

    for change in changes:
        if change.node.kind == "generator" and not _reseeded(before, change, rerun):
            found = SEED if isinstance(change.node.owner, torch.Generator) else DRAW
            refuse(change, found.what, found.why, found.remedy)
        if change.node.kind == "tensor":
            refuse(change, "in-place change of a tensor that is not a buffer", "a plan would take it as constant",
                   "Register it: self.register_buffer(name, tensor, persistent=False).")  # fmt: skip
        if change.node.of_hook and any(isinstance(v, torch.Tensor) for v in pytree.tree_leaves(change.after)):
            refuse(change, KEPT.what, KEPT.why, KEPT.remedy)
        if change.node.kind == "array":
            refuse_state(change, "an array changed in forward")
    written_again, steady = compare_steps(before, changes, watch, rerun, refuse_state)
    if seeded := [change.path for change in changes if change.node.kind == "generator"]:
        say(f"forward brings {few(seeded)} into a state of its own; the planned step leaves it alone")
    others = [change for change in changes if change.node.kind not in ("generator", "cache")]
    left = tuple(_left(change, written_again, steady, watch.codes, before.met_again) for change in others)
    if any(there.is_kept for there in left):
        now, set_first = rerun.take(), rerun.set_first(rerun.copies())
        now.restore()
        left = tuple(replace(there, is_kept=there.is_kept and there.path not in set_first) for there in left)
    kept = [change for change, there in zip(others, left, strict=True) if there.is_kept]
    if not may_move and (moved := _moved(kept)) is not None:
        refuse_state(moved, "state that forward changes and reads")
    return left


def _moved(kept: Sequence[Change]) -> Change | None:
    """A plain value that was another one before, in an object that keeps nothing else: no key of a table beside it.

    The next forward leaves it as it is, but what else reads it (an evaluation) would find the value before.
    """
    tables = {id(change.node.owner) for change in kept if not all(map(is_plain, _values(change, change.after)))}
    for change in kept:
        before = _values(change, change.before)
        real = bool(before) and all(is_plain(v) and v is not None and not isinstance(v, bool) for v in before)
        if real and id(change.node.owner) not in tables:
            return change
    return None


def _values(change: Change, value: Any) -> list[Any]:
    """What a place holds; of one that is compared as a whole (a list, a set) all that is in it."""
    return [value] if change.key is not MISSING else list(value)


def _left(
    change: Change, written_again: frozenset[str], steady: Mapping[str, bool], codes: Any,
    again: Mapping[int, Sequence[tuple[str, str]]],
) -> Left:  # fmt: skip
    is_first, is_read = place_of(change) not in written_again, bool(reads(codes, change.name))
    is_kept = is_first and (is_hook(change) or is_read)
    value = change.after if is_plain(change.after) else None
    alike_again = place_of(change) in steady or (is_first and value is not None)
    names = {change.name, *(name for _, name in again.get(id(change.node.owner), ()))}
    only_set = alike_again and not any(reads(codes, n) for n in names) and any(is_named(codes, n) for n in names)
    renewed = steady.get(place_of(change), False)
    return Left(change.path, value, is_first, is_kept, holder(change), _is_new(change), only_set, renewed)


def _is_new(change: Change) -> bool:
    """Whether an attribute of the model had no value yet, or a container of its nothing in it."""
    nothing = change.before is None or change.before is MISSING or (change.key is MISSING and not change.before)
    return nothing and change.path.startswith("self") and not (change.node.kind == "items" and change.node.content)


def holder(change: Change) -> str:
    """The path of the container that a changed place is in, or of the place itself where it is an attribute.

    Empty where it is a submodule, or a buffer that there was before: a plan is for those that the model has.
    """
    if is_hook(change):
        return change.node.path
    if change.node.kind == "names":
        is_new = change.node.name == "_buffers" and (change.before is None or change.before is MISSING)
        return change.path if is_new or change.node.name == "_non_persistent_buffers_set" else ""
    return change.node.path if change.node.kind == "items" else change.path


def say_what_is_left(found: Sequence[Left], settings: Sequence[Setting]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Say what a planned step does not set, unlike `settings`.

    Returns notes for the plan, and the places that forward, or hooks before it, leave something in for others to read.
    """
    done = set(map(str, settings))
    of_trace = tuple(f"[{kind!r}]" for kind in (FunctionalTensor, FakeTensor))  # in a table by types of tensors
    others = {left.path: left.is_kept for left in found if left.path not in done and not left.path.endswith(of_trace)}
    kept, unset = ([path for path, is_kept in others.items() if is_kept == wanted] for wanted in (True, False))
    if unset:
        say(
            f"forward sets {few(unset)}; the planned step computes the outputs and gradients alone and will not set "
            "that. Return what is read elsewhere from forward, or register it as a buffer."
        )
    notes = tuple(f"forward remembers {path} at its first call; the planned step will not set it" for path in kept)
    return notes, tuple(unset)


def judged(changes: Iterable[Change]) -> frozenset[str]:
    """Paths of what the forward changed."""
    return frozenset(_HOOK.sub("", change.path) for change in changes)


_HOOK = re.compile(r"(?<=hooks)\.\d+$")  # each registration has another number


def check_backward(before: Snapshot, by_forward: frozenset[str], settings: Iterable[Setting]) -> None:
    """Refuse what the forward alone did not change, or not to what it has set: Python that the backward runs did."""
    left = {str(s): s.value for s in settings if s.template is None and not s.appended}
    grown = {str(s): s.appended for s in settings if s.appended}
    for change in before.changes():
        as_left = same(change.after, left.get(change.path, change.after))
        if change.path in grown:
            as_left = len(change.after) == len(change.before) + grown[change.path]
        if _HOOK.sub("", change.path) not in by_forward or not as_left:
            raise Unsupported(
                "state that changes in the backward", change.path, "its Python runs while tracing, and not in the "
                "planned steps", "Move the change out of the backward of the custom function.",
            )  # fmt: skip


def _reseeded(before: Snapshot, change: Change, rerun: Rerun) -> bool:
    """Whether a generator of Python's or NumPy's is set to a state of its own, so that what it was does not matter."""
    if isinstance(change.node.owner, torch.Generator):
        return False
    seen = []
    for seed in (1, 2):
        before.restore()
        scramble(change.node.owner, seed)
        lines = rerun.script().lines
        seen.append((lines, repr(change.node.take())))
    before.restore()
    return seen[0] == seen[1]
