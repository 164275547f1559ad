"""Spot checks: in a few later calls the plain step runs, too, and what the planned one computes is compared with it.

Before each call a plan looks at what forward reads, as far as that can be seen (docs/refused.md lists what cannot).
What it misses shows here: a call with other results or gradients than the plain step's gets those of the plain one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.autograd.graph import get_gradient_edge

from passes._torch import num_dispatch_modes, profiler_runs
from passes.draws import generators_kept
from passes.exclusive import alone
from passes.ops import is_collective
from passes.printable import brief
from passes.run._torch import active_saving_hooks, under_transform
from passes.run.step import OtherAnswer
from passes.trace.capture import Traced, casts_dropped
from passes.trace.given import filled
from passes.trace.nodes import same
from passes.trace.places import user_level
from passes.trace.refuse import has_sharded
from passes.trace.settings import Setting
from planner.check.compare import unequal
from planner.check.room import free_bytes
from planner.decided import Decided

from .entry import Entry, is_planned_for
from .plain_forward import PlainForward
from .plans import Plans

FIRST_CALLS = (2, 4, 8, 16, 32, 64, 128)  # of a plan that are compared: what forward changes shows early
OF_LIGHT_STEPS = (3, 5)  # too, which nobody waits for
LIGHT_FLOPS = 10**9
EVERY = 256  # of later calls one is
REPEATS = 3  # of a plain backward, whose sums over threads may come out otherwise
TIMES_FREE = 2  # as much memory as the plain step takes


class Call(Protocol):
    """What a spot check needs of a call: a `Fallback`."""

    state: Plans
    entry: Entry
    plain: PlainForward

    @property
    def path(self) -> str: ...


class OtherResult(OtherAnswer):
    """A planned forward computed something else than the plain one."""


@dataclass
class Expected:
    """What the plain step of a call gives: its outputs and the primals that it overwrites, by their numbers.

    Attributes:
        leaves: what the gradients of the primals are taken of.
        last: which call of the plan was compared before this one.
        generator: the state that it leaves the CPU's generator in.
        cast: primals whose gradients are not compared, as autocast would cast each once, and here does for each use.
        planned: the outputs of the planned step that are no inputs, as aliases.
        set: which attribute it sets to another plain value than the plan does, in words.
        raised: what it raised instead.
    """

    traced: Traced
    last: int
    leaves: Sequence[torch.Tensor]
    cast: frozenset[int] = frozenset()
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    overwritten: list[torch.Tensor] = field(default_factory=list)
    planned: dict[int, torch.Tensor] = field(default_factory=dict)
    generator: torch.Tensor = field(default_factory=torch.get_rng_state)
    set: str = ""
    raised: str = ""

    def compare(self, results: Sequence[torch.Tensor]) -> None:
        """Raise OtherResult where a planned forward's results are others."""
        count = len(self.traced.mutated)
        made = [leaf.index for leaf in self.traced.outputs if leaf.input is None and leaf.index in self.outputs]
        self.planned = {i: results[count + i].detach() for i in made}  # they get a graph, which leads here
        if how := self._difference(results[:count]):
            self.planned = {}  # the plain forward runs next
            raise OtherResult(how)

    @property
    def is_as_it_was(self) -> bool:
        """Whether nobody changed the step's outputs past torch's count of changes: a backward may read them."""
        return all(_equal(self.outputs[i], result) for i, result in self.planned.items())

    def _difference(self, overwritten: Sequence[torch.Tensor]) -> str:
        if self.raised or self.set:
            return self.raised or self.set
        for i, wanted, result in zip(self.traced.mutated, self.overwritten, overwritten, strict=False):
            if not _equal(wanted, result):
                return f"forward leaves other numbers in {self.traced.primal_names[i]} than the plain one"
        for leaf in self.traced.outputs:
            if leaf.index in self.planned and not _equal(self.outputs[leaf.index], self.planned[leaf.index]):
                return f"forward computes another {leaf.path or 'output'} than the plain one"
        if not torch.equal(self.generator, torch.get_rng_state()):
            return "forward draws other random numbers than the plain one"
        return ""

    def gradients(self, given: Mapping[int, torch.Tensor]) -> list[Any]:
        """Those of the primals, from those of outputs. It may be called again, for the same ones."""
        wanted = [leaf for leaf in self.leaves if leaf.requires_grad]
        edges = [get_gradient_edge(self.outputs[i]) for i in given]
        with torch.random.fork_rng(devices=[]):
            found = iter(torch.autograd.grad(edges, wanted, list(given.values()), True, allow_unused=True))
        return [next(found) if leaf.requires_grad else None for leaf in self.leaves]

    def is_repeated(self, output: Any, primals: Sequence[torch.Tensor]) -> bool:
        """Whether the plain forward did the same when it ran once more, and returned `output`."""
        if self.raised or not torch.equal(self.generator, torch.get_rng_state()):
            return False
        found = filled([(self.traced.output_template, output)])
        equal = [_equal(found[i], value) for i, value in self.outputs.items() if i in found]
        pairs = zip(self.traced.mutated, self.overwritten, strict=True)
        return all(equal) and all(_equal(primals[i], value) for i, value in pairs)


