"""Layouts that tracing would lose: an in-place op keeps its tensor's strides in eager, its traced twin does not.

Functionalization turns `gate.sigmoid_()` into `sigmoid(gate)`, whose result is dense also where `gate` was a slice of
a wider buffer. Arithmetic does not care, but a kernel that runs vectorized inside and scalar at the end of each row
(exp, sigmoid, tanh, sums) gives other last bits on other strides: that is how a GRU's cells differ. The tensor handed
to such a kernel is laid out as in eager first.

And some of torch's shape rules lay results out in another way than the kernels do: a traced `view` of such a result
would fail when it runs, a sum over it go another way, or a convolution choose another kernel. `EagerFakes` corrects
them: norms and views by rules (`strides`), and whatever else profiling, which runs every op once, has found to be
laid out in another way or of another dtype (`learned`). The step is then traced again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from passes._torch import (
    FakeTensor,
    FakeTensorMode,
    FunctionalTensor,
    TorchDispatchMode,
    pytree,
)
from passes.exclusive import interrupt_point
from passes.fuse.fused import LIBRARY
from passes.ops import looks_at_values

from .constants import Constants
from .leaks import Remembered
from .refuse import own_generator, part_drawn
from .strides import NORMS, VIEWS, Made, Strides, of_view

aten = torch.ops.aten

# Ops whose results are the same bits in every layout: each element by itself, rounded once, or only moved.
LAYOUT_FREE = frozenset(
    getattr(aten, name)
    for name in (
        "add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "neg", "neg_", "abs", "abs_", "relu", "relu_",
        "clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_", "maximum", "minimum", "sqrt", "sqrt_",
        "where", "masked_fill", "masked_fill_", "copy_", "copy", "clone", "fill_", "zero_", "_to_copy", "cat", "stack",
        "lt", "le", "gt", "ge", "eq", "ne", "zeros_like", "ones_like", "empty_like", "full_like", "contiguous",
        "ceil", "floor", "round", "trunc", "sign", "sgn", "threshold", "hardtanh", "hardtanh_", "leaky_relu",
        "leaky_relu_", "index_select", "gather", "flip", "isnan", "isfinite",
    )
)  # fmt: skip


# Ops that write to an argument, too, in whose place functionalization puts one that keeps its argument's layout.
CONTIGUOUS = frozenset({aten.rrelu_with_noise.default})


class EagerLayouts(TorchDispatchMode):
    """Gives kernels whose bits depend on it the layout that eager has, while the forward is traced."""

    def __init__(self, remembered: Remembered) -> None:
        super().__init__()
        self.remembered = remembered

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs and isinstance(kwargs.get("generator"), torch.Generator):
            raise own_generator(func.overloadpacket.__name__)
        if func is aten.normal_.default and args[0].device.type == "cpu" and _is_part(args[0]):
            raise part_drawn()
        if func is aten.bernoulli_.float:  # its twin draws in the order of the indices, it in that of memory
            func(_in_order_of_memory(args[0]), *args[1:], **(kwargs or {}))
            return args[0]
        result = self._laid_out(func, args, kwargs or {})
        if func in CONTIGUOUS:
            result = result.contiguous()
        self.remembered.add(result)
        return result

    def _laid_out(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func.overloadpacket in LAYOUT_FREE or func.is_view:
            return func(*args, **kwargs)
        laid_out: dict[int, torch.Tensor] = {}
        for leaf in pytree.tree_leaves((args, kwargs)):
            if _lost_layout(leaf):
                laid_out[id(leaf)] = torch.empty_strided(
                    leaf.size(), leaf.stride(), dtype=leaf.dtype, device=leaf.device
                ).copy_(leaf)
        if not laid_out:
            return func(*args, **kwargs)
        new_args, new_kwargs = pytree.tree_map(lambda leaf: laid_out.get(id(leaf), leaf), (args, kwargs))
        result = func(*new_args, **new_kwargs)
        for old, new in zip(pytree.tree_leaves(args), pytree.tree_leaves(new_args), strict=True):
            if old is not new and result is new:  # an in-place op: what it wrote belongs to the tensor it was given
                return old.copy_(new)
        return result


def _in_order_of_memory(value: torch.Tensor) -> torch.Tensor:
    return value.permute(sorted(range(value.dim()), key=lambda d: -value.stride()[d]))


def _is_part(value: torch.Tensor) -> bool:
    """Whether a copy is contiguous, and it is not: then the CPU's `normal_` draws 16 numbers or more in other ways."""
    copy = torch.empty_strided(value.size(), value.stride(), device="meta").clone()
    return value.numel() > 15 and copy.is_contiguous() and not value.is_contiguous()


def _lost_layout(value: Any) -> bool:
    """Whether a traced tensor's value is laid out in another way than the tensor is in eager."""
    if not isinstance(value, FunctionalTensor):
        return False
    strides = zip(value.shape, value.stride(), value.elem.stride(), strict=True)
    return any(size > 1 and eager != traced for size, eager, traced in strides)


BACKWARD_AUTOCAST = ("autocast in the backward",)  # the key of what calls were seen to run backward under

Layouts = dict[Any, tuple[Any, ...]]


