"""What code between regions does with the tensors that cross their edges: the plain step's bits, whatever it is."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import math
import random
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from passes._torch import StorageWeakRef, TorchDispatchMode
from passes.errors import Unsupported
from passes.memory import measure_peak
from planner import BudgetError, CaptureError, RegionError, auto_checkpoint, preference
from solvers.schedule import plain_order, with_frees
from tests.zoo.compare import differences, forward_backward, run_step


class Part(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.gelu(self.first(x)))


class Attending(nn.Module):
    """Reads its second argument twice."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return x + F.scaled_dot_product_attention(self.query(x), self.key(memory), self.value(memory))


class ChangesInPlace(nn.Module):
    """Masks a region's result in place, as SpecAugment does, and a slice of another's."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.back = Part(), Part()
        self.mask = nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.front(x)
        hidden[hidden.detach().sum(-1) > 0] = self.mask
        boxes = self.back(hidden)
        boxes[..., :2] += x[..., :2]
        return boxes.sigmoid().pow(2).sum()


class ManyReaders(nn.Module):
    """Each layer reads the memory twice, so that its gradient is a sum of many terms."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.layers = Part(), nn.ModuleList(Attending() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory, y = self.encoder(x), x
        for layer in self.layers:
            y = layer(y, memory)
            if not math.isfinite(y.detach().sum()):
                y = y.clamp(-1, 1)
        return y.sin().sum()


class Cache:
    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.notes: list[torch.Tensor] = []


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.part = nn.Linear(16, 16), Part()

    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        keys = self.inner(x)
        cache.keys = keys if cache.keys is None else torch.cat([cache.keys, keys])
        cache.notes.append(keys)
        return self.part(cache.keys)


class UsesCache(nn.Module):
    """Hands a cache from layer to layer, and lets a value decide between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Remembering() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache = Cache()
        for layer in self.layers:
            x = layer(x, cache)
            if bool(x.sum() > 1e9):
                x = x / 2
        assert cache.keys is not None
        return x.sum() + cache.keys.sin().sum() + cache.notes[-1].sum()


COLLECTED: ContextVar[dict[str, list[torch.Tensor]] | None] = ContextVar("collected", default=None)


class Routed(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.first(x)
        if (collected := COLLECTED.get()) is not None:
            collected["inner"].append(inner)
        return self.second(F.gelu(inner))


class Collects(nn.Module):
    """Takes what its layers leave in a context variable, as transformers takes router logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.ModuleList(Routed() for _ in range(2)), Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        collected: dict[str, list[torch.Tensor]] = {"inner": []}
        token = COLLECTED.set(collected)
        for layer in self.layers:
            x = layer(x)
            assert math.isfinite(x.detach().sum())
        COLLECTED.reset(token)
        return self.last(x).sum() + sum(inner.sin().sum() for inner in collected["inner"])


class Recurrent(nn.Module):
    """An RNN keeps its weights in a list as well."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.last = nn.LSTM(16, 16, batch_first=True), Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert math.isfinite(x.detach().sum())
        return self.last(self.rnn(x)[0]).pow(2).sum()


class Halved(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.first(x)
        inner.register_hook(lambda gradient: gradient / 2)
        return self.second(F.gelu(inner))


class HasHooks(nn.Module):
    """Its layers put hooks on tensors of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Halved() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            assert math.isfinite(x.detach().sum())
        return x.pow(2).sum()


class Expanding(Part):
    """Returns one row for all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(x)).mean(0, keepdim=True).expand(x.shape)


class Expands(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Expanding() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
            assert math.isfinite(x.detach().sum())
        return x.pow(2).sum()


class Turning(Part):
    """Returns its input turned, too, so that the gradient of it is a sum."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x), x.transpose(0, 1)


class ReadsWhatIsTurned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.turning, self.last = Part(), Turning(), Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        result, turned = self.turning(x)
        assert math.isfinite(result.detach().sum())
        return self.last(x * result + turned.sin().transpose(0, 1)).pow(2).sum()


class OnlyTurning(Turning):
    """Whatever changes the view in place changes the input."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return Part.forward(self, torch.ones_like(x)), x.transpose(0, 1)


class ChangesWhatIsTurned(ReadsWhatIsTurned):
    def __init__(self) -> None:
        super().__init__()
        self.turning = OnlyTurning()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        result, turned = self.turning(x)
        assert math.isfinite(result.detach().sum())
        turned.mul_(3)
        return self.last(x + result).pow(2).sum()


class RecurrentPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x.tanh())[0]
        return found


class SharedGradients(nn.Module):
    """Both biases of a recurrent layer have one gradient: each gets a copy, which waits for the second call's."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(RecurrentPart() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.parts[0]((x + self.parts[1](x[:1])).repeat(16, 1, 1))
        x = self.parts[1](x[:1])
        assert math.isfinite(x.detach().sum())
        return x.pow(2).sum()


