"""Steps made of torch's own test databases: every differentiable op (`op_db`) and module (`module_db`)."""

from __future__ import annotations

import fnmatch
import importlib.util
import itertools
import random
import sys
import types
import unittest
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

if importlib.util.find_spec("expecttest") is None:  # torch's test helpers import it; the databases do without
    stand_in: Any = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase
    sys.modules["expecttest"] = stand_in

from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db


def _unseeded(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


common_methods_invocations.wrapper_set_seed = _unseeded  # every step here is seeded, and tests what an op draws

FORMS = ("inside", "outside")
DTYPES = {"float32": torch.float32, "complex64": torch.complex64, "bfloat16": torch.bfloat16}


class Step(nn.Module):
    """One call of `function`: its differentiable tensors are parameters, others buffers, integers its arguments.

    `inside`, each tensor is multiplied by a parameter of ones and the loss is part of the step. `outside`, the tensors
    are the parameters, in their own layouts, and the results are returned.
    """

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any, form: str) -> None:
        super().__init__()
        leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.module = function if isinstance(function, nn.Module) else None
        self.function, self.form = function, form
        self.places: list[tuple[str, Any]] = []
        self.parameter_list, self.sample = nn.ParameterList(), []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                self.places.append(("constant", leaf))
            elif leaf.requires_grad:
                index = len(self.parameter_list)
                data = leaf.detach()
                if form == "inside":
                    self.register_buffer(f"x{index}", data)
                self.parameter_list.append(nn.Parameter(torch.ones_like(data) if form == "inside" else data))
                self.places.append(("parameter", index))
            elif leaf.is_floating_point() or leaf.is_complex():  # may be changed in place, as running statistics are
                self.places.append(("buffer", f"b{len(self.places)}"))
                self.register_buffer(f"b{len(self.places) - 1}", leaf.detach())
            else:
                self.places.append(("input", len(self.sample)))
                self.sample.append(leaf.detach())

    def forward(self, *inputs: torch.Tensor) -> Any:
        args, kwargs = pytree.tree_unflatten([self.value(*place, inputs) for place in self.places], self.spec)
        tensors = [t for t in pytree.tree_leaves(self.function(*args, **kwargs)) if isinstance(t, torch.Tensor)]
        own = list(self.parameter_list)
        if self.form == "outside":
            return [t * 1 if t.requires_grad and (t._is_view() or any(t is p for p in own)) else t for t in tensors]
        return sum(real(t).sin().sum() for t in tensors if t.requires_grad)

    def value(self, kind: str, given: Any, inputs: tuple[torch.Tensor, ...]) -> Any:
        if kind == "constant":
            return given
        if kind == "input":
            return inputs[given]
        if kind == "buffer":
            return getattr(self, given)
        parameter = self.parameter_list[given]
        return parameter * getattr(self, f"x{given}") if self.form == "inside" else parameter


def real(value: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


@dataclass(frozen=True)
class Case:
    """One sample of an op or module; `make()` builds it anew with the same numbers."""

    name: str
    make: Callable[[], Step]


def cases(
    dtype: torch.dtype, forms: Iterable[str] = FORMS, samples: int = 1, names: Sequence[str] = (), modules: bool = True
) -> Iterator[Case]:
    """All samples of modules, and the first `samples` differentiable ones of every op; `names` are patterns, or all."""
    for op, form in itertools.product(op_db, forms):
        if op.supports_autograd and dtype in op.supported_backward_dtypes("cpu") and _asked(_name(op), names):
            yield from of_op(op, dtype, form, samples)
    for info, form in itertools.product(module_db if modules else (), forms):
        if (dtype in info.dtypes or dtype is torch.bfloat16) and _asked(info.name, names):
            yield from of_module(info, dtype, form)


def _asked(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, p) for p in patterns)


def _name(op: Any) -> str:
    return f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''}"


def of_op(op: Any, dtype: torch.dtype, form: str, samples: int) -> Iterator[Case]:
    def drawn() -> Iterator[tuple[int, Any]]:
        _seed()
        # not `op.sample_inputs`, which walks the stack to note who asked
        return enumerate(op.sample_inputs_func(op, "cpu", dtype, True))

    usable = (i for i, sample in drawn() if _usable((sample.input, sample.args, sample.kwargs)))
    for index in list(itertools.islice(usable, samples)):

        def make(index: int = index) -> Step:
            sample = next(sample for i, sample in drawn() if i == index)
            return Step(op.op, (sample.input, *sample.args), sample.kwargs, form)

        yield Case(f"{_name(op)}[{index}] {form}", make)


def of_module(info: Any, dtype: torch.dtype, form: str) -> Iterator[Case]:
    def drawn() -> Any:
        _seed()
        return info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=True)

    for index, inputs in enumerate(drawn()):

        def make(index: int = index) -> Step:
            sample = drawn()[index]
            made, given = sample.constructor_input, sample.forward_input
            torch.manual_seed(1)
            module = info.module_cls(*made.args, **made.kwargs).to(dtype).train()
            return Step(module, given.args, given.kwargs, form)

        if inputs.forward_input is not None:
            yield Case(f"{info.name}[{index}] {form}", make)


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def _usable(arguments: Any) -> bool:
    """Whether a sample asks for a gradient, of dense tensors."""
    tensors = [t for t in pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor)]
    return any(t.requires_grad for t in tensors) and all(t.layout is torch.strided and not t.is_nested for t in tensors)
