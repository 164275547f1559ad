"""Gradients that look at values, and checks of factorizations, are eager's own in a planned step."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from passes.errors import Unsupported
from passes.memory import measure_peak
from passes.trace.capture import capture
from passes.trace.routes import GRADIENT_OF, REROUTED
from planner import auto_checkpoint
from tests.planner.steps import tight
from tests.zoo.compare import differences, run_step, same_bits


class Scaled(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
        super().__init__()
        self.function, self.p = function, nn.Parameter(torch.ones_like(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.p * x)


def values(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) + 0.5


def with_zeros(*shape: int) -> torch.Tensor:
    return torch.where(values(*shape) > 0.8, values(*shape), 0)


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "prod": lambda x: x.prod().sin(),
    "prod of a dimension": lambda x: x.prod(1).sin().sum(),
    "prod, keeping it": lambda x: torch.prod(x, dim=0, keepdim=True, dtype=torch.float64).sin().sum(),
    "prod under a mask": lambda x: torch.masked.prod(x, 1, mask=x > 0.7).sin().sum(),
    "cumprod": lambda x: x.cumprod(1).sin().sum(),
    "max": lambda x: x.max() * float("inf"),
    "min": lambda x: x.min() / 0,
    "median": lambda x: x.median() * float("nan"),
    "nanmedian": lambda x: x.nanmedian() * float("inf"),
    "masked_fill": lambda x: x.exp().masked_fill(x > 1, x.mean()).sin().sum(),
    "masked_fill_": lambda x: (x * 2).masked_fill_(x > 1, x.mean()).sin().sum(),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("x", [values(7, 9), with_zeros(7, 9), torch.ones(7, 9)], ids=["values", "zeros", "ties"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_formula_is_eager_s(name: str, x: torch.Tensor) -> None:
    model = Scaled(FUNCTIONS[name], x)
    plain = copy.deepcopy(model)
    plan = tight(model, x)
    for module in (plain, plan.module):
        module(x).backward()
    assert same_bits(plain.p.grad, model.p.grad)


def test_what_needs_no_such_gradient_is_traced_as_it_is() -> None:
    x = values(4, 5)
    model = Scaled(lambda h: h.masked_fill(h > 1, torch.tensor(2.0)).exp().sum(), x)
    plain = copy.deepcopy(model)
    assert differences(run_step(plain, plain, x), run_step(tight(model, x).module, model, x)) == []
    targets = {n.target for n in capture(model, {"x": x}).graph_module.graph.nodes}
    assert GRADIENT_OF not in targets and set(REROUTED) & targets


def test_gradients_come_in_eager_s_strides() -> None:
    class Reflections(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(16, 16), nn.Parameter(values(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.householder_product(self.linear(x).mT, self.scale).sin().sum()

    model, x = Reflections(), values(8, 16)
    plain = copy.deepcopy(model)
    assert differences(run_step(plain, plain, x), run_step(tight(model, x).module, model, x)) == []


def test_an_exported_step_holds_the_formula(tmp_path: Path) -> None:
    x = values(4, 5)
    auto_checkpoint(Scaled(FUNCTIONS["prod of a dimension"], x), x, progress=False).export(tmp_path / "step")
    assert "gradient_of('prod.dim_int'" in (tmp_path / "step" / "backward.py").read_text()


FACTORIZATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "inv": lambda m: torch.linalg.inv(m).sum(),
    "solve": lambda m: torch.linalg.solve(m, m.detach() + 1).sum(),
    "cholesky": lambda m: torch.linalg.cholesky(m @ m.mT).sum(),
    "lu_factor": lambda m: torch.linalg.lu_factor(m)[0].sum(),
    "matrix_power": lambda m: torch.linalg.matrix_power(m, -1).sum(),
    "multivariate normal": lambda m: torch.distributions.MultivariateNormal(
        m[0].detach(), m @ m.mT + 0.1 * torch.eye(3), validate_args=False
    ).log_prob(m[1]),
}


@pytest.mark.parametrize("name", FACTORIZATIONS)
def test_factorizations(name: str) -> None:
    x = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    model = Scaled(FACTORIZATIONS[name], x)
    plain = copy.deepcopy(model)
    plan = tight(model, x)
    assert differences(run_step(plain, plain, x), run_step(plan.module, model, x)) == []


@pytest.mark.parametrize("name", ["inv", "solve", "cholesky"])
def test_what_cannot_be_factorized_raises_as_in_eager(name: str) -> None:
    x = torch.eye(3)
    plan = auto_checkpoint(Scaled(FACTORIZATIONS[name], x), x, progress=False)
    with pytest.raises(torch.linalg.LinAlgError):
        plan.module(torch.zeros(3, 3))


def test_questions_that_shapes_decide() -> None:
    x = values(3, 5)
    for function in (torch.cov, torch.corrcoef, lambda m: torch.combinations(m[0])):
        model = Scaled(lambda h, f=function: f(h).sin().sum(), x)  # type: ignore[misc]
        plain = copy.deepcopy(model)
        plan = tight(model, x)
        assert differences(run_step(plain, plain, x), run_step(plan.module, model, x)) == []


def test_complex_products_are_not_computed_in_place() -> None:
    torch.manual_seed(0)

    class Spectrum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(17, 9, dtype=torch.complex64))
            self.v = nn.Parameter(torch.randn(9, 33, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ((torch.fft.rfft(x) @ self.w) * self.v.t()).abs().square().sum()

    model, x = Spectrum(), torch.randn(33, 32)
    plain = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = tight(model, x, 0.5)
    assert differences(run_step(plain, plain, x), run_step(plan.module, model, x)) == []


class Speech(nn.Module):
    """CTC over what a linear layer makes, with lengths in tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, lengths: torch.Tensor) -> Any:
        return nn.functional.ctc_loss(self.linear(x).log_softmax(-1), targets, sizes, lengths, zero_infinity=True)


