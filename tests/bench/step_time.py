"""`python -m tests.bench.step_time [names]`: a plan without recompute against plain eager, interleaved in one run."""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn

from planner import auto_checkpoint
from tests.zoo.compare import forward_backward
from tests.zoo.models import build


def timed(module: nn.Module, state_of: nn.Module, sample: Any, clock: Callable[[], float]) -> float:
    """Seconds of one forward and backward from cleared gradients."""
    for parameter in state_of.parameters():
        parameter.grad = None
    start = clock()
    forward_backward(module, sample)
    return clock() - start


def compare(name: str, rounds: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Median seconds of a step, `(plain, planned)`; the order alternates from round to round."""
    model, sample = build(name)
    plain = copy.deepcopy(model)
    planned = auto_checkpoint(model, sample, progress=False).module
    pairs = [(plain, plain), (planned, model)]
    seconds: dict[int, list[float]] = {id(plain): [], id(planned): []}
    for r in range(rounds + 2):
        for module, state_of in pairs if r % 2 else pairs[::-1]:
            taken = timed(module, state_of, sample, clock)
            if r >= 2:
                seconds[id(module)].append(taken)
    return statistics.median(seconds[id(plain)]), statistics.median(seconds[id(planned)])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=["gpt2", "resnet50"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cpu-time", action="store_true", help="count processor seconds instead of wall clock")
    options = parser.parse_args()
    table = Table("model", "plain s", "planned s", "ratio of medians")
    for name in options.names or ["gpt2", "resnet50"]:
        plain, planned = compare(name, options.rounds, time.process_time if options.cpu_time else time.perf_counter)
        table.add_row(name, f"{plain:.4f}", f"{planned:.4f}", f"{planned / plain:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
