"""Finding a model's repeated blocks without knowing the model, and checkpointing them as their users do.

A block is a submodule that sits beside others in a list (`ModuleList`, `Sequential`, `ModuleDict`) or right under
the model. What a user would call "the blocks" is a matter of taste, so several choices are offered and the benchmark
keeps the one that serves the peer best.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from passes.trace.arguments import split_sample
from passes.trace.structure import flatten

Forward = Callable[..., Any]
CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class Blocks:
    """One choice of blocks.

    Attributes:
        label: what they are, for the table.
        names: qualified names, in the order in which the forward calls them.
        runs: stretches of `names` in which each block is fed by the one before.
    """

    label: str
    names: tuple[str, ...]
    runs: tuple[tuple[str, ...], ...]

    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The runs cut into about sqrt(n) segments of equal length (Chen et al. 2016)."""
        size = math.ceil(len(self.names) / max(1, round(math.sqrt(len(self.names)))))
        return tuple(run[i : i + size] for run in self.runs for i in range(0, len(run), size))


def find_blocks(model: nn.Module, sample: Any) -> list[Blocks]:
    """Every choice of blocks that the forward really calls one after another."""
    found: dict[tuple[str, ...], Blocks] = {}
    for label, names in _candidates(model):
        blocks = _called(model, sample, label, names)
        if len(blocks.names) > 1:
            found.setdefault(blocks.names, blocks)
    return list(found.values())


def _candidates(model: nn.Module) -> Iterator[tuple[str, list[str]]]:
    listed = {f"{n}.{k}".lstrip("."): c for n, m in model.named_modules() if isinstance(m, CONTAINERS)
              for k, c in m.named_children()}  # fmt: skip
    whole = {n: m for n, m in listed.items() if any(True for _ in m.children()) and not isinstance(m, CONTAINERS)}
    for kind in dict.fromkeys(type(m) for m in whole.values()):
        names = _outermost([n for n, m in whole.items() if type(m) is kind])
        yield f"{len(names)} {kind.__name__}", names
    outer = _outermost(list(whole))
    yield f"{len(outer)} listed", outer
    for prefix, parent in ((n, m) for n, m in model.named_modules() if n.count(".") == 0 and m in _trunks(model)):
        names = [f"{prefix}.{k}".lstrip(".") for k, c in parent.named_children() if any(True for _ in c.parameters())]
        yield f"{len(names)} children", names


def _trunks(model: nn.Module) -> list[nn.Module]:
    """The model, and the child that holds most of its parameters (the base model under a head)."""
    def size(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    largest = max(model.children(), key=size, default=model)
    return [model, largest] if size(largest) * 2 > size(model) else [model]


def _outermost(names: Sequence[str]) -> list[str]:
    known = frozenset(names)
    parents = {n: [".".join(n.split(".")[:i]) for i in range(1, n.count(".") + 1)] for n in names}
    return [n for n in names if known.isdisjoint(parents[n])]


def _called(model: nn.Module, sample: Any, label: str, names: Sequence[str]) -> Blocks:
    """Watch one forward of a copy: which blocks run, in which order, and which feeds which."""
    twin = copy.deepcopy(model)
    calls: list[tuple[str, torch.Tensor | None, torch.Tensor | None]] = []

    def watch(name: str) -> Callable[..., None]:
        return lambda _, args, kwargs, output: calls.append((name, _first(args, kwargs), _first(output)))

    for name in names:
        twin.get_submodule(name).register_forward_hook(watch(name), with_kwargs=True)
    args, kwargs = split_sample(sample)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        twin(*args, **kwargs)
    order = [name for name, _, _ in calls]
    once = [c for c in calls if order.count(c[0]) == 1]
    runs: list[list[str]] = []
    fed: torch.Tensor | None = None
    for name, taken, given in once:
        if fed is not None and taken is fed:
            runs[-1].append(name)
        else:
            runs.append([name])
        fed = given
    return Blocks(label, tuple(name for name, _, _ in once), tuple(map(tuple, runs)))


def _first(*values: Any) -> torch.Tensor | None:
    tensors, _ = flatten(values)
    return tensors[0] if tensors else None


def checkpoint_each(model: nn.Module, blocks: Blocks, **options: Any) -> None:
    """Checkpoint every block of `model` by itself (`torch.utils.checkpoint`, non-reentrant), in place."""
    for name in blocks.names:
        block = model.get_submodule(name)
        block.forward = _checkpointed(block.forward, options)


def checkpoint_groups(model: nn.Module, blocks: Blocks) -> None:
    """Checkpoint stretches of about sqrt(n) blocks as one, in place.

    The first block of a stretch runs all of it; the others then hand through what they are given, so the model's own
    loop over its blocks stays as it is.
    """
    for group in blocks.groups():
        modules = [model.get_submodule(name) for name in group]
        stretch = _Stretch([m.forward for m in modules])
        modules[0].forward = _checkpointed(stretch.run, {}, stretch.remember)
        for module in modules[1:]:
            module.forward = stretch.hand_through


def _checkpointed(forward: Forward, options: dict[str, Any], then: Callable[[Any], None] | None = None) -> Forward:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        output = checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)
        if then is not None:
            then(output)
        return output

    return run


class _Stretch:
    def __init__(self, forwards: Sequence[Forward]) -> None:
        self.forwards = forwards
        self.rest: tuple[Any, ...] | None = None

    def run(self, *args: Any, **kwargs: Any) -> Any:
        output = self.forwards[0](*args, **kwargs)
        for forward in self.forwards[1:]:
            args, kwargs = _replace_first(args, kwargs, output[0] if isinstance(output, tuple) else output)
            output = forward(*args, **kwargs)
        return output

    def remember(self, output: Any) -> None:
        self.rest = output[1:] if isinstance(output, tuple) else None

    def hand_through(self, *args: Any, **kwargs: Any) -> Any:
        x = _first(args, kwargs)
        return x if self.rest is None else (x, *self.rest)


def _replace_first(args: tuple[Any, ...], kwargs: dict[str, Any], x: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    for i, a in enumerate(args):
        if isinstance(a, torch.Tensor):
            return (*args[:i], x, *args[i + 1 :]), kwargs
    name = next(k for k, v in kwargs.items() if isinstance(v, torch.Tensor))
    return args, {**kwargs, name: x}