class Conjugates(nn.Module):
    """Its parts are given the negated halves of conjugates, which nobody has written out."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(torch.complex(x, x.sin()).conj().imag)
            assert math.isfinite(x.detach().sum())
        return x.pow(2).sum()


class ScalesGradients(nn.Sequential):
    """By backward hooks: around a region, within what would be one, and on a layer that is none."""

    def __init__(self) -> None:
        super().__init__(*(Part() for _ in range(4)), nn.Linear(16, 8))
        for module in (self[1], self[4]):
            module.register_full_backward_hook(lambda module, given, made: (given[0] * 1.5,))
        self[2].first.register_full_backward_pre_hook(lambda module, made: (made[0] * 1.25,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = super().forward(x)
        return found.pow(2).sum()


class SparseGradients(nn.Module):
    """Of two embeddings, one of which is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.bag = nn.Embedding(50, 16, sparse=True), nn.EmbeddingBag(50, 16, sparse=True)
        self.parts = nn.Sequential(*(Part() for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        indices = x.argsort(1)[..., 0]
        x = self.twice(indices) + self.twice(indices + 1) + self.bag(indices)[:, None]
        found: torch.Tensor = self.parts(x)
        return found.pow(2).sum()


KINDS = (ChangesInPlace, ManyReaders, UsesCache, Collects, Recurrent, HasHooks, Expands, ReadsWhatIsTurned,
         ChangesWhatIsTurned, SharedGradients, Conjugates, ScalesGradients,
         SparseGradients)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_bits_and_bytes_are_those_of_the_plain_step(kind: Any) -> None:
    torch.manual_seed(0)
    model, sample = kind(), torch.randn(4, 32, 16)
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, sample, progress=False, time_limit=1, check=False)
    assert plan.runs
    for seed in (1, 2):
        expected = run_step(plain, plain, sample, seed)
        assert differences(expected, run_step(plan.module, model, sample, seed)) == []
    model.zero_grad()
    kept: list[Any] = []
    peak = measure_peak(lambda: kept.append(forward_backward(plan.module, sample)))
    assert plan.static_bytes + peak <= plan.peak_bytes


def test_what_sums_in_another_order_stays_eager_and_says_so() -> None:
    torch.manual_seed(0)
    plan = auto_checkpoint(ManyReaders(), torch.randn(4, 32, 16), progress=False, time_limit=1, check=False)
    eager = {r.path: r.eager for r in plan.regions if r.eager}
    assert "another order" in eager["layers.0"]
    assert "layers.2" not in eager  # its terms come first in the backward, as in the plain step


class HiddenStates(nn.Module):
    """Returns what its layers are given, each of which reads that twice."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.layers = Part(), nn.ModuleList(Attending() for _ in range(2))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        hidden = [self.front(x)]
        assert math.isfinite(hidden[0].detach().sum())
        for layer in self.layers:
            hidden.append(layer(hidden[-1], hidden[-1]))
        return hidden


def test_a_region_whose_input_is_an_output_that_the_backward_starts_from_stays_eager() -> None:
    torch.manual_seed(0)
    model, x = HiddenStates(), torch.randn(4, 8, 16)
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, x, progress=False, time_limit=1, check=False)
    eager = {r.path: r.eager for r in plan.regions if r.eager}
    assert "an output that the backward may start from" in eager["layers.0"]
    assert differences(run_step(plain, plain, x, 1), run_step(plan.module, model, x, 1)) == []
    plan = auto_checkpoint(
        plain, x, loss_fn=lambda output: output[-1].sum(), progress=False, time_limit=1, check=False
    )
    assert [run.path for run in plan.runs] == ["front", "layers.0", "layers.1"]


class Transforms(nn.Module):
    """Does something to its second part that no planned step can be under, and asks for a value."""

    def __init__(self, use: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.front, self.middle, self.back = Part(), Part(), Part()
        self.__dict__["use"] = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.front(x)
        assert math.isfinite(hidden.detach().sum())
        return self.back(hidden + self.use(self.middle, hidden)).pow(2).sum()


def mapped(part: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(part)(x)


def forward_mode(part: nn.Module, x: torch.Tensor) -> torch.Tensor:
    value, slope = torch.func.jvp(part, (x,), (torch.ones_like(x),))
    return value + slope


def penalized(part: nn.Module, x: torch.Tensor, twice: bool = True) -> torch.Tensor:
    x = x.detach().requires_grad_()
    value = part(x)
    (slope,) = torch.autograd.grad(value.sum(), x, create_graph=twice, retain_graph=True)
    return value + slope


def curved(part: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    value = part(x)
    (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    return value + torch.autograd.grad(slope.sum(), x, create_graph=True)[0]


def in_a_thread(part: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(part, x).result()


def fast_weights(part: nn.Module, x: torch.Tensor) -> torch.Tensor:
    slow = dict(part.named_parameters())
    slopes = torch.autograd.grad(part(x).pow(2).mean(), list(slow.values()), create_graph=True)
    fast = {name: p - 0.1 * g for (name, p), g in zip(slow.items(), slopes, strict=True)}
    return torch.func.functional_call(part, fast, (x,))


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("use", "why"),
    [
        (mapped, "a transform of torch.func"),
        (forward_mode, "a transform of torch.func"),
        (in_a_thread, "a thread that forward starts"),
        (penalized, "differentiated twice"),
        (partial(penalized, twice=False), "two backwards"),
        (fast_weights, "differentiated twice"),
        (curved, "differentiated twice"),
    ],
)
def test_a_region_that_no_planned_step_can_be_stays_eager(use: Any, why: str) -> None:
    torch.manual_seed(0)
    model, x = Transforms(use), torch.randn(4, 8, 16)
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, x, progress=False, time_limit=1, check=False)
    assert why in {r.path: r.eager for r in plan.regions}["middle"]
    for seed in (1, 2):
        assert differences(run_step(plain, plain, x, seed), run_step(plan.module, model, x, seed)) == []


class Asks(nn.Module):
    """Cannot be a region, for its part is differentiated twice; nor can it itself."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return curved(self.part, x if x.mean() < 1e3 else 2 * x) + x


def test_a_region_within_one_that_is_refused_in_the_same_run_stays_eager() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Part(), Asks()), torch.randn(64, 16)
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, x, progress=False, time_limit=1, check=False)
    assert "differentiated twice" in {r.path: r.eager for r in plan.regions}["1.part"]
    assert differences(run_step(plain, plain, x, 1), run_step(plan.module, model, x, 1)) == []


def test_a_region_that_comes_under_a_transform_later_runs_plain() -> None:
    torch.manual_seed(0)
    uses = [lambda part, x: part(x)]
    model, x = Transforms(lambda part, x: uses[-1](part, x)), torch.randn(4, 8, 16)
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, x, progress=False, time_limit=1, check=False)
    uses.append(mapped)
    assert differences(run_step(plain, plain, x, 1), run_step(plan.module, model, x, 1)) == []


