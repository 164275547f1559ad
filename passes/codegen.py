"""Code generation for the rewritten halves: inputs come in a list that is emptied, so nothing outlives its use."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from ._torch import direct_call, forget_source, refer_weakly
from .run.arena import Spacers

_CALL = re.compile(r"\btorch\.ops(?:\.\w+){3}(?=\()")


class Handover(NamedTuple):
    """Outputs of a graph that leave it before its end, right after a node has run; no later node reads them.

    Attributes:
        after: the node's name.
        outputs: their places among the graph's outputs.
    """

    after: str
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Spaced:
    """Where the code of a half has spacers: their sizes, by the name of the node that they are around."""

    ask: Spacers = field(default_factory=Spacers)
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


class BoxedCodeGen(fx.graph.CodeGen):
    """`forward(self, values)`: takes its inputs out of the list `values`, then frees each after its last use.

    A Python caller holds the arguments of a call until it returns; a list can be emptied. Ops are defaults of further
    arguments, so that none is looked up while a step runs.

    Args:
        spaced: the spacers around nodes.
    """

    def __init__(self, spaced: Spaced | None = None) -> None:
        super().__init__()
        self.ops: dict[str, str] = {}
        self.spaced = spaced or Spaced()

    def __deepcopy__(self, memo: dict[int, Any]) -> BoxedCodeGen:
        return BoxedCodeGen(self.spaced)

    @property
    def _body_transformer(self) -> Any:  # bound anew each time: a cycle would keep a dropped plan
        return self.insert

    @_body_transformer.setter
    def _body_transformer(self, given: Any) -> None:
        """There is none but `insert`."""

    def insert(self, body: list[str]) -> list[str]:
        """The lines of the code, with names in place of the ops' paths, and with what comes before and after them."""
        self.ops = {}
        lines, following = [], self.following()
        for line in "".join(_CALL.sub(self._named, line) for line in body).splitlines(keepends=True):
            name = line.split(" ", 1)[0].rstrip(":")
            before, after = space(self.spaced.sizes.get(name, ()))
            lines += [*before, line, *after, *following.get(name, ())]
        return lines

    def following(self) -> dict[str, list[str]]:
        """What else comes after the lines of nodes, by their names."""
        return {}

    def _named(self, found: re.Match[str]) -> str:
        path = found.group()
        name = path.removeprefix("torch.").replace(".", "_")
        self.ops[name] = path
        return name

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **kwargs: Any) -> str:
        names = [v.split(":")[0].split("=")[0].strip() for v in free_vars if not v.startswith("self")]
        unpack = f"    {', '.join(names)}{',' if len(names) == 1 else ''} = values\n" if names else ""
        ops = "".join(f", {name}=direct_call({path})" for name, path in self.ops.items())
        return f"def forward(self, values{ops}){maybe_return_annotation}:\n{unpack}    values.clear()\n"

    def additional_globals(self) -> list[tuple[str, Any]]:
        spacers = [("SPACERS", self.spaced.ask)] if self.spaced.sizes else []
        return [("torch", torch), ("direct_call", direct_call), *spacers]

    def process_inputs(self, *inputs: Any) -> Any:
        return inputs[0] if len(inputs) == 1 and isinstance(inputs[0], list) else inputs


class ResumedCodeGen(BoxedCodeGen):
    """`forward(self, values)` as a generator: it yields the graph's outputs in lists, which its caller empties.

    The outputs of each handover come in a list, those that are in none in a last one; no list holds a None.
    """

    def __init__(self, handovers: Sequence[Handover], spaced: Spaced | None = None) -> None:
        super().__init__(spaced)
        self.handovers = tuple(handovers)
        self.outputs: Sequence[Any] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> ResumedCodeGen:
        return ResumedCodeGen(self.handovers, self.spaced)  # a copied graph has outputs of its own

    def generate_output(self, output_args: Any, *args: Any, **kwargs: Any) -> str:
        self.outputs = output_args  # as they are now: a graph may be changed and compiled again
        early = {i for handover in self.handovers for i in handover.outputs}
        return self._hand_over([i for i, v in enumerate(output_args) if v is not None and i not in early])

    def following(self) -> dict[str, list[str]]:
        """What hands over."""
        return {handover.after: [f"{self._hand_over(handover.outputs)}\n"] for handover in self.handovers}

    def _hand_over(self, places: Sequence[int]) -> str:
        return hand_over([str(self.outputs[i]) for i in places])


def hand_over(names: Sequence[str]) -> str:
    """A statement that yields the values in a list and drops its own hold of them."""
    dropped = "".join(f"{name} = " for name in dict.fromkeys(names) if name != "None")
    return f"handed_over = [{', '.join(names)}]; {dropped and dropped + 'None; '}yield handed_over"


def space(sizes: Sequence[int]) -> tuple[list[str], list[str]]:
    """The lines that ask for spacers, and those that give them back; none where there are none."""
    return ([f"spacers = SPACERS({', '.join(map(str, sizes))})\n"], ["spacers = None\n"]) if sizes else ([], [])


def boxed(graph: fx.Graph, root: Any, name: str, spaced: Spaced | None = None) -> fx.GraphModule:
    """A GraphModule of `graph` whose `forward` takes one list."""
    graph.set_codegen(BoxedCodeGen(spaced))
    return _module(graph, root, name)


def resumed(
    graph: fx.Graph, root: Any, name: str, handovers: Sequence[Handover], spaced: Spaced | None = None
) -> fx.GraphModule:
    """A GraphModule of `graph` whose `forward` takes one list and yields lists (see `ResumedCodeGen`)."""
    graph.set_codegen(ResumedCodeGen(handovers, spaced))
    return _module(graph, root, name)


def spaced_in(half: fx.GraphModule) -> Mapping[str, tuple[int, ...]]:
    """The sizes of the spacers around a half's nodes, by their names."""
    code = half.graph._codegen
    return code.spaced.sizes if isinstance(code, BoxedCodeGen) else {}


def _module(graph: fx.Graph, root: Any, name: str) -> fx.GraphModule:
    module = fx.GraphModule(root, graph, name)
    forget_source(module)
    refer_weakly(module)
    graph.lint()
    return module
