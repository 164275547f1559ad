"""What a forward asks about the values of tensors, found by running it on the sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from passes._torch import FakeTensor, TorchDispatchMode, WeakIdKeyDictionary, dense_parts, is_distributed, pytree
from passes.alias import written_tensors
from passes.memory import place

from .answers import Asked, Listening, asked_at, is_question, looks_for_elements
from .arguments import StateEntry, lend_attributes, state_entries, state_tensors
from .carried import carried
from .nodes import twin
from .once import may_run, once


class Asking(Listening):
    """Writes down what Python asks about the values of tensors while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Asked] = []
        self.checks = WeakIdKeyDictionary()  # tensors that tell whether there are elements of a kind

    def hear(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        is_check = looks_for_elements(func) or (bool(given) and all(t in self.checks for t in given))
        if is_question(func, args):
            self.asked.append(Asked(asked_at(), bool(result), is_check))
        elif is_check and isinstance(result, Tensor):
            self.checks[result] = None
        return result


class _Unwritten(TorchDispatchMode):
    """Raises before something is written into these tensors."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.given = {place(part.untyped_storage()) for t in given for part in dense_parts(t) if part.nbytes}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = (part for t in written_tensors(func, args, kwargs or {}) for part in dense_parts(t))
        if any(place(part.untyped_storage()) in self.given for part in written):
            raise LookupError("the forward writes into a parameter")
        return func(*args, **(kwargs or {}))


def sample_answers(
    model: nn.Module, bound: Mapping[str, Any], loss_fn: Callable[..., Any] | None
) -> tuple[Asked, ...] | None:
    """What the forward asks on the sample; None where it cannot run or fails, or answers otherwise with other draws.

    It is given copies of the buffers, and ends where it writes into a parameter.
    """
    entries = state_entries(model, carried(bound))
    given = state_tensors(model, entries)
    if not may_run(model, bound) or any(isinstance(t, FakeTensor) or is_distributed(t) for t in given):
        return None
    parameters = [t for entry, t in zip(entries, given, strict=True) if entry.is_parameter]
    found = []
    try:
        for first in (True, False):
            state = {e.name: _stand_in(e, t) for e, t in zip(entries, given, strict=True)}
            with once(model, bound, loss_fn, state) as (_, run, _), _Unwritten(parameters), Asking() as asking:
                for device in () if first else {t.device for t in given}:
                    torch.rand(1, device=device)
                run()
            found.append(asking.asked)
    except Exception:  # noqa: BLE001 - whatever it is: the trace says what there is to say
        return None
    return tuple(found[0]) if found[0] == found[1] else None


def _stand_in(entry: StateEntry, tensor: Tensor) -> Tensor:
    made = tensor.detach().requires_grad_(tensor.requires_grad) if entry.is_parameter else twin(tensor)
    return lend_attributes(tensor, made)
