"""What a fused op is: one record, of which everything else that anyone needs to know follows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from passes._torch import OpOverload

from .meaning import Argument, targets

KINDS: dict[str, Any] = {
    "Tensor": torch.Tensor, "Optional[Tensor]": (torch.Tensor, type(None)), "int": int, "float": (float, int),
}  # fmt: skip
LIBRARY = torch.library.Library("planner", "FRAGMENT")


class IgnoredArguments(NamedTuple):
    """Arguments that some results do not depend on.

    Attributes:
        positions: of the arguments.
        training: position of a flag that must be True for it; None for an op that always trains.
        results: which results; None for all of them.
    """

    positions: frozenset[int]
    training: int | None
    results: frozenset[int] | None


@dataclass(frozen=True)
class Fused:
    """An op of the library `planner`.

    Attributes:
        name: of the op, and of the nodes that call it.
        schema: `(Tensor first, Tensor second) -> Tensor`.
        kernel: a function of `passes.run.kernels`; if it is donated arguments, its keyword-only one is the
            memory that it writes to.
        meaning: the op in ATen ops (`passes.fuse.meaning`); None for a part of an op that is split (`Split`).
        when: whether the kernel has the bits of the meaning, from the arguments' values. It must not ask for data.
        pays: whether a graph's ops are to be replaced by this one, from its arguments' values; None where some rule
            of its own decides it.
        either_order: whether operands that may change places (`passes.fuse.normal_form.COMMUTES`) are tried both ways.
        backward_only: whether only the backward's ops are.
        adjacent: whether the ops that it stands for must run one right after the other.
        keeps_name: whether the node keeps the name of the op that it stands for.
        workspace: bytes that it needs besides arguments and results, from its arguments' values.
        donates: arguments, by position, whose memory may take the result.
        checks_owner: whether it takes a donated argument's memory only if nobody else holds it, as it finds out when
            it runs.
        rowwise: whether only the CPU's kernel is done reading a row before it writes it (`passes.ops.ROWWISE`).
        intermediates: how many values of the result's size go through memory inside it.
        ignores: arguments that some of its results do not depend on.
    """

    name: str
    schema: str
    kernel: Callable[..., Any]
    meaning: Callable[..., Any] | None = None
    when: Callable[..., bool] = lambda *_: True
    pays: Callable[..., bool] | None = None
    either_order: bool = False
    backward_only: bool = False
    adjacent: bool = False
    keeps_name: bool = False
    workspace: Callable[..., int] = lambda *_: 0
    donates: tuple[int, ...] = ()
    checks_owner: bool = False
    rowwise: bool = False
    intermediates: int = 0
    ignores: IgnoredArguments | None = None

    @property
    def op(self) -> OpOverload:
        """The op as it is called in a graph."""
        overload: OpOverload = getattr(torch.ops.planner, self.name).default
        return overload

    @property
    def written(self) -> str | None:
        """The keyword that takes the memory to write to."""
        parameters = inspect.signature(self.kernel).parameters.values()
        return next((p.name for p in parameters if p.kind is p.KEYWORD_ONLY), None) if self.donates else None

    @property
    def overloads(self) -> tuple[OpOverload, ...]:
        """The op, and its form that writes to a given memory."""
        return (self.op, getattr(self.op.overloadpacket, self.written)) if self.written else (self.op,)

    def takes(self, *values: Any) -> bool:
        """Whether the kernel has the bits of the meaning on these arguments; of empty tensors nothing is promised."""
        arguments = self.op._schema.arguments
        fits = len(values) == len(arguments) and all(
            isinstance(v, KINDS.get(str(a.type), object)) for a, v in zip(arguments, values, strict=True)
        )
        return fits and all(v.numel() for v in values if isinstance(v, torch.Tensor)) and self.when(*values)

    @property
    def program(self) -> Any:
        """The meaning of a call, of its arguments by position."""
        count = self.schema.partition("->")[0].count(",") + 1
        return self.meaning(*map(Argument, range(count))) if self.meaning else ()


@dataclass(frozen=True)
class Split:
    """An ATen op that is taken apart, in a graph and in the proof.

    Attributes:
        parts: its results as those of other calls, from its arguments; a call of the op itself is left as it is.
        when: whether the parts have the bits of the whole, from the arguments' values.
    """

    op: OpOverload
    parts: Callable[..., tuple[Any, ...]]
    when: Callable[..., bool]


def register(fused: Fused) -> None:
    """Make a record's op callable."""
    seeded = torch.Tag.nondeterministic_seeded
    tags = (seeded,) if any(seeded in getattr(t, "tags", ()) for t in targets(fused.program)) else ()
    arguments = fused.schema.rpartition(") ->")[0]
    schemas = {fused.name: fused.schema}
    if fused.written:
        schemas[f"{fused.name}.{fused.written}"] = f"{arguments}, *, Tensor(a!) {fused.written}) -> Tensor(a!)"
    for name, schema in schemas.items():
        LIBRARY.define(name + schema, tags=tags)
        LIBRARY.impl(name, fused.kernel, "CompositeExplicitAutograd")


def values_of(arguments: Sequence[Any]) -> list[Any]:
    """Arguments of a call, nodes by the values that they were traced with."""
    return [a.meta["val"] if isinstance(a, fx.Node) else a for a in arguments]
