"""`python -m tests.bench.regions [costs] [repeats] [loop] [lengths]`: plans by regions, and loops that change.

costs     GPT-2, Llama, ViT, ResNet-50 by blocks next to plans of the whole model under the same budgets; peaks measured
repeats   200 equal blocks, and an LSTM of 200 steps: captured, profiled, solved
loop      gradients accumulated over 4 micro-batches; an optimizer in the backward, with its lowest budget
lengths   two epochs of ten sequence lengths; two losses that alternate

Budgets are static bytes and a share of what the plain step needs above them. The exit code is 1 when a target is
missed.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from passes.memory import measure_peak, round_up
from planner import BudgetError, Plan, auto_checkpoint
from planner.session import Session, open_session
from solvers.errors import MIB
from tests.bench.peers.measure import clear, step
from tests.bench.peers.models import build
from tests.bench.step_time import BLOCKS

SHARES = (80, 60, 50)
POINTS = 0.015
SECONDS = 30.0
GRADIENTS = 1.05
EPOCH, PLANNING = 1.1, 0.25
MICRO_BATCHES = 4
LENGTHS = tuple(range(40, 140, 10))


@dataclass(frozen=True)
class Row:
    """One figure against its target."""

    what: str
    found: str
    target: str
    met: bool


def budget_at(session: Session, share: int) -> int:
    """Static bytes and that share of what the plain step needs above them."""
    static = session.problem.static_bytes
    return static + (session.plain_peak_bytes - static) * share // 100


def plan_or_minimum(session: Session, budget: int) -> Plan:
    """A plan under the budget, or under the smallest that the refusal states."""
    try:
        return session.plan(budget)
    except BudgetError as error:
        return session.plan(error.minimum_bytes)


def peak_of(module: nn.Module, model: nn.Module, sample: Any, steps: int = 1) -> int:
    """Bytes above where it starts that a step takes, or several that add to the same gradients, once warm."""

    def run() -> None:
        for _ in range(steps):
            step(module, sample)

    peaks = []
    for _ in range(2):
        clear(model)
        peaks.append(measure_peak(run))
    clear(model)
    return peaks[-1]


# Costs ----------------------------------------------------------------------------------------------------------------


def costs(names: list[str], time_limit: float) -> Iterator[Row]:
    """The cost that regions add under the whole plan's budgets, and what their steps truly peak at."""
    for name in names:
        model, sample = build(name)
        asked: dict[str, Any] = {"keep_outputs": False, "progress": False, "time_limit": time_limit, "check": True}
        whole = open_session(model, sample, regions="whole", **asked)
        parts = open_session(model, sample, regions=BLOCKS[name], **asked)
        for share in SHARES:
            one = plan_or_minimum(whole, budget_at(whole, share))
            least = one.budget_bytes or 0
            many = plan_or_minimum(parts, least)
            one = one if many.budget_bytes == least else whole.plan(many.budget_bytes)
            found = f"{one.overhead:.2%} whole, {many.overhead:.2%} by {len(many.runs)} runs"
            where = "" if least == budget_at(whole, share) else ", or the least that works"
            where += "" if many.budget_bytes == least else f" by regions, {(many.budget_bytes or 0) / least:.4f} of it"
            met = many.overhead - one.overhead <= POINTS
            yield Row(f"{name} {share} %{where}", found, f"within {POINTS:.1%}", met)
            peak = many.static_bytes + peak_of(many.module, model, sample)
            told = f"{many.peak_bytes:,} predicted, {peak:,} measured"
            yield Row(f"{name} {share} % peak", told, "equal", peak == many.peak_bytes)


# Repeats --------------------------------------------------------------------------------------------------------------


