"""Ops that eager differentiates along another formula than a trace would.

Some of autograd's formulas look at values: whether a factor of `prod` is zero, where a full `max` lies. Under any
dispatch mode, which tracing is, they take a way around that gives other bits, or other strides (ATen's
`isTensorSubclassLike`). While tracing, such an op's backward is therefore one op of its own, `planner::gradient_of`,
that runs eager's formula. `python -m tests.databases.routes` finds them; with `--autocast`, kernels that call ops
which autocast casts: in eager it reaches those, and a planned step runs kernels without autocast.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from passes._torch import AUTOGRAD_KEYS, native_kernels, skip_autograd
from passes.errors import OnlyInEager, Unsupported
from passes.fuse.fused import LIBRARY
from passes.run._torch import active_autocast, under_autocast
from passes.run.gradients import gradient_of, sum_of_selected

from .constructs import CAST_WITHIN
from .places import place, user_frame

aten = torch.ops.aten

LIBRARY.define(
    "gradient_of(str op, Tensor gradient, Tensor[] tensors, int[] constants, int[] differentiated, int wanted) "
    "-> Tensor"
)
LIBRARY.impl("gradient_of", gradient_of, "CompositeExplicitAutograd")
GRADIENT_OF = torch.ops.planner.gradient_of.default


@torch.library.register_fake("planner::gradient_of", lib=LIBRARY)
def _of_shape(
    op: str, gradient: Any, tensors: list[Any], constants: list[int], differentiated: list[int], wanted: int
) -> Any:
    return torch.empty_like(tensors[wanted])


LIBRARY.define("sum_of_selected(Tensor values, Tensor mask) -> Tensor")
LIBRARY.impl("sum_of_selected", sum_of_selected, "CompositeExplicitAutograd")
SUM_OF_SELECTED = torch.ops.planner.sum_of_selected.default


@torch.library.register_fake("planner::sum_of_selected", lib=LIBRARY)
def _one_number(values: Any, mask: Any) -> Any:
    return values.new_empty(())


# Op -> positions of the arguments whose gradient takes another way.
REROUTED: dict[Any, tuple[int, ...]] = {
    aten.prod.default: (0,),
    aten.prod.dim_int: (0,),
    aten.cumprod.default: (0,),
    aten.max.default: (0,),
    aten.min.default: (0,),
    aten.median.default: (0,),
    aten.nanmedian.default: (0,),
    aten.masked_fill.Tensor: (2,),
    aten.ormqr.default: (0, 1, 2),
    aten.linalg_householder_product.default: (0, 1),
}
IN_PLACE = {aten.masked_fill_.Tensor: aten.masked_fill.Tensor, aten.cumprod_.default: aten.cumprod.default}


# Ops whose kernels, or gradients above, take products of matrices, and what they are called.
WITH_PRODUCTS = {
    aten._trilinear.default: "F.bilinear",
    aten._transformer_encoder_layer_fwd.default: "the fast path of nn.TransformerEncoderLayer",
    aten._native_multi_head_attention.default: "the fast path of nn.MultiheadAttention",
    aten.linalg_pinv.atol_rtol_tensor: "torch.linalg.pinv",
    aten.ormqr.default: "the gradient of torch.ormqr",
    aten.linalg_householder_product.default: "the gradient of torch.linalg.householder_product",
}  # fmt: skip


class _Rerouted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Any, constants: tuple[int, ...], *tensors: torch.Tensor) -> Any:
        ctx.op, ctx.constants = op, constants
        ctx.save_for_backward(*tensors)
        with skip_autograd():
            return op(*tensors, *constants)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        tensors, needed = list(ctx.saved_tensors), ctx.needs_input_grad[2:]
        _refuse_cast_products(ctx.op, tensors)
        name = str(ctx.op).removeprefix("aten.")
        differentiated = [i for i, wanted in enumerate(needed) if wanted]
        found = [
            GRADIENT_OF(name, gradient, tensors, list(map(int, ctx.constants)), differentiated, i) if wanted else None
            for i, wanted in enumerate(needed)
        ]
        return None, None, *found


def kernels() -> dict[tuple[Any, Any], Callable[..., Any]]:
    """What stands for each op on each of autograd's keys while tracing."""
    found: dict[Any, Callable[..., Any]] = {op: _kernel(op) for op in (*REROUTED, *IN_PLACE)}
    found |= {op: _products(op) for op in WITH_PRODUCTS if op not in found}
    found[aten.linalg_svdvals.default], found[aten.linalg_eigvalsh.default] = _svdvals, _eigvalsh
    found[aten.mkldnn_rnn_layer.default] = _rnn_layer
    found |= {aten.ctc_loss.IntList: _ctc_loss, aten.cross_entropy_loss.default: _cross_entropy_loss}
    found |= {aten.affine_grid_generator.default: _affine_grid, aten.cudnn_batch_norm.default: _cudnn_batch_norm}
    return {(op, key): kernel for op, kernel in found.items() for key in AUTOGRAD_KEYS}


