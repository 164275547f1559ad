"""The backend of torch.compile against plain Inductor and torch's own activation_memory_budget, on the CPU.

    python -m tests.bench.compiled [gpt2 llama vit resnet] [--shares 0.8 0.6 0.45] [--knobs 0.5 0.0] [--steps 10]

Peaks are measured by allocator events, parameters and inputs included; times are the shortest of interleaved steps.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from passes.memory import measure_peak
from planner.integrations.compile import checkpoint_planner, plans
from solvers.errors import MIB, BudgetError

Case = tuple[nn.Module, dict[str, Any]]


def gpt2(dropout: float = 0.1) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=4, n_embd=256, n_head=4, vocab_size=2000, n_positions=256, resid_pdrop=dropout, embd_pdrop=dropout,
        attn_pdrop=dropout, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(0, 2000, (4, 256))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=4, hidden_size=256, intermediate_size=688, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=2000, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(0, 2000, (4, 256))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def vit() -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=4, hidden_size=192, intermediate_size=768, num_attention_heads=3, image_size=112,
        num_labels=10,
    )  # fmt: skip
    inputs = {"pixel_values": torch.randn(16, 3, 112, 112), "labels": torch.arange(16) % 10}
    return ViTForImageClassification(config), inputs


def resnet() -> Case:
    from transformers import ResNetConfig, ResNetForImageClassification

    inputs = {"pixel_values": torch.randn(8, 3, 96, 96), "labels": torch.arange(8)}
    return ResNetForImageClassification(ResNetConfig(num_labels=10)), inputs


CASES: dict[str, Callable[[], Case]] = {"gpt2": gpt2, "llama": llama, "vit": vit, "resnet": resnet}


class _Run:
    """A compiled model and its first steps."""

    def __init__(self, model: nn.Module, inputs: dict[str, Any], compiled: Any) -> None:
        self.model, self.inputs, self.compiled = model, inputs, compiled
        self.static = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), *set(inputs.values())))
        start = time.perf_counter()
        for _ in range(9):
            self.step()
        self.seconds = time.perf_counter() - start

    def step(self) -> None:
        self.model.zero_grad()
        self.compiled(**self.inputs).loss.backward()

    def peak(self) -> float:
        def once() -> None:
            self.compiled(**self.inputs).loss.backward()

        self.model.zero_grad()
        return (measure_peak(once) + self.static) / MIB


def _ours(model: nn.Module, inputs: dict[str, Any], budget_mb: float) -> tuple[_Run, Any]:
    options = {"budget_mb": budget_mb, "time_limit": 15.0}
    try:
        run = _Run(model, inputs, torch.compile(model, backend=checkpoint_planner, options=options))
    except torch._dynamo.exc.BackendCompilerFailed as error:
        raise error.inner_exception from None
    return run, plans(options)[-1]


def _fastest(runs: list[_Run], steps: int) -> list[float]:
    best = [float("inf")] * len(runs)
    for _ in range(steps):
        for i, run in enumerate(runs):
            start = time.perf_counter()
            run.step()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def measure(name: str, shares: list[float], knobs: list[float], steps: int) -> None:
    """Print a table for one model."""
    torch.manual_seed(0)
    model, inputs = CASES[name]()
    model.train()
    plain = _Run(model, inputs, torch.compile(model))
    peak = plain.peak()
    print(f"{name}: compiled plain {peak:.1f} MiB, {min(_fastest([plain], steps)) * 1e3:.1f} ms", flush=True)
    for share in shares:
        torch._dynamo.reset()
        fresh = copy.deepcopy(model)
        try:
            run, program = _ours(fresh, inputs, share * peak)
        except BudgetError as error:
            print(f"  {share:.0%}: refused: {error}", flush=True)
            continue
        found, fastest = run.peak(), min(_fastest([run], steps)) * 1e3
        print(
            f"  {share:.0%}: budget {share * peak:.1f}, measured {found:.1f} MiB, {fastest:.1f} ms, "
            f"recompute {program.overhead:.1%}, nine first steps {run.seconds:.1f} s, of the last program: planning "
            f"{program.planning_seconds:.1f} s, compiling {program.compile_seconds:.1f} s", flush=True,
        )  # fmt: skip
    for knob in knobs:
        torch._dynamo.reset()
        other = copy.deepcopy(model)
        with torch._functorch.config.patch(activation_memory_budget=knob):
            theirs = _Run(other, inputs, torch.compile(other))
        their_peak = theirs.peak()
        try:
            ours, _ = _ours(copy.deepcopy(model), inputs, their_peak)
        except BudgetError as error:
            print(f"  activation_memory_budget={knob}: {their_peak:.1f} MiB; ours refused: {error}", flush=True)
            continue
        a, b = _fastest([theirs, ours], steps)
        print(
            f"  activation_memory_budget={knob}: {their_peak:.1f} MiB, {a * 1e3:.1f} ms; ours {ours.peak():.1f} MiB, "
            f"{b * 1e3:.1f} ms ({b / a:.2f}x)", flush=True,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(CASES))
    parser.add_argument("--shares", nargs="*", type=float, default=[0.8, 0.6, 0.45])
    parser.add_argument("--knobs", nargs="*", type=float, default=[0.5, 0.0])
    parser.add_argument("--steps", type=int, default=10)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for name in asked.models:
        torch._dynamo.reset()
        measure(name, asked.shares, asked.knobs, asked.steps)


if __name__ == "__main__":
    main()
