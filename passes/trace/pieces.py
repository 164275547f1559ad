"""pieces: tensors that share memory although the schemas of their ops do not say so: the pieces of `unsafe_split`.

In eager a change of such a piece shows in what it is a piece of, and the other way round. Functionalization takes each
for memory of its own, and the change would be lost. So what it would have to show in may not be read any more.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from passes._torch import DisableTorchFunction, TorchDispatchMode, pytree
from passes.alias import HIDDEN_VIEWS, written_tensors
from passes.errors import Unsupported

from .places import place, user_frame


class Pieces(TorchDispatchMode):
    """Refuses reads of what such a change would have to show in, in the forward, and in the backward that follows.

    Attributes:
        stale: what may not be read any more, by its memory's number, and the refusal of the change.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sharing: dict[int, set[int]] = {}  # each memory with those that it overlaps
        self.names: dict[int, str] = {}  # the op that made them
        self.held: list[torch.UntypedStorage] = []  # so that no other memory gets their numbers
        self.stale: dict[int, Unsupported] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.stale:
            self.check(pytree.tree_leaves((args, kwargs)))
        result = func(*args, **kwargs)
        if func in HIDDEN_VIEWS:
            self._add(func, args[0], [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)])
        for written in written_tensors(func, args, kwargs) if self.sharing else ():
            self._changed(_memory(written))
        return result

    def check(self, values: Iterable[Any]) -> None:
        """Raise Unsupported if one of them was to change with another, and did not."""
        for value in values if self.stale else ():
            if isinstance(value, torch.Tensor) and (refused := self.stale.get(_memory(value))) is not None:
                raise refused

    def _add(self, func: Any, base: torch.Tensor, pieces: list[torch.Tensor]) -> None:
        whole = _memory(base)
        overlapped = {whole, *self.sharing.get(whole, ())}  # pieces of one call do not overlap
        for piece in pieces:
            if (number := _memory(piece)) == whole:
                return  # the trace knows that they share it
            self.held += [base.untyped_storage(), piece.untyped_storage()]
            self.names[number] = func.overloadpacket.__name__
            self.sharing[number] = set(overlapped)
            for other in overlapped:
                self.sharing.setdefault(other, set()).add(number)

    def _changed(self, memory: int) -> None:
        for other in self.sharing.get(memory, ()):
            name = self.names.get(memory) or self.names[other]
            what = "a piece" if memory in self.names else "what was the argument"
            self.stale.setdefault(other, Unsupported(
                f"in-place change of {what} of {name}", place(user_frame(sys._getframe())),
                f"it shows in what else lies in that memory and is read later, as {name} shares it without saying so",
                "Use split or chunk; or change a clone() of it.",
            ))  # fmt: skip


def _memory(tensor: torch.Tensor) -> int:
    """The number of a tensor's storage; 0 where it has none of its own."""
    with DisableTorchFunction():  # other modes would be told of it
        return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0
