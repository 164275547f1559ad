"""Calls in forward whose answer another step would not get: seeds, Python's and NumPy's randomness, clocks, files.

A profile function sees each call that the user's code makes, C functions included. It is off while torch works
(a function mode knows when), so it costs little.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import secrets
import sys
import types
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode

from .._torch import TORCH_FOLDER
from ..errors import Unsupported
from .places import (
    compares_types_of_tensors,
    is_users,
    is_users_file,
    is_users_own,
    place,
    place_at,
    user_frame,
)


@dataclass(frozen=True)
class Construct:
    """What may not be called in forward, why, and what to do instead."""

    what: str
    why: str
    remedy: str


SEED = Construct(
    "control of a random generator in forward",
    "it would run once, while tracing, and not in the planned steps",
    "Seed or fork outside the model, or pass the random tensor as an argument.",
)
DRAW = Construct(
    "Python's or NumPy's randomness in forward",
    "its outcome while tracing would be that of every planned step",
    "Draw with torch (torch.rand, torch.where), pass the value as an argument, or switch it off (layer drop: 0).",
)
CLOCK = Construct(
    "a clock read in forward",
    "the time of tracing would be that of every planned step",
    "Read it outside forward and pass it as an argument, or measure around the call.",
)
OUTSIDE = Construct(
    "something read from outside the program in forward",
    "what is read while tracing would be what every planned step uses",
    "Read it outside forward and pass it as an argument.",
)
REENTRANT = Construct(
    "a reentrant torch.utils.checkpoint",
    "its backward runs the forward's Python again, which cannot be traced",
    "Pass use_reentrant=False, or leave the checkpoint out: the plan decides what is recomputed.",
)
DATA = Construct(
    "a tensor's data replaced in forward",
    "the assignment would run once, while tracing, and not in the planned steps",
    "Change the tensor in place (copy_, under no_grad), or assign the attribute of a buffer.",
)

KEPT = Construct(
    "tensor kept outside the model's outputs",
    "a planned step would not put one there",
    "Return it from forward, in a tuple, list, dict or dataclass.",
)
TYPES = Construct(
    "the exact type of a tensor in forward",
    "while tracing, tensors and parameters are of other classes, and the comparison would go the other way",
    "Use isinstance.",
)
SAVED = Construct(
    "hooks on saved tensors in forward",
    "a planned step keeps its tensors itself, so the hooks would not change what the backward reads",
    "Leave them out (the plan decides what is kept), or put them around submodules of their own.",
)
GRADIENT = Construct(
    "a parameter's .grad or requires_grad in forward",
    "it is what tracing found, and the planned steps neither read nor set it",
    "Read and set it outside forward, between the steps.",
)

HISTORY = Construct(
    "what autograd knows of a tensor (is_leaf, grad_fn, _version) in forward",
    "while tracing, inputs have another history, and versions count otherwise",
    "Ask outside forward, and pass the answer as an argument.",
)

_CLOCKS = frozenset(
    [f"time.{n}" for n in ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns",
                           "process_time", "process_time_ns", "thread_time", "thread_time_ns", "localtime", "gmtime",
                           "ctime", "asctime", "strftime", "clock_gettime", "clock_gettime_ns")]
    + ["datetime.now", "datetime.utcnow", "datetime.today", "date.today"]
)  # fmt: skip
_OUTSIDE = frozenset(
    ["io.open", "_io.open", "builtins.open", "builtins.input", "_thread.get_ident", "_thread.get_native_id"]
    + [f"{m}.{n}" for m in ("posix", "nt") for n in ("getpid", "getppid", "listdir", "stat", "scandir", "getloadavg",
                                                    "times", "read")]
)  # fmt: skip
_ENTROPY = frozenset(f"{m}.{n}" for m in ("posix", "nt") for n in ("urandom", "getrandom"))


def _source(module: Any) -> str:
    return str(getattr(module, "__file__", ""))


# Python files whose functions are such calls; and those whose frames stand between the user's code and the call.
_FILES: dict[str, Construct] = {_source(m): DRAW for m in (random, secrets, uuid)}
_CUDA_SEEDS = (torch.cuda.random, torch.mps, torch.xpu.random)
_FILES |= {_source(m): SEED for m in _CUDA_SEEDS}
_NAMED: dict[tuple[str, str], Construct] = {
    (_source(sys.modules["torch.serialization"]), "load"): OUTSIDE,
    **{(f"pathlib{s}", n): OUTSIDE for s in (".py", "/__init__.py", "/_local.py") for n in ("read_text", "read_bytes",
                                                                                       "open", "stat", "exists")},
    ("subprocess.py", "run"): OUTSIDE,
    **{("genericpath.py", n): OUTSIDE for n in ("exists", "isfile", "isdir", "getsize", "getmtime", "getctime")},
    **{("<frozen genericpath>", n): OUTSIDE for n in ("exists", "isfile", "isdir", "getsize", "getmtime", "getctime")},
    ("threading.py", "current_thread"): OUTSIDE,
}  # fmt: skip
_ENVIRONMENT = type(os.environ).__getitem__.__code__
_BETWEEN = frozenset({
    *_FILES, _ENVIRONMENT.co_filename, Mapping.get.__code__.co_filename, _source(contextlib), _source(torch.random),
    os.path.join(TORCH_FOLDER, "_compile.py"), os.path.join(TORCH_FOLDER, "_dynamo", "eval_frame.py"),
})  # fmt: skip


@functools.lru_cache(maxsize=8192)
def _python_call(code: types.CodeType) -> Construct | None:
    """What a function that is not the user's is, if the user's code is not to call it in forward."""
    path, name = code.co_filename, code.co_name
    return _FILES.get(path) or next((c for (file, n), c in _NAMED.items() if n == name and path.endswith(file)), None)


@functools.lru_cache(maxsize=4096)
def _calls_matter(path: str) -> bool:
    return path in _BETWEEN or is_users_file(path)


def _of_builtin(function: Any) -> Construct | None:
    """What a C function is, if it is not to be called in forward."""
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if isinstance(owner, torch.Tensor):
        return DATA if name in ("set_", "resize_", "resize_as_") else None
    if isinstance(owner, torch.Generator):
        return SEED
    if isinstance(owner, random.Random):
        return DRAW
    if type(owner).__module__.startswith("numpy.random"):
        return DRAW
    if type(owner).__module__ == "_io":
        return OUTSIDE if name.startswith("read") else None
    holder = owner.__name__ if isinstance(owner, (types.ModuleType, type)) else ""
    full = f"{holder}.{name}"
    if full in _CLOCKS:
        return CLOCK
    if full in _ENTROPY:
        return DRAW
    return OUTSIDE if full in _OUTSIDE else None


def _is_custom_function(function: Any) -> bool:
    """Whether a C function is the `apply` of the user's `autograd.Function`."""
    if getattr(function, "__name__", "") != "apply":
        return False
    owner = getattr(function, "__self__", None)
    return isinstance(owner, type) and issubclass(owner, torch.autograd.Function) and is_users(owner.forward)


