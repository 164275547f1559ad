"""What generated programs are made of: a table of op families, each drawing its arguments from the values so far.

Everything is drawn through one function, `pick(low, high) -> int`: Hypothesis can then shrink a failure, and a seed
names a program that any process can make again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Pick = Callable[[int, int], int]
SIZES = (2, 3, 4, 6, 8, 12)
LARGEST = 4096  # elements of a value that further ops may take


@dataclass
class Value:
    """A node of the program, what it holds on the example, and whether an in-place op may write to it."""

    node: fx.Node
    example: Any
    writable: bool = True


class Builder:
    """Appends ops to an fx graph, running each on an example so that shapes are known."""

    def __init__(self, pick: Pick) -> None:
        self.pick = pick
        self.graph, self.root = fx.Graph(), nn.Module()
        self.values: list[Value] = []
        self.sample: list[torch.Tensor] = []
        self.generator = torch.Generator().manual_seed(pick(0, 1 << 20))

    def choose(self, options: Sequence[Any]) -> Any:
        return options[self.pick(0, len(options) - 1)]

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def input(self, tensor: torch.Tensor) -> Value:
        self.sample.append(tensor)
        return self.add(self.graph.placeholder(f"x{len(self.sample)}"), tensor, writable=False)

    def add(self, node: fx.Node, example: Any, writable: bool = True) -> Value:
        value = Value(node, example, writable)
        if isinstance(example, torch.Tensor) and example.dtype is torch.float32 and _usable(example):
            value.writable = writable and torch._debug_has_internal_overlap(example) == 0
            self.values.append(value)
        return value

    def call(self, function: Callable[..., Any], *args: Any, writable: bool = True, **kwargs: Any) -> Value:
        """Append `function(*args)`; Values among the arguments stand for their nodes."""
        with torch.no_grad(), torch.random.fork_rng():
            example = function(*_map(args, "example"), **_map(kwargs, "example"))
        return self.add(self.graph.call_function(function, _map(args, "node"), _map(kwargs, "node")), example, writable)

    def method(self, name: str, value: Value, *args: Any, writable: bool = True) -> Value:
        """Append `value.name(*args)`."""
        with torch.no_grad(), torch.random.fork_rng():
            example = getattr(value.example, name)(*_map(args, "example"))
        return self.add(self.graph.call_method(name, (value.node, *_map(args, "node"))), example, writable)

    def module(self, module: nn.Module, *args: Value) -> Value:
        """Append a call of a new submodule."""
        name = f"m{len(list(self.root.children()))}"
        self.root.add_module(name, module)
        return self.again(name, *args)

    def again(self, name: str, *args: Value) -> Value:
        """Append a call of submodule `name`."""
        module = self.root.get_submodule(name)
        with torch.no_grad(), torch.random.fork_rng():
            example = module(*_map(args, "example"))
        return self.add(self.graph.call_module(name, _map(args, "node")), example)

    def parameter(self, *shape: int) -> Value:
        """A new parameter, or one of that shape that is there already (tied)."""
        known = [n for n, p in self.root.named_parameters(recurse=False) if p.shape == shape]
        if known and self.pick(0, 2) == 0:
            name = self.choose(known)
        else:
            name = f"p{len(self.root._parameters)}"
            self.root.register_parameter(name, nn.Parameter(self.randn(*shape) * 0.3))
        return Value(self.graph.get_attr(name), getattr(self.root, name).detach(), writable=False)

    def float(self, rank: Callable[[int], bool] = lambda rank: True) -> Value:
        """One of the values with an accepted rank, later ones more often; a fresh reshape where there is none."""
        known = [v for v in self.values if rank(v.example.dim())]
        if known:
            return known[max(0, len(known) - 1 - min(self.pick(0, 2 * len(known)), self.pick(0, len(known))))]
        value = self.values[-1]
        size = value.example.numel()
        shape = {1: (size,), 2: (1, size), 3: (1, 1, size), 4: (1, 1, 1, size)}[next(r for r in range(1, 5) if rank(r))]
        return self.call(torch.reshape, value, shape)

    def dim(self, value: Value) -> int:
        return self.pick(0, value.example.dim() - 1)


def _usable(example: torch.Tensor) -> bool:
    return 0 < example.dim() <= 4 and 0 < example.numel() <= LARGEST


def _map(value: Any, attribute: str) -> Any:
    if isinstance(value, Value):
        return getattr(value, attribute)
    if isinstance(value, (tuple, list)):
        return type(value)(_map(v, attribute) for v in value)
    if isinstance(value, dict):
        return {k: _map(v, attribute) for k, v in value.items()}
    return value


# Element-wise, bounded so that long programs stay finite -----------------------------------------------------------

UNARY: tuple[Callable[..., Any], ...] = (
    torch.relu, F.gelu, torch.tanh, torch.sigmoid, F.silu, F.softplus, torch.neg, torch.abs, torch.sin, torch.cos,
    torch.erf, F.elu, F.hardswish, F.mish, F.hardtanh, F.leaky_relu, F.logsigmoid, torch.atan, F.softsign, F.selu,
    torch.detach, torch.clone,
)  # fmt: skip
INPLACE: tuple[tuple[Any, ...], ...] = (
    ("add_", 0.5), ("mul_", 0.5), ("sub_", 1), ("div_", 2), ("relu_",), ("sigmoid_",), ("tanh_",), ("clamp_", -1, 1),
    ("neg_",), ("sin_",), ("zero_",), ("fill_", 0.25),
)  # fmt: skip


def unary(b: Builder) -> None:
    b.call(b.choose(UNARY), b.float())


def guarded(b: Builder) -> None:
    """Functions with a bounded domain, fed from it."""
    x = b.call(torch.add, b.call(torch.abs, b.float()), 1)
    b.call(b.choose((torch.sqrt, torch.rsqrt, torch.log, torch.reciprocal)), x)


def power(b: Builder) -> None:
    b.call(torch.pow, b.call(torch.tanh, b.float()), b.choose((2, 3, 2.5)) if b.pick(0, 1) else 2)


def binary(b: Builder) -> None:
    x = b.float()
    y = b.choose([v for v in b.values if _broadcast(x.example.shape, v.example.shape) is not None])
    b.call(b.choose((torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, torch.atan2)), x, y)


def constant(b: Builder) -> None:
    b.call(b.choose((torch.add, torch.mul, torch.sub)), b.float(), b.choose((0.5, 1, -0.25)))


def conditional(b: Builder) -> None:
    x = b.float()
    mask = b.call(torch.gt, x, 0.1)
    if b.pick(0, 1):
        b.call(torch.where, mask, x, b.call(torch.mul, x, 0.1))
    else:
        b.call(torch.masked_fill, x, mask, 0.5)


def in_place(b: Builder) -> None:
    """An in-place op on something just made; a draw that breaks the plain backward is rejected later."""
    fresh = [v for v in b.values[-3:] if v.writable]
    if fresh:
        name, *args = b.choose(INPLACE)
        b.method(name, b.choose(fresh), *args)


def in_place_binary(b: Builder) -> None:
    fresh = [v for v in b.values[-3:] if v.writable]
    x = b.choose(fresh) if fresh else b.call(torch.mul, b.float(), 0.5)
    y = [v for v in b.values if _broadcast(x.example.shape, v.example.shape) == x.example.shape and not _share(x, v)]
    if y:
        b.method(b.choose(("add_", "sub_", "mul_")), x, b.choose(y))


def write_slice(b: Builder) -> None:
    x = b.call(torch.clone, b.float())
    dim = b.dim(x)
    part = b.call(torch.narrow, x, dim, 0, max(1, x.example.shape[dim] // 2))
    b.method(b.choose(("mul_", "add_")), part, 0.5)
    b.call(torch.mul, x, 1.5)


def _share(a: Value, b: Value) -> bool:
    return a.example.untyped_storage().data_ptr() == b.example.untyped_storage().data_ptr()


def _broadcast(a: torch.Size, b: torch.Size) -> torch.Size | None:
    try:
        return torch.broadcast_shapes(a, b)
    except RuntimeError:
        return None


# Views and shapes --------------------------------------------------------------------------------------------------


def view(b: Builder) -> None:
    x = b.float()
    kind = b.pick(0, 7)
    if kind == 0:
        b.call(torch.transpose, x, b.dim(x), b.dim(x), writable=x.writable)
    elif kind == 1:
        b.call(torch.flatten, x)
    elif kind == 2 and x.example.dim() < 4:
        b.call(torch.unsqueeze, x, b.dim(x), writable=x.writable)
    elif kind == 3 and x.example.dim() < 4:
        b.method("expand", b.call(torch.unsqueeze, x, 0), (2, *x.example.shape), writable=False)
    elif kind == 4 and x.example.dim() > 1:
        dim = b.dim(x)
        b.call(torch.select, x, dim, b.pick(0, x.example.shape[dim] - 1), writable=x.writable)
    elif kind == 5:
        dim = b.dim(x)
        size = b.pick(1, x.example.shape[dim])
        b.call(torch.narrow, x, dim, b.pick(0, x.example.shape[dim] - size), size, writable=x.writable)
    elif kind == 6:
        b.call(torch.flip, x, (b.dim(x),))
    else:
        b.call(torch.reshape, b.method("contiguous", b.call(torch.transpose, x, 0, -1)), x.example.shape)


def split(b: Builder) -> None:
    x = b.float()
    parts = b.call(b.choose((torch.chunk, torch.tensor_split)), x, b.pick(2, 3), b.dim(x))
    for i in range(len(parts.example)):
        if b.pick(0, 3):
            b.call(operator.getitem, parts, i, writable=False)


def join(b: Builder) -> None:
    x = b.float()
    same = [v for v in b.values if v.example.shape == x.example.shape]
    b.call(b.choose((torch.cat, torch.stack)) if x.example.dim() < 4 else torch.cat, [x, b.choose(same)], b.dim(x))


def repeat(b: Builder) -> None:
    x = b.float(lambda rank: 1 < rank < 4)
    b.call(b.choose((torch.tril, torch.triu)), x) if b.pick(0, 1) else b.call(F.pad, x, (1, b.pick(0, 2)))


# Reductions --------------------------------------------------------------------------------------------------------


def reduce(b: Builder) -> None:
    x = b.float()
    functions = (torch.sum, torch.mean, torch.logsumexp, torch.amax, torch.linalg.vector_norm)
    b.call(b.choose(functions), x, dim=b.dim(x), keepdim=bool(b.pick(0, 3)))


def spread(b: Builder) -> None:
    x = b.float(lambda rank: rank > 1)
    dim = next((d for d, size in enumerate(x.example.shape) if size > 1), None)
    if dim is not None:
        b.call(b.choose((torch.var, torch.std)), b.call(torch.sin, x), dim=dim, keepdim=True, correction=0)


def cumulative(b: Builder) -> None:
    x = b.float()
    b.call(torch.cumsum, x, b.dim(x))


def order(b: Builder) -> None:
    """Sorting, the largest ones, a maximum with its place."""
    x = b.float()
    dim = b.dim(x)
    kind = b.pick(0, 2)
    if kind == 0:
        pair = b.call(torch.sort, x, dim)
    elif kind == 1:
        pair = b.call(torch.topk, x, max(1, x.example.shape[dim] // 2), dim)
    else:
        pair = b.call(torch.max, x, dim, True)
    b.call(operator.getitem, pair, 0)
    if b.pick(0, 1):
        b.call(torch.gather, x, dim, b.call(operator.getitem, pair, 1))


# Products ----------------------------------------------------------------------------------------------------------


def linear(b: Builder) -> None:
    x = b.float()
    b.module(nn.Linear(x.example.shape[-1], b.choose(SIZES), bias=bool(b.pick(0, 3))), x)


def product(b: Builder) -> None:
    x = b.float(lambda rank: rank == 2)
    if b.pick(0, 1):
        b.call(torch.tanh, b.call(torch.mm, x, b.parameter(x.example.shape[1], b.choose(SIZES))))
    else:
        weight = b.parameter(x.example.shape[1], x.example.shape[0])
        b.call(torch.tanh, b.call(torch.addmm, b.parameter(x.example.shape[0]), x, weight))


def batch_product(b: Builder) -> None:
    x = b.float(lambda rank: rank == 3)
    scores = b.call(torch.mul, b.call(torch.bmm, x, b.call(torch.transpose, x, 1, 2)), 0.1)
    b.call(torch.bmm, b.call(torch.softmax, scores, -1), x)


def attention(b: Builder) -> None:
    x = b.float(lambda rank: rank in (3, 4))
    b.module(Attention(b.choose((0.0, 0.0, 0.3)), bool(b.pick(0, 1))), x)


def einsum(b: Builder) -> None:
    x = b.float(lambda rank: rank == 3)
    b.call(torch.einsum, "bij,jk->bki", x, b.parameter(x.example.shape[2], b.choose(SIZES)))


# Normalizing and randomness ----------------------------------------------------------------------------------------


def softmax(b: Builder) -> None:
    x = b.float()
    b.call(b.choose((torch.softmax, torch.log_softmax)), x, b.dim(x))


def dropout(b: Builder) -> None:
    x = b.float()
    kinds = (nn.Dropout, nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Dropout1d)
    kind = b.choose(kinds if x.example.dim() == 3 else kinds[:3])
    b.module(kind(b.choose((0.1, 0.25, 0.5))), x)


def noise(b: Builder) -> None:
    x = b.float()
    kind = b.pick(0, 3)
    if kind == 0:
        b.call(torch.add, x, b.call(torch.mul, b.call(torch.randn_like, x), 0.1))
    elif kind == 1:
        b.call(torch.mul, x, b.call(torch.rand, x.example.shape))
    elif kind == 2:
        b.call(torch.mul, x, b.call(torch.bernoulli, b.call(torch.full_like, x, 0.7)))
    else:
        b.module(nn.RReLU(), x)


def batch_norm(b: Builder) -> None:
    x = b.float(lambda rank: rank == 3)
    if x.example.shape[0] * x.example.shape[2] > 1:
        affine = bool(b.pick(0, 2))
        norm = nn.BatchNorm1d(x.example.shape[1], affine=affine, track_running_stats=bool(b.pick(0, 3)))
        _cut_off(b, b.module(norm, x), x)


def image_norm(b: Builder) -> None:
    x = b.float(lambda rank: rank == 4)
    channels, height, width = x.example.shape[1:]
    if height * width > 1:
        kinds = (nn.BatchNorm2d(channels), nn.InstanceNorm2d(channels, affine=True), nn.GroupNorm(1, channels))
        _cut_off(b, b.module(b.choose(kinds), x), x)


def _cut_off(b: Builder, normal: Value, x: Value) -> None:
    """What residual networks do to what they normalized."""
    kind = b.pick(0, 4)
    if kind == 1:
        b.call(torch.relu, normal)
    elif kind == 2:
        b.call(torch.relu, b.call(torch.add, *((normal, x) if b.pick(0, 2) else (x, normal))))
    elif kind == 3:
        b.method("relu_", normal)


def layer_norm(b: Builder) -> None:
    x = b.float()
    b.module(b.choose((nn.LayerNorm, nn.RMSNorm))(x.example.shape[-1]), x)


# Convolutions, tables, recurrences ---------------------------------------------------------------------------------


def convolution(b: Builder) -> None:
    x = b.float(lambda rank: rank in (3, 4))
    channels, flat = x.example.shape[1], x.example.dim() == 3
    plain, transposed = (nn.Conv1d, nn.ConvTranspose1d) if flat else (nn.Conv2d, nn.ConvTranspose2d)
    kind = b.pick(0, 2)
    if kind == 0:
        b.module(plain(channels, b.choose(SIZES), 3, padding=1, bias=bool(b.pick(0, 1))), x)
    elif kind == 1:
        b.module(plain(channels, channels, 3, padding=1, groups=channels), x)
    else:
        b.module(transposed(channels, b.choose(SIZES), 2, stride=1), x)


def pool(b: Builder) -> None:
    x = b.float(lambda rank: rank == 4)
    kind = b.pick(0, 3)
    if kind == 0 and min(x.example.shape[2:]) > 1:
        b.call(b.choose((F.max_pool2d, F.avg_pool2d)), x, 2)
    elif kind == 1:
        b.call(F.adaptive_avg_pool2d, x, 2)
    else:
        b.call(F.interpolate, x, scale_factor=2, mode=b.choose(("nearest", "bilinear")))


def embedding(b: Builder) -> None:
    rows, width = 7, b.choose(SIZES)
    size = (b.choose(SIZES), b.choose(SIZES))
    tokens = b.input(torch.randint(0, rows, size, generator=b.generator))
    b.call(F.embedding, tokens, b.parameter(rows, width))


def index(b: Builder) -> None:
    x = b.float()
    dim = b.dim(x)
    chosen = b.call(torch.tensor, [b.pick(0, x.example.shape[dim] - 1) for _ in range(b.pick(1, 4))])
    picked = b.call(torch.index_select, x, dim, chosen)
    kind = b.pick(0, 2)
    if kind == 1:
        b.call(torch.index_add, x, dim, chosen, picked)
    elif kind == 2:
        places = b.call(torch.zeros_like, x, dtype=torch.int64)
        b.call(torch.scatter_add, x, dim, places, b.call(torch.mul, x, 0.1))


def recurrence(b: Builder) -> None:
    x = b.float(lambda rank: rank == 3)
    kind = b.choose((nn.GRU, nn.LSTM, nn.RNN))
    b.call(operator.getitem, b.module(kind(x.example.shape[2], b.choose((2, 4)), batch_first=bool(b.pick(0, 1))), x), 0)


def twice(b: Builder) -> None:
    """A submodule that is there already, called once more."""
    x = b.float()
    width = x.example.shape[-1]
    known = [n for n, m in b.root.named_children() if isinstance(m, nn.Linear) and m.in_features == width]
    if known:
        b.again(b.choose(known), x)
    else:
        b.module(nn.Linear(width, width), x)


# State, dtypes, hand-written backwards -----------------------------------------------------------------------------


def cast(b: Builder) -> None:
    x = b.float()
    b.method("to", b.call(torch.tanh, b.method("to", x, b.choose((torch.bfloat16, torch.float64)))), torch.float32)


def counter(b: Builder) -> None:
    b.call(torch.mul, b.float(), b.module(MovingMean(), b.float()))


def state(b: Builder) -> None:
    x = b.float()
    b.module(State(x.example.shape, b.pick(0, 2), b.pick(0, 3)), x)


def custom(b: Builder) -> None:
    b.call(straight_through, b.float())


def checkpointed(b: Builder) -> None:
    x = b.float()
    b.module(Checkpointed(x.example.shape[-1]), x)


class Attention(nn.Module):
    """`scaled_dot_product_attention` of a tensor with itself."""

    def __init__(self, probability: float, causal: bool) -> None:
        super().__init__()
        self.probability, self.causal = probability, causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=self.probability, is_causal=self.causal)


class MovingMean(nn.Module):
    """Averages what it has seen in a buffer that its own forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.mean())
            self.steps += 1
        return 1 + self.mean.clone()


