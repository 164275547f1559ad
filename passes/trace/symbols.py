"""A trace whose sizes are symbols, and beside it the script of what the forward asks of torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import nn

from passes._torch import (
    FakeTensorMode,
    JointGraph,
    Symbols,
    disable_current_modes,
    local_part,
    native_kernels,
    number_of,
    pytree,
    symbolic,
    without_sources,
)
from passes.exclusive import exclusive, interrupt_point
from passes.run.tensors import nodes_behind

from .capture import StepTracer, drop_tangents_of_state, export_step
from .contexts import private_contexts
from .given import Returned
from .inside import places_among
from .isolate import isolated
from .layouts import EagerFakes
from .notation import Departed, Pinned
from .script import Script
from .settings import Setting
from .strides import NORMS, VIEWS, of_layer_norm
from .templates import shared
from .value_guards import KnownValues

aten = torch.ops.aten


class SizedTracer(StepTracer):
    """Traces a step with symbols, and writes its script.

    Args:
        sets: what the step was seen to set at other sizes.

    Attributes:
        returned: the numbers of the forward's results in the script.
    """

    def __init__(self, sets: Sequence[Setting], *args: Any) -> None:
        super().__init__(*args)
        self.symbols, self.recorder = Symbols(), _Unrecorded(self.model, sets)  # type: ignore[assignment]
        self.places = tuple(places_among(sets))
        self.script: Script
        self.returned: tuple[int, ...] = ()

    def trace(self, others: Sequence[Sequence[torch.Tensor]]) -> JointGraph:
        """The joint graph; the sizes that are others in the inputs of `others` are symbols in it."""
        alone = isolated(self.model, self.loss_fn, shared(self.input_template))
        with exclusive(), alone as self.before, private_contexts(), without_sources():
            try:
                joint = export_step(self, self._inputs(others))
            except Exception as error:
                raise (Pinned if self.symbols.pinned else Departed)(str(error)) from error
        tangents = sum(leaf.differentiated for leaf in self.leaves)
        drop_tangents_of_state(joint.graph_module.graph, len(self.given), tangents)
        return joint

    def _inputs(self, others: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        mode, first, fakes = _SizedFakes(self.symbols), len(self.entries), []
        for i, tensor in enumerate(map(local_part, self.given)):
            alike = [inputs[i - first] for inputs in others] if i >= first else []
            dims = [d for d in range(tensor.dim()) if any(t.shape[d] != tensor.shape[d] for t in alike)]
            fakes.append(self.symbols.fake(mode, i, tensor, dims).requires_grad_(tensor.requires_grad))
        return fakes

    def _run(self, flat: Sequence[torch.Tensor], *modes: Any) -> Any:
        self.script = Script(flat, self.symbols.sample)
        self.below = (self.script,)
        result = super()._run(flat, *modes)
        _refuse_own_backwards(result.tensors)
        return result

    def take_replaced(self, result: Returned) -> None:
        super().take_replaced(result)
        self.returned = self.script.of(result.tensors)
        self.script.close()

    def _first_run(self, flat: Sequence[torch.Tensor]) -> Any:
        return self._run(flat)

    def _known_values(self, flat: Sequence[torch.Tensor]) -> KnownValues:
        return _SizedValues(flat, self.given, len(self.entries), self.symbols)


class _Unrecorded:
    """In the place of a recorder: what is read is recorded where it counts, at each call's own sizes."""

    written: frozenset[Any] = frozenset()
    looked_at: frozenset[Any] = frozenset()
    identity = ""

    def __init__(self, model: nn.Module, sets: Sequence[Setting]) -> None:
        self.model, self.sets = model, [s for s in sets if not s.within and not s.is_buffer(model)]

    def stop(self) -> None: ...

    def follow_backward(self) -> None: ...

    def recording(self, tensors: Any) -> Any:
        return nullcontext()

    def take_arguments(self, bound: Any, template: Any) -> None: ...

    def take_numbers(self, tensors: Any) -> None: ...

    def settings(self) -> tuple[Setting, ...]:
        return tuple(s if s.template is None else replace(s, value=s.now(self.model), template=None) for s in self.sets)


def _refuse_own_backwards(outputs: Sequence[torch.Tensor]) -> None:
    """Python that runs in the backward is not in the script."""
    if any(isinstance(node, torch.autograd.function.BackwardCFunction) for node in nodes_behind(outputs)):
        raise Departed("a backward of the user's own")


