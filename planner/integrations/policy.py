"""A memory policy for whoever traces forward, loss and backward into one graph, torchtitan's GraphTrainer for one:

    from planner.integrations.policy import tag
    from torchtitan.experiments.graph_trainer.registry import register_memory_policy

    @register_memory_policy("planned")
    def planned(gm, *, config):
        return tag(gm, budget_mb=40_000)

The pass that reads such tags computes a tensor again right before its first reader in the backward and keeps it until
the last. A plan may do it later or more than once, so that what runs can peak above what was planned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from passes._torch import pytree
from passes.alias import device_of, is_compute
from passes.errors import Unsupported
from passes.lower import lower
from passes.profile import OpProfile
from passes.rates import cost_function
from passes.trace.capture import Traced
from planner.budget import Budget
from solvers.schedule import computes

from ._torch_compile import is_tangent, symbols_of
from .joint import UNUSED, mark_backward
from .partition import ready_for


def tag(
    gm: fx.GraphModule, budget_mb: float | str | None, *, solver: str = "auto", time_limit: float = 30.0,
    gap: float = 0.01, cost: str | Callable[[OpProfile], float] = "roofline",
) -> fx.GraphModule:  # fmt: skip
    """Note on every kernel of the forward whether a plan under the budget saves its results or computes them again.

    Args:
        gm: a functional graph of ATen ops. Gradients of outputs, if it takes any, are its last inputs; nodes of the
            backward have `autograd_backward`, `partitioner_tag` or (torch 2.11) `custom["remat_pass_tag"]` in their
            `meta`, or read such a gradient.
        budget_mb: MiB of the peak, the graph's inputs included, or a size ("40GB").

    Returns:
        `gm`, with `MUST_SAVE`, `MUST_RECOMPUTE` or, for views, `PREFER_RECOMPUTE` in `meta["recompute"]`.

    Raises:
        BudgetError: nothing found fits.
        Unsupported: the graph has sizes that are not known, or writes in place.
    """
    traced, device = _step(gm), device_of(next(n for n in gm.graph.nodes if n.op != "output"))
    costs = cost if callable(cost) else cost_function(cost)
    ready = ready_for(
        traced, lambda aliases, profiles, once: lower(traced, aliases, profiles, costs, device=device, once=once),
        timed=cost == "measured",
    )  # fmt: skip
    schedule = ready.decide(Budget(budget_mb).to_bytes(None), solver=solver, time_limit=time_limit, gap=gap)
    runs = Counter(ready.lowered.nodes[i] for i in computes(schedule))
    for node, image in zip(gm.graph.nodes, traced.graph_module.graph.nodes, strict=True):
        if node.op == "call_function" and image.meta.get("partitioner_tag") != "is_backward":
            node.meta["recompute"] = (
                CheckpointPolicy.PREFER_RECOMPUTE if not is_compute(image)
                else CheckpointPolicy.MUST_RECOMPUTE if runs[image] > 1 else CheckpointPolicy.MUST_SAVE
            )  # fmt: skip
    return gm


def _step(gm: fx.GraphModule) -> Traced:
    """The graph as a step that the passes know: outputs of the forward first, then each input's gradient, if any."""
    graph, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in gm.graph.nodes:
        if node.op == "output":
            continue
        if symbols_of(node.meta.get("val") if node.op == "placeholder" else None):
            raise Unsupported("a size that is a symbol", node.name, "a plan is for given sizes", "Trace with numbers.")
        nodes[node] = graph.node_copy(node, nodes.__getitem__)
        if node.meta.get("autograd_backward") or node.meta.get("custom", {}).get("remat_pass_tag") == "is_backward":
            nodes[node].meta["partitioner_tag"] = "is_backward"
    given = [n for n in graph.nodes if n.op == "placeholder"]
    tangents = [n for n in given if is_tangent(n)]
    returned = [nodes[v] for v in pytree.tree_leaves(gm.graph.output_node().args[0]) if isinstance(v, fx.Node)]
    graph.output(tuple(returned))
    mark_backward(graph, tangents)
    late = [n for n in returned if n.meta.get("partitioner_tag") == "is_backward"]
    early = [n for n in returned if n not in late]
    graph.output_node().args = ((*early, *_by_input(given[: len(given) - len(tangents)], late)),)
    return Traced(
        graph_module=fx.GraphModule(gm, graph), pristine=graph, state=(), input_template=UNUSED, input_names=(),
        num_inputs=len(given) - len(tangents), output_template=UNUSED, outputs=(), mutated=(), num_outputs=len(early),
        reads=UNUSED,
    )  # fmt: skip


def _by_input(inputs: list[fx.Node], gradients: list[fx.Node]) -> list[fx.Node | None]:
    """Which input each gradient is for is not written anywhere; the first that looks like it will do for its size."""
    waiting, found = list(gradients), []
    for node in inputs:
        match = next((g for g in waiting if _looks(g) == _looks(node)), None)
        found.append(match)
        if match is not None:
            waiting.remove(match)
    return [*found, *waiting]


def _looks(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else None
