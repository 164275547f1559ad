"""The two halves of a joint graph, as AOT autograd takes them, that execute a proved rewrite of its image.

The forward takes the inputs and returns its outputs, then the saved tensors, then the saved numbers; the backward
takes the saved numbers, the saved tensors and the gradients of the outputs.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from passes._torch import pytree
from passes.errors import Unsupported
from passes.rewrite import Rewritten

from ._torch_compile import (
    Halves,
    is_symbolic,
    is_tangent,
    output_descriptions,
    saved_description,
    size_node,
    symbol_nodes,
)
from ._torch_inductor import HELD, WRITTEN
from .joint import Joint

UNWATCHED = "saved_tensor_with_no_vc_check"  # AOT autograd's note of a saved tensor whose version is not looked at


def make_halves(joint: Joint, rewritten: Rewritten) -> Halves:
    """Both halves, over the original's ops, sizes and copies."""
    return _Translation(joint, rewritten).halves()


class _Half:
    """One of the two graphs.

    Attributes:
        nodes, symbols: the original's by name, and by the symbol that they are.
        numbers: its symbolic sizes.
        image: its value for each node of the rewrite.
    """

    def __init__(self, nodes: dict[str, fx.Node], symbols: dict[str, fx.Node]) -> None:
        self.nodes, self.symbols = nodes, symbols
        self.graph = fx.Graph()
        self.numbers: dict[fx.Node, fx.Node] = {}
        self.image: dict[fx.Node, fx.Node] = {}

    def placeholder(self, original: fx.Node, name: str = "") -> fx.Node:
        new = self.graph.placeholder(name or original.name)
        new.meta = dict(original.meta)
        return new

    def copy(self, node: fx.Node, backward: bool) -> None:
        """Emit what `node` of the rewrite is in the original."""
        source = node.meta.get("source")
        if source is None:  # one result of an op of several
            parent, index = node.args
            new = self.graph.call_function(operator.getitem, (self.image[parent], index))  # type: ignore[index]
            new.meta = {**new.args[0].meta, "val": new.args[0].meta["val"][index]}  # type: ignore[union-attr]
            self.image[node] = new
            return
        original = self.nodes[source]
        args, kwargs = self._arguments(original, node)
        new = self.graph.create_node(original.op, original.target, args, kwargs, name=node.name)
        new.meta = {**original.meta, WRITTEN: node.meta.get(WRITTEN, False)}
        if backward:
            new.meta["autograd_backward"] = True
        self.image[node] = new

    def _arguments(self, original: fx.Node, node: fx.Node) -> Any:
        wanted, spec = pytree.tree_flatten((original.args, dict(original.kwargs)))
        found, _ = pytree.tree_flatten((node.args, dict(node.kwargs)))
        args, kwargs = pytree.tree_unflatten(
            [self._argument(w, f) for w, f in zip(wanted, found, strict=True)], spec
        )  # fmt: skip
        return tuple(args), kwargs

    def _argument(self, original: Any, found: Any) -> Any:
        if isinstance(found, fx.Node):
            return self.image[found]
        return self.number(original) if isinstance(original, fx.Node) else original

    def number(self, node: fx.Node) -> fx.Node:
        """The half's node for a symbolic size, computed here from others where it was not handed over."""
        if node not in self.numbers:
            self.numbers[node] = self._computed(node)
        return self.numbers[node]

    def _computed(self, node: fx.Node) -> fx.Node:
        if node.op == "call_function" and all(is_symbolic(a.meta.get("val")) for a in node.all_input_nodes):
            new = self.graph.node_copy(node, self.number)
            new.meta = dict(node.meta)
            return new
        symbols = {name: self.numbers[n] for name, n in self.symbols.items() if n in self.numbers}
        found = size_node(self.graph, node.meta["val"], symbols)  # it is read off a tensor that may not be here
        if found is None:
            raise Unsupported(
                f"a size that is read off an intermediate result ({node.target})", node.name,
                "it is not known where it is needed again",
                "Mark the size as static, or compile with dynamic=False.",
            )  # fmt: skip
        return found


