"""Small models and the steps the planner's tests take with them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from planner import BudgetError, Plan, auto_checkpoint
from tests.zoo.hazards import Wrap

MIB = 1 << 20


def linear(width: int = 8) -> nn.Linear:
    return nn.Linear(width, width)


def batch(rows: int = 4, width: int = 8) -> torch.Tensor:
    return torch.randn(rows, width)


def plan(model: nn.Module, sample: Any, budget_mb: float | None = None, **options: Any) -> Plan:
    """`auto_checkpoint` with a short limit and no progress bar."""
    return auto_checkpoint(model, sample, budget_mb, **{"time_limit": 5, "progress": False, **options})


def tight(model: nn.Module, sample: Any, share: float = 0.6, **options: Any) -> Plan:
    """A plan at `share` of the memory that the step needs above static, or at the minimum that is stated.

    Greedy, unless another solver is asked for: these tests are about what a plan does, not how good it is.
    """
    options = {"solver": "greedy", **options}
    free = plan(model, sample, **options)
    budget = free.static_bytes + int((free.baseline_peak_bytes - free.static_bytes) * share)
    try:
        return plan(model, sample, budget / MIB, **options)
    except BudgetError as error:
        return plan(model, sample, error.minimum_mb, **options)


def mlp(dropout: float = 0.2, width: int = 32) -> nn.Sequential:
    """Six layers with dropout: the smallest model with something to recompute."""
    layers = [m for _ in range(3) for m in (nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout))]
    return nn.Sequential(*layers)


class Block(nn.Module):
    """A transformer block in GPT's manner: pre-norm attention and MLP, each with dropout."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) * (width // self.heads) ** -0.5
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        weights = self.drop(scores.masked_fill(~mask, float("-inf")).softmax(-1))
        x = x + self.drop(self.out((weights @ v).transpose(1, 2).reshape(rows, length, width)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class SmallGPT(nn.Module):
    """Two blocks, tied embedding, cross entropy."""

    def __init__(self, vocabulary: int = 64, width: int = 32, layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width, 2, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def conv_net() -> nn.Sequential:
    """Convolutions with batch norm and a classifier."""
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 16, 3, stride=2),
              nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))  # fmt: skip
    return nn.Sequential(*layers)


def twins(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The model, and an independent copy to train plainly beside it."""
    return model, copy.deepcopy(model)


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    """Every `.grad` is bitwise equal; None stays None."""
    for (name, a), b in zip(gradients(model).items(), gradients(plain).values(), strict=True):
        assert (a is None) == (b is None), name
        assert a is None or b is None or torch.equal(a, b), name


def assert_same_state(model: nn.Module, plain: nn.Module) -> None:
    """Every parameter and buffer is bitwise equal."""
    other = plain.state_dict()
    assert list(model.state_dict()) == list(other)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other[name]), name


def squares(output: torch.Tensor) -> torch.Tensor:
    return output.float().pow(2).mean()


__all__ = [
    "MIB", "Block", "SmallGPT", "Wrap", "assert_same_gradients", "assert_same_state", "batch", "conv_net", "gradients",
    "linear", "mlp", "plan", "squares", "tight", "twins",
]  # fmt: skip
