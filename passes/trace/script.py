"""What a forward asks of torch, call by call: written down once while sizes are symbols, and held to at other sizes.

A `Script` is written beside a trace with symbolic sizes. `Played` runs the model's own Python at other sizes without
running any op: each call must be the next one of the script, with the arguments that the script has at these sizes,
and is answered with what the script says. Where the code does anything else, it took another path, and `Departed` is
raised. Numbers and flags that the code sees are those of the sizes played.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from passes._torch import FakeTensor, FunctionalTensor, inside_transform
from passes.run._torch import active_autocast

from .expected import same_value
from .notation import (
    IDENTICAL,
    PLAIN,
    At,
    Departed,
    Items,
    Look,
    Outside,
    Size,
    StandIn,
    Tensor,
    look_of,
    tensors_of,
    written,
)

# What only looks at a tensor is not written down: it is answered by how the tensor looks at the sizes played.
_LOOKS = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_meta", "is_sparse",
                 "is_quantized", "is_nested", "is_mkldnn", "is_xpu", "is_mps", "itemsize", "nbytes")
) | frozenset(
    getattr(torch.Tensor, name)
    for name in ("__len__", "size", "stride", "dim", "numel", "nelement", "ndimension", "get_device", "element_size",
                 "is_contiguous", "is_floating_point", "is_complex", "is_inference", "is_signed")
) | {torch.is_floating_point, torch.is_complex, torch.numel}  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """One call: what was asked, under which settings, with what, and the answer.

    `grown` are tensors that require a gradient since.
    """

    function: Any
    settings: Any
    arguments: Any
    answer: Any
    grown: tuple[int, ...]


class Script(TorchFunctionMode):
    """Writes down what a forward asks of torch.

    Args:
        given: its parameters, buffers and inputs, which are the first tensors.
        sample: the sizes that the symbols have meanwhile.
    """

    def __init__(self, given: Sequence[torch.Tensor], sample: Mapping[Any, int]) -> None:
        super().__init__()
        self.at = At(sample)
        self.asked: list[Asked] = []
        self.looks: list[Look] = []
        self.numbers: dict[int, int] = {}
        self.alive: list[torch.Tensor] = []
        self.given = len(given)
        for tensor in given:
            self._add(tensor)

    def _add(self, tensor: torch.Tensor) -> Tensor:
        if id(tensor) not in self.numbers:
            self.numbers[id(tensor)] = len(self.looks)
            self.looks.append(look_of(tensor))
            self.alive.append(tensor)
        return Tensor(self.numbers[id(tensor)])

    def _known(self, tensor: torch.Tensor) -> Tensor | Outside:
        if id(tensor) in self.numbers:
            return Tensor(self.numbers[id(tensor)])
        if isinstance(tensor, (FakeTensor, FunctionalTensor)) or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise Departed("a tensor that no call that is seen has made")
        return Outside(weakref.ref(tensor))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LOOKS:
            return func(*args, **kwargs)
        if inside_transform():
            raise Departed("a call under a transform of torch.func")
        arguments = written((list(args), kwargs), self._known)
        before, settings = tensors_of(arguments), _settings()
        looks = [self._plain_look(i) for i in before]
        result = func(*args, **kwargs)
        grown = []
        for i, (look, trained) in zip(before, looks, strict=True):
            now, trained_now = self._plain_look(i)
            if now != look:
                raise Departed("a tensor that changes its shape")
            if trained_now and not trained:
                grown.append(i)
        self.asked.append(Asked(func, settings, arguments, written(result, self._add), tuple(grown)))
        return result

    def _plain_look(self, index: int) -> tuple[Any, bool]:
        look = look_of(self.alive[index])
        return (self.at.numbers(look.shape), self.at.numbers(look.strides), look.dtype), look.requires_grad

    def of(self, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """The numbers of these tensors."""
        try:
            return tuple(self.numbers[id(t)] for t in tensors)
        except KeyError:
            raise Departed("an output that no call that is seen has made") from None

    def close(self) -> None:
        """Let go of the tensors."""
        self.alive.clear()
        self.numbers.clear()


def _settings() -> Any:
    """What decides, besides a call, what it computes."""
    return active_autocast(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()


class Played(TorchFunctionMode):
    """Holds a forward at the sizes of `at` to a script, and answers its calls."""

    def __init__(self, script: Script, at: At) -> None:
        super().__init__()
        self.script, self.at, self.place = script, at, 0
        self.made: dict[int, torch.Tensor] = {}
        self.numbers: dict[int, int] = {}
        for i in range(script.given):
            self._tensor(i)

    def given(self) -> list[torch.Tensor]:
        return [self.made[i] for i in range(self.script.given)]

    def _tensor(self, index: int) -> torch.Tensor:
        if index not in self.made:
            self.made[index] = tensor = StandIn.of(self.script.looks[index], self.at)
            self.numbers[id(tensor)] = index
        return self.made[index]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LOOKS:
            return func(*args, **(kwargs or {}))
        asked = self.script.asked[self.place] if self.place < len(self.script.asked) else None
        if asked is None or (asked.function, asked.settings) != (func, _settings()):
            raise Departed(f"call {self.place} is another one")
        if not self._agrees(asked.arguments, (list(args), kwargs or {})):
            raise Departed(f"call {self.place} is another one")
        self.place += 1
        if asked.answer is None and not tensors_of(asked.arguments):
            return func(*args, **(kwargs or {}))  # a setting, such as whether gradients are recorded
        answer = self._answer(asked.answer)
        for index in asked.grown:
            self.made[index].requires_grad_()
        return answer

    def of(self, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """The numbers of what the forward returned, at the end of the script."""
        if self.place != len(self.script.asked):
            raise Departed("calls are missing")
        return tuple(self.numbers.get(id(t), -1) for t in tensors)

    def _agrees(self, told: Any, found: Any) -> bool:
        match told:
            case Tensor(index):
                return isinstance(found, torch.Tensor) and self.numbers.get(id(found)) == index
            case Outside(tensor):
                return tensor() is found
            case Size():
                return same_value(self.at.number(told), found)
            case Items(kind, parts):
                return self._items_agree(kind, parts, found)
            case tuple():
                return isinstance(found, tuple) and len(told) == len(found) and all(map(self._agrees, told, found))
        return same_value(told, found) or (isinstance(told, (*PLAIN, *IDENTICAL)) and told == found)

    def _items_agree(self, kind: type, parts: tuple[Any, ...], found: Any) -> bool:
        if type(found) is not kind and {kind, type(found)} != {tuple, torch.Size}:
            return False
        if kind is slice:
            now: Any = (found.start, found.stop, found.step)
        else:
            now = list(found.items()) if isinstance(found, dict) else found
        return len(now) == len(parts) and all(map(self._agrees, parts, now))

    def _answer(self, told: Any) -> Any:
        match told:
            case Tensor(index):
                return self._tensor(index)
            case Outside(tensor):
                return tensor()
            case Size():
                return self.at.number(told)
            case Items(kind, parts):
                if issubclass(kind, dict):
                    return kind({key: self._answer(part) for key, part in parts})
                found: list[Any] = [self._answer(part) for part in parts]
                make: Any = kind
                return make(*found) if hasattr(kind, "_fields") else make(found)
        return told
