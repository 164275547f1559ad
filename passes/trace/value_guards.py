"""Values known while tracing: those that depend on no input, and those of the sample's masks, under guard.

A fake tensor has no data, so `if (positions.diff() != 1).any()` cannot be decided although `positions` is an
`arange` and the answer is the same at every call. Beside each traced tensor that was computed from constants
alone, its real value is computed too; where Python asks for it, it is there.

Integer and boolean inputs (tokens, masks) carry the sample's values along in the same way, and what is computed
from them is written on a tape. A yes-or-no question about such a value (`if mask.all():`) is answered for the sample,
and the answer becomes a `Guard`: before each call the tape is played on the call's own inputs, and another answer
means another plan. So do small buffers (a flag, a count, strides), floats and
numbers too, as they seldom change: where forward itself changes one, only yes-or-no questions about it are answered,
and only before. What depends on a float input, a parameter or randomness stays unknown: see `answers`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from passes._torch import (
    DataDependentOutputException,
    FunctionalTensor,
    TorchDispatchMode,
    WeakIdKeyDictionary,
    disable_current_modes,
    mutation_count,
    outside_tracing,
    pytree,
)

from .answers import YES_OR_NO, Answers, Asked, Listening, is_question

LARGEST = 1 << 22  # elements
LARGEST_OF_STATE = 1 << 10
FACTORIES = frozenset({torch.arange, torch.zeros, torch.ones, torch.full, torch.tensor, torch.linspace, torch.eye,
                       torch.scalar_tensor})  # fmt: skip
QUESTIONS = YES_OR_NO | {Tensor.item, Tensor.tolist, Tensor.__int__, Tensor.__float__, Tensor.__index__}


@dataclass(frozen=True)
class Ref:
    """Value number `index` of a tape; the first ones are the step's parameters, buffers and inputs."""

    index: int


@dataclass(frozen=True)
class Call:
    """One call on the tape; its tensor results are numbered from `first`."""

    func: Any
    args: Any
    kwargs: Any
    first: int
    count: int

    @property
    def results(self) -> range:
        """The numbers of its tensor results."""
        return range(self.first, self.first + self.count)


@dataclass(frozen=True)
class Guard:
    """The sample's answers to the questions that Python asked about the step's inputs and the model's buffers.

    Attributes:
        tape: the calls that the questions depend on, in order; a question is a call without tensor results.
        answers: what each question answered.
    """

    tape: tuple[Call, ...]
    answers: tuple[Any, ...]

    def holds(self, given: Sequence[torch.Tensor]) -> bool:
        """Whether a call with these parameters, buffers and inputs would be answered like the sample."""
        values: dict[int, Any] = dict(enumerate(given))
        answers = []
        with torch.no_grad():
            for call, last in zip(self.tape, self._last_read, strict=True):
                args, kwargs = _resolve((call.args, call.kwargs), values)
                result = call.func(*args, **kwargs)
                values.update(zip(call.results, _tensors(result), strict=False))
                if not call.count:
                    answers.append(result)
                del args, kwargs, result
                for index in last:
                    values.pop(index, None)
        return tuple(answers) == self.answers

    @cached_property
    def given(self) -> frozenset[int]:
        """The numbers of the parameters, buffers and inputs that the questions read."""
        read = frozenset[int]().union(*map(_read, self.tape))
        return read - {made for call in self.tape for made in call.results}

    @cached_property
    def _last_read(self) -> tuple[tuple[int, ...], ...]:
        """For each call the values that none after it reads."""
        seen: set[int] = set()
        found = []
        for call in reversed(self.tape):
            found.append(tuple((_read(call) | set(call.results)) - seen))
            seen |= _read(call)
        return tuple(reversed(found))


@dataclass(frozen=True)
class Known:
    """A real value, its number on the tape, and the numbers of what the step is given that it depends on."""

    value: torch.Tensor
    number: int
    given: frozenset[int]


