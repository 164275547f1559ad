"""Models of random programs with random code between them, for `tests.planner.histories`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from passes.trace.structure import flatten
from tests.passes.program_ops import Pick
from tests.passes.programs import Program, draw_program, draw_shape


class Backwards(torch.autograd.Function):
    """Its gradient has the other sign; called with none it makes one of zeros."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return -gradient


class Blocks(nn.Module):
    """Random programs one after another, each on what the one before has made of the first input.

    Args:
        glue: for each call of a program how it is called and what becomes of its results.
        alone: whether the loss is all that is returned.
        pick: draws which programs are `Levelled`.
    """

    def __init__(self, programs: list[Program], glue: list[Glue], alone: bool, pick: Pick) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_levelled(p.model, pick) for p in programs)
        ends = list(accumulate(len(p.sample) - 1 for p in programs))
        self.inputs = [slice(end - len(p.sample) + 1, end) for end, p in zip(ends, programs, strict=True)]
        self.glue, self.alone = glue, alone

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> Any:
        made, earlier = [], [x]
        for glue in self.glue:
            block, mine = self.blocks[glue.program], more[self.inputs[glue.program]]
            if glue.skipped and torch.rand([]) < 0.3:
                continue
            before = x.sin() if glue.read_before else None
            x = Backwards.apply(x) if glue.custom else x
            made = _differentiable(block(x, *mine))
            if glue.twice:
                made += _differentiable(block(x * 0.5, *mine))
            alike = [t for t in made if t.shape == x.shape]
            if glue.changed and alike and _on_its_own(alike[-1], [x, *made]):
                alike[-1].mul_(0.5)
            if alike and glue.added:
                x = x.transpose(0, 1).mul(0.5).transpose(0, 1) + torch.tanh(alike[-1])
            else:
                x = x + torch.stack([torch.tanh(t).mean() for t in made]).sum()
            x = x if before is None else x + before
            x = x + earlier[0].detach().cos() + earlier[-1] if glue.from_before else x
            earlier.append(x)
        return x.square().mean() if self.alone else (x, *made)


class Levelled(nn.Module):
    """A model whose first input is multiplied by a tensor that nobody registers, or by a number of it.

    Args:
        way: 0 for the tensor, 1 for the number, 2 for both, 3 for a view of a buffer, 4 for one that forward changes,
            5 for state that each call moves on, 6 for a number that is none of a tensor, 7 for a tensor of the longest
            batch, 8 for one of the latest length.
    """

    def __init__(self, model: nn.Module, way: int) -> None:
        super().__init__()
        self.model, self.way, self.level, self.factor, self.rows = model, way, torch.ones(1), 1.0, 0
        self.register_buffer("steady", torch.ones(2))
        if way in (3, 4):
            self.level = self.steady[:1]

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> Any:
        if self.way == 4:
            self.steady.mul_(1.5)
        if self.way == 5:
            self.level = 0.5 * self.level + x.detach().cos().mean()
        if (self.way == 7 and self.rows < len(x)) or (self.way == 8 and self.rows != len(x)):
            self.rows, self.level = len(x), torch.full((1,), self.factor + len(x) / 8)
        x = x * self.factor if self.way in (1, 6) else x * self.level.clone()  # which may change later
        x = x * self.level.tolist()[0] if self.way in (1, 2) else x
        return self.model(x.tanh(), *more)


@dataclass
class Glue:
    """What lies between two programs."""

    program: int  # that is called
    added: bool  # a result of the same shape is added; else a number of all results
    read_before: bool  # the input is read by others, too
    twice: bool  # the program is called twice
    changed: bool  # a result is changed in place
    from_before: bool  # what came before the last program is read again
    custom: bool  # a custom autograd function comes before
    skipped: bool  # now and then


def _levelled(model: nn.Module, pick: Pick) -> nn.Module:
    return Levelled(model, pick(0, 8)).train() if pick(0, 3) == 0 else model


def unregistered(model: nn.Module) -> list[torch.Tensor]:
    """The tensors of a model that nobody registers."""
    return [module.level for module in levelled(model)]


def levelled(model: nn.Module) -> list[Levelled]:
    """The parts of a model that have such."""
    return [module for module in model.modules() if isinstance(module, Levelled)]


def _on_its_own(tensor: torch.Tensor, others: list[torch.Tensor]) -> bool:
    """Whether none of the others shares its memory: torch lets no such result of a region be changed in place."""
    place = tensor.untyped_storage().data_ptr()
    return [t.untyped_storage().data_ptr() for t in others].count(place) == 1


def _differentiable(results: Any) -> list[torch.Tensor]:
    return [t for t in flatten(results)[0] if t.is_floating_point()]


def _tie(model: nn.Module) -> None:
    """Let the first linear layers of one shape have one weight."""
    layers = [m for m in model.modules() if type(m) is nn.Linear]
    for layer in layers[1:]:
        if layer.weight.shape == layers[0].weight.shape:
            layer.weight = layers[0].weight


def draw_model(pick: Pick, blocks: bool) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A random model, of blocks or of one program, and its sample.

    Raises:
        Rejected: the draw does not train plainly.
    """
    if not blocks:
        program = draw_program(pick)
        return _levelled(program.model, pick), program.sample
    shape = draw_shape(pick)
    programs = [draw_program(pick, 5, shape) for _ in range(pick(2, 4))]
    again = [pick(0, len(programs) - 1)] if pick(0, 3) == 0 else []
    glue = [
        Glue(i, bool(pick(0, 2)), *(pick(0, 3) == 3 for _ in range(5)), pick(0, 5) == 5)
        for i in (*range(len(programs)), *again)
    ]
    model = Blocks(programs, glue, bool(pick(0, 2)), pick).train()
    for program in programs[: pick(0, len(programs) - 1)] if pick(0, 3) == 0 else ():
        program.model.requires_grad_(False)
    if pick(0, 3) == 0:
        _tie(model)
    return model, (programs[0].sample[0], *(x for p in programs for x in p.sample[1:]))
