"""What forward puts in the place of buffers: a planned step puts it there, too, and leaves the old tensor to others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from passes._torch import DisableTorchFunction
from passes.errors import OnlyInEager, StateChanged, Unsupported
from passes.run.tensors import is_laid_out

from .arguments import StateEntry
from .carried import Carries
from .settings import Setting, tensors_in


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


def replaced_in(
    model: nn.Module, entries: list[StateEntry], state: dict[str, torch.Tensor], arguments: Sequence[str],
    given: Sequence[torch.Tensor],
) -> list[Setting]:  # fmt: skip
    """The tensors that forward put in the place of buffers (`self.buffer = new`), under all of their names.

    Args:
        arguments: as above.
        given: the tensors that the step is given.

    Raises:
        Carries: some had no elements, and may be such.
    """
    found: list[Setting] = []
    for entry in entries:
        current, before = _attribute(model, entry.name), state[entry.name]
        if any(_attribute(model, name) is not current for name in entry.aliases):
            raise _one_for_two(entry.name, "a tensor of its own", f"it is {entry.aliases[0]}, too")
        if current is before:
            continue
        if not isinstance(current, torch.Tensor) or current.shape != before.shape or current.dtype != before.dtype:
            refused = StateChanged(
                "buffer replaced in forward", entry.name, "its shape or type changes between steps",
                "Keep the buffer's shape and dtype, or update it outside forward; where it only grows, call the model "
                "with the largest batch before planning.",
            )  # fmt: skip
            empty = [e.name for e in entries if not (e.is_parameter or state[e.name].numel())]
            raise Carries(refused, (*arguments, *empty)) if entry.name in empty else refused
        if type(current) is not type(before) or tensors_in(current) is None or _lies_in(current, given):
            raise _one_for_two(entry.name, "a tensor that the step is given, or one in its memory", "both are one then")
        if not is_laid_out(current, before.stride()):
            raise StateChanged(
                "buffer replaced in forward by one in other strides", entry.name, "the next step would be another one",
                "Assign its contiguous() or clone().",
            )  # fmt: skip
        for name in (entry.name, *entry.aliases):
            path, _, leaf = name.rpartition(".")
            found.append(Setting(path, leaf, current))
    return found


def _lies_in(tensor: torch.Tensor, given: Sequence[torch.Tensor]) -> bool:
    with DisableTorchFunction():  # other modes would be told of it
        return storage_place(tensor) in map(storage_place, given)


def storage_place(tensor: torch.Tensor) -> Any:
    """What tells a tensor's memory from others'."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _one_for_two(name: str, by: str, why: str) -> OnlyInEager:
    return OnlyInEager(
        "buffer replaced in forward", name, f"by {by}: {why}, and what changes the one changes the other",
        "Copy the value: self.buffer.copy_(new), or a clone() of it.",
    )  # fmt: skip


def _attribute(model: nn.Module, name: str) -> Any:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path) if path else model
    return getattr(module, leaf)
