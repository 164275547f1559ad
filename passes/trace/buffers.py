"""What forward leaves in buffers: one in whose place it puts another tensor is written in place by a planned step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from passes.errors import OnlyInEager, StateChanged, Unsupported
from passes.run.tensors import is_laid_out

from .arguments import StateEntry
from .carried import Carries


def refuse_with_gradient(
    model: nn.Module, entries: list[StateEntry], state: dict[str, torch.Tensor], own: Sequence[torch.Tensor],
    arguments: Sequence[str],
) -> None:  # fmt: skip
    """Of a buffer, a planned step writes the value alone: what is computed from it later would pass no gradient on.

    Args:
        arguments: the names of those that are arguments of the step.

    Raises:
        Carries: they were replaced, and may be such.
        Unsupported: one was changed in place.
    """
    replaced = []
    for entry, before in zip(entries, own, strict=False):
        current, given = _attribute(model, entry.name), state[entry.name]
        usual = current is given and before.requires_grad
        if entry.is_parameter or usual or not isinstance(current, torch.Tensor) or not current.requires_grad:
            continue
        if current is given:
            raise _with_gradient(entry.name)
        replaced.append(entry.name)
    if replaced:
        raise Carries(_with_gradient(replaced[0]), (*arguments, *replaced))


def _with_gradient(name: str) -> Unsupported:
    return Unsupported(
        "buffer that forward gives a gradient", name, "a planned step writes its value alone, and what "
        "is computed from it after forward would pass no gradient on",
        "Return it from forward, or put its detach() there.",
    )  # fmt: skip


def write_back(
    model: nn.Module, entries: list[StateEntry], state: dict[str, torch.Tensor], arguments: Sequence[str]
) -> dict[str, torch.Tensor]:
    """`self.buffer = new` becomes an update of the buffer in place, as `state_dict` shows it; those replaced so.

    Args:
        arguments: as above.

    Raises:
        Carries: some had no elements, and may be such.
    """
    originals = {id(t) for t in state.values()}
    updates: list[tuple[torch.Tensor, torch.Tensor]] = []
    replaced: dict[str, torch.Tensor] = {}
    for entry in entries:
        current = _attribute(model, entry.name)
        given = state[entry.name]
        if any(_attribute(model, name) is not current for name in entry.aliases):
            raise _one_for_two(entry.name, "a tensor of its own", f"it is {entry.aliases[0]}, too")
        if current is given:
            continue
        if not isinstance(current, torch.Tensor) or current.shape != given.shape or current.dtype != given.dtype:
            refused = StateChanged(
                "buffer replaced in forward", entry.name, "its shape or type changes between steps",
                "Keep the buffer's shape and dtype, or update it outside forward; where it only grows, call the model "
                "with the largest batch before planning.",
            )  # fmt: skip
            empty = [e.name for e in entries if not (e.is_parameter or state[e.name].numel())]
            raise Carries(refused, (*arguments, *empty)) if entry.name in empty else refused
        if id(current) in originals or type(current) is not type(given):
            raise _one_for_two(entry.name, "another tensor that it holds", "both are one then")
        if not is_laid_out(current, given.stride()):
            raise Unsupported(
                "buffer replaced in forward by one in other strides", entry.name, "a planned step writes its value "
                "alone, and sums over other strides have other bits", "Assign its contiguous() or clone().",
            )  # fmt: skip
        updates.append((given, current))
        replaced[entry.name] = given
    with torch.no_grad():
        for given, current in updates:
            given.copy_(current)
    return replaced


def _one_for_two(name: str, by: str, why: str) -> OnlyInEager:
    return OnlyInEager(
        "buffer replaced in forward", name, f"by {by}: {why}, and a planned step writes the value alone",
        "Copy the value: self.buffer.copy_(new), or a clone() of it.",
    )  # fmt: skip


def refuse_returned(replaced: Mapping[str, torch.Tensor], returned: Iterable[torch.Tensor]) -> None:
    """The memory of a buffer that forward replaces has its new value once the step has run."""
    ids = {id(tensor) for tensor in returned}
    for name, given in replaced.items():
        if id(given) in ids:
            raise Unsupported(
                "buffer returned that forward replaces", name, "a planned step writes the new value in its place",
                "Return a clone() of it.",
            )  # fmt: skip


def refuse_needed(error: Exception, replaced: Iterable[str]) -> None:
    """Say of buffers that forward replaces that the backward may need what they were."""
    if replaced and "modified by an inplace operation" in str(error):
        raise Unsupported(
            "buffer replaced in forward whose old value the backward needs", ", ".join(replaced),
            "a planned step writes the new value in its place", "Compute with its clone().",
        ) from error  # fmt: skip


def _attribute(model: nn.Module, name: str) -> Any:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path) if path else model
    return getattr(module, leaf)
