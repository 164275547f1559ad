"""What a step keeps, should its backward start elsewhere than planned: kept as no tensor wherever that can be.

A replay of the plain forward needs the generators' states and the buffers as they were. A generator is copied as a
generator and a counter as a Python number, which take nothing from the allocator whose peak is planned; an exported
step, which keeps nothing, so has the same peak.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

import torch


def copy_generator(device: str) -> torch.Generator | None:
    """A generator in the state of `device`'s default one, which is left as it is; None while a graph is captured."""
    if not device.startswith("cuda"):
        return torch.default_generator.clone_state()
    if torch.cuda.is_current_stream_capturing():  # no generator has a state then
        return None
    index = torch.device(device).index
    torch.cuda.init()
    generator: torch.Generator = torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]
    return generator.clone_state()


def is_counter(value: torch.Tensor, device: torch.device) -> bool:
    """Whether a buffer on `device` is kept as a Python number: one whole number on the CPU.

    Elsewhere reading it would wait for the device, and a fraction need not survive the way back in every dtype.
    """
    whole = value.dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    return whole and value.numel() == 1 and device.type == "cpu"


def old_value(primal: torch.Tensor) -> torch.Tensor | int:
    """What the primal holds now, out of reach of what overwrites it."""
    plain = type(primal) is torch.Tensor  # a subclass (a fake tensor) may have no number to give
    return int(primal.item()) if plain and is_counter(primal, primal.device) else primal.clone()


def as_tensor(value: torch.Tensor | int, primal: torch.Tensor) -> torch.Tensor:
    """Inverse of `old_value`: a tensor like `primal`."""
    return value if isinstance(value, torch.Tensor) else torch.full_like(primal, value)


DRAWS = "(hooks that draw random numbers)"  # among what was told; parameters have other names


class HookDraws:
    """Whether something draws random numbers between the nodes that hand over gradients: hooks of parameters do.

    They are called about in the order of eager, and where they draw, others get each number.

    Args:
        hooked: names of the parameters with hooks; of one alone the order does not matter.
        told: what was said before.
    """

    def __init__(self, hooked: Sequence[str], devices: Iterable[str], told: set[str]) -> None:
        self.hooked, self.devices, self.told = hooked, tuple(dict.fromkeys(("cpu", *devices))), told
        self.left: list[tuple[int, ...]] | None = None

    def leave(self) -> None:
        """Gradients are about to leave."""
        self.left = self._states()

    def look(self) -> None:
        """Say what has happened since they left."""
        left, self.left = self.left, None
        if left is None or DRAWS in self.told or left == self._states():
            return
        self.told.add(DRAWS)
        warnings.warn(
            f"random numbers are drawn while gradients leave the planned backward, by hooks of parameters "
            f"({self.hooked[0]} and {len(self.hooked) - 1} others have some). A planned step calls them about in the "
            "order of eager, not exactly in it, so that each draws other numbers than in the plain step. For the same "
            "ones draw from a generator for each parameter, or after backward().",
            stacklevel=2,
        )

    def _states(self) -> list[tuple[int, ...]]:
        generators = map(copy_generator, self.devices)
        return [_told_by(generator) for generator in generators if generator is not None]


def _told_by(generator: torch.Generator) -> tuple[int, ...]:
    """Numbers that tell a generator's state, which it may leave; its state itself would take a tensor's memory."""
    if generator.device.type == "cuda":
        return generator.initial_seed(), generator.get_offset()
    number = torch.frombuffer(bytearray(8), dtype=torch.int64)
    return (int(number.random_(generator=generator)),)