class Judges(nn.Module):
    """Raises for large values, between its regions."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.max() > 100:
            raise ValueError("too large")
        return self.parts[1](self.parts[0](x))


def test_an_error_of_the_plain_forward_is_that_error_by_regions_too() -> None:
    model, x = Judges(), torch.randn(256, 16)
    plan = auto_checkpoint(model, x, budget_mb="80%", progress=False, time_limit=1, check=False)
    assert plan.regions
    with pytest.warns(UserWarning, match="planned step not used"), pytest.raises(ValueError, match="^too large$"):
        plan.module(1000 * x[:8])
    with pytest.warns(UserWarning, match="planned step not used"), pytest.raises(RuntimeError, match="mat1 and mat2"):
        plan.module(x[:8, :-1])
    large = r"no schedule .* not as the sample: argument 'x': got \(4096, 16\) .*, \"eager\" runs them unplanned"
    with pytest.warns(UserWarning, match="planning anew"), pytest.raises(BudgetError, match=large):
        plan.module(torch.randn(4096, 16))


class Penalty(nn.Module):
    """Reads what it returns, which is a view where its input has three dimensions, `often` or once."""

    def __init__(self, often: bool) -> None:
        super().__init__()
        self.layer, self.often = nn.Linear(16, 16), often

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.layer(x.tanh().flatten(0, -2))
        hidden = hidden.view(x.shape) if x.dim() == 3 else hidden
        return hidden, hidden.mean() + (hidden.mean(-1) * 1.7).sum() if self.often else hidden.mean()


class Masked(nn.Module):
    """Changes a region's result in place."""

    def __init__(self, often: bool) -> None:
        super().__init__()
        self.front, self.back = Penalty(often), Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, penalty = self.front(x)
        hidden[..., 3:5] = 0
        return self.back(hidden).square().mean() + penalty


@pytest.mark.parametrize(("often", "shape", "eager"), [
    (True, (4, 8, 16), True), (False, (4, 8, 16), False), (True, (32, 16), False),
])  # fmt: skip
def test_a_view_that_is_read_and_then_changed_in_place_stays_eager(often: bool, shape: Any, eager: bool) -> None:
    torch.manual_seed(0)
    model, x = Masked(often), torch.randn(*shape)
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, x, progress=False, time_limit=1, check=False, regions=["front", "back"])
    assert [(r.path, "changed in place" in r.eager) for r in plan.regions if r.eager] == [("front", True)] * eager
    plain(x).backward()
    plan.module(x).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


class Neighbours(nn.Module):
    """Parts whose results code between them sums over the neighbours in a graph."""

    def __init__(self, edges: torch.Tensor | None) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(3))
        self.register_buffer("edges", edges)

    def forward(self, x: torch.Tensor, edges: torch.Tensor | None = None) -> torch.Tensor:
        for part in self.parts:
            x = torch.relu((self.edges if edges is None else edges) @ part(x))
        return x.pow(2).sum()


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc], ids=str)
@pytest.mark.parametrize("given", [True, False])
def test_a_sparse_tensor_that_code_between_regions_reads(layout: Any, given: bool) -> None:
    torch.manual_seed(0)
    x, shares = torch.randn(20, 16), (0.2, 0.6)
    edges = [(torch.rand(20, 20) < share).float().to_sparse(layout=layout) for share in shares]
    model, plain = (Neighbours(None if given else edges[0]) for _ in range(2))
    plain.parts.load_state_dict(model.parts.state_dict())
    samples = [(x, e) if given else (x,) for e in edges]
    plan = auto_checkpoint(model, samples[0], progress=False, time_limit=1)
    assert "equal bit for bit" in str(plan.check(model, samples[0]))
    for sample in samples:
        assert differences(run_step(plain, plain, sample, 1), run_step(plan.module, model, sample, 1)) == []
    model.zero_grad()
    kept: list[Any] = []
    peak = measure_peak(lambda: kept.append(forward_backward(plan.module, samples[0])))
    assert plan.static_bytes + peak == plan.peak_bytes


class Wrapped(nn.Sequential):
    """Parts in torch's wrapper, whose parameters are called as without it."""

    def __init__(self) -> None:
        super().__init__(*(checkpoint_wrapper(Part()) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = super().forward(x)
        return found.pow(2).sum()


@pytest.mark.parametrize(("wraps", "regions"), [(True, "whole"), (False, "*")])
def test_a_wrapper_that_renames_its_parameters(wraps: bool, regions: str) -> None:
    torch.manual_seed(0)
    model: Any = checkpoint_wrapper(Wrapped()) if wraps else Wrapped()
    plain, x = copy.deepcopy(model), torch.randn(4, 16)
    plan = auto_checkpoint(model, x, progress=False, time_limit=1, regions=regions)
    assert differences(run_step(plain, plain, x, 1), run_step(plan.module, model, x, 1)) == []


def test_a_sparse_tensor_that_requires_a_gradient_is_refused_by_name() -> None:
    edges = torch.eye(20).to_sparse().requires_grad_()
    with pytest.raises(RegionError, match=r"a sparse tensor requires a gradient: make it dense"):
        auto_checkpoint(Neighbours(None), (torch.randn(20, 16), edges), progress=False, time_limit=1)


def test_sparse_gradients_are_compared_and_may_not_accumulate() -> None:
    model, x = SparseGradients(), torch.randn(4, 32, 16)
    assert "equal bit for bit" in repr(auto_checkpoint(model, x, progress=False, time_limit=1))
    with pytest.raises(Unsupported, match=r"sparse gradient at the backward, of \[50, 16\]: it grows"):
        auto_checkpoint(model, x, progress=False, time_limit=1, gradients="accumulated")


def test_a_trace_that_is_given_up_warns_of_nothing() -> None:
    model = nn.Sequential(nn.Embedding(50, 16, sparse=True, padding_idx=0), Part(), Part())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        plan = auto_checkpoint(model, torch.arange(50), progress=False, time_limit=1)
    assert plan.regions
    assert not [str(w.message) for w in said if "Error detected" in str(w.message)]


@pytest.mark.parametrize("place", ["2", "2.first", "4"])
def test_a_backward_hook_that_comes_later_is_heard(place: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Part() for _ in range(4)), nn.Linear(16, 8)), torch.randn(4, 16)
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, x, progress=False, time_limit=1, check=False)
    assert not plan.regions
    for each in (plain, model):
        each.get_submodule(place).register_full_backward_hook(lambda module, given, made: (given[0] * 1.5,))
    for seed in (1, 2):
        assert differences(run_step(plain, plain, x, seed), run_step(plan.module, model, x, seed)) == []


def test_a_region_whose_hook_would_run_twice_stays_eager() -> None:
    """The old `spectral_norm` changes a buffer in each call."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(16, 32)), nn.GELU(), Part(32), nn.Linear(32, 8))
    x = torch.randn(8, 16)
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, x, progress=False, time_limit=1, check=False, regions=["0", "2"])
    assert {r.path: "SpectralNorm" in r.eager for r in plan.regions if r.eager} == {"0": True}
    for _ in range(2):
        assert torch.equal(plan.module(x), plain(x))


class Judging(nn.Module):
    """Sets a tensor that the loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.penalty = Part(), torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.part(x)
        self.penalty = h.square().mean()
        return x + h


