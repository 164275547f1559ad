"""`plan.export(folder)`: the planned step as a folder of readable source and weights that runs with torch alone."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import fx, nn

from passes.codegen import spaced_in
from passes.printable import brief, few
from passes.run import (
    _torch,
    arena,
    arrivals,
    exported,
    exported_errors,
    gradients,
    kernels,
    listeners,
    mixing,
    random,
    replay,
    stale,
    step,
    structures,
    tensors,
    tree,
)
from passes.trace.arguments import state_tensors
from passes.trace.capture import Traced
from passes.trace.carried import STATE
from passes.trace.matching import Differs
from passes.trace.refuse import is_quantized_weight
from planner.decided import Decided
from planner.dropin.cache import PlanState
from planner.dropin.module import PlannedModule
from planner.files.atomic import as_path, new_folder
from planner.files.fingerprint import describe_value
from planner.show.words import verdict
from solvers.errors import MIB, PlannerError

from .source import Half, docstring, identifier, write_guard, write_half
from .spec import spec_of

# Files of a folder that are ours, word for word.
COPIED = {
    "runtime.py": exported, "errors.py": exported_errors, "step.py": step, "replay.py": replay, "random.py": random,
    "kernels.py": kernels, "tensors.py": tensors, "gradients.py": gradients, "mixing.py": mixing, "arena.py": arena,
    "structures.py": structures, "tree.py": tree, "stale.py": stale, "listeners.py": listeners, "_torch.py": _torch,
    "arrivals.py": arrivals,
}  # fmt: skip
INIT = '''{doc}

from pathlib import Path

from .backward import backward
from .forward import forward
from .guard import answers
from .runtime import ExportedModule, ExportError
from .runtime import load as _load

__all__ = ["ExportError", "ExportedModule", "backward", "forward", "load"]


def load(device: str | None = None) -> ExportedModule:
    """The drop-in module with the weights of this folder, ready to train."""
    return _load(Path(__file__).parent, (forward, backward), answers, device)
'''


def export(plan: Decided, module: PlannedModule, path: str | os.PathLike[str]) -> Path:
    """Write `plan` as an importable folder; it appears complete or not at all.

    Raises:
        PlannerError: the folder exists and is not empty, an op is not torch's own, the weights have no data, or an
            input cannot be described without the model's library.
    """
    if plan.runs:
        raise PlannerError(
            "a plan by regions cannot be exported: between its regions the model's own code runs, which a folder "
            "without the model's library does not have. Export a plan made with "
            'regions="whole", or share the plan itself: plan.save(...), and Plan.load beside the model.'
        )
    state = module._plan_state
    _refuse_quantized(state.model)
    with state.after_first_call():
        _refuse_changed(state, plan.prepared.traced)
        if changes := plan.prepared.traced.changes:
            what = "" if changes[0].place.steps[0][1] == STATE else "its argument "
            raise PlannerError(
                f"forward changes {what}{changes[0]}, which an export does not do: return what it leaves there, and "
                "take as an argument what it finds."
            )
        if settings := [str(s) for s in plan.prepared.traced.settings if not s.is_buffer(state.model)]:
            said = f"forward sets {few(settings)}, which an export, that has no such module, will not set."
            warnings.warn(said, stacklevel=3)
        registered = {name for e in plan.prepared.traced.state for name in (e.name, *e.aliases)}
        for name in [key for key in state.model.state_dict() if key not in registered][:1]:
            said = f"state_dict() has {name}, which that of an export, of tensors alone, will not."
            warnings.warn(said, stacklevel=3)
        spec, tensors, constants = spec_of(plan, module)
    forward, backward = _halves(plan)
    with new_folder(path) as folder:
        _write(folder / "__init__.py", INIT.format(doc=docstring(_summary(plan))))
        _write(folder / "forward.py", write_half(forward))
        _write(folder / "backward.py", write_half(backward))
        _write(folder / "guard.py", write_guard(plan.prepared.traced.guard))
        for name, copied in COPIED.items():
            _write(folder / name, Path(str(copied.__file__)).read_text(encoding="utf-8"))
        _write(folder / "spec.json", json.dumps(spec, indent=1) + "\n")
        _save(tensors, folder / "weights.safetensors")
        if constants:
            _save(constants, folder / "constants.safetensors")
        for file in folder.glob("*.safetensors"):
            file.chmod((folder / "spec.json").stat().st_mode)
    return as_path(path)


def _refuse_changed(state: PlanState, traced: Traced) -> None:
    """Refuse a model that is not the planned one any more: the folder would hold its weights, and another's step."""
    try:
        with _in_training(state.model, state.first.reads.modes):
            state.match(state.first.reads)
        tensors = state_tensors(state.model, traced.state)
        for entry, tensor, place in zip(traced.state, tensors, traced.placeholders, strict=False):
            now, then = describe_value(tensor), describe_value(place.meta["val"])
            if now != then:
                raise Differs(entry.name, now, then)
    except Differs as differs:
        raise PlannerError(
            f"the model was changed after planning ({brief(differs.where)} is {differs.now}, was {differs.then}): "
            "plan it as it is now, and export that plan."
        ) from None