@pytest.mark.parametrize("padded", [True, False])
def test_one_plan_of_ctc_is_for_targets_of_all_lengths(padded: bool) -> None:
    model, count = Speech(), torch.tensor([6, 2, 4])
    plain = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(1, 5, (3, 7) if padded else (12,), generator=generator)
    x, sizes = torch.randn(20, 3, 8, generator=generator), torch.tensor([20, 15, 18])
    planned = tight(model, (x, targets, sizes, count))
    for lengths in (count, count.roll(1), torch.tensor([4, 4, 4])):
        sample = (x, targets, sizes, lengths)
        assert differences(run_step(plain, plain, sample), run_step(planned.module, model, sample)) == []
        model.zero_grad()
        peak = planned.static_bytes + measure_peak(lambda sample=sample: planned.module(*sample).backward())
        assert peak <= planned.peak_bytes
    assert len(planned.module._plan_state.cache) == 1


def test_the_weights_of_a_smoothed_cross_entropy_are_not_trained() -> None:
    labels, smoothed = torch.arange(4), nn.functional.cross_entropy
    model = Scaled(lambda w: smoothed(torch.eye(4), labels, w, label_smoothing=0.1), values(4))
    with pytest.raises(Unsupported, match="class weights require gradients.*label_smoothing=0"):
        auto_checkpoint(model, values(4), progress=False)


@pytest.mark.parametrize("shape", [(2, 1, 5, 6), (2, 1, 4, 5, 6)])
@pytest.mark.parametrize("align_corners", [False, True])
def test_autocast_reaches_into_an_affine_grid(shape: tuple[int, ...], align_corners: bool) -> None:
    """Its kernel multiplies matrices: the grid is in bfloat16, and was in float32 in a plan."""

    class Warping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.theta = nn.Parameter(torch.randn(2, len(shape) - 2, len(shape) - 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            still = torch.eye(*self.theta.shape[1:]).expand(2, -1, -1)
            grids = [F.affine_grid(theta, list(shape), align_corners=align_corners) for theta in (self.theta, still)]
            return F.grid_sample(x, grids[0].sin() + grids[1], align_corners=align_corners).square().mean()

    torch.manual_seed(0)
    model, x = Warping(), torch.randn(shape)
    plain = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        planned = tight(model, x, check=False).module
        expected, found = plain(x), planned(x)
    expected.backward()
    found.backward()
    assert same_bits(expected, found)
    assert same_bits(plain.theta.grad, model.theta.grad)


class OfCudnn(nn.Module):
    """A batch norm as `F.batch_norm` calls it on a GPU, or as it does here."""

    def __init__(self, *, on_a_gpu: bool, tracked: bool) -> None:
        super().__init__()
        self.norm, self.on_a_gpu = nn.BatchNorm2d(4, track_running_stats=tracked), on_a_gpu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm, x = self.norm, x.sin()
        given = (x, norm.weight, norm.bias, norm.running_mean, norm.running_var)
        if self.on_a_gpu:
            return torch.ops.aten.cudnn_batch_norm(*given, True, 0.1, 1e-5)[0].cos().sum()
        return F.batch_norm(x, *given[3:], *given[1:3], True, 0.1, 1e-5).cos().sum()


@pytest.mark.parametrize("tracked", [True, False])
def test_a_batch_norm_of_cudnn_is_one_op_that_updates_its_statistics(tracked: bool) -> None:
    """On a GPU it is cuDNN's kernel, on a CPU ATen's; torch traces the latter on both (tests/gpu compares bits)."""
    x = torch.randn(2, 4, 8, 8)
    model, twin = OfCudnn(on_a_gpu=True, tracked=tracked), OfCudnn(on_a_gpu=False, tracked=tracked)
    plan = auto_checkpoint(model, x, check=False, progress=False)
    ops = [str(node.target) for node in plan.step.forward.graph.nodes]
    assert "aten._batch_norm_with_update_functional.default" in ops
    assert differences(run_step(twin, twin, x), run_step(plan.module, model, x)) == []