class Unrolled(nn.Module):
    """A cell over the steps of a sequence; all states are read at the end."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(width, width), nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = x.new_zeros(x.shape[1], x.shape[2])
        states = []
        for i in range(x.shape[0]):
            h, c = self.cell(x[i], (h, c))
            states.append(h)
        return self.head(torch.stack(states)).square().mean()


class Stack(nn.Module):
    """Equal blocks of a transformer."""

    def __init__(self, count: int = 200, width: int = 64) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(copy.deepcopy(layer) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def repeats(time_limit: float) -> Iterator[Row]:
    """Seconds until the plan is there, at 60 % or the minimum."""
    steps = ("200 LSTM steps", Unrolled(), torch.randn(200, 8, 64), "cell")
    blocks = ("200 blocks", Stack(), torch.randn(4, 32, 64), "blocks.*")
    for name, model, sample, regions in (steps, blocks):
        begin, used = time.perf_counter(), time.process_time()
        session = open_session(model, sample, regions=regions, progress=False, time_limit=time_limit, check=False)
        opened = time.perf_counter() - begin
        plan = plan_or_minimum(session, budget_at(session, 60))
        took = time.perf_counter() - begin
        what = f"{took:.1f} s ({time.process_time() - used:.1f} of this process), {opened:.1f} before the solver"
        what += f"; +{plan.overhead:.2%}, {len(plan.runs)} runs"
        yield Row(name, what, f"{SECONDS:.0f} s", took <= SECONDS)


# Loops ----------------------------------------------------------------------------------------------------------------


def loop(names: list[str], time_limit: float) -> Iterator[Row]:
    """Gradients that are added to, and gradients that are consumed as they come."""
    for name in names:
        model, sample = build(name)
        asked: dict[str, Any] = {"keep_outputs": False, "progress": False, "time_limit": time_limit, "check": False}
        yield from _accumulated(name, model, sample, asked)
        yield from _consumed(name, model, sample, asked)


def _accumulated(name: str, model: nn.Module, sample: Any, asked: dict[str, Any]) -> Iterator[Row]:
    session = open_session(model, sample, gradients="accumulated", **asked)
    plan = plan_or_minimum(session, budget_at(session, 60))
    gradients = sum(round_up(_bytes(p), 64) for p in model.parameters())  # which count as static
    peak = plan.static_bytes - gradients + peak_of(plan.module, model, sample, MICRO_BATCHES)
    share = peak / (plan.budget_bytes or 1)
    yield Row(f"{name} accumulated over {MICRO_BATCHES}", f"{share:.4f} of the budget", "at most 1", share <= 1)
    step(plan.module, sample)
    held, plain = sum(_bytes(p.grad) for p in model.parameters()), sum(_bytes(p) for p in model.parameters())
    found = f"{held / plain:.3f} of eager's"
    yield Row(f"{name} gradients held", found, f"at most {GRADIENTS}", held <= GRADIENTS * plain)
    clear(model)


def _consumed(name: str, model: nn.Module, sample: Any, asked: dict[str, Any]) -> Iterator[Row]:
    fresh = open_session(model, sample, **asked).minimum().minimum_bytes
    session = open_session(model, sample, gradients="consumed", **asked)
    plan, lowest = session.plan(None), session.minimum().minimum_bytes
    hooks = [p.register_post_accumulate_grad_hook(_step) for p in model.parameters() if p.requires_grad]
    plain, planned = (peak_of(m, model, sample) for m in (model, plan.module))
    for hook in hooks:
        hook.remove()
    found = f"{planned:,} for plain's {plain:,}"
    yield Row(f"{name} optimizer in the backward", found, "at most plain's", planned <= plain)
    yield Row(f"{name} its minimum", f"{lowest:,} for {fresh:,}", "lower", lowest < fresh)


def _step(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        assert parameter.grad is not None
        parameter.sub_(parameter.grad, alpha=1e-6)
    parameter.grad = None


def _bytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.untyped_storage().nbytes()


# Lengths and losses ---------------------------------------------------------------------------------------------------


def lengths() -> Iterator[Row]:
    """Two epochs of ten lengths by a 2-layer GPT-2, in turns with the plain model; new lengths under a budget."""
    model, batches = _of_lengths()
    plain = copy.deepcopy(model)
    plan, first = _first_plan(model, batches[0])
    new = [_planning(plan, b) for b in batches[1:]]
    second = [[_seconds(lambda m=m, b=b: step(m, b)) for m in (plain, plan.module)] for _ in range(5) for b in batches]
    ratio = sum(b for _, b in second) / sum(a for a, _ in second)
    yield Row("second epoch", f"{ratio:.3f} of plain's", f"at most {EPOCH}", ratio <= EPOCH)
    yield _new_lengths("planning a new length", new, first)
    for mode in ("replan", "bucket"):
        model, (*shorter, longest) = _of_lengths()
        session = open_session(model, longest, keep_outputs=False, progress=False, check=False)
        plan, first = _first_plan(model, longest, budget_at(session, 60) / MIB, on_new_shape=mode)
        new = [_planning(plan, b) for b in shorter]
        yield _new_lengths(f'planning a new length at 60 % of the longest, "{mode}"', new, first)


def _of_lengths() -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_embd=256, n_head=4, vocab_size=2048, n_positions=256, use_cache=False)
    tokens = [torch.randint(0, 2048, (4, length)) for length in LENGTHS]
    return GPT2LMHeadModel(config).train(), [{"input_ids": t, "labels": t} for t in tokens]


def _first_plan(model: nn.Module, sample: Any, budget_mb: float | None = None, **options: Any) -> tuple[Plan, float]:
    begin = time.perf_counter()
    plan = auto_checkpoint(model, sample, budget_mb, keep_outputs=False, progress=False, check=False, **options)
    return plan, time.perf_counter() - begin


def _new_lengths(what: str, new: list[float], first: float) -> Row:
    share = statistics.median(new) / first
    found = f"{share:.3f} of the first ({first:.2f} s; {', '.join(f'{s:.2f}' for s in new)})"
    return Row(what, found, f"at most {PLANNING}", share <= PLANNING)


def _planning(plan: Any, batch: Any) -> float:
    """How long a call of a new length plans."""
    notices = plan.module._plan_state.notices
    before: float = notices.replan_seconds
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(plan.module, batch)
    return float(notices.replan_seconds) - before


def _seconds(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


class Heads(nn.Module):
    """Two losses."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(64, 64), nn.ModuleList(nn.Linear(64, 1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        h = self.body(x).tanh()
        return [head(h).square().mean() for head in self.heads]


