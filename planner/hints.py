"""The user's own hints: what must be saved, may never be recomputed, or should be recomputed; and the ops they name."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import fx

from passes._torch import OpOverload
from passes.alias import Aliases, is_compute
from passes.fuse.records import op_names
from passes.lower import split_nodes, why_once
from passes.trace.capture import Traced
from passes.trace.modules import ancestors, module_path

from .errors import HintError

FORMS = (
    "A hint is an op's name (addmm_3), a module path or glob (transformer.h.*.attn, with all below it), an ATen op "
    "(aten.mm), or a module and an op (transformer.h.*.mlp/aten.gelu)."
)
SHOWN = 4


@dataclass(frozen=True)
class Hints:
    """Patterns by what they ask for; see `auto_checkpoint`.

    Attributes:
        save, never_recompute: they hold in every schedule; the ops they name run once.
        recompute: preferred where the budget leaves the choice.
    """

    save: tuple[str, ...] = ()
    never_recompute: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.save or self.never_recompute or self.recompute)

    @property
    def binding(self) -> str:
        """The hints that narrow the schedules, as a user writes them; "" for none."""
        hard = {"save": self.save, "never_recompute": self.never_recompute}
        return ", ".join(f"{kind}={patterns!r}" for kind, patterns in hard.items() if patterns)

    def to_dict(self) -> dict[str, list[str]]:
        """Plain lists, for a JSON file."""
        return {field.name: list(getattr(self, field.name)) for field in fields(self)}


@dataclass(frozen=True)
class Hinted:
    """The hint that decided an op."""

    kind: str
    pattern: str

    @property
    def once(self) -> bool:
        """Whether it keeps the op from running again."""
        return self.kind != "recompute"

    def __str__(self) -> str:
        return f"{self.kind}={self.pattern!r}"


NO_HINTS = Hints()


def make_hints(save: Any = (), never_recompute: Any = (), recompute: Any = ()) -> Hints:
    """Hints from what a user passed: a sequence of strings each, or one string.

    Raises:
        HintError: a value is neither, or a string is empty.
    """
    given = {"save": save, "never_recompute": never_recompute, "recompute": recompute}
    return Hints(**{kind: _patterns(kind, value) for kind, value in given.items()})


def _patterns(kind: str, value: Any) -> tuple[str, ...]:
    listed = (value,) if isinstance(value, str) else value
    if not isinstance(listed, (list, tuple)) or not all(isinstance(p, str) and p for p in listed):
        raise HintError(f"{kind}={value!r} is not a hint: it takes a sequence of non-empty strings. {FORMS}", hint=kind)
    return tuple(dict.fromkeys(listed))


def resolve(
    hints: Hints, traced: Traced, aliases: Aliases, device: torch.device, *, required: bool = True
) -> dict[fx.Node, Hinted]:
    """The ops of the forward that hints decide, each with the hint that does.

    Args:
        required: refuse a pattern that decides nothing; False (planning anew, for other inputs) warns.

    Raises:
        HintError: a pattern names nothing, nothing that could be decided, or what another one contradicts.
    """
    if not hints:
        return {}
    names = _Names(traced, aliases)
    found: dict[fx.Node, Hinted] = {}
    for field in fields(hints):
        for pattern in getattr(hints, field.name):
            hint = Hinted(field.name, pattern)
            try:
                nodes = _decided(hint, names, traced, aliases, device)
            except HintError as error:
                if required:
                    raise
                warnings.warn(f"{error} The step planned for this call does without it.", stacklevel=2)
                continue
            for node in nodes:
                other = found.setdefault(node, hint)
                if other.once is not hint.once:
                    raise _conflict(node, other, hint)
    return found


def hint_notes(hinted: Mapping[fx.Node, Hinted]) -> tuple[str, ...]:
    """What the hints come to, in a sentence for the user."""
    if not hinted:
        return ()
    given = ", ".join(dict.fromkeys(str(hint) for hint in hinted.values()))
    return (f"hints: {given} decide {len(hinted)} ops",)


class _Names:
    """What the forward's ops are called, and the kernels behind each name."""

    def __init__(self, traced: Traced, aliases: Aliases) -> None:
        forward, backward = split_nodes(traced)
        late = set(backward)
        self.aliases, self.forward, self.backward = aliases, forward, backward
        self.views = [
            n for n in traced.graph_module.graph.nodes
            if n.op == "call_function" and not is_compute(n) and not any(a in late for a in _roots(n))
        ]  # fmt: skip

    def all(self) -> Iterator[str]:
        """Every name that a pattern could have meant."""
        for node in (*self.forward, *self.views):
            yield node.name
            yield from ancestors(module_path(node))[1:]
            yield from _op_names(node)


