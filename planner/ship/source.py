"""Readable Python source of a planned half: one line per op, grouped by module, each value freed after its last use."""

from __future__ import annotations

import keyword
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from passes._torch import OpOverload
from passes.codegen import Handover, hand_over, space
from passes.fuse.records import FUSED
from passes.printable import printable
from passes.run import gradients, random
from passes.trace import routes
from passes.trace.guards import Guard, Ref
from passes.trace.modules import module_path
from planner.files.fingerprint import describe_value
from solvers.errors import MIB, PlannerError

NAMESPACES = frozenset({"aten", "prims", "prim", "mkldnn", "onednn", "quantized", "_c10d_functional"})
GUARD = '''"""What the planned step takes as given about buffers and inputs: the answers that the model's Python got."""

import torch


def tensors(result):
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


@torch.no_grad()
def answers(given):
{body}
'''
# Functions of ours that a half may call -> the function that it calls in a folder, which holds a copy of its file.
HELPERS: dict[Any, Callable[..., Any]] = {
    random.get_rng_state: random.get_rng_state,
    random.run_with_rng_state: random.run_with_rng_state,
    **{op: fused.kernel for fused in FUSED for op in fused.overloads},
    routes.GRADIENT_OF: gradients.gradient_of,
    routes.SUM_OF_SELECTED: gradients.sum_of_selected,
}
# Names that the source itself uses.
RESERVED = frozenset({
    "torch", "aten", "values", "constants", "complex", "float", "slice", "handed_over", "spacers", "SPACERS",
    *(f.__name__ for f in HELPERS.values()),
})  # fmt: skip


@dataclass(frozen=True)
class Half:
    """One half to be written.

    Attributes:
        name: `forward` or `backward`, the function's name.
        names: names to use for placeholders instead of the graph's.
        remarks: what to say beside a placeholder, by its node.
        doc: docstring of the file.
        handovers: which results it yields before its end; None where it returns them all.
        spaced: the spacers around nodes, by their names.
    """

    name: str
    graph: fx.Graph
    names: Mapping[fx.Node, str]
    remarks: Mapping[fx.Node, str]
    doc: str
    handovers: tuple[Handover, ...] | None = None
    spaced: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def write_half(half: Half) -> str:
    """The half as a module that defines `forward(values, constants)` or `backward(values, constants)`.

    Raises:
        PlannerError: an op belongs to a library other than torch, or an argument cannot be written as source.
    """
    body = "\n".join(_body(half))
    called = {f for f in HELPERS.values() if re.search(rf"\b{f.__name__}\b[(,]", body)}
    lines = sorted(f"from .{f.__module__.rpartition('.')[2]} import {f.__name__}\n" for f in called)
    lines = ["from .arena import SPACERS\n", *lines] if half.spaced else lines
    imports = f"\n{''.join(lines)}" if lines else ""
    return (
        f'{docstring(half.doc)}\n\nimport torch\n{imports}\naten = torch.ops.aten\n\n\n'
        f"def {half.name}(values, constants):\n{body}\n"
    )


def write_guard(guard: Guard | None) -> str:
    """What the model's Python asks about its inputs and buffers, as a module that defines `answers(given)`.

    Raises:
        PlannerError: a call cannot be written as source.
    """
    lines, asked = [], []
    for i, call in enumerate(guard.tape if guard else ()):
        names = [f"value_{k}" for k in call.results] or [f"answer_{i}"]
        arguments = [literal(a, {}) for a in call.args] + [f"{k}={literal(v, {})}" for k, v in call.kwargs.items()]
        comma = "," if len(names) == 1 and call.count else ""
        called = f"{_python_name(call.func)}({', '.join(arguments)})"
        lines.append(f"    {', '.join(names)}{comma} = " + (f"tensors({called})" if call.count else called))
        asked += names if call.asks else []
    given = [f"    value_{k} = given[{k}]" for k in sorted(guard.given if guard else ())]
    body = "\n".join([*given, *lines, f"    return ({''.join(f'{name}, ' for name in asked)})"])
    return GUARD.format(body=body)


def _python_name(function: Any) -> str:
    name = torch.overrides.resolve_name(function)
    if not name or not name.startswith("torch."):
        raise PlannerError(f"{function!r}, which the model calls to look at its inputs, cannot be written as source.")
    return name


def docstring(text: str) -> str:
    """`text` as a docstring that reads like it and holds nothing else, whatever names are in it."""
    lines = [printable(line).replace("\\", "\\\\").replace('"', '\\"') for line in text.split("\n")]
    return '"""{}"""'.format("\n".join(lines))


def identifier(text: str, taken: set[str]) -> str:
    """A Python name that reads like `text` and is not in `taken`; it is added.

    ASCII alone: Python takes some names of other letters for the same.
    """
    base = re.sub(r"[^0-9A-Za-z_]+", "_", text).strip("_")[:80] or "value"
    if base[0].isdigit() or keyword.iskeyword(base) or base in RESERVED:
        base = f"_{base}"
    name, count = base, 1
    while name in taken:
        count += 1
        name = f"{base}_{count}"
    taken.add(name)
    return name


