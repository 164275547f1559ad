"""verify: the proof that a rewrite computes the values that torch traced.

A rewrite only duplicates and reorders, and puts fused ops in the place of others, so value numbering decides it. The
number of a node is (op, numbers of its arguments); two nodes with one number hold the same value. Both sides are
written in the same terms first: a fused op as what it means in ATen ops, if its kernel takes such arguments, and an
ATen op that is split as its parts (`passes.fuse.records`, `passes.fuse.normal_form`). Every random op draws a ticket:
the k-th execution on a generator depends on that generator's k-th state, so dropped, repeated or reordered draws
change numbers, and a replay has its original's number exactly if it runs under the state taken right before it. A
primal that the forward overwrites has another number in the backward. An in-place op has its functional twin's number
if its result is laid out as its argument; every other value in the memory it writes is gone, and a later read of one
breaks the proof, as does writing where a caller can see it (unless the op itself looks whether one does). What must
agree: every forward output and every gradient. And nothing else may run: each call is one that was traced, also where
nobody reads it.
"""

from __future__ import annotations

import operator
from operator import attrgetter
from typing import Any

from torch import fx

from .alias import aliased_argument, device_of, is_view
from .errors import VerificationError
from .exclusive import interrupt_point
from .numbering import Known, Number, NumberedCall, Numbering, layout_of
from .ops import CHECKS_OWNER, donated_argument, donations, functional_form, is_random
from .rewrite import Rewritten
from .run.random import get_rng_state, run_with_rng_state
from .trace.capture import Traced


def verify(traced: Traced, rewritten: Rewritten) -> None:
    """Prove `rewritten` equal to `traced`.

    Raises:
        VerificationError: an output has another number, or a node breaks a rule; names the node.
    """
    numbering = Numbering()
    joint = _Walk(numbering, traced.graph_module, trusted=True)
    placeholders = [n for n in traced.pristine.nodes if n.op == "placeholder"]
    primals = {n: numbering.number(("primal", i)) for i, n in enumerate(placeholders[: traced.num_primals])}
    tangents = {n: numbering.number(("tangent", n.name)) for n in placeholders[traced.num_primals :]}
    for node, number in (*primals.items(), *tangents.items()):
        numbering.know(number, node.meta["val"])
    expected = joint.run(traced.pristine, {**primals, **tangents})

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
        numbering.know(number, numbering.value(numbers[i]))
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
    _check_handovers(rewritten, step.root_of)
    if step.draws != joint.draws:
        raise VerificationError("the rewritten step leaves a random number generator in another state")


def _check_handovers(rewritten: Rewritten, root_of: dict[Any, Any]) -> None:
    """A gradient leaves once it is there, and what a hook may then change is not read again: it and its parameter."""
    primals = _placeholders(rewritten.backward)[len(rewritten.saved_names) :]
    parameter = dict(zip(rewritten.saved_primals, primals, strict=False))
    results, at = _returned(rewritten.backward), {h.after: h.outputs for h in rewritten.handovers}
    early = {i for outputs in at.values() for i in outputs}
    computed, left = set[fx.Node](), set[Any]()
    for node in rewritten.backward.graph.nodes:
        at_end = node.op == "output"
        outputs = [i for i in range(len(results)) if i not in early] if at_end else at.pop(node.name, ())
        leaving = [results[i] for i in outputs if isinstance(results[i], fx.Node)]
        for read in leaving if at_end else (*node.all_input_nodes, *leaving):
            if root_of[read] in left:
                raise VerificationError(f"{read.name!r} is read again after it has left", node=node.name)
        computed.add(node)
        if not computed.issuperset(leaving):
            raise VerificationError(f"a gradient leaves after {node.name!r}, before it is computed", node=node.name)
        left.update(root_of[n] for n in (*leaving, *(parameter[i] for i in outputs if i in parameter)))
    if at:
        raise VerificationError(f"a gradient leaves after {next(iter(at))!r}, which there is not")


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


Numbers = dict[Any, Any]  # node -> its number, or a number for each of its results


