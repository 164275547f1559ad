"""fuse: the traced graph -> the graph that is planned, with fused ops in the place of others, and ops taken apart.

Nothing here is believed: `passes.verify` proves a rewrite from the graph as it was traced.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import fx

from passes.alias import aliased_argument, is_view
from passes.memory import span
from passes.ops import IGNORED_ARGUMENTS, functional_form, ignored_by

from . import match, records
from .fused import Fused, values_of
from .meaning import Call
from .normal_form import COPY, SCATTERS, is_copied_over, same_node

aten = torch.ops.aten
STATISTICS = frozenset({records.BATCH_NORM_STATISTICS.op, records.BATCH_NORM_MOMENTS.op})
NORMALIZE = frozenset({records.BATCH_NORM.op, records.BATCH_NORM_RELU.op, records.BATCH_NORM_ADD_RELU.op})


def fuse(graph: fx.Graph, callers: Collection[fx.Node] = ()) -> None:
    """Replace and take apart ops where that saves memory or time.

    Args:
        callers: the forward's results whose memory is the caller's once the forward is done, and not planned for.
    """
    write_directly(graph)
    read_resident_statistics(graph)
    split_batch_norms(graph)
    for fused in records.FUSED:
        if fused.pays is not None:
            _replace_all(graph, fused)
    save_logits(graph, callers)
    split_convolutions(graph)


def write_directly(graph: fx.Graph) -> None:
    """`y[i] = x` is traced as a scatter of `copy(y[i], x)`, which copies all of y's memory: scatter x itself."""
    for node in graph.find_nodes(op="call_function", target=COPY):
        view, source = node.args[:2]
        alike = is_copied_over(view.meta["val"], source.meta["val"])
        if alike and all(user.target in SCATTERS and user.args.index(node) == 1 for user in node.users):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            while not view.users and is_view(view):
                unused, view = view, view.args[0]
                graph.erase_node(unused)


def read_resident_statistics(graph: fx.Graph) -> None:
    """A batch norm's backward in training is handed the updated statistics and ignores them: hand it the buffers.

    They are resident anyway; the updated ones would have to be saved, or the whole batch norm recomputed.
    """
    for node in graph.nodes:
        rule = ignored_by(node.target, node.args)
        for place, position in enumerate(sorted(rule.positions) if rule and rule.results is None else ()):
            node.update_arg(position, _buffer(node.args[position], place))


def _buffer(statistics: Any, place: int) -> Any:
    """The statistics before any batch norm updated them; `place` is 0 for means, 1 for variances."""
    while isinstance(statistics, fx.Node) and statistics.target is operator.getitem:
        norm: Any = statistics.args[0]
        if norm.target not in IGNORED_ARGUMENTS:
            break
        statistics = norm.args[sorted(IGNORED_ARGUMENTS[norm.target].positions)[place]]
    return statistics


def _replace_all(graph: fx.Graph, fused: Fused) -> None:
    for node in graph.find_nodes(op="call_function", target=fused.program.target):
        if node.meta.get("partitioner_tag") == "is_backward" or not fused.backward_only:
            _replace(fused, node)


def _replace(fused: Fused, root: fx.Node) -> None:
    assert fused.pays is not None
    for found in match.matches(fused, root):
        inner, values = found.nodes[1:], values_of(found.arguments)
        alone = match.only_reads(inner, found.arguments, found.nodes)
        if alone and fused.pays(*values) and (not fused.adjacent or match.adjacent(found.nodes)):
            match.substitute(fused, root, found.arguments)
            for node in inner:
                match.erase_unread(node)
            return


def save_logits(graph: fx.Graph, callers: Collection[fx.Node]) -> None:
    """Compute cross-entropies from the logits where those are the caller's: no whole log-probabilities."""
    roots = {_root(node) for node in callers}
    for backward in graph.find_nodes(op="call_function", target=records.CROSS_ENTROPY_BACKWARD.op):
        rows: Any = same_node(backward.args[1])
        if rows.target is aten._log_softmax.default and _root(rows.args[0]) in roots:
            _from_logits(rows, backward)