class State(nn.Module):
    """A buffer that the forward reads and overwrites, before or after; by what it has seen, or by itself alone."""

    def __init__(self, shape: torch.Size, order: int, change: int) -> None:
        super().__init__()
        self.register_buffer("state", torch.linspace(-1, 1, shape.numel()).view(shape))
        self.order, self.change = order, change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.order == 0:
            self.write(x)
        result = x * self.state.clone() if self.order == 2 else x + self.state
        if self.order:
            self.write(x)
        return result

    def write(self, x: torch.Tensor) -> None:
        with torch.no_grad():
            if self.change == 0:
                self.state.mul_(self.state)
            elif self.change == 1:
                self.state.copy_(torch.tanh(x))
            elif self.change == 2:
                self.state = torch.sin(self.state + 1)
            else:
                self.state[..., 0] += torch.tanh(x[..., 0])


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * torch.cos(x)


def straight_through(x: torch.Tensor) -> torch.Tensor:
    return _StraightThrough.apply(x)


class Checkpointed(nn.Module):
    """A part that torch's own checkpoint recomputes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(width, width), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda t: self.drop(torch.tanh(self.linear(t))), x, use_reentrant=False)


FAMILIES: tuple[Callable[[Builder], None], ...] = (
    unary, linear, binary, view, dropout, constant, reduce, softmax, layer_norm, product, batch_product, join, split,
    in_place, in_place_binary, write_slice, conditional, guarded, power, repeat, spread, cumulative, order, attention,
    einsum, noise, batch_norm, image_norm, convolution, pool, embedding, index, recurrence, twice, cast, counter,
    state, custom, checkpointed,
)  # fmt: skip
