"""A small program of ATen ops, as data: what an op means, whether it is run, numbered, or looked for in a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class Call:
    """An op called on leaves (tensors, nodes, numbers, constants) and on the results of other calls."""

    target: Any
    args: tuple[Any, ...]

    def __getitem__(self, index: int) -> Item:
        return Item(self, index)


@dataclass(frozen=True)
class Item:
    """Result `index` of a call that has several."""

    call: Call
    index: int


@dataclass(frozen=True)
class Argument:
    """A leaf that stands for an argument by its position."""

    position: int


@dataclass(frozen=True)
class Like:
    """Any tensor laid out as `value`: the op reads its shape alone."""

    value: Any


@dataclass(frozen=True)
class Of:
    """A constant that follows from a tensor: its dtype, a size."""

    value: Any
    read: Callable[[torch.Tensor], Any]


def call(target: Any, *args: Any) -> Call:
    """`target(*args)`, not yet run."""
    return Call(target, args)


def dtype_of(value: Any) -> Of:
    """The dtype of a leaf."""
    return Of(value, lambda tensor: tensor.dtype)


def rows_of(value: Any) -> Of:
    """The first size of a leaf."""
    return Of(value, lambda tensor: int(tensor.shape[0]))


def run(program: Any, known: dict[Call, Any] | None = None) -> Any:
    """The program's value, its leaves being tensors and constants; what is only laid out alike is NaN."""
    known = {} if known is None else known
    if isinstance(program, Call):
        if program not in known:
            known[program] = program.target(*(run(a, known) for a in program.args))
        return known[program]
    if isinstance(program, Item):
        return run(program.call, known)[program.index]
    if isinstance(program, Like):
        return torch.full_like(program.value, float("nan"))
    if isinstance(program, Of):
        return program.read(program.value)
    return tuple(run(p, known) for p in program) if isinstance(program, tuple) else program


def targets(program: Any) -> Iterator[Any]:
    """The ops of a program, in the order of their running."""
    if isinstance(program, Call):
        for argument in program.args:
            yield from targets(argument)
        yield program.target
    elif isinstance(program, Item):
        yield from targets(program.call)
    elif isinstance(program, tuple):
        for part in program:
            yield from targets(part)
