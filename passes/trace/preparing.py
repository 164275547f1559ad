"""Whether a forward prepares itself at its first call: fills a table of constants, and goes on otherwise from then on.

The forward runs on the sample as a first call, and as a second one that finds what the first has left. What both ask of
torch is written down; what is computed of constants alone goes by its value. Where both ask the same, a first call
gives what every call gives, whatever its inputs, and what it leaves is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from passes._torch import DisableTorchFunction, mutation_count, pytree

from .nodes import MISSING, PLAIN, Change, Node, identical, put, tensors_of, twin
from .once import once
from .reach import LARGEST_COPY
from .rerun import Script
from .state import Snapshot
from .structure import flatten

BUFFER = "buffer"
RUNS = 4

_OF_METADATA = frozenset(
    ["__get__", "size", "dim", "ndimension", "stride", "numel", "nelement", "element_size", "is_contiguous", "__len__",
     "is_floating_point", "is_complex", "is_signed", "get_device", "type", "result_type", "can_cast", "__hash__",
     "register_hook", "is_tensor", "storage_offset", "broadcast_shapes"]
)  # fmt: skip
_KEPT = ("attributes", "items", "variable", "names")


class _Unknown(Exception):
    """What is remembered may depend on the inputs."""


class _Constants(Script):
    """A script of a real run, in which constants, and what is computed of them, go by their values.

    Args:
        given: the parameters, buffers and inputs by name; the names in `constants` count as constants.
        watched: buffers that forward changes; they begin as constants.
    """

    def __init__(
        self, given: Mapping[str, torch.Tensor], constants: Collection[str], watched: Collection[torch.Tensor]
    ) -> None:
        super().__init__(given, constants, None)
        self.counts = {id(t): (t, mutation_count(t)) for t in watched}
        self.stained = {_memory(t) for name, t in given.items() if name not in constants}

    def name_of(self, leaf: Any) -> tuple[str, bool]:
        """As of any script; what nobody has named is a constant."""
        if not isinstance(leaf, torch.Tensor) or id(leaf) in self.names:
            return super().name_of(leaf)
        if leaf.requires_grad or _memory(leaf) in self.stained:
            raise _Unknown
        return bits(leaf).hex() if leaf.numel() < 16 else f"{hash(bits(leaf))}", True

    def written(self, func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """As of any script, and the buffers that a function like `batch_norm` updates."""
        found = [t for t, count in self.counts.values() if mutation_count(t) != count]
        self.counts.update({id(t): (t, mutation_count(t)) for t in found})
        return [*super().written(func, args, kwargs), *found]

    def name(self, tensor: torch.Tensor, name: str, pure: bool) -> None:
        """Constants are named where they are read: they may be written into until then."""
        if not pure:
            super().name(tensor, name, pure)
            self.stained.add(_memory(tensor))
        elif self.names.pop(id(tensor), None) is not None and _memory(tensor) in self.stained:
            raise _Unknown

    def told(self, func: Any, result: Any, pure: bool) -> None:
        """Refuse questions about values that are no constants."""
        if not pure and getattr(func, "__name__", "") not in _OF_METADATA:
            raise _Unknown

    def is_constant(self, value: Any) -> bool:
        """Whether something that was left is made of constants and plain values."""
        return all(
            self.name_of(part)[1] if isinstance(part, torch.Tensor) else part is MISSING or isinstance(part, PLAIN)
            for part in pytree.tree_leaves(value)
        )


def prepared(
    model: nn.Module, bound: Mapping[str, Any], loss_fn: Callable[..., Any] | None, changed: Collection[str]
) -> tuple[Change, ...]:
    """What a first call leaves that all after it leave as it is; nothing unless they are what it is.

    Args:
        changed: the parameters and buffers that the forward changes.
    """
    first, kept, _ = _run(model, bound, loss_fn, changed, ())
    for _ in range(RUNS):
        lines, _, moved = _run(model, bound, loss_fn, changed, kept)
        still = [c for c in kept if not any(path.startswith((f"{c.path}.", f"{c.path}[")) for path in moved)]
        if len(still) == len(kept):
            return tuple(kept) if lines == first else ()
        kept = still
    return ()


def _run(
    model: nn.Module, bound: Mapping[str, Any], loss_fn: Callable[..., Any] | None, changed: Collection[str],
    kept: Iterable[Change],
) -> tuple[list[str], list[Change], list[str]]:  # fmt: skip
    """What a call asks of torch that finds what was `kept`, what it leaves that is made of constants, and all places in
    which it leaves something, with a dot behind.
    """
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    state = {**parameters, **buffers}
    own = {name: twin(state[name]) for name in changed}
    with once(model, bound, loss_fn, own) as (_, run, inputs):
        for change in kept:
            put(change, change.after)
        nodes = [buffer_node(model, name) for name in changed if name in buffers]
        before = Snapshot(model, loss_fn)
        given = {**{n: t for n, t in state.items() if n not in own}, **{n: own[n] for n in own if n in parameters}}
        constants = {name for name, t in given.items() if not t.requires_grad and name not in own}
        tables = [own[name] for name in own if name in buffers]
        script = _Constants({**given, **{f"input {i}": t for i, t in enumerate(inputs)}}, constants, tables)
        with script:
            value = run()
        script.lines += [script.name_of(t)[0] for t in flatten(value)[0]]
        changes = before.changes(identical)
        held = before.tensors  # which the caller may change
        made = [c for c in changes if held.keys().isdisjoint(map(id, tensors_of(c.after)))]
        left = [c for c in made if c.node.kind in _KEPT and script.is_constant(c.after)]
        filled = [
            Change(node, node.path, node.name, node.content[""], now, "") for node in nodes
            if (now := node.take()[""]) != node.content[""]
        ]  # fmt: skip
        left += [c for c in filled if script.is_constant(model.get_buffer(c.name))]
    return script.lines, left, [f"{change.path}." for change in (*changes, *filled)]


def buffer_node(model: nn.Module, name: str) -> Node:
    """What a buffer of the model holds."""

    def take() -> dict[str, bytes]:
        return {"": bits(model.get_buffer(name))}

    def give(content: dict[str, bytes]) -> None:
        fill(model.get_buffer(name), content[""])

    return Node(model, f"self.{name}", name, BUFFER, take, give)


def fill(tensor: torch.Tensor, content: bytes) -> None:
    """Give a tensor the data of one that has its shape and type."""
    data = content.partition(b"\n")[2]
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    tensor.data.copy_(raw.view(tensor.dtype).reshape(tensor.shape))


def bits(tensor: torch.Tensor) -> bytes:
    """A tensor's type, shape and data.

    Raises:
        _Unknown: it is no table, but larger.
    """
    if tensor.numel() > LARGEST_COPY or tensor.layout is not torch.strided:
        raise _Unknown
    with DisableTorchFunction():
        data = tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        return f"{tuple(tensor.shape)} {tensor.dtype}\n".encode() + data


def _memory(tensor: torch.Tensor) -> int:
    with DisableTorchFunction():
        return tensor.untyped_storage()._cdata
