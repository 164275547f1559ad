"""`python -m tests.bench.peers.batch`: the largest batch that each method trains under one budget, run to make sure.

In the manner of Checkmate's table (Jain et al. 2020): the budget is what plain eager needs for a small batch. Peers are
searched by running them, ours by `max_batch` and then run. Every figure is a measured peak.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from planner import PlannerError, max_batch
from tests.zoo.models import gpt2, resnet50

from . import selective
from .blocks import checkpoint_each, checkpoint_groups
from .measure import Subject, memory, step
from .methods import Failure, Peers, quoted
from .mincut import compile_with_budget, patient_dynamo
from .models import GPT2_SIZES, vit

MIB = 1 << 20
METHODS = ("plain", "block", "sqrt", "selective", "mincut")
Make = Callable[[int], tuple[nn.Module, Any]]
Way = Callable[[nn.Module], nn.Module]


def _gpt2(batch: int) -> tuple[nn.Module, Any]:
    return gpt2(**{**GPT2_SIZES, "attention": "sdpa", "batch": batch})


MODELS: dict[str, Make] = {
    "gpt2-sdpa": _gpt2, "vit": lambda batch: vit(batch=batch), "resnet50": lambda batch: resnet50(batch=batch),
}  # fmt: skip


def seeded(make: Make, batch: int) -> tuple[nn.Module, Any]:
    """The same weights for every batch size."""
    torch.manual_seed(0)
    return make(batch)


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest batch up to `limit` that fits, by doubling and bisection; 0 if not even one does."""
    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, high * 2
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def way_of(make: Make, method: str, base: int, budget: float) -> Way:
    """How a peer turns a model into its own: which blocks it checkpoints is decided at the batch of `base`."""
    if method == "plain":
        return lambda model: model
    if method == "mincut":
        return lambda model: compile_with_budget(model, budget, "dp")[0]
    model, sample = seeded(make, base)
    (found,) = Peers(model, sample, (budget,), ("dp",)).ways((method,))
    blocks = found.blocks
    if blocks is None:
        raise RuntimeError(f"{method} does not run: {found.error}")

    def applied(model: nn.Module) -> nn.Module:
        if method == "sqrt":
            checkpoint_groups(model, blocks)
        else:
            checkpoint_each(model, blocks, **({"context_fn": selective.contexts} if method == "selective" else {}))
        return model

    return applied


def peak_of(make: Make, way: Way, batch: int) -> int:
    """Measured peak in bytes of a peer at a batch size."""
    torch._dynamo.reset()  # which holds on to whatever it compiled
    gc.collect()
    model, sample = seeded(make, batch)
    subject = Subject(way(model), model)
    step(subject.module, sample)  # what it compiles is compiled now
    return memory(subject, sample).peak


def ours(make: Make, budget_bytes: int, limit: int) -> tuple[int, int, float]:
    """`(batch, measured peak, predicted overhead)` of what `max_batch` finds."""
    model, _ = seeded(make, 1)
    found = max_batch(
        model, lambda batch: seeded(make, batch)[1], budget_bytes / MIB, limit=limit, progress=False,
        keep_outputs=False, time_limit=20.0,
    )  # fmt: skip
    _, sample = seeded(make, found.batch)
    measured = memory(Subject(found.plan.module, model), sample).peak
    return found.batch, measured, found.plan.overhead


def rows(name: str, base: int, limit: int, budget: float) -> Iterator[tuple[str, ...]]:
    """The table of one model under plain eager's peak at a batch of `base`."""
    make = MODELS[name]
    budget_bytes = peak_of(make, way_of(make, "plain", base, budget), base)
    for method in METHODS:
        peaks: dict[int, int] = {}

        try:
            way = way_of(make, method, base, budget)

            def fits(batch: int, way: Way = way, peaks: dict[int, int] = peaks) -> bool:
                peaks[batch] = peak_of(make, way, batch)
                return peaks[batch] <= budget_bytes

            batch = largest(fits, limit)
        except Failure as error:
            yield name, method, "-", "-", quoted(error)
            continue
        yield name, method, str(batch), f"{peaks[batch] / MIB:.1f}" if batch else "-", ""
    try:
        batch, measured, overhead = ours(make, budget_bytes, limit)
    except PlannerError as error:
        yield name, "ours", "-", "-", quoted(error)
        return
    note = f"predicted recompute {overhead:.1%}" + ("" if measured <= budget_bytes else "; OVER THE BUDGET")
    yield name, "ours", str(batch), f"{measured / MIB:.1f}", note


def main() -> int:
    """Print the table; exit 1 when a plan measures over the budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["gpt2-sdpa"], help=f"of {', '.join(MODELS)}")
    parser.add_argument("--base", type=int, default=2, help="the budget is plain eager's peak at this batch")
    parser.add_argument("--limit", type=int, default=64, help="largest batch to try")
    parser.add_argument("--budget", type=float, default=0.1, help="the min-cut partitioner's")
    options = parser.parse_args()
    table = Table("model", "method", "largest batch", "peak MiB", "note", title="under plain eager's peak")
    over = False
    with patient_dynamo():
        for name in options.names or ["gpt2-sdpa"]:
            for row in rows(name, options.base, options.limit, options.budget):
                print(*row, sep="  ", flush=True)
                over |= "OVER" in row[-1]
                table.add_row(*row)
    Console(width=120).print(table)
    return 1 if over else 0


if __name__ == "__main__":
    raise SystemExit(main())
