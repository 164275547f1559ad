"""What an exported module must still be when it is called. Needs torch alone: exports hold a copy.

The step has in it what the original's forward read of its submodules, whose code the folder does not hold: a hook on
one of them, another mode or another layer would change nothing here, without a word.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .errors import PlannerError as ExportError

HOOKS = {
    "_forward_hooks": "forward hook", "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook", "_backward_pre_hooks": "backward pre-hook",
}  # fmt: skip
KINDS = ("submodule", "parameter", "buffer", "hook", "attribute")
Look = tuple[dict[str, Any], ...]  # of each kind what there is, by name


class Tree:
    """The modules of an exported step, and how they were when they were loaded.

    Attributes:
        modes: of each module that forward asked, whether it was in training mode.
        looked_up: names that forward looked up on the model itself, which may have others: trainers set some there.
        places: where each parameter and buffer is kept, once for each of its names, and its number in the state.
    """

    def __init__(self, root: nn.Module, spec: dict[str, Any]) -> None:
        self.modules = dict(root.named_modules())
        described = [d for d in spec["modules"] if d["same_as"] is None]
        asked = [d for d in described if d["training"] is not None]
        self.modes = [(d["path"], self.modules[d["path"]], d["training"]) for d in asked]
        self.looked_up = frozenset(spec["looked_up"])
        self.looks = {path: self._look(path) for path in self.modules}
        self.names = [entry["name"] for entry in spec["state"]]
        self.places = [
            (f"{d['path']}.{name}".lstrip("."), self.modules[d["path"]], registry, name, index)
            for d in described for registry in ("_parameters", "_buffers") for name, index, *_ in d[registry[1:]]
            if index is not None
        ]  # fmt: skip

    def check(self) -> None:
        """Raise where it is no longer what was loaded."""
        for path, module, mode in self.modes:
            if module.training is not mode:
                modes = [f"{'training' if training else 'eval'} mode" for training in (module.training, mode)]
                _refuse(f"{path or 'the module'} is in {modes[0]}, and was planned in {modes[1]}")
        for path, then in self.looks.items():
            if (now := self._look(path)) != then:
                _refuse(_difference(path, now, then))

    def _look(self, path: str) -> Look:
        own = vars(self.modules[path])
        held = [{name: t is not None for name, t in own[registry].items()} for registry in ("_parameters", "_buffers")]
        hooks = {words: True for name, words in HOOKS.items() if path and own[name]}  # torch runs those of the root
        names = own if path else self.looked_up & own.keys()
        return dict(own["_modules"]), *held, hooks, dict.fromkeys(names, True)

    def state(self) -> list[torch.Tensor]:
        """The parameters and buffers of this call, tied as they were."""
        found: dict[int, torch.Tensor] = {}
        for name, module, registry, leaf, index in self.places:
            tensor = vars(module)[registry][leaf]
            if found.setdefault(index, tensor) is not tensor:
                _refuse(f"{name} is no longer the same tensor as {self.names[index]}")
        state = [found[index] for index in range(len(found))]
        if len(numbers := {id(tensor): i for i, tensor in enumerate(state)}) < len(state):
            index = next(i for i, tensor in enumerate(state) if numbers[id(tensor)] != i)
            _refuse(f"{self.names[numbers[id(state[index])]]} is now the same tensor as {self.names[index]}")
        return state


def _difference(path: str, now: Look, then: Look) -> str:
    """The first thing in which a module is not as it was."""
    kind, name, before, after = next(
        (kind, name, old.get(name), new.get(name)) for kind, new, old in zip(KINDS, now, then, strict=True)
        for name in {**old, **new} if old.get(name) != new.get(name)
    )  # fmt: skip
    before, after = (there not in (None, False) for there in (before, after))
    how = "replaced" if before and after else "removed" if before else "added"
    where = f"a {name} of {path}" if kind == "hook" else f"the {kind} {f'{path}.{name}'.lstrip('.')}"
    return f"{where} was {how} since load()"


def _refuse(what: str) -> None:
    raise ExportError(
        f"{what}: an exported step holds none of its modules' code, and would not follow. Undo it, or make the change "
        "in the original model, plan that and export it again."
    )
