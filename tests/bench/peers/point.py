"""One measured point, as it is kept in the results file: a line of JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

LIBRARIES = ("torch", "transformers", "monai", "diffusers", "highspy", "checkpoint-planner")
ROUNDING = 1e-4  # of single precision through a deep model, as a share of a tensor's largest number


@dataclass
class Point:
    """One method at one setting on one model. Bytes, FLOPs and seconds are of one training step.

    Attributes:
        model, method, setting: which; `ours` has the peer's label it was given the peak of as its setting.
        error: why there is no measurement, in the peer's own words; None when there is one.
        budget_bytes, predicted_bytes, floor_bytes: ours alone: asked for, promised, and (with the minimum) proved to be
            below every schedule's peak.
        activation_bytes: highest point of what is neither parameter, buffer, input nor gradient.
        seconds, ratio: median step time, and over plain eager's; measured interleaved.
        planning_seconds: capturing, compiling or solving, beyond the step itself.
        different: what is not bitwise equal to plain eager's (loss, outputs, gradients, buffers, generator state).
        difference: the largest of them, as a share of its tensor's largest number.
        run: when the model's measurement began, UTC; the same for all its points.
        overhead, bound: ours alone: predicted recompute over the step's cost, and the proved lower bound.
    """

    model: str
    method: str
    setting: str = ""
    error: str | None = None
    note: str = ""
    budget_bytes: int | None = None
    predicted_bytes: int | None = None
    floor_bytes: int | None = None
    peak_bytes: int = 0
    parameter_bytes: int = 0
    buffer_bytes: int = 0
    input_bytes: int = 0
    gradient_bytes: int = 0
    activation_bytes: int = 0
    flops: int = 0
    moved_bytes: int = 0
    seconds: float | None = None
    ratio: float | None = None
    planning_seconds: float = 0.0
    different: tuple[str, ...] = ()
    difference: float = 0.0
    overhead: float | None = None
    bound: float | None = None
    status: str = ""
    solver: str = ""
    run: str = ""
    versions: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.method} {self.setting}".strip()

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def correct(self) -> bool:
        """The plain step's numbers, except for rounding."""
        return self.ok and self.difference <= ROUNDING


def versions() -> dict[str, Any]:
    """What a result depends on besides the code."""
    found: dict[str, Any] = {"python": platform.python_version(), "machine": platform.machine()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return {**found, "threads": torch.get_num_threads(), "cores": os.cpu_count()}


def write(path: Path, points: Iterable[Point], *, append: bool = False) -> None:
    """One line per point."""
    with path.open("a" if append else "w") as file:
        file.writelines(json.dumps(asdict(p), sort_keys=True) + "\n" for p in points)


def read(path: Path) -> list[Point]:
    """The points of each model's latest run in a results file."""
    found: dict[str, list[Point]] = {}
    for line in path.read_text().splitlines():
        values = json.loads(line)
        point = Point(**{**values, "different": tuple(values["different"])})
        own = found.setdefault(point.model, [])
        if own and own[-1].run != point.run:
            own.clear()
        own.append(point)
    return [p for own in found.values() for p in own]
