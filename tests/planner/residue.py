"""What a call may leave behind, looked at before and after; and interrupts at chosen lines of our own code."""

from __future__ import annotations

import ast
import logging
import random
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

ROOT = Path(__file__).resolve().parents[2]
OWN = tuple(str(ROOT / folder) for folder in ("planner", "passes", "solvers"))


def children() -> list[int]:
    """Processes that this one started and did not reap (Linux)."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has ended since
            found += [int(p) for p in (task / "children").read_text().split()]
    return found


def state(model: nn.Module) -> dict[str, Any]:
    """Everything global, and everything of `model`, that a plan must not change."""
    aten = torch.ops.aten
    modules = list(model.named_modules())
    return {
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
        "generators": (torch.get_rng_state().tolist(), random.getstate()),
        "threads": sorted(t.name for t in threading.enumerate() if t.is_alive()),
        "children": children(),
        "temporary files": sorted(p.name for p in Path(tempfile.gettempdir()).iterdir()),
        "global hooks": [len(getattr(module_hooks, n)) for n in dir(module_hooks) if n.startswith("_global_")
                         and hasattr(getattr(module_hooks, n), "__len__")],
        "patches": (torch.is_anomaly_enabled(), nn.Module.__call__, nn.Module.__getattr__,
                    torch.random.default_generator, logging.getLogger("torch._subclasses.fake_tensor").level,
                    signal.getsignal(signal.SIGINT)),
        "dispatch": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
        "kernels": sum(len(getattr(getattr(aten, n), o).py_kernels) for n in sorted(aten) for o in getattr(aten, n)),
        "compiling": (torch.compiler.is_compiling(), torch.compiler.is_exporting()),
        "saving hooks": torch._C._autograd._top_saved_tensors_default_hooks(False),
        "warnings": len(warnings.filters),
        "flags": [(n, m.training) for n, m in modules],
        "attributes": [(n, sorted(m.__dict__)) for n, m in modules],
        "hooks": [(n, len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for n, m in modules],
        "tensors": [(n, id(t), t._version, t.requires_grad, t.grad is None, type(t).__name__)
                    for n, t in (*model.named_parameters(), *model.named_buffers())],
    }  # fmt: skip


def left_behind(model: nn.Module, before: dict[str, Any]) -> list[str]:
    """Names of what differs from `before`."""
    after = state(model)
    return [name for name, value in before.items() if after[name] != value]


Place = tuple[str, int]


class Lines:
    """Notes executed lines of our own files, and raises at one of them.

    Args:
        at: how many lines to let pass before raising, or the file and line to raise at; None only takes notes.
        among: what the paths of the files begin with.
    """

    def __init__(self, at: int | Place | None, raised: Callable[[], BaseException], among: tuple[str, ...]) -> None:
        self.at, self.raised, self.among, self.count = at, raised, among, 0
        self.places: dict[Place, None] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self.among) or _is_cleaning(frame.f_back):
            return None
        return self.line

    def line(self, frame: FrameType, event: str, _: Any) -> Any:
        place = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and place[1] not in _cleaning(place[0]):
            if self.at in (place, self.count):
                sys.settrace(None)
                raise self.raised()
            self.places[place] = None
            self.count += 1
        return self.line


@contextmanager
def interrupted(
    at: int | Place | None, raised: Callable[[], BaseException] = KeyboardInterrupt, among: tuple[str, ...] = OWN
) -> Iterator[Lines]:
    """Raise at a line of our own code, in the main thread."""
    lines = Lines(at, raised, among)
    before = sys.gettrace()
    sys.settrace(lines)
    try:
        yield lines
    finally:
        sys.settrace(before)


def _is_cleaning(frame: FrameType | None) -> bool:
    """Whether a frame, or one that called it, is at a line that cleans up."""
    while frame is not None:
        if frame.f_lineno in _cleaning(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


@cache
def _cleaning(path: str) -> frozenset[int]:
    """Lines that clean up (`finally`, `except`): no code survives an interrupt of its own cleaning up."""
    found: set[int] = set()
    if not path.startswith(OWN):
        return frozenset()
    for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Try):
            for part in (*node.finalbody, *(s for h in node.handlers for s in (h, *h.body))):
                found.update(range(part.lineno, (part.end_lineno or part.lineno) + 1))
    return frozenset(found)
