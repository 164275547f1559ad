"""Running one op by itself: on data that is made up, for its results, its workspace and its time."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from ._torch import FakeTensor, pytree
from .alias import device_of
from .device import kind_of
from .draws import drawing_privately
from .errors import Unsupported
from .fuse.normal_form import COPY, SCATTERS
from .memory import high_water, span
from .ops import OPAQUE_RESULTS, is_random, looks_at_values
from .tape import Tape, record
from .trace.strides import Made

aten = torch.ops.aten
REPEATS = 5
HEAP_BYTES = (32 << 20) - (1 << 16)
OTHERS_BYTES = 8 << 20
DRAWN = 1 << 13  # made-up numbers; further ones repeat them


def laid_out_as(told: Any, made: Any) -> Made | None:
    """The strides and dtype that a kernel gave its result, where it is a tensor of the shape told."""
    both = isinstance(told, torch.Tensor) and isinstance(made, torch.Tensor)
    return (tuple(made.stride()), made.dtype) if both and told.shape == made.shape else None


def memory_of_run(
    run: Callable[[], Any], device: torch.device, expected: Sequence[Any] | None
) -> tuple[int, Sequence[Any], Tape | None]:
    """Workspace, results and, where blocks are cached, the tape of an op."""
    if not kind_of(device).caches:
        return *high_water(run, device, expected), None
    tape, results = record(run, expected)
    return tape.workspace_bytes(kind_of(device).granule), results, tape


def check_shapes(node: fx.Node, results: Sequence[Any]) -> None:
    """What follows was traced for the shapes that the op's rule tells: a kernel that makes others is refused."""
    value = node.meta.get("val")
    traced = value if isinstance(value, (tuple, list)) else [value]
    for told, made in zip(traced, results, strict=False):
        known = isinstance(told, torch.Tensor) and isinstance(made, torch.Tensor) and told.is_floating_point()
        if known and told.shape != made.shape and not _is_opaque(node) and not looks_at_values(node):
            empty = "" if told.numel() else "Run the model once, if its first call gives a buffer its size. "
            raise Unsupported(
                f"op {node.target}", node.name,
                f"its shape rule says {tuple(told.shape)} where its kernel makes {tuple(made.shape)}",
                f"{empty}Reshape its input so that both agree (add a batch dimension), or, for an op of your own, "
                "correct its fake kernel (torch.library.register_fake).",
            )  # fmt: skip


def on_made_up(node: fx.Node, make_up: Callable[[Any], Any]) -> Callable[[], Any]:
    """The op on data that `make_up` gives, ready to run."""
    target: Any = node.target
    made: dict[fx.Node, Any] = {}
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: _materialize(n, made, make_up))
    for fit in (_even_groups, _even_lengths, _full_bags, _rows_apart, _as_many_picked, _whole_memory):
        args = fit(node, args)
    if not is_random(node):  # attention without dropout, which carries the tag all the same
        return partial(target, *args, **kwargs)
    return drawing_privately(target, args, kwargs, device_of(node))


