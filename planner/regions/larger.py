"""larger: the submodules that hold the regions asked for, where those cannot be had within a budget.

What a region returns is kept until its readers' backwards. In a larger region it can be computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import nn

from planner.prepared import Prepared
from solvers.bounds import floor_bytes

from .find import has_forward
from .losses import LOSS

WHOLE_MODEL = ""  # its path
NEARLY = 0.97


def paths_of(prepared: Prepared) -> frozenset[str]:
    """The submodules that are regions; the path of the whole model where it is one step."""
    regions = prepared.regions
    if regions is None:
        return frozenset({WHOLE_MODEL})
    return frozenset({path for path, _ in regions.paths} | set(regions.spare)) - {LOSS}


def holders(model: nn.Module, paths: Iterable[str]) -> Iterator[frozenset[str]]:
    """Regions that hold these, each time the deepest of them replaced by what they lie in; at last the model."""
    now = frozenset(paths)
    while now and now != {WHOLE_MODEL}:
        depth = max(path.count(".") for path in now)
        above = {_holder(model, path) for path in now if path.count(".") == depth}
        kept = {path for path in now if path.count(".") < depth}
        now = frozenset({WHOLE_MODEL}) if WHOLE_MODEL in above else frozenset(_outermost(above | kept))
        yield now


def _holder(model: nn.Module, path: str) -> str:
    """The innermost module around the one at `path` that has a forward."""
    while path := path.rpartition(".")[0]:
        if has_forward(model.get_submodule(path)):
            break
    return path


def _outermost(paths: set[str]) -> set[str]:
    return {path for path in paths if not any(path.startswith(f"{other}.") for other in paths)}


def may_help(prepared: Prepared, budget_bytes: int) -> bool:
    """Whether larger regions are worth a capture: whether the step, could all of its forward run again, nearly fits.

    Nearly, as edges of regions cost a little themselves.
    """
    regions, problem = prepared.regions, prepared.problem
    assert regions is not None
    begins = {backward[0] for backward in regions.composed.backward if backward}  # which hold the regions' inputs
    ops = tuple(
        replace(op, inputs=() if i in begins else op.inputs, recomputable=i < problem.num_forward)
        for i, op in enumerate(problem.ops)
    )
    return NEARLY * floor_bytes(replace(problem, ops=ops)) <= budget_bytes
