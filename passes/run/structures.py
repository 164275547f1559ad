"""Inputs and outputs of an exported step, by the structures that `spec.json` tells. Copied into the folder."""

from __future__ import annotations

import inspect
from collections import OrderedDict, namedtuple
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from ._torch import register_pytree_node
from .errors import PlannerError as ExportError


def signature_of(spec: dict[str, Any]) -> inspect.Signature:
    kinds = {k.name: k for k in inspect._ParameterKind}
    return inspect.Signature([
        inspect.Parameter(name, kinds[kind], default=None if optional else inspect.Parameter.empty)
        for name, kind, optional in spec["signature"]
    ])  # fmt: skip


def take(template: dict[str, Any], value: Any, path: str, tensors: dict[int, torch.Tensor]) -> None:
    """Collect the tensors of `value`, which must have the structure of `template`."""
    kind = template["kind"]
    if kind == "tensor":
        _take_tensor(template, value, path, tensors)
    elif kind == "constant":
        if not _is_same(value, template["value"]):
            given = repr(value) if isinstance(value, (int, float, str, type(None))) else type(value).__name__
            raise ExportError(f"argument {path}: got {given}, the step was planned for {template['value']!r}.")
    elif kind == "dict":
        if not isinstance(value, dict) or list(value) != template["keys"]:
            got = list(value) if isinstance(value, dict) else type(value).__name__
            raise ExportError(f"argument{path and ' ' + path}: got {got}, the step was planned for {template['keys']}.")
        for key, child in zip(template["keys"], template["children"], strict=True):
            take(child, value[key], f"{path}[{key!r}]" if path else key, tensors)
    elif kind == "object":
        for key, child in zip(template["keys"], template["children"], strict=True):
            if not hasattr(value, key):
                got = f"got {type(value).__name__}, which has no {key}"
                raise ExportError(f"argument {path}: {got}; the step was planned for a {template['type']}.")
            take(child, getattr(value, key), f"{path}.{key}", tensors)
    else:
        if not isinstance(value, (tuple, list)) or len(value) != len(template["children"]):
            raise ExportError(f"argument {path}: a {kind} of {len(template['children'])} items was planned for.")
        for i, child in enumerate(template["children"]):
            take(child, value[i], f"{path}[{i}]", tensors)


def _is_same(value: Any, planned: Any) -> bool:
    """Whether an argument is the planned constant, of its type and with its bits."""
    if isinstance(planned, float):
        return isinstance(value, float) and float.__repr__(value) == float.__repr__(planned)
    alike = isinstance(value, type(planned)) and isinstance(value, bool) == isinstance(planned, bool)
    return alike and bool(value == planned)


def _take_tensor(template: dict[str, Any], value: Any, path: str, tensors: dict[int, torch.Tensor]) -> None:
    if not isinstance(value, torch.Tensor):
        raise ExportError(f"argument {path}: got {type(value).__name__}, the step was planned for a tensor.")
    if any(value is t for i, t in tensors.items() if i != template["index"]):
        raise ExportError(f"argument {path} is passed twice, but the plan's sample had two tensors: pass a copy.")
    if tensors.setdefault(template["index"], value) is not value:
        raise ExportError(
            f"argument {path} must be the very tensor that another argument is, as in the plan's sample: plan with a "
            "sample whose tensors are distinct."
        )


class Record(OrderedDict[str, Any]):
    """A result with named fields, reached as `r.loss`, `r["loss"]` or `r[0]`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self:
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]

    def to_tuple(self) -> tuple[Any, ...]:
        """The values in order."""
        return tuple(super(Record, self).__getitem__(key) for key in self)


register_pytree_node(Record, lambda r: (list(r.to_tuple()), list(r)), lambda v, k: Record(zip(k, v, strict=True)))


def build(template: dict[str, Any], leaves: Sequence[Any]) -> Any:
    """Put tensors into the structure of `template`."""
    kind = template["kind"]
    if kind == "tensor":
        return leaves[template["index"]]
    if kind == "constant":
        return template["value"]
    children = [build(child, leaves) for child in template["children"]]
    if kind in ("tuple", "list"):
        return tuple(children) if kind == "tuple" else children
    if kind == "namedtuple":
        made: Any = namedtuple("Output", template["keys"], rename=True)  # type: ignore[misc]
        made.__name__ = made.__qualname__ = template["type"]
        return made(*children)
    named = dict(zip(template["keys"], children, strict=True))
    if kind == "object":
        return SimpleNamespace(**named)
    return Record(named) if kind == "record" else named