MEAN = 1  # at::Reduction


def _ctc_loss(
    values: torch.Tensor, targets: torch.Tensor, inputs: list[int], lengths: list[int], blank: int = 0,
    reduction: int = MEAN, zero_infinity: bool = False,
) -> torch.Tensor:  # fmt: skip
    """ATen writes the lengths by which a mean divides straight into a tensor's memory, which no traced tensor has."""
    kind = reduction if reduction != MEAN else 0
    with native_kernels():
        losses: torch.Tensor = aten.ctc_loss.IntList(values, targets, inputs, lengths, blank, kind, zero_infinity)
    if reduction != MEAN:
        return losses
    return (losses / torch.tensor(lengths, dtype=losses.dtype, device=losses.device).clamp_min(1)).mean()


def _kernel(op: Any) -> Callable[..., Any]:
    functional = IN_PLACE.get(op, op)

    def run(*args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        given = _positional(functional, args, kwargs)
        if not (torch.is_grad_enabled() and any(given[p].requires_grad for p in REROUTED[functional])):
            with native_kernels():
                return op(*args, **kwargs, **({} if dtype is None else {"dtype": dtype}))
        tensors = [t for t in given if isinstance(t, torch.Tensor)]
        if dtype is not None or op is not functional:  # an in-place op leaves nothing for the backward to read
            tensors[0] = tensors[0].to(dtype, copy=op is not functional)
        result = _Rerouted.apply(functional, tuple(given[len(tensors) :]), *tensors)
        return result if op is functional else args[0].copy_(result)

    return run


def _svdvals(matrix: torch.Tensor, *, driver: str | None = None) -> Any:
    """Where no gradient is needed eager computes values alone; a trace, which may be of a subclass, vectors as well."""
    with native_kernels():
        if torch.is_grad_enabled() and matrix.requires_grad:
            return aten.linalg_svdvals.default(matrix, driver=driver)
        return aten._linalg_svd.default(matrix, False, False, driver=driver)[1]


def _eigvalsh(matrix: torch.Tensor, UPLO: str = "L") -> Any:
    """As `_svdvals`."""
    with native_kernels():
        if torch.is_grad_enabled() and matrix.requires_grad:
            return aten.linalg_eigvalsh.default(matrix, UPLO)
        return aten._linalg_eigh.default(matrix, UPLO, False)[0]


def _rnn_layer(*args: Any, **kwargs: Any) -> Any:
    """oneDNN's kernel asks itself whether gradients are recorded; planned steps run kernels where they would be."""
    if not torch.is_grad_enabled():
        raise OnlyInEager(
            "nn.LSTM without gradients (no_grad, or within a custom function)", place(user_frame(sys._getframe(1))),
            "oneDNN has another kernel there, with other bits", "Keep it in a module of its own: between regions "
            "(regions=) it runs in eager. Or detach() its result, with requires_grad_(False) on its parameters.",
        )  # fmt: skip
    with native_kernels():
        return aten.mkldnn_rnn_layer.default(*args, **kwargs)


def _products(op: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        _refuse_cast_products(op, [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)])
        with native_kernels():
            return op(*args, **kwargs)

    return run


def may_be_cast(values: Sequence[Any]) -> bool:
    """Whether autocast, as it is now, would cast one of these where an op that it casts reads it."""
    cast = dict(active_autocast())
    tensors = [v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()] if cast else []
    return any(t.dtype not in (torch.float64, cast.get(t.device.type, t.dtype)) for t in tensors)


def _refuse_cast_products(op: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Raise OnlyInEager where autocast would cast what the op's kernel multiplies."""
    if op in WITH_PRODUCTS and may_be_cast(tensors):
        raise CAST_WITHIN.at(place(user_frame(sys._getframe(1))), f"{WITH_PRODUCTS[op]} under autocast")


def _cross_entropy_loss(
    values: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, reduction: int = MEAN,
    ignore_index: int = -100, label_smoothing: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """A smoothed mean is divided by the weights of the targets that count; eager adds up no others (LossNLL.cpp)."""
    indices = target.shape != values.shape
    if weight is None or reduction != MEAN or not label_smoothing or not indices:
        with native_kernels():
            return aten.cross_entropy_loss.default(values, target, weight, reduction, ignore_index, label_smoothing)
    if weight.requires_grad:
        raise Unsupported(
            "a smoothed cross entropy whose class weights require gradients", "F.cross_entropy",
            "eager's formula asks how many targets count", "Use weight.detach(), or label_smoothing=0.",
        )  # fmt: skip
    dim = 0 if values.dim() == 1 else 1
    logs = aten.log_softmax.int(values, dim, values.dtype)
    loss = aten.nll_loss_nd.default(logs, target, weight, reduction, ignore_index)
    ignored = target == ignore_index
    shape = [1] * logs.dim()
    shape[dim] = weight.shape[0]
    smooth = (logs * weight.view(shape)).sum(dim).neg().masked_fill(ignored, 0.0)
    weights = weight.gather(0, target.masked_fill(ignored, 0).flatten())
    mean = smooth.sum() / SUM_OF_SELECTED(weights, ignored.logical_not().flatten())
    return loss * (1 - label_smoothing) + mean * (label_smoothing / logs.shape[dim])


class _AffineGrid(torch.autograd.Function):
    """The product in autocast's type, as its own kernel asks for it: the points, with a one, times theta."""

    @staticmethod
    def forward(ctx: Any, theta: torch.Tensor, size: list[int], align_corners: bool, dtype: torch.dtype) -> Any:
        ctx.size, ctx.align_corners = size, align_corners
        batch, rows, columns = theta.shape
        with skip_autograd(), under_autocast(()):
            still = torch.eye(rows, columns, dtype=theta.dtype, device=theta.device).expand(batch, -1, -1)
            points = aten.affine_grid_generator.default(still, size, align_corners).view(batch, -1, rows)
            points = torch.cat([points, torch.ones_like(points[..., :1])], -1)
            return torch.bmm(points.to(dtype), theta.to(dtype).mT).view(batch, *size[2:], rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return aten.affine_grid_generator_backward.default(gradient, ctx.size, ctx.align_corners), None, None, None


def _affine_grid(theta: torch.Tensor, size: list[int], align_corners: bool) -> Any:
    """In eager autocast reaches the product inside the op's kernel; a planned step runs kernels without autocast."""
    dtype = dict(active_autocast()).get(theta.device.type, theta.dtype)
    if dtype == theta.dtype or theta.dtype == torch.float64:  # which autocast leaves alone
        with native_kernels():
            return aten.affine_grid_generator.default(theta, size, align_corners)
    return _AffineGrid.apply(theta, size, align_corners, dtype)


def _cudnn_batch_norm(
    values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None, training: bool, momentum: float, eps: float,
) -> Any:  # fmt: skip
    """cuDNN's kernel by an op whose schema tells that the running statistics change; torch traces one of ATen's."""
    with native_kernels():
        if not training:
            return aten.cudnn_batch_norm.default(values, weight, bias, running_mean, running_var, False, momentum, eps)
        mean = torch.zeros_like(weight) if running_mean is None else running_mean
        var = torch.ones_like(weight) if running_var is None else running_var
        return aten._batch_norm_with_update.default(values, weight, bias, mean, var, momentum, eps)


def _positional(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """All arguments in the schema's order, tensors first in each of these ops, except for `dtype`."""
    named = [a for a in op._schema.arguments if not a.kwarg_only]
    return [args[i] if i < len(args) else kwargs.get(a.name, a.default_value) for i, a in enumerate(named)]
