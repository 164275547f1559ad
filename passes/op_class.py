"""Which of a device's rates an op goes by: one class for each way in which kernels spend their time."""

from __future__ import annotations

from typing import Any

import torch

from .fuse.meaning import targets
from .fuse.records import BATCH_NORM, BY_OP

MATMUL, CONVOLUTION, ATTENTION = "matmul", "convolution", "attention"
COPY, POINTWISE, REDUCTION, TRANSCENDENTAL, RANDOM = "copy", "pointwise", "reduction", "transcendental", "random"
PRODUCTS = (MATMUL, CONVOLUTION, ATTENTION)
STREAMS = (COPY, POINTWISE, REDUCTION, TRANSCENDENTAL, RANDOM)  # from the fastest for each byte to the slowest

# Element-wise ops that are bound by arithmetic on a CPU, `_backward` included.
_FUNCTIONS = frozenset({
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "logit", "logaddexp", "logaddexp2", "xlogy",
    "sigmoid", "log_sigmoid_forward", "log_sigmoid", "tanh", "gelu", "silu", "mish", "softplus", "elu", "celu",
    "selu", "erf", "erfc", "erfinv", "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh",
    "asinh", "acosh", "atanh", "lgamma", "digamma", "special_erfcx", "special_ndtr", "special_log_ndtr",
    "polygamma", "i0", "sinc",
})  # fmt: skip
_CHEAP_BACKWARD = frozenset({"tanh_backward", "sigmoid_backward", "elu_backward"})
# Parts of the names of ops that combine elements and that torch does not tag as reductions.
_COMBINING = (
    "softmax", "norm", "loss", "pool", "statistics", "entropy", "cum", "scan", "sort", "topk", "median", "mode",
    "dense_backward", "scatter", "index_put", "index_add", "hist", "bincount", "linalg", "cdist", "upsample",
    "grid_sampler", "embedding_bag", "unique",
)  # fmt: skip


def op_class(target: Any, flops: int = 0) -> str:
    """The class of an op; of a fused one, the slowest among the ops that it stands for.

    Args:
        flops: what it multiplies and adds; an op with any is one of `PRODUCTS`.
    """
    program = BY_OP[target].program if target in BY_OP else ()
    if program:
        return max((op_class(t) for t in targets(program)), key=STREAMS.index)
    if target is BATCH_NORM.op:
        return POINTWISE  # the statistics are given
    name = getattr(getattr(target, "overloadpacket", None), "__name__", "")
    if "attention" in name:
        return ATTENTION
    if flops:
        return CONVOLUTION if "conv" in name else MATMUL
    return _stream(name, getattr(target, "tags", ()))


def _stream(name: str, tags: Any) -> str:
    if torch.Tag.nondeterministic_seeded in tags:
        return RANDOM
    if name not in _CHEAP_BACKWARD and name.removesuffix("_backward") in _FUNCTIONS:
        return TRANSCENDENTAL
    if torch.Tag.reduction in tags or any(part in name for part in _COMBINING):
        return REDUCTION
    copies = name in ("clone", "_to_copy", "copy")
    return POINTWISE if (torch.Tag.pointwise in tags and not copies) or name.endswith("_backward") else COPY