class _SizedValues(KnownValues):
    def __init__(
        self, traced: Sequence[torch.Tensor], sample: Sequence[torch.Tensor], state: int, symbols: Symbols
    ) -> None:
        super().__init__(traced, sample, state, range(state))
        self.symbols = symbols

    def plain(self, value: Any) -> Any:
        return plain(value, self.symbols)


class _SizedFakes(EagerFakes):
    """Fake tensors with symbols in their sizes, whose layouts are those that the kernels make, or `Departed`."""

    def __init__(self, symbols: Symbols) -> None:
        super().__init__(allow_non_fake_inputs=True, shape_env=symbols.shapes)
        self.cache_enabled, self.symbols = False, symbols

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        interrupt_point()
        if self.symbols.pinned:
            raise Pinned("a size is taken as a number")
        dispatch = FakeTensorMode.__torch_dispatch__
        result: Any = dispatch(self, func, types, args, kwargs or {})
        if func in VIEWS and not kwargs:
            made = self._made(func, args)
            if made != self._strides(result):
                strides = (_of_expand if func is aten.expand.default else _of_view)(args[0], result.shape)
                place = result, result.size(), strides, result.storage_offset()
                result = dispatch(self, aten.as_strided.default, types, place, {})
            self._check(func, made, result)
        elif func in NORMS and args[0].device.type == "cpu" and result[0] is not None:
            made = self._made(func, args)
            if made != self._strides(result[0]) and NORMS[func] is of_layer_norm:
                strides = _contiguous(args[0].shape)
                result = (self._laid_out(types, result[0], strides, result[0].dtype, is_view=False), *result[1:])
            self._check(func, made, result[0])
        return result

    def _made(self, func: Any, args: Any) -> tuple[int, ...]:
        """The strides that the kernel makes in the sample."""
        with disable_current_modes(), native_kernels():
            stand_ins = pytree.tree_map(self._stand_in, args)
            return tuple(NORMS[func](stand_ins) if func in NORMS else func(*stand_ins).stride())

    def _check(self, func: Any, made: tuple[int, ...], result: Any) -> None:
        if made != self._strides(result):
            raise Departed(f"{func} is laid out in another way than its rule says")

    def _strides(self, value: torch.Tensor) -> tuple[int, ...]:
        strides: tuple[int, ...] = self._plain(tuple(value.stride()))
        return strides

    def _stand_in(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            shape, strides = self._plain(tuple(value.size())), self._plain(tuple(value.stride()))
            return torch.empty_strided(shape, strides, dtype=value.dtype, device="meta")
        return self._plain(value)

    def _plain(self, value: Any) -> Any:
        return plain(value, self.symbols)


def _contiguous(shape: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1]


def _of_expand(source: torch.Tensor, shape: Sequence[Any]) -> tuple[Any, ...]:
    """The strides of an expanded tensor (inferExpandGeometry, ExpandUtils.cpp)."""
    strides: list[Any] = []
    for back in range(1, len(shape) + 1):
        size, inner = shape[-back], shape[len(shape) - back + 1 :]
        there = back <= source.dim()
        own = source.shape[-back] if there else 1
        stride = source.stride()[-back] if there else (inner[0] * strides[0] if strides else 1)
        strides.insert(0, stride if own == size else 0)
    return tuple(strides)


def _of_view(source: torch.Tensor, shape: Sequence[Any]) -> tuple[Any, ...]:
    """The strides of a view of a tensor with elements (computeStride, TensorUtils.cpp)."""
    sizes, own = source.size(), source.stride()
    strides: list[Any] = []
    count, seen, base = 1, 1, own[-1] if sizes else 1
    for d in reversed(range(source.dim())):
        count *= sizes[d]
        if d and (sizes[d - 1] == 1 or own[d - 1] == count * base):
            continue  # one chunk of memory with the dimension before
        while len(strides) < len(shape) and (seen < count or shape[-1 - len(strides)] == 1):
            strides.append(seen * base)
            seen *= shape[-len(strides)]
        count, seen, base = 1, 1, own[d - 1]
    return (*(1 for _ in range(len(shape) - len(strides))), *reversed(strides))


def plain(value: Any, symbols: Symbols) -> Any:
    """Numbers as they are in the sample, in the place of symbols."""
    if symbolic(value):
        return number_of(value.node.expr, symbols.sample)
    if isinstance(value, slice):
        return slice(*(plain(part, symbols) for part in (value.start, value.stop, value.step)))
    if isinstance(value, dict):
        return {key: plain(part, symbols) for key, part in value.items()}
    if type(value) in (tuple, list, torch.Size):
        return type(value)([plain(part, symbols) for part in value])
    return value
