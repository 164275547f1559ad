"""The case table of the promises: each row, with the message that a user would read.

What is not here: solvers that are missing, crash or hang, full disks and Ctrl-C are in `test_faults.py`; damaged plan
files in `test_planfile.py`; hints in `test_hints.py`; checkpoints, copies and training loops in `test_training.py`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from passes._torch import FakeTensorMode
from passes.errors import ForwardFailed
from passes.run.step import DoubleBackward
from passes.trace import refuse
from passes.trace.structure import flatten
from planner import (
    BackwardTwice,
    BudgetError,
    CaptureError,
    InputMismatch,
    Plan,
    PlannerError,
    SolverUnavailable,
    Unsupported,
    auto_checkpoint,
    frontier,
    max_batch,
    minimum_budget,
)
from planner.integrations import plan_on_first_batch
from tests.planner.steps import (
    MIB,
    Wrap,
    assert_same_gradients,
    assert_same_state,
    batch,
    gradients,
    linear,
    mlp,
    plan,
    squares,
    tight,
    twins,
)
from tests.zoo.compare import measured_peak_bytes
from tests.zoo.hazards import StraightThrough

# Budgets and other arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [math.nan, math.inf, -math.inf, -1, 0, 0.0, True, False, [1], 10**400])
def test_a_value_that_is_no_budget(budget: Any) -> None:
    with pytest.raises(BudgetError) as caught:
        plan(linear(), batch(), budget)
    message = str(caught.value)
    assert f"budget_mb={budget!r}" in message
    assert "budget_mb takes MiB as an int or a float, a size (" in message
    assert caught.value.budget_bytes is None


@pytest.mark.parametrize("kind", [np.float32, np.int64, np.float64, Fraction])
def test_numbers_of_other_types_are_numbers(kind: Any) -> None:
    options = {"reserve_mb": kind(0), "time_limit": kind(5), "gap": kind(0), "cost": lambda op: kind(1)}
    chosen = plan(linear(), batch(), kind(1), **options)
    assert chosen.budget_bytes == MIB and type(chosen.budget_bytes) is int


@pytest.mark.parametrize("name", ["solvers", "flight", "group"])
def test_an_option_that_is_none_is_told_by_the_function_that_was_called(name: str) -> None:
    with pytest.raises(TypeError, match=rf"^frontier\(\) got an unexpected keyword argument '{name}'"):
        frontier(linear(), batch(), **{name: 3})
    with pytest.raises(TypeError, match=rf"^plan_on_first_batch\(\) got an unexpected keyword argument '{name}s'"):
        plan_on_first_batch(linear(), 1, **{f"{name}s": 3})
    with pytest.raises(TypeError, match=rf"^max_batch\(\) got an unexpected keyword argument '{name}'"):
        max_batch(linear(), batch, 1, **{name: 3})


def test_a_size_and_a_share_are_budgets() -> None:
    model, x = mlp(), batch(64, 32)
    free = plan(model, x, "12GB")
    assert free.budget_bytes == 12 * 10**9
    assert plan(model, x, "90%").budget_bytes == free.baseline_peak_bytes * 9 // 10


@pytest.mark.parametrize("budget", ["12", "many", "0%", "-1GB", "", "5 %%"])
def test_a_text_that_is_no_budget(budget: str) -> None:
    with pytest.raises(BudgetError, match="write a size with its unit"):
        plan(linear(), batch(), budget)


def test_a_budget_under_the_minimum_carries_one_that_works() -> None:
    model, x = mlp(), batch(64, 32)
    with pytest.raises(BudgetError) as caught:
        plan(model, x, 0.001)
    error = caught.value
    assert error.budget_bytes == int(0.001 * MIB)
    assert error.minimum_bytes is not None and error.floor_bytes is not None and error.minimum_mb is not None
    assert error.budget_bytes < error.floor_bytes <= error.minimum_bytes
    assert f"{error.minimum_bytes / MIB:.3f} MiB" in str(error)
    assert "smallest budget known to work" in str(error)
    assert plan(model, x, error.minimum_mb).peak_bytes <= error.minimum_bytes


def test_a_minimum_works_as_it_is_written() -> None:
    """45,376 bytes are 0.04327 MiB: 0.043 would be refused again."""
    model, x = mlp(), batch(32, 32)
    with pytest.raises(BudgetError) as caught:
        plan(model, x, 0.001)
    written = re.search(r"known to work is (\S+) MiB", str(caught.value))
    assert written is not None
    assert plan(model, x, f"{written[1]}MiB").peak_bytes == caught.value.minimum_bytes


def test_minimum_budget_says_the_same() -> None:
    model, x = mlp(), batch(64, 32)
    minimum_mb, floor_mb = minimum_budget(model, x, time_limit=5, progress=False)
    assert floor_mb <= minimum_mb
    assert plan(model, x, minimum_mb).peak_bytes <= minimum_mb * MIB


def test_a_budget_over_the_plain_peak_recomputes_nothing_and_says_so() -> None:
    chosen = plan(mlp(), batch(64, 32), 1000)
    assert chosen.recomputed == ()
    assert chosen.overhead == 0 and chosen.recompute_flops == 0
    assert chosen.peak_bytes == chosen.baseline_peak_bytes
    assert chosen.status == "optimal" and chosen.bound == 0
    assert "nothing is recomputed" in repr(chosen)
    assert "the plain step fits" in repr(chosen)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"time_limit": 0}, "time_limit=0 must be a positive number of seconds"),
        ({"time_limit": math.nan}, "time_limit=nan must be"),
        ({"time_limit": "5"}, "time_limit='5' must be"),
        ({"gap": -0.1}, "gap=-0.1 must be zero or more"),
        ({"gap": "x"}, "gap='x'"),
        ({"cost": "watts"}, "cost='watts' is unknown: it takes one of flops, roofline, measured"),
        ({"on_new_shape": "guess"}, "on_new_shape='guess' is unknown: it takes 'replan', 'bucket', 'eager' or 'error'"),
        ({"reserve_mb": -1}, "reserve_mb=-1 is not a number of MiB"),
        ({"reserve_mb": math.inf}, "reserve_mb=inf is not a number of MiB"),
        ({"loss_fn": 3}, "loss_fn=3 is not callable: pass a function"),
        ({"loss_fn": nn.MSELoss()}, "Linear.forward and loss_fn, which takes target: missing a required argument"),
        ({"loss_fn": nn.MSELoss}, "loss_fn=MSELoss is a class: pass an instance, MSELoss()"),
        ({"keep_outputs": "no"}, "keep_outputs='no' is unknown: it takes True or False"),
        ({"progress": "yes"}, "progress='yes' is unknown: it takes True, False or None"),
        ({"group": 3}, "group=3 is no process group: pass one of torch.distributed"),
        ({"cost": lambda op: math.nan}, "<lambda> gave nan for addmm: it returns a number, zero or more, for each op"),
        ({"cost": lambda op: "1"}, "<lambda> gave '1' for addmm"),
        ({"optimizer": 3}, "optimizer=3 is not an optimizer: pass an instance, a class"),
    ],
)
def test_other_arguments(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlannerError) as caught:
        auto_checkpoint(linear(), batch(), **{"progress": False, **options})
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["gurobi", None])
def test_an_unknown_solver_lists_those_there_are(name: Any) -> None:
    with pytest.raises(SolverUnavailable) as caught:
        plan(linear(), batch(), solver=name)
    assert caught.value.available and "greedy" in caught.value.available
    assert f"no solver is named {name!r}; available: " in str(caught.value)


def test_what_is_no_module() -> None:
    with pytest.raises(PlannerError, match=r"model is a function: pass a torch.nn.Module"):
        plan(lambda x: x, batch())  # type: ignore[arg-type]
    with pytest.raises(PlannerError, match=r"model is the class Linear: pass an instance of it"):
        plan(nn.Linear, batch())  # type: ignore[arg-type]


def test_a_sample_that_the_model_cannot_run() -> None:
    with pytest.raises(ForwardFailed, match=r"The sample is a list, which is one argument: pass tuple\(sample\)"):
        plan(linear(), [batch()])
    model, ids = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 8)), torch.tensor([1, 5])
    with pytest.warns(UserWarning, match="not checked: the plain step raises IndexError: .* run on this sample"):
        plan(model, ids)


@pytest.mark.parametrize("loss", [None, 0.5])
def test_a_loss_that_is_no_tensor(loss: Any) -> None:
    with pytest.raises(PlannerError, match=f"loss_fn returned {loss}: it has to return the loss as a tensor"):
        plan(linear(), batch(), loss_fn=lambda output: loss)


@pytest.mark.parametrize("sample", [(torch.ones(4, 8), 1), {"y": torch.ones(4, 8)}])
def test_a_sample_that_does_not_fit_the_signature(sample: Any) -> None:
    with pytest.raises(PlannerError, match=r"does not fit Linear.forward: .* Pass a tensor, a tuple"):
        plan(linear(), sample)


def test_planning_where_no_gradient_can_be_recorded() -> None:
    model, x = linear(), batch()
    with torch.inference_mode(), pytest.raises(PlannerError, match=r"under torch.inference_mode\(\).* leave the block"):
        plan(model, x)
    with torch.no_grad():
        chosen = plan(model, x)
    chosen.module(x).sum().backward()
    assert model.weight.grad is not None


def test_an_error_says_what_was_given_what_is_allowed_and_what_to_do() -> None:
    with pytest.raises(BudgetError) as caught:
        plan(mlp(), batch(64, 32), 0.001)
    given, works, floor = (caught.value.budget_bytes, caught.value.minimum_bytes, caught.value.floor_bytes)
    sizes = [f"{size / MIB:.3f} MiB ({size} bytes)" for size in (given, works, floor) if size is not None]
    sizes[1] = f"{math.ceil((works or 0) / MIB * 1000) / 1000:.3f} MiB ({works} bytes)"
    assert str(caught.value) == (
        f"no schedule found within {sizes[0]}; the smallest budget known to work is {sizes[1]}: ask for that, or for a "
        f"smaller batch. None below {sizes[2]} can work"
    )


# What cannot be traced ------------------------------------------------------------------------------------------


def item(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.layer(x) * x.sum().item()


def branch(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.layer(x) if x.sum() > 0 else x


def to_numpy(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.layer(x) + torch.from_numpy(x.numpy())


def address(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.layer(x) * (x.data_ptr() % 2)


def numpy_mean(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.layer(x) * float(np.mean(x.detach().numpy()))


def data_shape(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.layer(x)[x[:, 0] > 0]


@pytest.mark.parametrize(
    ("forward", "why", "remedy"),
    [
        (item, "The value of a tensor is needed in Python here (.item(), bool(), an `if` on data)", "use torch.where"),
        (branch, "The value of a tensor is needed in Python here", "the branch must not depend on data"),
        (to_numpy, "turned into a numpy array", "Use torch functions instead"),
        (numpy_mean, "turned into a numpy array", "Use torch functions instead"),
        (address, "address of a tensor's memory", "torch.backends.cudnn.flags(enabled=False)"),
        (data_shape, "The shape of this result depends on data", "Use a mask with torch.where, or a fixed capacity"),
    ],
)  # fmt: skip
def test_python_that_reads_data_is_located(forward: Callable[..., Any], why: str, remedy: str) -> None:
    with pytest.raises(CaptureError) as caught:
        plan(Wrap(forward, layer=linear()), batch())
    line = forward.__code__.co_firstlineno + 1
    assert caught.value.location == f"{__file__}:{line}"
    assert caught.value.construct == inspect.getsource(forward).splitlines()[1].strip()
    assert caught.value.location in str(caught.value)
    assert why in str(caught.value) and remedy in str(caught.value)


ASSERTS = hasattr(torch.distributions.distribution, "_all_true_or_runtime_assert")  # torch 2.15


def asserted(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.layer(x).exp()
    torch._assert_async((y < 1e4).all(), "y is too large")
    return y.square().mean()


def asserted_distribution(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.distributions.Normal(self.layer(x), 1.0, validate_args=True).log_prob(x.abs()).square().mean()


@pytest.mark.parametrize("forward", [
    asserted, pytest.param(asserted_distribution, marks=pytest.mark.skipif(not ASSERTS, reason="it asks for values")),
])  # fmt: skip
def test_an_assertion_of_the_forward_is_asserted_in_every_step(forward: Any) -> None:
    made = plan(model := Wrap(forward, layer=linear()), x := batch())
    assert not made.regions
    plain = copy.deepcopy(model)
    for run in (made.module, plain):
        run(x).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    with pytest.raises((RuntimeError, ValueError), match="y is too large|loc .* to satisfy the constraint") as wanted:
        plain(x * math.nan)
    with pytest.raises(wanted.type, match=re.escape(str(wanted.value)[:60])):
        made.module(x * math.nan)


def test_what_torchs_own_code_asks_is_not_said_of_the_users_line_alone() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return F.gaussian_nll_loss(self.layer(x), x, self.layer(x).exp())

    line = rf"test_cases\.py:{forward.__code__.co_firstlineno + 1}: `return .*`, in torch's own code \(.*"
    words = r"functional\.py:\d+ `elif torch.any\(var < 0\):`\).*move it out of forward"
    with pytest.raises(CaptureError, match=line + words):
        plan(Wrap(forward, layer=linear()).to("meta"), batch().to("meta"))


def test_an_observer_is_refused_by_its_line_with_what_quantizes_instead() -> None:
    quantization = pytest.importorskip("torch.ao.quantization")
    observer = quantization.MovingAverageMinMaxObserver
    model = nn.Sequential(quantization.FakeQuantize(observer), linear())
    with pytest.raises(CaptureError, match=r"torch.ao.quantization.\w+\.py:\d+.*Quantize by FusedMovingAvg"):
        plan(model, batch(), regions="whole")
    model[0] = quantization.FusedMovingAvgObsFakeQuantize(observer)
    assert plan(model, batch(), check=True).checked.steps == 2



def test_a_numpy_argument_is_refused_by_name() -> None:
    model = Wrap(lambda self, x, mask: self.layer(x) * torch.from_numpy(mask), layer=linear())
    with pytest.raises(Unsupported, match=r"numpy value at the arguments \(ndarray\): .* Pass torch.from_numpy"):
        plan(model, (batch(), np.ones((4, 8), np.float32)))


def test_tensors_made_under_inference_mode_are_refused_by_name() -> None:
    model, x = linear(), torch.randn(4, 8)
    with torch.inference_mode():
        untracked, cached = torch.randn(4, 8), torch.randn(3)
    model.cached = cached  # type: ignore[assignment]  # what forward does not use is none of the plan's
    chosen = plan(model, x)
    refused = r"inference_mode\(\) at argument input.*clone\(\)"
    with pytest.raises(Unsupported, match=refused):
        plan(model, untracked)
    with pytest.raises(RuntimeError, match="Inference tensors"), pytest.warns(UserWarning, match=refused):
        chosen.module(untracked)  # as in eager
    model.bias = nn.Parameter(torch.ones_like(model.bias))
    with torch.inference_mode():
        model.weight = nn.Parameter(torch.ones(model.weight.shape), requires_grad=False)
    with pytest.raises(Unsupported, match=r"inference_mode\(\) at weight.*clone\(\)"):
        plan(model, x)


def test_what_a_validation_under_inference_mode_leaves_in_a_buffer_is_read_in_eager() -> None:
    def centered(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        with torch.no_grad():
            self.center = 0.9 * self.center + 0.1 * h.mean(0)
        result: torch.Tensor = (h - self.center).pow(2).mean()
        return result

    wrapped, x = Wrap(centered, layer=linear()), batch()
    wrapped.register_buffer("center", torch.zeros(8))
    model, plain = twins(wrapped)
    plan(model, x).apply(model)
    for words in (None, "center is a tensor made under torch.inference_mode", None):
        with pytest.warns(match=words) if words else warnings.catch_warnings():
            warnings.simplefilter("error" if words is None else "always")
            model(x).backward()
        plain(x).backward()
        assert_same_gradients(model, plain)
        assert_same_state(model, plain)
        with torch.inference_mode():
            for each in (model, plain):
                each.eval()(x)
                each.train()
        if words:  # another training step on the next buffer, made outside
            model.center, plain.center = (torch.ones(8) for _ in range(2))


def test_a_model_that_does_not_run_on_the_sample(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"\[4, 7\] X \[8, 8\]. Check that the model runs on the sample"):
        plan(linear(), batch(4, 7))
    model, told = nn.Sequential(linear(), linear()), "Check that the model runs on the sample"
    with pytest.raises(ForwardFailed, match=rf"\(4x7 and 8x8\)\. {told}"):
        plan(model, batch(4, 7), regions=["0", "1"])
    path = plan(model, batch(), regions=["0", "1"]).save(tmp_path / "plan.json")
    with pytest.raises(ForwardFailed, match=rf"must have the same dtype, .*\. {told}"):
        Plan.load(path, model, batch().double(), progress=False)


def test_a_step_without_backward() -> None:
    with pytest.raises(CaptureError, match=r"no backward: no output depends on a parameter .* Check requires_grad"):
        plan(Wrap(lambda self, x: self.layer(x).detach(), layer=linear()), batch())


@torch.library.custom_op("planner_cases::without_fake", mutates_args=())
def without_fake(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("planner_cases::without_gradient", mutates_args=())
def without_gradient(x: torch.Tensor) -> torch.Tensor:
    return x * 2


without_gradient.register_fake(torch.empty_like)


def test_a_sparse_tensor_on_the_way() -> None:
    model = Wrap(lambda self, x: torch.sparse.mm(self.layer(x).to_sparse(), self.layer.weight), layer=linear())
    with pytest.raises(CaptureError, match=r"A sparse tensor is made or read here, .* Use dense tensors, or keep") as e:
        plan(model, batch())
    assert str(e.value.location).startswith(__file__)


@pytest.mark.parametrize("made", [
    lambda x: torch.nested.nested_tensor([x[:1], x[1:]]),
    lambda x: torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 4])),
])  # fmt: skip
def test_a_nested_tensor_on_the_way(made: Any) -> None:
    model = Wrap(lambda self, x: made(self.layer(x)).to_padded_tensor(0.0), layer=linear())
    with pytest.raises(CaptureError, match=r"A nested tensor is made here, .* Use a padded tensor and a mask"):
        plan(model, batch())


def test_memory_that_forward_gives_back() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul(2).untyped_storage().resize_(0)
        return self.layer(x)

    with pytest.raises(Unsupported, match="a tensor's data replaced in forward at .*test_cases"):
        plan(Wrap(forward, layer=linear()), batch())


def test_a_custom_op_without_fake_kernel() -> None:
    with pytest.raises(CaptureError) as caught:
        plan(Wrap(lambda self, x: without_fake(self.layer(x)), layer=linear()), batch())
    assert "planner_cases::without_fake" in str(caught.value)
    assert "Add one with register_fake" in str(caught.value)
    assert str(caught.value.location).startswith(__file__)


@pytest.mark.filterwarnings("ignore:Error detected in")
@pytest.mark.filterwarnings("ignore")  # of torch.ao, which has moved
def test_a_buffer_that_gets_its_size_in_the_first_call() -> None:
    """Observers of quantization-aware training begin without a range for any channel."""
    from torch.ao.quantization import default_fused_per_channel_wt_fake_quant

    model = Wrap(lambda self, x: F.linear(x, self.fake(self.layer.weight)).sin(), layer=linear())
    model.fake, x = default_fused_per_channel_wt_fake_quant(), batch()
    with pytest.raises(Unsupported, match="Run the model once"):
        plan(model, x)
    model(x)
    plain = copy.deepcopy(model)
    chosen = plan(model, x)
    squares(chosen.module(x)).backward()
    squares(plain(x)).backward()
    assert_same_gradients(model, plain)
    assert_same_state(model, plain)


def test_a_custom_op_without_gradient() -> None:
    with pytest.raises(CaptureError, match=r"planner_cases.without_gradient.*Add one with register_autograd"):
        plan(Wrap(lambda self, x: self.layer(without_gradient(self.layer(x))), layer=linear()), batch())


# What is refused ------------------------------------------------------------------------------------------------


class Subclass(torch.Tensor):
    """A tensor subclass with nothing special about it."""


def with_hook(kind: str) -> nn.Module:
    model = nn.Sequential(linear(), linear())
    getattr(model[1], f"register_{kind}")(lambda *a: None)
    return model


def subclass_parameter() -> nn.Module:
    model = linear()
    model.weight = nn.Parameter(model.weight.detach().as_subclass(Subclass))
    return model


def sparse_buffer() -> nn.Module:
    model = linear()
    model.register_buffer("mask", torch.eye(8).to_sparse())
    return model


def own_generator() -> nn.Module:
    model = Wrap(lambda self, x: self.layer(x) * torch.rand(4, 8, generator=self.generator), layer=linear())
    model.generator = torch.Generator()
    return model


class Unregistered(nn.Module):
    """Keeps a layer in a plain list, so its parameters are unknown to the module."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.layers = linear(), [linear()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers[0](x))


