"""What forward may not call, why, and what to do instead; and which calls those are."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import secrets
import sys
import types
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .._torch import TORCH_FOLDER, torch_settings
from ..errors import OnlyInEager, Unsupported
from ..run._torch import kernel_settings


@dataclass(frozen=True)
class Construct:
    """What may not be called in forward, why, and what to do instead."""

    what: str
    why: str
    remedy: str
    error: type[Unsupported] = Unsupported

    def at(self, place: str, named: str = "") -> Unsupported:
        """The refusal of one that was found there."""
        return self.error(self.what.replace("{}", named), place, self.why, self.remedy)


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
REDRAWN = Construct(
    "random numbers within a torch.utils.checkpoint with preserve_rng_state=False",
    "the plain step draws others when it recomputes in the backward, and a planned step draws once",
    "Leave preserve_rng_state out, or the checkpoint: the plan decides what is recomputed.",
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
RETAINED = Construct(
    "retain_grad() in forward",
    "a planned step keeps no gradients of what it computes on its way",
    "Return the tensor, and call retain_grad() on it after the call.",
)
ACCUMULATED = Construct(
    "a backward in forward that adds to gradients of parameters",
    "it runs while tracing, and the planned steps would not add them",
    "Add that loss to the one that forward returns, or leave this module to eager (regions=).",
)

LEAF = Construct(
    "a tensor that forward makes, has require a gradient, and returns or keeps",
    "its gradient would be left on it, and of a planned step it is an output",
    "Make it outside, and pass it as an argument; or return its detach().",
)

IDENTITY = Construct(
    "which tensor one is, in forward (id(), a set or dict of parameters)",
    "forward is traced with others in the places of parameters and buffers",
    "Keep what belongs to one under its name, or as an attribute of its module.",
)

OF_ARGUMENT = Construct(
    "an argument's requires_grad set in forward",
    "a planned step returns gradients to those arguments alone that required one when it was planned",
    "Set it before the call, or on a tensor of forward's own (x = x.detach().requires_grad_()).",
)

HISTORY = Construct(
    "what autograd knows of a tensor (is_leaf, grad_fn, _version, _base, hooks) in forward",
    "while tracing, inputs have another history, and versions count otherwise",
    "Ask outside forward, and pass the answer as an argument.",
)

MEMORY = Construct(
    "how a tensor lies in memory (storage_offset, untyped_storage, _is_view, is_conj, is_neg) in forward",
    "while tracing, inputs and parameters have memory of their own, and a plan is for others as well",
    "Ask outside forward, and pass the answer as an argument.",
)

NESTED = Construct(
    "a nested tensor, which nn.TransformerEncoder makes of a padded batch in eval mode without gradients,",
    "its shape depends on the data, which a trace does not have",
    "Build it with enable_nested_tensor=False, or call torch.backends.mha.set_fastpath_enabled(False) before planning "
    "and training.",
    OnlyInEager,
)

INFERENCE = Construct(
    "torch.inference_mode() in forward",
    "tensors made in it cannot be traced, and some kernels have other bits in it",
    "Use torch.no_grad(), or keep what runs in it out of the modules that are to be planned (regions=).",
    OnlyInEager,
)

FLUSHED = Construct(
    "torch.set_flush_denormal() in forward",
    "it would run once, while tracing, and not in the planned steps",
    "Call it before planning and training.",
    OnlyInEager,
)
BLOCK = Construct(
    "another setting of torch's ({}) in a part of forward than in the rest",
    "a planned step runs all its kernels under one",
    "Set it around planning and training, or keep that part out of the modules that are to be planned (regions=).",
    OnlyInEager,
)
CAST_WITHIN = Construct(
    "{}",
    "autocast may reach ops within its kernel, and a planned step runs kernels without autocast",
    "Put torch.autocast(device_type, enabled=False) around it and cast what it is given, or keep it in a submodule, "
    "which then runs in eager between regions (regions=).",
    OnlyInEager,
)

UNTRACKED = Construct(
    "tensor made under torch.inference_mode()",
    "torch does not count its changes, which a plan has to notice",
    "Make it under torch.no_grad(), or take a clone() outside of the block.",
)

LAZY = Construct(
    "the real or imaginary part of a tensor that is yet to be conjugated",
    "its memory holds other numbers, and a trace cannot tell",
    "Give its resolve_conj().",
)

COMPILED = Construct(
    "a function compiled by torch.compile in forward",
    "the compiler and the planner each want to trace its ops, and neither can look into what the other makes",
    'Call the function itself, or plan submodules that do not call it as regions (regions="auto", or patterns).',
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
    (os.path.join("_dynamo", "eval_frame.py"), "compile_wrapper"): COMPILED,
    **{("genericpath.py", n): OUTSIDE for n in ("exists", "isfile", "isdir", "getsize", "getmtime", "getctime")},
    **{("<frozen genericpath>", n): OUTSIDE for n in ("exists", "isfile", "isdir", "getsize", "getmtime", "getctime")},
    ("threading.py", "current_thread"): OUTSIDE,
}  # fmt: skip
ENVIRONMENT = type(os.environ).__getitem__.__code__
BETWEEN = frozenset({
    *_FILES, ENVIRONMENT.co_filename, Mapping.get.__code__.co_filename, _source(contextlib), _source(torch.random),
    os.path.join(TORCH_FOLDER, "_compile.py"), os.path.join(TORCH_FOLDER, "_dynamo", "eval_frame.py"),
})  # fmt: skip


@functools.lru_cache(maxsize=8192)
def python_call(code: types.CodeType) -> Construct | None:
    """What a function that is not the user's is, if the user's code is not to call it in forward."""
    path, name = code.co_filename, code.co_name
    return _FILES.get(path) or next((c for (file, n), c in _NAMED.items() if n == name and path.endswith(file)), None)


def is_generator(value: Any) -> bool:
    """Whether random numbers are drawn from it without torch: one of Python's or NumPy's."""
    return isinstance(value, random.Random) or type(value).__module__.startswith("numpy.random")


def of_builtin(function: Any) -> Construct | None:
    """What a C function is, if it is not to be called in forward."""
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if isinstance(owner, (torch.Tensor, torch.UntypedStorage)):
        return DATA if name in ("set_", "resize_", "resize_as_") else None
    if isinstance(owner, torch.Generator):
        return SEED
    if is_generator(owner):
        return DRAW
    if type(owner).__module__ == "_io":
        return OUTSIDE if name.startswith("read") else None
    holder = owner.__name__ if isinstance(owner, (types.ModuleType, type)) else ""
    full = f"{holder}.{name}"
    if name == "set_flush_denormal":
        return FLUSHED
    if full in _CLOCKS:
        return CLOCK
    if full in _ENTROPY:
        return DRAW
    return OUTSIDE if full in _OUTSIDE else None


def settings_of_kernels() -> dict[str, Any]:
    """What decides the bits of kernels, by name."""
    others = {"default dtype": torch.get_default_dtype(), "number of threads": torch.get_num_threads()}
    return {**kernel_settings(), **others}


def refuse_settings(before: Mapping[str, Any]) -> None:
    """Refuse a setting of torch's that the forward has changed and left so: a planned step would not set it."""
    now = torch_settings()
    if changed := next((name for name in before if before[name] != now[name]), None):
        raise Unsupported(
            "a setting of torch's changed in forward", f"{changed} ({before[changed]!r}, then {now[changed]!r})",
            "it would change once, while tracing, and not in the planned steps",
            "Set it outside, or undo it in forward (with torch.no_grad(), torch.autocast(...) and the like do).",
        )  # fmt: skip
