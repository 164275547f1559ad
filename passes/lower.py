"""lower: annotated joint graph -> `solvers.Problem`, and the way back from a Problem's indices to nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from passes._torch import is_dense
from solvers.order import backward_order, in_order
from solvers.problem import Op, Problem, Tensor

from .alias import Aliases, Storage, ancestors, is_compute
from .device import kind_of
from .errors import Unsupported
from .leaves import Leave, leaves
from .memory import granule, round_up, span
from .ops import (
    CHECKS_OWNER,
    donations,
    ignored_by,
    is_collective,
    is_random,
    must_run_once,
)
from .profile import OpProfile
from .run.replay import is_counter
from .tape import NO_TAPE
from .trace.capture import Traced
from .trace.carried import is_of_state
from .trace.given import changed_slots
from .trace.settings import set_slots
from .trace.templates import argument_path

RETURN_GRADIENTS = "return_gradients"
LEFT_BEFORE = "left_before"  # the op that stands for what the step before has left in attributes
UPDATE = "optimizer_step"  # the op that stands for the update of the parameters
NO_HOOKS: Mapping[str, int] = MappingProxyType({})


GlueEvents = tuple[tuple[int, int, int | None], ...]
KEPT = -2  # in the place of an allocation: one that is made once and stays for ever


@dataclass(frozen=True)
class Lowered:
    """A Problem, with what each op and tensor of it is in the graph.

    Attributes:
        nodes: for each op its node; None for the ops that are not a node (saving RNG state, tangents, gradient copies).
        storages: for each tensor its storage; None likewise.
        rng_state: for each random op (index) the tensor that holds the generator's state before it ran.
        tangents: the tensors that the backward starts from, in order.
        tangent_op: index of the op that stands for the backward's start.
        accumulated_bytes: gradients from before the step, part of the Problem's static bytes.
        leaves: which gradients leave before the backward's end, after which op.
        arriving: bytes of the gradients that are added to those from before, by the op that stands for it.
        gradient_bytes: the size of each parameter's gradient.
        glue: for ops that stand for code that is not in the graph, by index, what that asks of the allocator, in
            order: signed sizes, which allocation it is (or `KEPT`), and the tensor that it is for.
        before: for each tensor that the step before has left in attributes, the one that this step leaves there.
    """

    problem: Problem
    nodes: tuple[fx.Node | None, ...]
    storages: tuple[Storage | None, ...]
    rng_state: dict[int, int]
    tangents: tuple[int, ...]
    tangent_op: int
    node_op: dict[fx.Node, int]
    storage_tensor: dict[Storage, int]
    accumulated_bytes: int = 0
    leaves: tuple[Leave, ...] = ()
    arriving: Mapping[int, int] = field(default_factory=dict)
    gradient_bytes: tuple[int, ...] = ()
    glue: Mapping[int, GlueEvents] = field(default_factory=dict)
    before: Mapping[int, int] = field(default_factory=dict)


def split_nodes(traced: Traced) -> tuple[list[fx.Node], list[fx.Node]]:
    """Kernels of the forward and of the backward, in execution order.

    The forward ends at the last node that a forward output needs or that the tracer did not mark as backward.
    """
    graph = traced.graph_module.graph
    outputs: Any = graph.output_node().args[0]
    forward_outputs = {n for n in outputs[: traced.num_forward_outputs] if isinstance(n, fx.Node)}
    needed = ancestors(forward_outputs)
    forward: list[fx.Node] = []
    backward: list[fx.Node] = []
    for node in graph.nodes:
        if not is_compute(node):
            continue
        late = node.meta.get("partitioner_tag") == "is_backward" and node not in needed
        (backward if late else forward).append(node)
    return forward, backward


def lower(
    traced: Traced,
    aliases: Aliases,
    profiles: dict[fx.Node, OpProfile],
    cost: Callable[[OpProfile], float],
    *,
    device: torch.device,
    reserve_bytes: int = 0,
    keep_outputs: bool = True,
    once: Collection[fx.Node] = (),
    gradients: str = "fresh",
    step_bytes: int = 0,
    hook_bytes: Mapping[str, int] = NO_HOOKS,
    region: bool = False,
    lasting: bool = True,
    in_turn: bool = False,
) -> Lowered:
    """Make the Problem of a traced step.

    Args:
        keep_outputs: whether what the model returns stays alive through the backward, besides what it starts from.
        once: kernels that the user does not want to run again.
        gradients: what becomes of a parameter's gradient as it leaves the backward: it stays ("fresh"), is added to
            the one that the parameter has already ("accumulated"), or a hook frees it ("consumed").
        step_bytes: what the update of the parameters, an op of its own at the end, holds for a moment.
        hook_bytes: what a hook that consumes the gradient holds for a moment, by the parameter's name.
        region: the step is a part of a larger one: its inputs are tensors that it holds until it has read them, what
            it returns is computed once, and what becomes of that and of its gradients is not its affair.
        lasting: whether the gradients that the backward starts from are there until it ends.
        in_turn: whether gradients wait for those that come before them in a plain step also where they would be freed
            sooner in another order; where they stay, they do.
    """
    lowering = _Lowering(traced, aliases, profiles, cost, device, frozenset(once), gradients, region, lasting, in_turn)
    return lowering.build(reserve_bytes, keep_outputs, step_bytes, hook_bytes)


class _Lowering:
    def __init__(
        self,
        traced: Traced,
        aliases: Aliases,
        profiles: dict[fx.Node, OpProfile],
        cost: Callable[[OpProfile], float],
        device: torch.device,
        once: frozenset[fx.Node],
        gradients: str,
        region: bool,
        lasting: bool,
        in_turn: bool,
    ) -> None:
        self.traced, self.aliases, self.profiles, self.cost, self.device = traced, aliases, profiles, cost, device
        self.once, self.gradients, self.region, self.lasting, self.in_turn = once, gradients, region, lasting, in_turn
        self.granule = granule(device)
        self.ops: list[Op] = []
        self.tensors: list[Tensor] = []
        self.nodes: list[fx.Node | None] = []
        self.storages: list[Storage | None] = []
        self.storage_tensor: dict[Storage, int] = {}
        self.rng_state: dict[int, int] = {}
        self.returned: dict[Storage, None] = {}
        self.handed: frozenset[Storage] = frozenset()  # what a region returns
        self.fates: dict[int, _Fate] = {}
        self.arriving: dict[int, int] = {}

    def build(self, reserve_bytes: int, keep_outputs: bool, step_bytes: int, hook_bytes: Mapping[str, int]) -> Lowered:
        forward, backward = split_nodes(self.traced)
        self.returned = self._returned()
        self.handed = frozenset(self._returned(len(self.traced.mutated))) if self.region else frozenset()
        placeholders = self.traced.placeholders
        primals, tangents = placeholders[: self.traced.num_primals], placeholders[self.traced.num_primals :]
        mutated = {self.aliases.of[primals[i]] for i in self.traced.overwritten}
        replaced = self._carried()
        carried = dict.fromkeys(s for node in replaced for s in self.aliases.storages(node))
        held = self._add_inputs(primals[len(self.traced.state) :]) if self.region else []
        held += self._add_kept()
        old = self._add_left(replaced)
        held += [self.storage_tensor[storage] for storage in carried]
        for node in forward:
            self._add_node(node, True, mutated)
        self._add_handover(old)
        num_forward = len(self.ops)
        tangent_tensors = self._add_tangents(tangents, held)
        for node in backward:
            self._add_node(node, False, mutated)
        outputs = self._outputs(keep_outputs and not self.region)
        # Between regions others account for gradients, as they find them at a region's end.
        self.fates = {} if self.region else self._fates(primals, hook_bytes)
        lasting = tangent_tensors if self.lasting else ()
        pinned = dict.fromkeys((*(t for t in outputs if t not in self._let_go()), *lasting))
        accumulated = sum(fate.bytes for fate in self.fates.values() if fate.kind == "accumulated")
        given = len(self.traced.state) if self.region else len(primals)
        resident = self.traced.resident or [storage.bytes for p in primals for storage in self.aliases.storages(p)]
        sizes = (size for p, size in zip(primals[:given], resident, strict=False) if self.aliases.of[p] not in carried)
        static = sum(round_up(size, self.granule) for size in sizes) + accumulated + reserve_bytes
        static += self._constant_bytes()
        static += sum(kept_sizes(forward, self.profiles)) + sum(kept_sizes(backward, self.profiles))
        problem = Problem(tuple(self.ops), tuple(self.tensors), num_forward, tuple(pinned), static)
        order = backward_order(problem, self._movable(num_forward))
        problem, self.nodes = in_order(problem, order), [self.nodes[i] for i in order]
        tensors = self.storage_tensor
        in_turn = self.in_turn or self.gradients == "fresh"
        groups = leaves(self.traced, self.aliases, problem, tuple(self.nodes), tensors, in_turn)
        left = self._add_leaves(problem, tuple(g for g in groups if self.fates.keys() >= set(g.primals)))
        if self.region:
            self._add_op(Op(RETURN_GRADIENTS, tuple(outputs), (), 0, 0, False), None)
            pinned = {}
        else:
            pinned.update(dict.fromkeys(t for fate in self.fates.values() for t in fate.copy))
            pinned = self._add_end(pinned, lasting, step_bytes)
        problem = replace(problem, ops=tuple(self.ops), tensors=tuple(self.tensors), outputs=tuple(pinned))
        nodes = tuple(self.nodes)
        return Lowered(
            problem, nodes, tuple(self.storages), self.rng_state, tangent_tensors, num_forward,
            {n: i for i, n in enumerate(nodes) if n is not None}, self.storage_tensor, accumulated, left, self.arriving,
            tuple(fate.bytes for i, fate in self.fates.items() if i < len(self.traced.state)),
            before={t: tensors[s] for t, s in old.items() if s in tensors},
        )  # fmt: skip

    def _movable(self, num_forward: int) -> list[int]:
        """Backward kernels whose place among the others is free: they draw nothing and talk to no other device."""
        return [
            i for i in range(num_forward, len(self.nodes))
            if (node := self.nodes[i]) is not None and not is_random(node) and not is_collective(node)
        ]  # fmt: skip

    def _add_node(self, node: fx.Node, forward: bool, mutated: set[Any]) -> None:
        read = [s for a in node.all_input_nodes for s in self.aliases.storages(a)]
        inputs = tuple(dict.fromkeys(self.storage_tensor[s] for s in read if s in self.storage_tensor))
        replay: tuple[int, ...] = ()
        recomputable = forward and node not in self.once and must_run_once(node, self.device) is None
        if not self.handed.isdisjoint(self.aliases.storages(node)):
            recomputable = False
        if _reads_overwritten(node, mutated, self.aliases):
            recomputable = False
            if not forward:
                raise Unsupported(
                    "a buffer changed in forward", node.name, "the backward needs its value from before the change",
                    "Use a clone() of the buffer in the computation.",
                )  # fmt: skip
        if recomputable and is_random(node):
            replay = (self._add_rng_state(node),)
        outputs = [self._add_tensor(node.name, s, forward) for s in self.aliases.storages(node)]
        profiled = self.profiles[node]
        # Running again holds the generator's own state beside the lent one (`run_with_rng_state`).
        workspace = profiled.workspace_bytes + (self._rng_bytes() if replay else 0)
        self._add_op(
            Op(node.name, inputs, tuple(outputs), round(self.cost(profiled)), workspace,
               recomputable, replay, reuse=self._reuse(node, outputs)),
            node,
        )  # fmt: skip
        if replay:
            self.rng_state[len(self.ops) - 1] = replay[0]

    def _add_rng_state(self, node: fx.Node) -> int:
        tensor = self._new_tensor(Tensor(f"{node.name}_rng", self._rng_bytes(), "rng"), None)
        self._add_op(Op(f"{node.name}_rng", (), (tensor,), 0, 0, False, optional=True), None)
        return tensor

    def _reuse(self, node: fx.Node, outputs: list[int]) -> tuple[int, ...]:
        """The tensors of arguments whose memory the op could write its result into."""
        found = (self._taken(node, node.args[p], outputs) for p in sorted(donations(node)) if p < len(node.args))
        return tuple(dict.fromkeys(t for t in found if t is not None))

    def _taken(self, node: fx.Node, source: Any, outputs: list[int]) -> int | None:
        if not isinstance(source, fx.Node):
            return None
        storage = self.aliases.of[source]
        if not isinstance(storage, Storage) or (storage.static and node.target not in CHECKS_OWNER):
            return None
        taken = self.storage_tensor.get(storage)  # of what is static, inputs of a region alone
        others = [a for a in node.all_input_nodes if a is not source]
        if taken is None or any(storage in self.aliases.storages(a) for a in others):
            return None
        if storage in self.returned and node.target not in CHECKS_OWNER:
            return None
        same = _same_layout(source.meta["val"], node.meta["val"])
        return taken if same and self.tensors[taken].bytes == self.tensors[outputs[0]].bytes else None

    def _rng_bytes(self) -> int:
        return round_up(kind_of(self.device).rng_state_bytes, self.granule)

    def _add_kept(self) -> list[int]:
        """The old buffers that the runtime copies, should the backward start elsewhere than planned (see `replay`)."""
        kept = [self.traced.placeholders[i] for i in kept_primals(self.traced)]
        copied = [self.aliases.of[p] for p in kept if not is_counter(p.meta["val"], self.device)]
        size = sum(map(self._bytes, copied))
        if not size:
            return []
        tensor = self._new_tensor(Tensor("kept_for_replay", size, "rng"), None)
        self._add_op(Op("kept_for_replay", (), (tensor,), 0, 0, False), None)
        return [tensor]

    def _returned(self, first: int = 0) -> dict[Storage, None]:
        """Storages that the forward copies over a primal, which come first, or returns."""
        outputs: Any = self.traced.graph_module.graph.output_node().args[0]
        nodes = (n for n in outputs[first : self.traced.num_forward_outputs] if isinstance(n, fx.Node))
        return dict.fromkeys(s for n in nodes for s in self.aliases.storages(n))

    def _add_left(self, carried: Mapping[fx.Node, fx.Node]) -> dict[int, Storage]:
        """What the step before has left in attributes until the forward ends, each with what this step leaves there.

        What forward reads there, too, is among the inputs, `carried`, and held until it is read no more.
        """
        stay = [self._left_at(i) for _, i in set_slots(self.traced.settings)]
        storages = dict.fromkeys(s for n in stay if isinstance(n, fx.Node) for s in self.aliases.storages(n))
        for node in carried.values():
            for own in self.aliases.storages(node):
                storages.pop(own, None)
        found = {
            self._new_tensor(Tensor(f"{s.node.name}_before", self._bytes(s), "output"), None): s
            for s in storages if isinstance(s, Storage) and not s.static
        }  # fmt: skip
        for given, made in carried.items():
            storage, (left, *_) = self.aliases.of[given], self.aliases.storages(made)
            assert isinstance(storage, Storage)
            if storage not in self.storage_tensor:
                size = max(self._bytes(storage), self._bytes(left))  # it may be a part of a larger one
                index = self.storage_tensor[storage] = self._new_tensor(Tensor(given.name, size, "output"), storage)
                found[index] = left
        if found:
            self._add_op(Op(LEFT_BEFORE, (), tuple(found), 0, 0, False), None)
        return found

    def _left_at(self, number: int) -> Any:
        """What is returned as a leaf of the outputs; None where that is an input."""
        outputs: Any = self.traced.graph_module.graph.output_node().args[0]
        leaf = self.traced.outputs[number]
        return None if leaf.input is not None else outputs[len(self.traced.mutated) + leaf.index]

    def _carried(self) -> dict[fx.Node, fx.Node]:
        """State among the inputs, and buffers, each with what this step leaves in its place."""
        traced = self.traced
        if self.region or not (traced.changes or traced.settings):
            return {}
        inputs = traced.placeholders[len(traced.state) : traced.num_primals]
        named = {argument_path(name): node for name, node in zip(traced.input_names, inputs, strict=True)
                 if is_of_state(name)}  # fmt: skip
        named |= {
            f"self.{entry.name}": traced.placeholders[i] for i, entry in enumerate(traced.state)
            if not entry.is_parameter and i not in traced.mutated
        }  # fmt: skip
        made = {path: self._left_at(i) for path, i in (*changed_slots(traced.changes), *set_slots(traced.settings))}
        return {node: made[path] for path, node in named.items() if isinstance(made.get(path), fx.Node)}

    def _add_handover(self, old: Iterable[int]) -> None:
        """Outputs and new values of overwritten primals live until the forward ends."""
        read = (*(self.storage_tensor[s] for s in self.returned if s in self.storage_tensor), *old)
        if read:
            self._add_op(Op("return_outputs", read, (), 0, 0, False), None)

    def _add_inputs(self, inputs: list[fx.Node]) -> list[int]:
        """The inputs of a region, which whoever made them may drop before the region has read them."""
        found = []
        for node in inputs:
            storage = self.aliases.of[node]
            assert isinstance(storage, Storage)
            found.append(self._new_tensor(Tensor(node.name, self._bytes(storage)), storage))
            self.storage_tensor[storage] = found[-1]
        self._add_op(Op("inputs", (), tuple(found), 0, 0, False), None)
        return found

    def _add_tangents(self, tangents: list[fx.Node], held: list[int]) -> tuple[int, ...]:
        """What autograd hands over is dense and lives on; where the trace wants gaps (a view's), a copy is made.

        Args:
            held: what the runtime holds until the backward begins, should it have to start elsewhere than planned.
        """
        given, written = [], []
        for node in tangents:
            storage, value = self.aliases.of[node], node.meta["val"]
            assert isinstance(storage, Storage)
            size = round_up(value.numel() * value.element_size(), self.granule)
            index = self._new_tensor(Tensor(node.name, size, "tangent"), storage)
            given.append(index)
            if not is_dense(value):
                size = round_up(span(value) * value.element_size(), self.granule)
                index = self._new_tensor(Tensor(f"{node.name}_laid_out", size, "temporary"), storage)
                written.append(index)
            self.storage_tensor[storage] = index
        self._add_op(Op("tangents", tuple(held), (*given, *written), 0, 0, False), None)
        return tuple(given)

    def _fates(self, primals: list[fx.Node], hook_bytes: Mapping[str, int]) -> dict[int, _Fate]:
        """What becomes of each primal's gradient.

        `AccumulateGrad` copies one that is not a dense tensor of its own (shared, expanded, other strides).
        """
        fates, seen = {}, set[Storage]()
        names = {i: entry.name for i, entry in enumerate(self.traced.state) if entry.is_parameter}
        for i, (primal, gradient) in enumerate(zip(primals, self.traced.gradients, strict=False)):
            if not isinstance(gradient, fx.Node):
                continue
            storage, value = self.aliases.of[gradient], gradient.meta["val"]
            assert isinstance(storage, Storage)
            copied = storage in seen or storage.static or not _stolen(value, primal.meta["val"])
            size = round_up(value.numel() * value.element_size(), self.granule)
            kind = self.gradients if i in names and self.gradients != "fresh" else "copied" if copied else "kept"
            if kind != "accumulated":
                seen.add(storage)
            moment = hook_bytes.get(names.get(i, ""), 0) + copied * size if kind == "consumed" else 0
            fates[i] = _Fate(kind, primal.name, self.storage_tensor.get(storage), size, moment)
        return fates

    def _let_go(self) -> frozenset[int]:
        """Tensors of gradients of which nothing but copies stays, or nothing at all."""
        kept = {self.storage_tensor[s] for s in self.returned if s in self.storage_tensor}
        kept |= {fate.tensor for fate in self.fates.values() if fate.kind == "kept" and fate.tensor is not None}
        return frozenset(f.tensor for f in self.fates.values() if f.tensor is not None) - kept

    def _add_leaves(self, problem: Problem, groups: tuple[Leave, ...]) -> tuple[Leave, ...]:
        """Put ops where gradients leave into the ordered backward; the groups, by the place of their last op."""
        nodes, self.ops, self.nodes = self.nodes, [], []
        at: dict[int, list[Leave]] = {}
        for group in groups:
            at.setdefault(group.after, []).append(group)
        left = []
        for i, op in enumerate(problem.ops):
            self._add_op(op, nodes[i])
            for group in at.get(i, ()):
                # Hooks run one by one: that of the first while all gradients of the group are there.
                primals = tuple(sorted(group.primals, key=lambda i: -self.fates[i].moment))
                self._add_leave(primals)
                left.append(Leave(len(self.ops) - 1, primals))
        early = {i for group in groups for i in group.primals}
        self._add_leave(tuple(i for i in self.fates if i not in early))
        return tuple(left)

    def _add_leave(self, group: tuple[int, ...]) -> None:
        """What happens as these primals' gradients leave together: copies, additions, hooks."""
        fates = [self.fates[i] for i in group]
        for fate in (f for f in fates if f.kind == "copied"):
            fate.copy.append(self._new_tensor(Tensor(f"{fate.name}_grad", fate.bytes, "gradient"), None))
            self._add_op(Op(f"{fate.name}_grad", fate.read, tuple(fate.copy), 0, 0, False), None)
        gone = [f for f in fates if f.kind in ("accumulated", "consumed")]
        if gone:
            read = tuple(dict.fromkeys(t for f in gone for t in f.read))
            if added := sum(f.bytes for f in gone if f.kind == "accumulated"):
                self.arriving[len(self.ops)] = added
            self._add_op(Op(f"{gone[0].name}_{gone[0].kind}", read, (), 0, max(f.moment for f in gone), False), None)

    def _add_end(self, pinned: dict[int, None], tangents: tuple[int, ...], step_bytes: int) -> dict[int, None]:
        """What follows the backward; returns what is still there then, of `pinned`."""
        if not step_bytes:
            return pinned
        self._add_op(Op(RETURN_GRADIENTS, tangents, (), 0, 0, False), None)
        self._add_op(Op(UPDATE, (), (), 0, step_bytes, False), None)
        return {t: None for t in pinned if t not in tangents}

    def _add_tensor(self, name: str, storage: Storage, forward: bool) -> int:
        suffix = f"[{storage.index}]" if isinstance(self.aliases.of[storage.node], tuple) else ""
        index = self._new_tensor(
            Tensor(name + suffix, self._bytes(storage), "activation" if forward else "temporary"), storage
        )
        self.storage_tensor[storage] = index
        return index

    def _new_tensor(self, tensor: Tensor, storage: Storage | None) -> int:
        self.tensors.append(tensor)
        self.storages.append(storage)
        return len(self.tensors) - 1

    def _add_op(self, op: Op, node: fx.Node | None) -> None:
        self.ops.append(op)
        self.nodes.append(node)

    def _outputs(self, keep_outputs: bool) -> list[int]:
        """Gradients, and what the forward returned; only what the backward starts from unless outputs are kept.

        A region holds nothing of what it returned: glue does, as long as it needs it.
        """
        outputs: Any = self.traced.graph_module.graph.output_node().args[0]
        started = {leaf.index for leaf in self.traced.outputs if leaf.differentiated or leaf.stays if not self.region}
        result = []
        for position, node in enumerate(outputs):
            if not isinstance(node, fx.Node) or position < len(self.traced.mutated):
                continue
            storage = self.aliases.of[node]
            if isinstance(storage, Storage) and storage in self.storage_tensor:
                index = self.storage_tensor[storage]
                category = "output" if position < self.traced.num_forward_outputs else "gradient"
                if self.tensors[index].category != "tangent":
                    self.tensors[index] = Tensor(self.tensors[index].name, self.tensors[index].bytes, category)
                if category == "gradient" or keep_outputs or position - len(self.traced.mutated) in started:
                    result.append(index)
        return result

    def _bytes(self, storage: Any) -> int:
        """Measured size where the shape rule does not know it (an opaque workspace), else the traced one."""
        profiled = self.profiles.get(storage.node)
        measured = profiled.result_bytes if profiled is not None else None
        size = storage.bytes
        if measured is not None and storage.index < len(measured):
            size = max(size, measured[storage.index])
        return round_up(size, self.granule)

    def _constant_bytes(self) -> int:
        """What the step reads that is neither parameter, buffer nor input: quantized weights, tables."""
        module = self.traced.graph_module
        nodes = module.graph.find_nodes(op="get_attr")
        held = {getattr(module, str(n.target)).untyped_storage().data_ptr(): self.aliases.of[n] for n in nodes}
        return sum(map(self._bytes, held.values()))


@dataclass
class _Fate:
    """What becomes of a gradient as it leaves.

    Attributes:
        kind: it is "kept", "copied", "accumulated" or "consumed".
        name: its primal's name in the graph.
        tensor: what holds it; None where that is resident throughout.
        bytes: its size as a tensor of its own.
        moment: what is held for a moment as it leaves.
        copy: the tensor that it is copied to.
    """

    kind: str
    name: str
    tensor: int | None
    bytes: int
    moment: int = 0
    copy: list[int] = field(default_factory=list)

    @property
    def read(self) -> tuple[int, ...]:
        return () if self.tensor is None else (self.tensor,)


def _same_layout(source: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether `result` fits exactly over `source`, and `source` is all of its storage."""
    return (
        source.shape == result.shape and source.stride() == result.stride() and source.dtype == result.dtype
        and source.storage_offset() == 0 and is_dense(source)
        and source.untyped_storage().nbytes() == result.untyped_storage().nbytes()
    )  # fmt: skip


def kept_sizes(nodes: Collection[fx.Node], profiles: Mapping[fx.Node, OpProfile]) -> tuple[int, ...]:
    """What ops that run in one thread leave on the device for ever, each size once (cuBLAS has a handle per thread)."""
    return tuple(dict.fromkeys(size for n in nodes for _, size in (profiles[n].tape or NO_TAPE).kept))


def stateful_primals(traced: Traced) -> tuple[int, ...]:
    """Overwritten primals whose old value a replay needs: it decides a result, or which course forward takes.

    Statistics of batch norms do neither.
    """
    outputs: Any = traced.graph_module.graph.output_node().args[0]
    results = {n for n in outputs[len(traced.mutated) :] if isinstance(n, fx.Node)}
    asked = frozenset[int]() if traced.guard is None else traced.guard.given
    return tuple(i for i in traced.mutated if i in asked or _decides(traced.placeholders[i], results))


def _decides(primal: fx.Node, results: set[fx.Node]) -> bool:
    """Whether a result is computed from it: a counter's next value, which no result reads, is none."""
    reached, waiting = {primal}, [primal]
    while waiting:
        node = waiting.pop()
        new = [u for u in node.users if u.op != "output" and u not in reached and node in _heeded(u)]
        waiting += new
        reached.update(new)
    return not reached.isdisjoint(results - {primal})


def kept_primals(traced: Traced) -> tuple[int, ...]:
    """Those whose old value is kept: where a loss is all that has a gradient, a backward under autocast is refused."""
    starts = [leaf for leaf in traced.outputs if leaf.input is None and leaf.requires_grad]
    results: Any = traced.graph_module.graph.output_node().args[0]
    alone = len(starts) == 1 and starts[0].differentiated
    if alone and results[len(traced.mutated) + starts[0].index].meta["val"].numel() == 1:
        return ()
    return stateful_primals(traced)


def why_once(node: fx.Node, traced: Traced, aliases: Aliases, device: torch.device) -> str | None:
    """Why a forward kernel may not run again whatever the user wants, or None."""
    mutated = {aliases.of[traced.placeholders[i]] for i in traced.overwritten}
    changed = "it reads what the forward changes" if _reads_overwritten(node, mutated, aliases) else None
    return must_run_once(node, device) or changed


def _reads_overwritten(node: fx.Node, mutated: set[Any], aliases: Aliases) -> bool:
    """Whether running the node after the forward would see a primal's new value where it matters."""
    return any(s in mutated for a in _heeded(node) for s in aliases.storages(a))


def _heeded(node: fx.Node) -> list[fx.Node]:
    """The arguments that its results depend on."""
    rule = ignored_by(node.target, node.args)
    read: list[fx.Node] = []  # arguments may be nested in lists
    visit = fx.node.map_arg
    visit(tuple(a for i, a in enumerate(node.args) if rule is None or i not in rule.positions), read.append)
    visit(dict(node.kwargs), read.append)
    return read


def _stolen(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether autograd keeps the gradient itself instead of a copy (`AccumulateGrad`, accumulate_grad.h).

    Of dimensions of one element (a 1x1 convolution's) no stride counts.
    """
    if not is_dense(gradient):
        return False
    if not is_dense(parameter):
        return gradient.is_contiguous()
    steps = zip(gradient.shape, gradient.stride(), parameter.stride(), strict=True)
    return all(mine == its for size, mine, its in steps if size != 1)
