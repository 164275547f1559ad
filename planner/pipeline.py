"""The pipeline: model, arguments -> Prepared -> Solution -> Rewritten, proved -> Decided."""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from passes.alias import device_of
from passes.device import kind_of
from passes.errors import CaptureError, NoBackward, Unsupported, VerificationError
from passes.exclusive import exclusive
from passes.leaves import casts, read_views, sums, uncounted
from passes.lower import kept_primals
from passes.ops import is_random
from passes.rewrite import Rewritten, reads, rewrite
from passes.run.arena import Arena
from passes.run.step import Step
from passes.trace.capture import Traced
from passes.trace.carried import Carries, carried, carry
from passes.trace.layouts import Layouts
from passes.trace.once import refuse_failing
from passes.trace.refuse import has_sharded
from passes.trace.structure import Bound
from passes.trace.templates import argument_path
from passes.verify import verify
from solvers.bounds import floor_bytes
from solvers.errors import MIB, BudgetError
from solvers.schedule import Schedule
from solvers.solution import Solution, solution

from .check.run import check_step
from .decided import Decided, PlannedRun
from .errors import RegionError
from .options import WHOLE, Options
from .preference import placed
from .prepared import Prepared, Regions, check_model, prepare
from .progress import Progress
from .regions.emit import cut, own_peaks
from .regions.larger import WHOLE_MODEL, holders, may_help, paths_of
from .regions.plain import holds_no_more_plain
from .regions.prepare import prepare_regions
from .sizes import Sizes
from .starts import Starts

# (model, arguments, paths of the outputs that backward starts from) -> the step decided for such calls
Replan = Callable[[nn.Module, Any, "tuple[str, ...] | None"], Decided]


def replanner(first: Decided) -> Replan:
    """Plans calls anew, under the same budget, that the plan `first` does not hold for.

    What has shown about layouts is kept; a step by regions takes the course that its draws led to then. The search
    starts from what was decided before.
    """
    prepared, budget_bytes = first.prepared, first.budget_bytes
    options, layouts, sizes = prepared.options, prepared.layouts, prepared.sizes
    draws = prepared.regions.draws if prepared.regions is not None else None
    starts = Starts()
    starts.add(first)

    def replan(model: nn.Module, arguments: Bound, differentiated: tuple[str, ...] | None) -> Decided:
        check_model(model, anew=True)
        progress = Progress(False)
        prepared = prepare_step(
            model, arguments, options, progress, differentiated=differentiated, required_hints=False, layouts=layouts,
            draws=draws, sizes=sizes,
        )  # fmt: skip
        decided = decide_step(model, arguments, prepared, budget_bytes, progress, starts)
        starts.add(decided)
        check_step(model, decided, arguments, options.loss_fn, options.check, anew=True)
        return decided

    return replan


def prepare_step(
    model: nn.Module, arguments: Bound, options: Options, progress: Progress, *,
    differentiated: tuple[str, ...] | None = None, required_hints: bool = True, ceiling_bytes: int | None = None,
    layouts: Layouts | None = None, draws: Mapping[str, Any] | None = None, sizes: Sizes | None = None,
) -> Prepared:  # fmt: skip
    """The step as a whole, or by regions where that is asked for, parameters are sharded or a part cannot be traced."""
    options_of_both: dict[str, Any] = {
        "required_hints": required_hints, "layouts": layouts, "differentiated": differentiated,
        "sizes": Sizes() if sizes is None else sizes,
    }  # fmt: skip
    by_regions = {**options_of_both, "draws": draws}
    if options.patterns or (options.regions != WHOLE and has_sharded(model)):
        return prepare_regions(model, arguments, options, progress, **by_regions)
    whole = partial(prepare, model, arguments, options, progress, ceiling_bytes=ceiling_bytes, **options_of_both)
    try:
        return _with_state(model, arguments, whole)
    except (CaptureError, Unsupported) as error:
        if options.regions == WHOLE or isinstance(error, NoBackward):
            raise
        carry(model, arguments, ())  # the code between regions finds it where it is
        return prepare_regions(model, arguments, options, progress, **by_regions, why=error)


def _with_state(model: nn.Module, arguments: Bound, whole: Callable[[], Prepared]) -> Prepared:
    """The step as a whole; state that forward carries becomes one of its arguments where it then can be planned."""
    while True:
        try:
            return whole()
        except Carries as error:
            if carried(arguments) == error.paths:
                raise
            carry(model, arguments, error.paths)


