"""The forward as a first and a second step: what the second reads of what the first has left, and writes again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from ..errors import Unsupported
from .carried import is_carried
from .inside import put_there, renews
from .nodes import MISSING, Change, alike, tensors_of, twin
from .rerun import Script, Stale, is_named, reads
from .state import Snapshot
from .templates import constants
from .watch import Watch


@dataclass(frozen=True)
class Rerun:
    """The forward, to be run again while tracing.

    Attributes:
        run: runs it on these tensors under further modes, and returns its output.
        names: what the tensors are called.
        steady: names of the buffers that it did not change.
        take: a snapshot of what can be reached now.
        set_first: runs it on such; paths of the plain values that it sets before it reads them, as planned steps do.
        carried: attributes that are arguments of the step, and so the same in each run.
    """

    run: Callable[..., Any]
    flat: Sequence[torch.Tensor]
    names: Sequence[str]
    steady: frozenset[str]
    take: Callable[[], Snapshot]
    set_first: Callable[[Sequence[torch.Tensor]], set[str]]
    carried: tuple[str, ...] = ()

    def once(self, *modes: Any) -> Any:
        """Run it on copies of the tensors."""
        return self.run(self.copies(), *modes)

    def copies(self) -> list[torch.Tensor]:
        with torch.no_grad():
            return list(map(twin, self.flat))

    def others(self, changes: Iterable[Change]) -> list[Change]:
        """Those of what is no argument."""
        return [change for change in changes if not is_carried(change.path, self.carried)]

    def script(self, *known: Any) -> Script:
        """What it asks of torch, from the state as it is now."""
        copies = self.copies()
        script = Script(dict(zip(self.names, copies, strict=True)), self.steady, *known)
        result = self.run(copies, script)
        script.lines.append(f"returns {[script.name_of(t)[0] for t in result.tensors]}")
        script.lines += [script.name_of(c)[0] for c in constants(result.template)]
        return script


def compare_steps(
    before: Snapshot, changes: list[Change], watch: Watch, rerun: Rerun, refuse: Callable[..., NoReturn]
) -> tuple[frozenset[str], dict[str, bool]]:
    """Run the forward as a first and as a second step; returns what the second one writes again.

    Of what it writes alike, also whether it replaces all of a list.
    """
    held = before.tensors
    first = rerun.script(None, held)
    left = rerun.take()
    differs, where, second = False, "", first
    try:
        second = rerun.script(first, held)
        differs = second.lines != first.lines
    except Stale as stale:
        differs, where = True, stale.where
    except Unsupported:
        raise
    except Exception:  # noqa: BLE001 - the first step ran: what fails, fails for the state that it left
        differs = True
    # A call that a cache knows nothing of (a mask is another object each time) is computed in each step, as planned.
    again = rerun.others(left.changes())
    unlike = {place_of(change) for change in left.changes(alike)}
    unlike |= _hand_on(again, first) | _counted(again, first, second)
    evolving = [c for c in again if place_of(c) in unlike and (differs or c.node.kind != "cache")]
    moved = _hand_on(again, first, put_there)  # so what it came from is read
    read = ((c, where) for c in evolving if (where := reads(watch.codes, c.name))
            or not is_named(watch.codes, c.name) or place_of(c) in moved)  # fmt: skip
    if differs:
        change, found = next(read, (next(iter(evolving), changes[0]), ""))
        refuse(_outermost(change, changes), "state that forward changes and reads", place=where or found)
    for change, found in read:
        refuse(_outermost(change, changes), "state that forward changes and reads", place=found)
    put = {place_of(c): put_there(c) for c in changes}
    steady = [c for c in again if alike(put_there(c), put.get(place_of(c), MISSING)) and place_of(c) not in moved]
    return frozenset(map(place_of, again)), {place_of(c): renews(c) for c in steady}


def _hand_on(
    changes: Iterable[Change], earlier: Script, put: Callable[[Change], Any] = lambda change: change.after
) -> set[str]:
    """The places where the second step puts tensors that were there before it: a third one may come to read them."""
    held = {id(t) for change in changes for t in tensors_of(change.before)} | earlier.names.keys()
    return {place_of(change) for change in changes if not held.isdisjoint(map(id, tensors_of(put(change))))}


def _counted(changes: Iterable[Change], first: Script, second: Script) -> set[str]:
    """The places where two steps put tensors made of constants alone, in two ways: of what was there (`n = n + 1`)."""

    def made(script: Script, value: Any) -> list[str]:
        return [script.names[id(t)][0] for t in tensors_of(value) if script.names.get(id(t), ("", False))[1]]

    return {place_of(c) for c in changes if made(first, c.before) != made(second, c.after)}


def _outermost(change: Change, changes: list[Change]) -> Change:
    """The change of the first step in the same place; the second step's may be in what the first one made."""
    alike = [c for c in changes if c.path == change.path] or [c for c in changes if c.node.owner is change.node.owner]
    return next(iter(alike), change)


def is_hook(change: Change) -> bool:
    """Whether it is a hook of a module that came or went: calling the module reads it."""
    return change.node.kind == "names" and "_hooks" in change.node.name


def place_of(change: Change) -> str:
    """Its path; of a hook, whose number is another one at each registration, that of the hooks it is among."""
    return change.node.path if is_hook(change) else change.path
