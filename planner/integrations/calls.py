"""calls: one run of a compiled program, and the tensors that it was given and made."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from passes._torch import StorageWeakRef, pytree
from passes.memory import granule, round_up

from .partition import Figures
from .program import Program


@dataclass(eq=False)
class Call:
    """A call of a graph in the step that is running.

    Attributes:
        passed: what it reads of what graphs before it made, with its bytes.
        differentiable: those of which it returns a gradient.
        returned: what it returned, with its bytes.
        node: its node in autograd's graph; None where that is not known.
        ended: whether that was gone before there was any backward.
    """

    program: Program
    passed: dict[int, int]
    differentiable: frozenset[int]
    returned: list[tuple[StorageWeakRef, int]]
    node: weakref.ref[Any] | None
    ended: bool = False

    def look(self) -> None:
        """Notice whether nobody can run its backward any more, while there was none yet."""
        self.ended = self.ended or (self.node is not None and self.node() is None)

    def figures(self, whole: Figures) -> Figures:
        """What it holds, where it would hold that with a backward."""
        if not self.ended:
            return whole
        outputs = sum(size for storage, size in self.returned if not storage.expired())
        return Figures(whole.forward, 0, outputs, 0, outputs)


def held(figures: Sequence[Figures]) -> int:
    return sum(f.held for f in figures)


def gradients_of(args: Sequence[Any]) -> list[torch.Tensor]:
    """Those that parameters among the arguments have from before."""
    return [t.grad for t in args if isinstance(t, torch.Tensor) and t.is_leaf and t.grad is not None]


def gradient_bytes(args: Sequence[Any]) -> int:
    return sum(gradient.nbytes for gradient in gradients_of(args))


def storages_made(result: Any, args: Sequence[Any]) -> list[tuple[StorageWeakRef, int]]:
    """What a call returned, as long as somebody holds it, with its bytes: nothing that it was given, nor the loss."""
    given = {p for p, _ in storages_of(args)}
    storages = {s.data_ptr(): s for t in tensors_of(result) if t.numel() > 1 for s in [t.untyped_storage()]}
    return [(StorageWeakRef(s), s.nbytes()) for p, s in storages.items() if p not in given]


def node_of(result: Any) -> weakref.ref[Any] | None:
    """The node in autograd's graph of the call that returned this."""
    for node in (t.grad_fn for t in tensors_of(result)):
        while node is not None:  # above it, views of what the call computed
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                return weakref.ref(node)
            node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
    return None


def storages_of(values: Any) -> Iterator[tuple[int, int]]:
    """Where the memory of each tensor lies, and its bytes as the allocator rounds them."""
    for tensor in tensors_of(values):
        storage = tensor.untyped_storage()
        yield storage.data_ptr(), round_up(storage.nbytes(), granule(tensor.device))


def tensors_of(values: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor) and t.layout is torch.strided]