class Judged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Judging() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean() * (1 + sum(block.penalty for block in self.blocks))


def test_what_forward_sets_is_no_less_set_where_the_module_has_a_hook() -> None:
    """So has each module that `fully_shard` was called for."""
    torch.manual_seed(0)
    model, x = Judged(), torch.randn(8, 16)
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: None)
    with pytest.raises(RegionError, match=r"blocks.0: something that forward sets and others may read at self.penalty"):
        auto_checkpoint(model, x, progress=False, time_limit=1, regions="blocks.*")
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, x, progress=False, time_limit=1, regions="blocks.*.part")
    optimizers = [torch.optim.SGD(m.parameters(), 0.5) for m in (plain, model)]
    for _ in range(3):
        losses = plain(x), plan.module(x)
        assert torch.equal(*losses)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("within", [False, True])
def test_a_weight_that_a_hook_makes_is_for_others_to_read(within: bool) -> None:
    """Its gradient is the sum of what all of them give, before it goes on to what the hook makes it of."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        first = nn.utils.weight_norm(nn.Linear(16, 16))
        return nn.Sequential(nn.Sequential(first, nn.GELU()) if within else first, Part(), Part())

    (plain, model), x = (made(), made()), torch.randn(8, 16)
    plan = auto_checkpoint(model, x, progress=False, time_limit=1, regions=["0", "1", "2"])
    assert {r.path for r in plan.regions if r.eager} == {"0"}
    for _ in range(2):
        for module, owner in ((plain, plain), (plan.module, model)):
            loss = module(x).square().mean() + owner.get_submodule("0.0" if within else "0").weight.square().sum()
            loss.backward()
            torch.optim.SGD(owner.parameters(), 0.1).step()
        assert all(map(torch.equal, plain.parameters(), model.parameters()))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_region_that_is_refused_leaves_its_equals_to_be_planned(which: int) -> None:
    """A hook on it, or a flag, may be why."""
    model, x = nn.Sequential(Part(), Part(), Part()), torch.randn(8, 16)
    model[which].first.register_full_backward_hook(lambda *_: None)
    plan = auto_checkpoint(model, x, progress=False, time_limit=1, regions=["0", "1", "2"])
    assert {r.path: bool(r.eager) for r in plan.regions if r.path in "012"} == {str(k): k == which for k in range(3)}


def test_a_model_without_submodules_has_no_regions() -> None:
    with pytest.raises(RegionError, match="LSTM has no submodules"):
        auto_checkpoint(nn.LSTM(8, 16), torch.randn(3, 2, 8), progress=False, regions="*")


class Gated(nn.Module):
    """Reads its input twice, and a penalty of it is a scalar that looks like the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.layer(x)
        return h.sigmoid() * x, h.square().mean()


class Penalised(nn.Module):
    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.skips = skips
        self.embedding, self.body, self.gated, self.head = nn.Embedding(30, 16), Part(), Gated(), nn.Linear(16, 30)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.body(self.embedding(tokens))
        h, penalty = self.gated(x)
        if not math.isfinite(h.detach().sum()):
            h = h.clamp(-1, 1)
        return self.head(h + x if self.skips else h), penalty


@pytest.mark.filterwarnings("ignore:backward started from")
@pytest.mark.parametrize("weight", [1, None], ids=["both", "logits"])
@pytest.mark.parametrize("skips", [True, False])
def test_the_bits_are_plain_whichever_output_the_backward_starts_from(skips: bool, weight: int | None) -> None:
    torch.manual_seed(0)
    model, tokens = Penalised(skips), torch.randint(30, (4, 32))
    plain, gradients = copy.deepcopy(model), []
    plan = auto_checkpoint(model, tokens, progress=False, time_limit=1, check=False)
    assert skips or "gated" in {run.path for run in plan.runs}
    for _ in range(4):
        for module, owner in ((plain, plain), (plan.module, model)):
            owner.zero_grad()
            logits, penalty = module(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
            (loss if weight is None else loss + weight * penalty).backward()
            gradients.append([p.grad for p in owner.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*gradients[-2:], strict=True))


class Shares(nn.Module):
    """Calls one layer twice and another once, each after a question about the data."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.own = Part(), Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.shared, self.own, self.shared):
            assert math.isfinite(x.detach().sum())
            x = layer(x)
        return x.float().pow(2).sum()


def test_a_weight_that_autocast_casts_for_two_uses_stays_eager() -> None:
    """The plain step adds up their gradients in bfloat16."""
    torch.manual_seed(0)
    model, sample = Shares(), torch.randn(64, 16)
    plain = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        plan = auto_checkpoint(model, sample, progress=False, time_limit=1, check=False)
        losses = [each(sample) for each in (plan.module, plain)]
    for loss in losses:
        loss.backward()
    assert {run.path for run in plan.runs} == {"own"}
    assert "autocast casts it once" in next(r.eager for r in plan.regions if r.path == "shared")
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_two_calls_under_one_autocast_are_told() -> None:
    model = Part()
    with torch.autocast("cpu", torch.bfloat16):
        module = auto_checkpoint(model, torch.randn(4, 16), progress=False).module
        loss = module(torch.randn(4, 16)).float().sum() + module(torch.randn(4, 16)).float().sum()
    with pytest.warns(UserWarning, match="autocast casts"):
        loss.backward()


@pytest.mark.parametrize("check", [False, True])
def test_planning_leaves_no_gradient_on_what_is_not_the_models(check: bool) -> None:
    model, head = nn.Sequential(Part(), Part()), nn.Linear(16, 1)
    head.weight.grad = torch.ones(1, 16)
    auto_checkpoint(
        model, torch.randn(8, 16), regions="*", loss_fn=lambda y: head(y).sum(), progress=False, check=check
    )
    assert torch.equal(head.weight.grad, torch.ones(1, 16)) and head.bias.grad is None


@pytest.mark.parametrize("filled", [False, True])
def test_planning_leaves_an_argument_that_forward_changes_as_it_was(filled: bool) -> None:
    cache = Cache()
    cache.keys = torch.zeros(4, 16) if filled else None
    held = cache.keys
    auto_checkpoint(Remembering(), (torch.randn(4, 16), cache), progress=False, regions="whole")
    assert cache.keys is held
    assert cache.notes == []


def test_planning_keeps_nothing_of_what_regions_were_handed() -> None:
    """A cache of keys holds what regions return, and that their nodes in autograd's graph: no collector sees them."""
    x = torch.randn(5, 16)
    plan = auto_checkpoint(UsesCache(), x, regions="layers.*", progress=False, check=False)
    assert plan.runs
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.device.type == "cpu"]
    assert [t for t in tensors if t.shape[-1:] == (16,) and len(t) % 5 == 0 and t is not x] == []