def _from_logits(rows: fx.Node, backward: fx.Node) -> None:
    for picked in list(rows.users):
        found = next(match.matches(records.CROSS_ENTROPY, picked), None)
        if found is None or backward.args[3] is not None:
            continue
        if not match.only_reads((rows,), (), (picked, backward)):
            continue
        match.substitute(records.CROSS_ENTROPY, picked, found.arguments)
        gradient, _, target, _, *rest = backward.args
        logits = found.arguments[0]
        match.substitute(records.CROSS_ENTROPY_LOGITS_BACKWARD, backward, (gradient, logits, target, *rest))
        match.erase_unread(rows)
        return


def _root(node: Any) -> fx.Node:
    """The node that wrote the memory of a value."""
    while is_view(node):
        source = aliased_argument(node)
        node = source if source is not None else node.args[0]  # one of several views
    assert isinstance(node, fx.Node)
    return node


def split_batch_norms(graph: fx.Graph) -> None:
    """Split batch norms on the CPU that are large enough for the kernels of `passes.run.kernels` to be worth it."""
    for split in records.SPLITS[:2]:
        for node in graph.find_nodes(op="call_function", target=split.op):
            values = values_of(node.args)
            if split.when(*values) and records.is_large(values[0]):
                match.take_apart(node, split.parts(*node.args), lambda part: records.BY_OP[part.target].name)


def join_batch_norms(graph: fx.Graph) -> None:
    """Let ATen's one op run where a batch norm's statistics are found and its result is computed right after.

    What follows the batch norm at once is then computed in the memory of its result.
    """
    for found in [n for n in graph.nodes if n.target in STATISTICS]:
        normal = next(match.computes_after(found), None)
        if normal is not None and _normalizes(normal, found):
            _join(found, normal)


def may_be_joined(node: fx.Node) -> bool:
    """Whether `join_batch_norms` may make one op of this and another one."""
    return node.target in STATISTICS or functional_form(node)[0] in NORMALIZE


def _normalizes(normal: fx.Node, found: fx.Node) -> bool:
    """Whether `normal` normalizes the values whose statistics are `found`."""
    if functional_form(normal)[0] not in NORMALIZE or normal.args[0] is not found.args[0]:
        return False
    moments: Any = normal.args[3:5]
    return all(getattr(m, "target", None) is operator.getitem and m.args == (found, i) for i, m in enumerate(moments))


def _join(found: fx.Node, normal: fx.Node) -> None:
    graph, (values, *rest), (weight, bias) = found.graph, found.args, normal.args[1:3]
    with graph.inserting_before(normal):
        if found.target is records.BATCH_NORM_STATISTICS.op:
            arguments = (values, weight, bias, *rest[:2], True, *rest[2:])
            norm = graph.call_function(records.WITH_RUNNING, arguments)
        else:
            norm = graph.call_function(records.ALONE, (values, weight, bias, True, 0.0, *rest))
        norm.meta = {**found.meta, "val": (normal.meta["val"], *found.meta["val"])}
        result = _followed(normal, match.item(graph, norm, 0))
        for read in list(found.users):
            index: Any = read.args[1]
            read.replace_all_uses_with(match.item(graph, norm, index + 1))
    normal.replace_all_uses_with(result)
    result.meta = dict(normal.meta)
    for node in (normal, *found.users, found):
        graph.erase_node(node)


def _followed(normal: fx.Node, result: fx.Node) -> fx.Node:
    """What is done to a batch norm's result, in its memory."""
    target, graph = functional_form(normal)[0], result.graph
    if target is records.BATCH_NORM_RELU.op:
        return graph.call_function(aten.relu_.default, (result,))
    if target is records.BATCH_NORM_ADD_RELU.op:
        return graph.call_function(torch.ops.planner.add_relu.out, (result, normal.args[5]), {"out": result})
    return result


