"""A step before any decision: captured, profiled, lowered to the Problem that the solvers see."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from passes.alias import Aliases, Storage, alias
from passes.exclusive import exclusive
from passes.lower import UPDATE, Lowered, lower
from passes.memory import granule, round_up
from passes.ops import VARIES
from passes.printable import printable
from passes.profile import Measured, OpProfile, profile
from passes.run.step import refuse_transform
from passes.trace.capture import Traced
from passes.trace.checkpoints import say_repeated
from passes.trace.compiled import refuse_compiled
from passes.trace.layouts import Layouts, learned
from passes.trace.refuse import refuse, refuse_sharded
from solvers.bounds import floor_bytes
from solvers.errors import MIB, BudgetError, PlannerError
from solvers.problem import Problem
from solvers.schedule import Schedule, plain_order, with_frees
from solvers.simulate import simulate

from .arena import NOTHING, Reservation
from .elsewhere import held_bytes, seen_there
from .footprint import Footprint, Start, found_by_step
from .hints import Hinted, resolve
from .options import Options
from .progress import Progress
from .ranks.flight import Around, flight_peak, with_loss
from .regions.compose import Composed
from .regions.hollow import Crossings
from .reservation import Played, played
from .sizes import Sizes


@dataclass(frozen=True)
class Regions:
    """What a step by regions is made of.

    Attributes:
        composed: the flat Problem, and which ops of it are whose.
        crossings, glue_cost: what it was composed from, besides the runs' own steps.
        prepared: for each run its own step.
        eager: why a submodule is left to eager, by its path.
        spare: modules that the sample's step does not call, and that run like an equal one where another step does.
        eager_calls: calls that no gradient reaches, by path and number: they run in eager.
        talks: whether the step talks to other ranks, between regions or in them.
        draws: the generators' states at its beginning, on which its course may depend.
    """

    composed: Composed
    crossings: Crossings
    glue_cost: int
    prepared: tuple[Prepared, ...]
    eager: Mapping[str, str]
    spare: tuple[str, ...]
    eager_calls: Collection[tuple[str, int]]
    talks: bool
    draws: Mapping[str, Any]

    @property
    def paths(self) -> tuple[tuple[str, int], ...]:
        """For each run the path of its module, and which call of that module it is."""
        return tuple((run.path, run.number) for run in self.crossings.runs)


Reservations = dict[tuple[Schedule, int | None], Reservation]  # by schedule and budget


@dataclass(frozen=True)
class Prepared:
    """A step that is captured, profiled and lowered, before any decision.

    Attributes:
        baseline_peak_bytes: predicted peak of the step with no recompute.
        hinted: the hint that names each kernel, where one does.
        model_name: the model's class, for people to read.
        layouts: what running has shown about layouts so far; one object for all plans of a model.
        start: the device's caching allocator before the step; None where it has none or the model is on no device.
        regions: the runs of regions that the step is made of (`planner.regions`); None for a step planned as a whole.
        sizes: the traces of the step, or of its regions, at other sizes; one object for all plans of a model.
        reservations: those found so far, which takes seconds.
    """

    traced: Traced
    aliases: Aliases
    profiles: dict[fx.Node, OpProfile]
    lowered: Lowered
    device: torch.device
    baseline_peak_bytes: int
    options: Options
    hinted: dict[fx.Node, Hinted]
    model_name: str
    layouts: Layouts
    start: Start | None = None
    regions: Regions | None = None
    sizes: Sizes = field(default_factory=partial(Sizes, is_first=False))
    reservations: Reservations = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def problem(self) -> Problem:
        """The step as the solvers see it."""
        return self.lowered.problem

    @property
    def update_peak_bytes(self) -> int:
        """What `optimizer.step()` peaks at, which no recompute lowers; 0 where it holds nothing for a moment."""
        problem = self.problem
        if problem.ops[-1].name != UPDATE:
            return 0
        return problem.static_bytes + sum(problem.tensors[t].bytes for t in problem.pinned) + problem.ops[-1].workspace

    @property
    def preferred(self) -> tuple[int, ...]:
        """Ops that the hints want to be recomputed and that may be, in order: what a region returns is kept."""
        wanted = sorted(self.lowered.node_op[n] for n, hint in self.hinted.items() if not hint.once)
        return tuple(i for i in wanted if self.problem.ops[i].recomputable)

    def others_bytes(self, schedule: Schedule) -> int:
        """What the other micro-batches of a pipeline add at the highest point; 0 outside of one."""
        flight = self.options.flight
        if flight is None:
            return 0
        problem, traced = self.problem, self.traced
        inputs = {self.aliases.of[p] for p in traced.placeholders[len(traced.state) : traced.num_primals]}
        size = sum(round_up(s.bytes, granule(self.device)) for s in inputs if isinstance(s, Storage))
        outputs = sum(problem.tensors[t].bytes for t in problem.outputs if problem.tensors[t].category == "output")
        lowered = self.lowered
        around = Around(size, outputs, lowered.accumulated_bytes, lowered.arriving)
        return flight_peak(problem, schedule, flight, around) - simulate(problem, schedule).peak_bytes

    def footprint(self, schedule: Schedule, reservation: Reservation = NOTHING) -> Footprint | None:
        """What the device's caching allocator makes of a schedule; None where there is none."""
        return None if self.start is None else self._played(schedule).footprint([self.start], reservation)

    def worst_footprint(self, schedule: Schedule, reservation: Reservation = NOTHING) -> Footprint:
        """Where the driver places new segments is its own affair: the larger figures of both ways."""
        return self._played(schedule).worst(reservation)

    def reservation(self, schedule: Schedule, budget_bytes: int | None) -> Reservation:
        """What to ask for before the first step and around ops; nothing where that lowers nothing.

        Ops of regions, whose code several runs may share, have no spacers around them.
        """
        if self.start is None:
            return NOTHING
        found = self.reservations.get((schedule, budget_bytes))
        if found is None:
            limit = self.start.room_bytes if budget_bytes is None else budget_bytes
            found = self._played(schedule).reservation(limit, may_space=self.regions is None)
        return self.reservations.setdefault((schedule, budget_bytes), found)

    def _played(self, schedule: Schedule) -> Played:
        assert self.start is not None
        return played(self.lowered, self.profiles, schedule, self.start, self.options)