@contextmanager
def _in_training(model: nn.Module, modes: Mapping[str, bool]) -> Iterator[None]:
    """Let a model that an evaluation has left in eval mode be in the planned modes in the block."""
    before = [(module, module.training) for module in model.modules()]
    try:
        for path, module in () if model.training else model.named_modules(remove_duplicate=False):
            module.training = modes.get(path, module.training)
        yield
    finally:
        for module, mode in before:
            module.training = mode


def _refuse_quantized(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_quantized_weight(tensor):
            raise PlannerError(
                f"{brief(name)} is of class {type(tensor).__name__}, which an exported folder cannot hold: export a "
                "model with plain weights, or keep the plan with plan.save."
            )


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    try:
        save_file(tensors, path)
    except SafetensorError as error:  # its name for a full disk
        raise OSError(f"{path.name}: {error}") from error
    except KeyError as error:  # of a type that it does not know
        names = [name for name, tensor in tensors.items() if tensor.dtype in error.args]
        raise PlannerError(f"a safetensors file cannot hold {brief(names[0])}, of {error.args[0]}.") from error


def _summary(plan: Decided) -> str:
    return (
        f"The planned training step of {plan.prepared.model_name}.\n\n{verdict(plan).sentence}.\n\n"
        "`load()` returns a drop-in module: same call, same parameter names and state_dict keys. It trains; it does\n"
        "not evaluate. Needs torch and safetensors."
    )


# Source ---------------------------------------------------------------------------------------------------------------


def _halves(plan: Decided) -> tuple[Half, Half]:
    traced, rewritten = plan.prepared.traced, plan.rewritten
    taken = {n.name for half in (rewritten.forward, rewritten.backward) for n in half.graph.nodes}
    labels = {p.name: (identifier(name, taken), text) for p, name, text in _primals(traced)}
    size = {t.name: t.bytes for t in plan.problem.tensors}
    again = frozenset(plan.recomputed)
    kept = f"{len(plan.saved)} tensors, {sum(size[s] for s in plan.saved) / MIB:,.1f} MiB"
    docs = (
        "The forward: new values of changed buffers, the outputs, then what it saves for the backward.\n\n"
        f"Saved: {kept}. {len(again)} ops run again in backward.py, so their results are freed\n"
        "here after their last use.",
        "The backward: it yields the gradients of parameters and inputs, in the groups that spec.json lists as\n"
        "`leaves`. Each leaves as soon as nothing here reads it any more.\n\n"
        f"It runs {len(again)} ops of the forward again, each right before it is needed: keeping their results would\n"
        f"raise the peak over the budget. That costs {plan.overhead:.1%} of the step.",
    )
    halves = []
    modules, leaving = (rewritten.forward, rewritten.backward), (None, rewritten.handovers)
    for name, module, doc, handovers in zip(("forward", "backward"), modules, docs, leaving, strict=True):
        inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
        names = {n: labels[n.name][0] for n in inputs if n.name in labels}
        remarks = {n: labels[n.name][1] if n.name in labels else _saved_remark(n) for n in inputs}
        halves.append(Half(name, module.graph, names, remarks, doc, handovers, spaced_in(module)))
    return halves[0], halves[1]


def _primals(traced: Traced) -> list[tuple[fx.Node, str, str]]:
    result = []
    for i, node in enumerate(traced.placeholders[: traced.num_primals]):
        value = describe_value(node.meta["val"])
        if i < len(traced.state):
            entry = traced.state[i]
            kind = "parameter" if entry.is_parameter else "buffer"
            result.append((node, entry.name, f"{kind} {entry.name}: {value}"))
        else:
            name = traced.input_names[i - len(traced.state)].replace("['", "", 1).replace("']", "", 1)
            result.append((node, name, f"input {name}: {value}"))
    return result


def _saved_remark(node: fx.Node) -> str:
    if node.name.startswith("tangents"):
        return f"gradient of an output: {describe_value(node.meta.get('val'))}"
    return f"saved by the forward: {describe_value(node.meta.get('val'))}"
