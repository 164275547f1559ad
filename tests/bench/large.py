"""`python -m tests.bench.large [case ...]`: problems of ten thousand ops, and Llama's shapes on the meta device.

Each case runs in a process of its own, whose resident memory is printed. The exit code is 1 when one that has
thresholds misses them; `--list` names the cases.

Budgets of the Llama cases are shares of *activation memory*: the highest bytes of the plain step that are neither
parameters and inputs nor gradients of parameters. A budget is static bytes + all gradients + the share of that.

full      every parameter is trained, and the trainer holds a gradient buffer for each throughout (accumulation, DDP,
          Megatron), so that the share caps activations at every moment of the step. This is what counts.
fresh     the step allocates its gradients instead. While the forward's activations are alive no gradient is, so their
          room is lent to activations, and at batch 1 with SDPA half of the activations is no constraint at all.
lora      the base is frozen, and low-rank adapters of the query and value projections are trained.

The loss alone is returned (`keep_outputs=False`), the cost is the roofline of ridge 10 unless `--cost` says otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from solvers import BudgetError, Problem, Solution, solve

from .problems import activation_bytes, gradient_bytes, plain_peak_bytes, synthetic, with_gradient_buffers

GIB = 1 << 30
Row = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A Llama: `training` is full, fresh or lora; `regions` as in `auto_checkpoint`."""

    training: str = "full"
    layers: int = 32
    width: int = 4096
    intermediate: int = 11008
    heads: int = 32
    key_value_heads: int = 32
    attention: str = "sdpa"
    batch: int = 1
    length: int = 2048
    vocabulary: int = 32000
    regions: str = "whole"


@dataclass(frozen=True)
class Limits:
    """What a case must meet: seconds, gap in shares of the step by budget share or of its bound, GiB resident."""

    seconds: float
    gap_points: tuple[tuple[int, float], ...] = ()
    gap_of_bound: float | None = None
    resident_gib: float | None = None


LLAMA_70B = {"layers": 80, "width": 8192, "intermediate": 28672, "heads": 64, "key_value_heads": 8}
SHAPES = {
    "llama7b": Shape(),
    "llama7b-fresh": Shape("fresh"),
    "llama7b-fresh-eager": Shape("fresh", attention="eager"),
    "llama7b-fresh-batch8": Shape("fresh", batch=8),
    "llama7b-eager": Shape(attention="eager"),
    "llama7b-lora": Shape("lora"),
    "llama7b-lora-eager": Shape("lora", attention="eager"),
    "llama70b": Shape(**LLAMA_70B),  # type: ignore[arg-type]
    "llama70b-blocks": Shape(**LLAMA_70B, regions="model.layers.*"),  # type: ignore[arg-type]
}
LIMITS = {
    "synthetic": Limits(60.0, gap_of_bound=0.01),
    "llama7b": Limits(120.0, gap_points=((50, 0.02),), resident_gib=6.0),
    "llama7b-lora": Limits(120.0, gap_points=((50, 0.02),), resident_gib=6.0),
    "llama70b": Limits(300.0, gap_points=((50, 0.01), (25, 0.01))),
    "llama70b-blocks": Limits(20.0, gap_points=((50, 0.01),)),
}
DEFAULT = tuple(LIMITS)


