"""A joint graph that AOT autograd traced, as a step that the passes know: concrete sizes, nothing written in place.

Dynamo's sizes can be symbols, and Inductor's joint graphs copy new values over their inputs. The passes want numbers
and new values as outputs, so they work on a second graph, node for node the first without its numbers and copies;
`passes.rewrite` splits that one, and `halves` says the same of the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes._torch import FakeTensorMode, pytree
from passes.errors import Unsupported
from passes.trace.capture import Traced

from ._torch_compile import concrete, is_plain_primal, is_symbolic, is_tangent, replaced_inputs, symbols_of

aten = torch.ops.aten
UNUSED: Any = None  # a call's structure and reads are Dynamo's to guard


@dataclass(frozen=True)
class Joint:
    """A joint graph and its image.

    Attributes:
        traced: the image, as a captured step; a node has the name of its original.
        copies: `copy_` nodes of the original that write new values over inputs, in order.
        checks: nodes of the original that assert a tensor of the forward; the image has it as a further output.
        sizes: what each symbol was taken to be.
    """

    graph_module: fx.GraphModule
    num_fwd_outputs: int
    traced: Traced
    copies: tuple[fx.Node, ...]
    checks: tuple[fx.Node, ...]
    sizes: dict[str, int]


def read_joint(gm: fx.GraphModule, num_fwd_outputs: int, sizes: Mapping[str, int]) -> Joint:
    """The image of a joint graph.

    Args:
        sizes: what symbols are to be taken for, by name; those not named are what the graph was traced with.

    Raises:
        Unsupported: the graph holds something that a partition of ours would not keep.
    """
    return _Reader(gm, num_fwd_outputs, sizes).read()


class _Reader:
    def __init__(self, gm: fx.GraphModule, num_fwd_outputs: int, sizes: Mapping[str, int]) -> None:
        self.gm, self.num_fwd_outputs, self.sizes = gm, num_fwd_outputs, sizes
        self.mode = FakeTensorMode()
        self.graph = fx.Graph()
        self.image: dict[fx.Node, Any] = {}
        self.copies: list[fx.Node] = []
        self.checks: list[fx.Node] = []

    def read(self) -> Joint:
        nodes = list(self.gm.graph.nodes)
        given = [n for n in nodes if n.op == "placeholder"]
        primals = [n for n in given if not is_tangent(n)]
        for node in (*primals, *(n for n in given if is_tangent(n))):
            self._placeholder(node)
        for node in nodes:
            if node.op in ("call_function", "get_attr"):
                self._call(node)
        outputs = self._outputs()
        mark_backward(self.graph, [n for n in self.graph.nodes if n.op == "placeholder" and is_tangent(n)])
        image = fx.GraphModule(self.gm, self.graph)
        tensors = [self.image[n] for n in primals if isinstance(self.image[n], fx.Node)]
        results = pytree.tree_leaves(self.gm.graph.output_node().args[0], is_leaf=lambda v: v is None)
        replaced = [self.image[n] for n in replaced_inputs(self.gm.graph, len(results))]
        changed = [*(self._of(n, 0) for n in self.copies), *replaced]
        mutated = tuple(map(tensors.index, changed))
        traced = Traced(
            graph_module=image, pristine=self.graph, state=(), input_template=UNUSED, input_names=(),
            num_inputs=len(tensors), output_template=UNUSED, outputs=(), mutated=mutated,
            num_outputs=outputs - len(mutated), reads=UNUSED,
        )  # fmt: skip
        symbols = dict.fromkeys(s for n in nodes for s in _symbols(n))
        sizes = {s: self._size(s) for s in symbols}
        return Joint(self.gm, self.num_fwd_outputs, traced, tuple(self.copies), tuple(self.checks), sizes)

    def _of(self, copy: fx.Node, position: int) -> fx.Node:
        """The image of an argument of a copy."""
        node: Any = copy.args[position]
        image: fx.Node = self.image[node]
        return image

    def _placeholder(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            new = self.graph.placeholder(node.name)
            new.meta = self._meta(node)
            self.image[node] = new
        elif is_symbolic(value) and is_plain_primal(node):
            self.image[node] = concrete(value, self.sizes)
        else:
            raise Unsupported(
                f"an input of the kind {type(value).__name__}", node.name, "it is neither a tensor nor a number",
                "Leave what makes it (functional generators, backward state) switched off.",
            )  # fmt: skip

    def _call(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if is_symbolic(value):
            self.image[node] = concrete(value, self.sizes)
        elif _copies_over_input(node):
            self.copies.append(node)
        elif node.op == "get_attr" and isinstance(getattr(self.gm, str(node.target), None), fx.GraphModule):
            user = next(iter(node.users), node)
            raise Unsupported(
                f"higher-order op {user.target}", _place(user), "it runs graphs of its own, which are not planned",
                "Leave this function out of the compilation (torch.compiler.disable), or write it in plain ops.",
            )  # fmt: skip
        elif _checks_forward(node):
            self.checks.append(node)
        elif value is None:
            raise Unsupported(
                f"op {node.target}", _place(node), "it has an effect rather than a result",
                "Keep printing and the like out of the compiled code.",
            )  # fmt: skip
        else:
            new = self.graph.node_copy(node, lambda n: self.image[n])
            new.name = node.name
            new.meta = self._meta(node)
            self.image[node] = new

    def _meta(self, node: fx.Node) -> dict[str, Any]:
        names = ("nn_module_stack", "fwd_nn_module_stack", "partitioner_tag")
        kept: dict[str, Any] = {k: node.meta[k] for k in names if k in node.meta}
        if any(v.layout != torch.strided for v in pytree.tree_leaves(node.meta["val"]) if isinstance(v, torch.Tensor)):
            raise Unsupported(
                f"op {node.target}", _place(node), "its result is a sparse tensor",
                "Use dense gradients (nn.Embedding(sparse=False)) in the compiled code.",
            )  # fmt: skip
        return {**kept, "val": pytree.tree_map(self._concrete, node.meta["val"])}

    def _concrete(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return concrete(value, self.sizes)
        parts = (tuple(value.shape), tuple(value.stride()), value.storage_offset(), value.untyped_storage().nbytes())
        size, stride, offset, size_bytes = (pytree.tree_map(lambda n: concrete(n, self.sizes), part) for part in parts)
        with self.mode:
            flat = torch.empty(size_bytes // value.element_size(), dtype=value.dtype, device=value.device)
            return flat.as_strided(size, stride, offset)

    def _outputs(self) -> int:
        """Set the image's outputs: new values of inputs, the forward's tensors, the gradients. How many are forward."""
        values = pytree.tree_leaves(self.gm.graph.output_node().args[0], is_leaf=lambda v: v is None)
        returned = [self.image.get(v) if isinstance(v, fx.Node) else None for v in values[: self.num_fwd_outputs]]
        forward = [self._of(n, 1) for n in self.copies] + [v for v in returned if isinstance(v, fx.Node)]
        checked = (self._of(n, 0) for n in self.checks)
        forward += dict.fromkeys(n for n in checked if n.op != "placeholder" and n not in forward)
        gradients = [
            self.image[g] if isinstance(g, fx.Node) else None
            for p, g in zip(self._primals(), values[self.num_fwd_outputs :], strict=True)
            if isinstance(self.image[p], fx.Node)
        ]
        self.graph.output((*forward, *gradients))
        return len(forward)

    def _primals(self) -> list[fx.Node]:
        return [n for n in self.gm.graph.nodes if n.op == "placeholder" and not is_tangent(n)]

    def _size(self, symbol: str) -> int:
        for node in self.gm.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt) and str(value) == symbol:
                return int(concrete(value, self.sizes))
        return 0


def mark_backward(graph: fx.Graph, tangents: Sequence[fx.Node]) -> None:
    """What reads a gradient, or serves no forward output, is of the backward; passes may have lost the tags."""
    late: set[fx.Node] = set(tangents)
    for node in graph.nodes:
        if not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    outputs: Any = graph.output_node().args[0]
    needed = {n for n in outputs if isinstance(n, fx.Node) and n not in late}
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
        elif node.op == "call_function" and "partitioner_tag" not in node.meta:
            late.add(node)
    for node in late:
        node.meta["partitioner_tag"] = "is_backward"


def _symbols(node: fx.Node) -> tuple[str, ...]:
    value = node.meta.get("val")
    return symbols_of(value) if node.op == "placeholder" and value is not None else ()


def _checks_forward(node: fx.Node) -> bool:
    """Whether the node asserts a tensor of the forward, as `one_hot` does of its classes."""
    asserts = node.target in (aten._assert_async.default, aten._assert_async.msg)
    return asserts and isinstance(node.args[0], fx.Node) and node.meta.get("partitioner_tag") != "is_backward"


def _copies_over_input(node: fx.Node) -> bool:
    """Whether the node writes a new value over an input when the forward ends."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return False
    over = node.args[0] if node.args else None
    forward = node.meta.get("partitioner_tag") != "is_backward"
    if node.target is aten.copy_.default and isinstance(over, fx.Node) and over.op == "placeholder" and forward:
        return True
    raise Unsupported(
        f"in-place op {node.target}", _place(node), "its order is part of its meaning",
        "Use the out-of-place form, or leave this function out of the compilation (torch.compiler.disable).",
    )  # fmt: skip


def _place(node: fx.Node) -> str:
    """The user's file and line, where the trace kept it."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    files = [line for line in lines if line.startswith("File")]
    return f"{node.name} ({files[-1]})" if files else node.name
