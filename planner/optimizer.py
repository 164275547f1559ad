"""What an optimizer needs of the budget: its state, and what `step()` holds for a moment.

`step()` comes once for all parameters after the backward, or for one parameter after another in hooks of the backward
that consume the gradients. Both are measured by stepping stand-ins of the parameters, on the model's device, so that
torch takes the implementation (for-loop, foreach, fused) that it takes in training. Stand-ins have the parameters' own
shapes where these are few elements, and are shrunk by one factor where not: what is measured is then scaled up again.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from passes._torch import optimizer_hooks_aside
from passes.allocator import GRANULE
from passes.errors import Unsupported
from passes.memory import granule, measure_peak, round_up
from passes.printable import brief
from solvers.errors import BudgetError

MAX_ELEMENTS = 1 << 22  # of all stand-ins together
LINEAR = 1.02
SIDE = 256  # of the matrices that show how memory grows with a parameter's size

Groups = list[tuple[dict[str, Any], list[nn.Parameter]]]


@dataclass(frozen=True)
class Update:
    """What updating the parameters needs.

    Attributes:
        state_bytes: the optimizer's state, resident throughout.
        step_bytes: the highest point of `step()` above what is resident, while no activation is.
        hook_bytes: by the parameter's name, the highest point of a `step()` for it alone, in a hook of the backward.
    """

    state_bytes: int = 0
    step_bytes: int = 0
    hook_bytes: dict[str, int] = field(default_factory=dict)


NO_UPDATE = Update()


def measure_update(optimizer: Any, model: nn.Module, device: torch.device, *, in_hooks: bool = False) -> Update:
    """What `optimizer` needs for the parameters of `model` that require a gradient.

    Args:
        optimizer: an instance (its own groups and settings are used), or a class or function that makes one from a
            list of parameters; None needs nothing.
        device: where the model is, or will be.
        in_hooks: whether each parameter is updated alone, as soon as its gradient is there.

    Raises:
        BudgetError: it is not an optimizer, or what it needs cannot be measured; says what to do.
    """
    if optimizer is None:
        return NO_UPDATE
    inner = getattr(optimizer, "optimizer", None)  # what a trainer's wrapper wraps
    optimizer = inner if isinstance(inner, torch.optim.Optimizer) else optimizer
    if not callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        raise BudgetError(
            f"optimizer={brief(optimizer)} is not an optimizer: pass an instance, a class such as torch.optim.AdamW, "
            "or set reserve_mb to the MiB that its state needs."
        )
    groups = _groups(optimizer, [p for p in model.parameters() if p.requires_grad])
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            found = _measure(optimizer, groups, device)
            return Update(found.state_bytes, 0, _apart(optimizer, groups, model, device)) if in_hooks else found
    except Unsupported:  # a profiler that runs, of which planning needs one
        raise
    except Exception as error:
        raise BudgetError(
            f"what {_name(optimizer)} needs cannot be measured ({brief(error, 300)}): leave optimizer= out (say "
            "optimizer=None in a trainer's PlanCallback), and set reserve_mb to the MiB of its state and of what its "
            "step() holds for a moment."
        ) from error


def _name(optimizer: Any) -> str:
    kind = type(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    return brief(getattr(kind, "__name__", type(kind).__name__))


def _groups(optimizer: Any, parameters: list[nn.Parameter]) -> Groups:
    """The model's parameters as the optimizer has them; all in one group where it has none of them."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return [({}, parameters)] if parameters else []
    known = set(map(id, parameters))
    groups = [
        ({k: v for k, v in g.items() if k != "params"}, [p for p in g["params"] if id(p) in known])
        for g in optimizer.param_groups
    ]  # fmt: skip
    held = [(options, own) for options, own in groups if own]
    return held or [({**optimizer.defaults, **groups[0][0]}, parameters)]


