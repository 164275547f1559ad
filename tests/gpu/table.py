"""`python -m tests.gpu.table [NAME ...]`: predicted and measured memory of zoo models on this device, and their bits.

A line is one model at one share of what its plain step needs above static, in MiB. Exit status 1 when a prediction of
allocated memory is below the measurement or more than .1 % above it, or one of reserved memory is off by more than
2 %, or when more is reserved than `most_reserved`, or when numbers differ from the plain step's that two plain steps
agree about. A loss taken outside the model is not the plan's.
"""

from __future__ import annotations

import argparse
import functools
import gc
import math
import multiprocessing
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from passes.device import empty_cache
from planner import BudgetError, Plan, PlannerError
from tests.bench.peers.measure import Subject, compare, reference
from tests.bench.step_time import BLOCKS
from tests.gpu.device import CUDA, HOLLOW, MIB, is_expandable, measure, on_device, plan_for, plan_within
from tests.zoo.compare import loss_bytes
from tests.zoo.models import gpt2
from tests.zoo.table import ENTRIES

SHARES = (None, 80, 60, 40)
LARGE = {"gpt2-12x768": lambda: gpt2(attention="sdpa", batch=8, layers=12, width=768, heads=12, length=512)}
NAMES = ("gpt2-sdpa", "llama", "bert", "vit", "mixtral", "resnet50", "densenet121", "vnet", "lstm", *LARGE)


def most_reserved(allocated_bytes: int) -> float:
    """What may be reserved for what is allocated: less of it is lost the more there is."""
    if allocated_bytes < 100 * MIB:
        return math.inf
    if allocated_bytes < 1024 * MIB:
        return 1.15 * allocated_bytes
    return (1.03 if is_expandable() else 1.05) * allocated_bytes


def different(plan: Plan, model: nn.Module, sample: Any) -> list[str]:
    """What two plain steps agree about, and the planned one does not, by name."""
    plain = reference(model, sample)
    unsteady, _ = compare(Subject(model, model), sample, plain)
    planned, _ = compare(Subject(plan.module, model), sample, plain)
    return [name for name in planned if name not in unsteady]


def line(name: str, share: int | None, blocks: bool) -> tuple[str, bool]:
    """The line, and whether it holds."""
    gc.collect()
    empty_cache(CUDA)
    left = torch.cuda.memory_allocated()  # of models before this one
    model, sample = on_device({**ENTRIES, **LARGE}[name])
    regions = BLOCKS[name.partition("-")[0]] if blocks else "auto"
    plan = plan_for(model, sample, share, regions=regions)
    try:
        found = measure(plan, model, sample)
    except BudgetError as error:  # what the backward starts from, as its first step shows, needs somewhat more
        plan = plan_within(model, sample, error.minimum_mb, regions=regions)
        found = measure(plan, model, sample)
    allocated, reserved = found.allocated_bytes - left, plan.reserved_bytes or 0
    holds = 0.999 * plan.peak_bytes <= allocated <= plan.peak_bytes + loss_bytes(plan.module, sample)
    holds = holds and abs(found.reserved_bytes - reserved) <= 0.02 * reserved and not found.retries
    holds = holds and found.reserved_bytes <= most_reserved(plan.peak_bytes)
    wrong = [] if HOLLOW else different(plan, model, sample)
    sizes = (plan.peak_bytes, allocated, reserved, found.reserved_bytes)
    cells = [f"{name}{f' ({left} bytes left)' if left else ''}", "plain" if share is None else f"{share} %"]
    cells += [f"{size / MIB:.3f}" for size in sizes]
    cells += [f"{found.reserved_bytes / plan.peak_bytes:.3f}", str(found.retries), "; ".join(wrong[:3]) or "equal"]
    holds = holds and not wrong
    return f"| {' | '.join(cells)} | {'yes' if holds else 'NO'} |", holds


def lines(name: str, *, blocks: bool, shares: tuple[int | None, ...], deterministic: bool) -> list[tuple[str, bool]]:
    """A model's lines; one that fails says why."""
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    found = []
    for share in shares:
        try:
            found.append(line(name, share, blocks))
        except Exception as error:  # noqa: BLE001 - whatever stops a line is what it has to say
            where = "" if isinstance(error, PlannerError) else " | ".join(traceback.format_exc().splitlines()[-9:-1:2])
            found.append((f"| {name} | {share} | {type(error).__name__}: {str(error)[:300]} {where} |", False))
    return found


def rows(options: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    """All lines, by `--workers` processes at a time."""
    known = [name for name in NAMES if not options.blocks or name.partition("-")[0] in BLOCKS]
    names = options.names or (list(ENTRIES) if options.zoo else known)
    shares = tuple(None if share == "plain" else int(share) for share in options.shares.split(","))
    work = functools.partial(lines, blocks=options.blocks, shares=shares, deterministic=options.deterministic)
    if options.workers == 1:
        for name in names:
            yield from work(name)
        return
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        for found in pool.imap_unordered(work, names):
            yield from found


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of the zoo; by default ten of its models")
    parser.add_argument("--zoo", action="store_true", help="the whole zoo")
    parser.add_argument("--blocks", action="store_true", help="plan by regions: the model's own blocks")
    parser.add_argument("--shares", default="plain,80,60,40")
    parser.add_argument("--deterministic", action="store_true", help="with torch.use_deterministic_algorithms")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the device")
    options = parser.parse_args()
    print(f"hollow: {HOLLOW}")
    head = ("model", "share", "predicted allocated", "measured", "predicted reserved", "measured", "over", "retries")
    print(f"| {' | '.join((*head, 'bits', 'holds'))} |\n|{'---|' * 10}", flush=True)
    failed = 0
    for text, holds in rows(options):
        print(text, flush=True)
        failed += not holds
    return min(failed, 1)


if __name__ == "__main__":
    raise SystemExit(main())