class PlainState(nn.Module):
    """Counts in a tensor that is not a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.steps = linear(), torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return self.head(x) * self.steps


def buffer_with_gradient(leave: Callable[[Any, torch.Tensor], Any]) -> nn.Module:
    """Leaves an auxiliary loss in a buffer, for the loss outside to read."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        leave(self, y.pow(2).mean())
        return y

    model = Wrap(forward, layer=linear())
    model.register_buffer("found", torch.zeros(()))
    return model


@torch.library.custom_op("planner_tests::doubled", mutates_args={"out"})
def doubled(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * 2)


def writes_by_a_custom_op(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = self.layer(x)
    out = torch.empty_like(h)
    doubled(h.detach(), out)
    return h * out


class Dotted(nn.Module):
    """tensordict keeps parameters under such names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Module()
        self.layer._parameters["0.weight"] = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.layer._parameters["0.weight"]


class OwnNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Any:
        return super().named_parameters(prefix, recurse)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class HoldsItsWeight(nn.Module):
    """Reads a parameter of a submodule from a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.weights = [self.layer.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) @ self.weights[0]


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, str, str]] = {
    "backward hook": (
        lambda: with_hook("full_backward_hook"), batch, "module backward hook at 1", 'Plan by regions (regions="auto"'),
    "old backward hook": (
        lambda: with_hook("backward_hook"), batch, "hook of register_backward_hook at 1",
        "Use register_full_backward_hook"),
    "buffer changed in place with its gradient": (
        lambda: buffer_with_gradient(lambda model, loss: model.found.detach_().zero_().add_(loss)),
        batch, "buffer that forward gives a gradient at found", "put its detach() there"),
    "sparse embedding": (
        lambda: nn.Embedding(9, 4, sparse=True), lambda: torch.arange(4), "sparse gradient", "sparse=False"),
    "sparse function": (
        lambda: Wrap(lambda self, i: F.embedding(i, self.e.weight, sparse=True).sum(), e=nn.Embedding(9, 4)),
        lambda: torch.arange(4), "sparse gradient", "sparse=False"),
    "subclass parameter": (
        subclass_parameter, batch, "tensor subclass at weight (Subclass)", "Convert the parameter to a plain tensor"),
    "subclass argument": (
        linear, lambda: batch().as_subclass(Subclass), "tensor subclass at argument input (Subclass)",
        "Pass a plain tensor"),
    "sparse buffer": (
        sparse_buffer, batch, "sparse tensor at mask", "Use a dense tensor (to_dense()"),
    "sparse argument": (
        linear, lambda: torch.eye(8).to_sparse(), "sparse tensor at argument input", "Use a dense tensor (to_dense()"),
    "nested argument": (
        linear, lambda: torch.nested.nested_tensor([batch(), batch()]), "nested tensor at argument input",
        "padding with a mask"),
    "generator": (
        own_generator, batch, "random generator of its own at rand", "Draw from the default generator"),
    "scripted": (
        lambda: torch.jit.trace(linear(), batch()), batch, "scripted or data-parallel",
        "Plan the module inside it"),
    "data parallel": (
        lambda: nn.DataParallel(linear()), batch, "the model (DataParallel)", "wrap plan.module afterwards"),
    "dot in a name": (Dotted, batch, "not found by its name at layer['0.weight']", "a name without dots"),
    "own names": (OwnNames, batch, "not found by its name at OwnNames.named_parameters", "plan nn.Sequential(model)"),
    "lazy": (lambda: nn.LazyLinear(3), batch, "lazy parameter at weight", "Run the model once on a sample"),
    "unregistered parameter": (Unregistered, batch, "not a parameter of the model", "Register it: nn.Parameter"),
    "parameter in a list": (HoldsItsWeight, batch, "an object of its own at layer.weight", "Read it from its module"),
    "compiled function": (
        lambda: Wrap(lambda self, x: torch.compile(torch.sin, backend="eager")(self.layer(x)), layer=linear()),
        batch, "a function compiled by torch.compile in forward", "Call the function itself"),
    "argument's requires_grad": (
        lambda: Wrap(lambda self, x: self.layer(x.requires_grad_()), layer=linear()), batch,
        "an argument's requires_grad set in forward", "x = x.detach().requires_grad_()"),
    "plain tensor changed": (PlainState, batch, "not a buffer at self.steps", "Register it: self.register_buffer"),
    "input changed": (
        lambda: Wrap(lambda self, x: self.layer(x.mul_(2)), layer=linear()), batch, "in-place change of an input",
        "Clone the input inside forward"),
    "input transposed": (
        lambda: Wrap(lambda self, x: self.layer(x.t_()), layer=linear()), lambda: batch(8),
        "in-place change of an input's shape", "Use the out-of-place op"),
    "leaf that is returned": (
        lambda: Wrap(lambda self, x: (self.layer(x), torch.zeros(4, requires_grad=True)), layer=linear()), batch,
        "a tensor that forward makes, has require a gradient, and returns or keeps", "pass it as an argument"),
    "conjugate of an output": (
        lambda: Wrap(lambda self, x: (y := self.layer(x) * 1j, y.conj()), layer=linear()), batch,
        "an output that is yet to be conjugated or negated at output [1]",
        "Return its resolve_conj()"),
    "view of input": (
        lambda: Wrap(lambda self, x: (self.layer(x), x.view(-1)), layer=linear()), batch,
        "view of an input or parameter returned at output [1]", "Return a clone() of it"),
    "view of parameter": (
        lambda: Wrap(lambda self, x: (self.layer(x), self.layer.weight.t()), layer=linear()), batch,
        "view of an input or parameter returned at output [1]", "Return a clone() of it"),
    "compiled": (
        lambda: torch.compile(linear(), backend="eager"), batch, "compiled module",
        "Plan the module inside it"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("forward", "what", "remedy"),
    [
        (lambda self, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (self.layer(x),)),
         "higher-order op cond", "cond -> torch.where"),
        (writes_by_a_custom_op, "custom op changes its arguments", "return what it computes"),
    ],
)  # fmt: skip
def test_ops_that_a_trace_does_not_see_are_refused_by_name(forward: Any, what: str, remedy: str) -> None:
    with pytest.raises(CaptureError, match=rf"cannot trace the model at .*test_cases.*{what}.*{remedy}"):
        plan(Wrap(forward, layer=linear()), batch())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_with_a_remedy(name: str) -> None:
    make, sample, place, remedy = REFUSED[name]
    model, x = make(), sample()
    with pytest.raises(Unsupported) as caught:
        plan(model, x)
    assert place in str(caught.value)
    assert remedy in str(caught.value)
    assert caught.value.remedy and caught.value.construct and caught.value.place


