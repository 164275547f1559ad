"""Small models whose plans are made in well under a second, and what the tests of this folder share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from planner import Plan
from planner.session import open_session

ROOT = Path(__file__).resolve().parents[2]


def mlp(width: int = 64, batch: int = 256, dropout: float = 0.1, depth: int = 4) -> tuple[nn.Module, Any]:
    """Linear, GELU and dropout, `depth` times, then a mean."""
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout))]
    return nn.Sequential(*layers, nn.Linear(width, 1)), torch.randn(batch, width)


class ConvNet(nn.Module):
    """Two convolutions with batch norm, a tied head applied twice, a dict as output."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_1, self.norm_1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv_2, self.norm_2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 8)
        self.tail = nn.Linear(8, 8)
        self.tail.weight = self.head.weight
        self.unused = nn.Parameter(torch.zeros(3))
        self.register_buffer("scale", torch.full((8,), 0.5), persistent=False)

    def forward(self, image: torch.Tensor, target: torch.Tensor, *, extra: Any = None) -> dict[str, Any]:
        x = F.relu(self.norm_1(self.conv_1(image)))
        x = F.relu(self.norm_2(self.conv_2(x))).mean((2, 3)) * self.scale
        logits = self.tail(F.relu(self.head(x)))
        return {"loss": F.cross_entropy(logits, target), "logits": logits, "note": "fine"}


def conv_net() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return ConvNet(), {"image": torch.randn(4, 3, 16, 16), "target": torch.randint(0, 8, (4,))}


@dataclass
class Result(OrderedDict[str, torch.Tensor]):
    """A dataclass with tensors, as libraries return them."""

    loss: torch.Tensor
    hidden: torch.Tensor
    name: str = "result"


class Structured(nn.Module):
    """Nested inputs, a dataclass as output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, pair: tuple[torch.Tensor, dict[str, torch.Tensor]], power: int = 2) -> Any:
        x = torch.tanh(self.inner(pair[0])) + pair[1]["shift"]
        return (x.pow(power).mean(), [x, {"again": x * 2}])


def structured() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return Structured(), ((torch.randn(8, 16), {"shift": torch.randn(8, 16)}), 2)


def plan_at(built: tuple[nn.Module, Any], share: float = 0.6, **options: Any) -> Plan:
    """A plan whose budget is `share` of the way from the minimum to the plain peak."""
    session = open_session(*built, time_limit=2, gap=0.5, solver="greedy", progress=False, **options)
    low = session.minimum().minimum_bytes
    return session.plan(low + int((session.plain_peak_bytes - low) * share))


def python(code: str, *arguments: str, seed: str = "0", cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter under a given hash seed."""
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=240
    )
