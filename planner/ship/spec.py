"""What an exported folder has to know besides its source, as plain JSON: the call, the structures, the modules."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections import namedtuple
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn

from passes._torch import TORCH_VERSION, pytree
from passes.printable import brief, shown
from passes.run import exported
from passes.run._torch import Autocast
from passes.trace.arguments import state_tensors
from passes.trace.capture import OutputLeaf, Traced
from passes.trace.overlaps import overlaps
from passes.trace.stores import MODEL
from passes.trace.structure import flatten
from passes.trace.templates import Again, Constant, Kept, Opaque, Slot, Template, Tree
from planner.decided import Decided
from planner.dropin.module import PlannedModule
from solvers.errors import PlannerError

Tensors = dict[str, torch.Tensor]


def spec_of(plan: Decided, module: PlannedModule) -> tuple[dict[str, Any], Tensors, Tensors]:
    """All that `spec.json` says, parameters and buffers by name, and the constants that the halves read."""
    traced, state = plan.prepared.traced, module._plan_state
    model = state.model
    given = state_tensors(model, traced.state)
    halves = plan.rewritten.forward, plan.rewritten.backward
    used = (str(n.target) for half in halves for n in half.graph.nodes if n.op == "get_attr")
    read = {name: attrgetter(name)(traced.graph_module) for name in used}
    _refuse_shared(traced, given, list(read.values()))
    tensors = _data(dict(zip((e.name for e in traced.state), given, strict=True)))
    constants = _data(read)
    spec = {
        "class": type(model).__name__,
        "torch": TORCH_VERSION,
        "device": plan.prepared.device.type,
        "signature": [[p.name, p.kind.name, p.default is not p.empty] for p in state.signature.parameters.values()],
        "inputs": _template(traced.input_template, "the sample"),
        "input_tensors": _inputs(traced, [asked for _, _, _, asked, *_ in state.first.key.inputs[1:]]),
        "outputs": _template(_with_copies(traced.output_template, model), None),
        "outputs_at": [_leaf(leaf) for leaf in traced.outputs],
        "replaced": [
            [s.path, s.name, s.template.index] for s in traced.settings
            if isinstance(s.template, Slot) and s.is_buffer(model)
        ],
        "state": _state(traced, model),
        "modules": _modules(model, traced),
        "looked_up": sorted({read.name for read in traced.reads.by_object.get(0, ())} - {"forward"}),
        "constants": [_described(name, value, "constant") for name, value in constants.items()],
        **{name: getattr(plan.step, name) for name in exported.STEP_FIELDS},
        "spacers": [plan.step.spacers.growth, plan.step.spacers.workspaces],
        "answers": [] if traced.guard is None else list(traced.guard.answers),
        "defaults": exported.plain_defaults(state.first.key.defaults),
        "autocast": _autocast(state.first.key.autocast),
        "backward_autocast": _autocast(plan.step.autocast),
    }
    spec["digest"] = exported.digest(spec)
    return spec, {n: t.contiguous() for n, t in tensors.items()}, {n: t.contiguous() for n, t in constants.items()}


def _refuse_shared(traced: Traced, state: Sequence[torch.Tensor], constants: Sequence[torch.Tensor]) -> None:
    """Refuse memory of two tensors of which one changes: in a folder each has its own.

    What is registered may change by `load_state_dict`, and a view of it that is kept with it.
    """
    names = [brief(entry.name) for entry in traced.state]
    for i, j in overlaps([*state, *constants], range(len(state))):
        if j >= len(state):
            raise PlannerError(
                f"a tensor of shape {tuple(constants[j - len(state)].shape)} that is not registered lies in the memory "
                f"of {names[i]}, which an exported folder does not keep: take the view in forward, or clone() it once."
            )
        if state[i].requires_grad or i in traced.mutated:
            raise PlannerError(
                f"{names[i]} shares memory with {names[j]}, which an exported folder does not keep: tie them (one "
                "parameter in both places), or clone() one of them."
            )


def _autocast(autocast: Autocast) -> list[list[str]]:
    return [[kind, str(dtype).removeprefix("torch.")] for kind, dtype in autocast]


def _leaf(leaf: OutputLeaf) -> dict[str, Any]:
    return {"path": leaf.path, "input": leaf.input, "index": leaf.index, "differentiated": leaf.differentiated}


def _data(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for name, tensor in tensors.items():
        if name == "__metadata__" or any("\ud800" <= c <= "\udfff" for c in name):
            raise PlannerError(f"a safetensors file cannot hold a tensor called {brief(name)!r}: give it another name.")
        if tensor.device.type == "meta" or type(tensor) not in (torch.Tensor, nn.Parameter):
            raise PlannerError(f"{brief(name)} has no data to export: materialize the model first (load its weights).")
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _described(name: str, tensor: torch.Tensor, kind: str) -> dict[str, Any]:
    return {
        "name": name, "kind": kind, "shape": list(tensor.shape), "stride": list(tensor.stride()),
        "dtype": str(tensor.dtype), "requires_grad": tensor.requires_grad, "device": tensor.device.type,
    }  # fmt: skip


def _input_nodes(traced: Traced) -> list[tuple[int, str, fx.Node]]:
    nodes = traced.placeholders[len(traced.state) : traced.num_primals]
    return [(i, name, n) for i, (name, n) in enumerate(zip(traced.input_names, nodes, strict=True))]


def _inputs(traced: Traced, asked: Sequence[bool]) -> list[dict[str, Any]]:
    """The step's inputs, and whether a gradient is asked for, which the trace does not have."""
    named = zip(_input_nodes(traced), asked, strict=True)
    return [{**_described(f"argument {n}", i.meta["val"], "input"), "requires_grad": a} for (_, n, i), a in named]


