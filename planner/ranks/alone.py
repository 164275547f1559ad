"""Collectives of a model's own code, which a rank runs by itself while it plans: others may be doing something else."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from passes._torch import FakeTensor, TorchDispatchMode, ended_work, pytree, with_modes_inside
from passes.ops import COLLECTIVES


def collectives_alone(heard: set[str], listen: bool) -> AbstractContextManager[Any]:
    """Let this thread's collectives run on this rank alone: the results and the memory are as if all had its numbers.

    Args:
        heard: the names of those that there are; they are added.
        listen: whether it is not known yet if there are any.
    """
    running = dist.is_available() and dist.is_initialized()
    return _Alone(heard) if running and (listen or heard) else nullcontext()


class _Alone(TorchDispatchMode):
    """The ops of `c10d`, to which functional collectives and those of `DTensor`s come down, talk to no one."""

    def __init__(self, heard: set[str]) -> None:
        super().__init__()
        self.heard = heard

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ and kind is not FakeTensor for kind in types):
            return NotImplemented  # a `DTensor`, or a result that is waited for, says first what it is made of
        if func.namespace not in COLLECTIVES:
            return func(*args, **kwargs)
        if func.namespace != "c10d":
            return with_modes_inside(self, func, args, kwargs)
        self.heard.add(func._schema.name)
        _run_alone(func, args)
        work = ended_work()
        return (args[0], work) if len(func._schema.returns) == 2 else work


def _run_alone(op: Any, args: Sequence[Any]) -> None:
    """Give results to what the collective writes, and ask for the memory that gloo asks for meanwhile."""
    name = op._schema.name.partition("::")[2]
    tensors = {a.name: pytree.tree_leaves(value) for a, value in zip(op._schema.arguments, args, strict=False)}
    outputs, inputs = (_named(tensors, kind) for kind in ("output", "input"))
    if name not in _IN_PLACE and all(t.device.type == "cpu" for t in (*outputs, *inputs)):
        sizes = {"output": sum(t.nbytes for t in outputs), "input": sum(t.nbytes for t in inputs)}
        copied = sizes[_COPIED[name]] if name in _COPIED else max(sizes.values())
        torch.empty(copied, dtype=torch.uint8, device="cpu")
    for i, output in enumerate(outputs if inputs else ()):
        _fill(output, inputs[i if len(inputs) == len(outputs) else 0])


_COPIED = {"reduce_scatter_": "output", "allgather_into_tensor_coalesced_": "input"}
_IN_PLACE = frozenset({
    "allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "alltoall_", "alltoall_base_", "barrier",
    "monitored_barrier_", "send", "recv_", "recv_any_source_",
})  # fmt: skip


def _named(tensors: dict[str, list[Any]], kind: str) -> list[Tensor]:
    """The tensors of the arguments whose names begin so."""
    found = [leaf for name, leaves in tensors.items() if name.startswith(kind) for leaf in leaves]
    return [leaf for leaf in found if isinstance(leaf, Tensor)]


def _fill(output: Tensor, given: Tensor) -> None:
    """The numbers of one in the other, as often as they fit or as far."""
    if given.numel() and output.is_contiguous():
        for part in output.view(-1).split(given.numel()):
            part.copy_(given.reshape(-1)[: part.numel()])