def test_parameters_on_several_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    row = next(row for row in refuse.TABLE if "devices" in row.construct)
    monkeypatch.setattr(refuse, "TABLE", (row,))  # a fake parameter stands for one on a device that is not here
    model = nn.Sequential(linear(), linear())
    with FakeTensorMode():
        model[1].weight = nn.Parameter(torch.empty(8, 8, device="cuda"))
    with pytest.raises(Unsupported) as caught:
        plan(model, batch())
    assert str(caught.value) == (
        "parameters on several devices at 0.weight on cpu, 1.weight on cuda:0: one budget covers one device. Move the "
        "model to one device."
    )


def test_gradients_taken_inside_forward_are_kept() -> None:
    def penalized(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x).tanh()
        (slope,) = torch.autograd.grad(y.sum(), self.layer.weight, create_graph=True)
        return y.pow(2).mean() + slope.pow(2).sum()

    model, plain = twins(Wrap(penalized, layer=linear()))
    x = batch()
    tight(model, x).module(x).backward()
    plain(x).backward()
    assert_same_gradients(model, plain)


def test_a_loss_with_parameters_of_its_own_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"not a parameter of the model .* make the loss a part of the model"):
        plan(linear(), batch(), loss_fn=Wrap(lambda self, y: self.layer(y).sum(), layer=linear()))


