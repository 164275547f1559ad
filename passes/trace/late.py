"""What Python that the backward runs reads, by hooks and custom functions: compared as a backward begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from passes.printable import shown

from .expected import MISSING, apart, holds_these, same_value, stood_for


class Late:
    """What the backward reads of a model as it is.

    Attributes:
        found: what was found there.
        contents: containers among it, with what they hold.
        state: parameters and buffers, which each call has of its own.
    """

    def __init__(self) -> None:
        self.found: list[tuple[Any, Callable[..., Any], Any]] = []
        self.contents: list[tuple[Any, Any, list[Any]]] = []
        self.state: list[tuple[Any, Callable[..., Any]]] = []

    def __bool__(self) -> bool:
        return bool(self.found or self.contents or self.state)

    def add(
        self, read: Any, getter: Callable[..., Any], value: Any, is_state: bool, contents: Iterable[tuple[Any, Any]]
    ) -> None:
        """Note a value, with the containers that it consists of."""
        self.contents += [(read, *each) for each in contents]
        if is_state:
            self.state.append((read, getter))
        else:
            self.found.append((read, getter, value))

    def state_now(self) -> list[tuple[Any, int]]:
        """The parameters and buffers, each with its count of changes."""
        found = (get(read.name, MISSING) for read, get in self.state)
        return [(tensor, getattr(tensor, "_version", -1)) for tensor in found]

    def changed_since(self, state: Sequence[tuple[Any, int]]) -> str:
        """What is not what it was as the forward ran, in words; "" where all is.

        Args:
            state: what `state_now` was after the forward.
        """
        for (read, _), (tensor, version) in zip(self.state, state, strict=True):
            if getattr(tensor, "_version", -1) != version:
                return f"{read.label} with other numbers in {read.name} than after the forward"
        of_state = ((read, get, then) for (read, get), (then, _) in zip(self.state, state, strict=True))
        for read, get, then in (*self.found, *of_state):
            if not same_value(now := stood_for(get(read.name, MISSING)), then):
                is_now, was = apart(shown(now), shown(then))
                return f"{read.label} with {read.name}={is_now}, in the forward {was}"
        for read, container, items in self.contents:
            if not holds_these(container, items):
                return f"{read.label} with another content of {read.name} than in the forward"
        return ""
