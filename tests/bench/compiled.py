"""The backend of torch.compile against plain Inductor and torch's own activation_memory_budget, on the CPU.

    python -m tests.bench.compiled [gpt2 llama vit resnet] [--shares 0.8 0.6 0.45] [--knobs 0.5 0.0] [--plans 0.8]
        [--steps 10]

`--shares` are budgets for the backend, of compiled plain's peak; `--knobs` values of activation_memory_budget, each
beside the backend at the peak that it was measured at; `--plans` budgets of `auto_checkpoint`, of eager plain's peak,
uncompiled and after `plan.compile()`. Peaks are measured by allocator events, parameters and inputs included; times are
processor time, the shortest of interleaved steps; gradients are compared, as one vector, with eager ones in float64
where no random op is in the way.
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
from planner import auto_checkpoint
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

    inputs = {"pixel_values": torch.randn(96, 3, 64, 64), "labels": torch.arange(96) % 10}
    return ResNetForImageClassification(ResNetConfig(num_labels=10)), inputs


CASES: dict[str, Callable[[], Case]] = {"gpt2": gpt2, "llama": llama, "vit": vit, "resnet": resnet}


class _Run:
    """A model and how its steps are run."""

    def __init__(
        self, model: nn.Module, inputs: dict[str, Any], run: Any, options: dict[str, Any] | None = None
    ) -> None:
        self.model, self.inputs, self.run = model, inputs, run
        self.static = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), *set(inputs.values())))
        start, steps = time.perf_counter(), 0
        while steps < 2 or (options is not None and steps < 9 and any(p.watching for p in plans(options))):
            self.step()
            steps += 1
        self.seconds = time.perf_counter() - start

    def step(self) -> None:
        self.model.zero_grad()
        self.run(**self.inputs).loss.backward()

    def peak(self) -> float:
        def once() -> None:
            self.run(**self.inputs).loss.backward()

        self.model.zero_grad()
        return (measure_peak(once) + self.static) / MIB

    def error(self) -> str:
        """How far the gradients are from those of eager in float64."""
        self.step()
        if any(isinstance(m, nn.Dropout) and m.p for m in self.model.modules()):
            return "random"
        exact = copy.deepcopy(self.model).double()
        exact.zero_grad()
        given = {k: v.double() if v.is_floating_point() else v for k, v in self.inputs.items()}
        exact(**given).loss.backward()
        pairs = zip(self.model.parameters(), exact.parameters(), strict=True)
        squares = [(((p.grad - q.grad) ** 2).sum(), (q.grad**2).sum()) for p, q in pairs if q.grad is not None]  # type: ignore[operator]
        return f"{(sum(d for d, _ in squares) / sum(s for _, s in squares)) ** 0.5:.1e}"


def _ours(model: nn.Module, inputs: dict[str, Any], budget_mb: float) -> tuple[_Run, Any]:
    torch._dynamo.reset()
    options = {"budget_mb": budget_mb, "time_limit": 15.0}
    try:
        run = _Run(model, inputs, torch.compile(model, backend=checkpoint_planner, options=options), options)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        raise error.inner_exception from None
    return run, plans(options)


def _fastest(runs: list[_Run], steps: int) -> list[float]:
    best = [float("inf")] * len(runs)
    for _ in range(steps):
        for i, run in enumerate(runs):
            start = time.process_time()
            run.step()
            best[i] = min(best[i], time.process_time() - start)
    return [1e3 * b for b in best]


def _share(plain: _Run, peak: float, share: float, steps: int) -> str:
    try:
        run, programs = _ours(copy.deepcopy(plain.model), plain.inputs, share * peak)
    except BudgetError as error:
        return f"refused: {error}"
    ours, theirs = _fastest([run, plain], steps)
    cost = max(p.overhead for p in programs)
    return (
        f"budget {share * peak:.1f}, measured {run.peak():.1f} MiB, {ours / theirs:.2f}x compiled plain's "
        f"{theirs:.0f} ms, recompute {cost:.1%}, gradients' error {run.error()}, {len(programs)} graphs in "
        f"{run.seconds:.0f} s; the last time: planning {sum(p.planning_seconds for p in programs):.1f} s, compiling "
        f"{sum(p.compile_seconds for p in programs):.1f} s"
    )


def _knob(plain: _Run, knob: float, steps: int) -> str:
    torch._dynamo.reset()
    other = copy.deepcopy(plain.model)
    with torch._functorch.config.patch(activation_memory_budget=knob):  # to the end: a reset has it compiled anew
        theirs = _Run(other, plain.inputs, torch.compile(other))
        peak = theirs.peak()
        try:
            ours, _ = _ours(copy.deepcopy(plain.model), plain.inputs, peak)
        except BudgetError as error:
            return f"{peak:.1f} MiB; ours refused: {error}"
        a, b = _fastest([theirs, ours], steps)
        still = theirs.peak()
    return f"{peak:.1f} MiB ({still:.1f} at the end), {a:.0f} ms; ours {ours.peak():.1f} MiB, {b:.0f} ms ({b / a:.2f}x)"


def _plan(plain: _Run, share: float, steps: int) -> str:
    model = copy.deepcopy(plain.model)
    plan = auto_checkpoint(model, plain.inputs, f"{share:%}", progress=False, check=False)
    try:
        compiled = plan.compile()
    except BudgetError as error:
        return f"refused: {error}"
    runs = [_Run(model, plain.inputs, p.module) for p in (plan, compiled)]
    a, b = _fastest(runs, steps)
    return (
        f"budget {(plan.budget_bytes or 0) / MIB:.1f}, measured {runs[0].peak():.1f} MiB, {a:.0f} ms; compiled "
        f"{runs[1].peak():.1f} MiB, {b:.0f} ms ({b / a:.2f}x) in {compiled.seconds['compile']:.0f} s, gradients' error "
        f"{runs[1].error()}"
    )


def measure(name: str, asked: argparse.Namespace) -> None:
    """Print what is asked for about one model."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, inputs = CASES[name]()
    plain = _Run(model.train(), inputs, torch.compile(model))
    peak = plain.peak()
    print(f"{name}: compiled plain {peak:.1f} MiB, {min(_fastest([plain], asked.steps)):.0f} ms", flush=True)
    for share in asked.shares:
        print(f"  {share:.0%}: {_share(plain, peak, share, asked.steps)}", flush=True)
    for knob in asked.knobs:
        print(f"  activation_memory_budget={knob}: {_knob(plain, knob, asked.steps)}", flush=True)
    for share in asked.plans:
        print(f"  plan of {share:.0%}: {_plan(plain, share, asked.steps)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(CASES))
    parser.add_argument("--shares", nargs="*", type=float, default=[0.8, 0.6, 0.45])
    parser.add_argument("--knobs", nargs="*", type=float, default=[0.5, 0.0])
    parser.add_argument("--plans", nargs="*", type=float, default=[0.8])
    parser.add_argument("--steps", type=int, default=10)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for name in asked.models:
        measure(name, asked)


if __name__ == "__main__":
    main()