def copied_memory(node: fx.Node) -> tuple[int, int]:
    """How many elements the memory has that an op copies as a whole, and where in it its first argument begins."""
    source: Any = node.args[0] if node.target is COPY or node.target in SCATTERS else None
    value = source.meta["val"] if source is not None else None
    return (value.untyped_storage().nbytes() // value.itemsize, value.storage_offset()) if value is not None else (0, 0)


def _whole_memory(node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A copy over a part of a tensor takes memory for the whole of it: made up, there would be the part alone."""
    count, offset = copied_memory(node)
    if not count or (count == span(args[0]) and not offset):
        return args
    flat = torch.zeros(count, dtype=args[0].dtype, device=args[0].device)
    return (flat.as_strided(args[0].shape, args[0].stride(), offset).copy_(args[0]), *args[1:])


def _full_bags(node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The gradient of maxima over bags copies what the bags that hold something get: made up, all would be empty."""
    if node.target is aten._embedding_bag_backward.default:
        args[_BAG_SIZES].fill_(1)
    return args


_BAG_SIZES = 4


def _rows_apart(node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The gradient of an embedding takes memory for each row that is looked up: made up, all would be the first."""
    if node.target is aten.embedding_dense_backward.default:
        args[1].copy_((torch.arange(args[1].numel(), device=args[1].device) % args[2]).reshape(args[1].shape))
    return args


def _as_many_picked(node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What masks and repeats pick is as long as it was traced: made up, all zero, they would pick nothing."""
    told: Any = node.meta.get("val")
    if node.target is aten.repeat_interleave.Tensor:
        args[0].view(-1)[:1] = told.numel()
    elif node.target is aten.nonzero.default:
        _pick(args[0], told.shape[0])
    elif node.target is aten.masked_select.default:
        _pick(args[1], told.numel() * args[1].numel() // max(1, torch.broadcast_tensors(*args[:2])[0].numel()))
    elif node.target in _INDEXED:
        picked, kept = told if node.target is aten.index.Tensor else args[2], _sizes_kept(args[0], args[1])
        for mask in filter(_is_mask, args[1]):
            _pick(mask, picked.numel() // max(1, math.prod(kept)))
    return args


_INDEXED = frozenset({
    aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._unsafe_index_put.default,
    aten._index_put_impl_.default,
})  # fmt: skip


def _sizes_kept(value: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> list[int]:
    """The sizes of the dimensions that no index takes."""
    sizes, dim = [], 0
    for index in indices:
        if index is None:
            sizes.append(value.shape[dim])
        dim += index.dim() if index is not None and _is_mask(index) else 1
    return [*sizes, *value.shape[dim:]]


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _pick(mask: torch.Tensor, count: int) -> None:
    """Let a made-up mask pick so many elements, the first ones."""
    mask.copy_((torch.arange(mask.numel(), device=mask.device) < count).reshape(mask.shape))


def _even_groups(node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A product of groups costs what its groups hold: made-up ends of groups, all zero, would leave them empty."""
    packet = getattr(node.target, "overloadpacket", None)
    if getattr(packet, "__name__", "") != "_grouped_mm" or len(args) < 3 or not isinstance(args[2], torch.Tensor):
        return args
    left, right, ends = args[:3]
    if left.dim() == 2:
        rows = left.shape[0] if right.dim() == 3 else left.shape[1]
    else:
        rows = right.shape[1]
    spread = torch.arange(1, ends.numel() + 1, device=ends.device) * rows // ends.numel()
    return (left, right, spread.to(ends.dtype), *args[3:])


def _even_lengths(node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """CTC over whole inputs, and targets that share what there is: made-up lengths, all zero, would find nothing."""
    firsts: dict[Any, int] = {aten._ctc_loss: 0, aten._ctc_loss_backward: 1}
    first = firsts.get(getattr(node.target, "overloadpacket", None))
    if first is None or not isinstance(args[first + 2], torch.Tensor):
        return args
    values, targets, inputs, lengths = args[first : first + 4]
    batch = lengths.numel()
    inputs.fill_(values.shape[0])
    if targets.dim() == 2:
        lengths.fill_(targets.shape[1])
    else:
        ends = torch.arange(batch + 1, device=lengths.device) * targets.numel() // batch
        lengths.copy_(ends.diff())
    return args


def _materialize(node: fx.Node, made: dict[fx.Node, Any], make_up: Callable[[Any], Any]) -> Any:
    """Data in the shape and layout of a node's value; the results of an opaque op are really computed."""
    if node not in made:
        if _is_opaque(node):
            target: Any = node.target
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: _materialize(n, made, make_up))
            made[node] = target(*args, **kwargs)
        elif node.target is operator.getitem and _is_opaque(node.args[0]):
            made[node] = _materialize(node.args[0], made, make_up)[node.args[1]]  # type: ignore[arg-type]
        else:
            made[node] = pytree.tree_map(make_up, node.meta["val"])
    return made[node]


def _is_opaque(node: Any) -> bool:
    packet = getattr(getattr(node, "target", None), "overloadpacket", None)
    return packet is not None and packet.__name__ in OPAQUE_RESULTS


def made_up(value: Any) -> Any:
    if not isinstance(value, (torch.Tensor, FakeTensor)):
        return value
    flat = torch.zeros(span(value), dtype=value.dtype, device=value.device)
    if value.is_floating_point() or value.is_complex():
        numbers = torch.view_as_real(flat).view(-1) if value.is_complex() else flat
        kind = torch.float32 if numbers.itemsize == 1 else numbers.dtype  # none is drawn of a byte
        drawn = torch.empty_like(numbers[:DRAWN], dtype=kind)
        numbers[:DRAWN] = drawn.uniform_(0.25, 0.75, generator=torch.Generator(value.device))
        filled = DRAWN
        while filled < numbers.numel():
            numbers[filled : 2 * filled] = numbers[: numbers.numel() - filled][:filled]
            filled *= 2
    made = flat.as_strided(value.shape, value.stride())
    made = made.conj() if value.is_conj() else made  # which a kernel that knows no conjugates copies first
    return aten._neg_view.default(made) if value.is_neg() else made


def identities(value: Any) -> Any:
    """Identity matrices and ones: what a factorization and its pivots may be."""
    if not isinstance(value, (torch.Tensor, FakeTensor)):
        return value
    made = made_up(value)
    if value.dim() < 2 or not (value.is_floating_point() or value.is_complex()):
        return made.fill_(1)
    made.zero_().diagonal(dim1=-2, dim2=-1).fill_(1)
    return made


def settle_heap() -> None:
    """Let the CPU's allocator keep what ops free, as it does in a step, whose live tensors lie above it.

    glibc gives memory at the end of the heap back to the system, so that an op run by itself would touch new pages each
    time, which can take longer than the op. How much it keeps grows with the largest block freed so far, up to 32 MiB.
    """
    torch.empty(HEAP_BYTES, dtype=torch.uint8)


def time_of(run: Callable[[], Any], device: torch.device) -> float:
    run()
    samples = []
    others = torch.empty(OTHERS_BYTES, dtype=torch.uint8, device=device)
    for _ in range(REPEATS):
        others.zero_()  # in a step, other ops have used the cache since
        kind_of(device).synchronize(device)
        start = time.perf_counter()
        run()
        kind_of(device).synchronize(device)
        samples.append(time.perf_counter() - start)
    return min(samples)  # whatever else the machine does can only add to it