def _measure(optimizer: Any, groups: Groups, device: torch.device) -> Update:
    total = sum(p.numel() for _, own in groups for p in own)
    if total <= MAX_ELEMENTS:
        return _step(optimizer, groups, device, lambda p: tuple(p.shape))
    _check_linear(optimizer, groups, device)
    factor = -(-total // MAX_ELEMENTS)
    return _step(optimizer, groups, device, lambda p: _shrunk(tuple(p.shape), factor))


def _apart(optimizer: Any, groups: Groups, model: nn.Module, device: torch.device) -> dict[str, int]:
    """What updating each parameter alone holds for a moment; equal ones are measured once."""
    names = {id(p): name for name, p in model.named_parameters()}
    known: dict[Any, int] = {}
    found = {}
    for place, (options, own) in enumerate(groups):
        for p in own:
            key = place, tuple(p.shape), p.dtype
            if key not in known:
                known[key] = _measure(optimizer, [(options, [p])], device).step_bytes
            found[names[id(p)]] = known[key]
    return {name: size for name, size in found.items() if size}


def _check_linear(optimizer: Any, groups: Groups, device: torch.device) -> None:
    """Refuse to scale what grows faster than the number of elements: of two sizes, the larger needs more of each."""
    kinds = [(o, list({(p.dtype, p.dim() > 1): p for p in own}.values())) for o, own in groups]
    seen = []
    for rows in (SIDE // 2, SIDE):
        own = [(o, [_stand_in(p, _sides(p, rows), device) for p in parameters]) for o, parameters in kinds]
        found = _step(optimizer, own, device, lambda p: tuple(p.shape))
        seen.append((found.state_bytes, found.step_bytes))
    if any(large > LINEAR * 2 * small for small, large in zip(*seen, strict=True)):
        raise ValueError("it grows faster than the number of a parameter's elements, so it cannot be scaled up")


def _sides(parameter: nn.Parameter, rows: int) -> tuple[int, ...]:
    return (rows, SIDE) if parameter.dim() > 1 else (rows * SIDE,)


def _shrunk(shape: tuple[int, ...], factor: int) -> tuple[int, ...]:
    """About one `factor`-th of the elements, taken from the longest sides."""
    sides = list(shape)
    while factor > 1 and max(sides, default=1) > 1:
        i = max(range(len(sides)), key=sides.__getitem__)
        part = min(factor, sides[i])
        sides[i] = -(-sides[i] // part)
        factor = -(-factor // part)
    return tuple(sides)


def _step(
    optimizer: Any, groups: Groups, device: torch.device, shape: Callable[[nn.Parameter], tuple[int, ...]]
) -> Update:
    """Step stand-ins of these shapes twice: the first makes the state, the second's temporaries are measured."""
    made = [(options, [_stand_in(p, shape(p), device) for p in own]) for options, own in groups]
    twin = _twin(optimizer, made)
    kind: Any = type(twin)
    with optimizer_hooks_aside():
        kind.step(twin)
        peak = measure_peak(lambda: kind.step(twin), device)
    states = {id(each.state): each.state for each in (twin, *(inner for _, inner in _inside(twin)))}.values()
    real, small = ([p for _, own in each for p in own] for each in (groups, made))
    elements = [max(1, sum(p.numel() for p in each)) for each in (real, small)]
    ratio: dict[Any, float] = {s: p.numel() / max(1, s.numel()) for p, s in zip(real, small, strict=True)}
    state = [
        round_up(math.ceil(t.nbytes() * (ratio.get(key, 1.0) if t.nbytes() > _SCALAR else 1)), granule(device))
        for each in states for key, held in each.items() for t in _storages(held, device)
    ]  # fmt: skip
    return Update(sum(state), math.ceil(peak * elements[0] / elements[1]))


def _stand_in(parameter: nn.Parameter, shape: tuple[int, ...], device: torch.device) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype, device=device))
    made.grad = torch.ones_like(made)
    return made


def _twin(optimizer: Any, groups: Groups) -> torch.optim.Optimizer:
    """An optimizer of the same kind and settings over stand-ins; nothing that it does reaches the user's own."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        parameters = [p for _, own in groups for p in own]
        try:
            return optimizer(parameters)
        except TypeError:
            return optimizer(parameters, lr=1e-3)
    for name, inner in _inside(optimizer):
        raise ValueError(f"its {name} is another optimizer, {_name(inner)}, with the model's own parameters")
    twin = object.__new__(type(optimizer))
    twin.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})  # a scheduler's is bound to it
    twin.__dict__.update(_optimizer_step_pre_hooks=OrderedDict(), _optimizer_step_post_hooks=OrderedDict())
    twin.state = defaultdict(dict)
    twin.param_groups = [{**options, "params": own} for options, own in groups]
    return twin


def _inside(optimizer: Any) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """Other optimizers that this one holds, with the attribute: Lookahead and its like step them."""
    for name, value in vars(optimizer).items():
        held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
        yield from ((name, each) for each in held if isinstance(each, torch.optim.Optimizer))


def _storages(held: Any, device: torch.device) -> list[torch.UntypedStorage]:
    """The storages that a parameter's state has on the device."""
    found = {t.data_ptr(): t for t in map(torch.Tensor.untyped_storage, _tensors(held)) if t.device.type == device.type}
    return list(found.values())


def _tensors(held: Any) -> Iterator[torch.Tensor]:
    if isinstance(held, torch.Tensor) and hasattr(held, "__tensor_flatten__"):
        held = [getattr(held, name) for name in held.__tensor_flatten__()[0]]
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, (dict, list, tuple)):
        for value in held.values() if isinstance(held, dict) else held:
            yield from _tensors(value)


_SCALAR = 8  # bytes: a step counter does not grow with its parameter


def state_sizes(state_bytes: int, gradient_bytes: Sequence[int]) -> tuple[int, ...]:
    """The blocks that an optimizer's state is made of: for each parameter, as many of its size as there is room for."""
    total = sum(gradient_bytes)
    if not total:
        return (state_bytes,) if state_bytes else ()
    copies = state_bytes // total
    rest = state_bytes - copies * total
    parts = [g for g in gradient_bytes for _ in range(copies) if g]
    left = [g * rest // total // GRANULE * GRANULE for g in gradient_bytes]
    return tuple(size for size in (*parts, *left, rest - sum(left)) if size)
