"""`python -m tests.bench.step_time [names] [--profile]`: a plan without recompute against plain eager, taking turns.

With `--blocks` the plan is one by regions: the model's own blocks.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity

from planner import auto_checkpoint
from tests.bench.peers.measure import Subject, clear, interleaved_seconds, step
from tests.bench.peers.models import BENCH, build

WARM_UP = 2
TARGET = 1.02
NONE: Mapping[str, int] = {}
BLOCKS: dict[str, str | tuple[str, ...]] = {
    "gpt2": "transformer.h.*", "llama": "model.layers.*", "vit": "vit.layers.*",
    "resnet50": ("resnet.embedder", "resnet.encoder.stages.?.layers.?"),
}  # fmt: skip


def subjects(name: str, blocks: bool = False, sizes: Mapping[str, int] = NONE) -> tuple[Subject, Subject, Any]:
    """The plain model, the same planned without a budget, and the sample."""
    model, sample = build(name, **sizes)
    plain, regions = copy.deepcopy(model), BLOCKS[name.removeprefix("zoo:")] if blocks else "auto"
    planned = auto_checkpoint(model, sample, progress=False, keep_outputs=False, regions=regions, check=False).module
    return Subject(plain, plain), Subject(planned, model), sample


def compare(
    name: str, rounds: int, clock: Callable[[], float], blocks: bool = False, sizes: Mapping[str, int] = NONE
) -> list[list[float]]:
    """Seconds of the steps, plain and planned."""
    plain, planned, sample = subjects(name, blocks, sizes)
    return [t[WARM_UP:] for t in interleaved_seconds([plain, planned], sample, WARM_UP + rounds, clock)]


def per_op(subject: Subject, sample: Any, rounds: int) -> dict[str, tuple[float, float]]:
    """For each op by name: calls a step, and microseconds a step by its median call, its callees left out."""
    step(subject.module, sample)
    clear(subject.owner)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(rounds):
            step(subject.module, sample)
            clear(subject.owner)
    found: dict[str, list[float]] = {}
    for event in profiler.events() or ():
        found.setdefault(event.name, []).append(event.self_cpu_time_total)
    return {n: (len(v) / rounds, statistics.median(v) * len(v) / rounds) for n, v in found.items()}


def print_profile(
    name: str, rounds: int, console: Console, blocks: bool = False, sizes: Mapping[str, int] = NONE
) -> None:
    """Where a planned step spends more or less than the plain one, op by op."""
    plain, planned, sample = subjects(name, blocks, sizes)
    a, b = per_op(plain, sample, rounds), per_op(planned, sample, rounds)
    nothing = (0.0, 0.0)
    difference = {n: b.get(n, nothing)[1] - a.get(n, nothing)[1] for n in sorted({*a, *b})}
    table = Table("op", "calls, plain", "us", "calls, planned", "us", "difference us", title=name)
    for op in sorted(difference, key=lambda n: -abs(difference[n]))[:16]:
        calls = [f"{x:.1f}" for side in (a, b) for x in side.get(op, nothing)]
        table.add_row(op, *calls, f"{difference[op]:+.1f}")
    table.add_row("all", "", f"{sum(x for _, x in a.values()):.1f}", "", f"{sum(x for _, x in b.values()):.1f}",
                  f"{sum(difference.values()):+.1f}")  # fmt: skip
    console.print(table)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of the peers' benchmark, or zoo:NAME")
    parser.add_argument("--blocks", action="store_true", help=f"plan by blocks: {', '.join(BLOCKS)}")
    parser.add_argument("--batch", type=int, help="samples in a step")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cpu-time", action="store_true", help="count processor seconds instead of wall clock")
    parser.add_argument("--profile", action="store_true", help="op by op instead")
    options = parser.parse_args()
    console = Console(width=140)
    clock = time.process_time if options.cpu_time else time.perf_counter
    sizes = {"batch": options.batch} if options.batch else {}
    table = Table("model", "plain s", "planned s", "of medians", "median ratio", "of the least", f"at most {TARGET}")
    for name in options.names or list(BLOCKS if options.blocks else BENCH):
        if options.profile:
            print_profile(name, options.rounds, console, options.blocks, sizes)
            continue
        taken = compare(name, options.rounds, clock, options.blocks, sizes)
        plain, planned = map(statistics.median, taken)
        paired = statistics.median(b / a for a, b in zip(*taken, strict=True))
        ratio, least = planned / plain, min(taken[1]) / min(taken[0])
        fits = "yes" if ratio <= TARGET else "NO"
        table.add_row(name, f"{plain:.4f}", f"{planned:.4f}", f"{ratio:.3f}", f"{paired:.3f}", f"{least:.3f}", fits)
    if not options.profile:
        console.print(table)


if __name__ == "__main__":
    main()