class _Translation:
    def __init__(self, joint: Joint, rewritten: Rewritten) -> None:
        self.joint, self.rewritten = joint, rewritten
        graph = joint.graph_module.graph
        self.nodes = {n.name: n for n in graph.nodes}
        self.given = [n for n in graph.nodes if n.op == "placeholder"]
        self.outputs = pytree.tree_leaves(graph.output_node().args[0], is_leaf=lambda v: v is None)
        self.descriptions = output_descriptions(graph, len(self.outputs))

    def halves(self) -> Halves:
        symbols = symbol_nodes(self.joint.graph_module.graph)
        forward, backward = _Half(self.nodes, symbols), _Half(self.nodes, symbols)
        saved = self._forward(forward)
        numbers = self._close(forward, saved)
        self._backward(backward, [forward.image[n] for n in saved], numbers)
        root = self.joint.graph_module
        for half in (forward, backward):
            half.graph.eliminate_dead_code()
            half.graph.lint()
        return fx.GraphModule(root, forward.graph), fx.GraphModule(root, backward.graph)

    def _forward(self, half: _Half) -> list[fx.Node]:
        """Emit the forward up to its output; the saved tensors as nodes of the rewrite's forward."""
        rewritten = {n.name: n for n in self.rewritten.forward.graph.nodes if n.op == "placeholder"}
        for node in (n for n in self.given if not is_tangent(n)):
            new = half.placeholder(node)
            if node.name in rewritten:
                half.image[rewritten[node.name]] = new
                self._check(half, node.name, new)
            else:
                half.numbers[node] = new
        for node in self.rewritten.forward.graph.nodes:
            if node.op in ("call_function", "get_attr"):
                half.copy(node, False)
                self._check(half, node.meta.get("source"), half.image[node])
        returned: Any = self.rewritten.forward.graph.output_node().args[0]
        given = [n for n in self.rewritten.forward.graph.nodes if n.op == "placeholder"]
        for i in self.joint.traced.mutated:  # whoever reads it in the backward does not heed its value, as was proved
            half.image[given[i]].meta[UNWATCHED] = True
        return [*returned[self.rewritten.num_forward_outputs :], *(given[i] for i in self.rewritten.saved_primals)]

    def _check(self, half: _Half, source: str | None, value: fx.Node) -> None:
        """Emit what asserts a value, as soon as it is there."""
        for node in self.joint.checks:
            asserted: Any = node.args[0]
            if asserted.name == source:
                new = half.graph.create_node("call_function", node.target, (value, *node.args[1:]))
                new.meta = dict(node.meta)

    def _close(self, half: _Half, saved: Sequence[fx.Node]) -> list[fx.Node]:
        """Close the forward with its outputs and all that it saves; the saved numbers as nodes of the original."""
        known = [n for n in symbol_nodes(self.joint.graph_module.graph).values() if n in half.numbers]
        copies = len(self.joint.copies)
        returned: Any = self.rewritten.forward.graph.output_node().args[0]
        values = [half.image[n] for n in returned[:copies]]
        for node, value in zip(self.joint.copies, values, strict=True):
            new = half.graph.create_node("call_function", node.target, (half.image[self._placeholder(node)], value))
            new.meta = dict(node.meta)
        tensors = iter(returned[copies : self.rewritten.num_forward_outputs])
        outputs = [self._output(half, v, tensors) for v in self.outputs[: self.joint.num_fwd_outputs]]
        tensors_kept = sorted((half.image[n] for n in saved), key=_unwatched)
        kept = [*tensors_kept, *(half.numbers[n] for n in known)]
        output = half.graph.output((*outputs, *kept))
        notes = self.descriptions[: self.joint.num_fwd_outputs] + [saved_description(i) for i in range(len(kept))]
        output.meta["desc"] = notes
        output.meta["output_stack_traces"] = [None] * len(notes)
        return known

    def _placeholder(self, copy: fx.Node) -> fx.Node:
        over: Any = copy.args[0]
        return next(n for n in self.rewritten.forward.graph.nodes if n.name == over.name)

    def _output(self, half: _Half, value: Any, tensors: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        return half.number(value) if is_symbolic(value.meta.get("val")) else half.image[next(tensors)]

    def _backward(self, half: _Half, saved: Sequence[fx.Node], numbers: Sequence[fx.Node]) -> None:
        for node in numbers:
            half.numbers[node] = half.placeholder(node)
        taken = [n for n in self.rewritten.backward.graph.nodes if n.op == "placeholder"]
        for node, place in sorted(zip(saved, taken, strict=False), key=lambda pair: _unwatched(pair[0])):
            half.image[place] = half.placeholder(node)
            half.image[place].meta[HELD] = place.meta.get(HELD)
        for node, place in zip((n for n in self.given if is_tangent(n)), taken[len(saved) :], strict=True):
            half.image[place] = half.placeholder(node)
            half.image[place].meta[HELD] = place.meta.get(HELD)
        for node in self.rewritten.backward.graph.nodes:
            if node.op in ("call_function", "get_attr"):
                half.copy(node, True)
        returned: Any = self.rewritten.backward.graph.output_node().args[0]
        gradients = iter(returned)
        values = []
        for primal, value in zip(
            (n for n in self.given if not is_tangent(n)), self.outputs[self.joint.num_fwd_outputs :], strict=True
        ):
            if isinstance(primal.meta["val"], torch.Tensor):
                found = next(gradients)
                values.append(half.image[found] if isinstance(found, fx.Node) else None)
            else:
                values.append(value if not isinstance(value, fx.Node) else half.number(value))
        output = half.graph.output(tuple(values))
        output.meta["desc"] = self.descriptions[self.joint.num_fwd_outputs :]
        output.meta["output_stack_traces"] = [None] * len(values)


def _unwatched(node: fx.Node) -> bool:
    """Whether a saved tensor may be changed in place before the backward reads it: those come last."""
    return bool(node.meta.get(UNWATCHED))