def _state(traced: Traced, model: nn.Module) -> list[dict[str, Any]]:
    pairs = zip(traced.state, state_tensors(model, traced.state), strict=True)
    return [_described(e.name, t, "parameter" if e.is_parameter else "buffer") for e, t in pairs]


def _modules(model: nn.Module, traced: Traced) -> list[dict[str, Any]]:
    """The module tree with every name: which tensors each part holds, and which parts are the same object."""
    index = {name: i for i, e in enumerate(traced.state) for name in (e.name, *e.aliases)}
    first: dict[int, str] = {}
    modes = traced.reads.modes
    result = []
    for path, module in model.named_modules(remove_duplicate=False):
        same_as = first.get(id(module))
        first.setdefault(id(module), path)
        prefix = f"{path}." if path else ""
        fleeting = module._non_persistent_buffers_set
        result.append({
            "path": path, "same_as": same_as, "class": type(module).__name__, "version": module._version,
            "training": modes.get(path),
            "parameters": [[n, index.get(prefix + n)] for n in module._parameters],
            "buffers": [[n, index.get(prefix + n), n not in fleeting] for n in module._buffers],
        })  # fmt: skip
    return result


def _template(template: Template, strict: str | None) -> dict[str, Any]:
    """A structure as plain JSON.

    Raises:
        PlannerError: with `strict`, for anything but tensors, tuples, lists, dicts and plain constants.
    """
    match template:
        case Slot(index):
            return {"kind": "tensor", "index": index}
        case Again() | Kept():
            raise PlannerError(
                "a list, dict or object is in several places of what the step takes and returns, which an export "
                "does not keep: pass and return one for each place."
            )
        case Constant(value):
            return _constant(value, strict) if strict else _returned(value)
        case Tree(spec, _, attributes) if attributes:
            what, kind = strict or "what forward returns", spec.type.__name__
            raise PlannerError(
                f"{what} holds a {kind} with the attribute {attributes[0][0]!r}, which an export does not keep: pass "
                f"and return it beside the {kind}."
            )
        case Tree(spec, children):
            return _tree(spec, iter([_template(c, strict) for c in children]), strict)
        case Opaque(prototype, attributes):
            name = type(prototype).__name__
            if strict is not None and not dataclasses.is_dataclass(prototype):
                raise PlannerError(f"{strict} holds a {name}: pass tensors, tuples, lists, dicts or dataclasses.")
            held = {key: _template(child, strict) for key, child in attributes}
            kept = {**_plain_attributes(prototype, strict and f"{strict}'s {name}", held), **held}
            return {"kind": "object", "type": name, "keys": list(kept), "children": list(kept.values())}


