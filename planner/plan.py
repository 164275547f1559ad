"""`Plan`: a decided step, the module that runs it, and what can be done with both."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from passes.device import empty_cache
from solvers.errors import PlannerError

from .check.record import Checked
from .check.run import check_step
from .decided import Decided
from .dropin.module import PlannedModule
from .pipeline import replanner
from .progress import Progress
from .ranks.wrapper import inner_module

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from .show.regions import Region


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Decided):
    """A proved plan for one training step.

    Attributes:
        module: the drop-in `torch.fx.GraphModule`.
    """

    module: PlannedModule = field(kw_only=True)

    @classmethod
    def of(cls, model: nn.Module, arguments: Mapping[str, Any], decided: Decided) -> Plan:
        """The plan of a step of `model` that was decided for a call with `arguments`, checked where that is asked for.

        Raises:
            CheckError: the planned step does not do what the plain one does.
        """
        options = decided.prepared.options
        with Progress(options.progress).stage("check"):
            checked = check_step(inner_module(model), decided, arguments, options.loss_fn, options.check)
        empty_cache(decided.prepared.device)
        module = PlannedModule(model, decided, arguments, replanner(decided), options.loss_fn, options.on_new_shape)
        figures = {f.name: getattr(decided, f.name) for f in fields(Decided)}
        return cls(**{**figures, "checked": checked}, module=module)

    def __repr__(self) -> str:
        from .show.words import describe

        return describe(self)

    def __str__(self) -> str:
        from .show.text import to_text

        return to_text(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PlannerError(
            "a plan is not pickled: it holds generated code and the model. plan.save(path) writes it, and "
            "Plan.load(path, model, sample) reads it."
        )

    # Run ----------------------------------------------------------------------------------------------------------

    def apply(self, model: nn.Module | None = None, sample: Any = None) -> nn.Module:
        """Make `model` (by default the planned one) itself run the plan in training; returns it.

        Its class, methods, `state_dict`, hooks and identity stay; `remove` undoes it. `sample` is asked for when the
        model is another instance than the planned one and its Python asks about its inputs' values.

        Raises:
            ModelMismatch: the plan is for another model; says what differs first.
            PlannerError: the model runs another plan already.
        """
        from .dropin.apply import apply

        return apply(self.module, model, sample)

    def remove(self, model: nn.Module | None = None) -> nn.Module:
        """Undo `apply` without a trace; returns the model.

        Raises:
            PlannerError: the model does not run this plan.
        """
        from .dropin.apply import remove

        return remove(self.module, model)

    def check(self, model: nn.Module | None = None, sample: Any = None) -> Checked:
        """Run two steps of `model` (by default the planned one) on `sample`, plain and planned, and compare them.

        Everything that can be observed must be equal bit for bit; the model is left as it was. The result is also
        what `plan.checked` says from then on.

        Raises:
            CheckError: something differs (names the first op, gradient or output and the likely cause), or no step
                can be run.
            PlannerError: the plan has not been made for such a sample.
        """
        from .check.plan import check_plan

        self._refuse_compiled("checked for equal bits")
        found = check_plan(self.module, model, sample)
        object.__setattr__(self, "checked", found)
        return found

    def compile(self, **options: Any) -> Plan:
        """The same step with both halves compiled by Inductor (its own `options` by name), under the same budget.

        What is recomputed is decided anew for compiled code. The halves are measured on blank inputs, and planned lower
        until the step keeps the budget; a note says what was measured. Results equal the uncompiled ones up to
        rounding, and random ops draw other numbers. Calls of other shapes are planned and compiled anew. A step by
        regions has its regions compiled, equal ones once; the code between them runs as it is.

        Raises:
            BudgetError: no compiled step keeps the budget.
            Unsupported: Inductor cannot compile the step; says what it said.
        """
        from .integrations.planned import compile_plan

        decided, module = compile_plan(self.module, self.prepared, self.budget_bytes, options)
        return Plan(**{f.name: getattr(decided, f.name) for f in fields(Decided)}, module=module)

    def _refuse_compiled(self, verb: str) -> None:
        if self.compiled:
            raise PlannerError(f"a compiled plan is not {verb}: do that with the plan that compile() was called on.")

    # See ----------------------------------------------------------------------------------------------------------

    def _repr_html_(self) -> str:
        from .show.page import repr_html

        return repr_html(self)

    def plot(self, width: float = 9.0, height: float = 4.6) -> Figure:
        """The memory curve of the step, plain against planned, as a matplotlib figure (inches)."""
        from .show.plots import plot

        return plot(self, width, height)

    def plot_graph(self, module: str | None = None) -> Figure:
        """The module tree, or one block's ops as a graph, saved and recomputed coloured."""
        from .show.plots import plot_graph

        return plot_graph(self, module)

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """The regions that the step is planned by, and what stays eager with the reason; empty for a whole step."""
        from .show.regions import region_rows

        return region_rows(self)

    def tables(self) -> dict[str, pd.DataFrame]:
        """DataFrames `modules`, `ops` and `peak`."""
        from .show.tables import tables

        return tables(self)

    def table_by_module(self, depth: int | None = None) -> pd.DataFrame:
        """Bytes saved, bytes dropped and recompute cost by module path, down to `depth`."""
        from .show.tables import table_by_module

        return table_by_module(self, depth)

    def table_by_op(self) -> pd.DataFrame:
        """The same, and more, by op."""
        from .show.tables import table_by_op

        return table_by_op(self)

    def explain(self, name: str = "") -> str:
        """Why the tensors of a module (or op) are saved or recomputed, and what binds at the peak."""
        from .show.explain import explain

        return explain(self, name)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write one self-contained HTML page that opens offline, with hover and zoom on the memory curve."""
        from .show.report import report

        return report(self, path)

    # Keep ---------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan as JSON (`planner.files.planfile`): readable, deterministic, atomic."""
        from .files.planfile import save

        self._refuse_compiled("saved")
        return save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: nn.Module, sample: Any, **options: Any) -> Plan:
        """Apply a saved plan: capture, compare, re-prove and rewrite, without solving.

        `options` are those of `planner.files.planfile.load`: `loss_fn`, `cost`, `progress`.

        Raises:
            PlanFileError: the file is damaged or for another model or sample; says what differs first.
        """
        from .files.loading import load

        decided, arguments = load(path, model, sample, **options)
        return cls.of(model, arguments, decided)

    # Ship ---------------------------------------------------------------------------------------------------------

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Write the planned step as a folder that runs with torch and safetensors alone (`planner.ship.export`)."""
        from .ship.export import export

        self._refuse_compiled("exported")
        return export(self, self.module, path)
