"""`python -m planner demo`: a language model at half of its peak, trained plain and planned side by side."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F

from passes._torch import TORCH_VERSION
from passes.memory import measure_peak
from planner.plan import Plan
from planner.session import open_session
from planner.show.console import Console, Table
from planner.units import show_bytes

Batch = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    """A pre-norm transformer block as in GPT-2: causal self-attention, then a GELU MLP, dropout on both."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """`x` is (batch, length, width); `mask` (length, length) is true where attention is forbidden."""
        x = x + self.dropout(self.proj(self._attend(self.norm_1(x), mask)))
        return x + self.dropout(self.mlp(self.norm_2(x)))

    def _attend(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(width, dim=-1))
        scores = (q @ k.transpose(-2, -1)) * (width // self.heads) ** -0.5
        weights = self.dropout(scores.masked_fill(mask, float("-inf")).softmax(-1))
        return (weights @ v).transpose(1, 2).reshape(batch, length, width)


class LanguageModel(nn.Module):
    """GPT-2's shape in plain torch: token and position embeddings, blocks, tied head, cross entropy inside."""

    def __init__(
        self, layers: int = 6, width: int = 192, heads: int = 4, vocabulary: int = 2048, length: int = 128,
        dropout: float = 0.1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", torch.ones(length, length, dtype=torch.bool).triu(1), persistent=False)
        self.mask: torch.Tensor
        self.apply(_initialize)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy of (batch, length) `targets` given (batch, length) `tokens`."""
        length = tokens.shape[1]
        x = self.dropout(self.tokens(tokens) + self.positions.weight[:length])
        for block in self.blocks:
            x = block(x, self.mask[:length, :length])
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def _initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


def language_model(batch: int = 4, length: int = 128, layers: int = 6) -> tuple[nn.Module, Batch]:
    """A factory for the command line: `planner plan planner.command.demo:language_model --budget 50%`."""
    torch.manual_seed(0)
    return LanguageModel(layers=layers, length=length), make_batch(0, batch, length)


def make_batch(seed: int, batch: int = 4, length: int = 128, used: int = 64) -> Batch:
    """Text with something to learn: each token is the one before it plus a small step, and few are used."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(1, 4, (batch, length + 1), generator=generator)
    text = (steps.cumsum(1) + torch.randint(0, used, (batch, 1), generator=generator)) % used
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


@dataclass
class Comparison:
    """What training plain and planned side by side showed; bytes include the static ones, seconds are per step."""

    plain_peak_bytes: int = 0
    planned_peak_bytes: int = 0
    plain_seconds: list[float] = field(default_factory=list)
    planned_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    loss_difference: float = 0.0
    gradient_difference: float = 0.0
    parameter_difference: float = 0.0

    @property
    def time_ratio(self) -> float:
        """Median planned step over median plain step."""
        return statistics.median(self.planned_seconds) / statistics.median(self.plain_seconds)


def compare(plain: nn.Module, plan: Plan, batches: Callable[[int], Batch], steps: int = 20) -> Comparison:
    """Train `plain` and `plan.module` for `steps` Adam steps, in turns, from the same seeds.

    Dropout is on in both; the generator is seeded alike before each step of either.
    """
    planned = plan.module
    seen = Comparison()
    seen.plain_peak_bytes = plan.static_bytes + _peak(plain, batches(0))
    seen.planned_peak_bytes = plan.static_bytes + _peak(planned, batches(0))
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (plain, planned)]
    for step in range(steps):
        expected = _train_step(plain, optimizers[0], batches(step), step, seen.plain_seconds)
        loss = _train_step(planned, optimizers[1], batches(step), step, seen.planned_seconds)
        seen.losses.append(loss)
        seen.loss_difference = max(seen.loss_difference, abs(expected - loss))
        seen.gradient_difference = max(seen.gradient_difference, _difference(plain, planned, gradients=True))
    seen.parameter_difference = _difference(plain, planned, gradients=False)
    return seen