def _with_copies(template: Template, model: nn.Module) -> Template:
    """A template with what is in it of the model's own, which a folder has copies of."""
    match template:
        case Kept(place) if place.is_of_model:
            tensors, own = flatten(place.of({MODEL: model}))
            if tensors:
                raise PlannerError(
                    f"forward returns self{place}, with tensors that are not registered in it, which an export "
                    "does not have: register them as buffers, or return copies."
                )
            return own
        case Tree(_, children):
            return replace(template, children=tuple(_with_copies(child, model) for child in children))
    return template


def _constant(value: Any, strict: str | None) -> dict[str, Any]:
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"kind": "constant", "value": value}
    if strict is not None:
        raise PlannerError(f"{strict} holds a {type(value).__name__}: pass tensors, numbers, strings or None.")
    return {"kind": "constant", "value": None, "was": type(value).__name__}


def _returned(value: Any) -> dict[str, Any]:
    """A constant that forward returns; it is said where it cannot be kept."""
    constant = _constant(value, None)
    if "was" in constant:
        warnings.warn(f"forward returns a {constant['was']}, in whose place an export returns None.", stacklevel=6)
    return constant


def _tree(spec: Any, leaves: Iterator[dict[str, Any]], strict: str | None) -> dict[str, Any]:
    """A pytree's spec, all of its levels, with `leaves` in its places."""
    if spec.is_leaf():
        return next(leaves)
    below = spec.children() if hasattr(spec, "children") else spec.children_specs
    children = [_tree(child, leaves, strict) for child in below]
    return {**_container(spec, len(children), strict), "children": children}


def _container(spec: Any, count: int, strict: str | None) -> dict[str, Any]:
    kind: Any = spec.type
    if kind in (tuple, list, torch.Size):
        return {"kind": "list" if kind is list else "tuple"}
    keys = _keys(spec, count)
    if isinstance(kind, type) and issubclass(kind, dict) and not hasattr(kind, "to_tuple"):
        if odd := [key for key in keys if not isinstance(key, (str, int, float))]:
            raise PlannerError(f"a dict has the key {shown(odd[0])}: an export keeps strings and numbers alone.")
        return {"kind": "dict", "keys": keys}
    if strict is not None and kind is namedtuple:  # its fields come in order, whatever their names
        return {"kind": "tuple"}
    if strict is not None:
        raise PlannerError(f"{strict} holds a {kind.__name__}: pass tensors, tuples, lists or dicts.")
    if kind is namedtuple:
        return {"kind": "namedtuple", "type": spec.context.__name__, "keys": keys}
    return {"kind": "record", "type": kind.__name__, "keys": list(map(str, keys))}


def _keys(spec: Any, count: int) -> list[Any]:
    """The names that the container gives its children."""
    container = pytree.SUPPORTED_NODES[spec.type].unflatten_fn(list(range(count)), spec.context)
    if spec.type is namedtuple:
        return list(spec.context._fields)
    keyed, _ = pytree.tree_flatten_with_path(container)
    found = {leaf: path[0] for path, leaf in keyed}
    return [getattr(found[i], "key", getattr(found[i], "name", getattr(found[i], "idx", i))) for i in range(count)]


def _plain_attributes(prototype: Any, strict: str | None, others: Container[str]) -> dict[str, dict[str, Any]]:
    values = {k: v for k, v in getattr(prototype, "__dict__", {}).items() if not inspect.ismethod(v)}
    if dataclasses.is_dataclass(prototype):
        values |= {f.name: getattr(prototype, f.name, None) for f in dataclasses.fields(prototype)}
    return {name: _constant(None if name in others else value, strict) for name, value in values.items()}