@exclusive()
def prepare(
    model: nn.Module,
    arguments: Mapping[str, Any],
    options: Options,
    progress: Progress,
    *,
    differentiated: tuple[str, ...] | None = None,
    required_hints: bool = True,
    ceiling_bytes: int | None = None,
    layouts: Layouts | None = None,
    sizes: Sizes | None = None,
) -> Prepared:
    """Everything before the decision.

    Args:
        differentiated: paths of the outputs that `backward` starts from; None chooses.
        required_hints: whether a hint that names nothing raises; planning anew for other inputs, it warns.
        ceiling_bytes: raise `BudgetError` before any op is run if the step is sure to need more.
        layouts: what running has shown so far about how kernels lay out what they make; what is learned is added.
        sizes: what is known of the model's calls at other sizes.
    """
    refuse_sharded(model)
    device = model_device(model)
    options = options.priced_on(device)
    target = options.target(device)
    real = not any(p.device.type == "meta" for p in model.parameters())
    layouts, sizes = {} if layouts is None else layouts, Sizes() if sizes is None else sizes
    measured: dict[Any, Measured] = {}
    again = True
    while again:
        with progress.stage("capture"):
            traced = sizes.capture(
                model, arguments, options.loss_fn, differentiated=differentiated, keep_outputs=options.keep_outputs,
                layouts=layouts,
            )  # fmt: skip
            aliases = alias(traced.graph_module.graph)
            hinted = resolve(options.hints, traced, aliases, target, required=required_hints)
        once = [n for n, hint in hinted.items() if hint.once]
        with progress.stage("profile"):
            if ceiling_bytes is not None:
                _check_floor(traced, aliases, device, options, once, ceiling_bytes)
            profiles = profile(
                traced.graph_module.graph, measure=real, timed=real and options.cost == "measured",
                progress=progress.each, known=measured,
            )  # fmt: skip
        again = _learn(layouts, traced, profiles)
    say_repeated(traced.repeated)
    if any(n.meta.get(VARIES) for n in profiles):  # seen while profiling: it may not run again
        hinted = resolve(options.hints, traced, aliases, target, required=required_hints)
    options = replace(options, flight=with_loss(options.flight, traced, model, device))
    lowered = lower_step(traced, aliases, profiles, device, options, once)
    start = found_by_step(model, arguments, traced, lowered, device) if real and device.type == target.type else None
    name = printable(type(model).__name__)
    return _with_plain_peak(
        Prepared(traced, aliases, profiles, lowered, device, 0, options, hinted, name, layouts, start, sizes=sizes)
    )


