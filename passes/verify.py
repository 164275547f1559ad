"""verify: the proof that a rewrite computes the traced step's values.

A rewrite only duplicates and reorders, so value numbering decides it. The number of a node is (op, numbers of its
arguments); two nodes with one number hold the same value. Every random op draws a ticket: the k-th execution on a
generator depends on that generator's k-th state, so dropped, repeated or reordered draws change numbers, and a
replay has its original's number exactly if it runs under the state taken right before it. A primal that the
forward overwrites has another number in the backward. An in-place op has its functional twin's number if its result
is laid out as its argument; every other value in the memory it writes is gone, and a later read of one breaks the
proof, as does writing where a caller can see it (unless the op itself looks whether one does). What must agree: every
forward output and every gradient. And nothing else may run: each call has the number of a traced one, also where
nobody reads it. A batch norm has the numbers of the two ops that it is split into, and an op that does something to
its result those of doing that to it (`passes.fuse.batch_norm`).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .alias import aliased_argument, device_of, is_view
from .errors import VerificationError
from .fuse.batch_norm import FOLLOWED, statistics
from .fuse.library import BATCH_NORM
from .ops import (
    MINDS_THE_CALLER,
    RUNNING_STATISTICS,
    functional_form,
    is_random,
    result_ignores,
    takeovers,
    written_argument,
)
from .rewrite import Rewritten
from .run.random import get_rng_state, run_with_rng_state
from .trace.capture import Traced

Number = int


@dataclass(frozen=True)
class _Known:
    """An argument that no node stands for."""

    number: Number


class _Numbering:
    """Hash-consing: equal keys get equal numbers, across all graphs numbered with this object.

    Attributes:
        layouts: how a traced value is laid out, by number: a rewritten node's own metadata proves nothing.
        traced: numbers of the traced calls, and of the generator states that they draw from.
    """

    def __init__(self) -> None:
        self.numbers: dict[Any, Number] = {}
        self.layouts: dict[Number, str] = {}
        self.traced: set[Number] = set()

    def number(self, key: Any) -> Number:
        return self.numbers.setdefault(key, len(self.numbers))


def verify(traced: Traced, rewritten: Rewritten) -> None:
    """Prove `rewritten` equal to `traced`.

    Raises:
        VerificationError: an output has another number, or a node breaks a rule; names the node.
    """
    numbering = _Numbering()
    joint = _Walk(numbering, traced.graph_module, trusted=True)
    primals = {n: numbering.number(("primal", i)) for i, n in enumerate(traced.placeholders[: traced.num_primals])}
    tangents = {n: numbering.number(("tangent", n.name)) for n in traced.placeholders[traced.num_primals :]}
    for node, number in (*primals.items(), *tangents.items()):
        numbering.layouts[number] = _layout(node)
    expected = joint.run(traced.graph_module.graph, {**primals, **tangents})

    step = _Walk(numbering, rewritten.forward)
    forward_inputs = _placeholders(rewritten.forward)
    numbers = list(primals.values())
    if len(forward_inputs) != len(numbers):
        raise VerificationError("the forward does not take the traced primals")
    produced = step.run(rewritten.forward.graph, dict(zip(forward_inputs, numbers, strict=True)))
    count = rewritten.num_forward_outputs
    _compare(expected[:count], produced[:count], "forward output", rewritten.forward)

    returned = _returned(rewritten.forward)
    step.protected = {step.root_of[n] for n in returned[:count] if isinstance(n, fx.Node)}
    overwritten = {i: numbering.number(("overwritten", i)) for i in traced.mutated}
    for i, number in overwritten.items():
        numbering.layouts[number] = numbering.layouts[numbers[i]]
        if forward_inputs[i] in [step.root_of.get(n) for n in returned[count:]]:
            raise VerificationError(f"saves {forward_inputs[i].name!r}, which is overwritten when the forward ends")
    handed = [
        *produced[count:],
        *(overwritten.get(i, numbers[i]) for i in rewritten.saved_primals),
        *tangents.values(),
    ]
    backward_inputs = _placeholders(rewritten.backward)
    if len(backward_inputs) != len(handed):
        raise VerificationError("the backward does not take what the forward saves")
    step.root = rewritten.backward
    for node, source in zip(backward_inputs, returned[count:], strict=False):
        step.root_of[node] = step.root_of.get(source, node)
    gradients = step.run(rewritten.backward.graph, dict(zip(backward_inputs, handed, strict=True)))
    _compare(expected[count:], gradients, "gradient", rewritten.backward)
    if step.draws != joint.draws:
        raise VerificationError("the rewritten step leaves a random number generator in another state")


def _returned(module: fx.GraphModule) -> list[Any]:
    values: Any = module.graph.output_node().args[0]
    return list(values)


def _placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return [n for n in module.graph.nodes if n.op == "placeholder"]


def _compare(expected: list[Any], got: list[Any], what: str, module: fx.GraphModule) -> None:
    nodes: Any = module.graph.output_node().args[0]
    if len(expected) != len(got):
        raise VerificationError(f"{len(got)} values where {len(expected)} are due ({what})")
    for i, (e, g) in enumerate(zip(expected, got, strict=True)):
        if e != g:
            name = getattr(nodes[i], "name", str(nodes[i]))
            raise VerificationError(f"{what} {i} ({name}) is not the traced value", node=name)


class _Walk:
    """Numbers the values of one execution, which may span several graphs (forward, then backward)."""

    def __init__(self, numbering: _Numbering, root: fx.GraphModule, *, trusted: bool = False) -> None:
        self.numbering, self.root, self.trusted = numbering, root, trusted
        self.draws: dict[str, int] = {}
        self.root_of: dict[Any, Any] = {}  # node -> the memory it lives in, named by the node that made it
        self.protected: set[Any] = set()  # memory that the caller sees
        self.lost: set[fx.Node] = set()

    def run(self, graph: fx.Graph, inputs: dict[fx.Node, Number]) -> list[Any]:
        numbers: dict[fx.Node, Number] = dict(inputs)
        for node in graph.nodes:
            if node.op == "get_attr":
                numbers[node] = self.numbering.number(("constant", id(_fetch(self.root, str(node.target)))))
                self.root_of[node] = node
            elif node.op == "call_function":
                self._check_read(node)
                numbers[node] = self._call(node, numbers)
                self._admit(node, numbers)
                self._place(node, numbers)
            elif node.op == "output":
                self._check_read(node)
                values: Any = node.args[0]
                return [numbers[v] if isinstance(v, fx.Node) else ("constant", v) for v in values]
            elif node.op != "placeholder":
                raise VerificationError(f"{node.op} node {node.name!r} has no place in a rewrite", node=node.name)
            elif node not in numbers:
                raise VerificationError(f"input {node.name!r} is not handed over", node=node.name)
            else:
                self.root_of.setdefault(node, node)
        raise VerificationError("the graph has no output")

    def _admit(self, node: fx.Node, numbers: dict[fx.Node, Number]) -> None:
        """Remember what the traced graph computes; refuse a call that it does not make."""
        number = numbers[node]
        if node.target is operator.getitem:
            parent, index = node.args
            results = parent.meta.get("val") if isinstance(parent, fx.Node) else None
            if not isinstance(results, (list, tuple)) or index not in range(len(results)):
                raise VerificationError(f"{node.name!r} takes a result that there is not", node=node.name)
            self.numbering.layouts.setdefault(number, _layout(node)) if self.trusted else None
            return
        found = statistics(node.target, node.args)
        target, args = found or (node.target, node.args)
        if target in RUNNING_STATISTICS:  # a recompute is handed the updated statistics and ignores them
            positions = RUNNING_STATISTICS[target][0]
            number = self._key(target, args, dict(node.kwargs), numbers, ("any statistics",), positions)
        follows = functional_form(node)[0] in FOLLOWED
        computed = {number, self._normal(node, numbers)} if found or follows else {number}
        if self.trusted:
            self.numbering.traced |= computed
            self.numbering.layouts |= dict.fromkeys(computed if follows else (), _layout(node))
            self.numbering.layouts[numbers[node]] = _layout(node)
        elif not computed <= self.numbering.traced:
            raise VerificationError(f"{node.name!r} computes what the traced step does not", node=node.name)

    def _call(self, node: fx.Node, numbers: dict[fx.Node, Number]) -> Number:
        if node.target is get_rng_state:
            return self._state(str(node.args[0]))
        if node.target is run_with_rng_state:
            state, device, target, *rest = node.args
            drawn = ("drawn", str(device), numbers.get(state))  # type: ignore[arg-type]
            return self._key(target, tuple(rest), dict(node.kwargs), numbers, drawn)
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            return self._getitem(node, node.args[0], numbers)
        extra: tuple[Any, ...] = ()
        if is_random(node):
            device_name = str(device_of(node))
            extra = ("drawn", device_name, self._state(device_name))
            if self.trusted:
                self.numbering.traced.add(self._state(device_name))
            self.draws[device_name] = self.draws.get(device_name, 0) + 1
        target, kwargs = functional_form(node)
        if FOLLOWED.get(target) is not None:
            return self._key(FOLLOWED[target], (_Known(self._normal(node, numbers)), *node.args[5:]), kwargs, numbers)
        target, args = statistics(target, node.args) or (target, node.args)
        ignored = result_ignores(target, args, None)
        return self._key(target, args, kwargs, numbers, extra, ignored)

    def _check_read(self, node: fx.Node) -> None:
        for argument in node.all_input_nodes:
            if argument in self.lost:
                message = f"{node.name!r} reads {argument.name!r} after it was overwritten"
                raise VerificationError(message, node=node.name)

    def _place(self, node: fx.Node, numbers: dict[fx.Node, Number]) -> None:
        """Note where the node's value lives, and what an in-place op destroys."""
        first = node.args[0] if node.args else None
        written = written_argument(node)
        if written is not None:
            memory, layouts = self.root_of[written], self.numbering.layouts
            allowed = [p for p, twin in takeovers(node).items() if twin.target is node.target and p < len(node.args)]
            if not any(node.args[p] is written for p in allowed):
                raise VerificationError(f"{node.name!r} may not write over {written.name!r}", node=node.name)
            if any(a is not written and self.root_of[a] == memory for a in node.all_input_nodes):
                raise VerificationError(f"{node.name!r} writes to memory that it reads otherwise", node=node.name)
            minds = node.target in MINDS_THE_CALLER
            if getattr(memory, "op", "call_function") != "call_function" or (memory in self.protected and not minds):
                raise VerificationError(f"{node.name!r} writes to memory it does not own", node=node.name)
            if layouts.get(numbers[written]) != layouts.get(numbers[node]):
                raise VerificationError(f"{node.name!r} does not fit over {written.name!r}", node=node.name)
            self.lost.update(n for n, m in self.root_of.items() if m == memory)
            self.root_of[node] = memory
        elif node.target is operator.getitem and isinstance(first, fx.Node):
            self.root_of[node] = self.root_of[first] if is_view(first) else (first, node.args[1])
        elif is_view(node):
            source = aliased_argument(node)
            self.root_of[node] = self.root_of[source] if source is not None else node
        else:
            self.root_of[node] = node

    def _getitem(self, node: fx.Node, parent: fx.Node, numbers: dict[fx.Node, Number]) -> Number:
        index: Any = node.args[1]
        found = statistics(parent.target, parent.args)
        if found is None:
            return self._item(parent, parent.target, parent.args, index, numbers)
        return self._item(parent, *found, index - 1, numbers) if index else self._normal(parent, numbers)

    def _item(
        self, parent: fx.Node, target: Any, args: tuple[Any, ...], index: int, numbers: dict[fx.Node, Number]
    ) -> Number:
        ignored = result_ignores(target, args, index)
        if not ignored:
            return self.numbering.number(("getitem", numbers[parent], index))
        key = self._key(target, args, dict(parent.kwargs), numbers, ("item", index), ignored)
        return self.numbering.number(("getitem", key))

    def _normal(self, node: fx.Node, numbers: dict[fx.Node, Number]) -> Number:
        """The number of a batch norm's result; of an op that does something to it, of what it is done to."""
        found = statistics(node.target, node.args)
        if found is None:
            return self._key(BATCH_NORM.default, node.args[:5], {}, numbers)
        moments = (_Known(self._item(node, *found, i, numbers)) for i in range(2))
        return self._key(BATCH_NORM.default, (*node.args[:3], *moments), {}, numbers)

    def _state(self, device: str) -> Number:
        return self.numbering.number(("rng", device, self.draws.get(device, 0)))

    def _key(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        numbers: dict[fx.Node, Number],
        extra: tuple[Any, ...] = (),
        ignored: frozenset[int] = frozenset(),
    ) -> Number:
        kept = tuple(self._like(a, numbers) if i in ignored else a for i, a in enumerate(args))
        leaves, spec = pytree.tree_flatten((kept, sorted(kwargs.items())))
        numbered: list[tuple[str, Any]] = []
        for leaf in leaves:
            if isinstance(leaf, _Known):
                numbered.append(("value", leaf.number))
            elif isinstance(leaf, fx.Node):
                if leaf not in numbers:
                    raise VerificationError(f"{leaf.name!r} is read before it is computed", node=leaf.name)
                numbered.append(("value", numbers[leaf]))
            else:
                numbered.append((type(leaf).__name__, repr(leaf)))
        return self.numbering.number((str(target), id(target), str(spec), tuple(numbered), extra))


    def _like(self, argument: Any, numbers: dict[fx.Node, Number]) -> str:
        """An argument whose values do not matter must still be one of the same layout."""
        if not isinstance(argument, fx.Node):
            return repr(argument)
        return self.numbering.layouts.get(numbers[argument], argument.name)


def _layout(node: fx.Node) -> str:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return str(type(value))
    return f"{tuple(value.shape)} {value.stride()} {value.dtype} on {value.device}"


def _fetch(root: fx.GraphModule, target: str) -> Any:
    value: Any = root
    for part in target.split("."):
        value = getattr(value, part)
    return value