class KnownValues(Listening):
    """Keeps real values beside traced ones and answers Python's questions about them.

    Args:
        traced, sample: the step's parameters, buffers and inputs as traced, and as they are.
        state: how many of them are parameters and buffers, the first ones.
        changing: the numbers of those that forward is known to change.
        asked: all that forward asks on the sample; see `answers`.
    """

    def __init__(
        self, traced: Sequence[torch.Tensor] = (), sample: Sequence[torch.Tensor] = (), state: int = 0,
        changing: Collection[int] = (), asked: Sequence[Asked] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.computed = Answers(asked)
        self.known = WeakIdKeyDictionary()
        self.tape: list[Call] = []
        self.answers: list[Any] = []
        self.asked_at = 0
        self.traced, self.changing, self.count = traced[:state], changing, len(traced)
        self.of_state = range(state)
        self.before = [mutation_count(t) for t in self.traced]
        with disable_current_modes():
            for i, (tensor, real) in enumerate(zip(traced, sample, strict=True)):
                if (_is_small_state if i < state else _is_discrete)(real):
                    self._know(tensor, Known(real.detach().cpu().clone(), i, frozenset({i})))

    @property
    def guard(self) -> Guard | None:
        """What the trace took as given about the inputs; None when it asked nothing."""
        return Guard(_leading(self.tape[: self.asked_at]), tuple(self.answers)) if self.answers else None

    def plain(self, value: Any) -> Any:
        """A call's arguments, or a shape, as they are in the sample."""
        return value

    def hear(self, func: Any, args: Any, kwargs: Any) -> Any:
        if is_question(func, args):
            return self.computed.ask(func, args, kwargs, self._call, DataDependentOutputException)
        return self._call(func, args, kwargs)

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = list(_tensors((args, kwargs)))
        if not (all(t in self.known for t in tensors) and (tensors or func in FACTORIES)):
            if tensors and _writes(func, kwargs) and tensors[0] in self.known:
                self._forget(self.known[tensors[0]].given)
            return self._called(func, args, kwargs)
        given = frozenset[int]().union(*(self.known[t].given for t in tensors))
        if _writes(func, kwargs) and any(i in self.of_state for i in given):  # the tape must not change the model
            self._forget(given)
            return func(*args, **kwargs)
        real = self._really(func, args, kwargs)
        if real is None:
            return func(*args, **kwargs)
        if func in QUESTIONS:
            return self._answer(func, args, kwargs, real[0], given)
        result = self._called(func, args, kwargs)
        self._remember(func, args, kwargs, result, real[0], given)
        return result

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The call; where it asks for the number in a tensor (a fill value), with that number."""
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException:
            numbers = [t for t in _tensors((args, kwargs)) if t.dim() == 0 and t in self.known]
            if not numbers or func in QUESTIONS:
                raise
            asked = {id(t): self._call(Tensor.item, (t,), {}) for t in numbers}
            return func(*pytree.tree_map(lambda a: asked.get(id(a), a), args),
                        **pytree.tree_map(lambda a: asked.get(id(a), a), kwargs))  # fmt: skip

    def _know(self, traced: torch.Tensor, known: Known) -> None:
        self.known[traced] = known
        if isinstance(traced, FunctionalTensor):
            self.known[traced.elem] = known  # which its own `tolist` asks

    def _forget(self, given: frozenset[int]) -> None:
        """What was changed cannot be followed: forget it, and all that may share its memory."""
        for tensor, known in list(self.known.items()):
            if not any(i in self.of_state for i in given) or known.given & given:
                del self.known[tensor]

    def _answer(self, func: Any, args: Any, kwargs: Any, real: Any, given: frozenset[int]) -> Any:
        if not given:
            return real
        may_be = all(is_question(func, args) or (i in self.of_state and i not in self.changing) for i in given)
        now = all(mutation_count(self.traced[i]) == self.before[i] for i in given if i in self.of_state)
        if not (may_be and now):
            return func(*args, **kwargs)  # fails to trace, and says where
        self._record(func, args, kwargs, 0)
        self.answers.append(real)
        self.asked_at = len(self.tape)
        return real

    def _record(self, func: Any, args: Any, kwargs: Any, count: int) -> int:
        stored = pytree.tree_map(lambda a: Ref(self.known[a].number) if isinstance(a, torch.Tensor) else a,
                                 (args, kwargs))  # fmt: skip
        first = self.count
        self.tape.append(Call(func, stored[0], stored[1], first, count))
        self.count += count
        return first

    def _really(self, func: Any, args: Any, kwargs: Any) -> tuple[Any] | None:
        """The call on real values, in a 1-tuple; None where it cannot be made."""
        with outside_tracing(), _Known():
            try:
                real_args, real_kwargs = pytree.tree_map(self._value, self.plain((args, kwargs)))
                return (func(*real_args, **real_kwargs),)
            except Exception:  # noqa: BLE001 - whatever it is, tracing the call itself will say it better
                return None

    def _value(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self.known[leaf].value
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    def _remember(self, func: Any, args: Any, kwargs: Any, result: Any, real: Any, given: frozenset[int]) -> None:
        pairs = list(zip(_tensors(result), _tensors(real), strict=False))
        if not pairs or any(self.plain(t.shape) != v.shape or v.numel() > LARGEST for t, v in pairs):
            return
        if given and _writes(func, kwargs):  # views of what was written may be known as constants
            for tensor, known in list(self.known.items()):
                self.known[tensor] = replace(known, given=known.given | given)
        first = self._record(func, args, kwargs, len(pairs))
        for i, (traced, value) in enumerate(pairs):
            same = self.known.get(traced)  # an in-place op returns its argument
            self._know(traced, Known(value, first + i, given if same is None else given | same.given))


def _is_discrete(real: torch.Tensor) -> bool:
    return not (real.is_floating_point() or real.is_complex() or real.is_meta) and real.numel() <= LARGEST


def _is_small_state(real: torch.Tensor) -> bool:
    plain = type(real) is Tensor and real.layout is torch.strided and not (real.is_meta or real.requires_grad)
    return plain and real.numel() <= LARGEST_OF_STATE


class _Known(TorchDispatchMode):
    """Raises before an op draws: what it would draw is known of no other step, and the generator is all threads'."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise LookupError(f"{func} draws")
        return func(*args, **(kwargs or {}))


def _leading(tape: Sequence[Call]) -> tuple[Call, ...]:
    """The calls that the questions on a tape depend on; all where one of them changes what another made."""
    if any(_writes(call.func, call.kwargs) for call in tape):
        return tuple(tape)
    wanted: set[int] = set()
    found = []
    for call in reversed(tape):
        if not call.count or not wanted.isdisjoint(call.results):
            wanted |= _read(call)
            found.append(call)
    return tuple(reversed(found))


def _read(call: Call) -> set[int]:
    """The numbers of the values that a call reads."""
    return {a.index for a in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(a, Ref)}


def _resolve(tree: Any, values: dict[int, Any]) -> Any:
    return pytree.tree_map(lambda a: values[a.index] if isinstance(a, Ref) else a, tree)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor))


def _writes(func: Any, kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    return "out" in kwargs or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