def decide(
    prepared: Prepared, budget_bytes: int | None, progress: Progress, starts: Starts | None = None
) -> Decided:
    """Solve, from what is known of other sizes, rewrite and prove.

    Raises:
        BudgetError: nothing found fits.
    """
    with progress.stage("solve"):
        found = (starts or Starts()).solve(prepared, budget_bytes, progress.report)
    return emit(prepared, found, budget_bytes, progress)


def decide_step(
    model: nn.Module, arguments: Bound, prepared: Prepared, budget_bytes: int | None, progress: Progress,
    starts: Starts | None = None,
) -> Decided:  # fmt: skip
    """`decide`, by the smallest regions around those asked for with which the budget can be had; plain where that does.

    Raises:
        BudgetError: nothing found fits, whatever the regions.
        ForwardFailed: what was found cannot be proved, and the plain forward fails on these arguments.
    """
    try:
        return plain_if_as_good(model, arguments, decide(prepared, budget_bytes, progress, starts))
    except VerificationError:
        refuse_failing(model, arguments, prepared.options.loss_fn)
        raise
    except BudgetError as error:
        why = prepared.regions.eager.get("") if prepared.regions is not None else None
        if why:
            error.args = (f"{error}. The step is planned by regions, as the whole model is not: {why.rstrip('.')}",)
        if budget_bytes is None or not prepared.options.patterns or has_sharded(model):
            raise
        refusals = [error]
    for larger in _larger(model, arguments, prepared, budget_bytes, progress):
        try:
            return decide(larger, budget_bytes, progress, starts)
        except BudgetError as error:
            refusals.append(error)
    refusals = [min(refusals, key=lambda e: e.minimum_bytes or math.inf)]
    refusals[0].args = (f"{refusals[0]} by these regions, and larger ones do not fit either",)
    raise refusals.pop()  # no frame of its own traceback keeps it


def plain_if_as_good(model: nn.Module, arguments: Mapping[str, Any], decided: Decided) -> Decided:
    """The same step, with its regions left as they are where a plan of them changes nothing."""
    return replace(decided, plain=True) if holds_no_more_plain(model, arguments, decided) else decided


def _larger(
    model: nn.Module, arguments: Bound, asked: Prepared, budget_bytes: int, progress: Progress
) -> Iterator[Prepared]:
    """The same step by larger and larger regions, as far as the budget may be had by them."""
    if asked.regions is None or not may_help(asked, budget_bytes):
        return
    tried, refused = paths_of(asked), set(asked.regions.eager)
    starts = tuple(leaf.path for leaf in asked.traced.outputs if leaf.differentiated)
    told = f"the regions asked for need at least {floor_bytes(asked.problem) / MIB:,.1f} MiB"
    for paths in holders(model, tried):
        inner = sorted(paths - {WHOLE_MODEL})
        note = f"{told}: {', '.join(inner) or 'the whole model'} planned instead"
        options = replace(
            asked.options, regions=tuple(map(glob.escape, inner)) or WHOLE, notes=(*asked.options.notes, note)
        )
        try:
            larger = prepare_step(
                model, arguments, options, progress, differentiated=starts, required_hints=False,
                layouts=asked.layouts, draws=asked.regions.draws, sizes=asked.sizes,
            )  # fmt: skip
        except (CaptureError, Unsupported, RegionError):
            continue
        eager = larger.regions.eager if larger.regions is not None else ()
        if paths_of(larger) != tried and refused.issuperset(eager) and floor_bytes(larger.problem) <= budget_bytes:
            tried = paths_of(larger)
            yield larger


@exclusive()
def emit(
    prepared: Prepared, solution: Solution, budget_bytes: int | None, progress: Progress, peak_bytes: int | None = None
) -> Decided:
    """Rewrite a solution into code, and prove it.

    Args:
        peak_bytes: of a run of a region, what it may hold, by its own count, before the peak of the step grows.
    """
    if prepared.regions is not None:
        return _emit_regions(prepared, prepared.regions, solution, budget_bytes, progress)
    reservation = prepared.reservation(solution.schedule, budget_bytes)
    with progress.stage("rewrite"):
        rewritten = rewrite(
            prepared.traced, prepared.aliases, prepared.lowered, solution.schedule, peak_bytes,
            as_scheduled=kind_of(prepared.device).caches, spacing=reservation.spacing,
        )  # fmt: skip
    with progress.stage("verify"):
        verify(prepared.traced, rewritten)
    halves = rewritten, bind_step(prepared, rewritten, reservation.arena)
    return Decided(prepared, solution, halves, budget_bytes, dict(progress.seconds), reservation=reservation)


