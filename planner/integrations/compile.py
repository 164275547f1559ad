"""`torch.compile(model, backend="checkpoint_planner", options={"budget_mb": 4000})`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from passes.codegen import boxed
from passes.rates import cost_function
from planner.budget import Budget

from ._torch_compile import Halves, compile_eager, compile_inductor
from .kernels import compiled_cost
from .partition import prepare_joint


def checkpoint_planner(
    gm: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **_: Any
) -> Callable[..., Any]:
    options = options or {}
    budget = Budget(options.get("budget_mb")).to_bytes(torch.device("cpu"), None)
    def partition(joint: fx.GraphModule, n: int) -> Halves:
        ready = prepare_joint(joint, n, compiled_cost if options.get("fusing") else cost_function("roofline"), {}, fusing=options.get("fusing",False))
        s = ready.decide(budget, solver="auto", time_limit=30, gap=.01)
        f = ready.figures(s)
        print("PLAN", ready.problem.static_bytes, f, ready.seconds)
        return ready.halves(s)
    if options.get("inner") == "inductor":
        return compile_inductor(gm, inputs, partition, {}, lambda f, b: f)
    def run(half, half_inputs):
        f = boxed(half.graph, half, "Half").forward
        def call(values): return f(values)
        call._boxed_call = True
        return call
    return compile_eager(gm, inputs, partition, run)