def _learn(layouts: Layouts, traced: Traced, profiles: Mapping[fx.Node, OpProfile]) -> bool:
    """Take over how kernels laid out what they make; whether any did otherwise than the trace was told."""
    made = learned(traced.graph_module.graph, {n: p.result_layouts for n, p in profiles.items()})
    new = any(layouts.get(key) != layout for key, layout in made.items())
    layouts.update(made)
    return new


def _with_plain_peak(prepared: Prepared) -> Prepared:
    problem = prepared.problem
    schedule = with_frees(problem, plain_order(problem))
    found = prepared.footprint(schedule)
    plain = simulate(problem, schedule).peak_bytes if found is None else found.allocated_bytes
    return replace(prepared, baseline_peak_bytes=plain + prepared.others_bytes(schedule))


def check_model(model: Any, anew: bool = False) -> None:
    """Refuse what is not a model, or not one that can be planned here and now; planned before, it may be compiled."""
    if not isinstance(model, nn.Module):
        if isinstance(model, type) and issubclass(model, nn.Module):
            raise PlannerError(f"model is the class {model.__name__}: pass an instance of it.")
        raise PlannerError(f"model is a {type(model).__name__}: pass a torch.nn.Module.")
    if torch.is_inference_mode_enabled():
        raise PlannerError(
            "planning under torch.inference_mode(), in which no gradient can be recorded: leave the block, or use "
            "torch.no_grad() there."
        )
    refuse_transform(model.parameters())
    refuse(model)
    if not anew:
        refuse_compiled(model)


def _check_floor(
    traced: Traced, aliases: Aliases, device: torch.device, options: Options, once: Collection[fx.Node], ceiling: int
) -> None:
    """The floor without what ops need besides what they read and write is known without running one."""
    counted = {n: replace(p, workspace_bytes=0) for n, p in profile(traced.graph_module.graph, measure=False).items()}
    floor = floor_bytes(lower_step(traced, aliases, counted, device, options, once).problem)
    if floor > ceiling:
        message = f"the step cannot run below {floor / MIB:,.1f} MiB; it was to stay below {ceiling / MIB:,.1f} MiB"
        raise BudgetError(message, budget_bytes=ceiling, floor_bytes=floor)


def lower_step(
    traced: Traced, aliases: Aliases, profiles: dict[fx.Node, OpProfile], device: torch.device, options: Options,
    once: Collection[fx.Node] = (), region: bool = False,
) -> Lowered:  # fmt: skip
    """The Problem of a profiled step; `once` are the kernels that hints keep from running again."""
    target = options.target(device)
    held = held_bytes(profiles, device, target)
    return lower(
        traced, aliases, seen_there(profiles, traced.graph_module.graph, device, target), options.cost_function(device),
        device=target, reserve_bytes=options.set_aside_bytes + held,
        keep_outputs=options.keep_outputs, once=once, gradients=options.gradients,
        step_bytes=options.update.step_bytes, hook_bytes=options.update.hook_bytes, region=region,
        lasting=options.flight is None or not options.flight.last,
        in_turn=options.in_turn,
    )  # fmt: skip


def model_device(model: nn.Module) -> torch.device:
    """Where the model lives; the CPU for a model without parameters or on the meta device."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type != "meta":
            return tensor.device
    return torch.device("cpu")
