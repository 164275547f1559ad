"""Code generation for the rewritten halves: inputs come in a list that is emptied, so nothing outlives its use."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ._torch import forget_source, refer_weakly


class BoxedCodeGen(fx.graph.CodeGen):
    """`forward(self, values)`: takes its inputs out of the list `values`, then frees each after its last use.

    A Python caller holds the arguments of a call until it returns; a list can be emptied.
    """

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **kwargs: Any) -> str:
        names = [v.split(":")[0].split("=")[0].strip() for v in free_vars if not v.startswith("self")]
        unpack = f"    {', '.join(names)}{',' if len(names) == 1 else ''} = values\n" if names else ""
        return f"def forward(self, values){maybe_return_annotation}:\n{unpack}    values.clear()\n"

    def additional_globals(self) -> list[tuple[str, Any]]:
        return [("torch", torch)]

    def process_inputs(self, *inputs: Any) -> Any:
        return inputs[0] if len(inputs) == 1 and isinstance(inputs[0], list) else inputs


def boxed(graph: fx.Graph, root: Any, name: str) -> fx.GraphModule:
    """A GraphModule of `graph` whose `forward` takes one list."""
    graph.set_codegen(BoxedCodeGen())
    module = fx.GraphModule(root, graph, name)
    forget_source(module)
    refer_weakly(module)
    graph.lint()
    return module