def _roots(node: fx.Node) -> Iterator[fx.Node]:
    """The kernels and inputs that a view is taken of."""
    for source in node.all_input_nodes[:1]:
        if source.op == "call_function" and not is_compute(source):
            yield from _roots(source)
        else:
            yield source


def _decided(
    hint: Hinted, names: _Names, traced: Traced, aliases: Aliases, device: torch.device
) -> tuple[fx.Node, ...]:
    """The kernels that the hint decides; a pattern that meets only views stands for what they are views of."""
    nodes = [n for n in names.forward if matches(n, hint.pattern)]
    if not nodes:
        views = [n for n in names.views if matches(n, hint.pattern)]
        written = dict.fromkeys(s.node for v in views for s in aliases.storages(v) if not s.static)
        nodes = [n for n in names.forward if n in written]
        if views and not nodes:
            raise _refusal(hint, "matches only views of parameters and inputs, which are resident anyhow. Remove it.")
    if not nodes:
        raise _unmatched(hint, names)
    if not hint.once:
        return _repeatable(hint, nodes, traced, aliases, device)
    return tuple(nodes)


def _repeatable(
    hint: Hinted, nodes: list[fx.Node], traced: Traced, aliases: Aliases, device: torch.device
) -> tuple[fx.Node, ...]:
    reasons = {n: why_once(n, traced, aliases, device) for n in nodes}
    free = tuple(n for n in nodes if reasons[n] is None)
    if not free:
        shown = ", ".join(f"{n.name} ({reasons[n]})" for n in nodes[:SHOWN])
        raise _refusal(hint, f"asks for what may not run again: {shown}. Remove it.")
    return free


def matches(node: fx.Node, pattern: str) -> bool:
    """Whether a pattern names the node: by itself, by its op, by a module it is in, or by module and op."""
    module, slash, op = pattern.rpartition("/")
    if slash:
        return _in_module(node, module) and _is_op(node, op)
    return _is_op(node, pattern) or _in_module(node, pattern)


def _in_module(node: fx.Node, pattern: str) -> bool:
    return any(fnmatchcase(path, pattern) for path in ancestors(module_path(node)))


def _is_op(node: fx.Node, pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in (node.name, *_op_names(node)))


def _op_names(node: fx.Node) -> tuple[str, ...]:
    target = node.target
    named = op_names(target) if isinstance(target, OpOverload) else ()
    return tuple(name for op in named for name in (str(op), str(op.overloadpacket)))


def _unmatched(hint: Hinted, names: _Names) -> HintError:
    if any(matches(n, hint.pattern) for n in names.backward):
        return _refusal(hint, "matches only ops of the backward, which run once anyhow. Name ops of the forward.")
    near = tuple(_nearest(hint.pattern, dict.fromkeys(names.all())))
    told = f"The nearest names are {', '.join(near)}. " if near else ""
    message = f"{hint} matches no op of the step. {told}{FORMS}"
    return HintError(message, hint=hint.kind, pattern=hint.pattern, near=near)


def _nearest(pattern: str, known: Iterable[str]) -> Sequence[str]:
    """Names that look like the pattern; with a module before it, like its op."""
    plain = pattern.rpartition("/")[2].replace("*", "0")
    return difflib.get_close_matches(plain, list(known), n=SHOWN, cutoff=0.5)


def _refusal(hint: Hinted, reason: str) -> HintError:
    return HintError(f"{hint} {reason}", hint=hint.kind, pattern=hint.pattern)


def _conflict(node: fx.Node, first: Hinted, second: Hinted) -> HintError:
    path = module_path(node)
    name = f"{path}/{node.name}" if path else node.name
    return HintError(
        f"{first} and {second} contradict each other: both match {name} ({node.target}). Narrow one of them; "
        "'module/op' names an op in a module only, as in 'transformer.h.*.mlp/aten.gelu'.",
        hint=second.kind, pattern=second.pattern,
    )  # fmt: skip
