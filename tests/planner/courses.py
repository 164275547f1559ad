"""Courses: what a random training step does, drawn once and done by a plain and a planned model alike."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from passes._torch import as_distributed, local_part
from passes.trace.structure import flatten
from tests.passes.program_ops import Pick
from tests.planner.history_models import levelled, unregistered
from tests.planner.history_ranks import own_seed

HOOKS_OF_LAYERS = (4, 5)


@dataclass
class Course:
    """What one step does. A number chooses one of several ways, 0 the usual one."""

    seed: int
    which: int  # plan
    training: bool = True
    frozen: frozenset[str] = frozenset()
    before: int = 0  # what happens to the model first
    clear: bool = True  # the gradients
    forwards: int = 1
    rows: int = 0  # added to the batch
    given: int = 0  # how the inputs are made
    autocast: bool = False
    no_grad: bool = False
    hooks: int = 0
    touched: int = 0  # what happens between forward and backward
    last_first: bool = False  # of several backwards
    start: int = 0  # of the backward: the scalars, or all where there are none; all; some
    layout: int = 0  # of the gradients it starts from
    inside: bool = False  # of autocast: the backward
    asked: bool = False  # `torch.autograd.grad` instead
    twice: bool = False  # the backward, of a graph that is retained
    learn: bool = True
    unsummed: bool = False  # ranks keep their gradients to themselves


def draw_course(pick: Pick, frozen: Mapping[str, bool], seed: int, plans: int, wild: int) -> Course:
    """A step, the more unusual the more `wild`; `frozen` are the parameters, and whether they are from the start."""

    def rarely(of: int = 8) -> bool:
        return wild > 0 and pick(0, max(1, of * 5 // wild)) == 0

    def one(ways: int, of: int = 8) -> int:
        return pick(1, ways) if rarely(of) else 0

    also = {n for n in frozen if pick(0, 2) == 0} if rarely(4) else set()
    return Course(
        seed, pick(0, plans - 1), training=not rarely(),
        frozen=frozenset(n for n, always in frozen.items() if always or n in also), before=one(7), clear=not rarely(4),
        forwards=2 if rarely(5) else 1, rows=one(2), given=one(5), autocast=rarely(5), no_grad=rarely(10),
        hooks=one(5), touched=one(5), last_first=rarely(2), start=one(2, 4), layout=one(3, 4), inside=rarely(3),
        asked=rarely(), twice=rarely(10), learn=rarely(3), unsummed=rarely(4),
    )  # fmt: skip


def take(course: Course, module: nn.Module, owner: nn.Module, sample: tuple[torch.Tensor, ...]) -> list[Any]:
    """Run the step; everything that can be seen afterwards, by name."""
    torch.manual_seed(own_seed(course.seed))
    _before(course, owner)
    found: list[Any] = []
    pending, leaves = [], []
    with _hooks(course, owner), unsummed(owner) if course.unsummed else nullcontext():
        for _ in range(course.forwards):
            own, inputs = _batch(sample, course)
            leaves += own
            with torch.no_grad() if course.no_grad else nullcontext(), autocast(course.autocast):
                tensors, _ = flatten(module(*inputs))
            found += [(f"output {i}", t.detach().clone()) for i, t in enumerate(tensors)]
            found += [(f"requires_grad of output {i}", torch.tensor(t.requires_grad)) for i, t in enumerate(tensors)]
            pending.append(tensors)
        _touch(course, owner)
        pick = random.Random(course.seed).randint
        for tensors in reversed(pending) if course.last_first else pending:
            found += _backward(course, owner, tensors, pick)
    found += [(f"gradient of {n}", copied(p.grad)) for n, p in owner.named_parameters()]
    found += [(f"gradient of input {i}", copied(x.grad)) for i, x in enumerate(leaves)]
    if course.learn:
        _learn(owner.parameters())
    found += [(f"parameter {n}", copied(p)) for n, p in owner.named_parameters()]
    found += [(f"buffer {n}", b.clone()) for n, b in owner.named_buffers()]
    found += [(f"unregistered {i}", t.clone()) for i, t in enumerate(unregistered(owner))]
    return [*found, ("generator state", torch.get_rng_state())]


def copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Its values now."""
    return None if tensor is None else tensor.detach().clone()


def _before(course: Course, owner: nn.Module) -> None:
    """Mode, freezing and cleared gradients; and the parameters get other values, other memory or are others."""
    if course.before == 1:
        owner.load_state_dict({n: t + _noise(t) if t.is_floating_point() else t for n, t in owner.state_dict().items()})
    elif course.before == 2:
        for parameter in owner.parameters():
            parameter.data = parameter.data.clone()
    elif course.before == 3:
        _replace_parameters(owner)
    elif course.before == 4:
        owner.double().float()
    elif course.before == 5:
        for tensor in unregistered(owner):
            tensor.add_(0.5)
    elif course.before == 6:
        for tensor in unregistered(owner):
            tensor.data = tensor.data + 0.25
    elif course.before == 7:
        for part in levelled(owner):
            part.factor, part.level = 1.5 - part.factor, part.level.clone()
    owner.train(course.training)
    for name, parameter in owner.named_parameters():
        parameter.requires_grad_(name not in course.frozen)
        if course.clear:
            parameter.grad = None


def _noise(tensor: torch.Tensor) -> torch.Tensor:
    return as_distributed(torch.randn(local_part(tensor).shape), tensor)


