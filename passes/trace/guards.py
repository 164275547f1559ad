"""What a trace took as given about the values of the step's inputs and buffers: questions, and the sample's answers.

The calls that a question depends on are kept as a tape, which is played on each call's own inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from passes._torch import pytree


@dataclass(frozen=True)
class Ref:
    """Value number `index` of a tape; the first ones are the step's parameters, buffers and inputs."""

    index: int


@dataclass(frozen=True)
class Call:
    """One call on the tape; its tensor results are numbered from `first`. It may ask, or write into its arguments."""

    func: Any
    args: Any
    kwargs: Any
    first: int
    count: int
    asks: bool = False
    writes: bool = False

    @property
    def results(self) -> range:
        """The numbers of its tensor results."""
        return range(self.first, self.first + self.count)


@dataclass(frozen=True)
class Guard:
    """The sample's answers to the questions that Python asked about the step's inputs and the model's buffers.

    Attributes:
        tape: the calls that the questions depend on, and these, in order.
        answers: what each question answered.
        counts: whether some tell numbers of the inputs: of what a mask picks, a length.
    """

    tape: tuple[Call, ...]
    answers: tuple[Any, ...]
    counts: bool = False

    def holds(self, given: Sequence[torch.Tensor]) -> bool:
        """Whether a call with these parameters, buffers and inputs would be answered like the sample."""
        values: dict[int, Any] = dict(enumerate(given))
        answers = iter(self.answers)
        with torch.no_grad():
            for call, last in zip(self.tape, self._last_read, strict=True):
                args, kwargs = resolve((call.args, call.kwargs), values)
                try:
                    result = call.func(*args, **kwargs)
                except Exception:  # noqa: BLE001 - an index out of range, say: the sample's were none
                    return False
                values.update(zip(call.results, tensors_in(result), strict=False))
                if call.asks and repr(result) != repr(next(answers)):  # tells 0.0 from -0.0; nan is nan
                    return False
                del args, kwargs, result
                for index in last:
                    values.pop(index, None)
        return True

    @cached_property
    def given(self) -> frozenset[int]:
        """The numbers of the parameters, buffers and inputs that the questions read."""
        read = frozenset[int]().union(*map(read_by, self.tape))
        return read - {made for call in self.tape for made in call.results}

    @cached_property
    def _last_read(self) -> tuple[tuple[int, ...], ...]:
        """For each call the values that none after it reads."""
        seen: set[int] = set()
        found = []
        for call in reversed(self.tape):
            found.append(tuple((read_by(call) | set(call.results)) - seen))
            seen |= read_by(call)
        return tuple(reversed(found))


def leading(tape: Sequence[Call]) -> tuple[Call, ...]:
    """The calls that the questions on a tape depend on; all where one of them changes what another made."""
    if any(call.writes for call in tape):
        return tuple(tape)
    wanted: set[int] = set()
    found = []
    for call in reversed(tape):
        if call.asks or not wanted.isdisjoint(call.results):
            wanted |= read_by(call)
            found.append(call)
    return tuple(reversed(found))


def read_by(call: Call) -> set[int]:
    """The numbers of the values that a call reads."""
    return {a.index for a in leaves((call.args, call.kwargs)) if isinstance(a, Ref)}


def resolve(tree: Any, values: dict[int, Any]) -> Any:
    return mapped(lambda a: values[a.index] if isinstance(a, Ref) else a, tree)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    return (t for t in leaves(value) if isinstance(t, torch.Tensor))


def leaves(tree: Any) -> Iterator[Any]:
    """As of pytree; of slices their ends, which may be tensors."""
    for leaf in pytree.tree_leaves(tree):
        yield from (leaf.start, leaf.stop, leaf.step) if isinstance(leaf, slice) else (leaf,)


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with another leaf in the place of each of its `leaves`."""

    def of_leaf(leaf: Any) -> Any:
        ends = isinstance(leaf, slice)
        return slice(*map(function, (leaf.start, leaf.stop, leaf.step))) if ends else function(leaf)

    return pytree.tree_map(of_leaf, tree)


def writes(func: Any, kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    return "out" in kwargs or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