def spot_check(planned: Decided, call: Call, primals: Sequence[torch.Tensor]) -> Expected | None:
    """Run the plain forward of a call that is to be compared; it leaves all as it was."""
    entry = call.entry
    entry.calls += 1
    if not _is_due(entry.calls, planned.step_flops) or not entry.repeatable or not _may_run(planned, call, primals):
        return None
    traced, leaves = planned.prepared.traced, call.plain.leaves(primals)
    expected = Expected(traced, entry.compared, leaves, frozenset(planned.step.casts))
    entry.compared = entry.calls
    settings = [s for s in traced.settings if s.template is None]
    before = {s: s.now(call.state.model) for s in settings}

    def look() -> None:
        expected.generator = torch.get_rng_state()
        expected.set = _set_otherwise(call.state.model, before)

    generators = {"cpu": torch.default_generator}
    try:
        with casts_dropped(), generators_kept(planned.prepared.device):
            expected.outputs = call.plain.run(primals, leaves, generators, nullcontext(), look)
    except Exception as error:  # noqa: BLE001 - the call raises it, if the plain forward does so once more
        expected.raised = f"the plain forward raises {type(error).__name__}: {brief(error)}"
        return expected
    expected.overwritten = [leaves[i].detach() for i in traced.mutated]
    return expected


def say_other(call: Call, expected: Expected, how: str, repeated: bool) -> None:
    """Say what a spot check found, unless the plain step does not repeat itself: such a plan is compared no more."""
    entry, of = call.entry, f"region {call.path}" if call.path else "step"
    if not repeated:
        entry.repeatable = False
        warnings.warn(
            f"planned {of} not used, not under the budget: a spot check could not compare this call, as the plain "
            "step does not repeat itself. There will be no others of this plan.", stacklevel=user_level(),
        )  # fmt: skip
        return
    warnings.warn(
        f"planned {of} not used, not under the budget: {how}. It reads something that has changed since planning, and "
        f"that plans do not see. This call has the plain step's numbers; of the calls before it none was compared "
        f"since call {expected.last or 'one'} of this plan. {call.state.differed(entry)} Please report this.",
        stacklevel=user_level(),
    )


def compared(
    call: Call, expected: Expected, given: Mapping[int, torch.Tensor], planned: Callable[[], list[Any]]
) -> list[Any] | None:
    """All gradients: the planned backward's where they are the plain one's, else those. None where that fails."""
    if num_dispatch_modes() or not expected.is_as_it_was:
        return None
    try:
        wanted = expected.gradients(given)
    except Exception:  # noqa: BLE001 - whatever a hook has against being called twice
        return None
    found = planned()
    for i, (name, one, other) in enumerate(zip(expected.traced.primal_names, wanted, found, strict=True)):
        if i in expected.cast:
            continue
        if (one is None) != (other is None) or (one is not None and not _equal(one, other)):
            repeated = all(_all_equal(wanted, expected.gradients(given)) for _ in range(REPEATS))
            say_other(call, expected, f"the gradient of {name} is another one than the plain step's", repeated)
            return wanted
    return found


def _is_due(number: int, flops: int) -> bool:
    early = number in FIRST_CALLS or (number in OF_LIGHT_STEPS and flops < LIGHT_FLOPS)
    return early or number % EVERY == 0


def _may_run(planned: Decided, call: Call, primals: Sequence[torch.Tensor]) -> bool:
    """Where a check may run, and where nobody but the plan would notice it: no profiler, mode or hook on what is saved.

    What is of a class of the user's has no stand-in of that class, and what forward leaves elsewhere is not put back.
    """
    prepared = planned.prepared
    if prepared.options.check is False or prepared.device.type != "cpu" or planned.compiled or not planned.step.exact:
        return False
    if profiler_runs() or num_dispatch_modes() or active_saving_hooks() or not alone() or has_sharded(call.state.root):
        return False
    if under_transform(primals):  # which the step refuses
        return False
    if prepared.traced.left or not all(map(is_planned_for, primals)):
        return False
    if any(map(is_collective, prepared.traced.graph_module.graph.nodes)):
        return False
    plain = prepared.baseline_peak_bytes - prepared.lowered.problem.static_bytes
    return TIMES_FREE * plain <= free_bytes(prepared.device)


def _set_otherwise(model: Any, before: Mapping[Setting, Any]) -> str:
    for setting, then in before.items():
        if not same(setting.now(model), setting.value if setting.added is None else then + setting.added):
            return f"forward sets {setting} to another value than the plain one"
    return ""


def _all_equal(gradients: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(a is b or _equal(a, b) for a, b in zip(gradients, others, strict=True))


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and not unequal(a, b)

