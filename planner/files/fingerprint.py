"""What makes two captured steps the same: a line per op, and one digest over all of them.

Nothing here depends on addresses, object ids, dictionary order or the hash seed: an op is its target, its constants,
and the places where its arguments come from; views are followed to what they view.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.alias import is_compute
from passes.printable import printable
from passes.trace.capture import Traced
from passes.trace.modules import module_path
from planner.prepared import Prepared

DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "b8",
}  # fmt: skip


@dataclass(frozen=True)
class OpLine:
    """One op of a step as people and files write it.

    Attributes:
        name: module path and node name, e.g. `blocks.0.mlp.0/addmm_2`; unique in its step.
        aten: the op, e.g. `aten.addmm.default`; empty for the planner's own bookkeeping ops.
        result: dtypes and shapes, e.g. `f32[1024, 256]`.
        id: short digest of the op, its constants and where its arguments come from.
    """

    name: str
    aten: str
    result: str
    id: str


def op_lines(prepared: Prepared) -> tuple[OpLine, ...]:
    """A line for each op of the problem, in its order, as it prints."""
    lowered = prepared.lowered
    digests = _Digests(prepared.traced)
    lines = []
    for i, (op, node) in enumerate(zip(lowered.problem.ops, lowered.nodes, strict=True)):
        path = module_path(owner(prepared, i))
        name = f"{path}/{op.name}" if path else op.name
        if node is None:
            lines.append(OpLine(name, "", "", _short(op.name)))
        else:
            lines.append(OpLine(name, str(node.target), describe_value(node.meta.get("val")), digests.of(node)))
    return tuple(lines)


def owner(prepared: Prepared, i: int) -> fx.Node | None:
    """The node that op `i` belongs to: its own; for taking a generator's state the op that draws after it."""
    nodes = prepared.lowered.nodes
    return nodes[i + 1] if prepared.lowered.problem.ops[i].optional and i + 1 < len(nodes) else nodes[i]


def tensor_lines(traced: Traced) -> tuple[str, ...]:
    """Parameters, buffers and inputs: kind, name, dtype and shape, whether a gradient is wanted."""
    lines = []
    for i, node in enumerate(traced.placeholders[: traced.num_primals]):
        value = describe_value(node.meta["val"])
        if i < len(traced.state):
            entry = traced.state[i]
            kind = "parameter" if entry.is_parameter else "buffer"
            tied = "".join(f" = {name}" for name in entry.aliases)
            lines.append(f"{kind} {entry.name}{tied}: {value}{' grad' if entry.requires_grad else ''}")
        else:
            lines.append(f"input {traced.input_names[i - len(traced.state)]}: {value}")
    return tuple(map(printable, lines))


def node_lines(traced: Traced) -> tuple[str, ...]:
    """Every op of a captured step, before it is lowered: `blocks.0.mlp.0/addmm_2 = aten.addmm.default -> f32[8, 4]`."""
    return tuple(
        f"{module_path(n)}/{n.name} = {n.target} -> {describe_value(n.meta.get('val'))}" for n in _computes(traced)
    )


def fingerprint(traced: Traced) -> str:
    """sha256 over everything that decides what the step computes: tensors, ops, constants, outputs."""
    digests = _Digests(traced)
    digest = hashlib.sha256()
    for line in (*tensor_lines(traced), *(f"{n.name} {digests.of(n)}" for n in _computes(traced))):
        digest.update(line.encode() + b"\n")
    outputs: Any = traced.graph_module.graph.output_node().args[0]
    digest.update(repr([digests.refer(o) for o in outputs]).encode())
    guard = traced.guard
    digest.update(repr(None if guard is None else guard.answers).encode())
    digest.update(repr((traced.mutated, [(o.path, o.input, o.differentiated) for o in traced.outputs])).encode())
    return digest.hexdigest()


def describe_value(value: Any) -> str:
    """`f32[4, 8]`, several results joined by commas."""
    if isinstance(value, torch.Tensor):
        dtype = DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{dtype}[{', '.join(str(int(s)) for s in value.shape)}]"
    if isinstance(value, (tuple, list)):
        return ", ".join(filter(None, (describe_value(v) for v in value)))
    return ""


class _Digests:
    """Short digests of a graph's nodes; an argument is named by the op it comes from."""

    def __init__(self, traced: Traced) -> None:
        self.root = traced.graph_module
        self.places = {n: f"primal {i}" for i, n in enumerate(traced.placeholders)}
        self.known: dict[fx.Node, str] = {}

    def of(self, node: fx.Node) -> str:
        if node not in self.known:
            self.known[node] = _short(f"{self._call(node)} -> {_layout(node.meta.get('val'))}")
        return self.known[node]

    def refer(self, value: Any) -> str:
        """How an argument is written: an op by its name, a view by what it is of, a constant by its value."""
        if isinstance(value, fx.Node):
            if value in self.places:
                return self.places[value]
            if value.op == "get_attr":
                return f"constant {_content(self.root, str(value.target))}"
            return value.name if is_compute(value) else self.of(value)
        if isinstance(value, (tuple, list)):
            return f"[{', '.join(self.refer(v) for v in value)}]"
        if isinstance(value, torch.device):
            return value.type
        return repr(value)

    def _call(self, node: fx.Node) -> str:
        named = [f"{key}={self.refer(value)}" for key, value in sorted(node.kwargs.items())]
        target = getattr(node.target, "__name__", "") if node.target.__class__.__module__ == "builtins" else node.target
        return f"{target}({', '.join([*(self.refer(a) for a in node.args), *named])})"


def _layout(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{describe_value(value)} {tuple(int(s) for s in value.stride())} {value.device.type}"
    if isinstance(value, (tuple, list)):
        return ", ".join(_layout(v) for v in value)
    return type(value).__name__


def _content(root: fx.GraphModule, target: str) -> str:
    value: Any = root
    for part in target.split("."):
        value = getattr(value, part)
    if not isinstance(value, torch.Tensor) or type(value) is not torch.Tensor or value.device.type == "meta":
        return describe_value(value)
    data = value.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{describe_value(value)} {hashlib.sha256(data).hexdigest()}"


def _computes(traced: Traced) -> Iterator[fx.Node]:
    return (n for n in traced.graph_module.graph.nodes if is_compute(n))


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