def _emit_regions(
    prepared: Prepared, regions: Regions, found: Solution, budget_bytes: int | None, progress: Progress
) -> Decided:
    runs = planned_runs(
        regions, found.schedule,
        lambda part, own, peak: emit(part, solution(part.problem, own, found.solver), None, progress, peak),
    )  # fmt: skip
    reservation = prepared.reservation(found.schedule, budget_bytes)
    return Decided(prepared, found, None, budget_bytes, dict(progress.seconds), runs=runs, reservation=reservation)


def planned_runs(
    regions: Regions, schedule: Schedule, emit_run: Callable[[Prepared, Schedule, int], Decided]
) -> tuple[PlannedRun, ...]:
    """A schedule for each run of a region; equal ones share what `emit_run` makes of them.

    It is told what they all may hold, each by its own count, before the peak of the step grows.
    """
    known: dict[Any, Decided] = {}
    problems = [own.problem for own in regions.prepared]
    schedules = cut(regions.composed, schedule, problems)
    equal: dict[Any, list[int]] = {}
    for own, part, peak in zip(
        schedules, regions.prepared, own_peaks(regions.composed, schedule, problems, schedules), strict=True
    ):
        equal.setdefault((id(part), own), []).append(peak)
    for own, part in zip(schedules, regions.prepared, strict=True):
        if (id(part), own) not in known:
            known[id(part), own] = emit_run(part, own, min(equal[id(part), own]))
    runs = zip(regions.crossings.runs, schedules, regions.prepared, strict=True)
    return tuple(
        PlannedRun(run.path, run.number, run.part.key, tuple(run.part.state), known[id(part), own])
        for run, own, part in runs
    )  # fmt: skip


def emit_schedule(prepared: Prepared, schedule: Schedule, solver: str = "given") -> Decided:
    """`emit` for a schedule from elsewhere (a plan file, a test)."""
    found = solution(prepared.problem, placed(prepared, schedule), solver)
    return emit(prepared, found, None, Progress(False))


def bind_step(prepared: Prepared, rewritten: Rewritten, arena: Arena = ()) -> Step:
    """Bind the halves to what the runtime has to know."""
    traced = prepared.traced
    returned = [leaf for leaf in traced.outputs if leaf.input is None]
    elsewhere = any(leaf.requires_grad and not leaf.differentiated for leaf in returned)
    read = (i for i, gradient in enumerate(traced.gradients) if gradient is None and traced.placeholders[i].users)
    without = [i for i in read if i not in traced.detached]
    return Step(
        forward=rewritten.forward,
        backward=rewritten.backward,
        mutated=traced.mutated,
        num_outputs=traced.num_outputs,
        saved_primals=rewritten.saved_primals,
        differentiable=tuple(leaf.requires_grad for leaf in returned),
        expected=tuple(leaf.index for leaf in returned if leaf.differentiated),
        tangent_strides=tuple(tuple(t.meta["val"].stride()) for t in traced.placeholders[traced.num_primals :]),
        keep_primals=kept_primals(traced),
        rng_devices=_rng_devices(traced),
        hold_outputs=prepared.options.keep_outputs,
        leaves=rewritten.leaves,
        arrivals=traced.arrivals,
        reads=reads(traced, rewritten),
        sums=tuple(sums(traced)),
        casts=tuple(casts(traced)),
        views=read_views(traced),
        names=tuple(map(argument_path, traced.primal_names)),
        autocast=traced.backward_autocast,
        others=tuple(without) if elsewhere else (),
        arena=arena,
        spacers=rewritten.spacers,
        again=any(n.meta.get("recompute_of") for n in rewritten.backward.graph.nodes),
        draws=any(is_random(n) and not n.meta.get("recompute_of") for n in rewritten.backward.graph.nodes),
        uncounted=uncounted(traced),
        readers=tuple(leaf.readers for leaf in returned),
        output_names=tuple(leaf.path or "the output" for leaf in returned),
        asked=tuple((each.place, each.answer) for each in traced.asked),
    )


def _rng_devices(traced: Traced) -> tuple[str, ...]:
    drawing = [n for n in traced.graph_module.graph.nodes if is_random(n)]
    return tuple(dict.fromkeys(str(device_of(n)) for n in drawing))