def alternating() -> Iterator[Row]:
    """How often two losses in turn are planned anew after the first of each."""
    model, x = Heads(), torch.randn(8, 64)
    plan = auto_checkpoint(model, x, progress=False, check=False)
    state, made = plan.module._plan_state, 0
    replan = state.replan

    def counting(*arguments: Any) -> Any:
        nonlocal made
        made += 1
        return replan(*arguments)

    state.replan = counting
    counts = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(12):
            plan.module(x)[i % 2].backward()
            counts.append(made)
    late = counts[-1] - counts[3]
    yield Row("two losses in turn", f"{counts[-1]} replans, {late} of them late", "none late", late == 0 and made <= 2)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="default: all")
    parser.add_argument("--models", default=",".join(BLOCKS))
    parser.add_argument("--time-limit", type=float, default=10.0)
    options = parser.parse_args()
    torch.manual_seed(0)
    models = options.models.split(",")
    known: dict[str, Callable[[], Iterator[Row]]] = {
        "costs": lambda: costs(models, options.time_limit), "repeats": lambda: repeats(options.time_limit),
        "loop": lambda: loop([n for n in models if n != "resnet50"], options.time_limit),
        "lengths": lambda: iter([*lengths(), *alternating()]),
    }  # fmt: skip
    if unknown := [part for part in options.parts if part not in known]:
        parser.error(f"{unknown[0]} is not one of {', '.join(known)}")
    table, missed = Table("what", "found", "target", "met"), 0
    for part in options.parts or known:
        for row in known[part]():
            print(row.what, row.found, row.target, "" if row.met else "MISSED", sep=" | ", flush=True)
            table.add_row(row.what, row.found, row.target, "yes" if row.met else "NO")
            missed += not row.met
    Console(width=140).print(table)
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
