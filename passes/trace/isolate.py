"""Tracing leaves the model as it was: flags, generators and attributes; what forward changed is said or refused."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .._torch import private_generator
from ..errors import CaptureError, Unsupported


@contextlib.contextmanager
def isolated(model: nn.Module) -> Iterator[None]:
    """Trace in training mode with gradients on, and leave flags, RNG and attributes as they were."""
    before = [_Attributes(m) for m in model.modules()]
    devices = sorted({t.device.index or 0 for t in model.parameters() if t.device.type == "cuda"})
    try:
        if not model.training:
            model.train()
        with private_generator(), torch.random.fork_rng(devices=devices), torch.enable_grad():
            yield
        _check_attributes(model, before)
    except CaptureError as error:
        _check_tensors(model, before, error)
        raise
    finally:
        for attributes in before:
            attributes.restore()


class _Attributes:
    """What a module's `__dict__` held, one level deep, and the data of plain tensors in it."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.attributes = module, dict(module.__dict__)
        self.containers = {k: copy.copy(v) for k, v in self.attributes.items() if type(v) in CONTAINERS}
        plain = [v for v in self.attributes.values() if type(v) is torch.Tensor]
        self.tensors = [(t, t._version, t.detach().clone()) for t in plain]

    def changed_tensors(self) -> list[str]:
        changed = {id(t) for t, version, _ in self.tensors if t._version != version}
        return [name for name, value in self.attributes.items() if id(value) in changed]

    def left_behind(self) -> list[str]:
        """Attributes that the forward set, or lists that it appended to: the planned step will not."""
        now = self.module.__dict__
        new = [k for k, v in now.items() if k != "training" and not _same(v, self.attributes.get(k, now))]
        if isinstance(self.module, nn.RNNBase):  # its own list of its weights
            new = [k for k in new if not k.startswith("_flat_weight")]
        grown = [k for k, v in self.containers.items() if k not in _OF_MODULE and len(v) != len(now.get(k, v))]
        return list(dict.fromkeys(new + grown))

    def restore(self) -> None:
        refill(self.module.__dict__, self.attributes)
        for name, content in self.containers.items():
            refill(self.attributes[name], content)
        for tensor, version, data in self.tensors:
            if tensor._version != version:
                tensor.detach().copy_(data)


CONTAINERS = (dict, OrderedDict, list, set)

_OF_MODULE = frozenset(nn.Module().__dict__)


def refill(container: Any, content: Any) -> None:
    """Give a container its content back; at no moment, not even for an interrupt, is what it held and holds missing."""
    if isinstance(container, list):
        container[:] = content
        return
    container.update(content)
    for extra in [k for k in container if k not in content]:
        container.remove(extra) if isinstance(container, set) else container.pop(extra)
    if isinstance(container, dict) and list(container) != list(content):
        for key in content:
            container[key] = container.pop(key)


def _same(now: Any, before: Any) -> bool:
    return now is before or (type(now) is type(before) and isinstance(now, (int, float, str)) and now == before)


def _check_tensors(model: nn.Module, before: list[_Attributes], error: CaptureError | None) -> None:
    """A plain tensor on a module is a constant of the plan; one that the forward changes is state, so a buffer."""
    for path, attributes in zip(_prefixes(model), before, strict=False):
        for name in attributes.changed_tensors():
            raise Unsupported(
                "in-place change of a tensor that is no buffer", f"self.{path}{name}",
                "a plan would take it as constant",
                "Register it: self.register_buffer(name, tensor, persistent=False).",
            ) from error  # fmt: skip


def _prefixes(model: nn.Module) -> list[str]:
    return [f"{name}." if name else "" for name, _ in model.named_modules()]


def _check_attributes(model: nn.Module, before: list[_Attributes]) -> None:
    """What the forward leaves on the modules besides buffers is not part of a plan: refused, or at least said."""
    _check_tensors(model, before, None)
    for path, attributes in zip(_prefixes(model), before, strict=False):
        for name in attributes.left_behind():
            warnings.warn(
                f"forward sets self.{path}{name}; the planned step computes the outputs and gradients alone and will "
                "not set it. Return it from forward, or register it as a buffer, if it is read elsewhere.",
                stacklevel=2,
            )
