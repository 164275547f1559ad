"""settle: a step with regions is run hollow until a run teaches nothing new."""

from __future__ import annotations

from passes.exclusive import interrupt_point
from passes.profile import Counting
from planner.errors import RegionError
from planner.options import Options
from planner.prepared import model_device

from .find import Candidates
from .hollow import Hollow
from .parts import Parts
from .refusals import first_of
from .sample import Sample

MOST_RUNS = 30  # each teaches something


def settled_run(sample: Sample, chosen: Candidates, parts: Parts, options: Options) -> tuple[Hollow, float | None]:
    """The last of several hollow runs, which taught nothing new, and what the code between regions costs.

    That is counted in the first, which captures, and not known (None) where runs taught more than that: other backwards
    have other sums between regions. Nor is it where ops are timed, some of which run for the first time there.
    """
    first: tuple[list[tuple[str, int]], float] | None = None
    relaid = False
    for _ in range(MOST_RUNS):
        interrupt_point()
        counts = first is None and options.cost != "measured"
        counting = Counting(options.cost_function(model_device(sample.model))) if counts else None
        try:
            hollow = sample.run(chosen, parts, counting)
        except Exception:
            if not chosen.refine(parts.refused, chosen.chosen):
                raise
            continue  # it may have been zeros of what is now eager
        ended = {run.path for run in hollow.runs if run.ended}
        for run in hollow.runs:
            if not run.ended:
                hollow.again = parts.leave(run.path, run.number, any_call=run.path not in ended) or hollow.again
        kinds = {part.kind for part in parts.known}
        course = [(run.path, run.number) for run in hollow.runs]
        if counting is not None:
            first = course, counting.total
        if chosen.refine(parts.refused, hollow.called, kinds) or hollow.again or counting is not None:
            continue
        if not parts.profile(sample.device.type != "meta", options.cost == "measured"):
            parts.errors.clear()  # with what the calls were given
            known = first is not None and first[0] == course and not parts.asked and not relaid
            return hollow, first[1] if first is not None and known else None
        relaid = True
    raise RegionError(f"the step takes another course each time that it is run: {first_of(parts.refused)}")
