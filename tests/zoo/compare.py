"""Running a plain and a planned step side by side: numbers, generator state, memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from passes.memory import granule, measure_peak, round_up
from passes.trace.arguments import split_sample
from passes.trace.structure import flatten, unflatten
from planner import BudgetError, Plan
from planner.session import open_session


@dataclass
class StepResult:
    """Everything observable after one training step."""

    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    rng: torch.Tensor


def scalar_loss(output: Any) -> torch.Tensor:
    """A loss through the outputs that a plan expects gradients for: `.loss`, else the scalars, else all of them."""
    if getattr(output, "loss", None) is not None:
        return output.loss
    tensors, _ = flatten(output)
    differentiable = [t for t in tensors if t.requires_grad and t.is_floating_point()]
    scalars = [t for t in differentiable if t.dim() == 0]
    if hasattr(output, "to_tuple"):
        differentiable = differentiable[:1]
    terms = scalars or [t.float().pow(2).mean() for t in differentiable]
    return terms[0] if len(terms) == 1 else torch.stack([t.float() for t in terms]).sum()


def loss_bytes(module: nn.Module, sample: Any) -> int:
    """What a loss outside the model allocates beside the gradients of the outputs: not the plan's to count."""
    args, kwargs = split_sample(sample)
    tensors, template = flatten(module(*args, **kwargs))
    fresh = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
    output = unflatten(template, fresh)
    if any(scalar_loss(output) is t for t in fresh):
        return 0
    peak = measure_peak(lambda: scalar_loss(output).backward(), fresh[0].device)
    given = [t.grad for t in fresh if t.grad is not None]
    return peak - sum(round_up(g.untyped_storage().nbytes(), granule(g.device)) for g in given)


def forward_backward(module: nn.Module, sample: Any) -> Any:
    """One forward and backward; returns the output, held until the backward is done."""
    args, kwargs = split_sample(sample)
    output = module(*args, **kwargs)
    scalar_loss(output).backward()
    return output


def run_step(module: nn.Module, state_of: nn.Module, sample: Any, seed: int = 1) -> StepResult:
    """One seeded step, from cleared gradients."""
    for parameter in state_of.parameters():
        parameter.grad = None
    torch.manual_seed(seed)
    output = forward_backward(module, sample)
    tensors, _ = flatten(output)
    return StepResult(
        [t.detach().clone() for t in tensors],
        {n: None if p.grad is None else p.grad.clone() for n, p in state_of.named_parameters()},
        {n: b.clone() for n, b in state_of.named_buffers()},
        torch.cat([torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]),
    )


def differences(plain: StepResult, planned: StepResult) -> list[str]:
    """What is not bitwise equal, by name."""
    found = []
    for i, (a, b) in enumerate(zip(plain.outputs, planned.outputs, strict=True)):
        if not _same(a, b):
            found.append(f"output {i}")
    for name, a in plain.gradients.items():
        b = planned.gradients[name]
        if (a is None) != (b is None) or (a is not None and b is not None and not _same(a, b)):
            found.append(f"gradient {name}")
    found += [f"buffer {n}" for n, a in plain.buffers.items() if not _same(a, planned.buffers[n])]
    if not torch.equal(plain.rng, planned.rng):
        found.append("RNG state")
    return found


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether two tensors agree in dtype, shape and every bit (a NaN included); None agrees with None."""
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_dense().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return same_bits(a, b) and a.requires_grad == b.requires_grad


def measured_peak_bytes(module: nn.Module, state_of: nn.Module, sample: Any, static_bytes: int) -> int:
    """Static bytes plus the highest point of memory during one step from cleared gradients, after a warm-up."""
    forward_backward(module, sample)

    def clear() -> None:
        for parameter in state_of.parameters():
            parameter.grad = None

    clear()
    kept: list[Any] = []
    peak = measure_peak(lambda: kept.append(forward_backward(module, sample)))
    clear()
    return static_bytes + peak


def plan_at(model: nn.Module, sample: Any, share: int) -> Plan:
    """A plan at `share` % of what the step needs above static, or at the minimum that the refusal states."""
    return next(plans_at(model, sample, [share]))


def plans_at(model: nn.Module, sample: Any, shares: Iterable[int]) -> Iterator[Plan]:
    """The same for several shares of one captured step."""
    session = open_session(model, sample, time_limit=1, progress=False)
    static_bytes = session.problem.static_bytes
    for share in shares:
        try:
            plan = session.plan(static_bytes + (session.plain_peak_bytes - static_bytes) * share // 100)
        except BudgetError as error:
            floor, minimum = error.floor_bytes, error.minimum_bytes
            assert floor is not None and minimum is not None and floor <= minimum
            plan = session.plan(minimum)
        yield plan