class _Walk:
    """Numbers the values of one execution, which may span several graphs (forward, then backward)."""

    def __init__(self, numbering: Numbering, root: fx.GraphModule, *, trusted: bool = False) -> None:
        self.numbering, self.root, self.trusted = numbering, root, trusted
        self.draws: dict[str, int] = {}
        self.root_of: dict[Any, Any] = {}  # node -> the memory it lives in, named by the node that made it
        self.protected: set[Any] = set()  # memory that the caller sees
        self.lost: set[fx.Node] = set()

    def run(self, graph: fx.Graph, inputs: dict[fx.Node, Number]) -> list[Any]:
        numbers: Numbers = dict(inputs)
        for node in graph.nodes:
            interrupt_point()
            if node.op == "get_attr":
                numbers[node] = self.numbering.number(("constant", id(attrgetter(str(node.target))(self.root))))
                self.numbering.know(numbers[node], node.meta.get("val")) if self.trusted else None
                self.root_of[node] = node
            elif node.op == "call_function":
                self._check_read(node)
                numbers[node] = self._call(node, numbers)
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

    def _call(self, node: fx.Node, numbers: Numbers) -> Any:
        if node.target is get_rng_state:
            state = self._state(str(node.args[0]))
            if state not in self.numbering.states:
                raise VerificationError(f"{node.name!r} takes a state that the traced step does not", node=node.name)
            return state
        if node.target is operator.getitem:
            return self._getitem(node, numbers)
        if node.target is run_with_rng_state:
            lent, device, target, *args = node.args
            drawn: Any = (str(device), numbers.get(lent))
            kwargs = dict(node.kwargs)
        else:
            (target, kwargs), args, drawn = functional_form(node), list(node.args), self._draw(node)

        def known(argument: fx.Node) -> Any:
            if argument not in numbers:
                raise VerificationError(f"{argument.name!r} is read before it is computed", node=argument.name)
            return Known(numbers[argument])

        given: Any = fx.node.map_arg((tuple(args), kwargs), known)
        found = NumberedCall(self.numbering, self.trusted, node, drawn).expand(target, *given)
        if self.trusted:
            value: Any = node.meta.get("val")
            for number, of in zip(found, value, strict=True) if isinstance(found, tuple) else ((found, value),):
                self.numbering.know(number, of)
        return found

    def _getitem(self, node: fx.Node, numbers: Numbers) -> Number:
        results, index = numbers.get(node.args[0]), node.args[1]
        if not isinstance(results, tuple) or index not in range(len(results)):
            raise VerificationError(f"{node.name!r} takes a result that there is not", node=node.name)
        number: Number = results[index]  # type: ignore[index]
        return number

    def _draw(self, node: fx.Node) -> Any:
        """The state of the generator that a random op draws from, and which it leaves in the next one."""
        if not is_random(node):
            return None
        device = str(device_of(node))
        state = self._state(device)
        self.draws[device] = self.draws.get(device, 0) + 1
        if self.trusted:
            self.numbering.states.add(state)
        return device, state

    def _state(self, device: str) -> Number:
        return self.numbering.number(("rng", device, self.draws.get(device, 0)))

    def _check_read(self, node: fx.Node) -> None:
        for argument in node.all_input_nodes:
            if argument in self.lost:
                message = f"{node.name!r} reads {argument.name!r} after it was overwritten"
                raise VerificationError(message, node=node.name)

    def _place(self, node: fx.Node, numbers: Numbers) -> None:
        """Note where the node's value lives, and what an in-place op destroys."""
        first = node.args[0] if node.args else None
        written = donated_argument(node)
        if written is not None:
            self._check_write(node, written, numbers)
            memory = self.root_of[written]
            self.lost.update(n for n, m in self.root_of.items() if m == memory)
            # What asks who else holds the memory takes its own where somebody does: either way its result is its own.
            self.root_of[node] = node if node.target in CHECKS_OWNER else memory
        elif node.target is operator.getitem and isinstance(first, fx.Node):
            self.root_of[node] = self.root_of[first] if is_view(first) else (first, node.args[1])
        elif is_view(node):
            source = aliased_argument(node)
            self.root_of[node] = self.root_of[source] if source is not None else node
        else:
            self.root_of[node] = node

    def _check_write(self, node: fx.Node, written: fx.Node, numbers: Numbers) -> None:
        memory, value = self.root_of[written], self.numbering.value
        allowed = [p for p, twin in donations(node).items() if twin.target is node.target and p < len(node.args)]
        if not any(node.args[p] is written for p in allowed):
            raise VerificationError(f"{node.name!r} may not write over {written.name!r}", node=node.name)
        if any(a is not written and self.root_of[a] == memory for a in node.all_input_nodes):
            raise VerificationError(f"{node.name!r} writes to memory that it reads otherwise", node=node.name)
        own = getattr(memory, "op", "call_function") == "call_function"
        if (not own or memory in self.protected) and node.target not in CHECKS_OWNER:
            raise VerificationError(f"{node.name!r} writes to memory it does not own", node=node.name)
        if layout_of(value(numbers[written])) != layout_of(value(numbers[node])):
            raise VerificationError(f"{node.name!r} does not fit over {written.name!r}", node=node.name)