def _body(half: Half) -> Iterator[str]:
    placeholders = [n for n in half.graph.nodes if n.op == "placeholder"]
    names = {n: half.names.get(n, _variable(n.name)) for n in half.graph.nodes}
    dead, leaving = _last_uses(half.graph), _leaving(half)
    if placeholders:
        yield "    ("
        for node in placeholders:
            remark = half.remarks.get(node, describe_value(node.meta.get("val")))
            yield f"        {names[node]},  # {printable(remark)}"
        yield "    ) = values"
    yield "    values.clear()"
    place: tuple[str, bool] | None = None
    for node in half.graph.nodes:
        if node.op in ("call_function", "get_attr"):
            again = bool(node.meta.get("recompute_of"))
            here = (module_path(node), again)
            if here != place and node.target is not operator.getitem:
                yield f"\n    # {here[0] or '(top level)'}{', recomputed' if again else ''}"
                place = here
            before, after = space(half.spaced.get(node.name, ()))
            yield from (f"    {line.rstrip()}" for line in before)
            yield _statement(node, names, dead.get(node, ()), again)
            yield from (f"    {line.rstrip()}" for line in after)
        elif node.op == "output" and half.handovers is None:
            yield from _return(node, names)
        if left := leaving.get(node.name):
            yield f"    {hand_over([literal(value, names) for value in left])}"


def _leaving(half: Half) -> dict[str, list[Any]]:
    """What the half yields after a node, by the node's name."""
    if half.handovers is None:
        return {}
    output = half.graph.output_node()
    values: Any = output.args[0]
    early = {i for handover in half.handovers for i in handover.outputs}
    found = {handover.after: [values[i] for i in handover.outputs] for handover in half.handovers}
    return {**found, output.name: [v for i, v in enumerate(values) if v is not None and i not in early]}


def _statement(node: fx.Node, names: Mapping[fx.Node, str], dead: tuple[fx.Node, ...], again: bool) -> str:
    free = f"; {' = '.join(names[d] for d in dead)} = None" if dead else ""
    value = node.meta.get("val")
    remark = describe_value(value)
    if again:
        remark = f"{remark} again: {_size(value)} not kept since the forward"
    return f"    {names[node]} = {_expression(node, names)}{free}" + (f"  # {remark}" if remark else "")


def _expression(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    if node.op == "get_attr":
        return f"constants[{str(node.target)!a}]"
    if node.target is operator.getitem:
        return f"{literal(node.args[0], names)}[{literal(node.args[1], names)}]"
    arguments = [literal(a, names) for a in node.args]
    arguments += [f"{key}={literal(value, names)}" for key, value in node.kwargs.items()]
    return f"{function_name(node.target)}({', '.join(arguments)})"


def _return(node: fx.Node, names: Mapping[fx.Node, str]) -> Iterator[str]:
    values: Any = node.args[0]
    yield "\n    return ("
    for value in values:
        size = f"  # {describe_value(value.meta.get('val'))}" if isinstance(value, fx.Node) else ""
        yield f"        {literal(value, names)},{size}"
    yield "    )"


def _variable(name: str) -> str:
    """A node's name, out of the way of the helpers'."""
    if name.startswith("get_rng_state"):
        return name.removeprefix("get_")
    return f"{name}_" if name in RESERVED else name


def _last_uses(graph: fx.Graph) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """For each node the values that die with it (fx's own rule: after the last use, or at once when unused)."""
    dead: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        fresh = [n for n in node.all_input_nodes if n not in seen]
        seen.update(fresh)
        if node.op == "output":
            continue
        if not node.users and node.op != "placeholder":
            fresh.append(node)
        dead[node] = fresh
    return {node: tuple(values) for node, values in dead.items()}


def function_name(target: Any) -> str:
    """How a call's target is written: `aten.addmm.default`.

    Raises:
        PlannerError: it is not an op of torch's own, so the folder would not run with torch alone.
    """
    if target in HELPERS:
        return HELPERS[target].__name__
    if isinstance(target, OpOverload) and target.namespace in NAMESPACES:
        return str(target) if target.namespace == "aten" else f"torch.ops.{target}"
    raise PlannerError(f"{target} is not an op of torch: an exported folder runs with torch alone, and cannot hold it.")


def literal(value: Any, names: Mapping[fx.Node, str]) -> str:
    """An argument as Python source."""
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, OpOverload):
        return function_name(value)
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, (int, str)):  # whose subclasses may be shown otherwise (enums)
        return int.__repr__(value) if isinstance(value, int) else ascii(str.__str__(value))
    if isinstance(value, float):
        text = float.__repr__(value)
        return text if math.isfinite(value) else f"float({text!r})"
    if isinstance(value, complex):
        return f"complex({literal(value.real, names)}, {literal(value.imag, names)})"
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, Ref):
        return f"value_{value.index}"
    if isinstance(value, slice):
        return f"slice({literal(value.start, names)}, {literal(value.stop, names)}, {literal(value.step, names)})"
    if value is Ellipsis:
        return "..."
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, (list, tuple)):
        inner = ", ".join(literal(v, names) for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    raise PlannerError(f"the argument {value!r} of type {type(value).__name__} cannot be written as source.")


def _size(value: Any) -> str:
    tensors = [v for v in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(v, torch.Tensor)]
    size = sum(t.numel() * t.element_size() for t in tensors)
    return f"{size / MIB:.2f} MiB" if size >= MIB / 100 else f"{size} bytes"
