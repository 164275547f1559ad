"""Values known while tracing: those that depend on no input, and those of the sample's masks, under guard.

A fake tensor has no data, so `if (positions.diff() != 1).any()` cannot be decided although `positions` is an
`arange` and the answer is the same at every call. Beside each traced tensor that was computed from constants
alone, its real value is computed too; where Python asks for it, it is there.

Integer and boolean inputs (tokens, masks) carry the sample's values along in the same way, and what is computed
from them is written on a tape. A yes-or-no question about such a value (`if mask.all():`) is answered for the sample,
and the answer becomes a `Guard`: before each call the tape is played on the call's own inputs, and another answer
means another plan. So do small buffers (a flag, a count, strides), floats and
numbers too, as they seldom change: where forward itself changes one, only yes-or-no questions about it are answered,
and only before. Numbers of inputs (how many elements a mask picks, lengths) are answered as long as all calls have the
sample's: `may_count`. What depends on a float input, a parameter or randomness stays unknown: see `answers`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from passes._torch import (
    LEFT_ALIGNED,
    DataDependentOutputException,
    DisableTorchFunction,
    FakeTensor,
    FunctionalTensor,
    TorchDispatchMode,
    WeakIdKeyDictionary,
    behind_functional,
    disable_current_modes,
    left_aligned,
    mutation_count,
    outside_tracing,
)

from .answers import YES_OR_NO, Answers, Asked, Listening, is_question
from .guards import Call, Guard, Ref, leading, mapped, tensors_in, writes
from .masks import at_places

LARGEST = 1 << 22  # elements
LARGEST_OF_STATE = 1 << 10
FACTORIES = frozenset({torch.arange, torch.zeros, torch.ones, torch.full, torch.tensor, torch.linspace, torch.eye,
                       torch.scalar_tensor})  # fmt: skip
_NUMBERS: set[Any] = {Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.tolist}
QUESTIONS = YES_OR_NO | {left_aligned, Tensor.item, Tensor.tolist, Tensor.__int__, Tensor.__float__, Tensor.__index__}


@dataclass(frozen=True)
class Known:
    """A real value, its number on the tape, and the numbers of what the step is given that it depends on.

    Attributes:
        version: how often the traced tensor was changed when that was its value.
    """

    value: torch.Tensor
    number: int
    given: frozenset[int]
    version: int = 0

    @property
    def memory(self) -> int:
        """What tensors that share memory have in common."""
        with DisableTorchFunction():  # other modes would be told of it
            return self.value.untyped_storage()._cdata


class KnownValues(Listening):
    """Keeps real values beside traced ones and answers Python's questions about them.

    Args:
        traced, sample: the step's parameters, buffers and inputs as traced, and as they are.
        state: how many of them are parameters and buffers, the first ones.
        changing: the numbers of those that forward is known to change.
        asked: all that forward asks on the sample; see `answers`.
        may_count: whether to answer with numbers of the inputs.

    Attributes:
        taken: tensors that the step is not given, and whose numbers Python took.
    """

    def __init__(
        self, traced: Sequence[torch.Tensor] = (), sample: Sequence[torch.Tensor] = (), state: int = 0,
        changing: Collection[int] = (), asked: Sequence[Asked] | None = None, may_count: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.computed = Answers(asked)
        self.known = WeakIdKeyDictionary()
        self.taken: list[Tensor] = []
        self.tape: list[Call] = []
        self.answers: list[Any] = []
        self.asked_at, self.may_count, self.counts = 0, may_count, False
        self.traced, self.changing, self.count = traced[:state], changing, len(traced)
        self.of_state = range(state)
        self.before = [mutation_count(t) for t in self.traced]
        with disable_current_modes():
            for i, (tensor, real) in enumerate(zip(traced, sample, strict=True)):
                if (_is_small_state if i < state else _is_discrete)(real):
                    self._know(tensor, Known(real.detach().cpu().clone(), i, frozenset({i})))
        self.given = {known.memory: known.number for known in self.known.values()}

    @property
    def guard(self) -> Guard | None:
        """What the trace took as given about the inputs; None when it asked nothing."""
        return Guard(leading(self.tape[: self.asked_at]), tuple(self.answers), self.counts) if self.answers else None

    def plain(self, value: Any) -> Any:
        """A call's arguments, or a shape, as they are in the sample."""
        return value

    def hear(self, func: Any, args: Any, kwargs: Any) -> Any:
        if is_question(func, args):
            return self.computed.ask(func, args, kwargs, self._call, DataDependentOutputException)
        if func in _NUMBERS and not isinstance(args[0], (FunctionalTensor, FakeTensor)) and self._of(args[0]) is None:
            self.taken.append(args[0])
            with disable_current_modes():  # which would give a fake tensor's memory, of which there is none
                return func(*args, **kwargs)
        return self._call(func, args, kwargs)

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is LEFT_ALIGNED:  # whatever the values of the other tensor
            func, args = left_aligned, args[1:]
        tensors = list(tensors_in((args, kwargs)))
        known = [t for t in tensors if self._of(t) is not None]
        given = frozenset[int]().union(*(self.known[t].given for t in known))
        before = _versions(known)
        follows = len(known) == len(tensors) and (tensors or func in FACTORIES)
        real = self._really(func, args, kwargs) if follows else None
        if real is not None and func in QUESTIONS:
            return self._answer(func, args, kwargs, real[0], given)
        result = self._called(func, args, kwargs, known)
        written = [t for t, then, now in zip(known, before, _versions(known), strict=True) if now != then]
        into = {self.known[t].memory for t in written}
        wrote = bool(written) or writes(func, kwargs)
        if into and (real is None or not into.isdisjoint(self.given)):  # the tape must not write into what is given
            self._forget(into)
        elif real is not None:
            self._remember(func, args, kwargs, result, real[0], given, wrote, into)
        return result

    def _called(self, func: Any, args: Any, kwargs: Any, known: Sequence[Tensor]) -> Any:
        """The call; where it asks for the number in a tensor (a fill value), with that number."""
        for tensor in known if self.may_count else ():
            if isinstance(tensor, FunctionalTensor):
                self._know(behind_functional(tensor), self.known[tensor])  # `counted` is asked for that
        args, kwargs = at_places(func, args, kwargs, known if self.may_count else ())
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            asks = isinstance(error, DataDependentOutputException) or func is torch.tensor  # which reads their memory
            numbers = [t for t in known if t.dim() == 0]
            if not (asks and numbers) or func in QUESTIONS:
                raise
            asked = {id(t): self._call(Tensor.item, (t,), {}) for t in numbers}
            args, kwargs = mapped(lambda a: asked.get(id(a), a), (args, kwargs))
            return func(*args, **kwargs)

    def _of(self, traced: torch.Tensor) -> Known | None:
        """What is known of a tensor; nothing of what was changed in a way that was not followed (by another name)."""
        known: Known | None = self.known.get(traced)
        if known is None or known.version == _versions([traced])[0]:
            return known
        self._forget({known.memory})
        return None

    def _know(self, traced: torch.Tensor, known: Known) -> None:
        # Of a functional one, `tolist` asks what is within.
        for each in (traced, traced.elem) if isinstance(traced, FunctionalTensor) else (traced,):
            self.known[each] = replace(known, version=_versions([each])[0])

    def counted(self, traced: Tensor, count: Callable[[Tensor], Tensor]) -> Tensor | None:
        """The value of what says how long an op's result is, if `count` of it may be taken as the sample's."""
        known = self._of(traced)
        if known is None or not known.given:
            return None if known is None else known.value
        if not self._may_answer(known.given, is_number=True):
            return None
        with outside_tracing():
            number, made = count(known.value), torch.empty((), device="meta")
        self._know(made, Known(number, self._record(count, (traced,), {}, 1), known.given))
        self._answered(Tensor.item, (made,), {}, int(number), known.given)
        return known.value

    def _forget(self, memory: Collection[int]) -> None:
        """What was changed cannot be followed: forget it, and all that may share its memory, as inputs may."""
        of_inputs = any(self.given.get(each, -1) not in (-1, *self.of_state) for each in memory)
        for tensor, known in list(self.known.items()):
            if of_inputs or known.memory in memory:
                del self.known[tensor]

    def _answer(self, func: Any, args: Any, kwargs: Any, real: Any, given: frozenset[int]) -> Any:
        if not given:
            return real
        is_number = not is_question(func, args)
        if not self._may_answer(given, is_number) or (is_number and args[0].numel() > LARGEST_OF_STATE):
            return func(*args, **kwargs)  # fails to trace, and says where
        return self._answered(func, args, kwargs, real, given)

    def _may_answer(self, given: frozenset[int], is_number: bool) -> bool:
        def may_tell(i: int) -> bool:
            return i not in self.changing if i in self.of_state else self.may_count

        now = all(mutation_count(self.traced[i]) == self.before[i] for i in given if i in self.of_state)
        return now and (not is_number or all(map(may_tell, given)))

    def _answered(self, func: Any, args: Any, kwargs: Any, real: Any, given: frozenset[int]) -> Any:
        self._record(func, args, kwargs, 0, asks=True)
        self.answers.append(real)
        self.asked_at = len(self.tape)
        self.counts = self.counts or not (is_question(func, args) or all(i in self.of_state for i in given))
        return real

    def _record(self, func: Any, args: Any, kwargs: Any, count: int, **does: bool) -> int:
        stored = mapped(lambda a: Ref(self.known[a].number) if isinstance(a, torch.Tensor) else a, (args, kwargs))
        first = self.count
        self.tape.append(Call(func, stored[0], stored[1], first, count, **does))
        self.count += count
        return first

    def _really(self, func: Any, args: Any, kwargs: Any) -> tuple[Any] | None:
        """The call on real values, in a 1-tuple; None where it cannot be made."""
        with outside_tracing(), _Known():
            try:
                real_args, real_kwargs = mapped(self._value, self.plain((args, kwargs)))
                return (func(*real_args, **real_kwargs),)
            except Exception:  # noqa: BLE001 - whatever it is, tracing the call itself will say it better
                return None

    def _value(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self.known[leaf].value
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    def _remember(
        self, func: Any, args: Any, kwargs: Any, result: Any, real: Any, given: frozenset[int], wrote: bool,
        into: Collection[int],
    ) -> None:  # fmt: skip
        pairs = list(zip(tensors_in(result), tensors_in(real), strict=False))
        if any(self.plain(t.shape) != v.shape or v.numel() > LARGEST for t, v in pairs):
            self._forget(into)
            return
        if not (pairs or wrote):
            return
        for tensor, known in list(self.known.items()) if into else ():
            if known.memory in into:  # a view of what was written may be known as a constant
                self._know(tensor, replace(known, given=known.given | given))
        first = self._record(func, args, kwargs, len(pairs), writes=wrote)
        for i, (traced, value) in enumerate(pairs):
            same = self.known.get(traced)  # an in-place op returns its argument
            self._know(traced, Known(value, first + i, given if same is None else given | same.given))


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    with DisableTorchFunction():  # other modes would be told of it
        return list(map(mutation_count, tensors))


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
