"""Parameters that a step writes to: planning runs it several times, and leaves their values as they were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from passes._torch import TorchDispatchMode, dense_parts, local_part
from passes.alias import written_tensors
from passes.memory import place


@contextmanager
def undone_writes(parameters: Mapping[str, torch.Tensor], written: set[str]) -> Iterator[None]:
    """Undo what the block writes to parameters, and add the names of those to `written`."""
    here = {name: local_part(t).detach() for name, t in parameters.items()}
    mode = _Writes(
        {place(p.untyped_storage()): (name, t) for name, t in here.items() for p in dense_parts(t) if p.nbytes}
    )
    try:
        with mode:
            yield
    finally:
        with torch.no_grad():
            for name, value in mode.before.items():
                here[name].copy_(value)
        written.update(mode.before)


class _Writes(TorchDispatchMode):
    """Copies a parameter right before the first op that writes to it."""

    def __init__(self, known: Mapping[int, tuple[str, torch.Tensor]]) -> None:
        super().__init__()
        self.known, self.before = known, dict[str, torch.Tensor]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in written_tensors(func, args, kwargs or {}):
            for part in dense_parts(tensor):
                name, whole = self.known.get(place(part.untyped_storage()), ("", None))
                if whole is not None and name not in self.before:
                    self.before[name] = whole.clone()
        return func(*args, **(kwargs or {}))
