"""Two ranks through gloo, planned against plain: `python -m tests.bench.ranks` prints the table of docs/distributed.md.

Losses and parameters of four steps of AdamW with dropout are compared bit for bit; peaks are by allocator events.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from planner import auto_checkpoint
from solvers.errors import MIB
from tests.distributed import cases, models
from tests.distributed.harness import Failed, try_ranks
from tests.distributed.test_ranks import CASES

MORE: dict[str, Callable[[int], cases.Compared]] = {
    "DDP, static_graph": partial(cases.ddp_planned, static_graph=True),
    "DDP, gradient_as_bucket_view": partial(cases.ddp_planned, gradient_as_bucket_view=True),
    "DDP, find_unused_parameters": partial(cases.ddp_planned, find_unused_parameters=True),
    "FSDP2, bf16 parameters": partial(
        cases.fsdp_after, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    ),
    "FSDP2, reshard_after_forward=False": partial(cases.fsdp_after, reshard_after_forward=False),
    "tensor and sequence parallel": partial(cases.tensor_parallel, spread=models.spread_sequence, share="85%"),
}  # fmt: skip
REPEATS = 5


class Wide(nn.Module):
    """Blocks whose backward takes milliseconds, so that moments within it can be told."""

    def __init__(self, layers: int = 8, width: int = 160) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(models.Block(width) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).pow(2).sum()


def first_bucket(rank: int, planned: bool) -> float:
    """When, as a share of the backward, DDP's first bucket is handed over; the median of some steps."""
    torch.manual_seed(0)
    model, batch = DistributedDataParallel(Wide(), bucket_cap_mb=1), torch.randn(1024, 160)
    begins: list[float] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations, and not as text
        begins.append(time.perf_counter())
        return default_hooks.allreduce_hook(state, bucket)

    model.register_comm_hook(dist.group.WORLD, hook)
    call: nn.Module = model
    if planned:
        call = auto_checkpoint(model, (batch,), "70%", **cases.QUICK).module
    shares = []
    for _ in range(REPEATS + 2):
        begins.clear()
        model.zero_grad()
        loss = call(batch)
        start = time.perf_counter()
        loss.backward()
        shares.append((begins[0] - start) / (time.perf_counter() - start))
    return statistics.median(shares[2:])


def row(name: str, answers: list[Any]) -> str:
    """One line of the table: the figures of the rank whose prediction is furthest off."""
    failed = next((a for a in answers if isinstance(a, Failed)), None)
    if failed is not None:
        return f"| {name} | failed: {str(failed).strip().splitlines()[-1]} |"
    worst = max(answers, key=lambda a: abs(a.off))
    sizes = " | ".join(f"{size / MIB:.3f}" for size in (worst.budget, worst.predicted, worst.measured))
    same = "equal" if all(a.same for a in answers) else "DIFFERENT"
    return f"| {name} | {same} | {worst.overhead:.1%} | {sizes} | {worst.off:+.2%} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", default="", help="of the names of the cases to run")
    part = parser.parse_args().part
    print("| case | losses, parameters | recompute | budget, MiB | predicted | measured | off by |")
    print("|---" * 7 + "|")
    chosen = {**CASES, **MORE}
    for name, case in chosen.items():
        if part in name:
            print(row(name, try_ranks(case, seconds=300.0)), flush=True)
    for planned in (False, True):
        shares = try_ranks(first_bucket, planned)
        print(f"DDP's first bucket, {'planned' if planned else 'plain'}: at {max(shares):.0%} of the backward")