class Watch(TorchFunctionMode):
    """Refuses such calls while the forward runs in the block; notes whose code ran.

    Attributes:
        notes: what the plan takes as given, in words.
        custom_backward: whether a custom `autograd.Function` ran.
        codes: the user's code objects that ran.
        checkpoints: per call of `torch.utils.checkpoint` in which buffers changed, its place and their names.
    """

    def __init__(
        self, updates: Callable[[], dict[str, Any]] = dict, given: Iterable[torch.Tensor] = (),
        inputs: Iterable[torch.Tensor] = (),
    ) -> None:  # fmt: skip
        super().__init__()
        self.given = frozenset(map(id, given))
        self.inputs = frozenset(id(tensor) for tensor in inputs if tensor.requires_grad)
        self.codes: dict[types.CodeType, None] = {}
        self.error: Unsupported | None = None
        self._before: Any = None
        self._running = self.custom_backward = False
        self.notes: tuple[str, ...] = ()
        self.updates, self.checkpoints = updates, list[tuple[str, tuple[str, ...]]]()
        self._open: list[tuple[types.FrameType, str, dict[str, Any]]] = []

    def start(self) -> None:
        """Watch from here on, whatever runs; nothing if it does."""
        if self._running:
            return
        self._before, self._running = sys.getprofile(), True
        sys.setprofile(self._event)

    def stop(self) -> None:
        """Undo `start`; nothing if it was undone."""
        if not self._running:
            return
        self._running = False
        sys.setprofile(None)
        if hasattr(self._before, "enable"):  # cProfile
            self._before.enable()
        elif self._before is not None:
            sys.setprofile(self._before)

    def __enter__(self) -> Any:
        try:
            self.start()
            return super().__enter__()
        except BaseException:  # an interrupt in between
            self.stop()
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            refused = self.error
        finally:
            self.stop()
            super().__exit__(*error)
        if refused is not None and not isinstance(error[1], KeyboardInterrupt):
            raise refused  # also where the forward caught it

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sys.setprofile(None)
        try:
            caller = sys._getframe(1)
            if _sets(func, "data"):
                self._refuse(DATA, user_frame(caller))
            elif is_users_file(caller.f_code.co_filename) and args:
                if id(args[0]) in self.given and _flags(func):
                    self._refuse(GRADIENT, caller)
                history = ("is_leaf", "grad_fn", "_version") if id(args[0]) in self.inputs else ("_version",)
                if any(_sets(func, name, "__get__") for name in history):
                    self._refuse(HISTORY, caller)
            return func(*args, **(kwargs or {}))
        finally:
            sys.setprofile(self._event)

    def _event(self, frame: types.FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "c_call":
            self.custom_backward |= _is_custom_function(arg)
            if _calls_matter(code.co_filename) and (found := _of_builtin(arg)):
                self._refuse(found, _caller(frame))
        elif event == "call":
            if code in self.codes:
                return
            if is_users_file(code.co_filename):
                self.codes[code] = None
                if line := compares_types_of_tensors(code):
                    self.error = Unsupported(TYPES.what, place_at(code.co_filename, line), TYPES.why, TYPES.remedy)
                    raise self.error
            elif _python_call(code) is not None or code in _WATCHED:
                self._python_call(frame, code)
        elif event == "return" and self._open and self._open[-1][0] is frame:
            _, where, before = self._open.pop()
            changed = tuple(name for name, value in self.updates().items() if value != before.get(name))
            if changed:
                self.checkpoints.append((where, changed))

    def _python_call(self, frame: types.FrameType, code: types.CodeType) -> None:
        caller = _caller(frame.f_back)
        if found := _python_call(code):
            self._refuse(found, caller)
        elif code is _ENVIRONMENT and caller is not None and is_users_own(caller.f_code):
            self.notes += (f"forward reads the environment at {place(caller)}: its value while planning counts",)
        elif code is _REENTRANT and any(getattr(a, "requires_grad", False) for a in frame.f_locals["args"]):
            self._refuse(REENTRANT, user_frame(frame))
        elif code is _SAVED and not _keeps_values(frame.f_locals["self"]):
            self._refuse(SAVED, caller)
        elif code is _CHECKPOINT:
            self._open.append((frame, place(user_frame(frame)), self.updates()))

    def _refuse(self, found: Construct, frame: types.FrameType | None) -> None:
        if frame is not None:
            self.error = Unsupported(found.what, place(frame), found.why, found.remedy)
            raise self.error


def _code_of(function: Any) -> types.CodeType:
    code: types.CodeType = getattr(function, "__wrapped__", function).__code__
    return code


_CHECKPOINT = _code_of(torch.utils.checkpoint.checkpoint)
_REENTRANT = _code_of(torch.utils.checkpoint.CheckpointFunction.forward)


_SAVED = _code_of(torch.autograd.graph.saved_tensors_hooks.__enter__)
_WATCHED = frozenset({_ENVIRONMENT, _CHECKPOINT, _REENTRANT, _SAVED})


def _keeps_values(hooks: torch.autograd.graph.saved_tensors_hooks) -> bool:
    """Whether these are torch's own (`save_on_cpu`, those of a checkpoint), which give back what they were given."""
    kind = type(hooks)
    return kind is not torch.autograd.graph.saved_tensors_hooks and kind.__module__.partition(".")[0] == "torch"


def _sets(func: Any, name: str, accessor: str = "__set__") -> bool:
    """Whether a function is what assigns (or reads) this attribute of a tensor."""
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    return attribute == name and getattr(func, "__name__", "") == accessor


def _flags(func: Any) -> bool:
    """Whether a function reads or sets a tensor's gradient, or sets whether it requires one."""
    return (
        func is torch.Tensor.requires_grad_
        or _sets(func, "requires_grad")
        or _sets(func, "grad")
        or _sets(func, "grad", "__get__")
    )


def _caller(frame: types.FrameType | None) -> types.FrameType | None:
    """The user's frame that makes the call, directly or through a function made for it; None for other callers."""
    while frame is not None and frame.f_code.co_filename in _BETWEEN:
        frame = frame.f_back
    return frame if frame is not None and is_users_file(frame.f_code.co_filename) else None
