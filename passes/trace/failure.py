"""Why a model could not be traced: the user's file and line, the reason, and what to do."""

from __future__ import annotations

import linecache
import os
import re
import sys
import traceback
from typing import Any

from torch.overrides import TorchFunctionMode

from .._torch import TORCH_FOLDER
from ..errors import CaptureError, ForwardFailed
from .places import is_users_file, place, place_at, user_frame

_REMEDIES = {
    "nn": "",
    "distributions": "Pass validate_args=False to the distribution.",
    "ao": "Quantize by FusedMovingAvgObsFakeQuantize, or plan once the ranges are fixed (disable_observer).",
}
_LAYERS = {os.path.join(TORCH_FOLDER, part, ""): remedy for part, remedy in _REMEDIES.items()}


def capture_error(error: BaseException) -> CaptureError:
    stack = traceback.extract_tb(error.__traceback__)
    layers = [f for f in stack if f.filename.startswith(tuple(_LAYERS))]
    torchs = [f for f in layers if not f.filename.endswith(os.sep + "module.py")]
    frames = [f for f in stack if is_users_file(os.path.abspath(f.filename))] or torchs
    location = construct = None
    if frames:
        last = frames[-1]
        location = f"{last.filename}:{last.lineno}"
        construct = linecache.getline(last.filename, last.lineno or 0).strip()
    kind = type(error).__name__
    explained = _explain(kind, str(error))
    own = f"{kind}: {_first_line(str(error)).rstrip('.') or kind}.", "Check that the model runs on the sample."
    if 'missing the required "forward"' in str(error):
        own = own[0], "Give it one, or plan the modules that its methods call: a plan is for a forward."
    reason, remedy = explained or own
    found = CaptureError if explained else ForwardFailed
    where = f" at {location}: `{construct}`" if location else ""
    below = [f for f in torchs if stack.index(f) > stack.index(frames[-1])]
    if below and explained:
        where += f", in torch's own code ({place_at(below[-1].filename, below[-1].lineno or 0)})"
    if explained and (below := torchs if frames is torchs else below):
        remedy = next(own for folder, own in _LAYERS.items() if below[-1].filename.startswith(folder)) or remedy
    return found(f"cannot trace the model{where}. {reason} {remedy}", location=location, construct=construct)


_VALUE_NEEDED = (
    "The value of a tensor is needed in Python here (.item(), bool(), an `if` on data).",
    "A plan holds for every batch, so the branch must not depend on data: use torch.where, or move it out of forward.",
)


def value_needed(where: str) -> CaptureError:
    """The error for a place (`file:line `source``) where the value of a tensor is needed."""
    return _error_at(where, *_VALUE_NEEDED)


def _error_at(where: str, reason: str, remedy: str) -> CaptureError:
    location, _, construct = where.partition(" `")
    said = f"cannot trace the model at {location}: `{construct}. {reason} {remedy}"
    return CaptureError(said, location=location, construct=construct.removesuffix("`"))


class Failures(TorchFunctionMode):
    """Notes what a trace cannot do while forward runs: where forward catches the exception, eager goes another way."""

    def __init__(self) -> None:
        super().__init__()
        self.first: CaptureError | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            explained = _explain(type(error).__name__, str(error))
            if explained is not None and self.first is None:
                self.first = _error_at(place(user_frame(sys._getframe(1))), *explained)
            raise

    def check(self) -> None:
        """Raise what was noted.

        Raises:
            CaptureError: something was.
        """
        if self.first is not None:
            raise self.first


def _explain(kind: str, text: str) -> tuple[str, str] | None:
    """Why torch cannot trace it, and what to do; None where the error is likely to be the forward's own."""
    if kind in ("DataDependentOutputException", "GuardOnDataDependentSymNode"):
        return _VALUE_NEEDED
    if "data is not allocated yet" in text:
        return (
            "The value of a tensor is needed here to know a shape or a position (torch.tensor_split by a tensor).",
            "Give it as Python numbers, as `tensor_split(x, [1, 2])` does: a plan holds for every batch.",
        )
    if "Cannot access data pointer" in text:
        return (
            "The address of a tensor's memory is needed here (data_ptr), which a trace does not have; on a GPU cuDNN's "
            "recurrent layers ask for those of their weights.",
            "Do without it. Such a layer can be left in eager by planning the submodules beside it (regions=), or "
            "planned under torch.backends.cudnn.flags(enabled=False), in which training has to be, too.",
        )
    if "mutating a non-functional tensor" in text:
        return (
            "A tensor that the model does not register, or a buffer in a backward hook, is changed in place here, "
            "and a plan would take it as constant.",
            "Register it: self.register_buffer(name, tensor, persistent=False); make a loss function that has buffers "
            "a part of the model; change a buffer in forward, or after the backward.",
        )
    if kind == "DynamicOutputShapeException":
        return (
            "The shape of this result depends on data (nonzero, boolean indexing, unique).",
            "Use a mask with torch.where, or a fixed capacity.",
        )
    if "_nested_" in text or "shape_env must not be None" in text:  # with lists of tensors, and with lengths
        return "A nested tensor is made here, whose shape depends on the data.", "Use a padded tensor and a mask."
    if "with_effects" in text:
        return (
            "A call of torch.distributed without a functional form (dist.reduce, scatter, send, barrier, "
            "reduce_scatter of a list), or another op with effects besides its results, runs here, and cannot be "
            "traced.",
            "Call it between the submodules that are to be planned: by regions it runs in eager there. all_reduce, "
            "all_gather, reduce_scatter_tensor, all_to_all_single and broadcast are planned.",
        )
    if "HigherOrderOperator auto_functionalized" in text:
        return (
            "A custom op changes its arguments here (mutates_args), which is not known to the trace.",
            "Let it return what it computes.",
        )
    if found := re.search(r"HigherOrderOperator (\w+)", text):
        return (
            f"The higher-order op {found[1]} runs ops here that a trace does not see.",
            "Write it as ordinary ops (flex_attention -> scaled_dot_product_attention, cond -> torch.where), or keep "
            "it out of the model.",
        )
    if "set the storage of a tensor" in text:
        return (
            "A tensor is given its own memory here (`set_`, or objects that ranks exchange, which are pickled).",
            "Do it before forward, or between the submodules that are to be planned, where it runs in eager.",
        )
    if "fake impl" in text or kind == "UnsupportedOperatorException":
        return (
            f"The custom op has no fake kernel, so its result's shape is not known here ({_first_line(text)}).",
            "Add one with register_fake (torch.library.register_fake).",
        )
    if "no autograd formula" in text:
        return f"{_first_line(text)}.", "Add one with register_autograd (torch.library.register_autograd)."
    if "Sparse" in text:
        return (
            f"A sparse tensor is made or read here, whose memory depends on the data ({_first_line(text)}).",
            "Use dense tensors, or keep this part out of the planned module.",
        )
    if "numpy" in text.lower():
        return "The tensor is turned into a numpy array here.", "Use torch functions instead."
    return None


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].rstrip(". ")