def test_an_attribute_set_in_forward_is_said() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls, self.seen = linear(), 0, []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.last = self.layer(x)
            self.seen.append(x[:1])
            return self.last.tanh()

    model = Remembers()
    with pytest.warns(UserWarning, match=r"forward sets self\.seen; .* Return what is read elsewhere") as said:
        chosen = plan(model, batch())
    assert len(said) == 1 and "tests" in said[0].filename
    output = chosen.module(batch())
    assert model.calls == 1 and model.seen == [] and torch.equal(model.last.tanh(), output)


# Calls that differ from the sample ------------------------------------------------------------------------------


def test_another_shape_is_an_error_where_asked() -> None:
    chosen = plan(linear(), batch(), on_new_shape="error")
    with pytest.raises(InputMismatch) as caught:
        chosen.module(batch(3))
    error = caught.value
    assert error.argument == "input"
    assert "(3, 8) float32 on cpu" in error.got and "(4, 8) float32 on cpu" in error.expected
    assert "argument 'input': got (3, 8) float32 on cpu, the plan expects (4, 8) float32 on cpu" in str(error)
    assert 'on_new_shape="replan" plans such calls, "eager" runs them unplanned' in str(error)


@pytest.mark.parametrize("x", [torch.ones(4, 8, dtype=torch.float64), torch.ones(8, 4).t(), torch.ones(4, 8, 1)])
def test_another_dtype_layout_or_rank_is_an_error_where_asked(x: torch.Tensor) -> None:
    with pytest.raises(InputMismatch, match="argument 'input'"):
        plan(linear(), batch(), on_new_shape="error").module(x)


def test_another_device_is_an_error_where_asked() -> None:
    chosen = plan(linear(), batch(), on_new_shape="error")
    with FakeTensorMode():
        elsewhere = torch.empty(4, 8, device="cuda")
    words = r"argument 'input': got \(4, 8\) float32 on cuda:0, the plan expects \(4, 8\) float32 on cpu"
    with pytest.raises(InputMismatch, match=words):
        chosen.module(elsewhere)


@dataclass
class Pair:
    a: Any
    b: Any = None


STRUCTURES: list[tuple[Any, tuple[Any, ...], str]] = [
    (({"a": "x"},), ({"b": "x"},), "argument 'x': got what holds ['b'], the plan expects what holds ['a']"),
    (({"a": "x"},), ({"a": "x", "b": "y"},), "got what holds ['a'], ['b'], the plan expects what holds ['a']"),
    (({"a": "x"},), ("x",), "argument 'x': got a tensor, the plan expects what holds ['a']"),
    ((["x", "y"],), (["x"],), "argument 'x': got what holds [0], the plan expects what holds [0], [1]"),
    (("x",), ("x", "y"), "argument 'y': got a tensor, the plan expects nothing"),
    (("x", 1), ("x", 2), "argument 'y': got 2, the plan expects 1"),
    (("x", {"k": [1, "b"]}), ("x", {"k": [1, "c"]}), "argument \"y['k'][1]\": got 'c', the plan expects 'b'"),
    (("x",), (3.0,), "argument 'x': got 3.0, the plan expects a tensor"),
    (("x", "y"), ("x", "x"), "argument 'y': got the same tensor as x, the plan expects a tensor"),
    ((Pair("x"),), (Pair("x", "y"),), "argument 'x': got what holds .a, .b, the plan expects what holds .a"),
]


