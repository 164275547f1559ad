"""The verdict on a plan in words: one wording for notebooks, terminals, pages, pictures, plan files and exports."""

from __future__ import annotations

from typing import NamedTuple

from planner.decided import Decided
from planner.units import show_bytes


class Verdict(NamedTuple):
    """What a plan comes to; `overhead` and `bound` are shares of the plain step's cost."""

    budget_bytes: int | None
    peak_bytes: int
    plain_peak_bytes: int
    overhead: float
    bound: float | None
    status: str
    solver: str
    cost_name: str
    num_saved: int
    num_recomputed: int

    @property
    def headline(self) -> str:
        """Peaks, cost and proved bound: `peak 90.1 MiB instead of 207.0 MiB, recompute costs 3.48% of ...`."""
        if not self.num_recomputed:
            return f"peak {show_bytes(self.peak_bytes)}, nothing is recomputed"
        bound = "no bound proved" if self.bound is None else f"proved lower bound {self.bound:.2%}"
        peaks = f"peak {show_bytes(self.peak_bytes)} instead of {show_bytes(self.plain_peak_bytes)}"
        return f"{peaks}, recompute costs {self.overhead:.2%} of the step ({bound}, {self.status})"

    @property
    def sentence(self) -> str:
        """The headline under its budget."""
        budget = "no budget" if self.budget_bytes is None else f"budget {show_bytes(self.budget_bytes)}"
        fits = "" if self.num_recomputed else "; the plain step fits"
        return f"{budget}: {self.headline}{fits}"

    @property
    def details(self) -> str:
        """Who answered, in which unit of cost, and how much is saved and recomputed."""
        return (
            f"solver {self.solver}, cost in {_brief(self.cost_name)}; {self.num_saved} tensors saved, "
            f"{self.num_recomputed} ops recomputed"
        )


def _brief(cost: str) -> str:
    """A cost's name for people: rates that are spelled out stay in the file."""
    return "roofline of its own rates" if "," in cost else cost


def verdict(plan: Decided) -> Verdict:
    """The verdict on a decided step."""
    return Verdict(
        plan.budget_bytes, plan.peak_bytes, plan.baseline_peak_bytes, plan.overhead, plan.bound, plan.status,
        plan.solver, plan.cost_name, len(plan.saved), len(plan.recomputed),
    )  # fmt: skip


def describe(plan: Decided) -> str:
    """The verdict and the notes, a line each."""
    found = verdict(plan)
    notes = (f"note: {note}" for note in plan.notes)
    return "\n  ".join([f"Plan ({found.sentence})", found.details, *notes, plan.checked.line])
