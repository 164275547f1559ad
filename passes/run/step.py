"""Running a rewritten step: one `autograd.Function` over the forward and backward GraphModules.

The saved tensors are held in a list that the backward empties into its own inputs, so each dies at its last use.
Parameters and inputs go through `save_for_backward`, so that a change between forward and backward raises as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.errors import PlannerError

from ._torch import below_autograd, under_transform
from .replay import as_tensor, copy_generator, old_value
from .tensors import alone, distinct, is_laid_out, laid_out


class BackwardTwice(PlannerError, RuntimeError):
    """A second backward through one planned forward: its saved tensors were freed by the first."""


class DoubleBackward(PlannerError, RuntimeError):
    """`backward(create_graph=True)` through a planned step."""


# (primals, generators as before the forward, {output index: its gradient}) -> a gradient or None per primal
Fallback = Callable[[Sequence[torch.Tensor], dict[str, torch.Generator], dict[int, torch.Tensor]], list[Any]]


@dataclass(frozen=True)
class Step:
    """A planned step, ready to run on any tensors of the planned shapes. Holds no tensor of the model.

    Attributes:
        forward, backward: the two halves (see `passes.rewrite.Rewritten`).
        mutated: primals that the forward overwrites with its first results.
        num_outputs: results after those.
        saved_primals: primals handed to the backward.
        differentiable: per output, whether the plain model's output requires a gradient.
        expected: outputs whose gradients the backward takes, in order.
        tangent_strides: the layout each of those gradients must have: sums over another have other bits.
        keep_primals: primals whose value from before the step a fallback would need and the step overwrites.
        rng_devices: devices whose generators the forward draws from.
        hold_outputs: keep the outputs' memory until the backward is done, as planned for, whether or not the caller
            does.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    mutated: tuple[int, ...]
    num_outputs: int
    saved_primals: tuple[int, ...]
    differentiable: tuple[bool, ...]
    expected: tuple[int, ...]
    tangent_strides: tuple[tuple[int, ...], ...]
    keep_primals: tuple[int, ...] = ()
    rng_devices: tuple[str, ...] = ()
    hold_outputs: bool = True

    def __call__(self, primals: Sequence[torch.Tensor], fallback: Fallback) -> tuple[Any, ...]:
        """Run the forward; gradients flow when `backward` is called on an output.

        Raises:
            PlannerError: under a transform of `torch.func`.
        """
        if under_transform():
            raise PlannerError(
                "a planned step runs under loss.backward() and torch.autograd.grad; torch.func.grad, vmap, jvp and the "
                "other transforms cannot look into it. Give them the original model."
            )
        return _PlannedStep.apply(self, fallback, *primals)


class _PlannedStep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: Step, fallback: Fallback, *primals: torch.Tensor) -> tuple[Any, ...]:
        ctx.step, ctx.fallback = step, fallback
        ctx.generators = {device: copy_generator(device) for device in step.rng_devices}
        ctx.overwritten = {i: old_value(primals[i]) for i in step.keep_primals}
        ctx.primals = primals
        ctx.versions = [p._version for p in primals]
        with below_autograd():
            results = step.forward.forward([p.detach() for p in primals])
        count = len(step.mutated)
        with torch.no_grad():
            for i, value in zip(step.mutated, results[:count], strict=True):
                primals[i].copy_(value)
                ctx.versions[i] = primals[i]._version
        outputs = distinct(results[count : count + step.num_outputs])
        returned = {o.untyped_storage().data_ptr() for o in outputs}
        saved = results[count + step.num_outputs :]
        ctx.saved = [alone(s) if s.untyped_storage().data_ptr() in returned else s for s in saved]
        ctx.held = [o.detach() for o in outputs] if step.hold_outputs else None
        kept = {s.untyped_storage().data_ptr() for s in ctx.saved}
        shared = [t for t in (*outputs, *primals) if t.untyped_storage().data_ptr() in kept]
        ctx.shared = [(t.detach(), t._version) for t in shared]
        overwritten = set(step.mutated)
        ctx.save_for_backward(*(primals[i] for i in step.saved_primals if i not in overwritten))
        ctx.mark_non_differentiable(*(o for o, d in zip(outputs, step.differentiable, strict=True) if not d))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        step: Step = ctx.step
        if ctx.saved is None:
            raise BackwardTwice(
                "backward was called a second time through one forward of a planned module: its saved tensors are "
                "freed as the first backward reads them, whatever retain_graph says. Call the module again for every "
                "backward, or add the losses and call backward once."
            )
        if torch.is_grad_enabled():
            raise DoubleBackward(
                "create_graph=True asks for gradients of gradients, which a planned step does not keep what is needed "
                "for. Compute this loss with the original model, or leave create_graph out."
            )
        if any(output._version != version for output, version in ctx.shared):
            raise RuntimeError(
                "an input or output of the planned step was changed in place between forward and backward, and the "
                "backward needs its old value. Change a clone() of it, or use the out-of-place form."
            )
        ctx.shared = ()
        present = tuple(i for i, g in enumerate(gradients) if g is not None)
        given = [g for g in gradients if g is not None]
        if present != step.expected or not all(map(is_laid_out, given, step.tangent_strides)):
            return (None, None, *_run_fallback(ctx, {i: gradients[i] for i in present}))
        tangents = [laid_out(g, s) for g, s in zip(given, step.tangent_strides, strict=True)]
        del gradients, given
        kept = iter(ctx.saved_tensors)
        overwritten = set(step.mutated)
        primals = [ctx.primals[i] if i in overwritten else next(kept) for i in step.saved_primals]
        values = [*ctx.saved, *(p.detach() for p in primals), *tangents]
        ctx.saved = ctx.primals = None
        del kept, primals, tangents
        with below_autograd():
            gradients_of_primals = step.backward.forward(values)
        ctx.held = None
        return (None, None, *gradients_of_primals)


def _run_fallback(ctx: Any, gradients: dict[int, Any]) -> list[Any]:
    for i, (primal, version) in enumerate(zip(ctx.primals, ctx.versions, strict=True)):
        if primal._version != version:
            raise RuntimeError(f"input {i} of the planned step was changed in place between forward and backward")
    old = {i: as_tensor(value, ctx.primals[i]) for i, value in ctx.overwritten.items()}
    primals = [old.get(i, p) for i, p in enumerate(ctx.primals)]
    generators, fallback = ctx.generators, ctx.fallback
    ctx.saved = None
    return fallback(primals, generators, gradients)
