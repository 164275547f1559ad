"""`python -m tests.gpu.table [--blocks] [NAME ...]`: predicted and measured memory of zoo models on this CUDA device.

A line is one model at one share of what its plain step needs above static, in MiB. Exit status 1 when a prediction of
allocated memory is below the measurement or more than .1 % above it, or one of reserved memory is off by more than
2 %, or when more is reserved than `most_reserved`. A loss taken outside the model is not the plan's. With `--blocks`
the plans are by regions: the model's own blocks.
"""

from __future__ import annotations

import math
import sys

from planner import PlannerError
from tests.bench.step_time import BLOCKS
from tests.gpu.device import HOLLOW, MIB, is_expandable, measure, on_device, plan_for
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


def line(name: str, share: int | None, blocks: bool) -> tuple[str, bool]:
    """The line, and whether it holds."""
    model, sample = on_device({**ENTRIES, **LARGE}[name])
    plan = plan_for(model, sample, share, regions=BLOCKS[name.partition("-")[0]] if blocks else "auto")
    found = measure(plan, model, sample)
    reserved = plan.reserved_bytes or 0
    most = plan.peak_bytes + loss_bytes(plan.module, sample)
    holds = 0.999 * plan.peak_bytes <= found.allocated_bytes <= most
    holds = holds and abs(found.reserved_bytes - reserved) <= 0.02 * reserved and not found.retries
    holds = holds and found.reserved_bytes <= most_reserved(plan.peak_bytes)
    sizes = (plan.peak_bytes, found.allocated_bytes, reserved, found.reserved_bytes)
    cells = [name, "plain" if share is None else f"{share} %", *(f"{size / MIB:.2f}" for size in sizes)]
    cells += [f"{found.reserved_bytes / plan.peak_bytes:.3f}", str(found.retries), "yes" if holds else "NO"]
    return f"| {' | '.join(cells)} |", holds


def main() -> int:
    """Print the table."""
    print(f"hollow: {HOLLOW}")
    print("| model | share | predicted allocated | measured | predicted reserved | measured | over | retries | holds |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    failed = 0
    blocks = "--blocks" in sys.argv
    known = [name for name in NAMES if not blocks or name.partition("-")[0] in BLOCKS]
    for name in [name for name in sys.argv[1:] if name != "--blocks"] or known:
        for share in SHARES:
            try:
                text, holds = line(name, share, blocks)
            except PlannerError as error:
                text, holds = f"| {name} | {type(error).__name__}: {str(error)[:150]} |", False
            print(text, flush=True)
            failed += not holds
    return min(failed, 1)


if __name__ == "__main__":
    raise SystemExit(main())
