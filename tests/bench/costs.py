"""`python -m tests.bench.costs [names] [--cpu-time]`: steps planned by the default cost against `cost="measured"`.

Both are planned at each share of the way from the smallest budget that works to the plain peak, and take turns;
the table has the medians' ratio. Exit status 1 when one is above 1.03.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from planner import auto_checkpoint, minimum_budget
from solvers.errors import MIB
from tests.bench.peers.measure import Subject, interleaved_seconds
from tests.bench.peers.models import GPT2_SIZES, diffusion, llama, vit
from tests.bench.step_time import WARM_UP
from tests.zoo.models import gpt2, resnet50

TARGET = 1.03
MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "gpt2": lambda: gpt2(**{**GPT2_SIZES, "batch": 2}),
    "gpt2-sdpa": lambda: gpt2(attention="sdpa", **{**GPT2_SIZES, "batch": 2}),
    "llama": lambda: llama(batch=2),
    "vit": lambda: vit(batch=4),
    "resnet50": lambda: resnet50(batch=4),
    "diffusion": lambda: diffusion(batch=4),
}


def compare(name: str, share: int, costs: list[str], rounds: int, clock: Callable[[], float]) -> list[float]:
    """Median seconds of the steps planned by each cost."""
    torch.manual_seed(0)
    model, sample = MODELS[name]()
    options: dict[str, Any] = {"progress": False, "keep_outputs": False}
    free = auto_checkpoint(model, sample, check=False, **options)
    low = int(minimum_budget(model, sample, **options)[0] * MIB)
    budget = (low + (free.baseline_peak_bytes - low) * share / 100) / MIB
    plans = [auto_checkpoint(model, sample, budget, cost=cost, check=False, **options) for cost in costs]
    taken = interleaved_seconds([Subject(p.module, model) for p in plans], sample, WARM_UP + rounds, clock)
    return [statistics.median(t[WARM_UP:]) for t in taken]


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument("--shares", default="60,45")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--costs", default="roofline;device", help="compared with measured, separated by semicolons")
    parser.add_argument("--cpu-time", action="store_true", help="count processor seconds instead of wall clock")
    options = parser.parse_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    costs = options.costs.split(";")
    print(f"| model | share | measured s | {' | '.join(f'{c}, of it' for c in costs)} |")
    print(f"|---|---|---|{'---|' * len(costs)}", flush=True)
    worst = 0.0
    for name in options.names or list(MODELS):
        for share in map(int, options.shares.split(",")):
            reference, *others = compare(name, share, ["measured", *costs], options.rounds, clock)
            worst = max(worst, others[0] / reference)
            cells = " | ".join(f"{seconds / reference:.3f}" for seconds in others)
            print(f"| {name} | {share} % | {reference:.3f} | {cells} |", flush=True)
    return int(worst > TARGET)


if __name__ == "__main__":
    raise SystemExit(main())