@pytest.mark.parametrize(("sample", "call", "words"), STRUCTURES, ids=range(len(STRUCTURES)))
def test_arguments_built_differently_are_told_apart(sample: Any, call: Any, words: str) -> None:
    class Any_(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()

        def forward(self, x: Any, y: Any = None) -> torch.Tensor:
            tensors, _ = flatten((x, y))
            return self.layer(sum(tensors, torch.zeros(4, 8)))

    tensors = {"x": batch(), "y": batch()}

    def filled(value: Any) -> Any:
        if isinstance(value, Pair):
            return Pair(filled(value.a), filled(value.b))
        if isinstance(value, dict):
            return {k: filled(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(map(filled, value))
        return tensors.get(value, value) if isinstance(value, str) else value

    chosen = plan(Any_(), filled(sample), on_new_shape="error")
    chosen.module(*filled(sample))
    with pytest.raises(InputMismatch) as caught:
        chosen.module(*filled(call))
    assert words in str(caught.value) and "TreeSpec" not in str(caught.value)
    assert 'on_new_shape="replan" plans such calls' in str(caught.value)


def asks_what_came_by_name(forward: Callable[..., Any]) -> Callable[..., Any]:
    """As decorators of libraries do, which look at the named arguments of a call and add some."""

    @functools.wraps(forward)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        twice = bool(kwargs.get("twice"))
        kwargs["offset"] = kwargs.get("offset") or 1.0
        y, z = forward(self, *args, **kwargs)
        return (y * 2, z) if twice else (y, z)

    return wrapper


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(0.3)

    @asks_what_came_by_name
    def forward(self, x: torch.Tensor, offset: float | None = None, twice: bool = False) -> Any:
        y = self.body(x) + offset
        return y, y.sin()


@pytest.mark.parametrize("inside", [False, True], ids=["the model", "a region"])
def test_arguments_are_given_by_name_where_the_call_gave_them_so(inside: bool) -> None:
    def calling(self: Any, x: torch.Tensor) -> Any:
        return self.inner(x=x, offset=None, twice=True)

    model: nn.Module = Wrap(calling, inner=Decorated()) if inside else Decorated()
    plain, x = copy.deepcopy(model), batch(16, 32)
    given, call = ((x,), {}) if inside else ((), {"x": x, "offset": None, "twice": True})
    chosen = plan(model, given if inside else call, regions="inner" if inside else "whole")
    assert bool(chosen.runs) == inside
    for which in (slice(2), slice(1, 2), slice(2)):  # the second is replayed
        for module in (chosen.module, plain):
            torch.manual_seed(0)
            outputs = module(*given, **call)
            torch.stack([o.sum() for o in outputs[which]]).sum().backward()
        assert_same_gradients(model, plain)
    model.eval(), plain.eval()
    assert all(map(torch.equal, chosen.module(*given, **call), plain(*given, **call)))


def test_a_call_that_does_not_fit_the_signature_fails_as_a_call_does() -> None:
    chosen, model = plan(linear(), batch()), linear()
    for arguments in ((), (batch(), batch())):
        with pytest.raises(TypeError):
            model(*arguments)
        with pytest.raises(TypeError, match=r"missing a required argument: 'input'|too many positional arguments"):
            chosen.module(*arguments)


def test_another_shape_runs_eagerly_where_asked() -> None:
    model, x = mlp(0.0), batch(8, 32)
    chosen = plan(model, x, on_new_shape="eager")
    with pytest.warns(UserWarning, match=r"planned step not used: argument 'input': got \(3, 32\)"):
        assert torch.equal(chosen.module(x[:3]), model(x[:3]))


def test_another_shape_is_planned_anew_and_cached() -> None:
    model, plain = twins(mlp(0.0))
    chosen = plan(model, batch(8, 32))
    x = batch(3, 32)
    with pytest.warns(UserWarning, match=r"planning anew: argument 'input': got \(3, 32\)"):
        squares(chosen.module(x)).backward()
    squares(plain(x)).backward()
    assert_same_gradients(model, plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen.module(x)
        chosen.module(batch(8, 32))


@pytest.mark.filterwarnings("ignore:Profiler clears events")
def test_nothing_is_planned_while_a_profiler_runs() -> None:
    model, plain = twins(mlp(0.0))
    chosen, x = plan(model, batch(8, 32)), batch(3, 32)
    with torch.profiler.profile(profile_memory=True):
        for optimizer in (None, torch.optim.AdamW):
            with pytest.raises(Unsupported, match="a profiler of torch's that is running"):
                plan(model, x, optimizer=optimizer)
        with pytest.warns(UserWarning, match="planned step not used while a profiler runs"):
            squares(chosen.module(x)).backward()
    squares(plain(x)).backward()
    assert_same_gradients(model, plain)
    with pytest.warns(UserWarning, match="planning anew"):
        chosen.module(x)


@pytest.mark.parametrize("plans", [0, 5])
def test_the_cache_is_bounded_in_bytes(plans: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = plan(linear(), batch())
    cache = chosen.module._plan_state
    monkeypatch.setattr("planner.dropin.cache.CACHE_BYTES", plans * cache.cache[0].nbytes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rows in range(5, 12):
            squares(chosen.module(batch(rows))).backward()
    kept = [entry.planned.prepared.traced.placeholders[-2].meta["val"].shape[0] for entry in cache.cache]
    assert kept == [11, 10, 9, 8, 7][: max(plans, 2)]  # two for losses that alternate


def test_another_flag_is_noticed() -> None:
    class Flagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()

        def forward(self, x: torch.Tensor, double: bool = False) -> torch.Tensor:
            return self.layer(x) * (2 if double else 1)

    model, x = Flagged(), batch()
    chosen = plan(model, (x, False))
    with pytest.warns(UserWarning, match="planning anew"):
        assert torch.equal(chosen.module(x, True), model(x, True))
    assert torch.equal(chosen.module(x, False), model(x, False))


def test_the_same_tensor_in_another_place_is_another_call() -> None:
    model = Wrap(lambda self, a, b, c: self.layer(a) + 2 * self.layer(b) + 3 * self.layer(c), layer=linear())
    x, y = batch(), batch()
    chosen = plan(model, (x, x, y))
    with pytest.warns(UserWarning, match="planning anew"):
        assert torch.equal(chosen.module(x, y, y), model(x, y, y))


# Modes ----------------------------------------------------------------------------------------------------------


def test_eval_and_no_grad_run_the_original_forward() -> None:
    model = nn.Sequential(linear(), nn.BatchNorm1d(8), nn.Dropout(0.5))
    x = batch()
    chosen = plan(model, x)
    chosen.module.eval()
    assert not model.training and not model[2].training
    before = model[1].running_mean.clone()
    assert torch.equal(chosen.module(x), model(x))
    assert torch.equal(chosen.module(x), chosen.module(x))
    assert torch.equal(model[1].running_mean, before)
    squares(chosen.module(x)).backward()
    assert model[0].weight.grad is not None
    chosen.module.train()
    with torch.no_grad():
        torch.manual_seed(0)
        got = chosen.module(x)
        torch.manual_seed(0)
        assert torch.equal(got, model(x))
    assert not got.requires_grad
    with torch.inference_mode():
        assert chosen.module(x).is_inference()


def test_a_model_handed_over_in_eval_mode_is_planned_for_training() -> None:
    model, plain = twins(mlp().eval())
    x = batch(8, 32)
    chosen = tight(model, x)
    assert not model.training
    assert torch.equal(chosen.module(x), model(x))
    chosen.module.train()
    plain.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.manual_seed(3)
        squares(chosen.module(x)).backward()
    torch.manual_seed(3)
    squares(plain(x)).backward()
    assert_same_gradients(model, plain)


def test_a_submodule_set_to_eval_is_noticed() -> None:
    model = nn.Sequential(linear(), nn.BatchNorm1d(8))
    x = batch()
    chosen = plan(model, x)
    model[1].eval()
    with pytest.warns(UserWarning, match=r"planning anew: .*1 \(BatchNorm1d\) with training=False"):
        assert torch.equal(chosen.module(x), model(x))


def test_a_changed_setting_of_a_module_is_noticed() -> None:
    model, plain = twins(nn.Sequential(linear(), nn.Dropout(0.5)))
    x = batch()
    chosen = plan(model, x)
    model[1].p = plain[1].p = 0.1
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=r"1 \(Dropout\) with p=0.1, the plan expects p=0.5"):
        got = chosen.module(x)
    torch.manual_seed(0)
    assert torch.equal(got, plain(x))


def test_a_replaced_layer_is_noticed() -> None:
    model = nn.Sequential(linear(), nn.ReLU())
    x = batch()
    chosen = plan(model, x)
    model[1] = nn.Tanh()
    with pytest.warns(UserWarning, match="planning anew"):
        assert torch.equal(chosen.module(x), model(x))


def test_a_hook_registered_after_planning_is_noticed_and_traced() -> None:
    model = nn.Sequential(linear(), linear())
    chosen, x = plan(model, batch()), batch()
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    with pytest.warns(UserWarning, match="planning anew"):
        assert torch.equal(chosen.module(x), model(x))


class Keeper:
    """A hook that keeps what it has seen, and how often."""

    def __init__(self, keeps: bool) -> None:
        self.keeps, self.calls, self.seen = keeps, 0, torch.zeros(8)

    def hook(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.calls += 1
        if self.keeps:
            self.seen = output.detach().mean(0)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("regions", ["whole", ["0"]])
def test_planning_leaves_what_only_a_hook_reaches(keeps: bool, regions: Any) -> None:
    model, keeper = nn.Sequential(nn.Sequential(linear(), nn.GELU(), linear()), linear()), Keeper(keeps)
    model[1].register_forward_hook(keeper.hook)
    if keeps and regions == "whole":
        with pytest.raises(Unsupported, match=r"tensor kept outside the model's outputs at a hook of self.1.seen"):
            plan(model, batch(), regions=regions)
    else:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            plan(model, batch(), regions=regions)
        assert any("forward sets a hook of self.1.calls" in str(w.message) for w in said) == (regions == "whole")
    assert keeper.calls == 0 and torch.equal(keeper.seen, torch.zeros(8))


def test_a_replaced_constant_is_noticed() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.mask = linear(), torch.ones(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * self.mask

    model, x = Masked(), batch()
    chosen = plan(model, x)
    model.mask.zero_()
    assert torch.equal(chosen.module(x), model(x))
    model.mask = torch.full((8,), 3.0)
    with pytest.warns(UserWarning, match="planning anew"):
        assert torch.equal(chosen.module(x), model(x))


def test_autocast_at_planning_and_not_at_the_call() -> None:
    model, x = mlp(0.0), batch(8, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        chosen = plan(model, x)
        expected = model(x)
        assert torch.equal(chosen.module(x), expected) and expected.dtype is torch.bfloat16
    with pytest.warns(UserWarning, match=r"got no autocast, the plan expects autocast to bfloat16 on cpu"):
        assert torch.equal(chosen.module(x), model(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(chosen.module(x), expected)


def test_autocast_at_the_call_and_not_at_planning() -> None:
    model, plain = twins(mlp(0.0))
    x = batch(8, 32)
    chosen = plan(model, x)
    strict = plan(model, x, on_new_shape="error")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(InputMismatch, match=r"got autocast to bfloat16 on cpu, the plan expects no autocast"):
            strict.module(x)
        with pytest.warns(UserWarning, match="planning anew"):
            got = chosen.module(x)
        expected = plain(x)
    assert torch.equal(got, expected)
    squares(got).backward()
    squares(expected).backward()
    assert_same_gradients(model, plain)


# What happens to the parameters after planning ------------------------------------------------------------------


def test_loaded_parameters_are_seen() -> None:
    model, x = mlp(0.0), batch(8, 32)
    chosen = tight(model, x)
    model.load_state_dict(mlp(0.0).state_dict())
    assert torch.equal(chosen.module(x), model(x))
    chosen.module.load_state_dict(mlp(0.0).state_dict(), strict=True)
    assert torch.equal(chosen.module(x), model(x))
    model.load_state_dict(mlp(0.0).state_dict(), assign=True)
    assert torch.equal(chosen.module(x), model(x))


@pytest.mark.parametrize("through_plan", [False, True])
def test_moved_parameters_are_noticed(through_plan: bool) -> None:
    model, plain = twins(mlp(0.0))
    chosen = plan(model, batch(8, 32))
    (chosen.module if through_plan else model).to(torch.float64)
    plain.to(torch.float64)
    x = batch(8, 32).double()
    with pytest.warns(UserWarning, match=r"planning anew: argument 'input': got \(8, 32\) float64"):
        squares(chosen.module(x)).backward()
    squares(plain(x)).backward()
    assert_same_gradients(model, plain)
    strict = plan(linear(), batch(), on_new_shape="error")
    strict.module.double()
    with pytest.raises(InputMismatch, match=r"argument 'weight': got \(8, 8\) float64"):
        strict.module(batch())


def test_a_budget_that_a_later_call_breaks_is_said_then() -> None:
    model = mlp(0.0)
    chosen = tight(model, batch(8, 32))
    model.double()
    with pytest.warns(UserWarning, match="planning anew"), pytest.raises(BudgetError, match="known to work") as caught:
        chosen.module(batch(8, 32).double())
    assert caught.value.budget_bytes == chosen.budget_bytes


def test_a_budget_that_a_later_backward_breaks_is_said_with_what_it_starts_from() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = linear(64), linear(64)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = torch.tanh(self.a(x))
            return self.b(h), self.b(h) * h

    chosen, x = tight(Two(), batch(128, 64), 0.0), batch(128, 64)
    with pytest.warns(UserWarning, match="in other strides"):
        sum(out.sum() for out in chosen.module(x)).backward()
    with pytest.raises(BudgetError, match=r"as the last one was, from \[0\], \[1\] with gradients in its strides"):
        chosen.module(x)


def test_a_model_without_a_forward_is_told_what_can_be_planned() -> None:
    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor = linear()

    with pytest.raises(CaptureError, match=r'\[Agent\] is missing .*"forward" function\. .*plan the modules that its'):
        plan(Agent(), batch())


def test_frozen_and_thawed_parameters_are_noticed() -> None:
    model, plain = twins(nn.Sequential(linear(), nn.Tanh(), linear()))
    x = batch()
    chosen = plan(model, x)
    for each in (model, plain):
        each[0].requires_grad_(False)
    with pytest.warns(UserWarning, match=r"argument '0.weight': got \(8, 8\) float32 on cpu, the plan expects .* req"):
        squares(chosen.module(x)).backward()
    squares(plain(x)).backward()
    assert model[0].weight.grad is None
    assert_same_gradients(model, plain)
    for each in (model, plain):
        each.zero_grad()
        each[0].requires_grad_(True)
        squares((chosen.module if each is model else each)(x)).backward()
    assert_same_gradients(model, plain)


def replaced(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data + 1


@pytest.mark.parametrize(
    ("name", "change", "how"),
    [
        ("3.weight", lambda p: p.add_(1), "changed in place"),
        ("0.bias", lambda p: p.add_(1), "changed in place"),  # which the plain step would not read again
        ("3.weight", replaced, "given other data"),
        ("0.bias", replaced, "given other data"),
    ],
)
@pytest.mark.parametrize("loss", [squares, lambda output: output["loss"]], ids=["planned", "replayed"])
def test_a_change_between_forward_and_backward_raises(name: str, change: Any, how: str, loss: Any) -> None:
    both = loss is not squares
    net, x = mlp(0.0), batch(64, 32)
    model: nn.Module = Wrap(lambda self, x: {"y": self.net(x), "loss": squares(self.net(x))}, net=net) if both else net
    chosen = plan(model, x, recompute=["aten.addmm"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = loss(chosen.module(x))
    with torch.no_grad():
        change(net.get_parameter(name))
    with pytest.raises(RuntimeError, match=f"{name} was {how}.* between forward and backward"):
        output.backward()


class Shifted(nn.Module):
    """Reads tensors that are not registered: one of its own, one in a list, one in the memory of a buffer."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.net, self.how, self.shift = mlp(0.0), how, torch.ones(32)
        self.listed = [torch.ones(32)]
        self.register_buffer("mean", torch.zeros(32))
        self.view = self.mean.view(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "its memory":
            self.mean.mul_(0.9).add_(x.detach().mean(0))
        shift = {"shift": self.shift, "listed": self.listed[0]}.get(self.how, self.view.reshape(32))
        return torch.sigmoid(self.net(x) - shift).square()


@pytest.mark.parametrize("kind", ["planned", "replayed", "forward alone"])
@pytest.mark.parametrize(("how", "path"), [("shift", "self.shift"), ("listed", "a tensor of shape (32,)")])
def test_a_change_of_what_is_not_registered_raises_where_it_is_read_again(how: str, path: str, kind: str) -> None:
    model, plain = Shifted(how), Shifted(how)
    plain.load_state_dict(model.state_dict())
    x = batch(16, 32)
    chosen = plan(model, x, recompute=["aten.sub", "aten.sigmoid"] if kind == "planned" else ())
    gradient = batch(32, 16).t() if kind == "replayed" else batch(16, 32)
    found = []
    for module, own in ((chosen.module, model), (plain, plain)):
        found.append(module(x))
        (own.shift if how == "shift" else own.listed[0]).add_(1)
    found[1].backward(gradient)
    if kind == "forward alone":
        found[0].backward(gradient)
        assert_same_gradients(model, plain)
        return
    with pytest.raises(RuntimeError, match=rf"between forward and backward: {re.escape(path)}.* was changed in place"):
        found[0].backward(gradient)


def test_what_is_not_registered_and_is_trained_from_now_on_gets_its_gradient() -> None:
    model, plain = Shifted("shift"), Shifted("shift")
    plain.load_state_dict(model.state_dict())
    x = batch(16, 32)
    chosen = plan(model, x)
    for module, own in ((chosen.module, model), (plain, plain)):
        own.shift.requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such calls run in eager
            squares(module(x)).backward()
    assert_same_gradients(model, plain)
    assert model.shift.grad is not None
    assert torch.equal(model.shift.grad, plain.shift.grad)  # type: ignore[arg-type]


def test_a_graph_module_within_the_model_is_not_planned_anew() -> None:
    model, plain = twins(Wrap(lambda self, x: squares(self.net(x)), net=symbolic_trace(mlp(0.0))))
    x = batch(16, 32)
    chosen = plan(model, x, on_new_shape="error")
    for module in (chosen.module, plain):
        module(x).backward()
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("made", ["sparse", "sparse, compressed", "under inference_mode"])
def test_attributes_that_torch_cannot_compare_are_no_hindrance(made: str) -> None:
    with torch.inference_mode(made == "under inference_mode"):
        shift = torch.ones(32)
    kept = {"sparse": lambda: shift.to_sparse(), "sparse, compressed": lambda: torch.diag(shift).to_sparse_csr()}
    model = Shifted("shift")
    plain = Shifted("shift")
    plain.load_state_dict(model.state_dict())
    for own in (model, plain):
        own.shift, own.listed = shift, [kept[made]() if made in kept else shift]
    x = batch(16, 32)
    chosen = plan(model, x, check=True)
    for module in (chosen.module, plain):
        squares(module(x)).backward()
    assert_same_gradients(model, plain)


def emptied(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.last.zero_grad()
    return squares(self.last(self.first(x)))


def clipped(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.last[0].weight.grad is not None:
        nn.utils.clip_grad_norm_(self.last.parameters(), 1e-3)
    return squares(self.last(self.first(x)))


def clipped_whatever(self: Any, x: torch.Tensor) -> torch.Tensor:
    nn.utils.clip_grad_norm_(self.last.parameters(), 1e-3)
    return squares(self.last(self.first(x)))


def local(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = self.first(x)
    squares(self.last(h.detach())).backward()
    return squares(h)


def retained(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.kept = self.first(x)
    self.kept.retain_grad()
    return squares(self.last(self.kept))


@pytest.mark.every(1)
@pytest.mark.parametrize(
    ("forward", "told"),
    [
        (emptied, "a parameter's .grad or requires_grad in forward"),
        (clipped, "a parameter's .grad or requires_grad in forward"),
        (clipped_whatever, "a parameter's .grad or requires_grad in forward"),
        (local, "a backward in forward that adds to gradients of parameters"),
        (retained, r"retain_grad\(\) in forward"),
    ],
)
def test_gradients_that_forward_handles_are_refused_and_left_to_eager_by_regions(forward: Any, told: str) -> None:
    model, plain = twins(Wrap(forward, first=mlp(0.0), last=mlp(0.0)))
    x = batch(64, 32)
    with pytest.raises(Unsupported, match=told):
        plan(model, x, regions="whole", check=False)
    chosen = plan(model, x, check=False)
    for _ in range(3):
        for module in (chosen.module, plain):
            module(x).backward()
        assert_same_gradients(model, plain)
    if forward is retained:
        assert torch.equal(model.kept.grad, plain.kept.grad)  # type: ignore[union-attr, arg-type]


def test_ranges_of_the_profiler_in_forward_are_planned() -> None:
    def named(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function("first"):
            x = self.first(x)
            with torch.profiler.record_function("last"):
                return squares(self.last(x))

    model, plain = twins(Wrap(named, first=mlp(0.0), last=mlp(0.0)))
    x = batch(64, 32)
    for module in (tight(model, x, regions="whole").module, plain):
        module(x).backward()
    assert_same_gradients(model, plain)


class Teaching(nn.Module):
    """Holds another network without registering it, which forward runs in training mode, or trains."""

    def __init__(self, is_trained: bool) -> None:
        super().__init__()
        self.net, self.hidden = mlp(0.0), [nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32))]
        self.step = torch.optim.Adam(self.hidden[0].parameters()) if is_trained else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.net(x)
        if self.step is not None:
            self.step.zero_grad()
            with torch.enable_grad():
                squares(self.hidden[0](x) - found.detach()).backward()
            self.step.step()
        with torch.no_grad():
            wanted = self.hidden[0](x)
        return squares(found - wanted)


@pytest.mark.every(1)
@pytest.mark.parametrize("is_trained", [False, True])
def test_planning_leaves_what_is_held_without_being_registered(is_trained: bool) -> None:
    model, plain = twins(Teaching(is_trained))
    x = batch(64, 32)
    with pytest.raises(BudgetError):
        plan(model, x, 0.001)
    chosen = plan(model, x)
    for own in (model, plain):
        assert all(p.grad is None for p in own.hidden[0].parameters())
        assert own.step is None or not own.step.state
    for _ in range(3):
        assert_same_state(model.hidden[0], plain.hidden[0])
        for module in (chosen.module, plain):
            module(x).backward()
        assert_same_gradients(model, plain)


def test_a_copy_of_a_region_that_forward_makes_is_plain() -> None:
    def copying(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        target = copy.deepcopy(self.last).requires_grad_(False)
        return squares(self.last(h) - target(0.5 * h))

    model, plain = twins(Wrap(copying, first=mlp(0.0), last=mlp(0.0)))
    x = batch(64, 32)
    chosen = plan(model, x, regions=["first", "last"], recompute="*")
    for _ in range(2):
        for module in (chosen.module, plain):
            module(x).backward()
        assert_same_gradients(model, plain)


def test_a_copy_of_a_recurrent_layer_does_not_mind_the_training_of_the_other() -> None:
    original, copied = twins(Wrap(lambda self, x: squares(self.rnn(x)[0]), rnn=nn.GRU(8, 8)))  # weak references go on
    x = torch.randn(4, 5, 8)
    chosen = plan(copied, x, on_new_shape="error")
    for _ in range(2):
        for module, own in ((chosen.module, copied), (original, original)):
            module(x).backward()
            with torch.no_grad():
                own.rnn.weight_hh_l0.sub_(own.rnn.weight_hh_l0.grad)
        assert_same_gradients(copied, original)


def test_a_view_of_a_buffer_that_forward_changes_is_refused_where_a_constant_would_be_read() -> None:
    told = r"\(4, 8\) that is not registered, in the memory of mean at forward: .* Take the view in forward"
    with pytest.raises(Unsupported, match=told):
        plan(Shifted("its memory"), batch(16, 32), regions="whole")
    model, plain = twins(Shifted("a view"))
    x = batch(16, 32)
    for module in (tight(model, x).module, plain):
        squares(module(x)).backward()
    assert_same_gradients(model, plain)


def test_data_moved_elsewhere_between_forward_and_backward_is_the_same_data() -> None:
    model, plain = twins(mlp(0.0))
    x = batch(8, 32)
    chosen = tight(model, x)
    for each, module in ((model, chosen.module), (plain, plain)):
        loss = squares(module(x))
        for parameter in each.parameters():
            parameter.data = parameter.data.clone()
        loss.backward()
    assert_same_gradients(model, plain)


# Parameters: tied, unused, frozen, LoRA -------------------------------------------------------------------------


def test_tied_weights_are_charged_once_and_get_one_gradient() -> None:
    def tied(tie: bool) -> nn.Module:
        model = Wrap(lambda self, i: self.head(self.embedding(i).tanh()), embedding=nn.Embedding(64, 64),
                     head=nn.Linear(64, 64, bias=False))  # fmt: skip
        if tie:
            model.head.weight = model.embedding.weight
        return model

    tokens = torch.randint(0, 64, (4, 4))
    model, plain = twins(tied(True))
    assert model.head.weight is model.embedding.weight
    chosen = plan(model, tokens)
    assert plan(tied(False), tokens).static_bytes - chosen.static_bytes == 64 * 64 * 4
    squares(chosen.module(tokens)).backward()
    squares(plain(tokens)).backward()
    assert_same_gradients(model, plain)
    assert model.head.weight.grad is model.embedding.weight.grad
    assert list(chosen.module.state_dict()) == list(plain.state_dict())


def test_casts_to_a_byte_and_back_need_no_workspace() -> None:
    model = Wrap(lambda self, x: squares(self.last(self.first(x).to(torch.float8_e4m3fn).float() + x)),
                 first=nn.Linear(32, 32), last=nn.Linear(32, 32))  # fmt: skip
    x = torch.randn(64, 32)
    chosen = plan(model, x)
    assert measured_peak_bytes(chosen.module, model, x, chosen.static_bytes) == chosen.peak_bytes


@pytest.mark.parametrize("regions", ["whole", "*"])
def test_memory_that_tensors_share_is_counted_once(regions: str) -> None:
    """Parameters that are views of one flat buffer, as some optimizers and loaders leave them, and parts of a batch."""
    model, x = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6))), torch.randn(16, 32)
    apart = plan(model, x, regions=regions).static_bytes
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    places = flat.split([p.numel() for p in model.parameters()])
    for parameter, place in zip(model.parameters(), places, strict=True):
        parameter.data = place.view(parameter.shape)
    assert plan(model, x, regions=regions).static_bytes == apart
    whole = torch.randn(64, 32)
    for part in (whole[:16], whole[-16:]):
        assert plan(model, part, regions=regions).static_bytes == apart + 48 * 32 * 4


def test_unused_parameters_keep_no_gradient() -> None:
    model = Wrap(lambda self, x: self.used(x), used=linear(), unused=linear())
    squares(plan(model, batch()).module(batch())).backward()
    assert model.unused.weight.grad is None and model.used.weight.grad is not None


def test_a_frozen_prefix_is_not_saved_needlessly() -> None:
    model = nn.Sequential(*(m for _ in range(4) for m in (linear(64), nn.Tanh())), linear(64))
    x = batch(256, 64)
    free = plan(model, x)
    model[:8].requires_grad_(False)
    frozen = plan(model, x)
    activation = 256 * 64 * 4
    assert free.baseline_peak_bytes - free.static_bytes > 5 * activation
    assert frozen.baseline_peak_bytes - frozen.static_bytes < 5 * activation
    squares(frozen.module(x)).backward()
    assert all(p.grad is None for p in model[:8].parameters()) and model[8].weight.grad is not None


def test_lora_trains_the_adapters_alone() -> None:
    model, plain = twins(Wrap(lambda self, x: self.base(x) + self.up(self.down(x)), base=linear(16),
                              down=nn.Linear(16, 2, bias=False), up=nn.Linear(2, 16, bias=False)))  # fmt: skip
    for each in (model, plain):
        each.base.requires_grad_(False)
    x = batch(8, 16)
    squares(tight(model, x).module(x)).backward()
    squares(plain(x)).backward()
    assert model.base.weight.grad is None
    assert_same_gradients(model, plain)


# Aliases --------------------------------------------------------------------------------------------------------


def test_in_place_ops_inside() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        y += 1
        y[:, :4] *= 2
        return y.relu_()

    model, plain = twins(Wrap(forward, layer=linear()))
    x = batch()
    kept = x.clone()
    squares(plan(model, x).module(x)).backward()
    squares(plain(x)).backward()
    assert_same_gradients(model, plain)
    assert torch.equal(x, kept)


def test_views_as_outputs() -> None:
    model, plain = twins(Wrap(lambda self, x: self.layer(x).chunk(2, -1), layer=linear()))
    x = batch()
    for each in (plan(model, x).module, plain):
        a, b = each(x)
        (a * 2 + b).sum().backward()
    assert_same_gradients(model, plain)


SHARING: dict[str, Callable[[torch.Tensor], Any]] = {
    "a detached loss": lambda y: {"loss": y.pow(2).mean(), "log": y.pow(2).mean().detach(), "y": y, "seen": y.detach()},
    "a row": lambda y: (y, y[0]),
    "rows": lambda y: (y[0], y[1:]),
    "nested views": lambda y: (y.tanh(), y[0], y[0][:3], y.reshape(-1)),
    "another layout": lambda y: (y, y.t(), y.diagonal(), y[:, :1].expand(-1, 3)),
    "parts of complex numbers": lambda y: (lambda c: (c.real, c.imag))(torch.fft.fft(y)),
}


@pytest.mark.parametrize("name", SHARING)
def test_outputs_that_share_memory(name: str) -> None:
    model, plain = twins(Wrap(lambda self, x: SHARING[name](self.net(x).tanh()), net=linear()))
    x = batch()
    chosen = plan(model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a start from one of them is replayed, then planned for
        for parts in (slice(None), slice(1, 2), slice(1)):
            for each in (chosen.module, plain):
                found, _ = flatten(each(x))
                wanted = [t for t in found if t.requires_grad][parts] or found[:1]
                sum(t.sin().sum() for t in wanted).backward()
            assert_same_gradients(model, plain)
    output, again = flatten(chosen.module(x))[0], flatten(plain(x))[0]
    assert all(torch.equal(a, b) and a.requires_grad == b.requires_grad for a, b in zip(output, again, strict=True))


def test_an_output_changed_in_place_under_another_one_is_noticed() -> None:
    model = Wrap(lambda self, x: (lambda y: (y, y[0]))(self.layer(x).sin()), layer=linear())
    y, row = plan(model, batch()).module(batch())
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified inplace"):
        (y.sum() + row.sum()).backward()


@torch.library.custom_op("planner_cases::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand_like(x)


@torch.library.custom_op("planner_cases::counting", mutates_args=())
def counting(x: torch.Tensor) -> torch.Tensor:
    CALLS.append(1)
    return x * len(CALLS)


CALLS: list[int] = []
for op in (noisy, counting):
    op.register_fake(torch.empty_like)
    op.register_autograd(lambda ctx, gradient: gradient)


@pytest.mark.parametrize("op", [noisy, counting], ids=["draws", "counts"])
def test_a_custom_op_that_varies_runs_once(op: Any) -> None:
    """It says nothing of it, and was recomputed."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in self.net:
            x = op(layer(x).tanh()).sin()
        return x

    model, plain = twins(Wrap(forward, net=nn.ModuleList(nn.Linear(32, 32) for _ in range(3))))
    x = batch(64, 32)
    before = torch.get_rng_state()
    chosen = plan(model, x, recompute=["*"], check=False)
    assert chosen.recomputed and not any("planner_cases" in name for name in chosen.recomputed)
    assert torch.equal(torch.get_rng_state(), before)
    for each in (chosen.module, plain):
        CALLS.clear()
        torch.manual_seed(1)
        squares(each(x)).backward()
    assert_same_gradients(model, plain)


def test_an_input_returned_is_that_input() -> None:
    model = Wrap(lambda self, x: (self.layer(x), x, self.layer.weight), layer=linear())
    x = batch()
    y, same, weight = plan(model, x).module(x)
    assert same is x and weight is model.layer.weight
    y.sum().backward()


def test_the_same_tensor_returned_twice_is_one_object() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        y = self.layer(x)
        return {"a": y, "b": [y, y * 2]}

    model, plain = twins(Wrap(forward, layer=linear()))
    x = batch()
    for each in (plan(model, x).module, plain):
        output = each(x)
        assert output["a"] is output["b"][0]
        (output["a"].sum() + output["b"][1].pow(2).sum()).backward()
    assert_same_gradients(model, plain)


# Losses and backward --------------------------------------------------------------------------------------------


def two_heads() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> Any:
        hidden = self.body(x).tanh()
        return self.first(hidden).pow(2).mean(), self.second(hidden).abs().mean()

    return Wrap(forward, body=linear(), first=linear(), second=linear())


def test_several_losses() -> None:
    model, plain = twins(two_heads())
    x = batch()
    for each in (tight(model, x).module, plain):
        first, second = each(x)
        (first + 0.3 * second).backward()
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("by_regions", [False, True])
def test_a_part_of_the_loss_that_does_not_reach_all_parameters_is_no_loss(by_regions: bool) -> None:
    """Of an autoencoder whose reconstruction is compared outside, or of experts with a loss on their routing."""

    def forward(self: Any, x: torch.Tensor) -> Any:
        hidden = self.first(x).tanh()
        return self.second(hidden).tanh(), hidden.pow(2).mean()

    model, plain = twins(Wrap(forward, first=linear(), second=linear()))
    x = batch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in (plan(model, x, regions=["*"] if by_regions else "whole").module, plain):
            reconstruction, divergence = each(x)
            ((reconstruction - x).pow(2).mean() + divergence).backward()
    assert_same_gradients(model, plain)


def test_an_unused_output_leaves_no_gradient() -> None:
    model, plain = twins(two_heads())
    x = batch()
    chosen = plan(model, x)
    with pytest.warns(UserWarning, match=r"backward started from \[0\], which the plan did not expect"):
        chosen.module(x)[0].backward()
    plain(x)[0].backward()
    assert model.second.weight.grad is None and model.first.weight.grad is not None
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("mode", ["replan", "eager", "error"])
def test_the_next_call_is_planned_for_what_backward_started_from(mode: Any) -> None:
    model, plain = twins(two_heads())
    x = batch()
    chosen = plan(model, x, on_new_shape=mode)
    with pytest.warns(UserWarning, match="later calls are planned for it"):
        chosen.module(x)[1].backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen.module(x)[1].backward()
    plain(x)[1].backward()
    plain(x)[1].backward()
    assert_same_gradients(model, plain)


def test_a_loss_that_is_no_scalar() -> None:
    model, plain = twins(mlp(0.0))
    x, weight = batch(8, 32), batch(8, 32)
    for each in (tight(model, x).module, plain):
        each(x).backward(weight)
    assert_same_gradients(model, plain)


def test_backward_twice_raises() -> None:
    model, x = mlp(), batch(8, 32)
    loss = squares(tight(model, x).module(x))
    loss.backward(retain_graph=True)
    with pytest.raises(BackwardTwice, match=r"second time through one forward .* Call the module again"):
        loss.backward()


def test_a_second_loss_of_one_forward_raises_whatever_is_retained() -> None:
    model, x = mlp(), batch(8, 32)
    output = tight(model, x).module(x)
    output.pow(2).mean().backward(retain_graph=True)
    before = {n: g.clone() for n, g in gradients(model).items() if g is not None}
    with pytest.raises(BackwardTwice, match=r"whatever retain_graph says. .* add the losses and call backward once"):
        output.abs().mean().backward()
    assert all(torch.equal(before[n], p.grad) for n, p in model.named_parameters() if p.grad is not None)
    first, second = (loss(output) for output in [tight(model, x).module(x)] for loss in (squares, torch.mean))
    (first + second).backward()


@pytest.mark.parametrize(
    ("wrapped", "owner"),
    [
        (lambda module, x: checkpoint(module, x, use_reentrant=False), "torch.utils.checkpoint"),
        (lambda module, x: on_the_cpu(module, x), "torch.autograd.graph.save_on_cpu"),
    ],
)
def test_a_wrapper_that_saves_nothing_is_said_once(wrapped: Callable[..., Any], owner: str) -> None:
    model, plain = twins(mlp(0.0))
    x = batch(8, 32)
    chosen = tight(model, x)
    with pytest.warns(UserWarning, match=f"under {owner}, which saves no memory there: .* leave the wrapper out"):
        squares(wrapped(chosen.module, x)).backward()
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        squares(wrapped(chosen.module, x)).backward()
    squares(plain(x)).backward()
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("pack", [lambda t: t.half(), functools.partial(torch.Tensor.to, dtype=torch.float16)])
def test_hooks_that_change_what_is_saved_are_said_to_do_nothing(pack: Callable[[torch.Tensor], torch.Tensor]) -> None:
    chosen, x = tight(mlp(0.0), batch(8, 32)), batch(8, 32)
    halves = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.float())
    with halves, pytest.warns(UserWarning, match="gradients are those without these hooks"):
        squares(chosen.module(x)).backward()


def on_the_cpu(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return module(x)


def test_double_backward_raises() -> None:
    model, x = mlp(), batch(8, 32)
    chosen = tight(model, x)
    with pytest.raises(DoubleBackward, match=r"create_graph=True asks for gradients of gradients, .* original model"):
        torch.autograd.grad(squares(chosen.module(x)), list(model.parameters()), create_graph=True)


def test_a_custom_function_keeps_its_own_backward() -> None:
    model, plain = twins(Wrap(lambda self, x: StraightThrough.apply(self.layer(x)).tanh(), layer=linear()))
    x = batch()
    squares(tight(model, x).module(x)).backward()
    squares(plain(x)).backward()
    assert_same_gradients(model, plain)


# Models that are not there --------------------------------------------------------------------------------------


@pytest.mark.parametrize("meta_sample", [False, True])
def test_a_meta_model_is_planned_and_says_to_materialise(meta_sample: bool) -> None:
    torch.manual_seed(0)
    real = mlp(0.0)
    x = batch(64, 32)
    model = mlp(0.0).to("meta")
    chosen = tight(model, x.to("meta") if meta_sample else x)
    assert chosen.peak_bytes < chosen.baseline_peak_bytes
    assert all(p.device.type == "meta" for p in model.parameters())
    with pytest.raises(PlannerError, match=r"'0.weight' is on the meta device.*materialise it first, with model.to_"):
        chosen.module(x)
    chosen.module.to_empty(device="cpu")
    model.load_state_dict(real.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        squares(chosen.module(x)).backward()
    squares(real(x)).backward()
    assert_same_gradients(model, real)
    assert_same_state(model, real)


def test_a_model_far_larger_than_memory_is_planned() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(1 << 17, 1 << 17), nn.Tanh())))
        x = torch.empty(1 << 12, 1 << 17)
    chosen = plan(model, x)
    assert chosen.static_bytes > 256 << 30
