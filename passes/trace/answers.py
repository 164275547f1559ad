"""Yes-or-no questions about values that a forward computes: `if not torch.isfinite(h).all():`, an `assert`, the checks
of `torch.distributions`.

A trace has no values. So the forward runs once on the sample (`asking`), and its answers are written down: the trace
takes them, and what was asked becomes an output of the step, which compares it with the sample's answer each time it
runs (`passes.run.step`). Another answer leaves the call to the plain forward.

Only checks are taken so, which look for elements of a kind (`any`, `all`, `isnan`): nearly every batch answers them in
one way. A branch on how one number compares with another (`if x.mean() > 0:`) is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._torch import LEFT_ALIGNED, TRUE_OF_ALL_OR_ANY, is_traced
from ..errors import CaptureError
from .places import place, user_frame

_TRUE = frozenset({Tensor.__bool__, torch.is_nonzero, Tensor.is_nonzero})
# What asks of two tensors whether all elements are alike -> what asks it of each.
_ALIKE: dict[Any, Any] = {
    torch.equal: torch.eq, Tensor.equal: torch.eq, torch.allclose: torch.isclose, Tensor.allclose: torch.isclose,
}  # fmt: skip
YES_OR_NO = _TRUE | _ALIKE.keys() | {LEFT_ALIGNED}
_LOOKING = frozenset({
    *TRUE_OF_ALL_OR_ANY,
    *(getattr(of, name) for of in (torch, Tensor) for name in ("all", "any", "isnan", "isinf", "isfinite")),
})  # fmt: skip


class Unanswered(Exception):
    """Ends a trace whose forward asks what only the sample's values tell."""


@dataclass(frozen=True)
class Asked:
    """A question, and how the sample answers it.

    Attributes:
        place: `file:line: `source`` of the user's code.
        is_check: whether it looks for elements of a kind.
    """

    place: str
    answer: bool
    is_check: bool


def looks_for_elements(func: Any) -> bool:
    """Whether a function tells whether there are elements of a kind, in all or in one place."""
    return func in _LOOKING or func in _ALIKE


def is_question(func: Any, args: Sequence[Any]) -> bool:
    """Whether a call asks yes or no about the values of tensors."""
    return func in YES_OR_NO or (func is Tensor.item and args[0].dtype is torch.bool)


def asked_at() -> str:
    """The place in the user's code from which a function mode is called."""
    return place(user_frame(sys._getframe(1)))


class Listening(TorchFunctionMode):
    """Hears of each call, those within a function of torch's that asks (`F.gaussian_nll_loss`) included."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (body := _body(func)) is not None:
            with self:
                return body(*args, **(kwargs or {}))
        return self.hear(func, args, kwargs or {})

    def hear(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Make one call of torch's."""
        raise NotImplementedError


class Answers:
    """The sample's answers, for one run of a forward that is traced.

    Args:
        sample: all that the forward asks on the sample, in order; None where that is not known.

    Attributes:
        found: the questions that only the sample could answer, with what was asked about, as a boolean of no dimension.
        wanted: whether there was one that it could not.
    """

    def __init__(self, sample: Sequence[Asked] | None) -> None:
        self.sample, self.count, self.wanted = tuple(sample or ()), 0, False
        self.expected = len(self.sample)
        self.found: list[tuple[Asked, Tensor]] = []

    def ask(self, func: Any, args: Any, kwargs: Any, ask: Callable[..., Any], unknown: type[Exception]) -> Any:
        """The answer that `ask` gives, or the sample's where it raises `unknown`.

        Raises:
            Exception: `unknown`, where the sample is not known, or the forward asked something else there.
        """
        number, self.count = self.count, self.count + 1
        here = next((a for a in self.sample[number : number + 1] if a.place == asked_at()), None)
        check = here if here is not None and here.is_check else None
        try:
            if not _more_than_shapes(func, args):
                answer = False
            elif check is not None and not any(map(is_traced, args)):  # forward holds it: it may change
                return self._find(check, func, args, kwargs)
            else:
                answer = ask(func, args, kwargs)
        except unknown:
            if check is None:
                self.wanted = True
                raise
            return self._find(check, func, args, kwargs)
        if here is None or here.answer != bool(answer):
            self.sample = self.sample[:number]  # what follows is not known
        return answer

    def _find(self, check: Asked, func: Any, args: Any, kwargs: Any) -> bool:
        self.found.append((check, _as_tensor(func, args, kwargs)))
        return check.answer

    def check_all_asked(self) -> None:
        """Raise where the sample asked more than the run that is traced: its answers may be those to other questions.

        Raises:
            CaptureError: it did.
        """
        if self.found and self.count != self.expected:
            raise CaptureError(
                f"forward asks {self.count} questions about the values of tensors while it is traced, and "
                f"{self.expected} on the sample: what it asks depends on who asks."
            )


def _more_than_shapes(func: Any, args: Any) -> bool:
    """Whether values decide what a question is answered."""
    return func not in (torch.equal, Tensor.equal) or args[0].shape == args[1].shape


def _as_tensor(func: Any, args: Any, kwargs: Any) -> Tensor:
    value = args[0] if func not in _ALIKE else _ALIKE[func](*args, **kwargs).all()
    return torch.ne(value.detach().reshape(()), 0)  # memory of its own, whatever is written later


@cache
def _body(func: Any) -> Callable[..., Any] | None:
    """What a function of torch's does once nobody overrides it, if that asks about values in Python; else None."""
    names = func.__code__.co_names if isinstance(func, FunctionType) else ()
    overrides = {name: _never for name in names if name.startswith("has_torch_function")}
    if not (overrides and {"any", "all"} & {*names}):
        return None
    world = {**func.__globals__, **overrides}
    body = FunctionType(func.__code__, world, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _never(*_: Any) -> bool:
    return False
