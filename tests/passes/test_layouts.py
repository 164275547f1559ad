"""Traced layouts are those that the kernels make."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from passes._torch import FakeTensorMode
from passes.errors import Unsupported
from passes.trace.capture import capture
from passes.trace.layouts import EagerFakes
from planner import auto_checkpoint
from tests.zoo.compare import differences, run_step, same_bits

aten = torch.ops.aten
SHAPES = (
    (4, 6), (4, 6, 5), (4, 6, 1), (1, 6, 5), (2, 6, 3, 4), (2, 6, 1, 1), (1, 6, 3, 4), (2, 1, 3, 4), (1, 3, 2, 4, 3),
)  # fmt: skip


def layouts(shape: tuple[int, ...]) -> Iterator[torch.Tensor]:
    """The shape in every order of its dimensions, of five in every fifth, with gaps, and expanded."""
    orders = list(itertools.permutations(range(len(shape))))
    for order in orders[:: max(1, len(orders) // 24)]:
        yield torch.randn([shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))])
    yield torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]
    yield torch.randn(shape[0], 2 * shape[1], *shape[2:])[:, 1::2]
    yield torch.randn(*shape[:-1], 1).expand(shape)


@pytest.mark.every(3)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_batch_norms_are_laid_out_as_the_kernels_do(shape: tuple[int, ...]) -> None:
    mode, channels = EagerFakes(), shape[1]
    mean, scale, weight = torch.zeros(channels), torch.ones(channels), torch.ones(channels)
    all_of_them = list(layouts(shape))
    for values in all_of_them:
        for training in (True, False):
            arguments = (values, weight, None, mean, scale, training, 0.1, 1e-5)
            real = aten.native_batch_norm.default(*arguments)[0]
            with mode:
                fake = aten.native_batch_norm.default(*(fakes(mode, a) for a in arguments))[0]
            assert fake.stride() == real.stride(), values.stride()
        for gradient in all_of_them[:3] + all_of_them[-3:]:
            arguments = (gradient, values, weight, mean, scale, mean, scale, True, 1e-5, [True, True, True])
            real = aten.native_batch_norm_backward.default(*arguments)[0]
            with mode:
                fake = aten.native_batch_norm_backward.default(*(fakes(mode, a) for a in arguments))[0]
            assert fake.stride() == real.stride(), (values.stride(), gradient.stride())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_norms_are_laid_out_as_the_kernels_do(shape: tuple[int, ...]) -> None:
    mode, width = EagerFakes(), shape[-1:]
    all_of_them, weight = list(layouts(shape)), torch.ones(width)
    for values in all_of_them:
        arguments = (values, width, weight, weight, 1e-5)
        made = aten.native_layer_norm.default(*arguments)
        with mode:
            told = aten.native_layer_norm.default(*(fakes(mode, a) for a in arguments))
        assert [t.stride() for t in told] == [t.stride() for t in made], values.stride()
        for gradient in (all_of_them[0], all_of_them[-1]):
            arguments = (gradient, values, width, *made[1:], weight, weight, [True, True, True])
            real = aten.native_layer_norm_backward.default(*arguments)[0]
            with mode:
                fake = aten.native_layer_norm_backward.default(*(fakes(mode, a) for a in arguments))[0]
            assert fake.stride() == real.stride(), (values.stride(), gradient.stride())


def test_a_layer_norm_over_channels_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernels lay out in another way than traced is learned by running, and then traced again."""
    traced = []
    monkeypatch.setattr("planner.sizes.capture", lambda *a, **k: traced.append(a) or capture(*a, **k))
    model = Sequences(nn.LayerNorm(10))
    auto_checkpoint(model, torch.randn(4, 10, 8), progress=False, check=False)
    assert len(traced) == 1


def fakes(mode: FakeTensorMode, argument: object) -> object:
    return mode.from_tensor(argument) if isinstance(argument, torch.Tensor) else argument


@pytest.mark.parametrize("source", [((1, 4, 1, 1), (4, 1, 1, 4)), ((2, 1, 3), (3, 7, 1)), ((1, 1), (5, 9))], ids=str)
def test_views_of_single_indices_are_laid_out_as_the_kernels_do(source: tuple[tuple[int, ...], ...]) -> None:
    size, stride = source
    mode = EagerFakes()
    for shape in ([s for s in size if s > 1] or [1], [*size, 1], [1, *size]):
        real = torch.empty_strided(size, stride).view(shape)
        with mode:
            fake = torch.empty_strided(size, stride).view(shape)
        assert fake.stride() == real.stride() and fake.untyped_storage().nbytes() == real.untyped_storage().nbytes()


class Sequences(nn.Module):
    """`[batch, length, width]`, normalized over the width as `[batch, width, length]`."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.widen, self.norm, self.narrow = nn.Linear(8, 16), norm, nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.widen(x).transpose(1, 2)).transpose(1, 2)
        return self.narrow(torch.tanh(hidden)).square().mean()


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(16), nn.BatchNorm1d(16, track_running_stats=False), nn.InstanceNorm1d(16)], ids=str
)
def test_a_norm_over_a_transposed_sequence(norm: nn.Module) -> None:
    """torch's shape rule of batch norms keeps the order of the dimensions, which the kernel does not."""
    torch.manual_seed(0)
    model, x = Sequences(copy.deepcopy(norm)), torch.randn(4, 10, 8)
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, x, progress=False)
    assert differences(run_step(plain, plain, x), run_step(plan.module, model, x)) == []


class Drawing(nn.Module):
    """Draws between two convolutions."""

    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.draw, self.widen, self.narrow = draw, nn.Conv2d(3, 8, 3), nn.Conv2d(8, 3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.draw(self.widen(x))).mean((2, 3)).logsumexp(-1).mean()


