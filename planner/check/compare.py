"""What can be observed of one training step, and what differs between two."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from passes.trace.templates import Again, Constant, Opaque, Slot, Template, Tree, outline

ROUNDINGS = 1024
PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class Observed:
    """One training step from outside.

    Attributes:
        structure: how the output is built, with the tensors' places.
        outputs: the output's tensors by path; `requires_grad` and `memory` go with them: whether a gradient flows, and
            the first input or output in whose memory each is.
        gradients: by the name of the parameter or input; None where there is none.
        state: parameters, buffers and inputs after the step, None for what the step left alone.
        generators_before, generators: their states before and after the step, by name.
    """

    structure: Template
    outputs: dict[str, torch.Tensor]
    requires_grad: dict[str, bool]
    memory: dict[str, str]
    gradients: dict[str, torch.Tensor | None]
    state: dict[str, torch.Tensor | None]
    generators_before: dict[str, Any]
    generators: dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """One thing that differs.

    Attributes:
        step: counted from one.
        what: "the output .loss", "the gradient of head.weight", ...
        how: in words.
        kind: "structure", "output", "gradient", "state" or "generator".
        size: largest absolute difference, where two tensors differ in their numbers alone.
        rounding: whether it is as small as what the order of a sum changes.
    """

    step: int
    what: str
    how: str
    kind: str
    size: float | None = None
    rounding: bool = False

    def __str__(self) -> str:
        return f"{self.what} ({self.how})"


def differences(plain: Sequence[Observed], planned: Sequence[Observed]) -> list[Difference]:
    """What differs between the steps of two runs, in the order in which a step makes it."""
    return [d for i, (a, b) in enumerate(zip(plain, planned, strict=True)) for d in _step(i + 1, a, b)]


def _step(step: int, plain: Observed, planned: Observed) -> Iterator[Difference]:
    if how := _structure(plain.structure, planned.structure):
        yield Difference(step, "the output's structure", how, "structure")
        return
    for path, wanted in plain.requires_grad.items():
        if (given := planned.requires_grad[path]) != wanted:
            yield Difference(step, _output(path), f"requires_grad {given}, plain {wanted}", "structure")
    for path, place in plain.memory.items():
        if (given_place := planned.memory[path]) != place:
            yield Difference(step, _output(path), f"in the memory of {given_place}, plain {place}", "structure")
    yield from _tensors(step, "output", plain.outputs, planned.outputs, _output, strides=True)
    yield from _tensors(step, "gradient", plain.gradients, planned.gradients, "the gradient of {}".format)
    yield from _tensors(step, "state", plain.state, planned.state, "{} after the step".format)
    for name, state in plain.generators.items():
        # One of Python's or NumPy's that forward brings into a state of its own is left alone: a warning says so.
        untouched = name in OURS_TO_LEAVE and _equal(planned.generators_before[name], planned.generators[name])
        if not untouched and not _equal(state, planned.generators[name]):
            yield Difference(step, f"the state of {name} after the step", "other draws", "generator")


OURS_TO_LEAVE = ("Python's random", "NumPy's random")


def _output(path: str) -> str:
    return f"the output {path}" if path else "the output"


def _tensors(
    step: int, kind: str, plain: Mapping[str, Any], planned: Mapping[str, Any], name: Any, *, strides: bool = False
) -> Iterator[Difference]:
    for key, a in plain.items():
        how, size = _tensor(a, planned[key], strides, "unchanged" if kind == "state" else "None")
        if how:
            yield Difference(step, name(key), how, kind, size, size is not None and _is_rounding(size, a))


def _tensor(a: torch.Tensor | None, b: torch.Tensor | None, strides: bool, nothing: str) -> tuple[str, float | None]:
    if a is None or b is None:
        how = {(True, False): f"changed, plain {nothing}", (False, True): f"{nothing}, not in the plain step"}
        return how.get((a is None, b is None), ""), None
    for aspect in ("dtype", "shape", "device"):
        if getattr(a, aspect) != getattr(b, aspect):
            return f"{aspect} {getattr(b, aspect)}, plain {getattr(a, aspect)}", None
    if wrong := unequal(a, b):
        size = float((a.to(_wide(a)) - b.to(_wide(b))).abs().nan_to_num(0.0).max())
        return f"{wrong} of {a.numel()} elements, by at most {size:.3g}", size
    if strides and not _same_layout(a, b):
        return f"strides {b.stride()}, plain {a.stride()}", None
    return "", None


def _is_rounding(size: float, a: torch.Tensor) -> bool:
    if not (a.is_floating_point() or a.is_complex()):
        return False
    share = min(ROUNDINGS * torch.finfo(a.dtype).eps, 1 / 64)
    return size <= share * float(a.to(_wide(a)).abs().nan_to_num(0.0).max())


def _wide(t: torch.Tensor) -> torch.dtype:
    return torch.complex128 if t.is_complex() else torch.float64


def unequal(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many elements differ in any bit; a NaN equals a NaN."""
    if not a.numel():
        return 0
    bits_a, bits_b = _bits(a), _bits(b)
    if torch.equal(bits_a, bits_b):
        return 0
    other = (bits_a != bits_b).any(-1)
    if a.is_floating_point() or a.is_complex():
        other &= ~(a.isnan() & b.isnan()).reshape(-1)
    return int(other.sum())


