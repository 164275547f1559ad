"""Courses: what is between regions may choose by values how it calls them, so calls that look the same differ there.

Hugging Face's models hand their blocks no mask where nothing is padded. Such a step runs its regions plain, once: when
the model is next called, what it was called with is planned, too, and regions look for the plan that their call is of.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from passes.trace.places import user_level
from planner.decided import Decided

from .entry import Entry
from .plan_key import Key
from .regions import Unplanned

MOST_COURSES = 4  # that are planned for calls that look the same


class Courses:
    """Which calls took a course that is not planned.

    Attributes:
        missed: the plan by which such a call ran, and its arguments, until it is planned.
    """

    def __init__(self) -> None:
        self.missed: tuple[Entry, Mapping[str, Any]] | None = None
        self.tried = Counter[Key]()
        self.told: set[Key] = set()  # that they run plain from now on

    def look(self, entry: Entry, bound: Mapping[str, Any], plans_anew: bool) -> None:
        """Note and say, after a call, that regions ran plain in it."""
        missed = [r.unplanned for r in entry.regions if r.unplanned is not None]
        if not missed:
            return
        first: Unplanned = next((m for m in missed if m.helps), missed[0])
        again = plans_anew and first.helps and self.tried[entry.key] < MOST_COURSES - 1
        waiting, told = self.missed is not None, entry.key in self.told
        if again:
            self.missed = entry, bound
        else:
            self.told.add(entry.key)
        if waiting if again else told:
            return
        more = len(missed) - 1
        others = f", as do {more} other regions," if more > 1 else ", as does another region," if more else ","
        later = "When the model is next called, such calls are planned, too." if again else "So will others like it."
        warnings.warn(
            f"{first.call} runs plain{others} and this step is not under the budget, as no plan is for such a call: "
            f"{first.why}. {later}",
            stacklevel=user_level(),
        )

    def take(self) -> tuple[Entry, Mapping[str, Any]]:
        """The call to plan now."""
        assert self.missed is not None
        (entry, bound), self.missed = self.missed, None
        self.tried[entry.key] += 1
        return entry, bound

    def planned(self, added: Entry, cache: Sequence[Entry]) -> None:
        """Plan no more such calls where this has shown nothing new."""
        known = {run for e in cache if e is not added and e.key == added.key for run in _looks(e.planned)}
        if added.planned.runs and _looks(added.planned) <= known:
            self.tried[added.key] = MOST_COURSES

    def give_up(self, entry: Entry, error: Exception) -> None:
        """No plan for such a call was found."""
        self.tried[entry.key] = MOST_COURSES
        warnings.warn(
            f"regions go on running plain in such calls, not under the budget: {error}", stacklevel=user_level()
        )


def _looks(planned: Decided) -> set[Any]:
    """How regions are called in it, and what they asked values."""
    guards = ((run, run.planned.prepared.traced.guard) for run in planned.runs)
    return {(run.path, run.key, None if guard is None else str(guard.answers)) for run, guard in guards}
