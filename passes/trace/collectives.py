"""Collectives that write into their arguments (`dist.all_reduce`), traced as functional ones, which make new tensors.

A group's methods are what all of them go through, by whatever name a model has imported them. The functional ones run
the same algorithm of the backend on a copy, so that their bits are the same. A call with `async_op=True` is over when
it returns: nothing is computed meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from passes._torch import FUNCTIONAL_COLLECTIVES as _functional
from passes._torch import WAIT_FOR_COLLECTIVE as _wait
from passes._torch import TorchDispatchMode, ended_work

_REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_METHODS = ("gather", "reduce", "broadcast", "alltoall", "all_to_all")  # what the names of a group's have in them


@contextmanager
def functional_collectives() -> Iterator[None]:
    """Let collectives that this thread calls in the block be traced, where there are other ranks to talk to."""
    if not (dist.is_available() and dist.is_initialized()):
        yield
        return
    group: Any = dist.ProcessGroup
    own = {
        name: method for name, method in vars(group).items()
        if not name.startswith("__") and any(part in name for part in _METHODS)
    }  # fmt: skip
    try:
        for name, method in own.items():
            setattr(group, name, _traced(method, threading.get_ident()))
        yield
    finally:
        for name, method in own.items():
            setattr(group, name, method)


def _traced(method: Callable[..., Any], thread: int) -> Callable[..., Any]:
    @wraps(method)
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return method(group, *args, **kwargs)
        with _Functional(group, _reduction([*args, *kwargs.values()])):
            return method(group, *args, **kwargs)

    return call


def _reduction(given: list[Any]) -> str | None:
    """What functional collectives call the reduction that is asked for; None where they know none."""
    options = next((value for value in given if hasattr(value, "reduceOp")), None)
    asked = options.reduceOp if options is not None else next((v for v in given if isinstance(v, dist.ReduceOp)), None)
    return next((name.lower() for name in _REDUCTIONS if asked == getattr(dist.ReduceOp, name)), None)


class _Functional(TorchDispatchMode):
    """The op that a group's method comes down to, by functional ones. (It does not tell of the reduction.)"""

    def __init__(self, group: Any, reduction: str | None) -> None:
        super().__init__()
        self.group, self.reduction = group, reduction

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = _MADE.get(func._schema.name)
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
        if made is None or ("reduce_op" in given and self.reduction is None):
            return func(*args, **(kwargs or {}))
        with torch.no_grad():
            for written, value in made(_Asked(given, self.reduction, self.group.size(), self.group.group_name)):
                written.copy_(value.view(written.shape))
        work = ended_work()
        return (args[0], work) if len(func._schema.returns) == 2 else work


@dataclass(frozen=True)
class _Asked:
    given: Mapping[str, Any]  # by the names in the op's schema
    reduction: str | None
    size: int
    group: str


Written = Iterator[tuple[Tensor, Tensor]]  # what is written, and what is written there


def _all_reduced(asked: _Asked) -> Written:
    for t in asked.given["tensors"]:
        yield t, _wait(_functional.all_reduce(t, asked.reduction, asked.group))


def _broadcast(asked: _Asked) -> Written:
    for t in asked.given["tensors"]:
        yield t, _wait(_functional.broadcast(t, asked.given["root_rank"], asked.group))


def _gathered(asked: _Asked) -> Written:
    outputs, (part,) = asked.given["output_tensors"][0], asked.given["input_tensors"]
    whole = _wait(_functional.all_gather_into_tensor(part.reshape(-1), asked.size, asked.group))
    yield from zip(outputs, whole.chunk(asked.size), strict=True)


def _gathered_whole(asked: _Asked) -> Written:
    part = asked.given["input_tensor"]
    yield asked.given["output_tensor"], _wait(_functional.all_gather_into_tensor(part, asked.size, asked.group))


def _scattered(asked: _Asked) -> Written:
    part = _functional.reduce_scatter_tensor(asked.given["input_tensor"], asked.reduction, asked.size, asked.group)
    yield asked.given["output_tensor"], _wait(part)


def _exchanged(asked: _Asked) -> Written:
    given, output = asked.given["input"], asked.given["output"]
    to, of = (
        asked.given[f"{name}_split_sizes"] or [len(t) // asked.size] * asked.size
        for name, t in (("output", output), ("input", given))
    )
    yield output, _wait(_functional.all_to_all_single(given, to, of, asked.group))


_MADE: dict[str, Callable[[_Asked], Written]] = {
    "c10d::allreduce_": _all_reduced, "c10d::broadcast_": _broadcast, "c10d::allgather_": _gathered,
    "c10d::_allgather_base_": _gathered_whole, "c10d::_reduce_scatter_base_": _scattered,
    "c10d::alltoall_base_": _exchanged,
}  # fmt: skip
