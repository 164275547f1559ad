"""`torch.compile(model, backend="checkpoint_planner", options={"budget_mb": 4000})`.

Dynamo captures, AOT autograd traces forward and backward, the planner splits them under the budget, and Inductor
compiles both halves (or, with `"inner": "eager"`, they run op by op, with the bits of AOT autograd's graphs). Options:

    budget_mb    MiB of the whole step's peak, a size ("12GB"), or a share of its plain peak ("50%": of the largest
                 step's so far); None recomputes nothing
    inner        "inductor" (default) or "eager"
    solver, time_limit, gap, cost    as in `auto_checkpoint`; the default cost is that of compiled code under Inductor
    reserve_mb   MiB to leave free, for what the graphs do not hold: optimizer state, tensors made between graphs
    inductor     a dict of Inductor's own options
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from passes._torch import FakeTensor
from passes.device import room_bytes
from passes.profile import OpProfile
from passes.rates import check_cost, cost_function
from planner.budget import Budget, reserve_to_bytes
from planner.options import check_effort
from solvers import get_solver
from solvers.errors import PlannerError

from ._torch_compile import check_inductor, concrete, mode_options, opaque, symbol_name, traced_inputs
from .kernels import compiled_cost
from .program import Program, Settings
from .sharing import Share

INNER = ("inductor", "eager")
_SHARES: dict[int, tuple[Any, Share]] = {}


@dataclass(frozen=True)
class CompileOptions:
    """What `options` may hold, checked.

    Raises:
        PlannerError: a name is unknown, or no plan can be made with a value.
    """

    budget_mb: float | str | None = None
    inner: str = "inductor"
    solver: str = "auto"
    time_limit: float = 30.0
    gap: float = 0.01
    cost: str | Callable[[OpProfile], float] | None = None
    reserve_mb: float = 0
    inductor: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        get_solver(self.solver)
        Budget(self.budget_mb)
        if self.inner not in INNER:
            raise PlannerError(f"inner={self.inner!r} is unknown: it takes 'inductor' or 'eager'.")
        check_cost(self.cost)
        check_effort(self.time_limit, self.gap)
        check_inductor(self.inductor)

    def settings(self, device: torch.device) -> Settings:
        """The same, ready for use on a device."""
        cost: Any = self.cost or (compiled_cost if self.inner == "inductor" else "roofline")
        return Settings(
            Budget(self.budget_mb), room_bytes(device), self.inner == "inductor", self.solver, self.time_limit,
            self.gap, cost if callable(cost) else cost_function(cost, device), cost == "measured",
            reserve_to_bytes(self.reserve_mb), dict(self.inductor),
        )  # fmt: skip


def checkpoint_planner(
    gm: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """The backend: one graph that Dynamo captured, compiled so that the step stays under the budget.

    Raises:
        BudgetError: nothing found fits.
        PlannerError: an option is unknown or has a value that is not usable.
        Unsupported: the graph holds something that a partition would not keep.
    """
    device = next((t.device for t in inputs if isinstance(t, torch.Tensor)), torch.device("cpu"))
    graph = CompiledGraph(gm, inputs, _share(options, mode, device))
    graph.program(graph.hints())
    return opaque(graph)


def plans(options: Mapping[str, Any]) -> tuple[Program, ...]:
    """The programs made so far under this `options` dict, the very one that `torch.compile` was given."""
    found = _SHARES.get(id(options))
    return tuple(found[1].programs) if found else ()


def _reset() -> None:
    _SHARES.clear()


checkpoint_planner.reset = _reset  # type: ignore[attr-defined]  # what Dynamo's reset() calls


def _share(options: Mapping[str, Any] | None, mode: str | None, device: torch.device) -> Share:
    """What the graphs of one `torch.compile` share: it hands all of them the same `options`."""
    known = _SHARES.get(id(options)) if options is not None else None
    if known is not None:
        return known[1]
    unknown = sorted(set(options or ()) - set(CompileOptions.__dataclass_fields__))
    if unknown:
        names = ", ".join(CompileOptions.__dataclass_fields__)
        raise PlannerError(f"option {unknown[0]!r} of the backend checkpoint_planner is unknown: it takes {names}.")
    asked = CompileOptions(**(options or {}))
    if mode is not None:
        asked = replace(asked, inductor={**mode_options(mode), **asked.inductor})
    share = Share(asked.settings(device))
    if options is not None:
        _SHARES[id(options)] = options, share  # holds the dict, so that its id stays its own
    return share


class CompiledGraph:
    """One graph of Dynamo's, with a program for each range of sizes that it was called with."""

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], share: Share) -> None:
        self.gm, self.share = gm, share
        self.inputs = traced_inputs(gm, inputs)
        self.symbols = tuple((i, name) for i, v in enumerate(inputs) if (name := symbol_name(v)))
        self.programs: list[Program] = []

    def __call__(self, *args: Any) -> Any:
        if any(isinstance(value, FakeTensor) for value in args):  # `DDPOptimizer` asks for the strides of the results
            return self.programs[-1].run(*args)
        program = self.programs[-1] if not self.symbols else self._for(args)
        return self.share.call(program, args)

    def hints(self) -> dict[str, int]:
        """The sizes that Dynamo saw."""
        return {name: concrete(self.inputs[i], {}) for i, name in self.symbols}

    def program(self, sizes: dict[str, int]) -> Program:
        """A new program, planned for these sizes."""
        made = Program(self.gm, self.inputs, sizes, self.share.settings)
        made.keeps_outputs = not self.programs or self.programs[-1].keeps_outputs  # their callers are the same
        self.share.add(made)
        self.programs.append(made)
        return made

    def _for(self, args: Sequence[Any]) -> Program:
        """The program whose range holds the sizes of a call: planned for no less, and for less than twice as much."""
        sizes = {name: int(args[i]) for i, name in self.symbols}
        fitting = [p for p in self.programs if _covers(p.sizes, sizes)]
        if fitting:
            return min(fitting, key=lambda p: math.prod(p.sizes.values()))
        return self.program({name: _rounded(size) for name, size in sizes.items()})


def _covers(planned: Mapping[str, int], sizes: Mapping[str, int]) -> bool:
    return all(sizes[n] <= planned[n] for n in sizes) and any(2 * sizes[n] > planned[n] for n in sizes)


def _rounded(size: int) -> int:
    """Up to a quarter more, so that sizes that vary share a program."""
    step = max(1, 1 << max(0, size.bit_length() - 3))
    return -(-size // step) * step
