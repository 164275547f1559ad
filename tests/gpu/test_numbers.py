"""A planned model trains to the plain one's numbers on a real CUDA device, the way that people train there."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from planner import PlannerError, auto_checkpoint
from tests.gpu.device import CUDA, HOLLOW, MIB, ON_A_GPU, plan_for
from tests.zoo.compare import same_bits

pytestmark = [
    *ON_A_GPU, pytest.mark.skipif(HOLLOW, reason="the kernels of the hollow GPU do nothing: there are no numbers")
]  # fmt: skip
Mode = Callable[[], contextlib.AbstractContextManager[Any]]


class Net(nn.Module):
    """Convolutions with batch norms, then attention with dropout."""

    def __init__(self, width: int = 64, blocks: int = 3) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(3, width, 4, stride=4), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        for _ in range(blocks):
            convolutions += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        self.stem = nn.Sequential(*convolutions, nn.Dropout2d(0.1))
        layers = (nn.TransformerEncoderLayer(width, 4, 256, 0.1, batch_first=True) for _ in range(blocks))
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        tokens = self.stem(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            tokens = block(tokens)
        return nn.functional.cross_entropy(self.head(tokens.mean(1)).float(), target)


@dataclass
class Way:
    """How a step is run.

    Attributes:
        mode: what the forward runs under.
        prepare: what is done to the model first.
        scaled: with a GradScaler.
        dtype: of the images.
    """

    mode: Mode = contextlib.nullcontext
    prepare: Callable[[nn.Module], Any] = lambda model: model
    scaled: bool = False
    dtype: torch.dtype = torch.float32
    format: torch.memory_format = torch.contiguous_format
    flags: Mode = field(default=contextlib.nullcontext)


@contextlib.contextmanager
def _flag(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


WAYS = {
    "float32": Way(),
    "bfloat16 autocast": Way(mode=lambda: torch.autocast("cuda", torch.bfloat16)),
    "float16 autocast, scaled": Way(mode=lambda: torch.autocast("cuda", torch.float16), scaled=True),
    "bfloat16 parameters": Way(prepare=lambda model: model.to(torch.bfloat16), dtype=torch.bfloat16),
    "channels last, autocast": Way(
        mode=lambda: torch.autocast("cuda", torch.bfloat16), format=torch.channels_last,
        prepare=lambda model: model.to(memory_format=torch.channels_last),  # type: ignore[call-overload]
    ),
    "TF32": Way(flags=lambda: _flag(torch.backends.cuda.matmul, "allow_tf32", True)),
    "cuDNN's benchmark": Way(flags=lambda: _flag(torch.backends.cudnn, "benchmark", True)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _batches(way: Way, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(0)
    images = [torch.randn(8, 3, 64, 64, generator=drawn) for _ in range(count)]
    targets = [torch.randint(10, (8,), generator=drawn) for _ in range(count)]
    return [
        (x.to(CUDA, way.dtype).contiguous(memory_format=way.format), y.to(CUDA))
        for x, y in zip(images, targets, strict=True)
    ]


def _train(module: nn.Module, owner: nn.Module, way: Way, steps: int = 4) -> list[torch.Tensor]:
    """Losses, and the state after the last step."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(owner.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=way.scaled)
    losses = []
    for x, y in _batches(way, steps):
        with way.mode():
            loss = module(x, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *owner.state_dict().values(), torch.cuda.get_rng_state().to(CUDA)]


@pytest.mark.parametrize("name", WAYS)
def test_training_with_a_plan_is_plain_training(name: str) -> None:
    way = WAYS[name]
    torch.manual_seed(0)
    with way.flags():
        model = Net().to(CUDA)
        way.prepare(model)
        twin = copy.deepcopy(model)
        with way.mode():
            plan = plan_for(model, _batches(way, 1)[0], 60)
        assert plan.overhead > 0
        plain, planned = _train(twin, twin, way), _train(plan.module, model, way)
    assert [i for i, (a, b) in enumerate(zip(plain, planned, strict=True)) if not same_bits(a, b)] == []


