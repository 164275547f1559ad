"""The whole loop, measured: `python -m tests.bench.loop` prints the table of docs/training_loop.md.

Peaks of forward, backward and `optimizer.step()` by allocator events, of a small GPT planned at 70 % of the loop's
plain peak (or at its minimum). The 8-bit AdamW is torchao's, where that is installed.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from solvers.errors import MIB
from tests.planner.test_loop import OPTIMIZERS, measured_loop, open_loop


class SmallGPT(nn.Module):
    """Embedding, causal transformer blocks, a head."""

    def __init__(self, width: int = 192, layers: int = 4, words: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def optimizers() -> Iterator[tuple[str, Any]]:
    """Each optimizer's name, and what makes it from parameters."""
    yield from OPTIMIZERS.items()
    try:
        yield "AdamW 8-bit", importlib.import_module("torchao.optim").AdamW8bit
    except ImportError:
        print("torchao is not installed: its 8-bit AdamW is left out")


def row(name: str, make: Any, micro_batches: int) -> str:
    """One line of the table."""
    torch.manual_seed(0)
    model, tokens = SmallGPT(), torch.randint(512, (4, 64))
    optimizer = make(model.parameters())
    session = open_loop(model, tokens, optimizer, micro_batches)
    plan = session.plan(max(session.minimum().minimum_bytes, session.plain_peak_bytes * 7 // 10))
    measured = measured_loop(plan, model, tokens, optimizer, micro_batches)
    update, budget = session.prepared.options.update, plan.budget_bytes or 0
    sizes = (update.state_bytes, update.step_bytes, session.plain_peak_bytes, budget, plan.peak_bytes, measured)
    assert measured <= budget
    shown = " | ".join(f"{size / MIB:.2f}" for size in sizes)
    return f"| {name} | {micro_batches} | {shown} | {plan.peak_bytes / measured - 1:+.2%} |"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    columns = "optimizer | micro-batches | state | temporaries | plain peak | budget | predicted | measured | off by"
    print(f"| {columns} |\n|{'---|' * 9}")
    for name, make in optimizers():
        for micro_batches in (1, 4):
            print(row(name, make, micro_batches), flush=True)