def llama(shape: Shape) -> tuple[Any, dict[str, Any]]:
    """The model on the meta device in bfloat16, and its sample."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=shape.width, intermediate_size=shape.intermediate, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.key_value_heads, vocab_size=shape.vocabulary,
        max_position_embeddings=shape.length, use_cache=False,
    )  # fmt: skip
    config._attn_implementation = shape.attention
    with torch.device("meta"):
        model = LlamaForCausalLM(config).train()
        if shape.training == "lora":
            _adapt(model)
        model = model.to(torch.bfloat16)
    tokens = torch.zeros((shape.batch, shape.length), dtype=torch.long)
    return model, {"input_ids": tokens, "labels": tokens}


def _adapt(model: Any, rank: int = 16) -> None:
    """Freeze the model and add low-rank adapters to its query and value projections (Hu et al. 2021)."""
    from torch import nn

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.down = nn.Linear(base.in_features, rank, bias=False)
            self.up = nn.Linear(rank, base.out_features, bias=False)

        def forward(self, x: Any) -> Any:
            return self.base(x) + self.up(self.down(x))

    model.requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name)))


def run_llama(shape: Shape, shares: list[int], time_limit: float, cost: str) -> list[Row]:
    """Capture and profile once, then plan, rewrite and prove at each share."""
    from planner.pipeline import emit_schedule
    from planner.session import open_session

    start = time.perf_counter()
    model, sample = llama(shape)
    session = open_session(model, sample, cost=cost, progress=False, keep_outputs=False, regions=shape.regions)
    problem = with_gradient_buffers(session.problem) if shape.training == "full" else session.problem
    captured = time.perf_counter() - start
    gradients = gradient_bytes(session.problem)
    activations = activation_bytes(session.problem)
    sizes = {
        "ops": len(problem.ops), "static_gib": session.problem.static_bytes / GIB, "gradients_gib": gradients / GIB,
        "activations_gib": activations / GIB, "plain_gib": plain_peak_bytes(problem) / GIB, "capture_s": captured,
    }  # fmt: skip

    def prove(found: Solution) -> None:
        emit_schedule(session.prepared, found.schedule)

    base = session.problem.static_bytes + gradients
    budgets = [(share, base + activations * share // 100) for share in shares]
    return [{**sizes, **_solve(problem, share, budget, time_limit, start, prove)} for share, budget in budgets]


def run_synthetic(forward_ops: int, shares: list[int], time_limit: float) -> list[Row]:
    """A synthetic step of `forward_ops`, at shares of its plain peak."""
    problem = synthetic(forward_ops)
    plain = plain_peak_bytes(problem)
    sizes = {
        "ops": len(problem.ops), "static_gib": 0.0, "gradients_gib": gradient_bytes(problem) / GIB,
        "activations_gib": activation_bytes(problem) / GIB, "plain_gib": plain / GIB, "capture_s": 0.0,
    }  # fmt: skip
    rows = []
    for share in shares:
        start = time.perf_counter()
        rows.append({**sizes, **_solve(problem, share, plain * share // 100, time_limit, start, lambda _: None)})
    return rows


def _solve(
    problem: Problem, share: int, budget: int, time_limit: float, start: float, then: Callable[[Solution], None]
) -> Row:
    row: Row = {"share": share, "budget_gib": budget / GIB}
    begin = time.perf_counter()
    try:
        found = solve(problem, budget, time_limit=time_limit, gap=0.002)
    except BudgetError as error:
        minimum, floor = (error.minimum_bytes or 0) / GIB, (error.floor_bytes or 0) / GIB
        row |= {"refused": f"minimum {minimum:.2f}, floor {floor:.2f}"}
        found = None
    row["solve_s"] = time.perf_counter() - begin
    if found is not None:
        then(found)
        bound = found.bound or 0
        row |= {"overhead": problem.overhead(found.added_cost), "bound": problem.overhead(bound),
                "gap_of_bound": (found.added_cost - bound) / bound if bound else float(found.added_cost > 0),
                "notes": list(found.notes)}  # fmt: skip
    row["total_s"] = time.perf_counter() - start
    row["resident_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    return row


def misses(case: str, rows: list[Row]) -> list[str]:
    """Which thresholds of the case its rows miss."""
    limits = LIMITS.get(case)
    if limits is None:
        return []
    found = [f"{case} at {row['share']} %: no plan ({row['refused']})" for row in rows if "refused" in row]
    solved = [row for row in rows if "refused" not in row]
    seconds = max((row["total_s"] for row in rows), default=0.0)
    if seconds > limits.seconds:
        found.append(f"{case}: {seconds:.0f} s, more than {limits.seconds:.0f}")
    for row in solved:
        gap = row["overhead"] - row["bound"]
        allowed = dict(limits.gap_points).get(row["share"])
        if allowed is not None and gap > allowed:
            found.append(f"{case} at {row['share']} %: gap of {gap:.2%}, more than {allowed:.0%}")
        if limits.gap_of_bound is not None and row["gap_of_bound"] > limits.gap_of_bound:
            share = f"{row['gap_of_bound']:.2%} of its bound, more than {limits.gap_of_bound:.0%}"
            found.append(f"{case} at {row['share']} %: gap of {share}")
        if limits.resident_gib is not None and row["resident_gib"] > limits.resident_gib:
            found.append(f"{case}: {row['resident_gib']:.1f} GiB resident, more than {limits.resident_gib:.0f}")
    return found


def table_of(results: dict[str, list[Row]]) -> Table:
    """All cases, a row per budget; sizes in GiB, `total s` from the start of the case."""
    table = Table(
        "case", "ops", "static", "gradients", "activations", "plain peak", "share", "budget", "recompute", "bound",
        "gap", "capture s", "solve s", "total s", "resident",
    )  # fmt: skip
    for case, rows in results.items():
        for row in rows:
            sizes = [f"{row[k]:.2f}" for k in ("static_gib", "gradients_gib", "activations_gib", "plain_gib")]
            costs = ["-", "-", row.get("refused", "-")]
            if "overhead" in row:
                gap = row["overhead"] - row["bound"]
                costs = [f"{row['overhead']:.2%}", f"{row['bound']:.2%}", f"{gap:.3%}"]
            seconds = [f"{row[k]:.1f}" for k in ("capture_s", "solve_s", "total_s")]
            budget = f"{row['share']} %", f"{row['budget_gib']:.2f}"
            table.add_row(case, str(row["ops"]), *sizes, *budget, *costs, *seconds, f"{row['resident_gib']:.2f}")
    return table


def run_case(case: str, shares: str, time_limit: float | None, cost: str) -> list[Row]:
    """Run one case in this process."""
    if case.startswith("synthetic"):
        forward_ops = int(case.removeprefix("synthetic").lstrip("-") or 10_000)
        return run_synthetic(forward_ops, _shares(shares, "50"), time_limit or 50.0)
    if case.endswith("-blocks"):
        return run_llama(SHAPES[case], _shares(shares, "50"), time_limit or 10.0, cost)
    return run_llama(SHAPES[case], _shares(shares, "50,25"), time_limit or (90.0 if "70b" in case else 30.0), cost)


def _shares(text: str, default: str) -> list[int]:
    return [int(share) for share in (text or default).split(",")]


def main() -> int:
    """Print the table; 1 when a threshold is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"default: {', '.join(DEFAULT)}")
    parser.add_argument("--list", action="store_true", help="name the cases")
    parser.add_argument("--all", action="store_true", help="every case")
    parser.add_argument("--shares", default="", help="budgets in percent, e.g. 50,25")
    parser.add_argument("--time-limit", type=float, help="seconds per solve; default 50, 30, 90 (70B) or 10 (blocks)")
    parser.add_argument("--cost", default="roofline:flops=1e13,bytes=1e12")
    parser.add_argument("--here", action="store_true", help="one case in this process, its rows as JSON")
    options = parser.parse_args()
    known = ("synthetic", *SHAPES)
    if options.list:
        print(*known, sep="\n")
        return 0
    cases = options.cases or (known if options.all else DEFAULT)
    unknown = [case for case in cases if case not in SHAPES and not case.startswith("synthetic")]
    if unknown:
        parser.error(f"no case is named {unknown[0]!r}; known: {', '.join(known)}, synthetic-N for N forward ops")
    if options.here:
        print(json.dumps(run_case(cases[0], options.shares, options.time_limit, options.cost)))
        return 0
    results = {case: _in_process(case) for case in cases}
    Console(width=180).print(table_of(results))
    missed = [line for case, rows in results.items() for line in misses(case, rows)]
    print(*missed, sep="\n")
    return 1 if missed else 0


def _in_process(case: str) -> list[Row]:
    options = [argument for argument in sys.argv[1:] if argument not in ("--all", *SHAPES) and argument != case]
    command = [sys.executable, "-m", "tests.bench.large", case, "--here", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{case} failed:\n{done.stderr}")
    return list(json.loads(done.stdout.strip().splitlines()[-1]))


if __name__ == "__main__":
    raise SystemExit(main())
