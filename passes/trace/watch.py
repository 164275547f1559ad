"""Calls in forward whose answer another step would not get: seeds, Python's and NumPy's randomness, clocks, files.

A profile function sees each call that the user's code makes, C functions included. It is off while torch works
(a function mode knows when), so it costs little. `constructs` lists the calls.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode

from .._torch import NESTED_FROM_MASK, TORCH_FOLDER, custom_op, pytree
from ..errors import Unsupported
from .constructs import (
    BETWEEN,
    BLOCK,
    CAST_WITHIN,
    DATA,
    ENVIRONMENT,
    GRADIENT,
    HISTORY,
    INFERENCE,
    MEMORY,
    NESTED,
    OF_ARGUMENT,
    REDRAWN,
    REENTRANT,
    RETAINED,
    SAVED,
    TYPES,
    Construct,
    of_builtin,
    python_call,
    settings_of_kernels,
)
from .drawn import Drawn
from .places import (
    compares_types_of_tensors,
    is_users,
    is_users_code,
    is_users_file,
    is_users_own,
    place,
    place_at,
    user_frame,
)
from .routes import may_be_cast


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
        held: the containers that its globals name, as they were before it ran, and their lengths then.
        checkpoints: per call of `torch.utils.checkpoint` in which buffers changed, its place and their names.
        drawn: a mode for the block, which counts what draws.
    """

    def __init__(
        self, updates: Callable[[], dict[str, Any]] = dict, given: Iterable[torch.Tensor] = (),
        inputs: Sequence[torch.Tensor] = (),
    ) -> None:  # fmt: skip
        super().__init__()
        self.given = frozenset(map(id, given))
        self.inputs, self.plain_inputs = (
            frozenset(id(tensor) for tensor in inputs if tensor.requires_grad is wanted) for wanted in (True, False)
        )
        given_to = self.inputs | self.plain_inputs
        self.history = (self.inputs, ("is_leaf", "grad_fn")), (given_to, ("grad",)), (given_to | self.given, _OF_ALL)
        self.codes: dict[types.CodeType, None] = {}
        self.error: Unsupported | None = None
        self.held: dict[int, tuple[Any, int]] = {}
        self._before: Any = None
        self._running = self.custom_backward = False
        self.notes: tuple[str, ...] = ()
        self.updates, self.checkpoints = updates, list[tuple[str, tuple[str, ...]]]()
        self.drawn, self.settings = Drawn(), settings_of_kernels()
        self._open: list[tuple[types.FrameType, str, dict[str, Any], int]] = []

    @property
    def has_checkpoints(self) -> bool:
        """Whether `torch.utils.checkpoint` ran, which runs its part of the forward once more."""
        return CHECKPOINTED in self.notes

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
        cut_short = error[1] is not None and not isinstance(error[1], Exception)  # by Ctrl-C, say
        if refused is not None and not cut_short:
            raise refused  # also where the forward caught it

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sys.setprofile(None)
        try:
            caller = sys._getframe(1)
            self._refuse_kernels_of(func, args, caller)
            if _sets(func, "data"):
                if _lie_alike(*args):  # what `x.data *= mask` does last
                    return None
                self._refuse(DATA, user_frame(caller))
            elif args and id(args[0]) in self.given and _is_gradient(func) and _asks_for_gradients(caller.f_code):
                self._refuse(GRADIENT, user_frame(caller))
            elif func is NESTED_FROM_MASK:
                self._refuse(NESTED, user_frame(caller))
            elif is_users_file(caller.f_code.co_filename) and args:
                if func is torch.Tensor.retain_grad and not args[0].is_leaf:
                    self._refuse(RETAINED, caller)
                sets = func is torch.Tensor.requires_grad_ or _sets(func, "requires_grad")
                if sets and id(args[0]) in self.plain_inputs:
                    self._refuse(OF_ARGUMENT, caller)
                if sets and id(args[0]) in self.given:
                    self._refuse(GRADIENT, caller)
                history = [name for ids, names in self.history if id(args[0]) in ids for name in names]
                if _sets(func, "_version", "__get__") or any(_sets(func, name, "__get__") for name in history):
                    self._refuse(HISTORY, caller)
                if history and getattr(func, "__name__", "") in _OF_MEMORY:
                    self._refuse(MEMORY, caller)
            return func(*args, **(kwargs or {}))
        finally:
            sys.setprofile(self._event)

    def _event(self, frame: types.FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "c_call":
            self.custom_backward |= _is_custom_function(arg)
            if (code.co_filename in BETWEEN or is_users_file(code.co_filename)) and (found := of_builtin(arg)):
                self._refuse(found, _caller(frame))
        elif event == "call":
            if code in self.codes:
                return
            if is_users_code(frame):
                self.codes[code] = None
                self._note_containers(frame)
                if line := compares_types_of_tensors(code):
                    self.error = TYPES.at(place_at(code.co_filename, line))
                    raise self.error
            elif python_call(code) is not None or code in _WATCHED:
                self._python_call(frame, code)
        elif event == "return" and self._open and self._open[-1][0] is frame:
            _, where, before, drawn = self._open.pop()
            changed = tuple(name for name, value in self.updates().items() if value != before.get(name))
            if changed:
                self.checkpoints.append((where, changed))
            if self.drawn.count != drawn and _draws_anew(frame):
                self.error = REDRAWN.at(where)

    def _note_containers(self, frame: types.FrameType) -> None:
        named: Iterable[Any] = map(frame.f_globals.get, frame.f_code.co_names)
        for value in named:
            if type(value) in (dict, list, set):
                self.held.setdefault(id(value), (value, len(value)))

    @property
    def fills_containers(self) -> bool:
        """Whether containers that globals name hold more now, or less: a library has remembered something."""
        return any(len(container) != length for container, length in self.held.values())

    def _python_call(self, frame: types.FrameType, code: types.CodeType) -> None:
        caller = _caller(frame.f_back)
        if found := python_call(code):
            self._refuse(found, caller)
        elif code is ENVIRONMENT and caller is not None and is_users_own(caller.f_code):
            self.notes += (f"forward reads the environment at {place(caller)}: its value while planning counts",)
        elif code is _REENTRANT and any(getattr(a, "requires_grad", False) for a in frame.f_locals["args"]):
            self._refuse(REENTRANT, user_frame(frame))
        elif code is _SAVED and not _keeps_values(frame.f_locals["self"]):
            self._refuse(SAVED, caller)
        elif code is _CHECKPOINT:
            self.notes += (CHECKPOINTED,)
            self._open.append((frame, place(user_frame(frame)), self.updates(), self.drawn.count))

    def _refuse(self, found: Construct, frame: types.FrameType | None, named: str = "") -> None:
        if frame is not None:
            self.error = found.at(place(frame), named)
            raise self.error

    def _refuse_kernels_of(self, func: Any, args: Any, frame: types.FrameType) -> None:
        """Refuse a call whose kernels run otherwise in eager than in a planned step."""
        if torch.is_inference_mode_enabled():
            self._refuse(INFERENCE, user_frame(frame))
        if (now := settings_of_kernels()) != self.settings:
            self._refuse(BLOCK, user_frame(frame), next(k for k in now if now[k] != self.settings[k]))
        if (name := custom_op(func)) and may_be_cast(pytree.tree_leaves(args)):
            self._refuse(CAST_WITHIN, user_frame(frame), f"a custom op under autocast ({name})")


def _code_of(function: Any) -> types.CodeType:
    code: types.CodeType = getattr(function, "__wrapped__", function).__code__
    return code


# What a trace's own tensors answer otherwise, or other calls' do, and no plan is for.
_OF_ALL = ("_backward_hooks", "_post_accumulate_grad_hooks", "_base", "output_nr", "retains_grad")
_OF_MEMORY = frozenset({"storage_offset", "untyped_storage", "_is_view", "is_conj", "is_neg"})
CHECKPOINTED = (
    "forward uses torch.utils.checkpoint: the plan decides in its place, and the peak without recompute, of which a "
    "budget in % is a share, is that of the step without it"
)
_CHECKPOINT = _code_of(torch.utils.checkpoint.checkpoint)
_REENTRANT = _code_of(torch.utils.checkpoint.CheckpointFunction.forward)


_SAVED = _code_of(torch.autograd.graph.saved_tensors_hooks.__enter__)
_WATCHED = frozenset({ENVIRONMENT, _CHECKPOINT, _REENTRANT, _SAVED})


def _keeps_values(hooks: torch.autograd.graph.saved_tensors_hooks) -> bool:
    """Whether these are torch's own (`save_on_cpu`, those of a checkpoint), which give back what they were given."""
    kind = type(hooks)
    return kind is not torch.autograd.graph.saved_tensors_hooks and kind.__module__.partition(".")[0] == "torch"


def _draws_anew(checkpoint: types.FrameType) -> bool:
    """Whether what `torch.utils.checkpoint` recomputes in the backward draws other random numbers."""
    named = checkpoint.f_locals  # with `preserve`, which it takes from its `kwargs`
    return not named.get("preserve", named.get("preserve_rng_state", True)) and torch.is_grad_enabled()


def _sets(func: Any, name: str, accessor: str = "__set__") -> bool:
    """Whether a function is what assigns (or reads) this attribute of a tensor."""
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    return attribute == name and getattr(func, "__name__", "") == accessor


def _lie_alike(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same items of the same memory."""

    def place(t: torch.Tensor) -> tuple[Any, ...]:
        return t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype

    return tensor.layout is other.layout is torch.strided and place(tensor) == place(other)


def _asks_for_gradients(code: types.CodeType) -> bool:
    """Whether code is the user's, or torch's that the user calls for that: `zero_grad`, `clip_grad_norm_`."""
    of_torch = code.co_filename.startswith(TORCH_FOLDER) and code.co_name != "_apply"  # of Module.to()
    return of_torch or is_users_file(code.co_filename)


def _is_gradient(func: Any) -> bool:
    """Whether a function reads or sets a tensor's gradient."""
    return _sets(func, "grad") or _sets(func, "grad", "__get__")


def _caller(frame: types.FrameType | None) -> types.FrameType | None:
    """The user's frame that makes the call, directly or through a function made for it; None for other callers."""
    while frame is not None and frame.f_code.co_filename in BETWEEN:
        frame = frame.f_back
    return frame if frame is not None and is_users_file(frame.f_code.co_filename) else None