class EagerFakes(FakeTensorMode):
    """Fake tensors whose layouts are those that the kernels make.

    Args:
        layouts: the strides and dtypes of an op's results, by its `call_key`.
    """

    def __init__(self, layouts: Layouts | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.layouts, self.constants = layouts or {}, Constants()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        interrupt_point()
        kwargs = kwargs or {}
        answer = self.constants.answer(func, args, kwargs)
        if answer is not None:
            return answer
        result = self._fake(func, types, args, kwargs)
        self.constants.follow(func, args, kwargs, result)
        return result

    def _fake(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        dispatch = super().__torch_dispatch__
        shapes = self.constants.shapes(func, args)
        if shapes is not None:
            dtype = torch.int64 if func is aten.nonzero.default else args[0].dtype
            options = {"dtype": dtype, "device": args[0].device}
            made = tuple(dispatch(aten.empty.memory_format, types, (shape,), options) for shape in shapes)
            return made if len(made) > 1 else made[0]
        result: Any = dispatch(func, types, args, kwargs)
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        if not results or not isinstance(results[0], FakeTensor):
            return result
        wanted: tuple[Made | None, ...] = ()
        if func in VIEWS and not kwargs:
            wanted = ((of_view(func, args), results[0].dtype),)
        elif self.layouts:
            wanted = self.layouts.get(call_key(func, args, kwargs), ())
        if func in NORMS and results[0].device.type == "cpu":
            wanted = ((NORMS[func](args), results[0].dtype), *wanted[1:])
        for i, (told, layout) in enumerate(zip(results, wanted, strict=False)):
            if layout is not None and isinstance(told, FakeTensor) and layout != (told.stride(), told.dtype):
                results[i] = self._laid_out(types, told, *layout, is_view=func in VIEWS)
        if isinstance(result, (tuple, list)):
            return results if type(result) is list else tuple(results)
        return results[0]

    def _laid_out(
        self, types: Any, value: FakeTensor, strides: Strides, dtype: torch.dtype, *, is_view: bool
    ) -> Any:
        dispatch = super().__torch_dispatch__
        if is_view:
            return dispatch(aten.as_strided.default, types, (value, value.size(), strides, value.storage_offset()), {})
        options = {"dtype": dtype, "device": value.device}
        return dispatch(aten.empty_strided.default, types, (value.size(), strides), options)


LIBRARY.define("laid_out(Tensor value, SymInt[] strides) -> Tensor")
LAID_OUT = torch.ops.planner.laid_out.default


@torch.library.register_fake("planner::laid_out", lib=LIBRARY)
def _in_strides(value: torch.Tensor, strides: list[int]) -> torch.Tensor:
    return torch.empty_strided(value.size(), strides, dtype=value.dtype, device=value.device)


class GivenGradient(torch.autograd.Function):
    """An output whose gradient comes in strides of its own; what says so is taken out of the graph again."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, strides: Strides) -> Any:
        ctx.strides = strides
        return LAID_OUT(output, output.stride())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return LAID_OUT(gradient, ctx.strides), None


def settle_gradients(graph: fx.Graph) -> None:
    """Let each gradient that comes in strides of its own be an input of the graph in those."""
    for node in graph.find_nodes(op="call_function", target=LAID_OUT):
        source: Any = node.args[0]
        if source.op == "placeholder" and source.name.startswith("tangents"):
            source.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(source)
        graph.erase_node(node)


def call_key(target: Any, args: Any, kwargs: Any) -> Any:
    """What decides how the results of a call are laid out; the same for a traced node and for its call."""
    leaves, _ = pytree.tree_flatten((args, kwargs))
    return target, tuple(_describe(leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf) for leaf in leaves)


def _describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), tuple(value.stride()), value.dtype, value.device
    return repr(value)


def learned(graph: fx.Graph, layouts: Mapping[fx.Node, Sequence[Made | None] | None]) -> Layouts:
    """The layouts that kernels made in another way than traced, of results that something else reads.

    Args:
        layouts: the strides and dtypes of each op's results, as they were when it ran.
    """
    found: Layouts = {}
    for node, made in layouts.items():
        ours = getattr(node.target, "namespace", "") == LIBRARY.ns  # made of traced ops, as they are laid out
        if made is None or (ours and not looks_at_values(node)):
            continue
        value = node.meta["val"]
        traced = list(value) if isinstance(value, (tuple, list)) else [value]
        readers = [_readers(node, i if isinstance(value, (tuple, list)) else None) for i in range(len(traced))]
        if any(_differ(t, m, r) for t, m, r in zip(traced, made, readers, strict=False)):
            found[call_key(node.target, node.args, node.kwargs)] = tuple(made)
    return found


def _readers(node: fx.Node, index: int | None) -> list[fx.Node]:
    items = [node] if index is None else [item for item in node.users if item.args[1] == index]
    users = [user for item in items for user in item.users]
    return [u for u in users if u.op != "output"]


def _differ(traced: Any, made: Made | None, readers: list[fx.Node]) -> bool:
    if not isinstance(traced, torch.Tensor) or made is None or not traced.numel():
        return False
    strides, dtype = made
    if dtype != traced.dtype:
        return True
    if not readers:  # a result of the step: where there is one index only, its stride says nothing
        return any(s > 1 and a != b for s, a, b in zip(traced.shape, traced.stride(), strides, strict=True))
    return tuple(traced.stride()) != strides