def _bits(t: torch.Tensor) -> torch.Tensor:
    flat = t.detach().to_dense().resolve_conj().resolve_neg().contiguous().reshape(-1)
    flat = flat.clone(memory_format=torch.contiguous_format) if len(flat) == 1 else flat  # one may have any stride
    return flat.view(torch.uint8).reshape(t.numel(), -1)


def _same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    steps = zip(a.shape, a.stride(), b.stride(), strict=True)
    return not a.numel() or all(size == 1 or one == other for size, one, other in steps)


def _equal(a: Any, b: Any) -> bool:
    """Whether two generator states are equal: tensors, tuples and arrays in tuples."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool((a == b).all()) if hasattr(a, "all") else bool(a == b)


# Structure ------------------------------------------------------------------------------------------------------------


def _structure(plain: Template, planned: Template) -> str:
    """The first difference in how two outputs are built; "" where there is none."""
    match plain, planned:
        case Slot(a), Slot(b):
            return "" if a == b else "tensors in other places"
        case Again(a), Again(b) if a == b:
            return ""
        case Constant(a), Constant(b):
            return "" if _same_value(a, b) else f"{b!r:.60}, plain {a!r:.60}"
        case Tree(a, ours, own), Tree(b, theirs, others) if _same_container(a, b) and len(ours) == len(theirs):
            return next(filter(None, map(_structure, ours, theirs)), "") or _attributes(own, others)
        case Opaque(a, ours), Opaque(b, theirs) if _same_class(type(a), type(b)):
            return _opaque(a, b) or _attributes(ours, theirs)
    return f"{_shown(planned)}, plain {_shown(plain)}"


def _attributes(plain: tuple[tuple[str, Template], ...], planned: tuple[tuple[str, Template], ...]) -> str:
    own, others = dict(plain), dict(planned)
    odd = next((f"another .{name}" for name in (own.keys() ^ others.keys())), "")
    return odd or next(filter(None, (_structure(own[name], others[name]) for name in own)), "")


def _same_container(a: Any, b: Any) -> bool:
    if a == b:
        return True
    return isinstance(a.context, type) and isinstance(b.context, type) and _same_class(a.context, b.context)


def _same_class(a: type, b: type) -> bool:
    """Whether two classes are one; a definition within forward (of a named tuple) makes another at each call."""
    return a is b or all(
        getattr(a, name, None) == getattr(b, name, None) for name in ("__module__", "__qualname__", "_fields")
    )


def _opaque(a: Any, b: Any) -> str:
    mine, other = getattr(a, "__dict__", {}), getattr(b, "__dict__", {})
    names = [k for k in dict.fromkeys([*mine, *other]) if not _same_value(mine.get(k), other.get(k))]
    return f"another .{names[0]} of the {type(a).__name__}" if names else ""


def _same_value(a: Any, b: Any) -> bool:
    """Whether two values that are not tensors agree; of what Python cannot compare by value, only the type counts."""
    if not _same_class(type(a), type(b)):
        return False
    return not isinstance(a, PLAIN_TYPES) or a == b or (a != a and b != b)


def _shown(template: Template) -> str:
    places = [f"{path or 'itself'}: {text}" for path, text in outline(template).items()]
    return f"[{', '.join(places[:4])}{', ...' if len(places) > 4 else ''}]"