def test_a_side_stream_and_batches_that_come_while_a_step_runs() -> None:
    """Nothing is freed or overwritten early: copies from pinned memory, on a stream of their own, beside the step's."""
    torch.manual_seed(0)
    way = WAYS["float32"]
    model = Net().to(CUDA)
    twin = copy.deepcopy(model)
    plan = plan_for(model, _batches(way, 1)[0], 60)
    hosts = [(x.cpu().pin_memory(), y.cpu().pin_memory()) for x, y in _batches(way, 8)]

    def train(module: nn.Module, owner: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(owner.parameters(), lr=1e-2, momentum=0.9)
        copies, work = torch.cuda.Stream(), torch.cuda.Stream()
        work.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(work):
            for x, y in hosts:
                with torch.cuda.stream(copies):
                    batch = x.to(CUDA, non_blocking=True), y.to(CUDA, non_blocking=True)
                work.wait_stream(copies)
                for tensor in batch:
                    tensor.record_stream(work)
                module(*batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        torch.cuda.current_stream().wait_stream(work)
        return [value.clone() for value in owner.state_dict().values()]

    plain, planned = train(twin, twin), train(plan.module, model)
    assert [i for i, (a, b) in enumerate(zip(plain, planned, strict=True)) if not same_bits(a, b)] == []


def _undropped(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, (nn.Dropout, nn.Dropout2d)):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_the_compile_backend(inner: str) -> None:
    """Op by op the bits are those of AOT autograd's graphs, in which a batch norm is ATen's."""
    torch.manual_seed(0)
    way = WAYS["float32"]
    model = Net().to(CUDA) if inner == "eager" else _undropped(Net()).to(CUDA)
    twin = copy.deepcopy(model)
    free = auto_checkpoint(model, _batches(way, 1)[0], check=False, progress=False)
    budget = (free.static_bytes + 0.7 * (free.baseline_peak_bytes - free.static_bytes)) / MIB
    torch._dynamo.reset()
    options: dict[str, Any] = {"budget_mb": budget, "inner": inner}
    compiled: Any = torch.compile(model, backend="checkpoint_planner", options=options)
    other: Any = torch.compile(twin, backend="aot_eager")
    plain, planned = _train(other, twin, way), _train(compiled, model, way)
    if inner == "eager":
        assert [i for i, (a, b) in enumerate(zip(plain, planned, strict=True)) if not same_bits(a, b)] == []
    else:
        torch.testing.assert_close(planned[:4], plain[:4], rtol=2e-2, atol=2e-2)


def _graphed(module: nn.Module, owner: nn.Module, batch: tuple[torch.Tensor, ...], replays: int) -> list[torch.Tensor]:
    """Gradients and loss after some replays of a CUDA graph of the forward and backward."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            module(*batch).backward()
            owner.zero_grad()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.manual_seed(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = module(*batch)
        loss.backward()
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize()
    found = [loss.clone(), *(p.grad.clone() for p in owner.parameters() if p.grad is not None)]
    return [*found, *(buffer.clone() for buffer in owner.buffers())]


DRAWING = ("aten.native_dropout", "aten._scaled_dot_product_efficient_attention")


@pytest.mark.parametrize("draws", ["none", "once", "again"])
def test_a_cuda_graph_over_both_halves(draws: str) -> None:
    """Random numbers are those of the capture's own generator, which nobody can set back for a second draw."""
    torch.manual_seed(0)
    model = _undropped(Net())
    if draws != "none":
        for block in model.blocks:  # type: ignore[union-attr]
            block.dropout.p = block.self_attn.dropout = 0.1
    model.to(CUDA)
    twin = copy.deepcopy(model)
    (batch,) = _batches(WAYS["float32"], 1)
    hints = {"never_recompute": DRAWING} if draws == "once" else {"recompute": DRAWING} if draws == "again" else {}
    plan = plan_for(model, batch, 60, **hints)
    assert plan.overhead > 0
    if draws == "again":
        with pytest.raises(PlannerError, match="never_recompute"):
            _graphed(plan.module, model, batch, 1)
        return
    plain, planned = _graphed(twin, twin, batch, 3), _graphed(plan.module, model, batch, 3)
    assert [i for i, (a, b) in enumerate(zip(plain, planned, strict=True)) if not same_bits(a, b)] == []
