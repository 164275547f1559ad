"""functorch's min-cut partitioner under `activation_memory_budget`, on eager kernels (no Inductor)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._pytree import tree_leaves, tree_map

from passes._torch import flop_registry

KNAPSACKS = ("dp", "ilp", "greedy")


@dataclass
class Graphs:
    """What Dynamo handed to the partitioner, and what one step adds to it.

    Attributes:
        nodes: size of each joint graph.
        added_flops, added_bytes: of the halves that ran since `restart`, less those of their joint graphs. Counted on
            the graphs: under a dispatch mode Dynamo gives a frame up for good, so the running step cannot be counted.
    """

    nodes: list[int] = field(default_factory=list)
    added_flops: int = 0
    added_bytes: int = 0
    joint: tuple[int, int] = (0, 0)

    def restart(self) -> None:
        self.added_flops = self.added_bytes = 0

    def partition(self, budget: float, knapsack: str, joint: fx.GraphModule, args: Any, kwargs: Any) -> Any:
        """Cut `joint` in two."""
        self.nodes.append(len(joint.graph.nodes))
        self.joint = _work(joint)
        options = {"activation_memory_budget": budget, "activation_memory_budget_solver": knapsack}
        with functorch_config.patch(options):
            return min_cut_rematerialization_partition(joint, *args, **kwargs)

    def half(self, graph_module: fx.GraphModule, *, forward: bool) -> Callable[[list[Any]], Any]:
        """A half as AOT calls it, counting its runs; the forward of a pair is made right after its partition."""
        flops, moved = _work(graph_module)
        if forward:
            flops, moved = flops - self.joint[0], moved - self.joint[1]
        run = boxed_nop(graph_module, [])

        def counted(args: list[Any]) -> Any:
            self.added_flops += flops
            self.added_bytes += moved
            return run(args)

        counted._boxed_call = True  # type: ignore[attr-defined]
        return counted


def compile_with_budget(module: nn.Module, budget: float, knapsack: str) -> tuple[nn.Module, Graphs]:
    """`module` compiled by an AOT backend whose partitioner works under `budget` (0 to 1)."""
    graphs = Graphs()
    backend = aot_autograd(
        fw_compiler=lambda g, _: graphs.half(g, forward=True),
        bw_compiler=lambda g, _: graphs.half(g, forward=False),
        partition_fn=lambda joint, *args, **kwargs: graphs.partition(budget, knapsack, joint, args, kwargs),
        inference_compiler=boxed_nop,
        keep_inference_input_mutations=True,
    )
    compiled: Any = torch.compile(module, backend=backend)
    return compiled, graphs


def _work(graph_module: fx.GraphModule) -> tuple[int, int]:
    """FLOPs, and bytes read and written, of one run of the graph; by the same rules as `measure.Work`."""
    flops = moved = 0
    for node in graph_module.graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            continue
        args, kwargs = tree_map(_value, (node.args, dict(node.kwargs)))
        result = node.meta.get("val")
        count = flop_registry.get(target.overloadpacket)
        if count is not None:
            flops += int(count(*args, **kwargs, out_val=result))
        if not target.is_view:
            touched = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
            moved += sum(t.numel() * t.element_size() for t in touched)
    return flops, moved


def _value(leaf: Any) -> Any:
    return leaf.meta.get("val") if isinstance(leaf, fx.Node) else leaf


@contextmanager
def patient_dynamo() -> Iterator[None]:
    """Let Dynamo compile the same code many times, and pass over a library's log calls instead of breaking there."""
    config: Any = torch._dynamo.config
    methods = [getattr(logging.Logger, n) for n in ("warning_once", "warning", "info") if hasattr(logging.Logger, n)]
    before = config.recompile_limit, set(config.ignore_logging_functions)
    config.recompile_limit = 256
    config.ignore_logging_functions.update(methods)
    try:
        yield
    finally:
        config.recompile_limit, config.ignore_logging_functions = before
