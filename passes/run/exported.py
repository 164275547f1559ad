"""Runs an exported training step. Copied into the folder as `runtime.py`; it needs torch and safetensors.

`forward.py` and `backward.py` beside it hold the two halves as source, `spec.json` the call signature, the structure
of inputs and outputs and the module tree, `weights.safetensors` parameters and buffers.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from ._torch import DEFAULTS, TORCH_VERSION, Autocast, active_autocast, active_saving_hooks, torch_defaults
from .arena import SPACERS
from .errors import PlannerError as ExportError
from .step import Step, refuse_transform
from .structures import build, signature_of, take
from .tensors import meeting, places_of
from .tree import Tree

Half = Callable[[list[Any], dict[str, torch.Tensor]], Any]
Answers = Callable[[list[torch.Tensor]], tuple[bool, ...]]


# The module -----------------------------------------------------------------------------------------------------------


# Where a module keeps what is ours: parameters, buffers and submodules may have any name without a dot.
STEP = "planned.step"
# What the spec holds of the `Step`.
STEP_FIELDS = ("mutated", "num_outputs", "saved_primals", "differentiable", "expected", "tangent_strides",
               "hold_outputs", "leaves", "arrivals", "reads", "sums", "views", "names", "arena", "again",
               "draws", "uncounted", "casts", "readers", "output_names", "asked")


@dataclass
class _Exported:
    """What an exported module runs.

    Attributes:
        tree: the modules, which keep parameters and buffers.
        constants: tensors that the halves read and that belong to no module.
        noticed_hooks: whether hooks on saved tensors were told of.
    """

    spec: dict[str, Any]
    halves: tuple[Half, Half]
    answers: Answers
    tree: Tree
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    noticed_hooks: bool = False

    def run(self, primals: list[torch.Tensor]) -> tuple[Any, ...]:
        """The step's outputs."""
        forward, backward = (_Bound(half, self.constants) for half in self.halves)
        known: dict[str, Any] = {name: _tuples(self.spec[name]) for name in STEP_FIELDS}
        starts = tuple(leaf["path"] or "the output" for leaf in self.spec["outputs_at"] if leaf["differentiated"])
        autocast = _autocast(self.spec["backward_autocast"])
        SPACERS.growth, SPACERS.workspaces = self.spec["spacers"]
        return Step(forward, backward, starts=starts, autocast=autocast, spacers=SPACERS, **known)(primals, None)

    def notice_hooks(self) -> None:
        """Say once that hooks on saved tensors have no effect here."""
        if self.noticed_hooks or not (owner := active_saving_hooks()):
            return
        self.noticed_hooks = True
        warnings.warn(
            f"an exported step is called under {owner}, which saves no memory there: the step holds its saved tensors "
            "itself, and gradients are those without these hooks. Leave the wrapper out (torch.utils.checkpoint would "
            "also run the planned forward a second time), or export a plan of the module that contains this one.",
            stacklevel=6,
        )

    def check(self, primals: list[torch.Tensor]) -> None:
        expected = [*self.spec["state"], *self.spec["input_tensors"]]
        for tensor, entry in zip(primals, expected, strict=True):
            got = {**_described(tensor), "stride": list(tensor.stride())}
            for key in ("shape", "dtype", "requires_grad", "stride", "device"):
                if got[key] != entry[key]:
                    raise ExportError(f"{entry['name']}: {key} is {got[key]}, the step was planned for {entry[key]}.")
        for i, j in meeting(primals, places_of(primals), self.spec["mutated"]):
            raise ExportError(
                f"{expected[i]['name']}, which the step changes, shares memory with {expected[j]['name']}, as it did "
                "not when the step was planned: pass or register a clone()."
            )
        try:
            answers = list(self.answers(primals))
        except Exception as error:  # an index out of range, say
            raise ExportError(f"the model's questions about its inputs and buffers fail on these: {error}") from error
        if repr(answers) != repr(self.spec["answers"]):  # tells 0.0 from -0.0; nan is nan
            raise ExportError(
                f"the inputs and buffers answer the model's questions {answers}, the sample {self.spec['answers']}."
            )
        active, planned = active_autocast(), _autocast(self.spec["autocast"])
        if active != planned:
            raise ExportError(f"autocast is {active}, the step was planned under {planned}.")
        now = plain_defaults(torch_defaults())
        for name, then in self.spec["defaults"].items():
            if now[name] != then:
                raise ExportError(
                    f"torch's {name} is {now[name]}, the step was planned under {then}: set it so around the call, or "
                    "plan the original model under this one and export it again."
                )


