"""find: which submodules are regions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from passes._torch import is_compiled
from planner.errors import RegionError

from .losses import LOSS, CrossEntropy


@dataclass
class Candidates:
    """The submodules that may become regions.

    Attributes:
        wanted: those that may, at the paths where they were found.
        descend: whether one that cannot be a region makes room for its children.
    """

    model: nn.Module
    wanted: dict[str, nn.Module]
    descend: bool

    @property
    def chosen(self) -> dict[str, nn.Module]:
        """Each once, and none that lies within another: a module may have several paths."""
        inside = {id(part) for module in self.wanted.values() for part in module.modules() if part is not module}
        first = {id(module): path for path, module in reversed(self.wanted.items())}
        return {p: m for p, m in self.wanted.items() if id(m) not in inside and first[id(m)] == p}

    def refine(self, refused: Collection[str], called: Collection[str], kinds: Collection[type] = ()) -> bool:
        """Leave out those that were refused or not called, for their children; whether that changes anything.

        Args:
            kinds: classes of regions that are planned. One of them that was not called (layer drop) stays.
        """
        chosen = self.chosen
        missed = [path for path, module in chosen.items() if path not in called and type(module) not in kinds]
        leave = [path for path in chosen if path in refused or path in missed]
        for path in leave:
            module = self.wanted.pop(path)
            if self.descend or path not in called:
                self.wanted.update(children(module, path))
        return bool(leave)

    def layers(self) -> Candidates:
        """In their place the layers of torch.nn, none of which is among the children of a model."""
        every = ((path, module) for path, module in self.model.named_modules() if path and _is_layer(module))
        apart = {path: module for path, module in every if not _within_compiled(self.model, path)}
        return Candidates(self.model, {**apart, LOSS: CrossEntropy()}, False)


def candidates(model: nn.Module, patterns: Sequence[str]) -> Candidates:
    """The outermost submodules that match a pattern, of a list its members; the children of the model without patterns.

    Raises:
        RegionError: a pattern matches no submodule.
    """
    if not patterns:
        return Candidates(model, {**dict(children(model, "")), LOSS: CrossEntropy()}, True)
    paths = [path for path, _ in model.named_modules() if path]
    if not paths:
        raise RegionError(f'{type(model).__name__} has no submodules to be regions: plan it with regions="whole".')
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths):
            raise RegionError(
                f"regions={pattern!r} matches no submodule of {type(model).__name__}; its own are called "
                f"{', '.join(name for name, _ in model.named_children())}, and theirs like "
                f"{max(paths, key=lambda path: path.count('.'))!r}."
            )
    chosen: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{other}.") for other in chosen)
        if path and not inside and any(fnmatchcase(path, pattern) for pattern in patterns):
            chosen.update(_members(module, path))
    if compiled := next((path for path in chosen if _within_compiled(model, path)), None):
        raise RegionError(
            f"region {compiled} is compiled, or within what is: the compiler would look into the planned region. Plan "
            "the model before compile() is called, or name other submodules."
        )
    return Candidates(model, {**chosen, LOSS: CrossEntropy()}, False)


def children(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The submodules right below, lists of modules looked through, without layers of torch.nn: in most, which are a
    single op, nothing can be decided.
    """
    for name, child in module.named_children():
        place = f"{path}.{name}" if path else name
        if is_compiled(child):
            continue
        if not has_forward(child):
            yield from children(child, place)
        elif not _is_layer(child) or isinstance(child, nn.RNNCellBase):
            yield place, child


def _members(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    if has_forward(module):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _members(child, f"{path}.{name}")


def _is_layer(module: nn.Module) -> bool:
    ours = type(module).__module__.startswith("torch.nn.") and next(module.children(), None) is None
    return ours and has_forward(module)


def _within_compiled(model: nn.Module, path: str) -> bool:
    names = path.split(".")
    above = [model.get_submodule(".".join(names[:i])) for i in range(1, len(names) + 1)]
    return any(map(is_compiled, above))


def has_forward(module: nn.Module) -> bool:
    """Whether it is more than a list of modules."""
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__