def _part(h: torch.Tensor, draw: str, *args: Any) -> torch.Tensor:
    mask = torch.ones_like(h)
    getattr(mask[:, :4], draw)(*args)
    return h * mask


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rrelu": lambda h: F.rrelu(h, training=True),
    "dropout": lambda h: F.dropout(h * 1, 0.3, inplace=True),
    "alpha_dropout": lambda h: F.alpha_dropout(h, 0.3, True),
    "alpha_dropout, transposed": lambda h: F.alpha_dropout(h.transpose(1, 3), 0.3, True).transpose(1, 3),
    "bernoulli_": lambda h: h * torch.empty_like(h).bernoulli_(0.7),
    "bernoulli_ of another order": lambda h: h * torch.empty(*h.shape[::-1]).permute(3, 2, 1, 0).bernoulli_(0.7),
    "bernoulli_ of a part": lambda h: _part(h, "bernoulli_", 0.7),
    "uniform_ of a part": lambda h: _part(h, "uniform_"),
    "normal_": lambda h: h * torch.empty_like(h).normal_(),
    "normal_ of another order": lambda h: h * torch.empty(*h.shape[::-1]).permute(3, 2, 1, 0).normal_(),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_random_ops_draw_in_the_order_of_eager(name: str, layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    model = Drawing(DRAWS[name]).to(memory_format=layout)
    plain, x = copy.deepcopy(model), torch.randn(4, 3, 12, 12).contiguous(memory_format=layout)
    plan = auto_checkpoint(model, x, progress=False, check=False)
    assert differences(run_step(plain, plain, x), run_step(plan.module, model, x)) == []


def test_a_part_that_is_drawn_is_refused_where_the_numbers_would_be_others() -> None:
    with pytest.raises(Unsupported, match="normal_ on a part"):
        auto_checkpoint(Drawing(lambda h: _part(h, "normal_")), torch.randn(4, 3, 12, 12), progress=False)


def test_a_convolution_over_one_position() -> None:
    """It chooses its kernel by strides that do not matter otherwise."""
    torch.manual_seed(0)

    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.widen, self.spread = nn.Parameter(torch.randn(6, 4)), nn.ConvTranspose1d(4, 8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.einsum("bij,jk->bki", x.reshape(1, 1, 6), self.widen)
            return self.spread(hidden).reshape(1, 1, 1, 16).square().mean()

    model, x = Single(), torch.randn(2, 3)
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, x, progress=False)
    assert differences(run_step(plain, plain, x), run_step(plan.module, model, x)) == []


class Gated(nn.Module):
    """The backward of softplus is laid out by its kernel in another way than its shape rule tells."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.b = nn.Linear(8, 16), nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.softplus(self.linear(x) + self.b)
        return hidden.transpose(1, 2).contiguous().pow(2).sum()


def test_what_a_kernel_makes_is_learned_by_running_it() -> None:
    torch.manual_seed(0)
    model, x = Gated(), torch.randn(7, 33, 8)
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, x, progress=False)
    assert plan.prepared.traced.layouts
    assert differences(run_step(plain, plain, x), run_step(plan.module, model, x)) == []


def test_a_custom_op_is_laid_out_as_its_kernel_does() -> None:
    """Its fake kernel says rows, its kernel makes columns, over which a sum has other bits."""
    library = torch.library.Library("layouts_test", "FRAGMENT")
    library.define("columns(Tensor x) -> Tensor")
    library.impl("columns", lambda x: x.t().contiguous().t(), "CompositeExplicitAutograd")
    torch.library.register_fake("layouts_test::columns", torch.empty_like, lib=library)

    class Columns(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.layouts_test.columns(x)

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            return torch.ops.layouts_test.columns(gradient)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b = nn.Parameter(torch.randn(19))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(Columns.apply(torch.exp(x + self.b)).view_as(x) * x).sum(0).square().sum()

    torch.manual_seed(0)
    model, x = Model(), torch.randn(33, 19)
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, x, progress=False)
    assert differences(run_step(plain, plain, x), run_step(plan.module, model, x)) == []


GRADIENTS = {
    "sum": lambda output: output.sum().backward(),
    "mean": lambda output: output.mean().backward(),
    "square": lambda output: output.square().mean().backward(),
    "rows": lambda output: output.backward(torch.linspace(-1, 1, output.numel()).view(output.shape)),
    "columns": lambda output: output.backward(
        torch.linspace(-1, 1, output.numel()).view(output.shape[::-1]).permute(3, 2, 1, 0)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_gradient_in_whatever_strides_it_comes(name: str) -> None:
    """A convolution whose result is laid out as its input: its bias sums over what the loss hands back."""

    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(32, 48, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.convolution(x.permute(0, 2, 1).reshape(2, 32, 4, 4))

    torch.manual_seed(0)
    model, x = Patches(), torch.randn(2, 16, 32)
    plain = copy.deepcopy(model)
    GRADIENTS[name](plain(x))
    plan = auto_checkpoint(model, x, progress=False)
    for attempt in range(3):
        model.zero_grad()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            GRADIENTS[name](plan.module(x))
        assert attempt == 0 or not said  # planned for by now
        for parameter, own in zip(plain.parameters(), model.parameters(), strict=True):
            assert same_bits(parameter.grad, own.grad)


def test_gradients_in_strides_that_change_are_right_and_planned_for_once() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(6, 5), torch.randn(33, 6)
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, x, progress=False)
    gradient = torch.randn(33, 5)
    for given in (gradient.t().contiguous().t(), gradient, gradient.t().contiguous().t(), gradient):
        for module in (plain, plan.module):
            module.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module(x).backward(given)
        assert same_bits(plain.bias.grad, model.bias.grad) and same_bits(plain.weight.grad, model.weight.grad)
