"""Traced layouts are those that the kernels make."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from passes._torch import FakeTensorMode
from passes.trace.layouts import EagerFakes
from planner import auto_checkpoint
from tests.zoo.compare import differences, run_step

aten = torch.ops.aten
SHAPES = (
    (4, 6), (4, 6, 5), (4, 6, 1), (1, 6, 5), (2, 6, 3, 4), (2, 6, 1, 1), (1, 6, 3, 4), (2, 1, 3, 4), (1, 3, 2, 4, 3),
)  # fmt: skip


def layouts(shape: tuple[int, ...]) -> Iterator[torch.Tensor]:
    """The shape in every order of its dimensions, with gaps, and expanded."""
    for order in itertools.permutations(range(len(shape))):
        yield torch.randn([shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))])
    yield torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]
    yield torch.randn(shape[0], 2 * shape[1], *shape[2:])[:, 1::2]
    yield torch.randn(*shape[:-1], 1).expand(shape)


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
        for gradient in all_of_them[:8] + all_of_them[-3:]:
            arguments = (gradient, values, weight, mean, scale, mean, scale, True, 1e-5, [True, True, True])
            real = aten.native_batch_norm_backward.default(*arguments)[0]
            with mode:
                fake = aten.native_batch_norm_backward.default(*(fakes(mode, a) for a in arguments))[0]
            assert fake.stride() == real.stride(), (values.stride(), gradient.stride())


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
