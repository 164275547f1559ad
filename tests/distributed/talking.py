"""A model with collectives in its own code."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from passes.memory import measure_peak
from planner import auto_checkpoint

from . import models

gather: Any = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor  # its name before 2.13
QUICK: dict[str, Any] = {"solver": "greedy", "progress": False}


class Talking(nn.Module):
    """Blocks, and statistics of all ranks between them or in the last one."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.blocks = nn.ModuleList(models.Block(16) for _ in range(2))
        self.last = nn.Sequential(nn.Linear(16, 16), nn.Sigmoid(), Gathered())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            if self.how == "summed":
                mean = x.detach().mean(0)
                dist.all_reduce(mean)
                x = x - mean / 2
                known: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(known, x.shape[0])
                x = x * max(known)
        return (self.last(x) if self.how in ("gathered", "whole") else x).square().mean()


class Gathered(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        every: torch.Tensor = gather(x.detach(), 0, dist.group.WORLD)
        return x * every.mean()


REGIONS = {"summed": "auto", "gathered": ["blocks.*", "last"]}


def talk(rank: int) -> tuple[tuple[int, int], dict[str, bool]]:
    """The peak of a step that gathers, predicted and measured; then this rank plans, and the other one is not there."""
    x, model = torch.randn(256, 16), Talking("whole")
    plan = auto_checkpoint(model, x, "200%", **QUICK)
    held = x.nbytes + sum(p.nbytes for p in model.parameters())
    peaks = []
    for _ in range(20):  # a thread of gloo's lets go of what was gathered when it next runs, late on a busy machine
        peaks.append(held + measure_peak(lambda: plan.module(x).backward()))
        model.zero_grad()
    if rank:
        return (plan.peak_bytes, min(peaks)), {}
    plans = {how: auto_checkpoint(Talking(how), x, "200%", regions=r, **QUICK) for how, r in REGIONS.items()}
    return (plan.peak_bytes, min(peaks)), {how: bool(made.regions) and not made.checked for how, made in plans.items()}
