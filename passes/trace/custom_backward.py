"""What hooks and custom autograd functions use of the model in the backward: adjoints, reversible blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from passes._torch import swapped_state
from passes.run._torch import backward_number

from ..errors import StateChanged, Unsupported
from .arguments import StateEntry
from .notice import Left
from .settings import Setting


@contextmanager
def used_in_backward(
    model: nn.Module, entries: Sequence[StateEntry], traced: Sequence[torch.Tensor], own: Sequence[torch.Tensor],
    assigned: Mapping[str, torch.Tensor],
) -> Iterator[list[int]]:  # fmt: skip
    """Let them find the traced parameters and buffers in the model's modules, as forward does, and not its own ones.

    Yields a list that holds at the end which of the parameters they differentiate by themselves.

    Args:
        assigned: what forward has put in the place of buffers, by name.
    """
    state = dict(enumerate(traced[: len(entries)]))
    backwards: list[tuple[int, int]] = []  # in which ones there are gradients of which parameters

    def note(number: int, _: torch.Tensor) -> None:
        backwards.append((backward_number(), number))

    handles = [t.register_hook(partial(note, i)) for i, t in state.items() if t.requires_grad]
    within: list[int] = []
    with swapped_state(model, {entries[i].name: t for i, t in state.items()} | dict(assigned)):
        yield within
    for handle in handles:
        handle.remove()
    whole = min(backwards, default=(0, 0))[0]  # begins before those within it
    within += sorted({i for backward, i in backwards if backward != whole})
    for i, tensor in state.items():
        if tensor.is_leaf and tensor.grad is not None:
            raise Unsupported(
                "backward() within the backward of a custom autograd function", entries[i].name,
                "the gradient that it accumulates would be lost",
                "Compute it by torch.autograd.grad there, and return it as the gradient of an argument.",
            )  # fmt: skip
        if i in within and own[i]._backward_hooks:
            raise Unsupported(
                "hook of a parameter by which the backward of a custom autograd function differentiates",
                entries[i].name, "the plain step calls it there, too, and a planned step does not",
                "Use a hook after accumulation (register_post_accumulate_grad_hook).",
            )  # fmt: skip


def refuse_left_for_backward(
    found: Sequence[Left], settings: Sequence[Setting], carried: Sequence[str], late: frozenset[str]
) -> None:
    """Refuse what each forward sets, and the Python of the backward reads (`late`): a tensor, or what no step sets.

    Of two calls before one backward, eager reads what the second has left.
    """
    done = {str(setting) for setting in settings}
    unset = [left.path for left in found if not left.is_kept and left.path not in done]
    tensors = [str(setting) for setting in settings if setting.template is not None]
    for path in (*unset, *tensors, *(f"self.{path}" for path in carried)):
        if path.partition("[")[0] in late:
            raise StateChanged(
                "state that forward changes and the backward reads", path, "a planned step reads what it was in the "
                "forward", "Register it as a buffer, or hand it to the backward by the function's ctx, or a closure.",
            )  # fmt: skip