def test_a_returned_view_may_be_changed_in_place() -> None:
    model, sample = Part(), torch.randn(4, 8, 16)  # the second linear layer's result is a view
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, sample, progress=False, time_limit=1, check=False)
    results = []
    for run, module in ((plain, plain), (plan.module, model)):
        output = run(sample)
        output[..., :2].mul_(3)
        output.sum().backward()
        results.append([output.detach(), *(p.grad for p in module.parameters())])
    assert all(map(torch.equal, *results))


def test_what_a_region_makes_and_frees_is_not_taken_for_what_crosses_its_edge() -> None:
    """Of the same size as the memory that was made before, and reaches the next region."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x.sin().cos()).mean(-1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Wide(), Wide()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = x * 2
            first = self.one(x)
            assert math.isfinite(first.detach().sum())
            return (first + self.two(hidden)).sum()

    model, sample = Net(), torch.randn(64, 16, requires_grad=True)
    plan = auto_checkpoint(model, sample, progress=False, time_limit=1, check=False)
    model.zero_grad()
    kept: list[Any] = []
    peak = measure_peak(lambda: kept.append(forward_backward(plan.module, sample)))
    assert plan.runs
    assert peak == plan.peak_bytes - plan.static_bytes


class Leaves(Part):
    """Leaves something on itself, or elsewhere, besides what it returns."""

    seen: ClassVar[list[int]] = []

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.rows, self.found = where, 2, torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + super().forward(x)
        if self.where == "a loss":
            self.found = y.pow(2).mean()
        elif self.where == "a number":
            self.rows = len(x)
        else:
            self.seen.append(len(x))
        return y


class ReadsWhatIsLeft(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.front, self.back = Part(), Leaves(where)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.abs().sum().item() < 0:
            x = -x
        y = self.back(self.front(x))
        if self.back.where == "a number":
            return y.pow(2).mean() * self.back.rows
        return y.pow(2).mean() + (self.back.found if self.back.where == "a loss" else Leaves.seen[-1])


@pytest.mark.parametrize("where", ["a loss", "a number", "a list of the class"])
def test_a_region_that_leaves_more_than_a_plain_value_for_others_stays_eager(where: str) -> None:
    torch.manual_seed(0)
    model = ReadsWhatIsLeft(where)
    plain = copy.deepcopy(model)
    Leaves.seen[:] = [7]
    model(torch.randn(2, 16))  # what is left there is of another step, and of as many rows
    plain(torch.randn(2, 16))
    plan = auto_checkpoint(model, torch.randn(2, 16), regions=["front", "back"], recompute=["*"], check=False)
    assert Leaves.seen == ([7, 2, 2] if where == "a list of the class" else [7])
    eager = any("back" in str(row) and "others may read" in str(row) for row in plan.regions)
    assert eager == (where != "a number"), plan.regions
    for rows in (2, 3, 2):
        x = torch.randn(rows, 16)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other sizes are planned anew
            found = forward_backward(plan.module, x)
        assert torch.equal(found, forward_backward(plain, x))
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)


SET = 1.0


class SetsAgain(Part):
    """Sets what is there already, where the sample is run."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.one, self.other = where, [1.0], [2.0]
        self.current, self.chosen = self.one, self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global SET
        if self.where == "a global":
            SET = 1.0
        elif self.where == "a list":
            self.current = self.one
        else:
            self.chosen = self.first
        return x + super().forward(x)


