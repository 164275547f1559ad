"""The ops of a step as a graph of networkx."""

from __future__ import annotations

from collections.abc import Collection

import networkx as nx

from passes.alias import is_compute
from passes.trace.modules import module_path

from .prepared import Prepared


def op_graph(prepared: Prepared, recomputed: Collection[str], saved: Collection[str]) -> nx.DiGraph:
    """The ops of a step: bytes, flops, cost, workspace, decision, module path per node.

    Args:
        recomputed: names of the ops that run again.
        saved: names of the tensors that the forward hands to the backward.
    """
    lowered, problem = prepared.lowered, prepared.problem
    graph = nx.DiGraph()
    for i, op in enumerate(problem.ops):
        node = lowered.nodes[i]
        names = [problem.tensors[t].name for t in op.outputs]
        decision = (
            "recompute" if op.name in recomputed else "save" if any(n in saved for n in names)
            else "forward" if i < problem.num_forward else "backward"
        )  # fmt: skip
        profiled = prepared.profiles.get(node) if node is not None else None
        graph.add_node(
            op.name, index=i, bytes=sum(problem.tensors[t].bytes for t in op.outputs), cost=op.cost,
            flops=profiled.flops if profiled else 0, workspace=op.workspace, decision=decision,
            seconds=profiled.seconds if profiled else None, op=str(node.target) if node is not None else op.name,
            module=module_path(node) if node is not None else "", backward=i >= problem.num_forward,
        )  # fmt: skip
        for t in op.inputs:
            graph.add_edge(problem.ops[problem.producer[t]].name, op.name, tensor=problem.tensors[t].name)
    assert all(is_compute(n) for n in lowered.nodes if n is not None)
    return graph
