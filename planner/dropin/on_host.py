"""A replay of the plain forward takes little of the device's memory, where that is what runs out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch

from passes._torch import forget_cublas_workspaces
from passes.device import kind_of
from passes.memory import span
from passes.run._torch import own_part
from passes.run.tensors import memory_of

ALIGNMENT = 512  # bytes: where the caching allocator lets a block begin


class _Waiting(NamedTuple):
    """A saved tensor: its memory in the host's, and how it lay there, as kernels may look at that."""

    memory: torch.Tensor
    device: torch.device
    shape: torch.Size
    stride: tuple[int, ...]
    lead: int


def saved_on_host(device: torch.device, resident: Iterable[torch.Tensor]) -> AbstractContextManager[object]:
    """Let what autograd saves in the block wait in the host's memory until the backward reads it; bits are the same.

    As `torch.autograd.graph.save_on_cpu`, save that a tensor comes back in the strides and at the alignment that it
    had. Nothing changes on the CPU itself, or while a CUDA graph is captured.

    Args:
        resident: tensors that stay anyway: parameters, buffers, inputs.
    """
    if not _runs_out(device):
        return nullcontext()
    return moved_to_host({memory_of(own_part(t)) for t in resident})


def _runs_out(device: torch.device) -> bool:
    return kind_of(device).caches and not torch.cuda.is_current_stream_capturing()


@contextmanager
def workspaces_given_back(device: torch.device) -> Iterator[None]:
    """Give cuBLAS's workspaces back before and after the block, which runs the forward's products in the backward's
    thread: those that it would keep for them there are in no prediction. The next products ask for theirs again.
    """
    if not _runs_out(device):
        yield
        return
    forget_cublas_workspaces()
    try:
        yield
    finally:
        forget_cublas_workspaces()


def moved_to_host(resident: set[int]) -> torch.autograd.graph.saved_tensors_hooks:
    """`saved_on_host` from any device; the memory that stays is told by where it begins."""

    def pack(tensor: torch.Tensor) -> torch.Tensor | _Waiting:
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_quantized
        if not plain or tensor.is_conj() or tensor.is_neg() or not tensor.numel() or memory_of(tensor) in resident:
            return tensor
        memory = tensor.as_strided((span(tensor),), (1,)).to("cpu", copy=True)
        lead = tensor.data_ptr() % ALIGNMENT // tensor.element_size()
        return _Waiting(memory, tensor.device, tensor.shape, tensor.stride(), lead)

    def unpack(saved: torch.Tensor | _Waiting) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        count, dtype = saved.lead + saved.memory.numel(), saved.memory.dtype
        back = torch.empty(count, dtype=dtype, device=saved.device)
        back[saved.lead :].copy_(saved.memory)
        return back.as_strided(saved.shape, saved.stride, saved.lead)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