class ReadsWhatIsSet(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.front, self.back = Part(), SetsAgain(where)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.back(self.front(x))
        return y.pow(2).mean() * SET * self.back.current[0] * self.back.chosen.weight.sum()


@pytest.mark.parametrize("where", ["a global", "a list", "a submodule"])
def test_a_region_that_sets_what_is_there_already_stays_eager(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = ReadsWhatIsSet(where), torch.randn(8, 16)
    plain = copy.deepcopy(model)
    monkeypatch.setattr(sys.modules[__name__], "SET", 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = auto_checkpoint(model, x, regions=["front", "back"], recompute=["*"], progress=False)
    assert any("back" in str(row) and "others may read" in str(row) for row in plan.regions), plan.regions
    results = []
    for each, call in ((model, plan.module), (plain, plain)):
        monkeypatch.setattr(sys.modules[__name__], "SET", 3.0)
        each.back.current, each.back.chosen = each.back.other, each.back.second
        results.append(forward_backward(call, x))
    assert torch.equal(*results)


class Between(nn.Module):
    """Does something around its region that changes what that computes, in some steps."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.part, self.how, self.now = Part(), how, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with contextlib.ExitStack() as stack:
            if self.now and "mode" in self.how:
                stack.enter_context(Halves() if self.how == "a mode" else HalvesOps())
            elif self.now:
                stack.callback(register_module_forward_hook(halve).remove)
            return self.part(x).sum()


class Halves(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result / 2 if func is F.gelu else result


def halve(module: nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor:
    return output / 2 if type(module) is nn.Linear else output


class HalvesOps(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result / 2 if func is torch.ops.aten.addmm.default else result


@pytest.mark.parametrize("how", ["a mode", "a mode of ops", "a hook of every module"])
def test_what_code_between_regions_puts_around_them_has_them_run_plain(how: str) -> None:
    torch.manual_seed(0)
    model, x = Between(how), torch.randn(8, 16)
    plan = auto_checkpoint(model, x, regions=["part"], recompute=["*"], progress=False)
    before = plan.module(x)
    model.now = True
    with pytest.warns(UserWarning, match="hooks of every module, or a mode, are there for it"):
        found = plan.module(x)
    assert torch.equal(found, model(x))
    assert not torch.equal(found, before)


def test_a_region_that_is_compiled_after_it_was_planned_runs_as_it_is() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Part(), Part()), torch.randn(8, 16)
    plan = auto_checkpoint(model, x, regions=["0", "1"], recompute=["*"], progress=False)
    before = plan.module(x)
    model[0].compile(backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(plan.module(x), before)


class Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x: torch.Tensor, act: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return act(self.part(x))


class Gives(nn.Module):
    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.region, self.act = Given(), [act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.region(x, self.act[0]).sum()


def test_what_a_function_that_a_region_is_given_holds() -> None:
    torch.manual_seed(0)
    scale = 1.0

    def act(x: torch.Tensor) -> torch.Tensor:
        return x * scale

    model, x = Gives(act), torch.randn(8, 16)
    plan = auto_checkpoint(model, x, regions=["region"], recompute=["*"], progress=False)
    assert torch.equal(plan.module(x), model(x))
    scale = 3.0
    with pytest.warns(UserWarning, match="scale in the closure of"):
        assert torch.equal(plan.module(x), model(x))


class Draws(nn.Module):
    """Code between regions that has state of its own, in other places than attributes of modules."""

    told: ClassVar[list[float]] = []

    def __init__(self) -> None:
        super().__init__()
        self.part, self.generator, self.python = Part(), torch.Generator().manual_seed(3), random.Random(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.part(x) * torch.rand(16, generator=self.generator) * self.python.random()
        self.told.append(y.sum().item())
        TOLD.append(len(self.told))
        return y.sin().sum()


TOLD: list[int] = []


@pytest.mark.parametrize("check", [False, True])
def test_planning_leaves_what_code_between_regions_changes(check: bool) -> None:
    torch.manual_seed(0)
    model, x = Draws(), torch.randn(4, 16)
    plain = copy.deepcopy(model)
    plain.generator = torch.Generator().manual_seed(3)
    Draws.told.clear()
    TOLD.clear()
    plan = auto_checkpoint(model, x, regions="part", recompute=["*"], check=check)
    assert (Draws.told, TOLD) == ([], [])
    for _ in range(3):
        assert torch.equal(plan.module(x), plain(x))


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("make", [lambda n: torch.Generator().manual_seed(n), random.Random, np.random.default_rng])
def test_planning_leaves_generators_that_are_arguments(make: Any, check: bool) -> None:
    class Drawing(Part):
        def __init__(self) -> None:
            super().__init__()
            self.part = Part()

        def forward(self, x: torch.Tensor, source: Any) -> torch.Tensor:
            noise = torch.rand((), generator=source) if isinstance(source, torch.Generator) else source.random()
            return (self.part(x) * noise).sum()

    torch.manual_seed(0)
    model, x = Drawing(), torch.randn(4, 16)
    plain, mine, plains = copy.deepcopy(model), make(3), make(3)
    plan = auto_checkpoint(model, (x, mine), regions="part", check=check)
    assert torch.equal(plan.module(x, mine), plain(x, plains))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the plan holds for other generators
        assert torch.equal(plan.module(x, make(4)), plain(x, make(4)))
    with pytest.warns(UserWarning, match="planning anew"):
        assert torch.equal(plan.module(x[:3], make(5)), plain(x[:3], make(5)))


def test_an_iterator_that_code_between_regions_advances_is_refused() -> None:
    class Counts(Draws):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(x).sum() * next(self.count)

    model = Counts()
    model.count = itertools.count(1)
    with pytest.raises(Unsupported, match=r"an iterator advanced in forward at self\.count"):
        auto_checkpoint(model, torch.randn(4, 16), regions="part", check=False)
    assert next(model.count) == 1


class TwoPaths(nn.Module):
    """Has a part at a path of its own and within another one, as wrappers for self-supervised training do."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.other = Part(), Part()
        self.student = nn.Sequential(self.net, nn.Tanh(), Part())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.student(x)
        if not math.isfinite(seen.detach().sum()):
            raise FloatingPointError
        return (self.other(seen) + self.net(x)).pow(2).mean()


@pytest.mark.parametrize("regions", ["auto", ["student", "net", "other"]])
def test_a_module_within_a_region_is_none_at_its_other_path(regions: Any) -> None:
    torch.manual_seed(0)
    model, x = TwoPaths(), torch.randn(64, 16)
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, x, regions=regions, progress=False)
    assert [run.path for run in plan.runs] == ["student", "other"]
    for _ in range(2):
        x = torch.randn(64, 16)
        assert not differences(run_step(plain, plain, x, 1), run_step(plan.module, model, x, 1))


class Spare(nn.Module):
    """Calls one part for nothing, and another of that class now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.attending, self.idle, self.spare, self.calls_spare = Attending(), Part(), Part(), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.attending(x, x)
        if not math.isfinite(self.idle(hidden).detach().sum()):
            raise FloatingPointError
        return (self.spare(hidden) if self.calls_spare else hidden).pow(2).mean()


def test_a_spare_region_of_a_class_without_plans_runs_plain() -> None:
    torch.manual_seed(0)
    model, x = Spare(), torch.randn(4, 8, 16)
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, x, progress=False)
    assert [run.path for run in plan.runs] == ["attending"]
    for calls in (False, True):
        model.calls_spare = plain.calls_spare = calls
        assert not differences(run_step(plain, plain, x, 1), run_step(plan.module, model, x, 1))


class OfPacked(Part):
    def forward(self, packed: PackedSequence) -> PackedSequence:
        return packed._replace(data=super().forward(packed.data))


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.recurrent = OfPacked(), nn.GRU(16, 16, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.recurrent(self.block(packed))[0].data.pow(2).mean()


def test_a_region_may_take_and_return_a_packed_sequence() -> None:
    torch.manual_seed(0)
    model, sample = Packs(), (torch.randn(3, 5, 16), torch.tensor([2, 5, 3]))
    plain, plan = copy.deepcopy(model), auto_checkpoint(model, sample, progress=False)
    assert next(row.path for row in plan.regions) == "block"
    assert not differences(run_step(plain, plain, sample), run_step(plan.module, model, sample))


class CalledInVain(nn.Module):
    """Calls its block for values alone, too: without gradients, or before it drops the result."""

    def __init__(self, drops: bool) -> None:
        super().__init__()
        self.block, self.drops = Part(), drops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(4):
            with torch.set_grad_enabled(self.drops):
                tried = self.block(x)
            if i != 1 or float(tried.detach().sum()) > 1e9:
                x = self.block(x)
        return x.pow(2).mean()


@pytest.mark.parametrize("drops", [True, False])
def test_calls_that_no_gradient_reaches_run_in_eager_and_the_others_by_their_own_plans(drops: bool) -> None:
    torch.manual_seed(0)
    model, x = CalledInVain(drops), torch.randn(64, 16)
    plain, plan = copy.deepcopy(model), auto_checkpoint(model, x, "70%", progress=False)
    assert next((row.path, row.runs) for row in plan.regions) == ("block", 3)
    assert not differences(run_step(plain, plain, x), run_step(plan.module, model, x))
    model.zero_grad()
    kept: list[Any] = []
    peak = measure_peak(lambda: kept.append(forward_backward(plan.module, x)))
    assert plan.static_bytes + peak == plan.peak_bytes


class Replaces(nn.Module):
    """Replaces the data of a buffer, and tells whether what it was is gone."""

    planning = True

    def __init__(self) -> None:
        super().__init__()
        self.block, self.mean = Part(), nn.Buffer(torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = StorageWeakRef(self.mean.untyped_storage())
        self.mean.data = 0.9 * self.mean + x.mean(0)
        assert not (self.planning and before.expired())
        return self.block(x + self.mean).pow(2).mean()


def test_the_memory_of_a_buffer_whose_data_is_replaced_is_not_taken_for_that_of_something_new() -> None:
    model, x = Replaces(), torch.randn(4, 16)
    plan = auto_checkpoint(model, x, check=False, progress=False)
    Replaces.planning = False
    assert next(row.path for row in plan.regions) == "block"
    plan.module(x).backward()


class Drops(nn.Module):
    """Layers that each step leaves out at random; what they all attend to is read twice in each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.layers = Part(), nn.ModuleList(Attending() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory, hidden = self.encoder(x), x
        for layer in self.layers:
            if torch.rand(()) < 0.5:
                hidden = layer(hidden, memory)
        return hidden.square().mean() + memory.sum()


def _course(seed: int) -> list[bool]:
    torch.manual_seed(seed)
    return [bool(torch.rand(()) < 0.5) for _ in range(3)]


@pytest.mark.parametrize("regions", ["auto", ("encoder", "layers.*")])
@pytest.mark.parametrize("course", [[False, True, False], [True, False, True], [True, True, True]])
def test_the_bits_are_plain_whichever_layers_a_step_leaves_out(course: list[bool], regions: Any) -> None:
    model, x = Drops(), torch.randn(2, 8, 16)
    plain = copy.deepcopy(model)
    torch.manual_seed(next(seed for seed in range(200) if _course(seed) == course))
    plan = auto_checkpoint(model, x, regions=regions, progress=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for seed in range(12):
            assert differences(run_step(plain, plain, x, seed), run_step(plan.module, model, x, seed)) == []
    assert not any("is a sum" in str(w.message) for w in said)


class AddsInPlace(nn.Module):
    """Changes what a block was given, which the block's own backward does not read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.ReLU(), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden += block(hidden)
        return hidden.square().mean()


def test_what_code_after_a_region_changes_is_not_read_again_in_the_backward() -> None:
    model, x = AddsInPlace(), torch.randn(64, 16)
    plain = copy.deepcopy(model)
    with pytest.raises(BudgetError) as refused:
        auto_checkpoint(model, x, budget_mb=0.001, regions="blocks.*", progress=False)
    plan = auto_checkpoint(model, x, budget_mb=refused.value.minimum_mb, regions="blocks.*", progress=False, check=True)
    assert plan.recomputed and plan.checked
    for seed in (1, 2):
        assert differences(run_step(plain, plain, x, seed), run_step(plan.module, model, x, seed)) == []


class Skips(nn.Module):
    """Leaves blocks out at random, and cannot be traced as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Part() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x) if torch.rand(()) < 2 else x
        return x.sum()


def test_a_refusal_of_a_later_call_names_the_budget_and_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Skips(), torch.randn(64, 16)
    with pytest.raises(BudgetError) as refused:
        auto_checkpoint(model, x, budget_mb=0.001, progress=False)
    plan = auto_checkpoint(model, x, budget_mb=refused.value.minimum_mb, progress=False)
    said = r"no schedule found within .*; the smallest budget known to work is .*: ask for that"
    with pytest.warns(UserWarning, match="planning anew"), pytest.raises(BudgetError, match=said) as later:
        plan.module(torch.randn(96, 16))
    assert "move it out of forward. This call is not as the sample" in str(later.value)
    decided = plan.module._plan_state.first.planned
    problem = decided.prepared.problem
    monkeypatch.setattr(preference, "placed", lambda *_: with_frees(problem, plain_order(problem)))
    with pytest.raises(BudgetError, match=f"^{said}"):
        preference.placed_within(decided.prepared, decided.solution, decided.budget_bytes)


def test_a_region_that_is_compiled_is_refused() -> None:
    model, x = AddsInPlace(), torch.randn(64, 16)
    model.blocks[1].compile(backend="eager")
    with pytest.raises(RegionError, match="region blocks.1 is compiled"):
        auto_checkpoint(model, x, regions="blocks.*", progress=False)


def test_a_higher_order_op_between_regions_is_refused_by_name() -> None:
    class Chooses(AddsInPlace):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))

    with pytest.raises(CaptureError, match="The higher-order op cond runs ops here that a trace does not see"):
        auto_checkpoint(Chooses(), torch.randn(64, 16), regions="blocks.*", progress=False)


def test_a_block_added_to_the_model_is_told_as_what_it_is() -> None:
    model, x = AddsInPlace(), torch.randn(64, 16)
    plan = auto_checkpoint(model, x, regions="blocks.*", progress=False)
    model.blocks.append(nn.Sequential(nn.ReLU(), nn.Linear(16, 16)))
    with pytest.warns(UserWarning, match=r"'\(parameters\)': got others"):
        plan.module(x).backward()


class ReturnsBoth(nn.Module):
    """Returns its hidden state, too, and hands the gradient of what it adds to on as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.inner(x))
        return hidden, hidden * 2 + y


class UsesTheSecond(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.parts = nn.Linear(16, 16), nn.ModuleList(ReturnsBoth() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for part in self.parts:
            _, hidden = part(torch.relu(hidden), hidden)
        return hidden.square().mean()


def test_an_output_of_which_no_gradient_comes() -> None:
    torch.manual_seed(0)
    model, x = UsesTheSecond(), torch.randn(8, 16)
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, x, regions=["parts.*"], check=True, progress=False)
    assert len(plan.runs) == 2
    for _ in range(2):
        plain(x).backward()
        plan.module(x).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:.*gradients that the plan did not count", "ignore:backward started from")
def test_within_a_reentrant_checkpoint_regions_run_plain() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Part(), nn.Dropout(0.1), Part()), torch.randn(8, 16)
    plain = copy.deepcopy(model)
    module = auto_checkpoint(model, x, regions=["0", "2"], check=False, progress=False).module
    found, told = [], pytest.warns(match="not used within a backward")
    for called, warned in ((plain, contextlib.nullcontext()), (module, told)):
        torch.manual_seed(1)
        given = x.clone().requires_grad_()
        with warned:
            checkpoint(called, given * 2, use_reentrant=True).square().sum().backward()
        found.append(given.grad)
    assert torch.equal(*found)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


class ReadsTwice(nn.Module):
    """Reads its input twice, as a residual block does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = Part(), nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + x.roll(1, -1) * self.scale


class ChoosesByValue(nn.Module):
    """Two blocks read one tensor; whether the second one's result counts is in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(16, 16), nn.ModuleList(ReadsTwice() for _ in range(2))

    def forward(self, x: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        one, other = (block(hidden) for block in self.blocks)
        return (one * other if int(both) else one).square().mean()


def test_a_block_beside_it_that_this_batch_does_without_is_counted_as_a_reader() -> None:
    torch.manual_seed(0)
    model, x = ChoosesByValue(), torch.randn(8, 16)
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, (x, torch.tensor(0.0)), progress=False)
    assert plan.regions is not None
    eager = {region.path: region.eager for region in plan.regions}
    assert "by code that comes after it" in str(eager["blocks.0"]) and not eager["blocks.0.inner"]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the gradient of .* is a sum")
        for both in (0.0, 1.0, 0.0, 1.0):
            found = [run_step(m, own, (x, torch.tensor(both)), 1) for m, own in ((plain, plain), (plan.module, model))]
            assert differences(*found) == []


class ChecksNorms(nn.Module):
    """A part with a checkpoint of its own around a batch norm, and one without."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def test_a_checkpoint_around_an_update_stays_eager() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(ChecksNorms(), Part(), nn.BatchNorm1d(16)), torch.randn(8, 16)
    plain = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no step makes the update once
        plan = auto_checkpoint(model, x, regions=["0", "1"], check=True, progress=False)
    assert {run.path for run in plan.runs} == {"1"}
    assert any("torch.utils.checkpoint around an update of inner.1.running_mean" in str(row) for row in plan.regions)
    for _ in range(2):
        assert not differences(run_step(plain, plain, x, 3), run_step(plan.module, model, x, 3))


@pytest.mark.parametrize("held", ["in a list", "by its module"])
def test_a_region_stays_eager_whose_weight_code_after_it_reads_from_anywhere(held: str) -> None:
    class Ranking(nn.Module):
        """One embedding for a query and its history, and a penalty on it, as in DeepCTR."""

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, 8)
            self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
            self.penalized = [self.table.weight] if held == "in a list" else []

        def forward(self, query: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
            return self.layers(torch.cat([self.table(query), self.table(history).sum(1)], -1)).sigmoid()

    class Penalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Ranking()

        def forward(self, query: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
            loss = self.model(query, history).mean()
            if float(loss.detach()) > 9:  # not to be planned as a whole
                loss = loss * 2
            weight = self.model.penalized[0] if held == "in a list" else self.model.table.weight
            return loss + 0.01 * weight.square().sum()

    torch.manual_seed(0)
    model = Penalized()
    plain = copy.deepcopy(model)
    sample = torch.randint(0, 20, (256,)), torch.randint(0, 20, (256, 6))
    plan = auto_checkpoint(model, sample, progress=False)
    assert [region.path for region in plan.regions if not region.eager][:-1] == ["model.layers"]  # and the code between
    for seed in range(3):
        assert not differences(run_step(plain, plain, sample, seed), run_step(plan.module, model, sample, seed))


def test_a_region_under_autocasts_decorator_sets_nothing() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

        @torch.autocast("cpu", torch.bfloat16)
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).tanh()

    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = x + block(x)
            return x.square().mean() * (2 if float(x.detach().sum()) > 1e9 else 1)

    torch.manual_seed(0)
    model, x = Asking(), torch.randn(64, 32)
    plain = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = auto_checkpoint(model, x, progress=False)
        planned = [region.path for region in plan.regions if not region.eager]
        assert planned[:-1] == ["blocks.0", "blocks.1", "blocks.2"]  # and the code between
        assert not differences(run_step(plain, plain, x), run_step(plan.module, model, x))


class Answer:
    __slots__ = ("logits",)

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


class Answers(dict[str, torch.Tensor]):
    """As `EasyDict`, whose items are attributes."""

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


@pytest.mark.every(1)
@pytest.mark.parametrize(("wrap", "take"), [
    (Answer, lambda out: out.logits),
    (lambda y: Answers(logits=y), lambda out: out["logits"]),
    (lambda y: partial(torch.mul, y), lambda out: out.args[0]),
], ids=["slots", "items as attributes", "partial"])  # fmt: skip
def test_the_backward_starts_from_what_is_in_an_object_that_no_step_could_return(wrap: Any, take: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.Sequential(Part(), Part())

        def forward(self, x: torch.Tensor) -> Any:
            return wrap(self.parts(x))

    model, sample = Net(), torch.randn(64, 16)
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, sample, budget_mb="90%", progress=False, time_limit=1)
    assert plan.regions and plan.recomputed

    def step(run: Any) -> None:
        output = take(run(sample))
        output.backward(torch.ones_like(output))

    for run in (plain, plan.module):
        step(run)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(own.grad, other.grad) for own, other in pairs)  # type: ignore[arg-type]
    model.zero_grad()
    assert measure_peak(lambda: step(plan.module)) == plan.peak_bytes - plan.static_bytes
