"""What is measured of one method: memory told apart, work done, numbers, time."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from passes._torch import flop_registry
from passes.memory import granule, round_up
from passes.trace.arguments import split_sample
from passes.trace.structure import flatten
from tests.zoo.compare import StepResult, differences, run_step, scalar_loss

GRANULE = granule(torch.device("cpu"))


@dataclass
class Subject:
    """A method made ready to run: `module` is called, `owner` holds the parameters and buffers that it acts on."""

    module: nn.Module
    owner: nn.Module


@dataclass(frozen=True)
class Memory:
    """Bytes of one step that starts without gradients.

    Attributes:
        peak: highest point of everything.
        parameters, buffers, inputs: resident throughout.
        gradients: resident at the end.
        activations: highest point of what is none of these (a gradient counts as one from its allocation on).
    """

    peak: int
    parameters: int
    buffers: int
    inputs: int
    gradients: int
    activations: int


def step(module: nn.Module, sample: Any) -> float:
    """One forward and backward, as a training loop writes it: nobody holds the model's other outputs. The loss."""
    args, kwargs = split_sample(sample)
    loss = scalar_loss(module(*args, **kwargs))
    loss.backward()
    return loss.item()


def clear(owner: nn.Module) -> None:
    """Drop all gradients."""
    for parameter in owner.parameters():
        parameter.grad = None


def memory(subject: Subject, sample: Any) -> Memory:
    """Run one step under the profiler and replay its allocations, those that end up as gradients told apart."""
    owner = subject.owner
    clear(owner)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(subject.module, sample)
    result: Any = profiler.profiler
    events = sorted(_allocations(result.kineto_results.experimental_event_tree()), key=lambda e: e[0])
    gradients = _storages(p.grad for p in owner.parameters() if p.grad is not None)
    clear(owner)
    peak, activations = _highest(events, gradients)
    parameters, buffers = _storages(owner.parameters()), _storages(owner.buffers())
    inputs = _storages(flatten(sample)[0])
    resident = {**parameters, **buffers, **inputs}
    return Memory(
        peak + sum(resident.values()), sum(parameters.values()), sum(buffers.values()), sum(inputs.values()),
        sum(gradients.values()), activations,
    )  # fmt: skip


def _storages(tensors: Any) -> dict[int, int]:
    """Bytes by address, as the allocator rounds them."""
    return {t.untyped_storage().data_ptr(): round_up(t.untyped_storage().nbytes(), GRANULE) for t in tensors}


def _highest(events: Sequence[tuple[int, int, int]], gradients: dict[int, int]) -> tuple[int, int]:
    """Highest point of everything, and of the allocations that do not end up as a gradient."""
    last = {pointer: i for i, (_, pointer, size) in enumerate(events) if size > 0 and pointer in gradients}
    kept = frozenset(last.values())
    level = apart = peak = peak_apart = 0
    for i, (_, _, size) in enumerate(events):
        level += size
        apart += 0 if i in kept else size
        peak, peak_apart = max(peak, level), max(peak_apart, apart)
    return peak, peak_apart


def _allocations(events: Sequence[Any]) -> list[tuple[int, int, int]]:
    """`(time, address, signed bytes)` of every allocation and free in the profiler's tree."""
    found = []
    stack = list(events)
    while stack:
        event = stack.pop()
        stack += event.children
        if event.tag.name == "Allocation":
            size = event.extra_fields.alloc_size  # what was asked for; the allocator's own events are rounded
            rounded = round_up(abs(size), GRANULE)
            found.append((event.start_time_ns, event.extra_fields.ptr, rounded if size > 0 else -rounded))
    return found


class Work(TorchDispatchMode):
    """Counts FLOPs by torch's registry, and bytes read and written by every op that is not a view."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.moved_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.flops += int(count(*args, **kwargs, out_val=result))
        if not func.is_view:
            touched = [*tree_leaves((args, kwargs)), *tree_leaves(result)]
            self.moved_bytes += sum(t.numel() * t.element_size() for t in touched if isinstance(t, torch.Tensor))
        return result


def work(subject: Subject, sample: Any) -> Work:
    """What one step computes and moves."""
    clear(subject.owner)
    with Work() as counted:
        step(subject.module, sample)
    clear(subject.owner)
    return counted


@dataclass
class Reference:
    """The plain step's numbers, and the buffers that every compared step starts from."""

    result: StepResult
    buffers: dict[str, torch.Tensor]


def reference(model: nn.Module, sample: Any) -> Reference:
    """One seeded step of a copy of the plain model."""
    twin = copy.deepcopy(model)
    return Reference(run_step(twin, twin, sample), {n: b.clone() for n, b in model.named_buffers()})


def compare(subject: Subject, sample: Any, plain: Reference) -> tuple[tuple[str, ...], float]:
    """What is not bitwise the plain step's, by name, and the largest difference of any number (see `relative`)."""
    with torch.no_grad():
        for name, buffer in subject.owner.named_buffers():
            buffer.copy_(plain.buffers[name])
    result = run_step(subject.module, subject.owner, sample)
    clear(subject.owner)
    return tuple(differences(plain.result, result)), relative(plain.result, result)


def relative(plain: StepResult, other: StepResult) -> float:
    """The largest difference of outputs, buffers and gradients, as a share of its tensor's largest number.

    A gradient that is zero except for rounding (an attention's key bias) is measured by a thousandth of the step's
    largest gradient instead. A missing gradient counts as wholly different.
    """
    gradients = [(g, other.gradients[n]) for n, g in plain.gradients.items()]
    least = max((_size(g) for g, _ in gradients if g is not None), default=0.0) / 1000
    found = [1.0 for g, h in gradients if (g is None) != (h is None)]
    found += [_share(g, h, least) for g, h in gradients if g is not None and h is not None]
    found += [_share(a, b, 0.0) for a, b in zip(plain.outputs, other.outputs, strict=True)]
    found += [_share(b, other.buffers[n], 0.0) for n, b in plain.buffers.items()]
    return max(found, default=0.0)


def _size(tensor: torch.Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0


def _share(a: torch.Tensor, b: torch.Tensor, least: float) -> float:
    difference = _size(a.double() - b.double())
    return difference / max(_size(a), least) if difference else 0.0


def interleaved_seconds(
    subjects: Sequence[Subject], sample: Any, rounds: int, clock: Callable[[], float] = time.perf_counter
) -> list[list[float]]:
    """Seconds of `rounds` steps of each, all taking turns; the order is reversed in every second round."""
    taken: list[list[float]] = [[] for _ in subjects]
    for r in range(rounds):
        turn = list(enumerate(subjects))
        for i, subject in turn if r % 2 == 0 else turn[::-1]:
            clear(subject.owner)
            start = clock()
            step(subject.module, sample)
            taken[i].append(clock() - start)
            clear(subject.owner)
    return taken


def ratio(seconds: Sequence[float], plain: Sequence[float]) -> float:
    """Ratio of the medians."""
    return statistics.median(seconds) / statistics.median(plain)