def plain_defaults(values: Iterable[Any]) -> dict[str, Any]:
    """Torch's settings as plain JSON, in the order of `DEFAULTS`; of a device its kind."""
    plain = (value if isinstance(value, bool) else str(value).partition(":")[0] for value in values)
    return dict(zip(DEFAULTS, plain, strict=True))


def _autocast(described: list[list[str]]) -> Autocast:
    return tuple((kind, getattr(torch, name)) for kind, name in described)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class _Bound:
    """A half with the constants that it reads."""

    half: Half
    constants: dict[str, torch.Tensor]

    def forward(self, values: list[torch.Tensor]) -> Any:
        return self.half(values, self.constants)


class Part(nn.Module):
    """A submodule of the exported module: it holds parameters and buffers under their old names, and no code."""


class ExportedModule(nn.Module):
    """The planned training step: the original model's call signature, parameter names and state_dict keys.

    It holds the *training* step only: `eval()` and `torch.no_grad()` raise. Evaluate with the original model and
    this module's state_dict.
    """

    def __init__(
        self, spec: dict[str, Any], tensors: dict[str, torch.Tensor], halves: tuple[Half, Half], answers: Answers
    ) -> None:
        super().__init__()
        state = [_make(entry, tensors.get(entry["name"])) for entry in spec["state"]]
        parts: dict[str, nn.Module] = {}
        for described in spec["modules"]:
            path = described["path"]
            same_as = described["same_as"]
            part = parts[same_as] if same_as is not None else (Part() if path else self)
            parts[path] = part
            if path:
                parent, _, name = path.rpartition(".")
                parts[parent]._modules[name] = part
            if same_as is None:
                _fill(part, described, state)
        self.__dict__[STEP] = _Exported(spec, halves, answers, Tree(self, spec))

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One planned training step's forward; call `backward` on the loss as usual.

        Raises:
            ExportError: under `eval()`, `no_grad` or other settings of torch than planned for, for inputs of other
                shapes, or where its modules are not what was loaded.
        """
        if not (self.training and torch.is_grad_enabled()):
            raise ExportError(
                "this folder holds the training step only, so it does not run under eval() or no_grad(): evaluate with "
                "the original model and this module's state_dict()."
            )
        step: _Exported = self.__dict__[STEP]
        step.tree.check()
        step.notice_hooks()
        bound = signature_of(step.spec).bind(*args, **kwargs).arguments
        inputs: dict[int, torch.Tensor] = {}
        take(step.spec["inputs"], dict(bound), "", inputs)
        primals = [*step.tree.state(), *(inputs[i] for i in range(len(step.spec["input_tensors"])))]
        refuse_transform(primals)
        step.check(primals)
        results = step.run(primals)
        places = step.spec["outputs_at"]
        leaves = [primals[o["input"]] if o["input"] is not None else results[o["index"]] for o in places]
        for path, name, index in step.spec["replaced"]:
            self.get_submodule(path)._buffers[name] = leaves[index]
        return build(step.spec["outputs"], leaves)

    def __prepare_scriptable__(self) -> Any:
        """Refuse `torch.jit.script`, which asks for this."""
        raise ExportError("torch.jit.script cannot look into an exported step: give it the original model.")

    def extra_repr(self) -> str:
        spec = self.__dict__[STEP].spec
        return f"planned training step of {spec['class']}, {len(spec['state'])} parameters and buffers"


def load(
    folder: str | Path, halves: tuple[Half, Half], answers: Answers, device: str | None = None
) -> ExportedModule:
    """The drop-in module of an exported folder, with the weights that lie in it, in the modes that were planned for."""
    root = Path(folder)
    try:
        spec = json.loads((root / "spec.json").read_text(encoding="utf-8"))
        if not isinstance(spec, dict) or spec.get("digest") != digest(spec):
            raise ValueError("spec.json is not what was exported")
        where = _with_data(device or spec["device"])
        tensors = load_file(root / "weights.safetensors", device=where)
        constants = load_file(root / "constants.safetensors", device=where) if spec["constants"] else {}
    except (OSError, ValueError, SafetensorError) as error:
        raise ExportError(f"{root} is damaged: {error}. Export it again.") from error
    _warn_of_version(spec["torch"])
    module = ExportedModule(spec, tensors, halves, answers)
    step: _Exported = module.__dict__[STEP]
    step.constants.update({e["name"]: _make(e, constants.get(e["name"])) for e in spec["constants"]})
    return module


def _with_data(device: str) -> str:
    try:
        usable = not torch.empty(1, device=device).is_meta
    except (RuntimeError, AssertionError) as error:  # no such device here, or torch was built without it
        raise ExportError(f"device {device!r} cannot be used here: {str(error).partition(chr(10))[0]}") from error
    if not usable:
        raise ExportError("device 'meta' has no data, and an exported step runs on the weights of its folder.")
    return device


def digest(spec: dict[str, Any]) -> str:
    """Of all that a spec says besides this: an edit by hand would change numbers without a word."""
    said = {key: value for key, value in spec.items() if key != "digest"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _warn_of_version(exported: str) -> None:
    then, now = (version.partition("+")[0] for version in (exported, TORCH_VERSION))
    if then != now:
        warnings.warn(
            f"exported with torch {then}, and this is torch {now}: its kernels may give other bits, and need other "
            "memory, than was planned for. Export the plan again with this version.",
            stacklevel=4,
        )


def _make(entry: dict[str, Any], data: torch.Tensor | None) -> torch.Tensor:
    """A tensor in the memory layout that was planned for (channels last stays channels last, expanded expanded)."""
    shape, stride = entry["shape"], entry["stride"]
    if data is None or list(data.shape) != shape:
        got = "nothing" if data is None else f"shape {list(data.shape)}"
        raise ExportError(f"{entry['name']}: the folder's file has {got}, the step was planned for shape {shape}.")
    once = [min(size, 1) if step == 0 else size for size, step in zip(shape, stride, strict=True)]
    with torch.no_grad():
        tensor = torch.empty_strided(shape, stride, dtype=data.dtype, device=data.device)
        tensor.as_strided(once, stride).copy_(data[tuple(map(slice, once))])
    kind = entry.get("kind", "constant")
    return nn.Parameter(tensor, requires_grad=entry["requires_grad"]) if kind == "parameter" else tensor


def _fill(part: nn.Module, described: dict[str, Any], state: list[torch.Tensor]) -> None:
    """Into the dicts themselves, which take any name that the original took."""
    part._version, part.training = described["version"], described["training"] is not False
    for name, index in described["parameters"]:
        part._parameters[name] = None if index is None else cast("nn.Parameter", state[index])
    for name, index, persistent in described["buffers"]:
        part._buffers[name] = None if index is None else state[index]
        if not persistent:
            part._non_persistent_buffers_set.add(name)


def _described(tensor: torch.Tensor) -> dict[str, Any]:
    return {
        "shape": list(tensor.shape), "dtype": str(tensor.dtype), "requires_grad": tensor.requires_grad,
        "device": tensor.device.type,
    }  # fmt: skip