def split_convolutions(graph: fx.Graph) -> None:
    """Split each `convolution_backward` that computes the input's and another gradient, if it is worth it.

    That is where the input is larger than the weight: two calls prepare the weight twice. Another tensor that is
    resident anyway stands for the input where only its shape is read (which a kernel may copy out to its full size).
    """
    nodes = graph.find_nodes(op="call_function", target=records.CONVOLUTION_BACKWARD)
    read: Any = [n.args[records.WEIGHT] for n in nodes if records.has_input_half(*n.args)]
    weights = list(dict.fromkeys(w for w in read if w.op == "placeholder"))
    for node in nodes:
        values, mask = values_of(node.args), node.args[records.MASK]
        if mask[0] and any(mask[1:]) and values[records.INPUT].numel() > values[records.WEIGHT].numel():
            candidates = (node.args[records.GRADIENT], node.args[records.WEIGHT], *weights)
            stand_in = partial(_stand_in, node, candidates)
            match.take_apart(node, records.halves(*node.args), partial(_half, node), stand_in)


def join_convolutions(graph: fx.Graph, peak_bytes: int) -> None:
    """Let ATen's one op run where a convolution's halves follow each other: it prepares less, and is one call.

    All that either of them holds is then held at once, which has to be below the peak.
    """
    found = graph.find_nodes(op="call_function", target=records.CONVOLUTION_BACKWARD)
    for half in [node for node in found if node.args[records.MASK] == [True, False, False]]:
        before, after = (next(find(half), None) for find in (match.computes_before, match.computes_after))
        for others in (node for node in (before, after) if node is not None and _are_halves(half, node)):
            first, second = (others, half) if others is before else (half, others)
            mask: Any = second.args[records.MASK]
            values = (v for v, wanted in zip(second.meta["val"], mask, strict=True) if wanted)
            held = first.meta["moment"].bytes + second.meta["moment"].workspace
            ready = all(read < first for read in others.all_input_nodes)
            if ready and held + sum(v.numel() * v.element_size() for v in values) <= peak_bytes:
                _run_at_once(first, half, others)
                break


def _are_halves(half: fx.Node, others: fx.Node) -> bool:
    """Whether `half` computes the gradient of the input alone, and `others` of the same convolution the other ones."""
    if half.target is not others.target:
        return False
    (gradient, values, *rest, _), (other_gradient, other_values, *other_rest, mask) = half.args, others.args
    same = gradient is other_gradient and rest == other_rest
    alike = values.meta["val"].stride() == other_values.meta["val"].stride()  # type: ignore[union-attr]
    return same and alike and not mask[0]  # type: ignore[index]


def _run_at_once(first: fx.Node, half: fx.Node, others: fx.Node) -> None:
    graph, mask = half.graph, others.args[records.MASK]
    with graph.inserting_before(first):
        whole = graph.call_function(others.target, (*others.args[: records.MASK], [True, *mask[1:]]))  # type: ignore
    whole.meta = {**others.meta, "val": (half.meta["val"][0], *others.meta["val"][1:])}
    for node in (half, others):
        stand_in: Any = node.args[1]
        node.replace_all_uses_with(whole)
        graph.erase_node(node)
        if stand_in.target is aten.as_strided.default and not stand_in.users:
            graph.erase_node(stand_in)


def _half(node: fx.Node, part: Call) -> str:
    return f"{node.name}_{'input' if part.args[records.MASK][0] else 'weight'}"


def _stand_in(node: fx.Node, candidates: tuple[Any, ...], source: fx.Node) -> fx.Node:
    """Something laid out as `source` that is resident, or read anyway."""
    value = source.meta["val"]
    covering = (c for c in candidates if _covers(c.meta["val"], value))
    other = next(covering, None) if source.op != "placeholder" else None
    if other is None:
        return source
    sizes, strides = list(value.shape), list(value.stride())
    view = node.graph.call_function(aten.as_strided.default, (other, sizes, strides))
    view.meta = {**node.meta, "val": other.meta["val"].as_strided(sizes, strides)}
    return view


def _covers(other: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a dense tensor's memory can be looked at in the shape and layout of `value`."""
    if other.dtype != value.dtype or other.device != value.device:
        return False
    return other.numel() == span(other) and other.numel() >= span(value)
