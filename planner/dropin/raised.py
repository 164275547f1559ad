"""What a call does whose planned forward raises: the plain one runs, and raises what eager raises, where it does.

So does a call that a spot check finds to compute something else.

A planned forward overwrites buffers at its end alone, and its generators are put back. So the plain forward starts as
in eager, and leaves buffers and generators as they are there when a training loop goes on to the next batch.
"""

from __future__ import annotations

import contextlib
import linecache
import signal
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from passes.ops import is_collective
from passes.printable import brief
from passes.run.step import OtherAnswer
from passes.trace.modules import module_path
from passes.trace.places import user_level
from planner.decided import Decided
from planner.units import show_bytes

from .apart import apart
from .fallback import Fallback
from .spot_check import OtherResult, say_other, spot_check


def run(
    planned: Decided, fallback: Fallback, primals: list[torch.Tensor], bound: Mapping[str, Any],
    plain: Callable[[], Any], sources: Sequence[torch.Tensor] | None = None,
) -> Any:  # fmt: skip
    """The planned step's output; that of `plain` where the planned forward raises and `plain` does not."""
    expected = fallback.expected = spot_check(planned, fallback, primals)
    try:
        output = planned.run(fallback.state.model, primals, apart(fallback), bound, sources)
        fallback.ran()
        return output
    except Exception as error:
        if error is not fallback.raised:
            raise
        if _is_of_a_signal(error):
            fallback.raised = None
            raise
        fallback.raised, met = None, _describe(planned, fallback.path, error)
        if hindrance := _hindrance(planned, error):
            before = f"this call{f' of {fallback.path}' if fallback.path else ''}"
            left = f"Buffers and random numbers are as before {before}; in eager some would have changed by then."
            _add(error, f"(It was raised {met}. {hindrance} {left})")
            raise error.with_traceback(None) from None  # its frames of generated code hold the step's tensors
        kind, said, other = type(error), f"{type(error).__name__}: {brief(error)}", str(error)
        fallback.expected = None
    try:
        output = plain()
    except Exception as own:
        if kind is OtherResult:
            fallback.state.differed(fallback.entry)
        if not issubclass(kind, OtherAnswer) and type(own) is not kind:
            _add(own, f"(The plain forward raised this; it ran because {said} was raised {met}.)")
        raise
    if kind is OtherResult and expected is not None:
        say_other(fallback, expected, other, expected.is_repeated(output, primals))
        return output
    of = f"region {fallback.path}" if fallback.path else "step"
    if kind is not OtherAnswer:
        other = f"{said} was raised {met}, and the plain forward, which ran in its place, does not raise it"
    # What was asked may be whether the planned forward can go on: an index that is too large, and clamped.
    asks = bool(planned.step.asked)
    more = "" if asks else " This call has the plain forward's numbers. Please report this."
    warnings.warn(f"planned {of} not used, not under the budget: {other}.{more}", stacklevel=user_level())
    if asks:
        fallback.strayed()
    return output


def _is_of_a_signal(error: Exception) -> bool:
    """Whether the handler of a signal raised it, which came while the planned forward ran: a limit of time, say."""
    handlers: Any = [signal.getsignal(number) for number in signal.valid_signals()]
    functions = [getattr(h, "func", h) for h in handlers if callable(h)]  # of a partial
    codes = {getattr(f if hasattr(f, "__code__") else type(f).__call__, "__code__", None) for f in functions}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def _hindrance(planned: Decided, error: Exception) -> str:
    """Why the plain forward cannot run after the planned one."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error):
        return f"The plan predicts a peak of {show_bytes(planned.peak_bytes)}, and the plain forward may need more."
    if any(map(is_collective, planned.prepared.traced.graph_module.graph.nodes)):
        return "The plain forward would call its collectives a second time, and other ranks may have gone on."
    with contextlib.suppress(RuntimeError):  # which torch raises from now on where a kernel has failed
        if planned.prepared.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "The CUDA graph that is captured would hold both forwards."
    return ""


def _describe(planned: Decided, within: str, error: Exception) -> str:
    """Which op of the planned forward raised, and the module that it is from."""
    code = getattr(planned.step.forward.forward, "__code__", None)
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code is code]
    if code is None or not lines:
        return "in the planned forward"
    name = linecache.getline(code.co_filename, lines[0]).strip().partition(" ")[0].rstrip(":")
    node = next((n for n in planned.rewritten.forward.graph.nodes if n.name == name), None)
    path = ".".join(filter(None, (within, module_path(node))))
    what = f"by {name}" if node is None else f"by {name} ({node.target})"
    return f"{what}{f' of {path}' if path else ''} in the planned forward"


def _add(error: Exception, text: str) -> None:
    """Add to an error's message, where it has one."""
    if error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]} {text}", *error.args[1:])