def _replace_parameters(owner: nn.Module) -> None:
    """New ones with the values of the old, shared where those are."""
    new: dict[nn.Parameter, nn.Parameter] = {}
    for module in owner.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in new:
                new[parameter] = nn.Parameter(parameter.detach().clone())
                new[parameter].grad = parameter.grad
            setattr(module, name, new[parameter])


@contextmanager
def _hooks(course: Course, owner: nn.Module) -> Iterator[None]:
    """Hooks of the parameters or of one submodule, for this step."""
    handles, trained = [], [p for p in owner.parameters() if p.requires_grad]
    inner = [m for m in owner.modules() if isinstance(m, nn.Linear)][:1]
    if course.hooks == 1:
        handles = [p.register_hook(lambda g: g * 1.5) for p in trained]
    elif course.hooks == 2:
        handles = [p.register_post_accumulate_grad_hook(lambda p: _learn([p], clear=True)) for p in trained]
    elif course.hooks == 3:
        handles = [p.register_post_accumulate_grad_hook(_clamp) for p in trained]
    elif course.hooks == 4:
        handles = [m.register_forward_hook(lambda m, args, out: out * 0.5) for m in inner]
    elif course.hooks == 5:
        handles = [m.register_full_backward_hook(_doubled) for m in inner]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def unsummed(owner: nn.Module) -> Iterator[None]:
    """As when gradients of several batches are accumulated; nothing where there is one process."""
    sharded: list[Any] = [m for m in owner.modules() if isinstance(m, FSDPModule)]
    for module in sharded:
        module.set_requires_gradient_sync(False, recurse=False)
    with owner.no_sync() if isinstance(owner, DistributedDataParallel) else nullcontext():
        yield
    for module in sharded:
        module.set_requires_gradient_sync(True, recurse=False)


def _doubled(_: nn.Module, inputs: Any, __: Any) -> Any:
    return tuple(None if g is None else g * 2 for g in inputs)


def _clamp(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.1, 0.1)


def _learn(parameters: Any, clear: bool = False) -> None:
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.sub_(0.01 * parameter.grad)
                parameter.grad = None if clear else parameter.grad


def autocast(on: bool) -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16) if on else nullcontext()


def _batch(sample: tuple[torch.Tensor, ...], course: Course) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Leaves with the sample's kind of numbers, with rows more in each, and the inputs that are made of them."""
    leaves = []
    for x in sample:
        more = torch.cat([x, *[x[:1]] * course.rows]).detach() if course.rows and x.dim() else x.detach().clone()
        if more.is_floating_point():
            more = more + torch.randn(more.shape) * 0.1
        floats = more.is_floating_point() and course.given == 5
        leaves.append(more.requires_grad_(x.requires_grad != floats))
    if course.given == 1:  # computed
        return leaves, [x * 1 for x in leaves]
    if course.given == 2:  # in other strides
        return leaves, [x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else x for x in leaves]
    if course.given == 3:  # parts of something larger
        return leaves, [torch.cat([x, x]).narrow(0, len(x), len(x)) if x.dim() else x for x in leaves]
    if course.given == 4:  # one tensor for all that are like it
        return leaves, [next(y for y in leaves if _looks(y) == _looks(x)) for x in leaves]
    return leaves, leaves


def _looks(x: torch.Tensor) -> Any:
    return x.dtype, x.shape, x.requires_grad


def _touch(course: Course, owner: nn.Module) -> None:
    """Something changes between forward and backward, which plain eager allows or refuses as it does."""
    if course.touched == 1:
        owner.train(not course.training)
    elif course.touched == 2:
        for buffer in owner.buffers():
            buffer.data = buffer.data.clone() + 1
    elif course.touched == 3:
        with torch.no_grad():
            for buffer in owner.buffers():
                buffer.add_(1)
    elif course.touched == 4:
        torch.manual_seed(course.seed + 1)
    elif course.touched == 5:
        for tensor in unregistered(owner):
            tensor.add_(0.5)


def _backward(course: Course, owner: nn.Module, tensors: list[torch.Tensor], pick: Pick) -> list[Any]:
    starts = [t for t in tensors if t.requires_grad and t.grad_fn is not None]
    if course.start == 0:
        starts = [t for t in starts if t.dim() == 0] or starts
    elif course.start == 2:
        starts = [t for t in starts if pick(0, 1)] or starts[-1:]
    if not starts:
        return []
    gradients = [_gradient(t, course.layout) for t in starts]
    found: list[Any] = []
    with autocast(course.autocast and course.inside):
        for last in (False, True) if course.twice else (True,):
            if course.asked:
                asked = [p for p in owner.parameters() if p.requires_grad]
                got = torch.autograd.grad(starts, asked, gradients, retain_graph=not last, allow_unused=True)
                found += [(f"asked gradient {i}", g) for i, g in enumerate(got)]
            else:
                torch.autograd.backward(starts, gradients, retain_graph=not last)
    return found


def _gradient(tensor: torch.Tensor, layout: int) -> torch.Tensor:
    """Random numbers in the tensor's strides, in others, in none (expanded), or as part of something larger."""
    drawn = torch.randn_like(tensor)
    if layout == 1 and tensor.dim() > 1:
        return drawn.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == 2:
        return torch.randn((), dtype=tensor.dtype).expand(tensor.shape)
    if layout == 3 and tensor.dim():
        return torch.cat([drawn, drawn], -1).narrow(-1, tensor.shape[-1], tensor.shape[-1])
    return drawn