def _train_step(
    module: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, seed: int, seconds: list[float]
) -> float:
    torch.manual_seed(seed)
    optimizer.zero_grad(set_to_none=True)
    start = time.perf_counter()
    loss = module(*batch)
    loss.backward()
    seconds.append(time.perf_counter() - start)
    optimizer.step()
    return float(loss.detach())


def _peak(module: nn.Module, batch: Batch) -> int:
    """Bytes above the level at the start of the highest point of one step, after a step to warm up."""
    kept: list[torch.Tensor] = []
    for measure in (lambda run: run(), measure_peak):
        module.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        peak = measure(lambda: _forward_backward(module, batch, kept))
        kept.clear()
    module.zero_grad(set_to_none=True)
    return int(peak)


def _forward_backward(module: nn.Module, batch: Batch, kept: list[torch.Tensor]) -> None:
    kept.append(module(*batch))
    kept[-1].backward()


def _difference(plain: nn.Module, planned: nn.Module, *, gradients: bool) -> float:
    pairs = zip(plain.parameters(), planned.parameters(), strict=True)
    values = [(a.grad, b.grad) if gradients else (a, b) for a, b in pairs]
    return max(float((a - b).detach().abs().max()) for a, b in values if a is not None and b is not None)


def run_demo(
    *, layers: int = 6, steps: int = 20, share: float = 0.5, time_limit: float = 10.0, progress: bool | None = None
) -> tuple[Plan, Comparison]:
    """Plan the demo's model at `share` of its plain peak and train it both ways."""
    model, sample = language_model(layers=layers)
    plain = copy.deepcopy(model)
    session = open_session(model, sample, time_limit=time_limit, progress=progress)
    plan = session.plan(int(session.plain_peak_bytes * share))
    return plan, compare(plain, plan, make_batch, steps)


def demo_table(plan: Plan, seen: Comparison) -> Table:
    """The demo's one table."""
    steps = len(seen.losses)
    bound = "none" if plan.bound is None else f"{plan.bound:.2%}"
    layers = len(list(plan.module.get_submodule("blocks").children()))
    table = Table(title=f"A {layers}-layer language model at half of its peak without recompute", show_header=True)
    table.add_column("")
    for column in ("plain", "planned"):
        table.add_column(column, justify="right")
    table.add_row("budget", "-", show_bytes(plan.budget_bytes or 0))
    table.add_row("predicted peak", "", show_bytes(plan.peak_bytes))
    table.add_row("measured peak", show_bytes(seen.plain_peak_bytes), show_bytes(seen.planned_peak_bytes))
    table.add_row("step time, median", _ms(seen.plain_seconds), _ms(seen.planned_seconds))
    table.add_row("step-time ratio", "1.00", f"{seen.time_ratio:.2f}")
    table.add_row("recompute, of the step's cost", "0 %", f"{plan.overhead:.2%}")
    table.add_row("proved lower bound on it", "", bound)
    table.add_row("recompute, of the step's FLOPs", "0 %", f"{plan.recompute_flops / plan.step_flops:.2%}")
    table.add_row(f"loss, step 1 to {steps}", "", f"{seen.losses[0]:.4f} to {seen.losses[-1]:.4f}")
    table.add_row("largest loss difference", "", f"{seen.loss_difference:g}")
    table.add_row("largest gradient difference", "", f"{seen.gradient_difference:g}")
    table.add_row(f"parameter difference, {steps} Adam steps", "", f"{seen.parameter_difference:g}")
    return table


def print_demo(console: Console | None = None, *, layers: int = 6, steps: int = 20, time_limit: float = 10.0) -> None:
    """Run the demo and print its table."""
    console = console or Console()
    start = time.perf_counter()
    plan, seen = run_demo(layers=layers, steps=steps, time_limit=time_limit)
    console.print(demo_table(plan, seen))
    where = f"on {plan.prepared.device}, torch {TORCH_VERSION}"
    console.print(f"in {time.perf_counter() - start:.0f} s, {where}")



def _ms(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:,.0f} ms"
