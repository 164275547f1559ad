"""Python state that a forward could change, as it is now: found from its modules, compared, and put back.

The walk starts at the modules and the loss function. It follows attributes, plain containers, objects, class
attributes, functions with their closures, defaults and the globals they name, and random generators; it takes a
shallow copy of each mutable thing that it meets, so that nested ones are compared where they are.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from passes._torch import outside_tracing

from ..errors import Unsupported
from ..exclusive import alone
from .nodes import Change, Node, identical, node_changes, same
from .places import place, user_frame
from .reach import visit

MAX_NODES = 50_000
MAX_LAST = 2_000  # of what caches and weak references lead to
ARGUMENT = "an argument"  # where the paths of what is reached from the call's arguments begin

ITERATORS: tuple[type, ...] = (
    type(iter([])), type(iter(())), type(iter(range(0))), type(iter({})), type(iter({}.values())),
    type(iter({}.items())), type(reversed([])), type(iter("")), type(iter(set())), itertools.count, itertools.cycle,
    itertools.chain, itertools.islice, itertools.repeat, enumerate, zip, map, filter, types.GeneratorType,
)  # fmt: skip


class Held:
    """Stands for an iterator while a forward is traced."""

    def __init__(self, path: str, key: Any) -> None:
        self.path = f"{path}[{key!r}]" if isinstance(key, int) else f"{path}.{key}"

    def _refuse(self, *_: Any) -> Any:
        raise Unsupported(
            "an iterator advanced in forward", f"{self.path}, {place(user_frame(sys._getframe(1)))}",
            "planning would advance it, and the planned steps would not, or would go on from there",
            "Advance it outside forward, and pass what it gives as an argument.",
        )  # fmt: skip

    __next__ = __iter__ = send = close = _refuse


class Snapshot:
    """The state that can be reached from a model, as it is now.

    Args:
        draws: whether the generators that all code shares are part of it.

    Attributes:
        met_again: the further paths and names of what is reached in several ways, by its id.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Any = None, arguments: Iterable[Any] = (), draws: bool = True
    ) -> None:
        self.nodes: list[Node] = []
        self.registered = frozenset(map(id, (*model.modules(), *model.parameters())))
        shared = [(generator, path, name) for generator, path, name in _shared_generators() if generator is not None]
        self.seen: dict[int, Any] = {} if draws else {id(generator): generator for generator, *_ in shared}
        self.met_again: dict[int, list[tuple[str, str]]] = {}
        self._queue: deque[tuple[Any, str, str]] = deque()
        self._hooks: deque[tuple[Any, str, str]] = deque()
        self._last: deque[tuple[Any, str, str]] = deque()
        self._in_hooks = False
        for prefix, module in model.named_modules():
            self._queue.append((module, f"self.{prefix}" if prefix else "self", ""))
        if loss_fn is not None:
            self._queue.append((loss_fn, "loss_fn", "loss_fn"))
        self._queue.extend((argument, ARGUMENT, ARGUMENT) for argument in arguments)
        if alone():  # else another thread may draw meanwhile
            self._queue.extend(shared)
        with outside_tracing():
            self._visit_all()
            self._queue.extend(self._last)
            self._visit_all(len(self.nodes) + MAX_LAST)
            self._queue.clear()
            self._in_hooks = True
            while self._hooks and len(self.nodes) < MAX_NODES:
                self._queue.append(self._hooks.popleft())
                self._visit_all()
        for queue in (self._queue, self._hooks, self._last):
            queue.clear()

    def _visit_all(self, most: int = MAX_NODES) -> None:
        while self._queue and len(self.nodes) < most:
            visit(self, *self._queue.popleft())

    def changes(self, alike: Callable[[Any, Any], bool] | None = None) -> list[Change]:
        """Places that differ from what was taken."""
        with outside_tracing():
            return [change for node in self.nodes for change in node_changes(node, alike or same)]

    @property
    def tensors(self) -> dict[int, str]:
        """Where the tensors are that nobody registers, by their ids."""
        return {id(node.owner): node.path for node in self.nodes if node.kind == "tensor"}

    def restore(self) -> None:
        """Put back what differs."""
        with outside_tracing():
            for node in self.nodes:
                if next(node_changes(node, identical), None) is not None:
                    node.give(node.content)
                    node.refresh()

    @contextlib.contextmanager
    def iterators_held(self) -> Iterator[None]:
        """Let iterators and generators refuse to be advanced: what one has given out cannot be put back."""
        found = [(node, k, v) for node in self.nodes for k, v in _pairs(node.content) if isinstance(v, ITERATORS)]
        try:
            for node, key, _ in found:
                node.content[key] = Held(node.path, key)
                node.give(node.content)
            yield
        finally:
            for node, key, value in found:
                node.content[key] = value
            self.restore()

    def add(self, node: Node) -> Node:
        node.of_hook = self._in_hooks
        self.nodes.append(node)
        return node

    def follow(self, values: Iterable[tuple[Any, str, str]]) -> None:
        self._queue.extend(values)

    def follow_last(self, values: Iterable[tuple[Any, str, str]]) -> None:
        self._last.extend(itertools.islice(values, MAX_LAST // 4))

    def follow_hooks(self, values: Iterable[tuple[Any, str, str]]) -> None:
        self._hooks.extend(values)


def scramble(generator: Any, seed: int) -> None:
    """Bring a generator of Python's or NumPy's into another state."""
    if hasattr(generator, "bit_generator"):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed)


def _pairs(content: Any) -> list[tuple[Any, Any]]:
    if isinstance(content, dict):
        return list(content.items())
    return list(enumerate(content)) if isinstance(content, list) else []


def _shared_generators() -> list[tuple[Any, str, str]]:
    numpy = sys.modules.get("numpy")
    return [
        (getattr(random.random, "__self__", None), "Python's random", "random"),
        (torch.default_generator, "torch's random generator", "torch"),
        (None if numpy is None else numpy.random.mtrand._rand, "numpy.random", "random"),
    ]
